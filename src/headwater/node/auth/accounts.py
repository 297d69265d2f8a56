"""The users of a running node: those in its file, and those as which the nodes of a cluster log in.

The node loads `Accounts` when it starts, and HTTP handlers change them. The users for nodes are created from a
cluster's config and kept in memory only: they are never in the file, and can't be changed. A change of the others is on
disk before it is in force. Changes are made one at a time and in a thread, because a password takes long to hash, by
design, and a disk may take long to write.

The file is one versioned JSON document, readable by its owner only:

    {"version": 3, "iterations": 15000, "decoy_secret": BASE64, "sharing": HEX, "clusters": [UUID, …],
     "removed": {"user bob": MS, …},
     "groups": [{"name": "lake", "description": "", "grants": […], "changed": MS}, …],
     "users": [{"name": "ann", "display_name": "Ann", "grants": [{"role": "writer", "bucket": "*", "scope": "*",
       "collection": "*"}], "groups": ["lake"], "changed": MS, "password_changed": MS,
       "credentials": {"SCRAM-SHA512": {"salt": …, "stored_key": …, "server_key": BASE64}, …}}, …]}

It has no passwords, but with the keys an attacker can try out passwords as fast as a machine allows, so others must not
read it. The file is replaced as a whole: a reader always finds either the old users or the new ones. `node_folder`
reads and writes the file, and the nodes of a cluster send each other its contents.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headwater.durable_files import replace_file
from headwater.errors import DataDamaged, DataTooNew, LocalProtocolError, MalformedJson, StoreError, StoreFull
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.users import (
    ALL,
    ALL_BUCKETS,
    DECOY_SECRET_BYTES,
    SALTS_BYTES,
    Grant,
    Group,
    Role,
    User,
    Users,
    newest_removed,
)
from headwater.protocol import sasl
from headwater.protocol.cluster_config import nodes_user

VERSION = 3
USER_FILE_BYTES_MAX = 64 * 1024 * 1024
"""More than users and grants within their limits need in practice."""

_OTHERS = 0o077
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


# --- storing ------------------------------------------------------------------------------------------------------


def store_users(path: Path, users: Users) -> None:
    """Replace the file. It is durable when this returns. If this raises a `StoreError`, the old file is unchanged."""
    text = encode_users(users) + b"\n"
    try:
        replace_file(path, text, is_private=True)
    except OSError as error:
        kind = StoreFull if error.errno in _NO_ROOM else StoreError
        raise kind(
            f"the user file {path} cannot be written: {error.strerror}",
            hint="Check the folder's permissions and free space; the users are as they were",
        ) from error


def encode_users(users: Users) -> bytes:
    """Encode the users as ASCII JSON, one line per user. Equal users always give the same bytes."""
    members = {
        "version": VERSION,
        "iterations": users.iterations,
        "decoy_secret": _encode_bytes(users.decoy_secret),
        "sharing": users.sharing,
        "clusters": sorted(users.clusters),
        "removed": dict(sorted(users.removed.items())),
    }
    # With an indent, `json` takes ten times as long: its C code writes the compact form only.
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members.items()]
    groups = [_encode_group(group) for _, group in sorted(users.groups.items())]
    known = [_encode_user(user) for _, user in sorted(users.by_name.items())]
    for name, entries in (("groups", groups), ("users", known)):
        lines.append(f'"{name}": [{",".join(f"{chr(10)}  {json.dumps(entry)}" for entry in entries)}]')
    return "{{{}}}".format(",\n ".join(lines)).encode()


def _encode_group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "description": group.description,
        "grants": _encode_grants(group.grants),
        "changed": group.changed_ms,
    }


def _encode_grants(grants: frozenset[Grant]) -> list[dict[str, str]]:
    return [asdict(grant) for grant in sorted(grants, key=astuple)]


def _encode_user(user: User) -> dict[str, Any]:
    return {
        "name": user.name,
        "display_name": user.display_name,
        "grants": _encode_grants(user.grants),
        "groups": sorted(user.groups),
        "changed": user.changed_ms,
        "password_changed": user.password_changed_ms,
        "credentials": {
            mechanism: {
                "salt": _encode_bytes(credentials.salt),
                "stored_key": _encode_bytes(credentials.stored_key),
                "server_key": _encode_bytes(credentials.server_key),
            }
            for mechanism, credentials in sorted(user.credentials.items())
        },
    }


def _encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- loading ------------------------------------------------------------------------------------------------------


def load_users(path: Path) -> Users | None:
    """The users in the file, or None if there is no file.

    Raises a `StoreError` for every fault: `DataTooNew` for a newer version, `DataDamaged` if it is not a user file.
    """
    try:
        text = _read_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"the user file {path} cannot be read: {error.strerror}",
            hint="Check that it belongs to the user who runs the node",
        ) from error
    try:
        return decode_users(text)
    except DataTooNew as error:
        raise error.reworded(f"the user file {path} {error.reason}") from error
    except MalformedJson as error:
        raise DataDamaged(
            f"the user file {path} is damaged: {error.reason}",
            hint="Restore it from a backup, or remove it and add the users again",
        ) from error


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        # Check the open file, not the path, which could name another file by now.
        status = os.fstat(file.fileno())
        if status.st_mode & _OTHERS:
            raise StoreError(
                f"the user file {path} is open to others, with mode {stat.S_IMODE(status.st_mode):04o}",
                hint=f"Run chmod 600 {path}, and change the passwords if others may have read it",
            )
        if status.st_size > USER_FILE_BYTES_MAX:
            raise StoreError(
                f"the user file {path} has more than {USER_FILE_BYTES_MAX} bytes", hint="Check that it is the right one"
            )
        return file.read()


class _Fault(Exception):
    """A fault in the text. `decode_users` raises it as a `MalformedJson`."""


def decode_users(text: bytes) -> Users:
    """Decode what `encode_users` has written. Raises `DataTooNew` for a newer version, `MalformedJson` for a fault."""
    try:
        return _decode(text)
    except (_Fault, LocalProtocolError) as error:
        raise MalformedJson(str(error)) from error


def _decode(text: bytes) -> Users:
    try:
        top = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Fault("it is not JSON") from error
    version = _member(top, "version", int)
    if version > VERSION:
        raise DataTooNew(
            f"has version {version}, and this program supports versions up to {VERSION}",
            hint="Use the version of Headwater that wrote it, or a newer one",
        )
    if version != VERSION:
        raise _Fault(f"there is no version {version}")
    iterations = _member(top, "iterations", int)
    users = [_decode_user(user, iterations) for user in _member(top, "users", list)]
    groups = [_decode_group(group) for group in _member(top, "groups", list)]
    if len({user.name for user in users}) != len(users) or len({group.name for group in groups}) != len(groups):
        raise _Fault("a user or a group is there twice")
    removed = _member(top, "removed", dict)
    return Users(
        iterations=iterations,
        decoy_secret=_bytes_member(top, "decoy_secret"),
        by_name={user.name: user for user in users},
        groups={group.name: group for group in groups},
        removed={entry: _member(removed, entry, int) for entry in removed},
        sharing=_member(top, "sharing", str),
        clusters=_names_member(top, "clusters"),
    )


def _decode_group(members: object) -> Group:
    return Group(
        name=_member(members, "name", str),
        description=_member(members, "description", str),
        grants=frozenset(_decode_grant(grant) for grant in _member(members, "grants", list)),
        changed_ms=_member(members, "changed", int),
    )


def _decode_user(members: object, iterations: int) -> User:
    name, all_credentials = _member(members, "name", str), _member(members, "credentials", dict)
    return User(
        name=name,
        display_name=_member(members, "display_name", str),
        grants=frozenset(_decode_grant(grant) for grant in _member(members, "grants", list)),
        groups=_names_member(members, "groups"),
        changed_ms=_member(members, "changed", int),
        password_changed_ms=_member(members, "password_changed", int),
        credentials={
            mechanism: _decode_credentials(mechanism, _member(all_credentials, mechanism, dict), iterations)
            for mechanism in sasl.SCRAM_MECHANISMS
        },
    )


def _decode_grant(members: object) -> Grant:
    role, bucket, scope, collection = (
        _member(members, name, str) for name in ("role", "bucket", "scope", "collection")
    )
    if role not in tuple(Role):
        raise _Fault(f"there is no role {role!r}")
    if scope == ALL != collection:
        raise _Fault("a grant is on a collection of no scope")
    return Grant(Role(role), bucket, scope, collection)


def _decode_credentials(
    mechanism: sasl.Mechanism, members: Mapping[str, object], iterations: int
) -> sasl.ScramCredentials:
    salt = _bytes_member(members, "salt")
    stored_key, server_key = _bytes_member(members, "stored_key"), _bytes_member(members, "server_key")
    if len(salt) != sasl.SCRAM_SALT_BYTES or {len(stored_key), len(server_key)} != {sasl.digest_bytes(mechanism)}:
        raise _Fault(f"credentials for {mechanism} have the wrong length")
    return sasl.ScramCredentials(salt=salt, iterations=iterations, stored_key=stored_key, server_key=server_key)


def _member(members: object, name: str, kind: type[T]) -> T:
    value = members.get(name) if isinstance(members, dict) else None
    # In Python a bool is an int, but in JSON true is no number.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Fault(f"{name} is missing or of the wrong type")
    return value


def _names_member(members: object, name: str) -> frozenset[str]:
    names = _member(members, name, list)
    if not all(isinstance(one, str) for one in names):
        raise _Fault(f"{name} is no list of names")
    return frozenset(names)


def _bytes_member(members: object, name: str) -> bytes:
    try:
        return base64.b64decode(_member(members, name, str), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Fault(f"{name} is not base64") from error


# --- generated passwords ------------------------------------------------------------------------------------------

PASSWORD_RANDOM_BYTES = 15
"""120 bits: 24 characters of five bits each."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: without i, l and o, which look like digits, and without u, to avoid words."""

_GROUP_CHARS = 6


def readable_password(random: bytes) -> str:
    """Make a password such as `8h2k4q-0c9xwd-…`, four groups of six characters, from random bytes.

    It is for the first user if none was given: easy to read out and to copy, and impossible to guess.
    """
    if len(random) != PASSWORD_RANDOM_BYTES:
        raise LocalProtocolError(f"a generated password needs {PASSWORD_RANDOM_BYTES} random bytes")
    number = int.from_bytes(random)
    characters = [_ALPHABET[number >> shift & 31] for shift in reversed(range(0, PASSWORD_RANDOM_BYTES * 8, 5))]
    groups = ("".join(characters[at : at + _GROUP_CHARS]) for at in range(0, len(characters), _GROUP_CHARS))
    return "-".join(groups)


# --- the users of a running node --------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

ADMIN = "Administrator"
"""The first user, if no name was given."""

Change = Callable[[Users], Users]


class UserFolder(Protocol):
    """Storage for users, and for the generated password of the first one."""

    def load_users(self) -> Users | None: ...

    def store_users(self, users: Users) -> None: ...

    def store_password(self, password: str) -> None: ...

    def forget_password(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedUsers:
    """The users as other nodes receive them. A thread encodes them with each change: thousands take a while."""

    text: str
    digest: str

    @classmethod
    def of(cls, users: Users) -> SharedUsers:
        text = encode_users(replace(users, clusters=frozenset()))
        return cls(text.decode(), hashlib.sha256(text).hexdigest())


class Accounts:
    """The users of one node. Call `load`, then `store`."""

    def __init__(
        self,
        folder: UserFolder,
        *,
        random_bytes: Callable[[int], bytes],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._folder = folder
        self._random_bytes = random_bytes
        self._now_ns = now_ns
        self._stored: Users
        self.shared: SharedUsers
        self._is_on_disk = False
        self._nodes: dict[str, User] = {}
        """The users as which other nodes log in, by name."""
        self._one_at_a_time = asyncio.Lock()
        self.on_change: Callable[[Users], None] = lambda users: None
        """Called with the new users in force after each change."""

    @property
    def stored(self) -> Users:
        """The users in the file, which are shared with other nodes."""
        return self._stored

    @property
    def in_force(self) -> Users:
        return replace(self._stored, by_name={**self._stored.by_name, **self._nodes}) if self._nodes else self._stored

    # --- starting -------------------------------------------------------------------------------------------------

    def load(self, name: str | None, password: str | None, *, first_only: bool = False) -> str | None:
        """Load the users, and make user `name` an admin with this password. With no file and no name, create `ADMIN`.

        With `first_only`, create the named user only if there are no users, and otherwise change nothing. Returns the
        password that was generated for `ADMIN`, if any. Stores nothing yet.
        """
        loaded, generated = self._folder.load_users(), None
        users = loaded or Users(decoy_secret=self._random_bytes(DECOY_SECRET_BYTES))
        if loaded is None and name is None:
            name, password = ADMIN, readable_password(self._random_bytes(PASSWORD_RANDOM_BYTES))
            generated = password
        if name is not None and password is not None:
            if first_only and users.by_name:
                _warn_of_unused(users, name, password, source="HEADWATER_USER")
            else:
                users = self._with_admin(users, name, password).stamped(users, now_ms=self._now_ms())
        self._stored, self.shared = users, SharedUsers.of(users)
        # A start that changes nothing writes nothing, so that it needs no room on the disk.
        self._is_on_disk = users == loaded
        return generated

    def _with_admin(self, users: Users, name: str, password: str) -> Users:
        known = users.by_name.get(name)
        if known is None:
            return users.put(self._new_admin(users, name, password))
        if users.clusters:
            # All nodes share these users: a node that starts, maybe with an old password, must not change them.
            _warn_of_unused(users, name, password, source="--user")
            return users
        changes, changed = [], known
        if not users.is_admin(name):
            changes.append("is an admin now")
            changed = replace(changed, grants=frozenset({Grant(Role.ADMIN)}))
        if not users.check_password(name, password):
            changes.append("has a new password")
            changed = replace(changed, credentials=self._new_admin(users, name, password).credentials)
        if changes:
            about = fields(event=LogEvent.USERS_CHANGED, changed_user=name)
            logger.warning("by --user and --password, user %s %s", name, " and ".join(changes), extra=about)
        return users.put(changed)

    def store(self, generated: str | None) -> None:
        """Store what `load` has created, including the generated password."""
        if generated is not None:
            self._folder.store_password(generated)
        if not self._is_on_disk:
            self._folder.store_users(self._stored)

    # --- while the node runs --------------------------------------------------------------------------------------

    def let_nodes_in(self, bucket: str, login: sasl.Credentials | None) -> None:
        """Let the other nodes of a bucket's cluster log in with these credentials only; with None, let none log in."""
        name = nodes_user(bucket)
        self._nodes.pop(name, None)
        # Remove the old user first: connections of nodes that have left must not continue as the new one.
        self.on_change(self.in_force)
        if login is not None:
            self._nodes[name] = self._new_admin(self._stored, name, login.password, bucket)
            self.on_change(self.in_force)

    def is_node(self, name: str) -> bool:
        """Whether other nodes log in as this user. Such a user can't be changed."""
        return name in self._nodes

    async def change(self, change: Change, *, is_own: bool = True) -> None:
        """Apply `change` to the stored users. The result is durable and in force when this returns.

        `change` is called in a thread, because it may take long, and this raises what it raises. After a `StoreError`
        the users are unchanged. With `is_own` false, the change is from another node and keeps its times of change.
        """
        async with self._one_at_a_time:
            self._stored, self.shared = await asyncio.to_thread(self._store_changed, change, is_own=is_own)
            self.on_change(self.in_force)

    def _store_changed(self, change: Change, *, is_own: bool) -> tuple[Users, SharedUsers]:
        users = change(self._stored)
        if is_own:
            users = users.stamped(self._stored, now_ms=self._now_ms())
        if users == self._stored:
            return self._stored, self.shared
        if not users.has_admin:
            raise LocalProtocolError(
                "the node would have no admin left", hint="Give another user the role admin on this node first"
            )
        self._folder.store_users(users)
        before, after = self._stored.by_name.get(ADMIN), users.by_name.get(ADMIN)
        if before is not None and (after is None or after.credentials != before.credentials):
            # The data folder has the first password of this user, which is wrong from now on.
            self._folder.forget_password()
        return users, SharedUsers.of(users)

    def _now_ms(self) -> int:
        return self._now_ns() // 1_000_000

    def _new_admin(self, users: Users, name: str, password: str, bucket: str = ALL_BUCKETS) -> User:
        return users.new_user(name, password, [Grant(Role.ADMIN, bucket)], salts=self._random_bytes(SALTS_BYTES))


def _warn_of_unused(users: Users, name: str, password: str, *, source: str) -> None:
    """Warn that a given user and password change nothing. Clients read the same variables, so they may be for these."""
    if users.check_password(name, password):
        return
    what = "has another password on this node" if name in users.by_name else "is no user of this node"
    hint = "give --user and --password to make it an admin"
    if users.clusters:
        hint = "the nodes of the cluster have their users in common; change them with `headwater users`"
    logger.warning(
        "%s names %s, who %s: nothing is changed; %s",
        *(source, name, what, hint),
        extra=fields(event=LogEvent.LOGIN_UNUSED, user=name),
    )


# --- sharing users with other nodes --------------------------------------------------------------------------------
# Every user and group has the time of its last change, and a removed one the time of its removal. Two nodes that
# compare users take the later version of each, so all nodes end with the same users, in whatever order they receive
# changes and even if some were away. A change needs no other node to be reachable, and no node decides for the others.
# Times are those of the node that makes the change, but later than all changes that it knows of (`Users.stamped`).
#
# A node that joins a cluster replaces its users by those of the cluster, as in Couchbase. So shared users have an id,
# `Users.sharing`, which the first node of the cluster draws; and each node stores in which clusters it shares its users
# (`Users.clusters`). If a cluster is not among them, the node has just joined it, and
#
#     it is the first node                its users become those of the cluster
#     another node shares the same users  both are merged: the node has joined with one more bucket
#     another node shares other users     these replace its own
#
# A node that was left out of a cluster forgets it, and joins when it is added again. `replication.peers` sends the
# requests.


_NAME_BYTES = 16
_PIECE_CHARS = 1024 * 1024
"""How much of its users a node sends in one statistic."""

_Entry = tuple[int, User | Group | None]
"""When a user or group was changed or removed, and its version; None if it was removed."""


class UserSharing:
    """Shares a node's users with the other nodes of its clusters."""

    def __init__(self, accounts: Accounts, *, random_bytes: Callable[[int], bytes]) -> None:
        self._accounts = accounts
        self._random_bytes = random_bytes

    # --- sending --------------------------------------------------------------------------------------------------

    def is_shared_in(self, cluster: str) -> bool:
        return cluster in self._accounts.stored.clusters

    def digest(self, cluster: str) -> str:
        """A digest that is equal on nodes of a cluster with the same users; empty if this node has just joined."""
        return self._accounts.shared.digest if self.is_shared_in(cluster) else ""

    def pieces(self, cluster: str) -> Iterator[tuple[str, str]]:
        """The users in pieces for `take` of another node; none if this node has just joined."""
        if self.is_shared_in(cluster):
            text = self._accounts.shared.text
            for at in range(0, len(text), _PIECE_CHARS):
                yield str(at), text[at : at + _PIECE_CHARS]

    # --- receiving ------------------------------------------------------------------------------------------------

    async def begin(self, cluster: str) -> None:
        """This node is the first of a cluster: make its users those of the cluster."""
        name = self._random_bytes(_NAME_BYTES).hex()
        await self._accounts.change(
            lambda users: replace(users, sharing=users.sharing or name, clusters=users.clusters | {cluster}),
            is_own=False,
        )

    async def leave(self, cluster: str) -> None:
        """This node was left out of a cluster: keep the users, but share them no longer."""
        await self._accounts.change(lambda users: replace(users, clusters=users.clusters - {cluster}), is_own=False)

    async def take(self, cluster: str, pieces: dict[str, str]) -> None:
        """Merge the users of another node, or replace ours. Raises `MalformedJson`, or `StoreError` if not stored."""
        text = "".join(pieces.values()).encode()
        if not text or len(text) > USER_FILE_BYTES_MAX:
            return

        def change(ours: Users) -> Users:
            theirs = decode_users(text)
            if ours.sharing == theirs.sharing:
                return replace(merged(ours, theirs), clusters=ours.clusters | {cluster})
            if cluster in ours.clusters:
                # The node is in two clusters that have different users. Only the operator can resolve that.
                return ours
            _log_given_up(ours, theirs)
            return replace(theirs, clusters=ours.clusters | {cluster})

        await self._accounts.change(change, is_own=False)


def _log_given_up(ours: Users, theirs: Users) -> None:
    gone = sorted(ours.by_name.keys() - theirs.by_name.keys())
    logger.log(
        logging.WARNING if gone else logging.INFO,
        "the users are those of the cluster from now on%s",
        f"; {', '.join(gone)} were on this node alone and are gone" if gone else "",
        extra=fields(event=LogEvent.USERS_CHANGED),
    )


def merged(ours: Users, theirs: Users) -> Users:
    """The later version of every user and group. Both nodes get the same result, whichever of them asks."""
    entries = _entries(ours)
    for name, entry in _entries(theirs).items():
        if name not in entries or _rank(entry) > _rank(entries[name]):
            entries[name] = entry
    found = {name: value for name, (_, value) in entries.items()}
    together = replace(
        ours,
        by_name={value.name: value for value in found.values() if isinstance(value, User)},
        groups={value.name: value for value in found.values() if isinstance(value, Group)},
        removed=newest_removed({name: at_ms for name, (at_ms, value) in entries.items() if value is None}),
    )
    if together.has_admin:
        return together
    # Two admins have removed each other at the same time, on two nodes. This ends when one of them adds an admin.
    logger.error(
        "another node has removed the last admin of this one: the users stay as they are until there is another admin",
        extra=fields(event=LogEvent.USERS_CHANGED),
    )
    return ours


def _entries(users: Users) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {name: (at_ms, None) for name, at_ms in users.removed.items()}
    entries |= {f"user {name}": (user.changed_ms, user) for name, user in users.by_name.items()}
    entries |= {f"group {name}": (group.changed_ms, group) for name, group in users.groups.items()}
    return entries


def _rank(entry: _Entry) -> tuple[int, bool, str]:
    """The later entry wins. In the same millisecond a removal wins, then any order that is the same on all nodes."""
    at_ms, value = entry
    return at_ms, value is None, "" if value is None else _text(value)


def _text(value: User | Group) -> str:
    grants = sorted((grant.bucket, grant.role.value) for grant in value.grants)
    if isinstance(value, Group):
        return repr((grants, value.description))
    keys = sorted((mechanism.value, credentials.stored_key) for mechanism, credentials in value.credentials.items())
    return repr((keys, grants, sorted(value.groups), value.display_name))

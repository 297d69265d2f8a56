"""The users of a running node: those in its file, and those that the nodes of a cluster log in as.

The node loads `Accounts` when it starts, and HTTP handlers change them. Users of the second kind come with a cluster's
config and go with the process: they are never in the file, and can't be changed. A change of the first kind is on disk
before it is in force. Changes are made one at a time and in a thread, because a password takes long to hash, by design,
and a disk may take long to write.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from headwater.errors import LocalProtocolError
from headwater.log_fields import LogEvent, fields
from headwater.node.auth import user_file
from headwater.node.auth.users import (
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
from headwater.protocol.cluster_config import nodes_user
from headwater.protocol.sasl import Credentials

logger = logging.getLogger(__name__)

ADMIN = "Administrator"
"""The first user, where none was named."""

Change = Callable[[Users], Users]


class UserFolder(Protocol):
    """Where users are kept."""

    def load_users(self) -> Users | None: ...

    def store_users(self, users: Users) -> None: ...

    def store_password(self, password: str) -> None: ...

    def forget_password(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedUsers:
    """The users as other nodes get them. Made in a thread with each change: thousands of users take a while."""

    text: str
    digest: str

    @classmethod
    def of(cls, users: Users) -> SharedUsers:
        text = user_file.encode_users(replace(users, clusters=frozenset()))
        return cls(text.decode(), hashlib.sha256(text).hexdigest())


class Accounts:
    """The users of one node. `load`, then `store`."""

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
        """The users that other nodes log in as, by name."""
        self._one_at_a_time = asyncio.Lock()
        self.on_change: Callable[[Users], None] = lambda users: None
        """Called with the users that are in force from now on."""

    @property
    def stored(self) -> Users:
        """Those of the file, which are shared with other nodes."""
        return self._stored

    @property
    def in_force(self) -> Users:
        return replace(self._stored, by_name={**self._stored.by_name, **self._nodes}) if self._nodes else self._stored

    # --- starting -------------------------------------------------------------------------------------------------

    def load(self, name: str | None, password: str | None, *, first_only: bool = False) -> str | None:
        """Load the users, make this one an admin with this password, or make the first one where there is none.

        With `first_only` this one is made where it is the first, and changes nothing where it is not. Returns the
        password that was made for the first one. Nothing is stored yet.
        """
        loaded, generated = self._folder.load_users(), None
        users = loaded or Users(decoy_secret=self._random_bytes(DECOY_SECRET_BYTES))
        if loaded is None and name is None:
            name, password = ADMIN, user_file.readable_password(self._random_bytes(user_file.PASSWORD_RANDOM_BYTES))
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
            # They are those of all nodes: one that starts, with a password of old perhaps, must not change them.
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
        """Keep what `load` has made, the generated password included."""
        if generated is not None:
            self._folder.store_password(generated)
        if not self._is_on_disk:
            self._folder.store_users(self._stored)

    # --- while it runs --------------------------------------------------------------------------------------------

    def let_nodes_in(self, bucket: str, login: Credentials | None) -> None:
        """The other nodes of a bucket's cluster log in with this from now on; with None, none of them does."""
        name = nodes_user(bucket)
        self._nodes.pop(name, None)
        # The old one first: connections of nodes that have left must not go on under the new one.
        self.on_change(self.in_force)
        if login is not None:
            self._nodes[name] = self._new_admin(self._stored, name, login.password, bucket)
            self.on_change(self.in_force)

    def is_node(self, name: str) -> bool:
        """Whether other nodes log in as this user, which can't be changed then."""
        return name in self._nodes

    async def change(self, change: Change, *, is_own: bool = True) -> None:
        """Put what `change` makes of the stored users into force. It is durable when this returns.

        `change` may take long: it is called in a thread, and what it raises is raised here. A `StoreError` says that
        the users are as they were. One that is not this node's own comes from another, with the times of its changes.
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
            # What lies in the data folder is its first password, which is wrong from now on.
            self._folder.forget_password()
        return users, SharedUsers.of(users)

    def _now_ms(self) -> int:
        return self._now_ns() // 1_000_000

    def _new_admin(self, users: Users, name: str, password: str, bucket: str = ALL_BUCKETS) -> User:
        return users.new_user(name, password, [Grant(Role.ADMIN, bucket)], salts=self._random_bytes(SALTS_BYTES))


def _warn_of_unused(users: Users, name: str, password: str, *, source: str) -> None:
    """Clients read the same variables, so they may have nothing to do with the node's start."""
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
# Every user and every group has the time of its last change, and a removed one the time of its removal. Two nodes that
# compare take the later version of each, so all nodes end with the same, in whatever order they hear of changes and
# whichever of them were away. No node has to be reached for a change, and none decides for the others. Times are those
# of the node that makes the change, but never before one that it knows of (`Users.stamped`).
#
# A node that joins a cluster gives up the users that it had, as in Couchbase: those of the cluster count. So users that
# are shared have a name of their own, `Users.sharing`, drawn by the first node of the cluster; and each node keeps in
# which clusters it shares them (`Users.clusters`). In a cluster that is not among them, it has joined, and
#
#     it is the first node                its users become those of the cluster
#     another node shares the same users  they are compared, as a bucket more is no change of users
#     another node shares other users     they take the place of its own
#
# A node that was left out of a cluster forgets it, and joins when it is added again. `replication.peers` does the
# asking.


_NAME_BYTES = 16
_PIECE_CHARS = 1024 * 1024
"""Of what a node gives of its users in one statistic."""

_Entry = tuple[int, User | Group | None]
"""A user, a group, or None where it was removed, and when that was."""


class UserSharing:
    """A node's users as the other nodes of its clusters see them."""

    def __init__(self, accounts: Accounts, *, random_bytes: Callable[[int], bytes]) -> None:
        self._accounts = accounts
        self._random_bytes = random_bytes

    # --- giving ---------------------------------------------------------------------------------------------------

    def is_shared_in(self, cluster: str) -> bool:
        return cluster in self._accounts.stored.clusters

    def digest(self, cluster: str) -> str:
        """The same on two nodes of a cluster where they have the same users; empty where this one has just joined."""
        return self._accounts.shared.digest if self.is_shared_in(cluster) else ""

    def pieces(self, cluster: str) -> Iterator[tuple[str, str]]:
        """The users in pieces, to be given to `take` of another node; none where this node has just joined."""
        if self.is_shared_in(cluster):
            text = self._accounts.shared.text
            for at in range(0, len(text), _PIECE_CHARS):
                yield str(at), text[at : at + _PIECE_CHARS]

    # --- taking ---------------------------------------------------------------------------------------------------

    async def begin(self, cluster: str) -> None:
        """This node is the first of a cluster: its users are those of the cluster from now on."""
        name = self._random_bytes(_NAME_BYTES).hex()
        await self._accounts.change(
            lambda users: replace(users, sharing=users.sharing or name, clusters=users.clusters | {cluster}),
            is_own=False,
        )

    async def leave(self, cluster: str) -> None:
        """This node was left out of a cluster. Its users stay, and are its own."""
        await self._accounts.change(lambda users: replace(users, clusters=users.clusters - {cluster}), is_own=False)

    async def take(self, cluster: str, pieces: dict[str, str]) -> None:
        """Take what counts of another node's users. Raises `MalformedJson`, or a `StoreError` if it can't be kept."""
        text = "".join(pieces.values()).encode()
        if not text or len(text) > user_file.USER_FILE_BYTES_MAX:
            return

        def change(ours: Users) -> Users:
            theirs = user_file.decode_users(text)
            if ours.sharing == theirs.sharing:
                return replace(merged(ours, theirs), clusters=ours.clusters | {cluster})
            if cluster in ours.clusters:
                # It is in two clusters, with other users in each. That is for the operator to end.
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
    """The later version of every user and every group. Both nodes get the same, whichever of them asks."""
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
    # Two admins removed each other at the same time, on two nodes. An admin makes another one, and it ends.
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
    """What is later counts. Of two changes in one millisecond a removal does, then any order that all nodes have."""
    at_ms, value = entry
    return at_ms, value is None, "" if value is None else _text(value)


def _text(value: User | Group) -> str:
    grants = sorted((grant.bucket, grant.role.value) for grant in value.grants)
    if isinstance(value, Group):
        return repr((grants, value.description))
    keys = sorted((mechanism.value, credentials.stored_key) for mechanism, credentials in value.credentials.items())
    return repr((keys, grants, sorted(value.groups), value.display_name))

"""The users on disk: one versioned JSON file, readable by its owner only.

    {"version": 3, "iterations": 15000, "decoy_secret": BASE64, "sharing": HEX, "clusters": [UUID, …],
     "removed": {"user bob": MS, …},
     "groups": [{"name": "lake", "description": "", "grants": […], "changed": MS}, …],
     "users": [{"name": "ann", "display_name": "Ann", "grants": [{"role": "writer", "bucket": "*", "scope": "*",
       "collection": "*"}], "groups": ["lake"], "changed": MS, "password_changed": MS,
       "credentials": {"SCRAM-SHA512": {"salt": …, "stored_key": …, "server_key": BASE64}, …}}, …]}

There is no password in it, but with the keys one can try passwords out as fast as a machine can, which is why others
must not read it. The file is replaced as a whole: a reader, at any moment, finds the old users or the new ones.
`node_folder` keeps the file, and the nodes of a cluster send each other what is in it (`accounts`).
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, TypeVar

from headwater.durable_files import replace_file
from headwater.errors import DataDamaged, DataTooNew, LocalProtocolError, MalformedJson, StoreError, StoreFull
from headwater.node.auth.users import ALL, Grant, Group, Role, User, Users
from headwater.protocol.sasl import SCRAM_MECHANISMS, SCRAM_SALT_BYTES, Mechanism, ScramCredentials, digest_bytes

VERSION = 3
USER_FILE_BYTES_MAX = 64 * 1024 * 1024
"""Above what the limits on users and grants can fill in earnest."""

_OTHERS = 0o077
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


# --- storing ------------------------------------------------------------------------------------------------------


def store_users(path: Path, users: Users) -> None:
    """Replaces the file. It is on disk when this returns; if this fails, the old file is as it was."""
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
    """The users as JSON, in ASCII, a line for each. The same users give the same bytes, however they came about."""
    members = {
        "version": VERSION,
        "iterations": users.iterations,
        "decoy_secret": _encode_bytes(users.decoy_secret),
        "sharing": users.sharing,
        "clusters": sorted(users.clusters),
        "removed": dict(sorted(users.removed.items())),
    }
    # With an indent, json takes ten times as long: it has machine code for the compact form only.
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
    """The users in the file, or None where there is no file.

    Every fault is a `StoreError`: `DataTooNew` for a newer version, `DataDamaged` for what is not a user file.
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
        # The open file is asked, not the path: the two could differ by now.
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
    """What is wrong in the text. `decode_users` makes a sentence of it."""


def decode_users(text: bytes) -> Users:
    """Read what `encode_users` has written. Raises `DataTooNew`, or `MalformedJson` for what is something else."""
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
            for mechanism in SCRAM_MECHANISMS
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


def _decode_credentials(mechanism: Mechanism, members: Mapping[str, object], iterations: int) -> ScramCredentials:
    salt = _bytes_member(members, "salt")
    stored_key, server_key = _bytes_member(members, "stored_key"), _bytes_member(members, "server_key")
    if len(salt) != SCRAM_SALT_BYTES or {len(stored_key), len(server_key)} != {digest_bytes(mechanism)}:
        raise _Fault(f"credentials for {mechanism} have the wrong length")
    return ScramCredentials(salt=salt, iterations=iterations, stored_key=stored_key, server_key=server_key)


def _member(members: object, name: str, kind: type[T]) -> T:
    value = members.get(name) if isinstance(members, dict) else None
    # JSON's true is no number, though Python's is.
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
"""Crockford's base 32: no i, l and o, which look like digits, and no u, so that no words come out."""

_GROUP_CHARS = 6


def readable_password(random: bytes) -> str:
    """A password such as `8h2k4q-0c9xwd-…`, four groups of six, out of random bytes.

    For the first user where none was given: easy to read out and to copy, hopeless to guess.
    """
    if len(random) != PASSWORD_RANDOM_BYTES:
        raise LocalProtocolError(f"a generated password needs {PASSWORD_RANDOM_BYTES} random bytes")
    number = int.from_bytes(random)
    characters = [_ALPHABET[number >> shift & 31] for shift in reversed(range(0, PASSWORD_RANDOM_BYTES * 8, 5))]
    groups = ("".join(characters[at : at + _GROUP_CHARS]) for at in range(0, len(characters), _GROUP_CHARS))
    return "-".join(groups)

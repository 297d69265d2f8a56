"""The same users on all nodes of a cluster: what nodes exchange of them, and what each makes of it.

Every user and every group has the time of its last change, and a removed one the time of its removal. Two nodes that
compare take the later version of each, so all nodes end with the same, in whatever order they hear of changes and
whichever of them were away. No node has to be reached for a change, and none decides for the others. Times are those of
the node that makes the change, but never before one that it knows of (`Users.stamped`).

A node that joins a cluster gives up the users that it had, as in Couchbase: those of the cluster count. So users that
are shared have a name of their own, `Users.sharing`, drawn by the first node of the cluster; and each node keeps in
which clusters it shares them (`Users.clusters`). In a cluster that is not among them, it has joined, and

    it is the first node                its users become those of the cluster
    another node shares the same users  they are compared, as a bucket more is no change of users
    another node shares other users     they take the place of its own

A node that was left out of a cluster forgets it, and joins when it is added again. `replication.peers` does the asking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from headwater.log_fields import LogEvent, fields
from headwater.node.auth.accounts import Accounts
from headwater.node.auth.user_file import USER_FILE_BYTES_MAX, decode_users
from headwater.node.auth.users import Group, User, Users, newest_removed

logger = logging.getLogger(__name__)

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
        if not text or len(text) > USER_FILE_BYTES_MAX:
            return

        def change(ours: Users) -> Users:
            theirs = decode_users(text)
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

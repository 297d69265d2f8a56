"""The users of a running node, those in its file and those that the nodes of a cluster log in as; and the throttle.

The node loads `Accounts` when it starts, and HTTP handlers change them. Users of the second kind come with a cluster's
config and go with the process: they are never in the file, and can't be changed. A change of the first kind is on disk
before it is in force. Changes are made one at a time and in a thread, because a password takes long to hash, by design,
and a disk may take long to write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headwater.errors import LocalProtocolError
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.user_file import PASSWORD_RANDOM_BYTES, readable_password
from headwater.node.auth.users import ALL_BUCKETS, DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, User, Users

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


class Accounts:
    """The users of one node. `load`, then `store`."""

    def __init__(self, folder: UserFolder, *, random_bytes: Callable[[int], bytes]) -> None:
        self._folder = folder
        self._random_bytes = random_bytes
        self._stored: Users
        self._nodes: dict[str, User] = {}
        """The users that other nodes log in as, by name."""
        self._one_at_a_time = asyncio.Lock()
        self.on_change: Callable[[Users], None] = lambda users: None
        """Called with the users that are in force from now on."""

    @property
    def in_force(self) -> Users:
        return replace(self._stored, by_name={**self._stored.by_name, **self._nodes}) if self._nodes else self._stored

    # --- starting -------------------------------------------------------------------------------------------------

    def load(self, name: str | None, password: str | None, *, first_only: bool = False) -> str | None:
        """Load the users, make this one an admin with this password, or make the first one where there is none.

        With `first_only` this one is made where it is the first, and changes nothing where it is not. Returns the
        password that was made for the first one. Nothing is stored yet.
        """
        users, generated = self._folder.load_users(), None
        if users is None:
            users = Users(decoy_secret=self._random_bytes(DECOY_SECRET_BYTES))
            if name is None:
                name, password = ADMIN, readable_password(self._random_bytes(PASSWORD_RANDOM_BYTES))
                generated = password
        if name is not None and password is not None:
            if first_only and users.by_name:
                _warn_of_unused(users, name, password)
            else:
                users = self._with_admin(users, name, password)
        self._stored = users
        return generated

    def _with_admin(self, users: Users, name: str, password: str) -> Users:
        known, admin = users.by_name.get(name), self._new_admin(users, name, password)
        if known is None:
            return users.put(admin)
        changes = [] if known.grants == admin.grants else ["is an admin now"]
        if not users.check_password(name, password):
            changes.append("has a new password")
        if changes:
            about = fields(event=LogEvent.USERS_CHANGED, changed_user=name)
            logger.warning("by --user and --password, user %s %s", name, " and ".join(changes), extra=about)
        return users.put(replace(admin, display_name=known.display_name))

    def store(self, generated: str | None) -> None:
        """Keep what `load` has made, the generated password included."""
        if generated is not None:
            self._folder.store_password(generated)
        self._folder.store_users(self._stored)

    # --- while it runs --------------------------------------------------------------------------------------------

    def let_in(self, name: str, password: str, *, bucket: str) -> None:
        """The other nodes of a bucket's cluster log in with this."""
        self._nodes[name] = self._new_admin(self._stored, name, password, bucket)
        self.on_change(self.in_force)

    def is_node(self, name: str) -> bool:
        """Whether other nodes log in as this user, which can't be changed then."""
        return name in self._nodes

    async def change(self, change: Change) -> None:
        """Put what `change` makes of the stored users into force. It is durable when this returns.

        `change` may take long: it is called in a thread, and what it raises is raised here. A `StoreError` says that
        the users are as they were.
        """
        async with self._one_at_a_time:
            self._stored = await asyncio.to_thread(self._store_changed, change)
            self.on_change(self.in_force)

    def _store_changed(self, change: Change) -> Users:
        users = change(self._stored)
        if not users.has_admin:
            raise LocalProtocolError(
                "the node would have no admin left", hint="Give another user the role admin on this node first"
            )
        self._folder.store_users(users)
        before, after = self._stored.by_name.get(ADMIN), users.by_name.get(ADMIN)
        if before is not None and (after is None or after.credentials != before.credentials):
            # What lies in the data folder is its first password, which is wrong from now on.
            self._folder.forget_password()
        return users

    def _new_admin(self, users: Users, name: str, password: str, bucket: str = ALL_BUCKETS) -> User:
        return users.new_user(name, password, [Grant(Role.ADMIN, bucket)], salts=self._random_bytes(SALTS_BYTES))


def _warn_of_unused(users: Users, name: str, password: str) -> None:
    """Clients read the same variables, so they may have nothing to do with the node's start."""
    if users.check_password(name, password):
        return
    what = "has another password on this node" if name in users.by_name else "is no user of this node"
    logger.warning(
        "HEADWATER_USER names %s, who %s: nothing is changed; give --user and --password to make it an admin",
        *(name, what),
        extra=fields(event=LogEvent.LOGIN_UNUSED, user=name),
    )


# --- the throttle -------------------------------------------------------------------------------------------------

FREE_FAILURES = 5

WINDOW_S = 60.0
"""Free failures with this much quiet after them are forgotten."""

DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""What the last free failure costs, and each one after it; the last entry is the bound."""

MEMORY_S = 900.0
"""Costly failures are remembered longer. After a mere WINDOW_S of quiet it would pay to use up the free failures, wait,
and begin again, rather than to bear the delays."""

RECORDS_MAX = 4_096
"""Peers and users that are remembered at a time; beyond that the one with the oldest failure is forgotten."""


@dataclass(frozen=True, slots=True)
class _Record:
    failures: int
    last_failure_s: float

    @property
    def delay_s(self) -> float:
        costly = self.failures - FREE_FAILURES
        return 0.0 if costly < 0 else DELAYS_S[min(costly, len(DELAYS_S) - 1)]

    def is_forgotten(self, now_s: float) -> bool:
        return now_s - self.last_failure_s >= (WINDOW_S if self.failures < FREE_FAILURES else MEMORY_S)


class LoginThrottle:
    """Counts failed log-ins, and returns how long the next try has to wait: it slows down clients that guess passwords.

    Failures are counted by peer address and user name. A few are free, because people mistype; from then on each
    failure makes the next try wait, longer and longer up to a bound. A success or enough time clears the record.

    Ask `wait_s` just before a password or a proof is checked, and report the outcome in the same step. A peer that
    opens a thousand connections at once then gains nothing, since the checks come one after the other. A try that was
    refused is not reported: the peer has learnt nothing from it, and a client that retries with the right password is
    not held off for ever. The time is in seconds of a clock that never goes back.
    """

    def __init__(self, *, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()
        """By (peer, user), the oldest failure first."""

    def __len__(self) -> int:
        return len(self._records)

    def wait_s(self, peer: str, user: str, *, now_s: float) -> float:
        """How long this peer must wait before it may try this user; 0 where it may try now.

        `peer` is the address without the port, which changes with every connection.
        """
        record = self._records.get((peer, user))
        if record is None or record.is_forgotten(now_s):
            return 0.0
        return max(0.0, record.last_failure_s + record.delay_s - now_s)

    def failed(self, peer: str, user: str, *, now_s: float) -> None:
        """The password or the proof was wrong, or there is no such user: a peer must not see which."""
        record = self._records.pop((peer, user), None)
        before = 0 if record is None or record.is_forgotten(now_s) else record.failures
        self._records[peer, user] = _Record(before + 1, now_s)
        if len(self._records) > self._records_max:
            self._records.popitem(last=False)

    def succeeded(self, peer: str, user: str) -> None:
        """The log-in was right: earlier failures count no longer."""
        self._records.pop((peer, user), None)

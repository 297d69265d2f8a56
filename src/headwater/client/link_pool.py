"""The connections of a reader, sans-IO: which exist, which are wanted, and when a lost one may be tried again.

A node has as many lanes as the reader wants connections to it, and a lane has at most one link. Scouts are links of
their own that only learn the cluster map; there is one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.dcp_link import DcpLink
from headwater.client.kv_connection import Backoff
from headwater.client.vbucket_stream import VBucketStream
from headwater.errors import HeadwaterError
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.numbers import VBucketId

SCOUT = -1
"""The lane of scouts."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """One connection: being made, in use, or lost and about to be forgotten."""

    id: int
    address: Address
    lane: int
    link: DcpLink | None = None
    """None until the socket is connected."""
    is_ready: bool = False
    streams: dict[int, VBucketStream] = field(default_factory=dict)
    """By opaque."""
    surveyed: dict[int, list[VBucketStream]] = field(default_factory=dict)
    """Streams that wait for the high seqnos, by the opaque of the request for them."""

    @property
    def all_streams(self) -> list[VBucketStream]:
        """Everything that is lost with this connection."""
        asked = [*self.streams.values(), *(stream for streams in self.surveyed.values() for stream in streams)]
        return list(dict.fromkeys(asked))


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """For the edge: connect, then say `on_connected` or `on_lost`."""

    id: int
    address: Address


@dataclass(frozen=True, slots=True)
class CloseConnection:
    id: int


Command = OpenConnection | CloseConnection

NewLink = Callable[[Slot, bool, float], DcpLink]
"""Makes the link of a slot, given whether it stays on this machine, and the time."""


@dataclass(slots=True)
class _Failures:
    count: int = 0
    retry_at_s: float = 0.0
    last: HeadwaterError | None = None


class LinkPool:
    def __init__(self, *, new_link: NewLink, backoff: Backoff) -> None:
        self.slots: dict[int, Slot] = {}
        self.commands: list[Command] = []
        self._new_link = new_link
        self._backoff = backoff
        self._failures: dict[Address, _Failures] = {}
        self._next_id = 0

    @property
    def ready(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.is_ready and slot.lane != SCOUT]

    def last_failure(self, address: Address) -> HeadwaterError | None:
        return self._failures[address].last if address in self._failures else None

    def failures_in_a_row(self, address: Address) -> int:
        return self._failures[address].count if address in self._failures else 0

    def retry_at_s(self, address: Address) -> float:
        """When this node may be tried again."""
        return self._failures[address].retry_at_s if address in self._failures else 0.0

    def get(self, address: Address, lane: int, *, now_s: float) -> Slot | None:
        """The link of a lane if it is ready; if there is none, one is opened as soon as it may be."""
        for slot in self.slots.values():
            if (slot.address, slot.lane) == (address, lane):
                return slot if slot.is_ready else None
        if now_s >= self.retry_at_s(address):
            self._open(address, lane)
        return None

    def scout(self, addresses: Iterable[Address], *, now_s: float) -> None:
        """Ask for the cluster map wherever it may be had: one host at a time, the one that was tried least first."""
        if any(slot.lane == SCOUT for slot in self.slots.values()):
            return
        due = [address for address in addresses if now_s >= self.retry_at_s(address)]
        if due:
            self._open(min(due, key=self.retry_at_s), SCOUT)

    def on_connected(self, id_: int, *, is_loopback: bool, now_s: float) -> Slot | None:
        """The socket of a slot is there. Returns the slot, unless it was forgotten meanwhile."""
        slot = self.slots.get(id_)
        if slot is not None:
            slot.link = self._new_link(slot, is_loopback, now_s)
        return slot

    def on_ready(self, slot: Slot) -> bool:
        """The link can be used. Returns whether its node had been lost before."""
        slot.is_ready = True
        return slot.lane != SCOUT and self._failures.pop(slot.address, None) is not None

    def forget(self, slot: Slot, error: HeadwaterError | None, *, now_s: float) -> None:
        """The link is gone, or to be closed."""
        del self.slots[slot.id]
        self.commands.append(CloseConnection(slot.id))
        if error is not None:
            failures = self._failures.setdefault(slot.address, _Failures())
            failures.count += 1
            failures.last = error
            failures.retry_at_s = now_s + self._backoff.delay_s(failures.count)

    def _open(self, address: Address, lane: int) -> None:
        self._next_id += 1
        self.slots[self._next_id] = Slot(id=self._next_id, address=address, lane=lane)
        self.commands.append(OpenConnection(self._next_id, address))


# The cluster map as a reader follows it, sans-IO: which node has a vbucket, and when to look for a newer map.
#
# A newer map comes by itself, with every poll, or because it is wanted: a node refused a vbucket, or is gone. Then it
# is asked for on every connection there is, and by a scout where there is none.


MAP_INTERVAL_S = 0.25
"""How often the cluster map is asked for, at most, while it does not tell what we need to know."""


class MapWatch:
    def __init__(self, cluster_map: ClusterMap, *, seeds: Iterable[Address], now_s: float) -> None:
        self.map = cluster_map
        self._seeds = seeds
        self._is_wanted = False
        self._due_s = now_s

    def want(self) -> None:
        """The map that is known can't be the newest."""
        self._is_wanted = True

    def is_of_this_bucket(self, new: ClusterMap) -> bool:
        """A bucket that was deleted and made anew is another one."""
        return new.uuid == self.map.uuid and new.vbuckets == self.map.vbuckets

    def replace(self, new: ClusterMap) -> ClusterMap | None:
        """A map has come. Returns the one that it takes the place of, or None where it is no news."""
        self._is_wanted = False
        if new.version <= self.map.version:
            return None
        old, self.map = self.map, new
        return old

    def look(self, pool: LinkPool, now_s: float) -> None:
        """Ask for a newer map, if one is wanted and it is time."""
        if not self._is_wanted:
            return
        ready = pool.ready
        if ready and now_s >= self._due_s:
            self._is_wanted = False
            self._due_s = now_s + MAP_INTERVAL_S
            for slot in ready:
                assert slot.link is not None
                slot.link.request(GetClusterConfig())
        elif not ready:
            pool.scout((*self._seeds, *self.map.nodes), now_s=now_s)


def active_address(cluster_map: ClusterMap, vbucket: VBucketId) -> Address | None:
    """The node that has a vbucket, or None where nobody has it."""
    node = cluster_map.active_node(vbucket)
    return None if node < 0 else cluster_map.nodes[node]


# Vbuckets without a stream: since when, until when, and what stood in their way last.


_NEVER = math.inf
"""When a vbucket is due that has been asked for: not before whoever was asked has answered, or is lost."""


@dataclass(slots=True)
class _Wait:
    since_s: float
    due_s: float
    failures: int = 0
    last: HeadwaterError | None = None


class VBucketWaits:
    """A vbucket waits from when it is first wanted, or its stream is lost, until a server has accepted it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._waits: dict[VBucketId, _Wait] = {}

    def begin(self, vbucket: VBucketId, *, now_s: float) -> None:
        """It is wanted, and may be asked for at once."""
        self._waits[vbucket] = _Wait(now_s, now_s)

    def again(self, vbucket: VBucketId, error: HeadwaterError | None, *, now_s: float, at_once: bool) -> None:
        """It did not work out, or not for long: ask again, at once or after a delay that grows."""
        wait = self._waits.setdefault(vbucket, _Wait(now_s, now_s))
        wait.last = error or wait.last
        wait.failures += not at_once
        wait.due_s = now_s if at_once else now_s + self._backoff.delay_s(wait.failures)

    def end(self, vbucket: VBucketId) -> None:
        self._waits.pop(vbucket, None)

    def asked(self, vbucket: VBucketId) -> None:
        """It has been asked for. It still waits, for the answer."""
        self._waits[vbucket].due_s = _NEVER

    def hurry(self, vbucket: VBucketId, *, now_s: float) -> None:
        """There is news of it: don't wait any longer, unless it is asked for already."""
        wait = self._waits.get(vbucket)
        if wait is not None and wait.due_s != _NEVER:
            wait.due_s = min(wait.due_s, now_s)

    def due(self, now_s: float) -> Iterator[VBucketId]:
        """Those to be asked for now."""
        return (vbucket for vbucket, wait in self._waits.items() if wait.due_s <= now_s)

    def overdue(self, now_s: float, *, after_s: float) -> tuple[VBucketId, HeadwaterError | None] | None:
        """One that has waited for longer than that, and what stood in its way last."""
        for vbucket, wait in self._waits.items():
            if now_s - wait.since_s > after_s:
                return vbucket, wait.last
        return None

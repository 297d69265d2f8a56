"""The connections of a reader, sans-IO: which exist, which are wanted, and when a lost one may be tried again.

A node has as many lanes as the reader wants connections to it, and a lane has at most one link. Scouts are links of
their own that only learn the cluster map; there is one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headwater.client.backoff import Backoff
from headwater.client.connection_string import Address
from headwater.client.dcp_link import DcpLink
from headwater.client.vbucket_stream import VBucketStream
from headwater.errors import HeadwaterError

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

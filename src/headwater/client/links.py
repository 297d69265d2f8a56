"""The connections of a reader, sans-IO: one link each, the pool of them, and the cluster map that says where they go.

A link is the shared DCP consumer behind a client's handshake. It knows nothing of vbuckets and rollbacks. A node has as
many lanes as the reader wants connections to it, and a lane has at most one link. Scouts are links of their own that
only learn the cluster map; there is one at a time. The reader is the only caller. Nothing here opens a socket: the pool
gives commands to the edge, and the edge reports what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.handshake import ClientHandshake, HandshakeOutcome
from headwater.client.retries import Backoff
from headwater.client.vbucket_stream import VBucketStream
from headwater.errors import ConnectionFailed, HeadwaterError, UnexpectedMessage, UnknownOpcode
from headwater.protocol import consumer
from headwater.protocol.exchange import ANSWER_TIMEOUT_S
from headwater.protocol.features import Magic
from headwater.protocol.frames import Frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_streams import Open, OpenFlags, VBucketState
from headwater.protocol.messages.session import ClustermapChangeNotification, GetClusterConfig
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import VBucketId

SILENT_NOOP_INTERVALS = 2.5
"""DCP docs, dead-connections, say 2. Half of one more is for a noop that is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOpening:
    """What makes a key-value connection a DCP connection."""

    name: str
    flags: OpenFlags
    controls: tuple[consumer.DcpControl, ...]
    buffer_bytes: int
    noop_interval_s: int


# --- one link -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LinkReady(consumer.ConsumerOpened):
    """The connection can be used. Comes once, first."""

    outcome: HandshakeOutcome


@dataclass(slots=True)
class ConfigPushed(consumer.ForeignFrame):
    """The server has a new cluster map; with nothing in `config` it has to be asked for."""

    config: bytes


LinkEvent = consumer.ConsumerEvent[VBucketStream]


class DcpLink(consumer.DcpConsumer[VBucketStream]):
    """One connection. Any error that a method raises is the end of it.

    With no `opening` it is a scout: a connection that only learns the cluster map.
    """

    def __init__(
        self,
        handshake: ClientHandshake,
        opening: DcpOpening | None,
        *,
        now_s: float,
        answer_s_max: float = ANSWER_TIMEOUT_S,
    ) -> None:
        limits = consumer.ConsumerLimits(
            buffer_bytes=opening.buffer_bytes if opening else 0,
            silence_s_max=opening.noop_interval_s * SILENT_NOOP_INTERVALS if opening else answer_s_max,
            answer_s_max=answer_s_max,
        )
        super().__init__(limits, now_s=now_s)
        self._handshake = handshake
        self._opening = opening
        self.send(handshake.data_to_send())

    def events(self) -> Iterator[LinkEvent]:
        """What the received bytes mean, in order. The data of a run is valid until the next event is asked for."""
        if self._handshake.outcome is None:
            yield from self._do_handshake()
        if self._handshake.outcome is None:
            return
        for event in super().events():
            match event:
                case consumer.StreamRun():
                    if not event.is_rising:
                        raise UnexpectedMessage(f"seqnos of a stream that do not rise, up to {event.last_seqno}")
                    yield event
                case consumer.StreamMessage() | consumer.RequestAnswered():
                    yield event
                case consumer.ConsumerOpened():
                    yield LinkReady(self._handshake.outcome)
                case consumer.ForeignFrame(frame=frame) if frame.magic is Magic.SERVER_REQUEST:
                    yield from _read_pushed(frame)
                case consumer.ForeignFrame():
                    pass  # Newer servers may send requests that this client has not asked for.
                case consumer.FaultyFrame():
                    if not isinstance(event.error, UnknownOpcode):
                        raise event.error

    def receive_end(self) -> None:
        """The server has closed the connection. Raises what that means."""
        if self._handshake.outcome is None:
            self._handshake.receive_end()
        raise ConnectionFailed("the server has closed the connection", hint="Check the server's log, and try again")

    def _do_handshake(self) -> Iterator[LinkEvent]:
        handshake, opening = self._handshake, self._opening
        handshake.receive_data(self._buffer.take_all())
        self.send(handshake.data_to_send())
        if handshake.outcome is None:
            return
        self.negotiated = handshake.outcome.negotiated
        self._buffer.receive_data(handshake.trailing_data)
        if opening is None:
            yield LinkReady(handshake.outcome)
        else:
            self.send_opening(opening.controls, open_request=Open(key=opening.name.encode(), flags=opening.flags))


def _read_pushed(frame: Frame) -> Iterator[ConfigPushed]:
    try:
        message = decode_message(frame)
    except UnknownOpcode:
        return
    if isinstance(message, ClustermapChangeNotification):
        yield ConfigPushed(frame, message.value)


# --- the pool -----------------------------------------------------------------------------------------------------

SCOUT = -1
"""The lane of scouts."""


@dataclass(slots=True, kw_only=True)
class PooledLink:
    """One connection: being made, or in use."""

    id: int
    address: Address
    lane: int
    link: DcpLink | None = None
    """None until the socket is connected."""
    is_ready: bool = False
    survey_opaque: int | None = None
    """The request for the high seqnos that streams wait for."""

    def survey(self) -> int:
        """Ask for the high seqnos, unless that is under way. Returns the opaque of the request."""
        if self.survey_opaque is None:
            assert self.link is not None
            self.survey_opaque = self.link.send_request(GetAllVbSeqnos(state=VBucketState.ACTIVE))
        return self.survey_opaque


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """For the edge: connect, then call `on_connected` or `on_lost`."""

    id: int
    address: Address


@dataclass(frozen=True, slots=True)
class CloseConnection:
    id: int


Command = OpenConnection | CloseConnection

NewLink = Callable[[PooledLink, bool, float], DcpLink]
"""Makes the link of a slot, given whether it stays on this machine, and the time."""


@dataclass(slots=True)
class LinkFailures:
    count: int = 0
    retry_at_s: float = 0.0
    """When the node may be tried again."""
    last: HeadwaterError | None = None


_NO_FAILURES = LinkFailures()


class LinkPool:
    """Which connections exist, which are wanted, and when a lost one may be tried again."""

    def __init__(self, *, new_link: NewLink, backoff: Backoff) -> None:
        self.slots: dict[int, PooledLink] = {}
        self.commands: list[Command] = []
        self._new_link = new_link
        self._backoff = backoff
        self._failures: dict[Address, LinkFailures] = {}
        self._next_id = 0

    @property
    def ready(self) -> list[PooledLink]:
        return [slot for slot in self.slots.values() if slot.is_ready and slot.lane != SCOUT]

    def failures(self, address: Address) -> LinkFailures:
        """Those of a node in a row."""
        return self._failures.get(address, _NO_FAILURES)

    def get(self, address: Address, lane: int, *, now_s: float) -> PooledLink | None:
        """The link of a lane if it is ready; if there is none, one is opened as soon as it may be."""
        for slot in self.slots.values():
            if (slot.address, slot.lane) == (address, lane):
                return slot if slot.is_ready else None
        if now_s >= self.failures(address).retry_at_s:
            self._open(address, lane)
        return None

    def scout(self, addresses: Iterable[Address], *, now_s: float) -> None:
        """Ask for the cluster map wherever it may be had: one host at a time, the one that was tried least first."""
        if any(slot.lane == SCOUT for slot in self.slots.values()):
            return
        due = [address for address in addresses if now_s >= self.failures(address).retry_at_s]
        if due:
            self._open(min(due, key=lambda address: self.failures(address).retry_at_s), SCOUT)

    def on_connected(self, id_: int, *, is_loopback: bool, now_s: float) -> PooledLink | None:
        """The socket of a slot is connected. Returns the slot, unless it was closed meanwhile."""
        slot = self.slots.get(id_)
        if slot is not None:
            slot.link = self._new_link(slot, is_loopback, now_s)
        return slot

    def on_ready(self, slot: PooledLink) -> bool:
        """The link can be used. Returns whether its node had been lost before."""
        slot.is_ready = True
        return slot.lane != SCOUT and self._failures.pop(slot.address, None) is not None

    def close(self, slot: PooledLink) -> None:
        """The link is not needed any more."""
        del self.slots[slot.id]
        self.commands.append(CloseConnection(slot.id))

    def drop(self, slot: PooledLink, error: HeadwaterError, *, now_s: float) -> None:
        """The link is lost. Its node is tried again after a delay that grows."""
        self.close(slot)
        failures = self._failures.setdefault(slot.address, LinkFailures())
        failures.count += 1
        failures.last = error
        failures.retry_at_s = now_s + self._backoff.delay_s(failures.count)

    def _open(self, address: Address, lane: int) -> None:
        self._next_id += 1
        self.slots[self._next_id] = PooledLink(id=self._next_id, address=address, lane=lane)
        self.commands.append(OpenConnection(self._next_id, address))


# --- the cluster map ----------------------------------------------------------------------------------------------

MAP_INTERVAL_S = 0.25
"""How often the cluster map is asked for, at most, while it does not say what we need to know."""


class MapWatch:
    """The cluster map as a reader follows it: which node has a vbucket, and when to look for a newer map.

    A newer map comes by itself, with every poll, or because it is wanted: a node refused a vbucket, or is gone. Then it
    is asked for on every connection, and by a scout where there is none.
    """

    def __init__(self, cluster_map: ClusterMap, *, seeds: Iterable[Address], now_s: float) -> None:
        self.map = cluster_map
        self._seeds = seeds
        self._is_wanted = False
        self._due_s = now_s

    def want(self) -> None:
        """The map that is known can't be the newest."""
        self._is_wanted = True

    def is_of_this_bucket(self, new: ClusterMap) -> bool:
        """A bucket that was deleted and created again is another one."""
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
                slot.link.send_request(GetClusterConfig())
        elif not ready:
            pool.scout((*self._seeds, *self.map.nodes), now_s=now_s)


def active_address(cluster_map: ClusterMap, vbucket: VBucketId) -> Address | None:
    """The node that has a vbucket, or None where no node has it."""
    node = cluster_map.active_node(vbucket)
    return None if node < 0 else cluster_map.nodes[node]

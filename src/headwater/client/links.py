"""A reader's connections, sans-IO: one link each, the pool of links, and the cluster map that decides where they go.

A link is the shared DCP consumer after a client's handshake. It knows nothing about vbuckets and rollbacks. A node has
one lane for each connection that the reader wants to it, and a lane has at most one link. Scouts are separate links
that only fetch the cluster map; there is one at a time. Only the reader calls this module. It opens no socket: the
pool gives commands to the edge, and the edge reports the results.
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
"""The DCP docs (dead-connections) say 2. Another half allows for a late noop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOpening:
    """What turns a key-value connection into a DCP connection."""

    name: str
    flags: OpenFlags
    controls: tuple[consumer.DcpControl, ...]
    buffer_bytes: int
    noop_interval_s: int


# --- one link -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LinkReady(consumer.ConsumerOpened):
    """The connection can be used. This is the first event, and comes once."""

    outcome: HandshakeOutcome


@dataclass(slots=True)
class ConfigPushed(consumer.ForeignFrame):
    """The server has a new cluster map. If `config` is empty, the map must be requested."""

    config: bytes


LinkEvent = consumer.ConsumerEvent[VBucketStream]


class DcpLink(consumer.DcpConsumer[VBucketStream]):
    """One connection. Any error that a method raises ends it.

    Without an `opening` it is a scout, which only fetches the cluster map.
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
        """Yield the events of the received bytes, in order. The data of a run is valid until the next event."""
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
                    pass  # Newer servers may send other requests: ignore them.
                case consumer.FaultyFrame():
                    if not isinstance(event.error, UnknownOpcode):
                        raise event.error

    def receive_end(self) -> None:
        """The server has closed the connection. Raises the error for that."""
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
    """One connection, connecting or in use."""

    id: int
    address: Address
    lane: int
    link: DcpLink | None = None
    """None until the socket is connected."""
    is_ready: bool = False
    survey_opaque: int | None = None
    """The request for high seqnos for which streams wait."""

    def survey(self) -> int:
        """Request the high seqnos, unless that is under way. Returns the opaque of the request."""
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
"""Makes the link of a slot. Arguments: the slot, whether the connection stays on this machine, and the time."""


@dataclass(slots=True)
class LinkFailures:
    count: int = 0
    retry_at_s: float = 0.0
    """The time of the next attempt."""
    last: HeadwaterError | None = None


_NO_FAILURES = LinkFailures()


class LinkPool:
    """Manages the connections: which exist, which are wanted, and when a lost one may be retried."""

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
        """Return the failures of a node in a row."""
        return self._failures.get(address, _NO_FAILURES)

    def get(self, address: Address, lane: int, *, now_s: float) -> PooledLink | None:
        """Return the link of a lane if it is ready. If the lane has none, open one as soon as it may be retried."""
        for slot in self.slots.values():
            if (slot.address, slot.lane) == (address, lane):
                return slot if slot.is_ready else None
        if now_s >= self.failures(address).retry_at_s:
            self._open(address, lane)
        return None

    def scout(self, addresses: Iterable[Address], *, now_s: float) -> None:
        """Fetch the cluster map from any host: one at a time, beginning with the one that could be retried first."""
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
        """The link can be used. Returns whether its node had failed before."""
        slot.is_ready = True
        return slot.lane != SCOUT and self._failures.pop(slot.address, None) is not None

    def close(self, slot: PooledLink) -> None:
        """Close a link that is no longer needed."""
        del self.slots[slot.id]
        self.commands.append(CloseConnection(slot.id))

    def drop(self, slot: PooledLink, error: HeadwaterError, *, now_s: float) -> None:
        """The link is lost. Its node is retried after a delay that grows with each failure."""
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
"""The shortest interval between requests for the cluster map while a newer one is wanted."""


class MapWatch:
    """Follows the cluster map for a reader: which node has a vbucket, and when to request a newer map.

    A newer map is pushed by a server, comes with a poll, or is wanted: a node refused a vbucket, or is gone. A wanted
    map is requested on every connection, or by a scout if there is none.
    """

    def __init__(self, cluster_map: ClusterMap, *, seeds: Iterable[Address], now_s: float) -> None:
        self.map = cluster_map
        self._seeds = seeds
        self._is_wanted = False
        self._due_s = now_s

    def want(self) -> None:
        """Request a newer map: the known one is outdated."""
        self._is_wanted = True

    def is_of_this_bucket(self, new: ClusterMap) -> bool:
        """Return whether a map is of this bucket. A bucket that was deleted and created again is another one."""
        return new.uuid == self.map.uuid and new.vbuckets == self.map.vbuckets

    def replace(self, new: ClusterMap) -> ClusterMap | None:
        """Replace the map if `new` is newer. Returns the replaced map, or None."""
        self._is_wanted = False
        if new.version <= self.map.version:
            return None
        old, self.map = self.map, new
        return old

    def look(self, pool: LinkPool, now_s: float) -> None:
        """Request a newer map if one is wanted and the request is due."""
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
    """Return the node where a vbucket is active, or None."""
    node = cluster_map.active_node(vbucket)
    return None if node < 0 else cluster_map.nodes[node]

"""What there is to see of the connections that this node receives its copies by: for `stat dcp`, and for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.protocol.states import ConsumerStream

if TYPE_CHECKING:
    from headwater.node.consumer.connection import ConsumerConnection
    from headwater.node.consumer.stream import ReplicaStream

STREAMS_VIEWED_MAX = 4096
"""Where all connections together have more streams, those of a connection are told when it is asked for by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedStreamView:
    """A vbucket that is received."""

    vbucket: int
    opaque: int
    flags: int
    """Those it was asked for with."""
    state: str
    received_seqno: int
    """Everything up to here has come; it may not be durable yet."""
    snapshot_start_seqno: int
    snapshot_end_seqno: int
    """Of the snapshot that is being received, or was last."""
    is_inside_snapshot: bool
    received_changes: int
    """By this stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerView:
    """A connection on which this node is the consumer."""

    name: str
    peer: str
    """Whom it goes to: the producer's address, or that of the proxy in between."""
    is_proxied: bool
    """Whether somebody else joins this node to the producer, as in a takeover."""
    open_s: float
    """How long it has been open."""
    received_bytes: int
    received_changes: int
    """By its streams, also by those that have ended."""
    acked_bytes: int
    unacked_bytes: int
    """What flow control counts of the changes that were taken and not acknowledged: mostly they are not durable yet."""
    held_bytes: int
    """What has come and was not looked into. It is much while replicas are held back, and next to nothing else."""
    buffer_bytes_max: int
    """What the producer may send before it has to wait."""
    is_held: bool
    """For a drill: nothing is taken in."""
    vbuckets: tuple[int, ...]
    """Those it receives, or has asked for, in order."""
    streams: tuple[ReceivedStreamView, ...] | None
    """In the order of their vbuckets. None where there are too many to tell them unasked."""


def consumer_views(
    connections: Iterable[ConsumerConnection], *, now_s: float, name: str | None = None, streams_max: int | None = None
) -> list[ConsumerView]:
    """The connections, or the one that is named; with their streams unless they are too many."""
    wanted = [connection for connection in connections if name in (None, connection.name)]
    most = STREAMS_VIEWED_MAX if streams_max is None else streams_max
    tells_streams = name is not None or sum(len(connection.streams) for connection in wanted) <= most
    return [_view(connection, now_s, tells_streams=tells_streams) for connection in wanted]


def _view(connection: ConsumerConnection, now_s: float, *, tells_streams: bool) -> ConsumerView:
    vbuckets = sorted(connection.streams)
    return ConsumerView(
        name=connection.name,
        peer=connection.peer,
        is_proxied=connection.is_proxied,
        open_s=max(0.0, now_s - connection.opened_s),
        received_bytes=connection.received_bytes,
        received_changes=connection.received_changes,
        acked_bytes=connection.acked_bytes,
        unacked_bytes=connection.unacked_bytes,
        held_bytes=connection.held_bytes,
        buffer_bytes_max=connection.settings.buffer_bytes,
        is_held=connection.is_held,
        vbuckets=tuple(vbuckets),
        streams=tuple(_stream_view(connection.streams[vbucket]) for vbucket in vbuckets) if tells_streams else None,
    )


def _stream_view(stream: ReplicaStream) -> ReceivedStreamView:
    offset = stream.offset
    return ReceivedStreamView(
        vbucket=stream.vbucket,
        opaque=stream.opaque,
        flags=int(stream.asked.flags),
        state=stream.state.name.lower().replace("_", "-"),
        received_seqno=offset.seqno,
        snapshot_start_seqno=offset.snapshot_start,
        snapshot_end_seqno=offset.snapshot_end,
        is_inside_snapshot=stream.state is ConsumerStream.IN_SNAPSHOT,
        received_changes=stream.received_changes,
    )

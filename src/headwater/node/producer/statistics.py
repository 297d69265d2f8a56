"""What there is to tell of connections and their streams: for `stat dcp`, and for HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.stream import Stream

STREAMS_TOLD_MAX = 4096
"""Where all connections together have more streams, those of a connection are told when it is asked for by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    vbucket: int
    stream_id: int | None
    opaque: int
    state: str
    start_seqno: int
    end_seqno: int
    last_sent_seqno: int
    """Everything up to here was sent, or is not for this stream."""
    backlog_items: int
    """How many seqnos it is behind what is durable."""
    frames_sent: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatistics:
    name: str
    type: str
    open_s: float
    """How long it has been open."""
    total_bytes_sent: int
    total_acked_bytes: int
    unacked_bytes: int
    max_buffer_bytes: int
    """The consumer's buffer; 0 for no flow control."""
    noop_enabled: bool
    noop_interval_s: float
    noop_wait: bool
    """A noop was sent and is not answered yet."""
    collections_enabled: bool
    priority: str
    num_streams: int
    backlog_items: int
    streams: tuple[StreamStatistics, ...] | None
    """None where there are too many to tell them unasked."""


def connection_statistics(
    connections: Iterable[ProducerConnection], *, now_s: float, name: str | None = None
) -> list[ConnectionStatistics]:
    """The statistics of all connections, or of the one that is named."""
    wanted = [connection for connection in connections if name in (None, connection.name)]
    tells_streams = name is not None or sum(len(connection.streams) for connection in wanted) <= STREAMS_TOLD_MAX
    return [_of_connection(connection, now_s, tells_streams=tells_streams) for connection in wanted]


def _of_connection(connection: ProducerConnection, now_s: float, *, tells_streams: bool) -> ConnectionStatistics:
    controls, streams = connection.controls, connection.streams.values()
    return ConnectionStatistics(
        name=connection.name,
        type=connection.kind,
        open_s=max(0.0, now_s - connection.opened_s),
        total_bytes_sent=connection.sent_bytes,
        total_acked_bytes=connection.acked_bytes,
        unacked_bytes=connection.window.unacked_bytes,
        max_buffer_bytes=controls.buffer_bytes,
        noop_enabled=controls.noop_enabled,
        noop_interval_s=controls.noop_interval_s,
        noop_wait=connection.noop.is_waiting,
        collections_enabled=connection.knows_collections,
        priority=controls.priority,
        num_streams=len(connection.streams),
        backlog_items=sum(stream.backlog() for stream in streams),
        streams=tuple(_of_stream(stream) for stream in streams) if tells_streams else None,
    )


def _of_stream(stream: Stream) -> StreamStatistics:
    return StreamStatistics(
        vbucket=stream.vbucket,
        stream_id=stream.stream_id,
        opaque=stream.opaque,
        state=stream.state.name.lower().replace("_", "-"),
        start_seqno=stream.start_seqno,
        end_seqno=stream.end_seqno,
        last_sent_seqno=stream.passed_seqno,
        backlog_items=stream.backlog(),
        frames_sent=stream.frames_sent,
        bytes_sent=stream.bytes_sent,
    )

"""Statistics of producer connections and their streams: for `stat dcp`, the dashboard and its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headwater.kernels.memory import Column
from headwater.node.producer.stream import Stream

if TYPE_CHECKING:
    from headwater.node.producer.connection import ProducerConnection

STREAMS_VIEWED_MAX = 4096
"""If all connections together have more streams, only a connection that is requested by name lists its streams."""


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
    """How many seqnos it is behind the durable seqno."""
    frames_sent: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatistics:
    name: str
    type: str
    open_s: float
    """How long it has been open."""
    total_bytes_sent: int
    total_messages_sent: int
    """Sent by its streams, including those that have ended."""
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
    """None if there are too many, unless the connection is requested by name."""


def connection_statistics(
    connections: Iterable[ProducerConnection], *, now_s: float, name: str | None = None, streams_max: int | None = None
) -> list[ConnectionStatistics]:
    """The statistics of all connections, or of the named one. Those of streams are left out if there are too many."""
    wanted = [connection for connection in connections if name in (None, connection.name)]
    most = STREAMS_VIEWED_MAX if streams_max is None else streams_max
    with_streams = name is not None or sum(len(connection.streams) for connection in wanted) <= most
    return [_of_connection(connection, now_s, with_streams=with_streams) for connection in wanted]


def _of_connection(connection: ProducerConnection, now_s: float, *, with_streams: bool) -> ConnectionStatistics:
    controls, streams = connection.controls, connection.streams.values()
    _, backlogs = stream_backlogs(connection)
    behind = zip(streams, backlogs.tolist(), strict=True)
    return ConnectionStatistics(
        name=connection.name,
        type=connection.kind,
        open_s=max(0.0, now_s - connection.opened_s),
        total_bytes_sent=connection.sent_bytes,
        total_messages_sent=connection.sent_messages,
        total_acked_bytes=connection.acked_bytes,
        unacked_bytes=connection.window.unacked_bytes,
        max_buffer_bytes=controls.buffer_bytes,
        noop_enabled=controls.noop_enabled,
        noop_interval_s=controls.noop_interval_s,
        noop_wait=connection.noop.is_waiting,
        collections_enabled=connection.knows_collections,
        priority=controls.priority,
        num_streams=len(connection.streams),
        backlog_items=int(backlogs.sum()),
        streams=tuple(_of_stream(stream, backlog) for stream, backlog in behind) if with_streams else None,
    )


def stream_backlogs(connection: ProducerConnection) -> tuple[Column, Column]:
    """The vbuckets of the streams of a connection, and how many seqnos each stream is behind.

    Returns arrays, because this runs every second and a connection may have a thousand streams.
    """
    streams = connection.streams
    vbuckets = np.fromiter((vbucket for vbucket, _ in streams), dtype=np.int64, count=len(streams))
    passed = np.fromiter((stream.passed_seqno for stream in streams.values()), dtype=np.int64, count=len(streams))
    durable = connection.bucket.vbuckets.durable_seqnos[vbuckets].astype(np.int64)
    return vbuckets, np.maximum(durable - passed, 0)


def _of_stream(stream: Stream, backlog: int) -> StreamStatistics:
    return StreamStatistics(
        vbucket=stream.vbucket,
        stream_id=stream.stream_id,
        opaque=stream.opaque,
        state=stream.state.name.lower().replace("_", "-"),
        start_seqno=stream.start_seqno,
        end_seqno=stream.end_seqno,
        last_sent_seqno=stream.passed_seqno,
        backlog_items=backlog,
        frames_sent=stream.frames_sent,
        bytes_sent=stream.bytes_sent,
    )

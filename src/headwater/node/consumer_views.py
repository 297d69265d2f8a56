"""What can be seen of the connections by which this node receives its copies: for `stat dcp` and for the dashboard.

Plain data: `consumer.connection` makes a view of itself, `BucketService.consumer_views` gathers those of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

STREAMS_VIEWED_MAX = 4096
"""Where all connections together have more streams, those of one connection are given when it is asked for by name."""


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
    """The producer's address, or that of the proxy in between."""
    is_proxied: bool
    """Whether a proxy joins this node to the producer, as in a takeover."""
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
    """In the order of their vbuckets. None where there are too many to give them unasked."""

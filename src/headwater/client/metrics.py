"""The counters of a reader, and its lag.

The reader counts per run of changes or delivered batch, never per change. Any thread may read the numbers at any time:
values are replaced in one step, and collections that grow are copied before they are examined.

**Lag** is counted in seqnos: those that the vbucket has and the caller has not received. It is not a number of
changes: a document that was changed ten times takes ten seqnos and may arrive as one change, and seqnos of collections
that are not read count, too. A lag is unknown (None, not 0) until the vbucket's high seqno is known; and again after a
rollback, because the known seqno belonged to a history that is void.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.client.batches import SYSTEM_EVENT_OPS
from headwater.client.connection_string import Address
from headwater.client.pieces import RollbackPiece
from headwater.errors import HeadwaterError
from headwater.log_fields import LogEvent, fields
from headwater.phrases import counted_changes
from headwater.protocol.messages.dcp_streams import StreamEndReason
from headwater.protocol.numbers import Seqno, VBucketId

logger = logging.getLogger(__name__)

LAST_ROLLBACKS_MAX = 16
"""How many rollbacks are kept individually."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far a reader is behind, in seqnos."""

    total_seqnos: int | None
    """The sum over all vbuckets that are read; None unless all their lags are known."""
    max_seqnos: int | None
    """The lag of the vbucket that is furthest behind; None if no lag is known."""
    vbuckets_unknown: int
    """The number of vbuckets that are read and whose lag is unknown."""


def count_ops(batch: pa.RecordBatch) -> Counter[str]:
    """Count the rows of a batch by `op`."""
    ops = batch.column("op")
    counts = np.bincount(ops.indices.to_numpy(), minlength=len(ops.dictionary))
    return +Counter(dict(zip(ops.dictionary.to_pylist(), counts.tolist(), strict=True)))


def describe_ops(rows: Mapping[str, int]) -> str:
    """Describe row counts in words: changes of documents and system events, separately. Rollbacks do not count."""
    system_events = sum(rows.get(op, 0) for op in SYSTEM_EVENT_OPS)
    return counted_changes(sum(rows.values()) - system_events - rows.get("rollback", 0), system_events)


class ReaderMetrics:
    """The numbers of one reader, since it started."""

    def __init__(self, reader: str, bucket: str) -> None:
        self.reader = reader
        """The name of the read."""
        self.bucket = bucket
        """The bucket it reads."""
        self.changes: Counter[str] = Counter()
        """Rows returned, by `op`; `rollback` counts the rollbacks returned to the caller."""
        self.handed_out_bytes = 0
        """The size in memory of the returned batches."""
        self.batches = 0
        """Batches returned."""
        self.received_changes = 0
        """Changes received. After a lost connection, some are received again."""
        self.received_bytes = 0
        """Bytes received from the servers, of all messages."""
        self.received_change_bytes = 0
        """The share of changes in them, including headers."""
        self.snapshots = 0
        """Snapshots that have begun."""
        self.acks = 0
        """Flow-control acknowledgements sent."""
        self.acked_bytes = 0
        """Bytes acknowledged. If it does not grow while `ready_bytes` is high, the caller is slow."""
        self.ready_bytes = 0
        """Bytes that wait for the caller."""
        self.held_bytes = 0
        """Bytes that can't be returned yet: their snapshots are incomplete, or not persisted by all copies."""
        self.stream_requests = 0
        """Streams requested."""
        self.stream_ends: Counter[str] = Counter()
        """Streams ended by a server, by reason."""
        self.rollbacks = 0
        """Rollbacks demanded by a server."""
        self.last_rollbacks: tuple[RollbackPiece, ...] = ()
        """The last 16 rollbacks, the newest last."""
        self.reconnects: Counter[str] = Counter()
        """Reconnections, by node."""
        self.disconnects: Counter[str] = Counter()
        """Connections that were lost or failed, by the name of the [error](errors.md)."""
        self.noops = 0
        """Noops answered. A server sends one each interval."""
        self.config_updates = 0
        """New cluster maps."""
        self._handed_out_seqnos: dict[VBucketId, Seqno] = {}
        """For each vbucket that is read, the last seqno that the caller received."""
        self._received_seqnos: dict[VBucketId, Seqno] = {}
        self._high_seqnos: dict[VBucketId, Seqno] = {}
        self._closed: set[VBucketId] = set()

    # --- what was received ----------------------------------------------------------------------------------------

    def on_received(self, byte_count: int) -> None:
        self.received_bytes += byte_count

    def on_run(self, vbucket: VBucketId, rows: int, data_bytes: int, last_seqno: int) -> None:
        """Changes of one vbucket were received. `on_received` counts their bytes, too."""
        self.received_changes += rows
        self.received_change_bytes += data_bytes
        self._received_seqnos[vbucket] = Seqno(last_seqno)

    def on_snapshot(self, vbucket: VBucketId, end_seqno: Seqno) -> None:
        """A snapshot begins. The vbucket's high seqno is at least the snapshot's end."""
        self.snapshots += 1
        self._high_seqnos[vbucket] = max(end_seqno, self._high_seqnos.get(vbucket, Seqno(0)))

    def set_high_seqnos(self, seqnos: Mapping[VBucketId, Seqno]) -> None:
        """Set the high seqnos from a server's answer. After a failover they may be lower than before."""
        self._high_seqnos.update(seqnos)

    def on_ack(self, acked_bytes: int) -> None:
        self.acks += 1
        self.acked_bytes += acked_bytes

    def on_noop(self) -> None:
        self.noops += 1

    # --- the caller's position ------------------------------------------------------------------------------------

    def on_followed(self, vbucket: VBucketId, seqno: Seqno) -> None:
        """The vbucket is read from this seqno on."""
        self._closed.discard(vbucket)
        self._handed_out_seqnos[vbucket] = seqno

    def on_closed(self, vbucket: VBucketId) -> None:
        """The vbucket is no longer read: it has reached its end, or was closed."""
        self._closed.add(vbucket)
        for seqnos in (self._handed_out_seqnos, self._received_seqnos, self._high_seqnos):
            seqnos.pop(vbucket, None)

    # --- what was handed out --------------------------------------------------------------------------------------

    def on_handed_out(self, vbucket: VBucketId, seqno: Seqno) -> None:
        """The caller has received everything up to this seqno."""
        # Data that was received before the vbucket's end is still delivered after it was closed.
        if vbucket not in self._closed:
            self._handed_out_seqnos[vbucket] = seqno

    def on_batch(self, batch: pa.RecordBatch) -> None:
        """The caller has received these rows."""
        self.changes += count_ops(batch)
        self.handed_out_bytes += batch.nbytes
        self.batches += 1

    def set_buffered(self, *, ready_bytes: int, held_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self.held_bytes = held_bytes

    # --- streams and connections ----------------------------------------------------------------------------------

    def on_stream_request(self) -> None:
        self.stream_requests += 1

    def on_stream_end(self, reason: StreamEndReason) -> None:
        # A peer can send 2**32 reasons; count unknown ones together.
        self.stream_ends[reason.name.lower() if reason.is_known else "unknown"] += 1

    def on_rollback(self, rollback: RollbackPiece) -> None:
        vbucket, seqno = rollback.vbucket, rollback.seqno
        self.rollbacks += 1
        logger.info(
            "vbucket %d is rolled back from %d to %d",
            *(vbucket, rollback.from_seqno, seqno),
            extra=fields(
                event=LogEvent.ROLLED_BACK,
                vbucket=vbucket,
                from_seqno=rollback.from_seqno,
                seqno=seqno,
                vbuuid=rollback.new_vbuuid,
            ),
        )
        self.last_rollbacks = (*self.last_rollbacks, rollback)[-LAST_ROLLBACKS_MAX:]
        self._received_seqnos[vbucket] = seqno
        if vbucket in self._handed_out_seqnos:
            self._handed_out_seqnos[vbucket] = min(seqno, self._handed_out_seqnos[vbucket])
        self._high_seqnos.pop(vbucket, None)

    def on_reconnect(self, node: Address) -> None:
        self.reconnects[str(node)] += 1
        about = fields(event=LogEvent.CONNECTION_MADE_AGAIN, address=str(node))
        logger.info("%s is connected again", node, extra=about)

    def on_disconnect(self, error: HeadwaterError) -> None:
        kind = type(error).__name__
        self.disconnects[kind] += 1
        about = fields(event=LogEvent.CONNECTION_LOST, error=kind, reason=error.reason)
        logger.info("a connection has ended: %s", error.reason, extra=about)

    def on_config_update(self) -> None:
        self.config_updates += 1

    # --- reading the numbers --------------------------------------------------------------------------------------

    def lags(self) -> dict[VBucketId, int | None]:
        """Return the lag of every vbucket that is read, in seqnos; None if unknown."""
        highs = self._high_seqnos.copy()
        return {
            # The offset may be above the high seqno, which was requested a while ago.
            vbucket: max(0, highs[vbucket] - seqno) if vbucket in highs else None
            for vbucket, seqno in self._handed_out_seqnos.copy().items()
        }

    def lag(self) -> Lag:
        return self._summed(self.lags())

    def snapshot(self, *, vbuckets: bool = False) -> dict[str, Any]:
        """Return all current numbers, ready for JSON; with `vbuckets` also those of every vbucket."""
        lags = self.lags()
        taken: dict[str, Any] = {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
            if not name.startswith("_")
        }
        taken["last_rollbacks"] = [asdict(rollback) for rollback in self.last_rollbacks]
        taken["lag"] = asdict(self._summed(lags))
        if vbuckets:
            taken["vbuckets"] = self._vbuckets(lags)
        return taken

    def _summed(self, lags: dict[VBucketId, int | None]) -> Lag:
        known = [lag for lag in lags.values() if lag is not None]
        unknown = len(lags) - len(known)
        # If all vbuckets have reached their ends, the lag is 0. If there are none yet, it is unknown.
        has_started = bool(lags or self._closed)
        return Lag(
            total_seqnos=sum(known) if has_started and not unknown else None,
            max_seqnos=max(known, default=None),
            vbuckets_unknown=unknown,
        )

    def _vbuckets(self, lags: dict[VBucketId, int | None]) -> dict[str, dict[str, int | None]]:
        return {
            str(vbucket): {
                "handed_out_seqno": self._handed_out_seqnos.get(vbucket),
                "received_seqno": self._received_seqnos.get(vbucket),
                "high_seqno": self._high_seqnos.get(vbucket),
                "lag_seqnos": lag,
            }
            for vbucket, lag in sorted(lags.items())
        }

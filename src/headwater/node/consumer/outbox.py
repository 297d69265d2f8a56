"""What a consumer acknowledges, and when: only what is durable here.

The streams of a connection put in answers, bytes and prepares; `connection` reports each commit. Nothing is sent from
here that a crash of this node could make untrue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from headwater.errors import MalformedMessage, SnapshotViolation
from headwater.protocol.consumer import DcpConsumer
from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import Message, PlainResponse
from headwater.protocol.messages.dcp_changes import (
    Abort,
    Commit,
    Prepare,
    SeqnoAcknowledged,
    SnapshotFlags,
    SnapshotMarker,
)
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, VBucketId
from headwater.store.bucket import Bucket
from headwater.store.receiving import resume_offset, stored_value

# --- durable writes -----------------------------------------------------------------------------------------------
#
# Prepares, commits and aborts of a stream, and what is acknowledged of them. A copy acknowledges a prepare when the
# snapshot that holds it is complete and durable here. From then on the write survives the loss of the active node: this
# copy commits the prepare when it takes its place.


SyncWrite = Prepare | Commit | Abort


class SyncWriteReceiver:
    """The durable writes of one stream."""

    def __init__(self, bucket: Bucket, vbucket: VBucketId, opaque: int) -> None:
        self._bucket = bucket
        self._vbucket = vbucket
        self._opaque = opaque
        self._prepared_seqno: Seqno | None = None
        """The last prepare of the snapshot that is being received."""
        self._disk_seqno: Seqno | None = None
        """What to acknowledge of that snapshot instead, where it is from disk."""
        self._due: deque[tuple[int, Seqno]] = deque()
        """What to acknowledge, and the commit that has to be durable first."""
        self._acknowledged_seqno = Seqno(0)

    # --- in -------------------------------------------------------------------------------------------------------

    def begin_snapshot(self, marker: SnapshotMarker) -> None:
        """A snapshot begins. In one from disk, prepares that were decided may be missing.

        As recorded, a 7.0.5 server then acknowledges the end of the snapshot. With a marker 2.2, an 8.0.2 server
        acknowledges the high prepared seqno that the marker names, whether or not its prepare comes.
        """
        is_from_disk = SnapshotFlags.DISK in marker.flags
        self._disk_seqno = (marker.high_prepared_seqno or marker.end_seqno) if is_from_disk else None
        if is_from_disk and marker.high_prepared_seqno:
            self._prepared_seqno = marker.high_prepared_seqno

    def receive(self, message: SyncWrite, *, end_seqno: Seqno) -> None:
        """Take one, inside a snapshot that ends at `end_seqno`. The bucket's high seqno is then that of the message."""
        seqno, high = _seqno_of(message), int(self._bucket.vbuckets.high_seqnos[self._vbucket])
        if not high < seqno <= end_seqno:
            raise SnapshotViolation(f"seqno {seqno} after {high} in a snapshot that ends at {end_seqno}")
        if seqno >> 63:
            raise MalformedMessage(f"no vbucket gets to seqno {seqno}", offset=24)
        if isinstance(message, Prepare):
            self._bucket.enter_prepare(_stored_form(message))
            self._prepared_seqno = message.seqno
        elif isinstance(message, Commit):
            pending = self._bucket.prepares.find(self._vbucket, _collection_of(message), message.key)
            if pending is None or pending.seqno != message.prepared_seqno:
                raise MalformedMessage(f"a commit of a prepare at seqno {message.prepared_seqno} that has not come")
            self._bucket.commit_prepare(pending, seqno=message.commit_seqno)
        else:
            if not message.prepared_seqno < message.abort_seqno:
                raise MalformedMessage("an abort before its prepare", offset=24)
            self._bucket.enter_abort(replace(message, collection_id=_collection_of(message)))

    # --- out ------------------------------------------------------------------------------------------------------

    def on_accepted(self) -> None:
        """The stream goes on. A producer that has been restarted does not know what was acknowledged before.

        In the middle of a snapshot this copy is not one to be promoted, so that the rest of it has to come first.
        """
        prepared_seqno = Seqno(int(self._bucket.prepares.high_prepared[self._vbucket]))
        if not prepared_seqno:
            return
        self._prepared_seqno = prepared_seqno
        offset = resume_offset(self._bucket, self._vbucket)
        if offset.seqno == offset.snapshot_end:
            self.on_snapshot_complete()

    def on_snapshot_complete(self) -> None:
        """All of a snapshot has come; it is not durable yet."""
        if self._prepared_seqno is not None:
            self._due.append((self._bucket.pending.number, self._disk_seqno or self._prepared_seqno))
            self._prepared_seqno = None

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to acknowledge as soon as it is durable."""
        return bool(self._due)

    def on_durable(self) -> bytes:
        """The bucket has published a commit: the acknowledgements that are due."""
        reached: Seqno | None = None
        while self._due and self._due[0][0] <= self._bucket.durable_commit:
            reached = self._due.popleft()[1]
        if reached is None or reached > self._bucket.vbuckets.durable_seqno(self._vbucket):
            # It is nothing, or was taken back again.
            return b""
        if reached <= self._acknowledged_seqno:
            # The copy was emptied and filled again. A 7.0.5 server whose topology does not have this copy keeps its
            # last acknowledgement as long as the stream lives, and closes the connection on one that is not higher.
            return b""
        self._acknowledged_seqno = reached
        return SeqnoAcknowledged(opaque=self._opaque, vbucket=self._vbucket, prepared_seqno=reached).encode()


def _seqno_of(message: SyncWrite) -> Seqno:
    if isinstance(message, Prepare):
        return message.seqno
    return message.commit_seqno if isinstance(message, Commit) else message.abort_seqno


def _collection_of(message: SyncWrite) -> CollectionId:
    return DEFAULT_COLLECTION if message.collection_id is None else message.collection_id


def _stored_form(prepare: Prepare) -> Prepare:
    """The prepare as it is stored: with its collection."""
    value, datatype = stored_value(prepare.value, prepare.datatype)
    return replace(
        prepare, value=value, datatype=datatype, lock_time=0, nru=0, collection_id=_collection_of(prepare)
    )  # fmt: skip


# --- what waits for a commit --------------------------------------------------------------------------------------


class Outbox:
    """Answers and acknowledgements of one connection that wait for a commit; they keep their order.

    So the producer waits when the disk does, and what is held in memory is never more than the buffer.
    """

    def __init__(self, bucket: Bucket, consumer: DcpConsumer[Any]) -> None:
        """What is durable is sent by `consumer`."""
        self.undurable_bytes = 0
        """What flow control counts of what was received and is not durable yet."""
        self.acknowledging: dict[int, SyncWriteReceiver] = {}
        """Streams with durable writes to acknowledge, by their opaques."""
        self._bucket = bucket
        self._consumer = consumer
        self._waiting: deque[tuple[int, Message | int]] = deque()
        """Answers, and bytes to be released, each with the commit that makes durable what they are for."""

    def send(self, message: Message) -> None:
        """Send it once everything that was received so far is durable."""
        self._wait(message)

    def send_success(self, opcode: int, opaque: int) -> None:
        self._wait(PlainResponse(opcode=Opcode(opcode), opaque=opaque))

    def release(self, window_bytes: int) -> None:
        """Let the producer send as much again once what was received is durable."""
        if window_bytes:
            self.undurable_bytes += window_bytes
            self._wait(window_bytes)

    def on_durable(self) -> None:
        """The bucket has published a commit, or is at rest."""
        while self._waiting and self._waiting[0][0] <= self._bucket.durable_commit:
            what = self._waiting.popleft()[1]
            if isinstance(what, int):
                self.undurable_bytes -= what
                self._consumer.release(what)
            else:
                self._consumer.send(what)
        for opaque, sync_writes in list(self.acknowledging.items()):
            self._consumer.send(sync_writes.on_durable())
            if not sync_writes.is_waiting:
                del self.acknowledging[opaque]

    def on_void(self) -> None:
        """What was not durable is gone: it is not acknowledged."""
        self._waiting.clear()

    def _wait(self, what: Message | int) -> None:
        """For the commit that makes everything durable that was received so far."""
        bucket = self._bucket
        commit = 0 if bucket.in_flight is None else bucket.in_flight.number
        if not bucket.pending.is_empty:
            commit = bucket.pending.number
        self._waiting.append((commit, what))
        self.on_durable()

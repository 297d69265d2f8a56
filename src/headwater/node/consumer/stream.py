"""One stream that this node receives: a vbucket's copy, brought up to date.

`protocol.snapshots.ConsumedStream` checks which message and which seqno may come next; this module applies changes to
the store. A message that does not fit is refused with a status, which ends the stream: what comes after it would leave
a gap that no check finds. `connection` is the only caller. This module sends only through the outbox.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from headwater.errors import MalformedMessage, SnapshotViolation, UnexpectedMessage
from headwater.kernels.memory import Bytes
from headwater.node.service import BucketService, ReceivedStreamView
from headwater.protocol.consumer import DcpConsumer, StreamRun
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Negotiated, Opcode
from headwater.protocol.frames import decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message, PlainResponse, Request
from headwater.protocol.messages.dcp_changes import (
    Abort,
    Commit,
    Deletion,
    Expiration,
    Mutation,
    Prepare,
    SeqnoAcknowledged,
    SeqnoAdvanced,
    SnapshotFlags,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.messages.dcp_streams import AddStream, SetVBucketState, StreamRequest, VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import ConsumedStream
from headwater.protocol.states import ConsumerStream, RollbackDemanded, StreamAccepted
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.stream_requests import StreamRequestValue
from headwater.store import receiving
from headwater.store.bucket import Bucket
from headwater.store.vbuckets import RECEIVING_STATES

# --- durable writes -----------------------------------------------------------------------------------------------
#
# The prepares, commits and aborts of a stream, and their acknowledgement. A copy acknowledges a prepare once the
# snapshot that holds it is complete and durable here. From then on the write survives the loss of the active node: if
# this copy takes its place, it commits the prepare.


SyncWrite = Prepare | Commit | Abort


class SyncWriteReceiver:
    """The durable writes of one stream."""

    def __init__(self, bucket: Bucket, vbucket: VBucketId, opaque: int) -> None:
        self._bucket = bucket
        self._vbucket = vbucket
        self._opaque = opaque
        self._prepared_seqno: Seqno | None = None
        """The last prepare of the snapshot being received."""
        self._disk_seqno: Seqno | None = None
        """For a snapshot from disk: the seqno to acknowledge instead."""
        self._due: deque[tuple[int, Seqno]] = deque()
        """Seqnos to acknowledge, each with the commit that has to be durable first."""
        self._acknowledged_seqno = Seqno(0)

    # --- in -------------------------------------------------------------------------------------------------------

    def begin_snapshot(self, marker: SnapshotMarker) -> None:
        """Begin a snapshot. One from disk may lack prepares that were committed or aborted.

        As recorded, a 7.0.5 server then acknowledges the end of the snapshot. With a marker 2.2, an 8.0.2 server
        acknowledges the high prepared seqno that the marker names, whether or not its prepare comes.
        """
        is_from_disk = SnapshotFlags.DISK in marker.flags
        self._disk_seqno = (marker.high_prepared_seqno or marker.end_seqno) if is_from_disk else None
        if is_from_disk and marker.high_prepared_seqno:
            self._prepared_seqno = marker.high_prepared_seqno

    def receive(self, message: SyncWrite, *, end_seqno: Seqno) -> None:
        """Apply a message inside a snapshot that ends at `end_seqno`. Its seqno becomes the bucket's high seqno."""
        seqno, high = _seqno_of(message), self._bucket.vbuckets.high_seqno(self._vbucket)
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
        """The producer has accepted the stream. If it was restarted, it does not know what was acknowledged before.

        A copy in the middle of a snapshot can't be promoted, so the rest of the snapshot has to come first.
        """
        prepared_seqno = Seqno(int(self._bucket.prepares.high_prepared[self._vbucket]))
        if not prepared_seqno:
            return
        self._prepared_seqno = prepared_seqno
        offset = receiving.resume_offset(self._bucket, self._vbucket)
        if offset.seqno == offset.snapshot_end:
            self.on_snapshot_complete()

    def on_snapshot_complete(self) -> None:
        """The snapshot has arrived as a whole, but is not durable yet."""
        if self._prepared_seqno is not None:
            self._due.append((self._bucket.pending_commit, self._disk_seqno or self._prepared_seqno))
            self._prepared_seqno = None

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to acknowledge as soon as it is durable."""
        return bool(self._due)

    def on_durable(self) -> bytes:
        """The bucket has published a commit. Returns the acknowledgements that are due."""
        reached: Seqno | None = None
        while self._due and self._due[0][0] <= self._bucket.durable_commit:
            reached = self._due.popleft()[1]
        if reached is None or reached > self._bucket.vbuckets.durable_seqno(self._vbucket):
            # Nothing is due, or it was rolled back again.
            return b""
        if reached <= self._acknowledged_seqno:
            # The copy was emptied and filled again. A 7.0.5 server whose topology lacks this copy keeps its last
            # acknowledgement as long as the stream lives, and closes the connection on one that is not higher.
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
    value, datatype = receiving.stored_value(prepare.value, prepare.datatype)
    return replace(
        prepare, value=value, datatype=datatype, lock_time=0, nru=0, collection_id=_collection_of(prepare)
    )  # fmt: skip


# --- what waits for a commit --------------------------------------------------------------------------------------


class Outbox:
    """Answers and acknowledgements of one connection that wait for a commit, in order.

    So the producer waits when the disk does, memory never holds more than the buffer, and a crash of this node can't
    make untrue what was sent.
    """

    def __init__(self, bucket: Bucket, consumer: DcpConsumer[Any]) -> None:
        """`consumer` sends what has become durable."""
        self.undurable_bytes = 0
        """Received bytes that are not durable yet, as flow control counts them."""
        self.acknowledging: dict[int, SyncWriteReceiver] = {}
        """Streams with durable writes to acknowledge, by their opaques."""
        self._bucket = bucket
        self._consumer = consumer
        self._waiting: deque[tuple[int, Message | int]] = deque()
        """Answers, and byte counts to release, each with the commit that makes durable what they stand for."""

    def send_success(self, opcode: int, opaque: int) -> None:
        """Answer once everything that was received so far is durable."""
        self._wait(PlainResponse(opcode=Opcode(opcode), opaque=opaque))

    def release(self, window_bytes: int) -> None:
        """Once everything received so far is durable, let the producer send this much more."""
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
        """Data that was not durable is lost: do not acknowledge it."""
        self._waiting.clear()

    def _wait(self, what: Message | int) -> None:
        """Wait for the commit that makes everything received so far durable."""
        self._waiting.append((self._bucket.last_commit, what))
        self.on_durable()


class ReplicaStream(ConsumedStream):
    """See the module. Methods raise `RequestRefused` if a message is refused."""

    def __init__(self, service: BucketService, outbox: Outbox, request: AddStream, *, opaque: int) -> None:
        super().__init__(receiving.resume_offset(service.bucket, request.vbucket))
        self._service = service
        self._bucket = service.bucket
        self._outbox = outbox
        self.asked = request
        self.is_answered = False
        """Whether the request for the stream was answered."""
        self.vbucket = request.vbucket
        self.opaque = opaque
        self.received_changes = 0
        """All messages with a seqno: changes of documents, durable writes, events of collections."""
        self.sync_writes = SyncWriteReceiver(self._bucket, self.vbucket, opaque)

    # --- opening --------------------------------------------------------------------------------------------------

    def request(self) -> StreamRequest:
        """The request for what this copy lacks."""
        self.move(StreamRequest)
        offset = receiving.resume_offset(self._bucket, self.vbucket)
        self.restart(offset)
        facts = self._bucket.vbuckets.facts[self.vbucket]
        purge_seqno = facts.purge_seqno if facts is not None and offset.seqno < facts.purge_seqno else None
        return StreamRequest(
            opaque=self.opaque,
            vbucket=self.vbucket,
            flags=self.asked.flags,
            start_seqno=offset.seqno,
            # A copy that holds nothing fits any history, as in a 7.0.5 server.
            vbuuid=offset.vbuuid if offset.seqno else Vbuuid(0),
            snapshot_start_seqno=offset.snapshot_start,
            snapshot_end_seqno=offset.snapshot_end,
            value=StreamRequestValue(purge_seqno=purge_seqno).encode(),
        )

    def on_accepted(self, failover_log: tuple[FailoverEntry, ...]) -> None:
        self.move(StreamAccepted)
        self._check_receiving()
        receiving.take_failover_log(self._bucket, self.vbucket, failover_log)
        self.sync_writes.on_accepted()
        self._acknowledge_later()
        self._service.on_change()

    def on_rollback_demanded(self, to_seqno: Seqno) -> None:
        """The producer's history differs from this copy's. Refuses a rollback that does not lead further back."""
        self.move(RollbackDemanded)
        start = self.tracker.offset.seqno
        if to_seqno >= start:
            raise RequestRefused(Status.ROLLBACK, f"a rollback to {to_seqno} of a copy that is at {start}")

    # --- changes --------------------------------------------------------------------------------------------------

    def receive_run(self, run: StreamRun[Any], negotiated: Negotiated) -> None:
        """Apply a run of consecutive changes."""
        self._check_receiving()
        data, at = run.data, 0
        assert not isinstance(data, bytes), "runs are views of the receive buffer"
        try:
            while at < len(data):
                end_seqno = self._snapshot_end()
                if negotiated.collections:
                    received = receiving.receive_run(self._bucket, self.vbucket, data[at:], end_seqno=end_seqno)
                    at += received.consumed_bytes
                    if not received.has_to_be_decoded:
                        break
                at = self._receive_decoded(data, at, negotiated)
        except SnapshotViolation as error:
            raise RequestRefused(Status.ERANGE, error.reason) from error
        except MalformedMessage as error:
            raise RequestRefused(Status.EINVAL, error.reason) from error
        self.received_changes += run.rows
        self._follow()

    def _receive_decoded(self, run: Bytes, at: int, negotiated: Negotiated) -> int:
        decoded = decode_frame(run.data, at)
        assert decoded is not None, "runs hold whole frames"
        message = decode_message(decoded[0], negotiated)
        assert isinstance(message, Mutation | Deletion | Expiration), "runs hold changes of documents"
        if isinstance(message, Deletion) and (message.delete_time is not None) != negotiated.collections:
            # As in a 7.0.5 server: the producer was opened for another kind of consumer, and leaves out delete times.
            raise RequestRefused(
                Status.EINVAL,
                "a deletion has 21 bytes of extras where collections are negotiated, else 18; open the producer with "
                "delete times",
            )
        receiving.receive_change(self._bucket, self.vbucket, message, end_seqno=self._snapshot_end())
        self._follow()
        return decoded[1]

    def receive(self, message: Request) -> None:
        """Process any other message of the stream, except its end."""
        try:
            self._receive(message)
        except SnapshotViolation as error:
            raise RequestRefused(Status.ERANGE, error.reason) from error
        except (MalformedMessage, UnexpectedMessage) as error:
            raise RequestRefused(Status.EINVAL, error.reason) from error

    def _receive(self, message: Request) -> None:
        if message.vbucket != self.vbucket:
            raise MalformedMessage(f"a message for vbucket {message.vbucket} in a stream of vbucket {self.vbucket}")
        if isinstance(message, SetVBucketState):
            self._set_state(message)
            return
        self._check_receiving()
        if isinstance(message, SnapshotMarker):
            self._begin_snapshot(message)
            return
        end_seqno = self._snapshot_end()
        self.move(type(message))
        if isinstance(message, SystemEvent):
            uid = receiving.receive_event(self._bucket, self.vbucket, message, end_seqno=end_seqno)
            if uid > self._bucket.manifest.uid:
                # The cluster has not sent this node the manifest yet, and the collection's changes need it.
                self._service.set_manifest(self._bucket.vbucket_manifest(self.vbucket))
        elif isinstance(message, SeqnoAdvanced):
            self.tracker.on_seqno(message.seqno)
            receiving.advance_seqno(self._bucket, self.vbucket, message.seqno)
        elif isinstance(message, Prepare | Commit | Abort):
            self.sync_writes.receive(message, end_seqno=end_seqno)
        self.received_changes += 1
        self._follow()

    def _begin_snapshot(self, marker: SnapshotMarker) -> None:
        if marker.start_seqno > marker.end_seqno:
            raise MalformedMessage(f"a snapshot from {marker.start_seqno} to {marker.end_seqno}")
        self.begin_snapshot(marker)
        self.sync_writes.begin_snapshot(marker)
        receiving.begin_snapshot(
            self._bucket,
            self.vbucket,
            start=self.tracker.offset.snapshot_start,
            end=marker.end_seqno,
            has_history=SnapshotFlags.HISTORY in marker.flags,
            purge_seqno=marker.purge_seqno or Seqno(0),
            completed_seqno=marker.high_completed_seqno or Seqno(0),
        )
        self._service.on_change()

    def _set_state(self, message: SetVBucketState) -> None:
        if not message.state.is_known:
            raise MalformedMessage(f"{message.state} is not the state of a vbucket")
        self._check_receiving()
        self.move(SetVBucketState)
        self._bucket.set_vbucket_state(self.vbucket, message.state)
        if message.state == VBucketState.ACTIVE:
            self._service.history.taken_over(self.vbucket, node=self._service.other_active_node(self.vbucket))
        self._service.on_change()
        self._outbox.send_success(message.opcode, message.opaque)

    def _snapshot_end(self) -> Seqno:
        if self.state is not ConsumerStream.IN_SNAPSHOT:
            raise SnapshotViolation("a change outside any snapshot")
        return self.tracker.offset.snapshot_end

    def _follow(self) -> None:
        """Advance the tracker to the vbucket's high seqno, and complete the snapshot if that is its end."""
        self._service.on_change()
        high = self._bucket.vbuckets.high_seqno(self.vbucket)
        if high == self.tracker.offset.seqno:
            return
        if self.advance(first=high, last=high):
            self.sync_writes.on_snapshot_complete()
            self._acknowledge_later()
            if SnapshotFlags.ACK in self.tracker.flags:
                self._outbox.send_success(Opcode.DCP_SNAPSHOT_MARKER, self.opaque)

    def _acknowledge_later(self) -> None:
        if self.sync_writes.is_waiting:
            self._outbox.acknowledging[self.opaque] = self.sync_writes

    def _check_receiving(self) -> None:
        numbers = self._bucket.vbuckets
        if numbers.state(self.vbucket) not in RECEIVING_STATES:
            raise RequestRefused(Status.NOT_MY_VBUCKET, "the vbucket is not a copy any more")
        if numbers.high_seqno(self.vbucket) != self.tracker.offset.seqno:
            raise RequestRefused(Status.KEY_ENOENT, "the vbucket is not where the stream has brought it")

    def view(self) -> ReceivedStreamView:
        offset = self.tracker.offset
        return ReceivedStreamView(
            vbucket=self.vbucket,
            opaque=self.opaque,
            flags=int(self.asked.flags),
            state=self.state.name.lower().replace("_", "-"),
            received_seqno=offset.seqno,
            snapshot_start_seqno=offset.snapshot_start,
            snapshot_end_seqno=offset.snapshot_end,
            is_inside_snapshot=self.state is ConsumerStream.IN_SNAPSHOT,
            received_changes=self.received_changes,
        )

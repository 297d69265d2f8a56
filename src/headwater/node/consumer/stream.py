"""One stream that this node receives: a vbucket's copy, brought up to date.

`protocol.snapshots.ConsumedStream` says which message and which seqno may come next; here changes are applied to the
store. A message that does not fit is refused with a status, and with it the stream is over: what came behind it would
leave a gap that no check finds. `connection` is the only caller. Nothing is sent from here but through the outbox.
"""

from __future__ import annotations

from typing import Any

from headwater.errors import MalformedMessage, SnapshotViolation, UnexpectedMessage
from headwater.node.consumer.outbox import Outbox, SyncWriteReceiver
from headwater.node.consumer_views import ReceivedStreamView
from headwater.node.service import BucketService, RequestRefused
from headwater.protocol.consumer import StreamRun
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Negotiated, Opcode
from headwater.protocol.frames import decode_frame
from headwater.protocol.kernels.memory import Bytes
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import (
    Abort,
    Commit,
    Deletion,
    Expiration,
    Mutation,
    Prepare,
    SeqnoAdvanced,
    SnapshotFlags,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.messages.dcp_streams import AddStream, SetVBucketState, StreamRequest, VBucketState
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.snapshots import ConsumedStream, StreamOffset
from headwater.protocol.states import ConsumerStream, RollbackDemanded, RollbackDone, StreamAccepted
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRequestValue
from headwater.store.receiving import (
    RECEIVING_STATES,
    advance_seqno,
    begin_snapshot,
    receive_change,
    receive_event,
    receive_run,
    resume_offset,
    take_failover_log,
)


class ReplicaStream(ConsumedStream):
    """See the module. Methods raise `RequestRefused` where a message is not taken."""

    def __init__(self, service: BucketService, outbox: Outbox, request: AddStream, *, opaque: int) -> None:
        super().__init__(resume_offset(service.bucket, request.vbucket))
        self._service = service
        self._bucket = service.bucket
        self._outbox = outbox
        self.asked = request
        self.is_answered = False
        """Whether the request for the stream has got its answer."""
        self.vbucket = request.vbucket
        self.opaque = opaque
        self.received_changes = 0
        """Whatever has a seqno: changes of documents, durable writes, events of collections."""
        self.sync_writes = SyncWriteReceiver(self._bucket, self.vbucket, opaque)

    @property
    def offset(self) -> StreamOffset:
        """How far the stream has brought the copy."""
        return self.tracker.offset

    # --- opening --------------------------------------------------------------------------------------------------

    def request(self) -> StreamRequest:
        """Ask for what this copy lacks."""
        self.move(StreamRequest)
        offset = resume_offset(self._bucket, self.vbucket)
        self.restart(offset)
        facts = self._bucket.vbuckets.facts[self.vbucket]
        purge_seqno = facts.purge_seqno if facts is not None and offset.seqno < facts.purge_seqno else None
        return StreamRequest(
            opaque=self.opaque,
            vbucket=self.vbucket,
            flags=self.asked.flags,
            start_seqno=offset.seqno,
            # A copy that holds nothing shares any history, as in a 7.0.5 server.
            vbuuid=offset.vbuuid if offset.seqno else Vbuuid(0),
            snapshot_start_seqno=offset.snapshot_start,
            snapshot_end_seqno=offset.snapshot_end,
            value=StreamRequestValue(purge_seqno=purge_seqno).encode(),
        )

    def on_accepted(self, failover_log: tuple[FailoverEntry, ...]) -> None:
        self.move(StreamAccepted)
        self._check_receiving()
        take_failover_log(self._bucket, self.vbucket, failover_log)
        self.sync_writes.on_accepted()
        self._acknowledge_later()
        self._service.on_change()

    def on_rollback_demanded(self, to_seqno: Seqno) -> None:
        """The producer does not share what this copy holds. Each answer has to lead further back, or it is the last."""
        self.move(RollbackDemanded)
        start = self.tracker.offset.seqno
        if to_seqno >= start:
            raise RequestRefused(Status.ROLLBACK, f"a rollback to {to_seqno} of a copy that is at {start}")

    def on_rolled_back(self) -> None:
        self.move(RollbackDone)

    def on_flushed(self) -> None:
        """The vbucket is empty."""
        self.restart(resume_offset(self._bucket, self.vbucket))

    # --- changes --------------------------------------------------------------------------------------------------

    def receive_run(self, run: StreamRun[Any], negotiated: Negotiated) -> None:
        """Changes that came one behind the other."""
        self._check_receiving()
        data, at = run.data, 0
        assert not isinstance(data, bytes), "runs are views of the receive buffer"
        try:
            while at < len(data):
                end_seqno = self._snapshot_end()
                if negotiated.collections:
                    received = receive_run(self._bucket, self.vbucket, data[at:], end_seqno=end_seqno)
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
            # As in a 7.0.5 server: the producer has opened for another kind of consumer, and leaves out delete times.
            raise RequestRefused(
                Status.EINVAL,
                "a deletion has 21 bytes of extras where collections are negotiated, else 18; open the producer with "
                "delete times",
            )
        receive_change(self._bucket, self.vbucket, message, end_seqno=self._snapshot_end())
        self._follow()
        return decoded[1]

    def receive(self, message: Request) -> None:
        """Any other message of the stream, but for its end."""
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
            self._receive_event(message, end_seqno)
        elif isinstance(message, SeqnoAdvanced):
            self.tracker.on_seqno(message.seqno)
            advance_seqno(self._bucket, self.vbucket, message.seqno)
        elif isinstance(message, Prepare | Commit | Abort):
            self.sync_writes.receive(message, end_seqno=end_seqno)
        self.received_changes += 1
        self._follow()

    def _receive_event(self, message: SystemEvent, end_seqno: Seqno) -> None:
        uid = receive_event(self._bucket, self.vbucket, message, end_seqno=end_seqno)
        if uid > self._bucket.manifest.uid:
            # The cluster has not sent this node the manifest yet, and without it the collection's changes have no home.
            self._service.set_manifest(self._bucket.vbucket_manifest(self.vbucket))

    def _begin_snapshot(self, marker: SnapshotMarker) -> None:
        if marker.start_seqno > marker.end_seqno:
            raise MalformedMessage(f"a snapshot from {marker.start_seqno} to {marker.end_seqno}")
        self.begin_snapshot(marker)
        self.sync_writes.begin_snapshot(marker)
        begin_snapshot(
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
        """Bring the tracker to where the vbucket is."""
        self._service.on_change()
        high = Seqno(int(self._bucket.vbuckets.high_seqnos[self.vbucket]))
        if high == self.offset.seqno:
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
        if int(numbers.high_seqnos[self.vbucket]) != self.tracker.offset.seqno:
            raise RequestRefused(Status.KEY_ENOENT, "the vbucket is not where the stream has brought it")

    def view(self) -> ReceivedStreamView:
        offset = self.offset
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

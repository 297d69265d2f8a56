"""One stream that this node receives: a vbucket's copy, brought up to date.

The table of a consumer's stream (`protocol.stream_state`) says which message may come when, the snapshot tracker which
seqno. A message that does not fit is refused with a status, and with it the stream is over: what came behind it would
leave a gap that nobody notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.errors import MalformedMessage, SnapshotViolation, UnexpectedMessage
from headwater.node.consumer.outbox import Outbox, SyncWriteReceiver
from headwater.node.consumer_views import ReceivedStreamView
from headwater.node.service import BucketService, RequestRefused
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Magic, Negotiated, Opcode
from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frame
from headwater.protocol.kernels.frame_runs import cut_runs
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
from headwater.protocol.messages.dcp_streams import AddStream, SetVBucketState, StreamRequest
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.snapshots import SnapshotTracker, StreamOffset
from headwater.protocol.states import (
    ConsumerStream,
    RollbackDemanded,
    RollbackDone,
    SnapshotCompleted,
    StreamAccepted,
    consumer_stream_after,
)
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

# Received bytes, cut into runs of changes and single frames.
#
# Changes of one stream that lie behind each other are handed on as one run, without a look at each. The order is kept:
# between the streams come requests of whoever drives the connection.


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """Changes of one stream, frame behind frame. They are valid until the next item is asked for."""

    opaque: int
    data: Bytes
    changes: int


@dataclass(frozen=True, slots=True)
class SingleFrame:
    frame: Frame
    size_bytes: int


class Inbound:
    """What has come and is not handled yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed_bytes = HEADER_BYTES
        """How much has to be there before another look is worth it: a large frame comes in many pieces."""
        self.is_paused = False
        """Set while items are handed out: the rest stays for later."""
        self.is_held = False
        self._looked_bytes = 0
        """Of what is held, where the next frame that was not looked at for a noop begins."""
        self._is_cut_short = False

    @property
    def is_held_back(self) -> bool:
        """There are whole frames that were left for later, and later is now."""
        return self._is_cut_short and not self.is_paused and not self.is_held

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def _stops_here(self) -> bool:
        self._is_cut_short = self.is_paused
        return self._is_cut_short

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[ChangeRun | SingleFrame]:
        """What came, as far as it is whole. Raises the documented error for bytes that are no frames."""
        self._buffer += data
        if self.is_paused or self.is_held or len(self._buffer) < self._needed_bytes:
            return
        self._is_cut_short = False
        received, self._buffer = self._buffer, bytearray()
        self._needed_bytes = HEADER_BYTES
        taken = 0
        try:
            cut = cut_runs(np.frombuffer(received, dtype=np.uint8), keeps_order=True)
            for run in cut.runs:
                taken = run.end
                if run.rows:
                    yield ChangeRun(run.opaque, cut.data[run.start : run.end], run.rows)
                else:
                    decoded = decode_frame(received, run.start)
                    assert decoded is not None, "runs are whole"
                    yield SingleFrame(decoded[0], run.end - run.start)
                if self._stops_here():
                    break
        finally:
            self._buffer[:0] = received[taken:]
            if len(self._buffer) >= HEADER_BYTES:
                self._needed_bytes = HEADER_BYTES + int.from_bytes(self._buffer[8:12])

    # --- holding --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hand out nothing that comes from now on, until `release`."""
        self.is_held, self._looked_bytes = True, 0

    def release(self) -> None:
        """Go on. What was held is handed out with what comes next, be it nothing."""
        self.is_held, self._needed_bytes = False, HEADER_BYTES
        self._is_cut_short = len(self._buffer) >= HEADER_BYTES

    def take_noops(self) -> list[int]:
        """Take the noops out of what is held, so that they can be answered at once. Returns their opaques."""
        opaques = []
        buffer, at = self._buffer, self._looked_bytes
        while self.is_held and len(buffer) - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(buffer[at + 8 : at + 12])
            if buffer[at] == Magic.REQUEST and buffer[at + 1] == Opcode.DCP_NOOP and len(buffer) >= end:
                opaques.append(int.from_bytes(buffer[at + 12 : at + 16]))
                del buffer[at:end]
            elif len(buffer) >= end:
                at = end
            else:
                break
        self._looked_bytes = at
        return opaques


class ReplicaStream:
    """See the module. Methods raise `RequestRefused` where a message is not taken."""

    def __init__(self, service: BucketService, outbox: Outbox, request: AddStream, *, opaque: int) -> None:
        self._service = service
        self._bucket = service.bucket
        self._outbox = outbox
        self.asked = request
        self.is_answered = False
        """Whether whoever asked for the stream has got an answer."""
        self.vbucket = request.vbucket
        self.opaque = opaque
        self.state = ConsumerStream.IDLE
        self.received_changes = 0
        """Whatever has a seqno: changes of documents, durable writes, events of collections."""
        self.sync_writes = SyncWriteReceiver(self._bucket, self.vbucket, opaque)
        self._tracker = SnapshotTracker(offset=resume_offset(self._bucket, self.vbucket))
        self._has_nothing_in_common = False
        """The producer has sent us back to the start, so that our branches mean nothing to it."""

    @property
    def offset(self) -> StreamOffset:
        """Where the stream has brought the copy to."""
        return self._tracker.offset

    # --- opening --------------------------------------------------------------------------------------------------

    def request(self) -> StreamRequest:
        """Ask for what this copy lacks."""
        self.move(StreamRequest)
        offset = resume_offset(self._bucket, self.vbucket)
        self._tracker = SnapshotTracker(offset=offset)
        facts = self._bucket.vbuckets.facts[self.vbucket]
        purge_seqno = facts.purge_seqno if facts is not None and offset.seqno < facts.purge_seqno else None
        return StreamRequest(
            opaque=self.opaque,
            vbucket=self.vbucket,
            flags=self.asked.flags,
            start_seqno=offset.seqno,
            vbuuid=Vbuuid(0) if self._has_nothing_in_common and offset.seqno == 0 else offset.vbuuid,
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
        start = self._tracker.offset.seqno
        is_first_from_nothing = start == to_seqno == 0 and not self._has_nothing_in_common
        if to_seqno >= start and not is_first_from_nothing:
            raise RequestRefused(Status.ROLLBACK, f"a rollback to {to_seqno} of a copy that is at {start}")

    def on_rolled_back(self, reached: Seqno) -> None:
        self._has_nothing_in_common = reached == 0
        self.move(RollbackDone)

    def on_flushed(self) -> None:
        """The vbucket is empty."""
        self._tracker = SnapshotTracker(offset=resume_offset(self._bucket, self.vbucket))

    # --- changes --------------------------------------------------------------------------------------------------

    def receive_run(self, run: ChangeRun, negotiated: Negotiated) -> None:
        """Changes that came one behind the other."""
        self._check_receiving()
        data, at = run.data, 0
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
        self.received_changes += run.changes
        self._follow()

    def _receive_decoded(self, run: Bytes, at: int, negotiated: Negotiated) -> int:
        decoded = decode_frame(run.data, at)
        assert decoded is not None, "runs hold whole frames"
        message = decode_message(decoded[0], negotiated)
        assert isinstance(message, Mutation | Deletion | Expiration), "runs hold changes of documents"
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
            self._tracker.on_seqno(message.seqno)
            advance_seqno(self._bucket, self.vbucket, message.seqno)
        elif isinstance(message, Prepare | Commit | Abort):
            self.sync_writes.receive(message, end_seqno=end_seqno)
        self.received_changes += 1
        self._follow()

    def _receive_event(self, message: SystemEvent, end_seqno: Seqno) -> None:
        uid = receive_event(self._bucket, self.vbucket, message, end_seqno=end_seqno)
        if uid > self._bucket.manifest.uid:
            # The cluster has not told this node yet, and without the manifest the collection's changes have no home.
            self._service.set_manifest(self._bucket.vbucket_manifest(self.vbucket))

    def _begin_snapshot(self, marker: SnapshotMarker) -> None:
        if marker.start_seqno > marker.end_seqno:
            raise MalformedMessage(f"a snapshot from {marker.start_seqno} to {marker.end_seqno}")
        self.move(SnapshotMarker)
        self._tracker = self._tracker.on_marker(
            start=marker.start_seqno, end=marker.end_seqno, flags=marker.flags
        )  # fmt: skip
        begin_snapshot(
            self._bucket,
            self.vbucket,
            start=self._tracker.offset.snapshot_start,
            end=marker.end_seqno,
            has_history=SnapshotFlags.HISTORY in marker.flags,
            purge_seqno=marker.purge_seqno or Seqno(0),
        )
        self._service.on_change()

    def _set_state(self, message: SetVBucketState) -> None:
        if not message.state.is_known:
            raise MalformedMessage(f"{message.state} is not the state of a vbucket")
        self._check_receiving()
        self.move(SetVBucketState)
        self._bucket.set_vbucket_state(self.vbucket, message.state)
        self._service.on_change()
        self._outbox.succeed(message.opcode, message.opaque, when_durable=True)

    def _snapshot_end(self) -> Seqno:
        if self.state is not ConsumerStream.IN_SNAPSHOT:
            raise SnapshotViolation("a change outside any snapshot")
        return self._tracker.offset.snapshot_end

    def _follow(self) -> None:
        """Bring the tracker to where the vbucket is."""
        self._service.on_change()
        high = Seqno(int(self._bucket.vbuckets.high_seqnos[self.vbucket]))
        if high == self._tracker.offset.seqno:
            return
        self._tracker = self._tracker.on_seqno(high)
        if self._tracker.is_complete:
            self.move(SnapshotCompleted)
            self.sync_writes.on_snapshot_complete()
            self._acknowledge_later()
            if SnapshotFlags.ACK in self._tracker.flags:
                self._outbox.succeed(Opcode.DCP_SNAPSHOT_MARKER, self.opaque, when_durable=True)

    def _acknowledge_later(self) -> None:
        if self.sync_writes.is_waiting:
            self._outbox.acknowledging[self.opaque] = self.sync_writes

    def _check_receiving(self) -> None:
        numbers = self._bucket.vbuckets
        if numbers.state(self.vbucket) not in RECEIVING_STATES:
            raise RequestRefused(Status.NOT_MY_VBUCKET, "the vbucket is not a copy any more")
        if int(numbers.high_seqnos[self.vbucket]) != self._tracker.offset.seqno:
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

    def move(self, event: type[Any]) -> None:
        self.state = consumer_stream_after(self.state, event)

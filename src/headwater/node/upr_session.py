"""One connection of the UPR draft, sans-IO. It translates between UPR packets and DCP's producer.

`kv_listener` runs it. A UPR stream request becomes a DCP stream request of a consumer without collections, and the DCP
frames that the producer makes for it become UPR packets. The protocols differ as follows:

* A UPR consumer names its branch by a pair: the vbuuid, and the seqno at which that branch began. If the pair is not in
  the failover log, the branch is unknown, even if the vbuuid alone is there.
* UPR does not send the bounds of the snapshot in which a consumer stopped, so its seqno is taken to be consistent.
* A DCP snapshot is over when its last seqno has been sent. UPR adds a snapshot end packet then, but not for a snapshot
  that is cut short by the end of the stream.
* UPR has two reasons for the end of a stream, OK and state changed. Any other is sent as a state change: the consumer
  should request the stream again, and then gets the rollback.
* DCP reports the flush of a vbucket as a rollback. If the vbucket's history has no branch left of those that the stream
  began with, the draft's flush packet is sent before the stream ends.
* UPR can refuse a request only because the vbucket is not here. Any other bad request, such as a stream that ends
  before it starts or a second stream on a vbucket, ends the connection.

The draft sends only keys and values of documents, without extended attributes and datatypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.errors import UnexpectedMessage
from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.controls import Controls
from headwater.node.service import BucketService
from headwater.protocol import upr
from headwater.protocol.failover_log import FailoverLog, RollbackDemand
from headwater.protocol.features import NOTHING_NEGOTIATED
from headwater.protocol.frames import FrameBuffer, decode_frames
from headwater.protocol.messages import dcp_changes, decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamEnd, StreamEndReason, StreamRequest
from headwater.protocol.numbers import KEY_BYTES_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRefusal

_REQUEST_BODY_BYTES_MAX = upr.UprStreamRequest.layouts[0].size_bytes + KEY_BYTES_MAX
"""The longest request. A packet whose header announces a longer body is refused."""

_WithSeqno = dcp_changes.Mutation | dcp_changes.Deletion | dcp_changes.Expiration | dcp_changes.SeqnoAdvanced

_HINT = "The UPR draft has no answer for this: connect again"


class UprSession:
    """One connection. Call `receive_data`, then send `data_to_send` and, while the peer reads, `produce`."""

    def __init__(self, service: BucketService, *, name: str, now_s: float) -> None:
        self._service = service
        self.name = name
        self.producer = ProducerConnection(
            bucket=service.bucket,
            name=name,
            flags=OpenFlags.PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES,
            knows_collections=False,
            may_compress=False,
            opened_s=now_s,
            live=service.live_frames,
            kind="upr",
            # The draft has expirations. Without both the flag and the control, the producer would send deletions.
            controls=Controls(expiry_opcode=True),
        )
        self.requests = 0
        self._frames = FrameBuffer(body_bytes_max=_REQUEST_BODY_BYTES_MAX)
        self._answers = bytearray()
        self._snapshot_ends: dict[VBucketId, Seqno] = {}
        """The last seqno of each stream's current snapshot, by vbucket. A vbucket has at most one stream."""
        self._logs: dict[VBucketId, FailoverLog] = {}
        """The failover log of each vbucket when its stream began."""
        service.upr_connections[name] = self.producer

    # --- requests -------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Handle received bytes. Raises a `RemoteProtocolError` if the connection has to end."""
        self._frames.receive_data(data)
        for frame in self._frames.frames():
            packet = upr.decode_packet(frame)
            self.requests += 1
            if isinstance(packet, upr.UprStreamRequest):
                self._on_stream_request(packet)
            elif isinstance(packet, upr.UprFailoverLogRequest):
                log = self._failover_log(packet.vbucket)
                if log is None:
                    self._answer(upr.UprNotMyVBucket, packet)
                else:
                    self._answer(upr.UprFailoverLogResponse, packet, failover_log=log.entries)
            else:
                raise UnexpectedMessage(f"{type(packet).__name__} is sent by producers, not to them", hint=_HINT)

    @property
    def held_bytes(self) -> int:
        return self._frames.held_bytes + len(self._answers)

    def data_to_send(self) -> bytes:
        """The answers since the last call."""
        data = bytes(self._answers)
        self._answers.clear()
        return data

    def _on_stream_request(self, packet: upr.UprStreamRequest) -> None:
        log = self._failover_log(packet.vbucket)
        request = _as_dcp(packet, log)
        admission = self.producer.admit(request)
        if isinstance(admission, RollbackDemand):
            self._answer(upr.UprRollback, packet, rollback_seqno=admission.to_seqno)
        elif isinstance(admission, StreamRefusal):
            if admission.status != Status.NOT_MY_VBUCKET:
                raise UnexpectedMessage(f"a stream on vbucket {packet.vbucket}: {admission.reason}", hint=_HINT)
            self._answer(upr.UprNotMyVBucket, packet)
        else:
            assert log is not None, "a stream is admitted on a vbucket that is here"
            self.producer.open_stream(request, admission)
            self._logs[packet.vbucket] = log
            self._answer(upr.UprStreamOk, packet)
            self._answer(upr.UprStreamBegin, packet)

    def _failover_log(self, vbucket: VBucketId) -> FailoverLog | None:
        facts = self._service.bucket.vbuckets.facts_of(vbucket)
        return None if facts is None else facts.failover_log

    def _answer(self, kind: type[upr.UprPacket], request: upr.UprPacket, **fields: Any) -> None:
        self._answers += kind(vbucket=request.vbucket, request_id=request.request_id, **fields).encode()

    # --- streams --------------------------------------------------------------------------------------------------

    @property
    def has_streams(self) -> bool:
        return bool(self.producer.streams)

    def produce(self, bytes_max: int) -> bytes:
        """The next packets of all streams; empty if there is nothing to send now."""
        while data := self.producer.produce(bytes_max):
            packets = b"".join(packet.encode() for packet in self._translated(data))
            if packets:
                return packets
        return b""

    def _translated(self, data: bytes) -> Iterator[upr.UprPacket]:
        """Translate what a producer sends to a consumer without collections into packets."""
        for frame in decode_frames(data):
            message = decode_message(frame, NOTHING_NEGOTIATED)
            assert isinstance(message, Request), "a producer sends requests"
            header: dict[str, Any] = {"vbucket": message.vbucket, "request_id": message.opaque}
            match message:
                case dcp_changes.SnapshotMarker():
                    self._snapshot_ends[message.vbucket] = message.end_seqno
                    yield upr.UprSnapshotStart(**header)
                case dcp_changes.Mutation():
                    yield upr.UprMutation(
                        **header,
                        **_change(message),
                        item_flags=message.flags,
                        item_exp=message.expiry,
                        lock_time=message.lock_time,
                        value=message.value,
                    )
                case dcp_changes.Deletion():
                    yield upr.UprDeletion(**header, **_change(message))
                case dcp_changes.Expiration():
                    yield upr.UprExpiration(**header, **_change(message))
                case dcp_changes.DcpFlush():
                    yield upr.UprFlush(**header)
                case StreamEnd():
                    yield from self._end(message, header)
                case _:
                    assert isinstance(message, dcp_changes.SeqnoAdvanced), (
                        f"a consumer without collections gets {message}"
                    )
            if isinstance(message, _WithSeqno) and message.seqno >= self._snapshot_ends[message.vbucket]:
                del self._snapshot_ends[message.vbucket]
                yield upr.UprSnapshotEnd(**header)

    def _end(self, message: StreamEnd, header: dict[str, Any]) -> Iterator[upr.UprPacket]:
        self._snapshot_ends.pop(message.vbucket, None)
        began_with = self._logs.pop(message.vbucket)
        if message.reason == StreamEndReason.ROLLBACK and not self._is_kin(message.vbucket, began_with):
            yield upr.UprFlush(**header)
        is_done = message.reason == StreamEndReason.OK
        reason = upr.UprStreamEndReason.OK if is_done else upr.UprStreamEndReason.STATE_CHANGED
        yield upr.UprStreamEnd(**header, reason=reason)

    def _is_kin(self, vbucket: VBucketId, older: FailoverLog) -> bool:
        """Whether the vbucket's current failover log has a branch in common with an older one."""
        log = self._failover_log(vbucket)
        return log is not None and any(older.knows(entry.vbuuid) for entry in log.entries)

    def disconnected(self) -> None:
        """The connection has ended: add its counters to the totals, and end its streams."""
        if self._service.upr_connections.get(self.name) is self.producer:
            del self._service.upr_connections[self.name]
        self._service.ended.add_connection(self.producer)
        self.producer.disconnect()


def _as_dcp(packet: upr.UprStreamRequest, log: FailoverLog | None) -> StreamRequest:
    branch = (packet.vbucket_uuid, packet.high_seqno)
    is_known = log is not None and any((entry.vbuuid, entry.seqno) == branch for entry in log.entries)
    return StreamRequest(
        vbucket=packet.vbucket,
        opaque=packet.request_id,
        start_seqno=packet.start_by_seqno,
        end_seqno=packet.end_by_seqno,
        # No branch has vbuuid 0: a consumer that has changes of an unknown branch has to roll back to the start.
        vbuuid=packet.vbucket_uuid if is_known else Vbuuid(0),
        snapshot_start_seqno=packet.start_by_seqno,
        snapshot_end_seqno=packet.start_by_seqno,
    )


def _change(message: dcp_changes.Mutation | dcp_changes.Deletion | dcp_changes.Expiration) -> dict[str, Any]:
    return {"cas": message.cas, "by_seqno": message.seqno, "rev_seqno": message.rev_seqno, "key": message.key}

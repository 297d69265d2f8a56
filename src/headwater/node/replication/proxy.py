"""The replication proxy: opens a producer and a consumer and passes bytes between them, in both directions.

The proxy makes the consumer request streams (add-stream), and follows how far they get and how they end. It leaves
everything else to the two. It passes on what the consumer sends, except for the answers to the proxy's own requests. It
passes on what the producer sends as it arrives, and reads only headers and seqnos, so that changes cost next to nothing
here. If one peer does not read, the proxy stops reading from the other one.

A stream that has ended at the proxy may go on at the consumer, which may still have to read and store the last changes.
Only the consumer knows how far it is: see `is_persisted_at`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.errors import HeadwaterError
from headwater.protocol.features import WITH_COLLECTIONS, Magic, Opcode
from headwater.protocol.frames import HEADER_BYTES, FrameBuffer, decode_frame
from headwater.protocol.messages import ErrorResponse, dcp_streams, decode_message, refused
from headwater.protocol.messages.vbuckets import ObserveSeqnoResponse
from headwater.protocol.numbers import VBucketId, Vbuuid
from headwater.protocol.values import Datatype

PRODUCER_FLAGS = (
    dcp_streams.OpenFlags.PRODUCER
    | dcp_streams.OpenFlags.INCLUDE_XATTRS
    | dcp_streams.OpenFlags.INCLUDE_DELETE_TIMES
    | dcp_streams.OpenFlags.INCLUDE_DELETED_USER_XATTRS
)
"""A copy needs all of a document. Without delete times, a real server sends expirations as deletions."""

_CHANGES = frozenset({Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION})
_SEQNO_AT: dict[int, int] = {
    **dict.fromkeys((*_CHANGES, Opcode.DCP_PREPARE, Opcode.DCP_SYSTEM_EVENT, Opcode.DCP_SEQNO_ADVANCED), HEADER_BYTES),
    # These have the seqno of their prepare first.
    **dict.fromkeys((Opcode.DCP_COMMIT, Opcode.DCP_ABORT), HEADER_BYTES + 8),
}
"""Where in a frame its own seqno is."""
_SEQNO_BYTES = 8


@dataclass(slots=True)
class StreamProgress:
    """A stream that the proxy has requested."""

    vbucket: VBucketId
    changes: int = 0
    seqno: int = 0
    """The consumer's seqno once it has processed everything that was passed on."""
    vbuuid: Vbuuid = Vbuuid(0)
    """The producer's branch of history to which the seqno belongs."""
    ended: asyncio.Future[dcp_streams.StreamEndReason] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def is_persisted_at(self, observed: ObserveSeqnoResponse) -> bool:
        """Whether the consumer reports that it has persisted everything that was passed on.

        It was asked about this branch of history. If it has begun another one, by a takeover, the last seqno that it
        had on this branch counts.
        """
        on_branch = observed.persisted_seqno if observed.last_received_seqno is None else observed.last_received_seqno
        return min(observed.persisted_seqno, on_branch) >= self.seqno


class Proxy:
    """See the module. `open` creates one."""

    def __init__(self, source: AsyncKvConnection, target: AsyncKvConnection) -> None:
        self.streams: dict[VBucketId, StreamProgress] = {}
        self.passed_bytes = 0
        self._source = source
        self._target = target
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._requested: dict[int, StreamProgress] = {}
        """Streams that the producer has not accepted yet, by the opaques of the consumer's requests."""
        self._opaque = 0
        self._from_target = FrameBuffer()
        self._headers = _HeaderScan()
        self._failure: HeadwaterError | None = None
        source.attach(_Side(self._from_source, self._fail, other=target))
        target.attach(_Side(self._from_consumer, self._fail, other=source))

    @classmethod
    async def open(
        cls, source: Address, target: Address, *, source_login: Login, target_login: Login, name: str
    ) -> Proxy:
        """Connect to both, and open one as a producer and the other as a consumer of this name."""
        producer = await AsyncKvConnection.open(source, source_login)
        try:
            consumer = await AsyncKvConnection.open(target, target_login)
        except BaseException:
            producer.close()
            raise
        try:
            # The consumer acknowledges prepares under this name, and sends it to the producer as a control. As in a
            # 7.0.5 server, a value needs the datatype JSON.
            consumer_name = json.dumps({"consumer_name": str(target)}).encode()
            await producer.request(dcp_streams.Open(flags=PRODUCER_FLAGS, key=name.encode()))
            await consumer.request(
                dcp_streams.Open(
                    flags=dcp_streams.OpenFlags(0), key=name.encode(), value=consumer_name, datatype=Datatype.JSON
                )
            )
        except BaseException:
            producer.close()
            consumer.close()
            raise
        return cls(producer, consumer)

    async def add_stream(self, vbucket: VBucketId, flags: dcp_streams.StreamFlags) -> StreamProgress:
        """Make the consumer request a stream. Raises the error of the side that refuses."""
        self.check()
        progress = self.streams[vbucket] = StreamProgress(vbucket)
        self._opaque += 1
        opaque = self._opaque
        answer = self._answers[opaque] = asyncio.get_running_loop().create_future()
        self._target.write(dcp_streams.AddStream(vbucket=vbucket, flags=flags, opaque=opaque).encode())
        try:
            answered = await answer
            if isinstance(answered, ErrorResponse):
                what = f"to stream vbucket {vbucket}"
                raise refused(what, status=answered.status, context=answered.context)
        except BaseException:
            self.streams.pop(vbucket, None)
            raise
        finally:
            self._answers.pop(opaque, None)
        return progress

    async def wait_for_end(self, vbucket: VBucketId) -> dcp_streams.StreamEndReason:
        """Wait until a stream has ended by itself. Returns the reason."""
        self.check()
        return await self.streams[vbucket].ended

    def close(self) -> None:
        self._source.close()
        self._target.close()
        for progress in self.streams.values():
            progress.ended.cancel()
        for answer in self._answers.values():
            answer.cancel()

    def check(self) -> None:
        """Raise the error that has ended one of the connections, and with it both."""
        if self._failure is not None:
            raise self._failure

    # --- passing on -----------------------------------------------------------------------------------------------

    def _from_source(self, data: bytes) -> None:
        self.passed_bytes += len(data)
        self._target.write(data)
        for frame in self._headers.receive(data, self._count):
            decoded = decode_frame(frame)
            assert decoded is not None, "the scan gives whole frames"
            match decode_message(decoded[0], WITH_COLLECTIONS):
                case dcp_streams.StreamEnd() as end:
                    progress = self.streams.get(end.vbucket)
                    if progress is not None and not progress.ended.done():
                        progress.ended.set_result(end.reason)
                case dcp_streams.StreamRequestResponse(rollback_seqno=None) as answer if (
                    answer.opaque in self._requested
                ):
                    # The newest entry comes first.
                    self._requested.pop(answer.opaque).vbuuid = answer.failover_log[0].vbuuid

    def _count(self, opcode: int, vbucket: int, seqno: int) -> None:
        progress = self.streams.get(VBucketId(vbucket))
        if progress is not None:
            progress.seqno = seqno
            progress.changes += opcode in _CHANGES

    def _from_consumer(self, data: bytes) -> None:
        self._from_target.receive_data(data)
        passed = bytearray()
        for frame in self._from_target.frames():
            if frame.opcode == Opcode.DCP_ADD_STREAM and frame.magic is Magic.RESPONSE:
                self._on_answer(frame.opaque, decode_message(frame, WITH_COLLECTIONS))
                continue
            if frame.opcode == Opcode.DCP_STREAM_REQUEST and frame.specific in self.streams:
                request = decode_message(frame, WITH_COLLECTIONS)
                assert isinstance(request, dcp_streams.StreamRequest)
                progress = self._requested[frame.opaque] = self.streams[request.vbucket]
                # Lower than before if the consumer was rolled back.
                progress.seqno = request.start_seqno
            passed += frame.encode()
        self._source.write(bytes(passed))

    def _on_answer(self, opaque: int, answer: object) -> None:
        waiting = self._answers.get(opaque)
        if waiting is None or waiting.done():
            return
        waiting.set_result(answer)

    def _fail(self, error: HeadwaterError) -> None:
        """One connection is lost, so the other one is of no use: close both."""
        self._failure = self._failure or error
        waiters: list[asyncio.Future[Any]] = [*self._answers.values()]
        waiters += [progress.ended for progress in self.streams.values()]
        for waiting in waiters:
            if not waiting.done():
                waiting.set_exception(error)
                # No caller need be waiting; asyncio does not log an exception that was retrieved.
                waiting.exception()
        self._source.close()
        self._target.close()


class _Side:
    """Handles what one connection receives, and pauses the other one."""

    def __init__(
        self,
        on_data: Callable[[bytes], None],
        on_lost: Callable[[HeadwaterError], None],
        *,
        other: AsyncKvConnection,
    ) -> None:
        self._on_data = on_data
        self._on_lost = on_lost
        self._other = other

    def on_data(self, data: bytes) -> None:
        try:
            self._on_data(data)
        except HeadwaterError as error:
            self._on_lost(error)

    def on_lost(self, error: HeadwaterError) -> None:
        self._on_lost(error)

    def on_writable(self, is_writable: bool) -> None:
        if is_writable:
            self._other.resume_reading()
        else:
            self._other.pause_reading()


class _HeaderScan:
    """Finds frames in bytes that arrive in pieces. It reads only headers and seqnos."""

    def __init__(self) -> None:
        self._held = b""
        """The beginning of a header, or of a frame of which more is needed."""
        self._skip_bytes = 0
        """How much is still to come of a frame that is not needed."""

    def receive(self, data: bytes, count: Callable[[int, int, int], None]) -> Iterator[bytes]:
        """Yield stream-ends and answers to stream requests, as whole frames. Calls `count` with opcode, vbucket and
        seqno for each frame that has a seqno."""
        if self._skip_bytes >= len(data):
            self._skip_bytes -= len(data)
            return
        data = self._held + data if self._held else data
        at, self._skip_bytes, self._held = self._skip_bytes, 0, b""
        while len(data) - at >= HEADER_BYTES:
            opcode, end = data[at + 1], at + HEADER_BYTES + int.from_bytes(data[at + 8 : at + 12])
            seqno_at = _SEQNO_AT.get(opcode)
            if seqno_at is not None and data[at] != Magic.RESPONSE:
                seqno_end = at + seqno_at + _SEQNO_BYTES
                if seqno_end > len(data):
                    break
                seqno = int.from_bytes(data[seqno_end - _SEQNO_BYTES : seqno_end])
                count(opcode, int.from_bytes(data[at + 6 : at + 8]), seqno)
            elif opcode in (Opcode.DCP_STREAM_END, Opcode.DCP_STREAM_REQUEST):
                if end > len(data):
                    break
                yield data[at:end]
            at = end
        if at > len(data):
            self._skip_bytes = at - len(data)
        else:
            self._held = data[at:]

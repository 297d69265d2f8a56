"""Frames: any split of the bytes gives the same frames, and junk raises only the documented errors.

The two ways in are random bytes and valid streams with some bytes changed; the second gets past the header.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.errors import BadMagic, FrameTooLarge, LengthMismatch, RemoteProtocolError, TruncatedFrame
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Magic, Negotiated, Opcode
from headwater.protocol.frames import (
    HEADER,
    HEADER_BYTES,
    Frame,
    FrameBuffer,
    decode_durability,
    decode_frame,
    decode_frames,
    decode_server_duration,
    encode_frame_infos,
    stream_id,
)
from headwater.protocol.kernels.frame_runs import cut_runs
from headwater.protocol.manifest import decode_event
from headwater.protocol.messages import REQUESTS, ErrorResponse, Message, PlainResponse, Request, decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SeqnoAdvanced, SystemEvent
from headwater.protocol.messages.dcp_streams import DcpNoop, StreamRequest
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX, VALUE_BYTES_MAX, CollectionId, Seqno
from headwater.protocol.stream_requests import StreamRequestValue
from headwater.protocol.values import Datatype, decode_xattrs, decompress
from support.cases import case
from support.message_strategies import any_message, frame_infos, only, u8, u16, u32, u64


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """Any frame that a header can describe."""
    magic = draw(st.sampled_from(Magic))
    return Frame(
        magic=magic,
        opcode=draw(u8),
        specific=draw(u16),
        opaque=draw(u32),
        cas=draw(u64),
        datatype=draw(u8),
        framing_extras=encode_frame_infos(draw(frame_infos)) if magic.is_flexible else b"",
        extras=draw(st.binary(max_size=60)),
        key=draw(st.binary(max_size=60)),
        value=draw(st.binary(max_size=100)),
    )


@st.composite
def split(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The data in chunks, empty ones among them."""
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=20))
    return [data[start:end] for start, end in pairwise([0, *sorted(cuts), len(data)])]


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """The data with a few bytes changed, cut out or put in."""
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(damaged)))
        removed = draw(st.integers(0, 3))
        damaged[at : at + removed] = draw(st.binary(max_size=3))
    return bytes(damaged)


@st.composite
def mutated_streams(draw: st.DrawFn) -> bytes:
    messages = draw(st.lists(any_message(collections=draw(st.booleans())), min_size=1, max_size=3))
    return draw(mutated(b"".join(message.encode() for message in messages)))


# --- splits -------------------------------------------------------------------------------------------------------


@given(data=st.data(), sent=st.lists(frames(), max_size=6))
def test_any_split_gives_the_same_frames(data: st.DataObject, sent: list[Frame]) -> None:
    buffer = FrameBuffer()
    received: list[Frame] = []
    for chunk in data.draw(split(b"".join(frame.encode() for frame in sent))):
        buffer.receive_data(chunk)
        received += buffer.frames()
    buffer.receive_end()
    assert received == sent
    assert buffer.buffered_bytes == 0


@given(frame=frames(), data=st.data())
def test_a_frame_that_is_cut_off_is_waited_for_and_then_refused(frame: Frame, data: st.DataObject) -> None:
    encoded = frame.encode()
    kept = data.draw(st.integers(1, len(encoded) - 1))
    buffer = FrameBuffer()
    buffer.receive_data(encoded[:kept])
    assert list(buffer.frames()) == []
    assert buffer.buffered_bytes == kept
    with pytest.raises(TruncatedFrame):
        buffer.receive_end()


@given(before=st.binary(max_size=30), frame=frames(), after=st.binary(max_size=30))
def test_a_frame_is_decoded_where_it_lies(before: bytes, frame: Frame, after: bytes) -> None:
    data = before + frame.encode() + after
    assert decode_frame(data, len(before)) == (frame, len(data) - len(after))
    assert decode_frame(memoryview(data), len(before)) == (frame, len(data) - len(after))


# --- junk ---------------------------------------------------------------------------------------------------------


def read_everything(data: bytes, negotiated: Negotiated) -> None:
    """Decodes all that a peer's bytes can be decoded to, each part on its own: one fault must not hide another."""
    buffer = FrameBuffer()
    buffer.receive_data(data)
    with only(RemoteProtocolError, within_bytes=len(data)):
        for frame in buffer.frames():
            read_message(frame, negotiated)
        buffer.receive_end()


def read_message(frame: Frame, negotiated: Negotiated) -> None:
    frame_bytes = HEADER_BYTES + frame.body_bytes
    with only(RemoteProtocolError, within_bytes=frame_bytes):
        message = decode_message(frame, negotiated)
        for read in (read_frame_infos, read_value):
            with only(RemoteProtocolError, within_bytes=VALUE_BYTES_MAX):
                read(message)


def read_frame_infos(message: Message) -> None:
    decode_durability(message.frame_infos)
    decode_server_duration(message.frame_infos)
    if isinstance(message, Request):
        assert message.stream_id is None or 0 <= message.stream_id <= 0xFFFF


def read_value(message: Message) -> None:
    value: bytes = getattr(message, "value", b"")
    if isinstance(message, ErrorResponse):
        assert isinstance(message.context, str)
    if isinstance(message, StreamRequest):
        StreamRequestValue.decode(value)
    if isinstance(message, SystemEvent):
        decode_event(message)
    if Datatype.SNAPPY in message.datatype:
        value = decompress(value)
    if Datatype.XATTR in message.datatype:
        decode_xattrs(value)


NEGOTIATED = st.sampled_from([NOTHING_NEGOTIATED, WITH_COLLECTIONS])


@given(data=st.binary(max_size=200), negotiated=NEGOTIATED)
@example(b"", NOTHING_NEGOTIATED)
@example(b"\x80", NOTHING_NEGOTIATED)
def test_random_bytes_raise_only_remote_protocol_errors(data: bytes, negotiated: Negotiated) -> None:
    read_everything(data, negotiated)


@given(data=mutated_streams(), negotiated=NEGOTIATED)
def test_mutated_streams_raise_only_remote_protocol_errors(data: bytes, negotiated: Negotiated) -> None:
    read_everything(data, negotiated)


@given(frame=frames(), negotiated=NEGOTIATED)
def test_random_frames_raise_only_remote_protocol_errors(frame: Frame, negotiated: Negotiated) -> None:
    read_message(frame, negotiated)


@given(data=st.data(), opcode=st.sampled_from(sorted(REQUESTS)), negotiated=NEGOTIATED)
def test_random_parts_raise_only_remote_protocol_errors(
    data: st.DataObject, opcode: int, negotiated: Negotiated
) -> None:
    """The extras have a length that fits, so that key and value are looked at."""
    extras_bytes = data.draw(st.sampled_from([layout.size_bytes for layout in REQUESTS[opcode].layouts]))
    extras = data.draw(st.binary(min_size=extras_bytes, max_size=extras_bytes))
    key, value = data.draw(st.binary(max_size=260)), data.draw(st.binary(max_size=120))
    read_message(Frame(magic=Magic.REQUEST, opcode=opcode, extras=extras, key=key, value=value), negotiated)


@given(data=st.data(), sent=st.lists(frames(), min_size=1, max_size=3))
def test_any_split_of_a_broken_stream_raises_the_same_error(data: st.DataObject, sent: list[Frame]) -> None:
    broken = b"".join(frame.encode() for frame in sent) + b"\xff" + data.draw(st.binary(max_size=40))
    expected: list[str] = []
    for chunks in ([broken], data.draw(split(broken))):
        buffer = FrameBuffer()
        received: list[Frame] = []
        with pytest.raises(RemoteProtocolError) as raised:  # noqa: PT012  (where in the loop is not the point)
            for chunk in chunks:
                buffer.receive_data(chunk)
                received += buffer.frames()
        assert received == sent
        expected.append(str(raised.value))
    assert expected[0] == expected[1]


# --- memory -------------------------------------------------------------------------------------------------------


@given(
    magic=st.sampled_from(Magic),
    lengths=u16,
    extras_bytes=u8,
    body_bytes=st.integers(FRAME_BODY_BYTES_MAX + 1, 2**32 - 1),
    body=st.binary(max_size=64),
)
def test_a_huge_body_is_refused(magic: Magic, lengths: int, extras_bytes: int, body_bytes: int, body: bytes) -> None:
    header = HEADER.pack(magic, 0x57, lengths, extras_bytes, 0, 0, body_bytes, 0, 0)
    buffer = FrameBuffer()
    buffer.receive_data(header[:-1])
    assert buffer.next_frame() is None
    buffer.receive_data(header[-1:] + body)
    with pytest.raises(FrameTooLarge) as raised:
        buffer.next_frame()
    assert raised.value.offset == 8
    assert buffer.buffered_bytes == 0
    buffer.receive_data(body)
    assert buffer.buffered_bytes == 0


@given(body_bytes_max=st.integers(0, 100), body_bytes=st.integers(0, 100))
def test_the_limit_is_the_largest_body_that_passes(body_bytes_max: int, body_bytes: int) -> None:
    frame = Frame(magic=Magic.REQUEST, opcode=0, value=b"x" * body_bytes)
    if body_bytes <= body_bytes_max:
        assert decode_frames(frame.encode(), body_bytes_max=body_bytes_max) == [frame]
    else:
        with pytest.raises(FrameTooLarge):
            decode_frames(frame.encode(), body_bytes_max=body_bytes_max)


# --- runs against the typed codec: whatever is sent, in whatever turns, each stream gets its frames in order ----------

_changes = st.builds(
    lambda kind, opaque, seqno, value, infos: kind(
        opaque=opaque,
        seqno=Seqno(seqno),
        rev_seqno=1,
        key=b"k",
        collection_id=CollectionId(8),
        value=value,
        frame_infos=infos,
    ),
    st.sampled_from([Mutation, Deletion, Expiration]),
    st.integers(0, 3),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=30),
    st.sampled_from([(), (stream_id(5),)]),
)
_others = st.one_of(
    st.builds(lambda opaque: SeqnoAdvanced(opaque=opaque, seqno=Seqno(7)), st.integers(0, 3)),
    st.builds(lambda opaque: DcpNoop(opaque=opaque), st.integers(0, 3)),
    st.builds(lambda opaque: PlainResponse(opcode=Opcode.DCP_STREAM_REQUEST, opaque=opaque), st.integers(0, 3)),
)
_messages = st.lists(st.one_of(_changes, _others), max_size=40)


def _seqno(message: object) -> int:
    assert isinstance(message, Mutation | Deletion | Expiration)
    return message.seqno


@settings(deadline=None)
@given(_messages, st.integers(0, 30))
def test_every_stream_gets_its_frames_in_order(messages: list[Request], cut_off: int) -> None:
    tail = Mutation(seqno=Seqno(1), rev_seqno=1, key=b"k", collection_id=CollectionId(0)).encode()[:cut_off]
    data = b"".join(message.encode() for message in messages)
    cut = cut_runs(np.frombuffer(data + tail, dtype=np.uint8))
    assert cut.consumed_bytes == len(data)
    sent: dict[int, list[object]] = defaultdict(list)
    for message in messages:
        sent[message.opaque].append(message.to_frame())
    got: dict[int, list[object]] = defaultdict(list)
    for run in cut.runs:
        frames = decode_frames(bytes(cut.data[run.start : run.end]))
        assert {frame.opaque for frame in frames} == {run.opaque}
        assert len(frames) == max(run.rows, 1)
        got[run.opaque] += frames
    assert got == sent


@settings(deadline=None)
@given(st.lists(_changes, min_size=1, max_size=20))
def test_runs_tell_their_seqnos(changes: list[Mutation]) -> None:
    cut = cut_runs(np.frombuffer(b"".join(change.encode() for change in changes), dtype=np.uint8))
    by_stream: dict[int, list[int]] = defaultdict(list)
    for change in changes:
        by_stream[change.opaque].append(_seqno(change))
    for run in cut.runs:
        seqnos, by_stream[run.opaque] = by_stream[run.opaque][: run.rows], by_stream[run.opaque][run.rows :]
        assert (run.first_seqno, run.last_seqno) == (seqnos[0], seqnos[-1])
        assert bool(run.is_rising) == all(a < b for a, b in pairwise(seqnos))
    assert not any(by_stream.values())


@case(b"HTTP/1.1 400 Bad Request", BadMagic)
@case(bytes.fromhex("8057000000000000ffffffff") + bytes(12), FrameTooLarge)
@case(bytes.fromhex("80570005000000000000000100000000") + bytes(8), LengthMismatch)
def test_nonsense_is_the_documented_error(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        cut_runs(np.frombuffer(data, dtype=np.uint8))


def test_streams_in_turns_become_one_run_each() -> None:
    frames = [
        Mutation(opaque=turn % 4, seqno=Seqno(turn + 1), rev_seqno=1, key=b"k", collection_id=CollectionId(0)).encode()
        for turn in range(400)
    ]
    cut = cut_runs(np.frombuffer(b"".join(frames), dtype=np.uint8))
    assert [(run.opaque, run.rows) for run in cut.runs] == [(0, 100), (1, 100), (2, 100), (3, 100)]

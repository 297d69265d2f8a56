"""The bulk kernels equal the typed codec, their oracle, on generated streams, and refuse what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import MalformedMessage, MalformedSnappy, RemoteProtocolError
from headwater.kernels.compiling import part_for_python
from headwater.protocol import frames
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import FrameBuffer, decode_frame
from headwater.protocol.kernels import CHANGES_SCHEMA, decode_changes, decompress_values, other_message_frame, snappy
from headwater.protocol.kernels.snappy import HASH_BITS, compressed_bytes_max
from headwater.protocol.messages import PlainResponse, decode_message
from headwater.protocol.messages.dcp_changes import (
    Deletion,
    Expiration,
    Mutation,
    SnapshotFlags,
    SnapshotMarker,
    SystemEvent,
    SystemEventId,
)
from headwater.protocol.messages.dcp_streams import DcpNoop, StreamEnd
from headwater.protocol.values import Datatype, compress, decompress

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
keys = st.binary(min_size=1, max_size=250)
values = st.binary(max_size=300)
collection_ids = st.one_of(st.sampled_from([0, 8, 9, 127, 128, 2**32 - 1]), u32)
stream_ids = st.one_of(st.none(), st.integers(1, 0xFFFF))
CHANGES = (Mutation, Deletion, Expiration)


@st.composite
def changes(draw, *, collections=True, stream_id=stream_ids):
    sid = draw(stream_id)
    common = {
        "vbucket": draw(u16),
        "opaque": draw(u32),
        "cas": draw(u64),
        "datatype": Datatype(draw(st.integers(0, 7))),
        "frame_infos": () if sid is None else (frames.stream_id(sid),),
        "seqno": draw(u64),
        "rev_seqno": draw(u64),
        # A flexible frame has eight bits for the length of the key, prefix included.
        "key": draw(keys if sid is None else st.binary(min_size=1, max_size=250)),
        "value": draw(values),
        "collection_id": draw(collection_ids) if collections else None,
    }
    kind = draw(st.sampled_from(CHANGES))
    if kind is Mutation:
        extra = {"flags": draw(u32), "expiry": draw(u32), "lock_time": draw(u32), "nru": draw(u8)}
    else:
        extra = {"delete_time": draw(st.one_of(st.none(), u32))}
    return kind(**common, **extra)


def other_frames():
    return st.one_of(
        st.builds(SnapshotMarker, start_seqno=u64, end_seqno=u64, flags=st.just(SnapshotFlags.MEMORY), opaque=u32),
        st.builds(StreamEnd, vbucket=u16),
        st.builds(DcpNoop, opaque=u32),
        st.builds(SystemEvent, seqno=u64, event=st.just(SystemEventId.SCOPE_CREATED), key=keys, value=values),
        st.builds(PlainResponse, opcode=st.just(Opcode.DCP_MUTATION), value=values),
        # Framing extras other than a lone stream id are the typed codec's business.
        st.builds(
            Mutation, seqno=u64, rev_seqno=u64, key=st.just(b"\x01k"), frame_infos=st.just((frames.preserve_ttl(),))
        ),
    )


def as_row(change):
    is_mutation = isinstance(change, Mutation)
    return {
        "vbucket": change.vbucket, "opaque": change.opaque, "stream_id": change.stream_id or 0,
        "opcode": change.opcode, "datatype": change.datatype, "seqno": change.seqno, "rev_seqno": change.rev_seqno,
        "cas": change.cas, "flags": change.flags if is_mutation else 0, "expiry": change.expiry if is_mutation else 0,
        "delete_time": 0 if is_mutation else change.delete_time or 0, "collection_id": change.collection_id or 0,
        "key": change.key, "value": change.value,
    }  # fmt: skip


@st.composite
def streams(draw):
    collections = draw(st.booleans())
    change = changes(collections=collections, stream_id=st.one_of(st.none(), st.integers(1, 0xFFFF)))
    messages = draw(st.lists(st.one_of(change, change, other_frames()), max_size=30))
    # Keys of flexible frames have one length byte; the few generated ones that do not fit are of no interest here.
    messages = [message for message in messages if not message.frame_infos or len(message.encode_key()) <= 0xFF]
    return collections, messages


def is_row(message):
    lone_sid = len(message.frame_infos) == 1 and message.frame_infos[0].id == frames.RequestInfo.STREAM_ID
    return isinstance(message, CHANGES) and (not message.frame_infos or lone_sid)


@given(streams(), st.integers(0, 60))
def test_decoding_equals_the_typed_codec_and_leaves_a_partial_frame_over(stream, cut):
    collections, messages = stream
    encoded = [message.encode() for message in messages]
    data = b"".join(encoded)
    tail = encoded[0][:cut] if encoded and cut < len(encoded[0]) else b""
    result = decode_changes(data + tail, collections=collections)
    assert result.consumed_bytes == len(data)
    assert result.batch.schema == CHANGES_SCHEMA
    assert result.batch.to_pylist() == [as_row(message) for message in messages if is_row(message)]
    expected_others, row = [], 0
    for message in messages:
        if is_row(message):
            row += 1
        else:
            expected_others.append((message.encode(), row))
    assert [(data[other.start : other.end], other.row) for other in result.others] == expected_others
    for other, (frame_bytes, _) in zip(result.others, expected_others, strict=True):
        assert other_message_frame(data, other).encode() == frame_bytes
    flagged = [m for m in messages if is_row(m) and Datatype.SNAPPY in m.datatype]
    assert result.compressed_rows == len(flagged)
    result.batch.validate(full=True)


@given(streams(), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_any_split_gives_the_same_rows(stream, sizes):
    collections, messages = stream
    data = b"".join(message.encode() for message in messages)
    rows, pending, at, turn = [], b"", 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        pending += data[at : at + size]
        at, turn = at + size, turn + 1
        result = decode_changes(pending, collections=collections)
        rows += result.batch.to_pylist()
        pending = pending[result.consumed_bytes :]
    assert pending == b""
    assert rows == decode_changes(data, collections=collections).batch.to_pylist()


def typed_outcome(data, *, collections):
    """What the typed codec says of a buffer: its rows, or the class of its error."""
    negotiated = WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED
    buffer = FrameBuffer()
    buffer.receive_data(data)
    rows = []
    try:
        for frame in buffer.frames():
            if frame.opcode not in (0x57, 0x58, 0x59) or not frame.magic.is_request or frame.magic == 0x82:
                continue
            if frame.framing_extras and not (len(frame.framing_extras) == 3 and frame.framing_extras[0] == 0x22):
                continue
            rows.append(as_row(decode_message(frame, negotiated)))
    except RemoteProtocolError as error:
        return type(error)
    return rows


@given(streams(), st.data())
def test_mutated_bytes_are_taken_or_refused_as_the_typed_codec_does(stream, data):
    collections, messages = stream
    encoded = bytearray(b"".join(message.encode() for message in messages))
    for _ in range(data.draw(st.integers(0, 4))):
        if encoded:
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(u8)
    try:
        outcome = decode_changes(bytes(encoded), collections=collections).batch.to_pylist()
    except RemoteProtocolError as error:
        outcome = type(error)
    assert outcome == typed_outcome(bytes(encoded), collections=collections)


@given(st.binary(max_size=2000), st.booleans())
def test_junk_raises_documented_errors_only(junk, collections):
    try:
        result = decode_changes(junk, collections=collections)
    except RemoteProtocolError:
        return
    assert result.consumed_bytes <= len(junk)


# --- inflating ----------------------------------------------------------------------------------------------------


def mutation_of(value, datatype):
    return Mutation(seqno=1, rev_seqno=1, key=b"k", value=value, datatype=datatype)


texts = st.one_of(
    values, st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=9), st.integers(1, 500))
)


@given(st.lists(st.tuples(texts, st.booleans()), max_size=30))
def test_inflated_values_equal_the_originals(originals):
    stream = b"".join(
        mutation_of(compress(value) if packed else value, Datatype.SNAPPY if packed else Datatype.JSON).encode()
        for value, packed in originals
    )
    batch = decompress_values(decode_changes(stream, collections=False).batch)
    assert batch.column("value").to_pylist() == [value for value, _ in originals]
    assert not any(datatype & Datatype.SNAPPY for datatype in batch.column("datatype").to_pylist())
    batch.validate(full=True)


@given(texts, st.data())
def test_broken_snappy_is_refused_as_the_library_refuses_it(value, data):
    packed = bytearray(compress(value))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(u8)
    broken = bytes(packed[: data.draw(st.integers(0, len(packed)))])
    batch = decode_changes(mutation_of(broken, Datatype.SNAPPY).encode(), collections=False).batch
    try:
        expected = decompress(broken)
    except MalformedSnappy:
        with pytest.raises(MalformedSnappy):
            decompress_values(batch)
    else:
        assert decompress_values(batch).column("value").to_pylist() == [expected]


def test_a_value_that_would_inflate_beyond_the_limit_is_refused_before_it_is_allocated():
    bomb = compress(b"\0" * 10_000)
    batch = decode_changes(mutation_of(bomb, Datatype.SNAPPY).encode(), collections=False).batch
    with pytest.raises(MalformedSnappy, match="above the limit"):
        decompress_values(batch, value_bytes_max=9_999)


@given(st.lists(texts, min_size=1, max_size=5))
def test_what_the_kernel_compresses_the_library_inflates(originals):
    compress_value = part_for_python(snappy.compress_value)
    table = np.zeros(1 << HASH_BITS, dtype=np.int64)
    data = b"".join(originals)
    at = 0
    for original in originals:
        target = np.empty(compressed_bytes_max(len(original)), dtype=np.uint8)
        end = compress_value(np.frombuffer(data, dtype=np.uint8), at, at + len(original), target, 0, table)
        assert decompress(target[:end].tobytes()) == original
        at += len(original)


# --- any kernel ---------------------------------------------------------------------------------------------------


def test_decoding_takes_any_buffer_and_leaves_it_unchanged():
    frame = Mutation(seqno=5, rev_seqno=1, collection_id=8, key=b"k", value=b"v").encode()
    for data in (frame, bytearray(frame), memoryview(frame), np.frombuffer(frame, dtype=np.uint8)):
        before = bytes(data)
        assert decode_changes(data, collections=True).batch.num_rows == 1
        assert bytes(data) == before


def test_a_fault_is_named_by_the_typed_codec_with_its_offset():
    good = Mutation(seqno=1, rev_seqno=1, key=b"k").encode()
    bad = bytearray(good)
    bad[4] -= 1  # extras one byte short: the key grows by nothing, the value by one
    with pytest.raises(MalformedMessage, match="must have extras of 31 bytes, not 30"):
        decode_changes(good + bytes(bad), collections=False)
    assert decode_frame(bytes(bad)) is not None

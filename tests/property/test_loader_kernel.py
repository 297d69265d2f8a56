"""The loader's kernels equal the typed codec: the frames they build, and the answers they count, however split."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.cluster_map import vbucket_of
from headwater.errors import InvalidDocument, RemoteProtocolError
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import ErrorResponse, decode_message
from headwater.protocol.messages.documents import Set, StoreResponse
from headwater.protocol.status import Status
from headwater.transfer.json_lines import JsonLines
from headwater.transfer.key_template import KeyTemplate
from headwater.transfer.loader import WriteLane
from headwater.transfer.set_frames import Documents, encode_sets, scan_answers, set_opaques, split_frames, vbuckets_of
from support.message_strategies import only

u32 = st.integers(0, 2**32 - 1)
keys = st.binary(min_size=1, max_size=250)
values = st.binary(max_size=300)
collection_ids = st.one_of(st.sampled_from([0, 8, 127, 128, 2**32 - 1]), u32)
batches = st.lists(st.tuples(keys, values), max_size=30)


def as_documents(pairs: list[tuple[bytes, bytes]], gap: bytes = b"") -> Documents:
    """The columns of documents; between the values may be something that belongs to none."""
    value_ends = np.cumsum([len(value) + len(gap) for _, value in pairs], dtype=np.int64)
    lengths = np.array([len(value) for _, value in pairs], dtype=np.int64)
    return Documents(
        keys=np.frombuffer(b"".join(key for key, _ in pairs), dtype=np.uint8),
        key_ends=np.cumsum([len(key) for key, _ in pairs], dtype=np.int64),
        values=np.frombuffer(b"".join(gap + value for _, value in pairs), dtype=np.uint8),
        value_starts=value_ends - lengths,
        value_ends=value_ends,
    )


@given(
    batches,
    st.lists(collection_ids, max_size=4),
    st.sampled_from([1, 64, 1024]),
    st.integers(0, 10),
    u32,
    u32,
    u32,
    st.sampled_from([b"", b"\n", b"a gap"]),
)
def test_the_frames_are_those_of_the_typed_codec(pairs, collections, vbuckets, first, opaque, expiry, flags, gap):
    frames = encode_sets(
        as_documents(pairs, gap),
        vbuckets=vbuckets,
        collections=collections,
        first_document=first,
        expiry=expiry,
        flags=flags,
    )
    set_opaques(frames.data, frames.starts, opaque)
    expected = [
        Set(
            vbucket=vbucket_of(key, vbuckets),
            opaque=(opaque + item) % 2**32,
            flags=flags,
            expiry=expiry,
            collection_id=collections[(first + item) % len(collections)] if collections else None,
            key=key,
            value=value,
        )
        for item, (key, value) in enumerate(pairs)
    ]
    assert frames.data.tobytes() == b"".join(message.encode() for message in expected)
    assert [frames.key(item) for item in range(len(frames))] == [message.encode_key() for message in expected]
    negotiated = WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED
    decoded = [decode_message(frame, negotiated) for frame in decode_frames(frames.data.tobytes())]
    assert decoded == expected


@given(batches, st.integers(1, 5), st.data())
def test_every_frame_takes_the_lane_of_its_vbucket_and_keeps_its_order(pairs, lanes, data):
    frames = encode_sets(as_documents(pairs), vbuckets=8, collections=(9,))
    lane_of_vbucket = np.array(data.draw(st.lists(st.integers(0, lanes - 1), min_size=8, max_size=8)))
    parts = split_frames(frames, lane_of_vbucket, lanes=lanes)
    all_frames = decode_frames(frames.data.tobytes())
    for lane, part in enumerate(parts):
        expected = [frame for frame in all_frames if lane_of_vbucket[frame.specific] == lane]
        assert decode_frames(part.data.tobytes()) == expected
        assert part.vbuckets.tolist() == [frame.specific for frame in expected]
        assert [part.key(item) for item in range(len(part))] == [frame.key for frame in expected]


@given(st.lists(keys, max_size=50), st.integers(1, 0x10000))
def test_keys_are_hashed_as_one_by_one(some_keys, vbuckets):
    text = np.frombuffer(b"".join(some_keys), dtype=np.uint8)
    ends = np.cumsum([len(key) for key in some_keys], dtype=np.int64)
    assert vbuckets_of(text, ends, vbuckets).tolist() == [vbucket_of(key, vbuckets) for key in some_keys]


# --- answers ------------------------------------------------------------------------------------------------------

TAKEN = st.builds(lambda seqno: StoreResponse(opcode=Opcode.SET, cas=1, vbuuid=seqno, seqno=seqno), st.none() | u32)
PUT_OFF = st.builds(
    lambda status, value: ErrorResponse(opcode=Opcode.SET, status=status, value=value),
    st.sampled_from([Status.ETMPFAIL, Status.EBUSY, Status.NOT_MY_VBUCKET]),
    values,
)


def numbered(answers, first):
    return b"".join(replace(answer, opaque=(first + item) % 2**32).encode() for item, answer in enumerate(answers))


@given(st.lists(st.one_of(TAKEN, TAKEN, PUT_OFF), max_size=40), u32, st.integers(0, 60), st.integers(1, 50))
def test_answers_are_counted_as_the_typed_codec_reads_them(answers, first, cut, room):
    data = np.frombuffer(numbered(answers, first), dtype=np.uint8)
    data = data[: max(0, len(data) - cut)]
    whole = np.cumsum([0, *(len(answer.encode()) for answer in answers)])
    complete = int((whole <= len(data)).sum()) - 1
    expected = [
        (item, int(answer.status)) for item, answer in enumerate(answers[:complete]) if answer.status != Status.SUCCESS
    ]
    found: list[tuple[int, int]] = []
    answered = at = 0
    failures = np.empty((room, 2), dtype=np.int64)
    while True:
        scanned = scan_answers(data[at:], opaque=(first + answered) % 2**32, failures=failures)
        found += [(answered + item, status) for item, status in scanned.failures]
        answered += scanned.answered
        at += scanned.consumed_bytes
        if len(scanned.failures) < room:
            break
    assert answered == complete
    assert at == whole[complete]
    assert found == expected


@given(st.binary(max_size=200), st.booleans())
def test_junk_raises_only_the_documented_error(junk, has_magic):
    data = np.frombuffer((b"\x81\x01" if has_magic else b"") + junk, dtype=np.uint8)
    with only(RemoteProtocolError, within_bytes=len(data)):
        scan_answers(data, opaque=0, failures=np.empty((4, 2), dtype=np.int64))


@given(st.lists(st.tuples(keys, values), min_size=1, max_size=30), st.lists(st.booleans()), st.integers(1, 100))
def test_a_lane_ends_with_everything_written_however_the_answers_are_split(pairs, put_off, chunk_bytes):
    """A server that puts off what `put_off` says, and then takes everything."""
    lane = WriteLane()
    lane.tick(0.0)
    lane.send_sets(encode_sets(as_documents(pairs), vbuckets=8, collections=(0,)))
    decisions = iter(put_off)
    stored: list[bytes] = []
    now_s = 0.0
    while not lane.is_idle:
        sent = b""
        while (data := lane.data_to_send()) is not None:
            sent += bytes(data)
            lane.sent(len(data))
        answers = b""
        for frame in decode_frames(sent):
            if next(decisions, False):
                answer = ErrorResponse(opcode=Opcode.SET, opaque=frame.opaque, status=Status.ETMPFAIL)
            else:
                answer = StoreResponse(opcode=Opcode.SET, opaque=frame.opaque)
                stored.append(frame.key + frame.value)
            answers += answer.encode()
        for at in range(0, len(answers), chunk_bytes):
            lane.receive_data(answers[at : at + chunk_bytes])
        now_s += 2.0
        lane.tick(now_s)
    assert sorted(stored) == sorted(b"\0" + key + value for key, value in pairs)
    assert lane.written == len(pairs)
    assert lane.has_room


# --- JSON lines ---------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)
names = st.sampled_from(["id", "a", "naïve", 'q"', "{"]) | st.text(max_size=5)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
documents = st.dictionaries(names, json_values, max_size=5).flatmap(
    lambda rest: st.one_of(
        st.just(rest),
        st.one_of(st.text(min_size=1, max_size=20), st.integers()).map(lambda id_: {**rest, "id": id_}),
        st.one_of(st.text(min_size=1, max_size=20), st.integers()).map(lambda id_: {"id": id_, **rest}),
    )
)


def expected_key(document) -> bytes | None:
    """The key by the template `u:{id}`, or None where there is none."""
    value = document.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    try:
        key = f"u:{value}".encode()
    except UnicodeEncodeError:
        return None
    return key if len(key) <= 250 else None


class Trickle(io.BytesIO):
    """A pipe that gives a few bytes at a time."""

    def __init__(self, data: bytes, chunk_bytes: int) -> None:
        super().__init__(data)
        self.chunk_bytes = chunk_bytes

    def read1(self, size: int = -1, /) -> bytes:
        return super().read1(self.chunk_bytes)


@given(
    st.lists(documents, max_size=10),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", " \n", "\n\n"]),
    st.booleans(),
    st.integers(1, 2000),
)
def test_json_lines_give_the_keys_and_values_that_the_standard_library_finds(some, ascii_only, end, open_end, chunk):
    lines = [json.dumps(document, ensure_ascii=ascii_only) for document in some]
    text = end.join(lines) + ("" if open_end else end)
    data = text.encode("utf-8", "surrogatepass")
    expected: list[tuple[bytes, bytes]] = []
    complete = True
    for document, line in zip(some, lines, strict=True):
        key = expected_key(document)
        try:
            value = line.encode()
        except UnicodeEncodeError:
            key = None
        if key is None:
            complete = False
            break
        expected.append((key, value))
    found: list[tuple[bytes, bytes]] = []
    failed = False
    try:
        for batch in JsonLines(Trickle(data, chunk), KeyTemplate.parse("u:{id}")).batches():
            starts = [0, *batch.key_ends.tolist()]
            found += [
                (
                    batch.keys[starts[item] : starts[item + 1]].tobytes(),
                    batch.values[batch.value_starts[item] : batch.value_ends[item]].tobytes(),
                )
                for item in range(len(batch))
            ]
    except InvalidDocument:
        failed = True
    assert found == expected
    assert failed is not complete

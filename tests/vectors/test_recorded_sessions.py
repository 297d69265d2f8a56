"""Recorded sessions with Couchbase 4.6.5, 7.0.5 and 8.0.2: what real servers and a client sent, byte for byte.

Every frame must decode to the message its annotation describes and encode back to the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import pytest

from headwater.errors import MalformedMessage, UnknownOpcode
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Magic
from headwater.protocol.frames import Frame, FrameBuffer, decode_frames
from headwater.protocol.messages import Message, decode_message
from headwater.protocol.messages.dcp_streams import OpenFlags, VBucketState
from headwater.protocol.numbers import SEQNO_MAX
from support.recorded_sessions import RecordedFrame, bytes_literal, hello_features, read_session

FRAME_COUNTS = {
    "4.6.5": 142, "7.0.5": 313, "4.6.5-user": 79, "7.0.5-consumer": 192, "7.0.5-durability": 186,
    "7.0.5-replica-producer": 225, "8.0.2": 628, "8.0.2-collections": 577, "8.0.2-consumer": 205,
    "8.0.2-durability": 303, "8.0.2-flush": 73, "8.0.2-kv": 94,
}  # fmt: skip
CUT_COUNTS = dict.fromkeys(FRAME_COUNTS, 0)
ANNOTATED_FACT_COUNTS = {
    "4.6.5": 950, "7.0.5": 2373, "4.6.5-user": 379, "7.0.5-consumer": 900, "7.0.5-durability": 1203,
    "7.0.5-replica-producer": 1619, "8.0.2": 3860, "8.0.2-collections": 4918, "8.0.2-consumer": 1019,
    "8.0.2-durability": 2443, "8.0.2-flush": 535, "8.0.2-kv": 415,
}  # fmt: skip
"""How many facts of the annotations are held against the messages: none may be lost unseen."""

BAD_REQUESTS = {
    "4.6.5": {508: "extras of 48 bytes, not 40"},
    "7.0.5": {567: "extras of 48 bytes, not 40"},
    "8.0.2": {
        241: "features are 16 bits each",
        350: "must have a key",
        369: "extras of 8 bytes, not 4",
        806: "must have a value",
        872: "must have a key",
        879: "extras of 0 bytes, not 4",
        1096: "extras of 0 bytes, not 4",
        1175: "extras of 0 or 4 or 8 bytes, not 3",
        1601: "extras of 48 bytes, not 44",
    },
    "8.0.2-collections": dict.fromkeys((1343, 1361, 1369, 1375, 1948), "unknown opcode"),
    "8.0.2-consumer": {563: "v2.1 is not known"},
    "8.0.2-kv": {170: "extras of 0 bytes, not 4"},
}
"""Line → the fault, of requests that are sound frames and no messages: the recorder has tried what a server refuses, or
has administered its engine (SET_PARAM, COMPACT_DB)."""
MALFORMED_BY_8_0_2 = {"8.0.2-collections": frozenset({1212, 1230, 1265, 1283})}
"""Deletions with a stream id and a delete time: their framing length is 0, though the frame info is in the body."""
OPCODE_NAMES = {"DCP_STREAM_REQ": "DCP_STREAM_REQUEST"}
"""The recorder's names for opcodes, where they differ from ours."""
STATUS_NAMES = {"STREAMID_INVALID": "DCP_STREAMID_INVALID", "VB_UUID_NOT_EQUAL": "VBUUID_NOT_EQUAL"}
"""And for statuses."""

SESSIONS = {version: read_session(version) for version in FRAME_COUNTS}
WHOLE = [frame for session in SESSIONS.values() for frame in session if not frame.is_cut]
BAD = [frame for frame in WHOLE if frame.line in BAD_REQUESTS.get(frame.version, ())]


def good_frames(version: str) -> list[RecordedFrame]:
    without = {*BAD_REQUESTS.get(version, ()), *MALFORMED_BY_8_0_2.get(version, ())}
    return [frame for frame in SESSIONS[version] if frame.line not in without]


def decode(recorded: RecordedFrame) -> tuple[Frame, Message]:
    (frame,) = decode_frames(bytes(recorded.data))
    return frame, decode_message(frame, WITH_COLLECTIONS if recorded.collections else NOTHING_NEGOTIATED)


# --- whole sessions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SESSIONS)
def test_no_frame_of_a_session_is_lost(version: str) -> None:
    session = SESSIONS[version]
    assert len(session) == FRAME_COUNTS[version]
    assert sum(frame.is_cut for frame in session) == CUT_COUNTS[version]
    assert len(good_frames(version)) == len(session) - len(BAD_REQUESTS.get(version, ())) - len(
        MALFORMED_BY_8_0_2.get(version, ())
    )


@pytest.mark.parametrize("version", SESSIONS)
def test_frames_decode_to_messages_and_back(version: str) -> None:
    for recorded in good_frames(version):
        frame, message = decode(recorded)
        assert frame.encode() == recorded.data, str(recorded)
        assert message.encode() == recorded.data, str(recorded)


@pytest.mark.parametrize("recorded", BAD, ids=str)
def test_bad_request_is_a_sound_frame_and_no_message(recorded: RecordedFrame) -> None:
    (frame,) = decode_frames(bytes(recorded.data))
    assert frame.encode() == recorded.data
    with pytest.raises((MalformedMessage, UnknownOpcode), match=BAD_REQUESTS[recorded.version][recorded.line]):
        decode_message(frame, WITH_COLLECTIONS)


def test_collections_are_negotiated_by_connection() -> None:
    with_collections = {frame.connection for frame in SESSIONS["7.0.5"] if frame.collections}
    assert with_collections == {"fe#3", "x#1", "coll#1", "deltimes#1", "expiry#1"}


def _one_way(frame: RecordedFrame) -> tuple[str, str, bool]:
    return frame.version, frame.connection, frame.is_from_server


ONE_WAY_STREAMS = {
    f"{version} {connection} {'S->C' if is_from_server else 'C->S'}": [bytes(frame.data) for frame in frames]
    for (version, connection, is_from_server), frames in groupby(sorted(WHOLE, key=_one_way), key=_one_way)
}


@pytest.mark.parametrize("chunk_bytes", [1, 3, 7, 23, 25, 1000, 2**20])
def test_any_chunks_of_a_connection_give_the_same_frames(chunk_bytes: int) -> None:
    for stream, recorded in ONE_WAY_STREAMS.items():
        data = b"".join(recorded)
        buffer = FrameBuffer()
        frames: list[Frame] = []
        for at in range(0, len(data), chunk_bytes):
            buffer.receive_data(data[at : at + chunk_bytes])
            frames += buffer.frames()
        buffer.receive_end()
        assert [frame.encode() for frame in frames] == recorded, stream


# --- the annotations ----------------------------------------------------------------------------------------------

Read = Callable[[Frame, Any], object]

SERVER_FIELDS: dict[str, tuple[Callable[[str], object], Read]] = {
    "magic": (lambda text: int(text, 16), lambda frame, message: frame.magic),
    "status": (lambda text: int(text, 16), lambda frame, message: message.status),
    "vb": (int, lambda frame, message: message.vbucket),
    "opaque": (lambda text: int(text, 16), lambda frame, message: message.opaque),
    "cas": (lambda text: int(text, 0), lambda frame, message: message.cas),
    "dt": (int, lambda frame, message: message.datatype),
    "by_seqno": (int, lambda frame, message: message.seqno),
    "rev": (int, lambda frame, message: message.rev_seqno),
    "exp": (int, lambda frame, message: message.expiry),
    "lock": (int, lambda frame, message: message.lock_time),
    "nmeta": (int, lambda frame, message: message.nmeta),
    "nru": (int, lambda frame, message: message.nru),
    "start": (int, lambda frame, message: message.start_seqno),
    "end": (int, lambda frame, message: message.end_seqno),
    "event": (int, lambda frame, message: message.event),
    # Of a system event, and of a snapshot marker, which has the second number of its version in a byte.
    "version": (
        lambda text: int(text.removeprefix("2.") if "." in text else text),
        lambda frame, message: message.version,
    ),
    "max_visible": (int, lambda frame, message: message.max_visible_seqno),
    "purge_seqno": (int, lambda frame, message: message.purge_seqno),
    "high_prepared": (int, lambda frame, message: message.high_prepared_seqno),
    "framing": (bytes.fromhex, lambda frame, message: frame.framing_extras),
    "high_completed": (int, lambda frame, message: message.high_completed_seqno),
    "vbuuid": (lambda text: int(text, 16), lambda frame, message: message.vbuuid),
    "snap_start": (int, lambda frame, message: message.snapshot_start_seqno),
    "snap_end": (int, lambda frame, message: message.snapshot_end_seqno),
    "delete_time": (int, lambda frame, message: message.delete_time),
    "deleted": (int, lambda frame, message: message.deleted),
    "level": (int, lambda frame, message: message.durability),
    "prepared_seqno": (int, lambda frame, message: message.prepared_seqno),
    "commit_seqno": (int, lambda frame, message: message.commit_seqno),
    "abort_seqno": (int, lambda frame, message: message.abort_seqno),
    "reason": (int, lambda frame, message: message.reason),
    "bytes": (int, lambda frame, message: message.acked_bytes),
    "ext": (bytes.fromhex, lambda frame, message: frame.extras),
    "vlen": (int, lambda frame, message: len(message.encode_value())),
    "extlen": (int, lambda frame, message: len(message.encode_extras())),
    "key": (bytes_literal, lambda frame, message: message.encode_key()),
    "rollback_seqno": (int, lambda frame, message: message.rollback_seqno),
    # The recorder calls the reason of a stream end its flags.
    "flags": (
        lambda text: int(text, 0),
        lambda frame, message: message.reason if hasattr(message, "reason") else message.flags,
    ),
    "val": (
        lambda text: bytes_literal(text) if text.startswith("b") else bytes.fromhex(text),
        lambda frame, message: message.encode_value(),
    ),
    # Behind the seqnos of a deletion: nmeta, or the time and one more byte; of an expiration: the time.
    "ext_rest": (bytes.fromhex, lambda frame, message: message.encode_extras()[16:]),
    "failover_log": (
        lambda text: [(int(uuid, 16), int(seqno)) for uuid, seqno in re.findall(r"uuid=(\w+) seqno=(\w+)", text)],
        lambda frame, message: [(entry.vbuuid, entry.seqno) for entry in message.failover_log],
    ),
}

CLIENT_TEXTS: list[tuple[str, Callable[..., bool]]] = [
    (r"CONTROL (\w+)=([\w.-]+)", lambda m, key, value: (m.key, m.value) == (key.encode(), value.encode())),
    (r"OPEN seqno=(\d+)", lambda m, seqno: m.seqno == int(seqno)),
    (r"OPEN .*flags=(\w+)", lambda m, flags: m.flags == int(flags, 0)),
    (r"OPEN producer\|INCLUDE_XATTRS", lambda m: m.flags == OpenFlags.PRODUCER | OpenFlags.INCLUDE_XATTRS),
    (r"SASL PLAIN", lambda m: m.key == b"PLAIN" and re.fullmatch(rb"\0(@admin|b46)\0(password|wrong)", m.value)),
    (r"SELECT_BUCKET", lambda m: m.key in (b"default", b"b46", b"reca", b"recb", b"recc")),
    (r"HELLO features (\S+)", lambda m, ids: [*m.features] == [int(number, 16) for number in ids.split(",")]),
    (r"SET_VBUCKET vb=(\d) active", lambda m, vb: (m.vbucket, m.state) == (int(vb), VBucketState.ACTIVE)),
    (r"BUFFER_ACK (\d+)", lambda m, acked: m.acked_bytes == int(acked)),
    (r"(?:SET|DELETE|GET|overwrite) (\w+-\w+|last)", lambda m, key: m.key == key.encode()),
    (r"SET in collection (\d+)", lambda m, collection: m.collection_id == int(collection)),
    (r"with expiry (\d+) s", lambda m, seconds: m.expiry == int(seconds)),
    (r"with expiry (\d+) h", lambda m, hours: m.expiry == int(hours) * 3600),
    (r"(?:^|\s)vb ?(\d+)", lambda m, vbucket: m.vbucket == int(vbucket)),
    (r"(?:^|\W)start=(\d+)", lambda m, start: m.start_seqno == int(start)),
    (r"end=2\^64-1", lambda m: m.end_seqno == SEQNO_MAX),
    (r"^uuid 0|(?<!\()uuid=0", lambda m: m.vbuuid == 0),
    (r"(?:right|wrong vb) uuid", lambda m: m.vbuuid != 0),
    (r"^start>end", lambda m: m.start_seqno > m.end_seqno),
    (r"snap_start > start", lambda m: m.snapshot_start_seqno > m.start_seqno),
    (r"snap_end < start", lambda m: m.snapshot_end_seqno < m.start_seqno),
    (r"start == end == (\d+)", lambda m, seqno: m.start_seqno == m.end_seqno == int(seqno)),
    (r"(\d+)\.\.(\d+)", lambda m, start, end: (m.start_seqno, m.end_seqno) == (int(start), int(end))),
    (
        r"snapshot \[(\d+),(\d+)\]",
        lambda m, start, end: (m.snapshot_start_seqno, m.snapshot_end_seqno) == (int(start), int(end)),
    ),
]


def server_facts(recorded: RecordedFrame) -> Iterable[str]:
    """Holds each named field of a server's frame against the message. An unknown name is a failure."""
    frame, message = decode(recorded)
    for name, text in recorded.fields.items():
        expected, read = SERVER_FIELDS[name]
        found, stated = read(frame, message), expected(text)
        # The recorder cuts long values in its annotations.
        assert found[: len(stated)] == stated if name == "val" else found == stated, f"{recorded}: {name}"
        yield name
    if recorded.is_response:
        name = recorded.text.split()[2]
        assert message.status.name == STATUS_NAMES.get(name, name)
        yield "status name"


def client_facts(recorded: RecordedFrame) -> Iterable[str]:
    """Holds what the free text of a client's frame says against the message."""
    _, message = decode(recorded)
    for pattern, holds in CLIENT_TEXTS:
        if match := re.search(pattern, recorded.text):
            assert holds(message, *match.groups()), f"{recorded}: {recorded.text}"
            yield pattern


def annotated_facts(recorded: RecordedFrame) -> list[str]:
    frame, _ = decode(recorded)
    assert frame.opcode_name == OPCODE_NAMES.get(recorded.opcode, recorded.opcode)
    assert (frame.magic is Magic.RESPONSE) == recorded.is_response
    facts = server_facts(recorded) if recorded.is_from_server else client_facts(recorded)
    return ["opcode", "magic", *facts]


@pytest.mark.parametrize(("version", "count"), ANNOTATED_FACT_COUNTS.items())
def test_messages_say_what_their_annotations_say(version: str, count: int) -> None:
    facts = [annotated_facts(frame) for frame in good_frames(version)]
    assert min(len(found) for found in facts) >= 2
    assert sum(len(found) for found in facts) == count, "none may be lost unseen"


@pytest.mark.parametrize("version", SESSIONS)
def test_hello_responses_have_the_annotated_features(version: str) -> None:
    answers = [frame for frame in SESSIONS[version] if frame.opcode == "HELLO" and "SUCCESS" in frame.text]
    for recorded in answers:
        _, message = decode(recorded)
        assert list(message.features) == hello_features(recorded), str(recorded)
    assert bool(answers) == (version != "4.6.5")

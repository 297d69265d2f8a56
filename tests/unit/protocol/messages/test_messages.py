"""Messages: which parts each may have, the versions of those that have several, and what is kept of the unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum, IntFlag

import pytest

from headwater import errors
from headwater.protocol.features import (
    NOTHING_NEGOTIATED,
    WITH_COLLECTIONS,
    Feature,
    Magic,
    Negotiated,
    Opcode,
    ServerOpcode,
)
from headwater.protocol.frames import Frame, FrameInfo, decode_frames, stream_id
from headwater.protocol.messages import (
    REQUESTS,
    RESPONSES,
    SERVER_REQUESTS,
    ErrorResponse,
    Message,
    PlainResponse,
    Request,
    dcp_changes,
    dcp_streams,
    decode_message,
    refused,
    refused_request,
    session,
    subdocument,
)
from headwater.protocol.messages.documents import Get, GetResponse, Set, StoreResponse
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, ObserveSeqnoResponse, SetVBucket
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from support.cases import case, case_apart, each


def request(opcode: int, *, extras: str = "", key: bytes = b"", value: bytes = b"", magic: int = 0x80) -> Frame:
    return Frame(magic=Magic(magic), opcode=opcode, extras=bytes.fromhex(extras), key=key, value=value)


def response(opcode: int, status: int = 0, *, extras: str = "", value: bytes = b"") -> Frame:
    return Frame(magic=Magic.RESPONSE, opcode=opcode, specific=status, extras=bytes.fromhex(extras), value=value)


def round_trip(message: Message, negotiated: Negotiated = NOTHING_NEGOTIATED) -> Message:
    (frame,) = decode_frames(message.encode())
    return decode_message(frame, negotiated)


# --- which parts a DCP message may have ---------------------------------------------------------------------------

MUST, MAY, MUST_NOT = "must", "may", "must not"

# Opcode → lengths of its extras, and whether it has a key and a value, as kv_engine's documents say.
PARTS: dict[int, tuple[tuple[int, ...], str, str]] = {
    0x50: ((8,), MUST, MAY),
    0x51: ((4,), MUST_NOT, MUST_NOT),
    0x52: ((0,), MUST_NOT, MUST_NOT),
    0x53: ((48,), MUST_NOT, MAY),
    0x54: ((0,), MUST_NOT, MUST_NOT),
    0x55: ((4,), MUST_NOT, MUST_NOT),
    0x57: ((31,), MUST, MAY),
    0x58: ((18, 21), MUST, MAY),
    0x59: ((18, 20), MUST, MAY),
    0x5A: ((0,), MUST_NOT, MUST_NOT),
    0x5B: ((1,), MUST_NOT, MUST_NOT),
    0x5C: ((0,), MUST_NOT, MUST_NOT),
    0x5D: ((4,), MUST_NOT, MUST_NOT),
    0x5E: ((0,), MUST, MUST),
    0x5F: ((13,), MAY, MAY),
    0x60: ((31,), MUST, MAY),
    0x61: ((8,), MUST_NOT, MUST_NOT),
    0x62: ((16,), MUST, MUST_NOT),
    0x63: ((16,), MUST, MUST_NOT),
    0x64: ((8,), MUST_NOT, MUST_NOT),
    0x65: ((4,), MUST_NOT, MUST_NOT),
    0x67: ((0,), MUST_NOT, MUST_NOT),
}
STRUCTURED = {0x56, 0x66}
"""The value of a snapshot marker depends on its version, that of a cache transfer has items: tested below."""

ROWS = [pytest.param(opcode, *parts, id=Opcode(opcode).name) for opcode, parts in PARTS.items()]


def test_every_dcp_opcode_is_in_the_table() -> None:
    dcp = {opcode for opcode in REQUESTS if 0x50 <= opcode <= 0x67}
    assert dcp == PARTS.keys() | STRUCTURED == set(range(0x50, 0x68))


def sound(opcode: int, extras_bytes: int, key: str, value: str) -> Frame:
    return request(
        opcode, extras="01" * extras_bytes, key=b"key" if key == MUST else b"", value=b"value" if value == MUST else b""
    )


@each(("opcode", "lengths", "key", "value"), ROWS)
def test_extras_have_one_of_their_lengths(opcode: int, lengths: tuple[int, ...], key: str, value: str) -> None:
    for extras_bytes in range(60):
        frame = sound(opcode, extras_bytes, key, value)
        if extras_bytes in lengths:
            assert decode_message(frame).to_frame() == frame
        else:
            with pytest.raises(errors.MalformedMessage, match="must have extras of"):
                decode_message(frame)


@each("part", ["key", "value"])
@each(("opcode", "lengths", "key", "value"), ROWS)
def test_key_and_value_as_documented(opcode: int, lengths: tuple[int, ...], key: str, value: str, part: str) -> None:
    frame = sound(opcode, lengths[0], key, value)
    rule = key if part == "key" else value
    for given in (b"", b"given"):
        changed = replace(frame, **{part: given})
        if (given and rule == MUST_NOT) or (not given and rule == MUST):
            with pytest.raises(errors.MalformedMessage, match=f"{rule} have a {part}"):
                decode_message(changed)
        else:
            assert decode_message(changed).to_frame() == changed


@case(dcp_streams.Open(key=b""))
@case(dcp_changes.Mutation(seqno=1, rev_seqno=1, key=b""))
@case(Get(key=b""))
@case(dcp_streams.Control(key=b"", value=b"true"))
@case(dcp_streams.Control(key=b"enable_noop", value=b""))
def test_a_message_without_a_part_it_must_have_is_our_own_fault(message: Message) -> None:
    with pytest.raises(errors.LocalProtocolError, match="must have a"):
        message.encode()


def test_a_number_too_large_for_its_field_is_our_own_fault() -> None:
    with pytest.raises(errors.LocalProtocolError, match="BufferAck"):
        dcp_streams.BufferAck(acked_bytes=2**32).encode()
    with pytest.raises(errors.LocalProtocolError, match="vbucket"):
        dcp_streams.DcpNoop(vbucket=0x10000).encode()


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collection_id", [0, 8, 0x80, 0xFFFFFFFF])
def test_a_key_starts_with_its_collection_where_that_was_negotiated(collection_id: int) -> None:
    message = dcp_changes.Mutation(seqno=1, rev_seqno=1, collection_id=collection_id, key=b"key")
    assert round_trip(message, WITH_COLLECTIONS) == message


def test_without_negotiation_a_key_is_a_key() -> None:
    frame = request(Opcode.GET, key=b"\x08apple")
    assert decode_message(frame) == Get(key=b"\x08apple")
    assert decode_message(frame, WITH_COLLECTIONS) == Get(collection_id=8, key=b"apple")


def test_only_document_keys_start_with_a_collection() -> None:
    control = dcp_streams.Control(key=b"enable_noop", value=b"true")
    assert round_trip(control, WITH_COLLECTIONS) == control


@each("collection_id", [None, 0, 0xFFFFFFFF])
@each(("key_bytes", "is_taken"), [(1, True), (250, True), (251, False)])
def test_250_bytes_of_key_beside_the_collection(collection_id: int | None, key_bytes: int, is_taken: bool) -> None:
    negotiated = NOTHING_NEGOTIATED if collection_id is None else WITH_COLLECTIONS
    message = Get(collection_id=collection_id, key=b"k" * key_bytes)
    if is_taken:
        assert round_trip(message, negotiated) == message
    else:
        with pytest.raises(errors.MalformedMessage, match="251 bytes exceeds 250"):
            round_trip(message, negotiated)


@pytest.mark.parametrize("key", [b"", b"\x80", b"\x80\x00k", b"\xff\xff\xff\xff\xff\x01k"])
def test_a_key_without_a_sound_collection_is_refused(key: bytes) -> None:
    with pytest.raises(errors.MalformedLeb128):
        decode_message(request(Opcode.GET, key=key), WITH_COLLECTIONS)


def test_a_collection_alone_is_no_key() -> None:
    with pytest.raises(errors.MalformedMessage, match="must have a key"):
        decode_message(request(Opcode.GET, key=b"\x08"), WITH_COLLECTIONS)


def test_a_get_response_has_a_key_only_where_it_was_asked_for() -> None:
    assert decode_message(response(Opcode.GET, extras="00000001", value=b"v"), WITH_COLLECTIONS) == GetResponse(
        opcode=Opcode.GET, flags=1, value=b"v"
    )
    with_key = GetResponse(opcode=Opcode.GETK, collection_id=8, key=b"apple", value=b"v")
    assert round_trip(with_key, WITH_COLLECTIONS) == with_key


# --- snapshot markers ---------------------------------------------------------------------------------------------

V1 = dcp_changes.SnapshotMarker(
    start_seqno=1, end_seqno=8, flags=dcp_changes.SnapshotFlags.DISK | dcp_changes.SnapshotFlags.CHECKPOINT
)
V2_0 = replace(V1, max_visible_seqno=7, high_completed_seqno=6)
V2_2 = replace(V2_0, purge_seqno=5, high_prepared_seqno=4)
V1_FIELDS = "0000000000000001" + "0000000000000008" + "00000006"
V2_0_FIELDS = V1_FIELDS + "0000000000000007" + "0000000000000006"
V2_2_FIELDS = V2_0_FIELDS + "0000000000000005" + "0000000000000004"


@case_apart(V1, None, V1_FIELDS, "", id="v1")
@case_apart(V2_0, 0, "00", V2_0_FIELDS, id="v2.0")
@case_apart(V2_2, 2, "02", V2_2_FIELDS, id="v2.2")
def test_snapshot_marker_versions(
    marker: dcp_changes.SnapshotMarker, version: int | None, extras: str, value: str
) -> None:
    assert marker.version == version
    frame = marker.to_frame()
    assert (frame.extras.hex(), frame.value.hex()) == (extras, value)
    assert decode_message(frame) == marker


@case("00", V1_FIELDS)
@case("00", V2_2_FIELDS)
@case("02", V2_0_FIELDS)
@case("02", "")
@case("01", V2_0_FIELDS + "00" * 8)
@case("03", V2_2_FIELDS)
@case(V1_FIELDS, "00")
@case("0000", V2_0_FIELDS)
@case("", V1_FIELDS)
def test_a_marker_of_another_shape_is_refused(extras: str, value: str) -> None:
    with pytest.raises(errors.MalformedMessage):
        decode_message(request(Opcode.DCP_SNAPSHOT_MARKER, extras=extras, value=bytes.fromhex(value)))


@case(replace(V1, max_visible_seqno=7), "high_completed_seqno")
@case(replace(V1, high_completed_seqno=6), "max_visible_seqno")
@case(replace(V2_0, purge_seqno=4), "high_prepared_seqno")
@case(replace(V2_0, high_prepared_seqno=5), "purge_seqno")
@case(replace(V1, purge_seqno=4), "max_visible_seqno")
@case(replace(V1, high_prepared_seqno=5), "max_visible_seqno")
def test_a_marker_drops_no_field_it_was_given(marker: dcp_changes.SnapshotMarker, missing: str) -> None:
    """A field given without the others of its version asks for that version, and says what it lacks."""
    with pytest.raises(errors.LocalProtocolError, match=missing):
        marker.encode()


# --- other messages with versions ---------------------------------------------------------------------------------

SEQNOS = "0000000000000008" + "0000000000000002"


@case(dcp_changes.Deletion(seqno=8, rev_seqno=2, nmeta=3, key=b"k"), SEQNOS + "0003")
@case(dcp_changes.Deletion(seqno=8, rev_seqno=2, delete_time=0x6AF92E04, key=b"k"), SEQNOS + "6af92e0400")
@case(dcp_changes.Deletion(seqno=8, rev_seqno=2, delete_time=0, key=b"k"), SEQNOS + "0000000000")
@case(dcp_changes.Expiration(seqno=8, rev_seqno=2, key=b"k"), SEQNOS + "0000")
@case(dcp_changes.Expiration(seqno=8, rev_seqno=2, delete_time=0x6AF92E07, key=b"k"), SEQNOS + "6af92e07")
@case(SetVBucket(state=dcp_streams.VBucketState.ACTIVE), "01")
@case(SetVBucket(state=dcp_streams.VBucketState.ACTIVE, state_is_wide=True), "00000001")
@case(GetAllVbSeqnos(), "")
@case(GetAllVbSeqnos(state=1), "00000001")
@case(GetAllVbSeqnos(state=0, collection=9), "0000000000000009")
@case(session.GetClusterConfig(), "")
@case(session.GetClusterConfig(epoch=1, revision=2), "00000000000000010000000000000002")
@case(StoreResponse(opcode=Opcode.SET), "")
@case(StoreResponse(opcode=Opcode.SET, vbuuid=1, seqno=2), "00000000000000010000000000000002")
def test_the_version_is_that_of_the_given_fields(message: Message, extras: str) -> None:
    assert message.to_frame().extras.hex() == extras
    assert round_trip(message) == message


@case(session.GetClusterConfig(epoch=1))
@case(GetAllVbSeqnos(collection=9))
@case(StoreResponse(opcode=Opcode.SET, vbuuid=1))
@case(ObserveSeqnoResponse(vbucket=0, vbuuid=1, persisted_seqno=1, current_seqno=1, old_vbuuid=2))
def test_half_a_version_is_our_own_fault(message: Message) -> None:
    with pytest.raises(errors.LocalProtocolError):
        message.encode()


def test_a_prepare_has_31_bytes_of_extras() -> None:
    frame = dcp_changes.Prepare(seqno=8, rev_seqno=2, nru=1, deleted=0, durability=3, key=b"k").to_frame()
    assert frame.extras.hex() == SEQNOS + "00" * 12 + "010003"


# --- cache transfers ----------------------------------------------------------------------------------------------

# 40 bytes of numbers as in kv_engine's cache-transfer.md, the key with its collection, the value.
ITEM = dcp_changes.CacheItem(
    cas=4,
    seqno=1,
    rev_seqno=5,
    flags=6,
    expiry=7,
    datatype=Datatype.JSON,
    cache_hint=10,
    collection_id=8,
    key=b"hello",
    value=b"world",
)
ITEM_BYTES = (
    bytes.fromhex("0000000000000004 0000000000000001 0000000000000005 00000005 00000006 00000007 0006 01 0a")
    + b"\x08hello"
    + b"world"
)


def item_bytes(*, key: bytes, value_bytes: int = 0, value: bytes = b"", key_bytes: int | None = None) -> bytes:
    length = len(key) if key_bytes is None else key_bytes
    return bytes(24) + value_bytes.to_bytes(4) + bytes(8) + length.to_bytes(2) + b"\0\0" + key + value


def cache_transfer(value: bytes) -> Message:
    return decode_message(request(Opcode.DCP_CACHE_TRANSFER, value=value))


def test_a_cache_transfer_is_one_item_after_the_other() -> None:
    key_only = dcp_changes.CacheItem(seqno=2, collection_id=0x80, key=b"k", datatype=Datatype.XATTR)
    message = dcp_changes.CacheTransfer(items=(ITEM, key_only, ITEM))
    assert ITEM.encode() == ITEM_BYTES
    assert message.to_frame().value == ITEM_BYTES + key_only.encode() + ITEM_BYTES
    assert round_trip(message) == message
    assert round_trip(message, WITH_COLLECTIONS) == message


@each("kept", range(1, len(ITEM_BYTES)))
def test_a_cache_transfer_that_is_cut_off_is_refused(kept: int) -> None:
    with pytest.raises(errors.MalformedMessage, match="cut off"):
        cache_transfer(ITEM_BYTES + ITEM_BYTES[:kept])


@case(b"", "fewer than 1 items")
@case(item_bytes(key=b""), "needs 2 bytes")
@case(item_bytes(key=b"\x08"), "needs 2 bytes")
@case(item_bytes(key=b"\x08" + b"k" * 251), "exceeds 250 bytes")
@case(item_bytes(key=b"\x80\x80"), "collection id is cut off")
@case(item_bytes(key=b"\x80\x00k"), "shortest form")
# A length that would reach far beyond the frame is held against it before anything is taken.
@case(item_bytes(key=b"\x08k", value_bytes=2**32 - 1), "cut off")
@case(item_bytes(key=b"\x08k", key_bytes=0xFFFF), "cut off")
# The collection id may not borrow bytes from the value.
@case(item_bytes(key=b"\x80\x80", value_bytes=1, value=b"\x01"), "collection id is cut off")
def test_an_item_outside_its_bounds_is_refused(value: bytes, reason: str) -> None:
    with pytest.raises(errors.MalformedMessage, match=reason):
        cache_transfer(value)


@pytest.mark.parametrize("key", [b"\x08k", b"\x08" + b"k" * 250, b"\xff\xff\xff\xff\x0f" + b"k" * 250])
def test_the_shortest_and_the_longest_key_of_an_item(key: bytes) -> None:
    message = cache_transfer(item_bytes(key=key))
    assert message.items[0].key == key.lstrip(b"\x08\xff\x0f")


def test_an_empty_cache_transfer_is_our_own_fault() -> None:
    with pytest.raises(errors.LocalProtocolError, match="0 items, not 1"):
        dcp_changes.CacheTransfer(items=()).encode()


# --- what is not known --------------------------------------------------------------------------------------------


@each("opcode", [opcode for opcode in range(256) if opcode not in REQUESTS])
def test_a_request_nobody_knows_is_named(opcode: int) -> None:
    with pytest.raises(errors.UnknownOpcode) as raised:
        decode_message(request(opcode))
    assert raised.value.opcode == opcode


@pytest.mark.parametrize("opcode", [0x69, 0xEE])
@pytest.mark.parametrize("status", [0x00, 0x81])
def test_a_response_to_a_request_nobody_knows_is_refused(opcode: int, status: int) -> None:
    with pytest.raises(errors.UnknownOpcode):
        decode_message(response(opcode, status))


@pytest.mark.parametrize("status", [0x05, 0x99, 0xFFFF])
def test_a_status_nobody_knows_makes_an_error_response(status: int) -> None:
    message = decode_message(response(Opcode.DCP_STREAM_REQUEST, status, value=b"why"))
    assert (message.status, message.opcode, message.value) == (status, Opcode.DCP_STREAM_REQUEST, b"why")
    assert round_trip(message) == message


@pytest.mark.parametrize(
    ("number", "name"), [(0, "OK"), (8, "LOST_PRIVILEGES"), (9, "UNKNOWN_0x09"), (2**32 - 1, None)]
)
def test_a_reason_to_end_nobody_knows_is_kept(number: int, name: str | None) -> None:
    message = decode_message(request(Opcode.DCP_STREAM_END, extras=f"{number:08x}"))
    assert isinstance(message, dcp_streams.StreamEnd)
    assert message.reason == number
    assert message.reason.is_known == (number <= 8)
    if name:
        assert message.reason.name == name
    assert round_trip(message) == message


@case_apart(lambda flags: dcp_streams.StreamRequest(flags=flags), dcp_streams.StreamFlags, id="stream request")
@case_apart(lambda flags: dcp_streams.AddStream(flags=flags), dcp_streams.StreamFlags, id="add stream")
@case_apart(lambda flags: dcp_streams.Open(flags=flags, key=b"name"), dcp_streams.OpenFlags, id="open")
@case_apart(lambda flags: dcp_changes.OsoSnapshot(flags=flags), dcp_changes.OsoFlags, id="OSO snapshot")
@case_apart(lambda flags: replace(V1, flags=flags), dcp_changes.SnapshotFlags, id="snapshot marker")
def test_unknown_flags_are_kept(build: Callable[[int], Message], flags: type[dcp_streams.StreamFlags]) -> None:
    """A peer may send 2**32 different ones; the standard library's flags would hold each of them for ever."""
    remembered = len(flags._value2member_map_)
    for number in range(0x80000001, 0x80001001, 16):
        decoded = round_trip(build(number))
        assert decoded.flags == number
        assert flags(1) in decoded.flags
    assert len(flags._value2member_map_) <= remembered + 1


@case(dcp_changes.SnapshotFlags, "MEMORY=1 DISK=2 CHECKPOINT=4 ACK=8 HISTORY=16 MAY_CONTAIN_DUPLICATES=32")
@case(dcp_changes.OsoFlags, "START=1 END=2")
@case(dcp_streams.VBucketState, "ACTIVE=1 REPLICA=2 PENDING=3 DEAD=4")
@case(
    dcp_streams.StreamEndReason,
    (
        "OK=0 CLOSED=1 STATE_CHANGED=2 DISCONNECTED=3 TOO_SLOW=4 BACKFILL_FAILED=5 ROLLBACK=6 FILTER_EMPTY=7"
        " LOST_PRIVILEGES=8"
    ),
)
@case(
    dcp_streams.OpenFlags,
    (
        "PRODUCER=1 NOTIFIER=2 INCLUDE_XATTRS=4 NO_VALUE=8 COLLECTIONS=16 INCLUDE_DELETE_TIMES=32"
        " NO_VALUE_WITH_UNDERLYING_DATATYPE=64 INCLUDE_DELETED_USER_XATTRS=256 SKIP_DELETES_IN_INITIAL_BACKFILL=512"
    ),
)
@case(
    dcp_streams.StreamFlags,
    (
        "TAKEOVER=1 DISK_ONLY=2 LATEST=4 NO_VALUE=8 ACTIVE_ONLY=16 STRICT_VBUUID=32 FROM_LATEST=64"
        " IGNORE_PURGED_TOMBSTONES=128 CACHE_TRANSFER=256"
    ),
)
def test_the_numbers_are_those_of_the_documents(kind: type[IntEnum | IntFlag], members: str) -> None:
    assert " ".join(f"{member.name}={member.value}" for member in kind) == members


# --- responses ----------------------------------------------------------------------------------------------------


def test_a_rollback_has_a_form_of_its_own() -> None:
    message = dcp_streams.StreamRequestResponse(status=Status.ROLLBACK, rollback_seqno=0x54321)
    assert message.to_frame().value.hex() == "0000000000054321"
    assert round_trip(message) == message


@case(dcp_streams.StreamRequestResponse(status=Status.ROLLBACK))
@case(dcp_streams.StreamRequestResponse(status=Status.SUCCESS, rollback_seqno=0))
def test_a_rollback_seqno_belongs_to_its_status(message: Message) -> None:
    with pytest.raises(errors.LocalProtocolError, match="ROLLBACK"):
        message.encode()


@pytest.mark.parametrize(
    ("status", "value"), [(Status.SUCCESS, bytes(15)), (Status.ROLLBACK, bytes(7)), (Status.ROLLBACK, b"")]
)
def test_a_stream_request_response_of_another_length_is_refused(status: Status, value: bytes) -> None:
    with pytest.raises(errors.MalformedMessage):
        decode_message(response(Opcode.DCP_STREAM_REQUEST, status, value=value))


@case_apart(
    b'{"error":{"context":"Request must include extras of length 48"}}',
    "Request must include extras of length 48",
    id="JSON",
)
@case_apart(b"Not found", "Not found", id="text")
@case_apart(b"", "", id="nothing")
@case_apart(b'{"error":{}}', '{"error":{}}', id="no context")
@case_apart(b"[]", "[]", id="a list")
@case_apart(b"\xff", "\N{REPLACEMENT CHARACTER}", id="not UTF-8")
@case_apart(b"[" * 100_000, "[" * 100_000, id="too deep")
def test_an_error_tells_the_servers_words(value: bytes, context: str) -> None:
    message = decode_message(response(Opcode.DCP_CONTROL, Status.EINVAL, value=value))
    assert message.context == context


def test_a_success_without_a_form_of_its_own_is_plain() -> None:
    assert Opcode.DCP_CONTROL not in RESPONSES
    assert decode_message(response(Opcode.DCP_CONTROL)) == PlainResponse(opcode=Opcode.DCP_CONTROL)


def test_an_error_has_no_form_of_its_own() -> None:
    """The extras of a failed get are not the flags of a document."""
    message = decode_message(response(Opcode.GET, Status.KEY_ENOENT))
    assert message == ErrorResponse(opcode=Opcode.GET, status=Status.KEY_ENOENT)


# --- frame infos --------------------------------------------------------------------------------------------------


def test_a_frame_info_makes_a_flexible_frame() -> None:
    message = dcp_changes.Mutation(seqno=1, rev_seqno=1, key=b"k", frame_infos=(stream_id(71),))
    frame = message.to_frame()
    assert (frame.magic, frame.framing_extras.hex()) == (Magic.FLEXIBLE_REQUEST, "220047")
    assert message.stream_id == 71
    assert round_trip(message) == message


def test_a_response_with_a_frame_info_is_flexible_too() -> None:
    message = session.HelloResponse(features=(Feature.XERROR,), frame_infos=(FrameInfo(0, b"\0\1"),))
    assert message.to_frame().magic is Magic.FLEXIBLE_RESPONSE
    assert round_trip(message) == message


def test_framing_extras_that_do_not_parse_are_refused() -> None:
    frame = Frame(magic=Magic.FLEXIBLE_REQUEST, opcode=Opcode.DCP_NOOP, framing_extras=b"\x22\x00")
    with pytest.raises(errors.MalformedFrameInfo):
        decode_message(frame)


# --- frames a server starts ---------------------------------------------------------------------------------------


def test_a_server_numbers_its_requests_apart() -> None:
    notification = session.ClustermapChangeNotification(epoch=1, revision=2, key=b"bucket", value=b"{}")
    assert notification.to_frame().magic is Magic.SERVER_REQUEST
    assert round_trip(notification) == notification
    assert set(SERVER_REQUESTS) == {ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION}
    with pytest.raises(errors.UnknownOpcode):
        decode_message(request(Opcode.GET, key=b"k", magic=0x82))


def test_a_servers_request_with_frame_infos_is_our_own_fault() -> None:
    """Under the flexible magic its opcode would be that of a document being set."""
    with pytest.raises(errors.LocalProtocolError, match="no frame infos"):
        session.ClustermapChangeNotification(revision=2, frame_infos=(stream_id(1),)).encode()


def test_a_response_to_a_servers_request_is_not_one_to_a_clients() -> None:
    with pytest.raises(errors.UnknownOpcode):
        decode_message(Frame(magic=Magic.SERVER_RESPONSE, opcode=Opcode.SET))


# --- structured values --------------------------------------------------------------------------------------------


@case(request(Opcode.HELLO, value=b"\0"))
@case(request(Opcode.GET_ERROR_MAP, value=b"\0"))
@case(request(Opcode.GET_ERROR_MAP))
@case(request(Opcode.OBSERVE_SEQNO, value=bytes(7)))
@case(response(Opcode.HELLO, value=b"\0\1\2"))
@case(response(Opcode.GET_VBUCKET, value=bytes(3)))
@case(response(Opcode.GET_ALL_VB_SEQNOS, value=bytes(11)))
@case(response(Opcode.DCP_GET_FAILOVER_LOG, value=bytes(17)))
@case(response(Opcode.OBSERVE_SEQNO))
@case(response(Opcode.OBSERVE_SEQNO, value=bytes(26)))
@case(response(Opcode.OBSERVE_SEQNO, value=b"\1" + bytes(26)))
@case(response(Opcode.OBSERVE_SEQNO, value=b"\2" + bytes(26)))
@case(response(Opcode.INCREMENT, value=bytes(7)))
@case(request(Opcode.SUBDOC_GET, extras="0005 00", key=b"k", value=b"path"))
@case(request(Opcode.SUBDOC_MULTI_LOOKUP, key=b"k", value=b"\xc5\0\0\5path"))
@case(request(Opcode.SUBDOC_MULTI_MUTATION, key=b"k", value=b"\xc5\0\0\1\0\0\0\2pv"))
@case(response(Opcode.SUBDOC_MULTI_LOOKUP, value=b"\0\0\0\0\0\2v"))
@case(response(Opcode.SUBDOC_MULTI_MUTATION, value=b"\0\0\0\0\0"))
def test_a_value_that_does_not_add_up_is_refused(frame: Frame) -> None:
    with pytest.raises(errors.MalformedMessage):
        decode_message(frame)


def test_the_paths_of_one_request_have_a_limit() -> None:
    specs = (subdocument.LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"p"),) * subdocument.SPECS_MAX
    message = subdocument.MultiLookup(key=b"k", specs=specs)
    assert round_trip(message) == message
    with pytest.raises(errors.LocalProtocolError, match="17 specs, not 0 to 16"):
        replace(message, specs=(*specs, specs[0])).encode()
    frame = message.to_frame()
    with pytest.raises(errors.MalformedMessage, match="more than 16"):
        decode_message(replace(frame, value=frame.value + specs[0].encode()))


@case(subdocument.MutationResult(index=0, status=Status.SUCCESS))
@case(subdocument.MutationResult(index=0, status=Status.SUBDOC_PATH_ENOENT, value=b"v"))
def test_a_mutation_result_has_a_value_only_where_it_succeeded(result: subdocument.MutationResult) -> None:
    with pytest.raises(errors.LocalProtocolError, match="succeeded only"):
        subdocument.MultiMutationResponse(results=(result,)).encode()


def test_a_path_and_a_value_stand_side_by_side() -> None:
    message = subdocument.SubdocGet(key=b"k", path=b"a.b", new_value=b"1", expiry=60)
    assert message.to_frame().extras.hex() == "0003" + "00" + "0000003c"
    assert message.to_frame().value == b"a.b1"
    assert round_trip(message) == message


def test_a_message_with_defaults_is_all_zero_but_for_an_endless_stream() -> None:
    """What a caller does not set must not mean anything."""
    assert (
        dcp_streams.StreamRequest().encode().hex()
        == "80530000300000000000003000000000" + "00" * 24 + "ff" * 8 + "00" * 24
    )
    for change in (
        dcp_changes.Mutation(seqno=0, rev_seqno=0, key=b"k"),
        dcp_changes.Deletion(seqno=0, rev_seqno=0, key=b"k"),
        dcp_changes.Expiration(seqno=0, rev_seqno=0, key=b"k"),
        dcp_changes.Prepare(seqno=0, rev_seqno=0, durability=0, key=b"k"),
    ):
        encoded = change.encode()
        assert encoded[12:-1] == bytes(len(encoded) - 13)
    assert dcp_changes.CacheItem(seqno=0, collection_id=0, key=b"").encode()[:36] == bytes(36)


def test_features_nobody_knows_are_kept() -> None:
    message = session.Hello(key=b"agent", features=(Feature.COLLECTIONS, Feature(0x7777)))
    assert round_trip(message) == message
    assert Negotiated(frozenset(message.features)).collections


# --- the tables ---------------------------------------------------------------------------------------------------


def test_a_request_stands_under_its_opcode_and_magic() -> None:
    for table, magic in ((REQUESTS, Magic.REQUEST), (SERVER_REQUESTS, Magic.SERVER_REQUEST)):
        for opcode, cls in table.items():
            assert issubclass(cls, Request)
            assert (cls.opcode, cls.magic) == (opcode, magic)


def test_a_response_stands_under_all_its_opcodes() -> None:
    for opcode, cls in RESPONSES.items():
        assert opcode in cls.opcodes
    for cls in set(RESPONSES.values()):
        assert all(RESPONSES[opcode] is cls for opcode in cls.opcodes)


def test_messages_cannot_be_changed() -> None:
    message = Set(key=b"k")
    with pytest.raises(AttributeError):
        message.key = b"other"


# --- refusals in words: the request, the key, the status and what the server says itself ------------------------------


def answer(status: Status, value: bytes = b"") -> ErrorResponse:
    return ErrorResponse(opcode=Opcode.GET, status=status, value=value)


def test_the_status_and_the_key_are_named() -> None:
    error = refused_request(Get(key=b"hotel::1"), answer(Status.KEY_ENOENT))
    assert type(error) is errors.KeyNotFound
    assert error.status == Status.KEY_ENOENT
    assert error.reason == "the server refused Get of 'hotel::1': KEY_ENOENT"
    assert error.hint == errors.KeyNotFound.default_hint


@case(Get(key=b"k"), Status.EINVAL, b'{"error": {"context": "no such thing"}}', "Get of 'k': EINVAL (no such thing)")
# A cluster map is no words.
@case(Get(key=b"k"), Status.NOT_MY_VBUCKET, b'{"rev": 1}', "Get of 'k': NOT_MY_VBUCKET")
@case(session.Noop(), Status.EBUSY, b"", "Noop: EBUSY")
@case(Get(key=b"k" * 60_000), Status.EINVAL, b"", f"Get of '{'k' * 250}'…: EINVAL")
@case(Get(key=b"a\xff"), Status.KEY_ENOENT, b"", r"Get of 'a\\xff': KEY_ENOENT")
def test_an_error_keeps_the_servers_words(request_: Request, status: Status, value: bytes, reason: str) -> None:
    assert refused_request(request_, answer(status, value)).reason == f"the server refused {reason}"


@pytest.mark.parametrize("status", [0x7777, 0x25])
def test_a_status_that_nobody_knows_keeps_its_number(status: int) -> None:
    error = refused("something", status=status)
    assert type(error) is errors.StatusError
    assert error.status == status


def test_a_key_that_is_too_long() -> None:
    longest, too_long = b"k" * KEY_BYTES_MAX, b"k" * (KEY_BYTES_MAX + 1)
    error = refused_request(Get(key=too_long), answer(Status.EINVAL))
    assert type(error) is errors.InvalidArguments
    assert error.hint == "A key has at most 250 bytes, and this one has 251"
    assert refused_request(Get(key=longest), answer(Status.EINVAL)).hint == errors.InvalidArguments.default_hint
    assert refused_request(Get(key=too_long), answer(Status.EBUSY)).hint == "Wait and try again"

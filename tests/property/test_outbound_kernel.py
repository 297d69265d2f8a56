"""The outbound kernel equals the typed codec, its oracle: what a stream gets of a stored run, one message at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.node.producer.controls import Shape, Values
from headwater.node.producer.outbound import Listing, OutboundStop, Output, shape_run
from headwater.protocol import values
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames, stream_id
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import Abort, Commit, Deletion, Expiration, Mutation, Prepare

COLLECTIONS = st.sampled_from([0, 8, 9, 127, 128, 2**32 - 1])
FOR_ALL = 2**62
"""A seqno behind all of them, and room for all of them."""
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
xattrs = st.dictionaries(
    st.sampled_from(["_sync", "_x", "user", "u"]), st.binary(max_size=20).map(bytes.hex), max_size=3
)


@st.composite
def _values(draw: Any) -> tuple[bytes, values.Datatype]:
    body = draw(st.binary(max_size=120))
    datatype = draw(st.sampled_from([values.Datatype.RAW, values.Datatype.JSON]))
    if draw(st.booleans()):
        # What has no attributes is stored compressed if it was written so.
        return (values.compress(body), datatype | values.Datatype.SNAPPY) if draw(st.booleans()) else (body, datatype)
    section = {name: text.encode() for name, text in draw(xattrs).items()}
    return values.encode_xattrs(values.ValueParts(section, body)), datatype | values.Datatype.XATTR


@st.composite
def stored_runs(draw: Any) -> list[Request]:
    """Changes of one vbucket as they are stored: delete times, collection ids, an abort's own seqno first."""
    messages: list[Request] = []
    seqno = 0
    for _ in range(draw(st.integers(0, 20))):
        seqno += draw(st.integers(1, 50))
        value, datatype = draw(_values())
        common: dict[str, Any] = {
            "vbucket": 7, "cas": draw(u64), "collection_id": draw(COLLECTIONS),
            "key": draw(st.binary(min_size=1, max_size=240)),
        }  # fmt: skip
        change: dict[str, Any] = {
            **common,
            "datatype": datatype,
            "seqno": seqno,
            "rev_seqno": draw(u64),
            "value": value,
        }
        kind = draw(st.sampled_from([Mutation, Mutation, Deletion, Expiration, Prepare, Abort]))
        # The opaque of a commit is how far it is behind its prepare.
        distance = draw(st.sampled_from([0, 0, 1])) if seqno > 1 else 0
        if kind is Mutation:
            messages.append(Mutation(**change, opaque=distance, flags=draw(u32), expiry=draw(u32)))
        elif kind is Prepare:
            messages.append(Prepare(**change, durability=1))
        elif kind is Abort:
            messages.append(Abort(**common, prepared_seqno=seqno, abort_seqno=draw(u64)))
        else:
            messages.append(kind(**change, opaque=distance, delete_time=draw(u32)))
    return messages


def seqno_of(stored: Request) -> int:
    return stored.prepared_seqno if isinstance(stored, Abort) else stored.seqno


shapes = st.builds(
    Shape, strip_prefix=st.booleans(), values=st.sampled_from(Values), include_xattrs=st.booleans(),
    include_deleted_user_xattrs=st.booleans(), include_delete_times=st.booleans(), expiry_opcode=st.booleans(),
    takes_compressed=st.booleans(), sync_writes=st.booleans(),
)  # fmt: skip


def shaped_by_hand(stored: Request, shape: Shape, *, opaque: int, sid: int, commits_after: int) -> Request | None:
    """What a consumer gets of one stored change, or None."""
    header: dict[str, Any] = {"opaque": opaque, "frame_infos": (stream_id(sid),) if sid else ()}
    if shape.strip_prefix:
        header["collection_id"] = None
    if isinstance(stored, Abort):
        numbers = {"prepared_seqno": stored.abort_seqno, "abort_seqno": stored.prepared_seqno, "cas": 0}
        swapped = replace(stored, **numbers, **header)
        return swapped if shape.sync_writes else None
    if isinstance(stored, Prepare) and not shape.sync_writes:
        return None
    if shape.sync_writes and stored.opaque and stored.seqno > commits_after:
        of = {name: getattr(stored, name) for name in ("vbucket", "collection_id", "key")} | header
        return Commit(**of, prepared_seqno=stored.seqno - stored.opaque, commit_seqno=stored.seqno)
    change = replace(stored, **header, **_value_by_hand(stored, shape))
    if isinstance(change, Expiration) and not shape.expiry_opcode:
        names = ("vbucket", "cas", "datatype", "seqno", "rev_seqno", "delete_time", "collection_id", "key", "value")
        change = Deletion(**{name: getattr(change, name) for name in (*names, "opaque", "frame_infos")})
    if isinstance(change, Deletion) and not shape.include_delete_times:
        change = replace(change, delete_time=None)
    return change


def _value_by_hand(stored: Any, shape: Shape) -> dict[str, Any]:
    value, datatype = stored.value, stored.datatype
    if values.Datatype.SNAPPY in datatype and not shape.takes_compressed:
        value, datatype = values.decompress(value), datatype & ~values.Datatype.SNAPPY
    has_xattrs = values.Datatype.XATTR in datatype
    section, body = (
        (value[: values.body_offset(value)], value[values.body_offset(value) :]) if has_xattrs else (b"", value)
    )
    is_removal = isinstance(stored, Deletion | Expiration)
    if is_removal and shape.include_xattrs and not shape.include_deleted_user_xattrs and len(section) > 4:
        section = values.keep_system_xattrs(section)
        has_xattrs = bool(section)
    if not shape.include_xattrs:
        section, has_xattrs = b"", False
    if shape.values is not Values.KEEP:
        body = b""
        datatype = datatype if shape.values is Values.DROP_BUT_KEEP_DATATYPE else values.Datatype.RAW
    if shape.values is not Values.DROP_BUT_KEEP_DATATYPE:
        datatype = (datatype & ~values.Datatype.XATTR) | (values.Datatype.XATTR if has_xattrs else values.Datatype.RAW)
    return {"value": section + body, "datatype": datatype}


def run_of(messages: list[Request]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(message.encode() for message in messages), dtype=np.uint8)


def ids(collections: frozenset[int] | None) -> np.ndarray[Any, Any] | None:
    return None if collections is None else np.array(sorted(collections), dtype=np.uint32)


@given(
    stored_runs(), shapes, u32, st.sampled_from([0, 0, 0x1234]), st.one_of(st.none(), st.frozensets(COLLECTIONS)),
    st.integers(0, 300), st.integers(0, 200), st.data(),
)  # fmt: skip
def test_a_run_is_shaped_as_by_hand(messages, shape, opaque, sid, wanted, end_seqno, commits_after, data):
    versions = [message for message in messages if not isinstance(message, Prepare | Abort)]
    listed = data.draw(st.sets(st.sampled_from(versions).map(seqno_of))) if versions else set()
    listing = data.draw(st.sampled_from(Listing))
    output = Output()
    sent = shape_run(
        run_of(messages), 0, output, shape, opaque=opaque, stream_id=sid, wanted=ids(wanted), end_seqno=end_seqno,
        until=FOR_ALL, listed=np.array(sorted(listed), dtype=np.uint64), listing=listing,
        commits_after_seqno=commits_after,
    )  # fmt: skip
    expected: list[tuple[int, Request]] = []
    passed = 0
    for stored in messages:
        seqno = seqno_of(stored)
        if seqno > end_seqno:
            break
        passed = seqno
        change = shaped_by_hand(stored, shape, opaque=opaque, sid=sid, commits_after=commits_after)
        is_wanted = wanted is None or stored.collection_id in wanted
        is_sent = listing == Listing.NOTHING or (seqno in listed) == (listing == Listing.NEWEST)
        if change is not None and is_wanted and (is_sent or isinstance(change, Commit)):
            expected.append((seqno, change))
    assert bytes(output.data) == b"".join(change.encode() for _, change in expected)
    assert sent.stop == OutboundStop.END
    assert (sent.frames, sent.passed_seqno) == (len(expected), passed)
    assert sent.last_seqno == (expected[-1][0] if expected else 0)
    assert sent.prepares == sum(isinstance(change, Prepare) for _, change in expected)


@given(stored_runs(), shapes, st.integers(1, 700), st.integers(64, 2000))
def test_a_run_in_pieces_is_the_run_and_no_piece_is_overdrawn_by_more_than_a_frame(messages, shape, window, memory):
    run = run_of(messages)
    whole = Output()
    shape_run(run, 0, whole, shape, opaque=1, end_seqno=FOR_ALL, until=FOR_ALL)
    # The memory is too small for most frames, and grows by itself.
    pieces = Output(memory)
    at = start = 0
    while at < len(run):
        sent = shape_run(run, at, pieces, shape, opaque=1, end_seqno=FOR_ALL, until=start + window)
        at = sent.at
        if sent.stop == OutboundStop.WINDOW:
            last = decode_frames(bytes(pieces.data[start:]))[-1]
            assert pieces.used - len(last.encode()) < start + window <= pieces.used
            start = pieces.used
        else:
            assert sent.stop == (OutboundStop.ROOM if at < len(run) else OutboundStop.END)
    assert bytes(pieces.data) == bytes(whole.data)


@given(stored_runs(), st.booleans())
def test_values_come_compressed_where_that_is_shorter(messages, strip_prefix):
    plain, packed = Output(), Output(256)
    shape_run(run_of(messages), 0, plain, Shape(strip_prefix=strip_prefix), opaque=1, end_seqno=FOR_ALL, until=FOR_ALL)
    run = run_of(messages)
    at = 0
    while at < len(run):
        at = shape_run(
            run, at, packed, Shape(strip_prefix=strip_prefix, takes_compressed=True, compress=True), opaque=1,
            end_seqno=FOR_ALL, until=FOR_ALL,
        ).at  # fmt: skip
    negotiated = NOTHING_NEGOTIATED if strip_prefix else WITH_COLLECTIONS
    stored = {getattr(message, "value", b"") for message in messages}
    inflated = []
    for frame in decode_frames(bytes(packed.data)):
        change: Any = decode_message(frame, negotiated)
        if values.Datatype.SNAPPY in change.datatype:
            value = values.decompress(change.value)
            assert len(change.value) < len(value) or change.value in stored
            change = replace(change, value=value, datatype=change.datatype & ~values.Datatype.SNAPPY)
        inflated.append(change.encode())
    assert b"".join(inflated) == bytes(plain.data)

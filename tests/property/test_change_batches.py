"""Batches and typed changes equal what the typed codec says of every frame, for any pieces in any order."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import cycle
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import client
from headwater.client.batches import build_batch, raw_schema
from headwater.client.changes import DocumentChange, Rollback, changes_of
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.pieces import ChangeRun, EventPiece, RollbackPiece
from headwater.errors import RemoteProtocolError
from headwater.protocol import frames
from headwater.protocol import manifest as manifests
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.values import Datatype, ValueParts, compress, decode_xattrs, decompress, encode_xattrs

MANIFEST = Manifest().with_scope("garden").with_collection("garden", "fruit").with_collection("_default", "tools")
MANIFEST_NAMES = {0: ("_default", "_default"), 9: ("garden", "fruit"), 10: ("_default", "tools")}
NEW_NAMES = {11: (8, "garden", "roots"), 12: (13, "yard", "fruit"), 14: (99, None, "orphans")}
"""Collections that only events tell: the scope's id and name, and the collection's name. One scope has no name."""

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
collection_ids = st.sampled_from([0, 9, 10, 11, 12, 14, 77, 2**32 - 1])
bodies = st.one_of(
    st.just(b""), st.binary(max_size=40), st.builds(lambda times: b'{"a":1}' * times, st.integers(1, 90))
)
texts = st.sampled_from([b"1", b'{"rev":"1-a"}', b"", b"nonsense"])
xattrs = st.dictionaries(st.sampled_from(["_sync", "meta", "größe", "x"]), texts, max_size=4)


@st.composite
def documents(draw):
    """A value and its datatype, in all combinations."""
    datatype = Datatype(draw(st.integers(0, 7)))
    value = draw(bodies)
    if Datatype.XATTR in datatype:
        value = encode_xattrs(ValueParts(draw(xattrs), value))
    if Datatype.SNAPPY in datatype:
        value = compress(value)
    # A server that was asked for no values may still tell their datatypes.
    return (b"" if draw(st.integers(0, 9)) == 0 else value), datatype


@st.composite
def messages(draw, *, vbucket, collections):
    sid = draw(st.one_of(st.none(), st.integers(1, 0xFFFF)))
    value, datatype = draw(documents())
    kind = draw(st.sampled_from([Mutation, Mutation, Deletion, Expiration]))
    if kind is Mutation:
        extras = {"flags": draw(u32), "expiry": draw(u32)}
    else:
        extras = {"delete_time": draw(st.one_of(st.none(), u32))}
    return kind(
        vbucket=vbucket,
        cas=draw(st.one_of(st.just(0), st.just(0xFFFF), u64)),
        datatype=datatype,
        frame_infos=() if sid is None else (frames.stream_id(sid),),
        seqno=draw(u64),
        rev_seqno=draw(u64),
        collection_id=draw(collection_ids) if collections else None,
        key=draw(st.one_of(st.binary(min_size=1, max_size=9), st.text(min_size=1, max_size=9).map(_utf8))),
        value=value,
        **extras,
    )


def _utf8(text):
    return text.encode(errors="surrogateescape") if text.isascii() else text.encode(errors="replace")


def events():
    created = st.sampled_from([11, 12, 14]).map(
        lambda number: manifests.CollectionCreated(
            manifest_uid=9, scope_id=NEW_NAMES[number][0], collection_id=number, name=NEW_NAMES[number][2]
        )
    )
    modified = st.just(
        manifests.CollectionModified(manifest_uid=9, scope_id=8, collection_id=9, name="fruit", max_ttl_s=5)
    )
    dropped = collection_ids.map(
        lambda number: manifests.CollectionDropped(manifest_uid=9, scope_id=8, collection_id=number)
    )
    scope = st.sampled_from(
        [
            manifests.ScopeCreated(manifest_uid=9, scope_id=13, name="yard"),
            manifests.ScopeDropped(manifest_uid=9, scope_id=8),
            manifests.ScopeDropped(manifest_uid=9, scope_id=98),
        ]
    )
    return st.one_of(created, modified, dropped, scope)


@st.composite
def pieces(draw, *, collections):
    """Pieces, and for every run the messages in it."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        common = {"vbucket": draw(u16), "vbuuid": draw(u64), "snapshot_start": draw(u64), "snapshot_end": draw(u64)}
        match draw(st.sampled_from(["run", "run", "run", "event", "rollback"])):
            case "run":
                held = draw(st.lists(messages(vbucket=common["vbucket"], collections=collections), max_size=6))
                data = b"".join(message.encode() for message in held)
                found.append(ChangeRun(**common, rows=len(held), data=draw(st.sampled_from([data, memoryview(data)]))))
            case "event":
                found.append(EventPiece(**common, seqno=draw(u64), event=draw(events())))
            case _:
                numbers = {name: draw(u64) for name in ("seqno", "from_seqno", "old_vbuuid", "new_vbuuid")}
                found.append(RollbackPiece(vbucket=common["vbucket"], **numbers))
    return found


reads = st.booleans().flatmap(lambda collections: st.tuples(st.just(collections), pieces(collections=collections)))


# --- the same, one frame at a time --------------------------------------------------------------------------------


def expected_rows(found, *, collections):
    scopes, names = known_names(found)
    for piece in found:
        if isinstance(piece, ChangeRun):
            buffer = FrameBuffer()
            buffer.receive_data(bytes(piece.data))
            for frame in buffer.frames():
                change = decode_message(frame, WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED)
                yield document_row(piece, change, names)
        elif isinstance(piece, EventPiece):
            yield event_row(piece, scopes, names)
        else:
            yield rollback_row(piece)


def known_names(found):
    """What is known of names after all events: by scope id, and by collection id."""
    learned = [piece.event for piece in found if isinstance(piece, EventPiece)]
    scopes = {0: "_default", 8: "garden"}
    scopes |= {event.scope_id: event.name for event in learned if isinstance(event, manifests.ScopeCreated)}
    names = dict(MANIFEST_NAMES)
    for event in learned:
        if isinstance(event, manifests.CollectionCreated):
            names[event.collection_id] = (scopes.get(event.scope_id), event.name)
    return scopes, names


def document_row(run, change, names):
    is_mutation = isinstance(change, Mutation)
    body, attributes = change.value, None
    if body and Datatype.SNAPPY in change.datatype:
        body = decompress(body)
    if change.value and Datatype.XATTR in change.datatype:
        parts = decode_xattrs(body)
        body, attributes = parts.body, dict(parts.xattrs)
    scope, collection = names.get(change.collection_id or 0, (None, None))
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=(change.cas - change.cas % 2**16) // 1000)
    return {
        "vbucket": change.vbucket, "vbuuid": run.vbuuid, "seqno": change.seqno, "rev": change.rev_seqno,
        "op": type(change).__name__.lower(), "scope": scope, "collection": collection,
        "collection_id": change.collection_id or 0, "key": change.key, "value": body if body or is_mutation else None,
        "datatype": change.datatype & Datatype.JSON, "flags": change.flags if is_mutation else 0,
        "expiry": change.expiry if is_mutation else change.delete_time or 0, "cas": change.cas,
        "changed_at": moment if change.cas else None, "snapshot_start": run.snapshot_start,
        "snapshot_end": run.snapshot_end, "xattrs": attributes,
    }  # fmt: skip


NO_DOCUMENT = {
    "rev": 0, "scope": None, "collection": None, "collection_id": None, "key": None, "value": None, "datatype": 0,
    "flags": 0, "expiry": 0, "cas": 0, "changed_at": None, "xattrs": None,
}  # fmt: skip


def event_row(piece, scopes, names):
    event = piece.event
    kind = type(event).__name__
    row = {
        **NO_DOCUMENT,
        "vbucket": piece.vbucket,
        "vbuuid": piece.vbuuid,
        "seqno": piece.seqno,
        "op": f"scope_{kind[5:].lower()}" if kind.startswith("Scope") else f"collection_{kind[10:].lower()}",
        "scope": scopes.get(event.scope_id),
        "snapshot_start": piece.snapshot_start,
        "snapshot_end": piece.snapshot_end,
    }
    if kind.startswith("Collection"):
        row |= {"collection_id": event.collection_id, "collection": names.get(event.collection_id, (None, None))[1]}
    return row


def rollback_row(piece):
    told = {name: getattr(piece, name) for name in ("from_seqno", "old_vbuuid", "new_vbuuid")}
    return {
        **NO_DOCUMENT,
        "vbucket": piece.vbucket,
        "vbuuid": piece.new_vbuuid,
        "seqno": piece.seqno,
        "op": "rollback",
        "value": json.dumps(told).encode(),
        "snapshot_start": piece.seqno,
        "snapshot_end": piece.seqno,
    }


def rows_of(batch):
    """The rows; attributes as a dictionary, and null where there is no column of them."""
    return [{**row, "xattrs": None if row.get("xattrs") is None else dict(row["xattrs"])} for row in batch.to_pylist()]


# --- what holds ---------------------------------------------------------------------------------------------------


@given(reads, st.booleans())
def test_a_batch_has_the_rows_that_the_typed_codec_sees(read, xattrs):
    collections, found = read
    batch = build_batch(found, CollectionNames(MANIFEST), collections=collections, xattrs=xattrs)
    batch.validate(full=True)
    assert batch.schema == raw_schema(xattrs=xattrs)
    expected = list(expected_rows(found, collections=collections))
    if not xattrs:
        expected = [{**row, "xattrs": None} for row in expected]
    assert rows_of(batch) == expected


@given(reads, st.frozensets(collection_ids, max_size=3), st.frozensets(st.sampled_from([0, 8, 13, 99]), max_size=2))
def test_a_filter_keeps_what_it_lets_through_and_all_rollbacks(read, collection_filter, scope_filter):
    collections, found = read
    only = CollectionFilter(scopes=scope_filter, collections=collection_filter)
    names = CollectionNames(MANIFEST)
    batch = build_batch(found, names, collections=collections, xattrs=True, only=only)
    batch.validate(full=True)
    created = [p.event for p in found if isinstance(p, EventPiece) and hasattr(p.event, "name")]
    scope_ids = {0: 0, 9: 8, 10: 0} | {
        event.collection_id: event.scope_id for event in created if hasattr(event, "collection_id")
    }

    def is_kept(row, event):
        if row["op"] == "rollback":
            return True
        if event is not None:
            return event.scope_id in scope_filter or getattr(event, "collection_id", None) in collection_filter
        return row["collection_id"] in collection_filter or scope_ids.get(row["collection_id"]) in scope_filter

    owners = [
        piece.event if isinstance(piece, EventPiece) else None
        for piece in found
        for _ in range(piece.rows if isinstance(piece, ChangeRun) else 1)
    ]
    expected = expected_rows(found, collections=collections)
    assert rows_of(batch) == [row for row, event in zip(expected, owners, strict=True) if is_kept(row, event)]


TOUCHES = {
    "drop": lambda change: None,
    "hold": lambda change: change,
    "hold, and have read the key": lambda change: (getattr(change, "key", None), change)[1],
    "keep": lambda change: change.keep(),
}


@given(reads, st.booleans(), st.integers(1, 5), st.lists(st.sampled_from([*TOUCHES]), min_size=1, max_size=5))
def test_typed_changes_are_the_rows_of_the_batch(read, xattrs, rows_at_a_time, touches):
    collections, found = read
    batch = build_batch(found, CollectionNames(MANIFEST), collections=collections, xattrs=xattrs)
    with patch.object(client.changes, "ROWS_AT_A_TIME", rows_at_a_time):
        walk = zip(changes_of(batch), cycle(touches), strict=False)
        changes = [TOUCHES[touch](change) for change, touch in walk]
    assert len(changes) == batch.num_rows
    for change, row in zip(changes, rows_of(batch), strict=True):
        if change is None:
            continue
        assert change.op == row["op"]
        if isinstance(change, Rollback):
            told = {"from_seqno": change.from_seqno, "old_vbuuid": change.old_vbuuid, "new_vbuuid": change.new_vbuuid}
            assert (change.vbucket, change.seqno, change.new_vbuuid) == (row["vbucket"], row["seqno"], row["vbuuid"])
            assert json.loads(row["value"]) == told
            continue
        if isinstance(change, DocumentChange):
            row["key"] = row["key"].decode(errors="surrogateescape")
            assert change.changed_at == row["changed_at"]
            assert change.key_bytes.decode(errors="surrogateescape") == change.key
        for name in change.__dataclass_fields__:
            assert getattr(change, name) == row[name], name
        assert json.loads(json.dumps(change.to_dict()))["seqno"] == change.seqno


@given(messages(vbucket=0, collections=True), st.data())
def test_damaged_bytes_raise_documented_errors_only(message, data):
    damaged = bytearray(message.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    run = ChangeRun(vbucket=0, vbuuid=1, snapshot_start=0, snapshot_end=1, rows=1, data=bytes(damaged))
    try:
        batch = build_batch([run], CollectionNames(), collections=True, xattrs=True)
    except RemoteProtocolError:
        return
    batch.validate(full=True)


@pytest.mark.parametrize("datatype", [Datatype.XATTR, Datatype.SNAPPY, Datatype.SNAPPY | Datatype.XATTR])
def test_a_value_that_is_not_what_its_datatype_says_is_refused(datatype):
    value = compress(b"\xff" * 8) if Datatype.XATTR in datatype else b"\xff" * 8
    frame = Mutation(seqno=1, rev_seqno=1, key=b"k", value=value, datatype=datatype).encode()
    run = ChangeRun(vbucket=0, vbuuid=1, snapshot_start=0, snapshot_end=1, rows=1, data=frame)
    with pytest.raises(RemoteProtocolError):
        build_batch([run], CollectionNames(), collections=False, xattrs=False)

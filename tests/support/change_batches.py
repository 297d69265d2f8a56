"""Batches of changes, made from what a test cares about."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from headwater.client.batches import change_schema

CAS = 1_763_194_560_123_456_789 >> 16 << 16

_DOCUMENT = {
    "vbucket": 7,
    "vbuuid": 2**64 - 1,
    "seqno": 41,
    "rev": 3,
    "op": "mutation",
    "scope": "_default",
    "collection": "_default",
    "collection_id": 0,
    "key": b"fox",
    "value": b'{"legs":4}',
    "datatype": 1,
    "flags": 33554432,
    "expiry": 0,
    "cas": CAS,
    "snapshot_start": 0,
    "snapshot_end": 100,
    "xattrs": None,
}


def document(**members: Any) -> dict[str, Any]:
    """The row of a change of a document."""
    cas = members.get("cas", CAS)
    return {**_DOCUMENT, "changed_at": (cas >> 16 << 16) // 1000 if cas else None, **members}


def event(op: str, **members: Any) -> dict[str, Any]:
    nothing = {"key": None, "value": None, "datatype": 0, "flags": 0, "rev": 0, "cas": 0}
    return document(op=op, **{**nothing, **members})


def rollback(*, vbucket: int = 7, seqno: int = 40, from_seqno: int = 99) -> dict[str, Any]:
    details = {"from_seqno": from_seqno, "old_vbuuid": 5, "new_vbuuid": 6}
    nowhere = {"scope": None, "collection": None, "collection_id": None}
    place = {"vbucket": vbucket, "vbuuid": 6, "seqno": seqno, "snapshot_start": seqno, "snapshot_end": seqno}
    return event("rollback", value=json.dumps(details).encode(), **nowhere, **place)


def batch_of(*rows: dict[str, Any], xattrs: bool = False) -> pa.RecordBatch:
    schema = change_schema(xattrs=xattrs)
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)

"""Range scans: keys or documents of one collection in one vbucket, in the order of the keys, or a sample of them.

A scan is created by JSON, continued as often as it takes, and gone when it is complete, cancelled or too old. The
layouts are those of kv_engine's docs/range_scans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.protocol.features import Opcode
from headwater.protocol.frames import decode_leb128, encode_leb128
from headwater.protocol.messages.base import Layout, Request, Response, message, octets, take, u8, u32, u64
from headwater.protocol.numbers import Cas, Seqno
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype

SCAN_ID_BYTES = 16

_SCAN_ID = octets("scan_id", SCAN_ID_BYTES)


@message(Opcode.RANGE_SCAN_CREATE)
class RangeScanCreate(Request):
    """Begin a scan. The value is JSON: the collection, whether keys are enough, the range or the sample."""

    value: bytes


@message(Opcode.RANGE_SCAN_CREATE)
class RangeScanCreateResponse(Response):
    """The name of the scan, for the requests that follow."""

    value_layout = Layout(_SCAN_ID)

    opcode: Opcode = Opcode.RANGE_SCAN_CREATE
    scan_id: bytes


@message(Opcode.RANGE_SCAN_CONTINUE)
class RangeScanContinue(Request):
    """The next part of a scan. A bound of 0 is none; a server may give less than asked for."""

    layouts = (Layout(_SCAN_ID, u32("items_max"), u32("time_ms_max"), u32("bytes_max")),)

    scan_id: bytes
    items_max: int = 0
    time_ms_max: int = 0
    bytes_max: int = 0


@message(Opcode.RANGE_SCAN_CANCEL)
class RangeScanCancel(Request):
    layouts = (Layout(_SCAN_ID),)

    scan_id: bytes


# --- what was scanned ---------------------------------------------------------------------------------------------

_DOCUMENT = Layout(u32("flags"), u32("expiry"), u64("seqno", Seqno), u64("cas", Cas), u8("datatype", Datatype))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedDocument:
    """A document without its extended attributes, which are in no scan."""

    flags: int
    expiry: int
    seqno: Seqno
    cas: Cas
    datatype: Datatype
    key: bytes
    value: bytes


@message(Opcode.RANGE_SCAN_CONTINUE)
class RangeScanContinueResponse(Response):
    """Keys, or documents. The status says whether there is more, in another answer or with the next request."""

    statuses = frozenset({Status.SUCCESS, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE})
    layouts = (Layout(u32("has_documents")),)

    opcode: Opcode = Opcode.RANGE_SCAN_CONTINUE
    has_documents: int
    """0 for keys, 1 for documents."""
    keys: tuple[bytes, ...] = ()
    documents: tuple[ScannedDocument, ...] = ()

    def encode_value(self) -> bytes:
        if not self.has_documents:
            return b"".join(_with_length(key) for key in self.keys)
        return b"".join(
            _DOCUMENT.pack(document) + _with_length(document.key) + _with_length(document.value)
            for document in self.documents
        )

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        found: list[Any] = []
        at = 0
        while at < len(value):
            if not known["has_documents"]:
                key, at = _after_length(value, at)
                found.append(key)
                continue
            meta, at = _DOCUMENT.take(value, at)
            key, at = _after_length(value, at)
            body, at = _after_length(value, at)
            found.append(ScannedDocument(**meta, key=key, value=body))
        return {"documents" if known["has_documents"] else "keys": tuple(found)}


def _with_length(data: bytes) -> bytes:
    return encode_leb128(len(data)) + data


def _after_length(value: bytes, at: int) -> tuple[bytes, int]:
    """What stands behind the length at `at`, and where it ends."""
    length, at = decode_leb128(value, at, "the length of a key or value")
    return take(value, at, length)

"""A stored change as the page shows it."""

from __future__ import annotations

import json
from typing import Any

from headwater.dashboard.limits import PREVIEW_CHARS_MAX, VALUE_CHARS_MAX
from headwater.errors import HeadwaterError
from headwater.protocol.compression import decompress
from headwater.protocol.datatype import Datatype
from headwater.protocol.manifest import Manifest
from headwater.protocol.opcodes import Opcode
from headwater.protocol.xattrs import decode_xattrs
from headwater.store.documents import Document, decode_document

_NANOSECONDS_PER_MS = 1_000_000
_OPS = {Opcode.DCP_MUTATION: "mutation", Opcode.DCP_DELETION: "deletion", Opcode.DCP_EXPIRATION: "expiration"}


def show_change(frame: bytes, manifest: Manifest) -> dict[str, Any]:
    """A change as a row: what happened, to what, when, and how its value begins."""
    document = decode_document(frame)
    body, _ = _parts(document)
    return {
        **_numbers(document, manifest),
        "vbucket": int.from_bytes(frame[6:8]),
        "op": _OPS[Opcode(frame[1])],
        "preview": _text(body[: 4 * PREVIEW_CHARS_MAX])[:PREVIEW_CHARS_MAX],
        "value_bytes": len(body),
    }


def show_document(document: Document, manifest: Manifest, *, vbucket: int) -> dict[str, Any]:
    """A document with its value and its extended attributes."""
    body, xattrs = _parts(document)
    text = _text(body)
    return {
        **_numbers(document, manifest),
        "vbucket": vbucket,
        "is_deleted": document.is_deleted,
        "is_json": Datatype.JSON in document.datatype,
        "value": text[:VALUE_CHARS_MAX],
        "value_bytes": len(body),
        "is_cut": len(text) > VALUE_CHARS_MAX,
        "xattrs": xattrs,
        "flags": document.flags,
        "expiry_s": document.expiry,
    }


def _numbers(document: Document, manifest: Manifest) -> dict[str, Any]:
    found = manifest.collection_by_id(document.collection_id)
    return {
        "key": document.key.decode(errors="replace"),
        "collection": f"{found[0].name}.{found[1].name}" if found else f"dropped 0x{document.collection_id:x}",
        "seqno": document.seqno,
        # As text: a page's script has numbers of 53 bits.
        "cas": str(document.cas),
        "time_ms": document.cas // _NANOSECONDS_PER_MS,
        "revision": document.rev_seqno,
    }


def _parts(document: Document) -> tuple[bytes, dict[str, Any]]:
    value = document.value
    try:
        if Datatype.SNAPPY in document.datatype:
            value = decompress(value)
        if Datatype.XATTR in document.datatype:
            parts = decode_xattrs(value)
            return parts.body, {name: _loaded(text) for name, text in parts.xattrs.items()}
    except HeadwaterError:
        # It was taken in this form by somebody, and is shown in this form.
        return value, {}
    return value, {}


def _loaded(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return _text(value)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")

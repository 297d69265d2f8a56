"""Virtual extended attributes: facts about a document that can be looked up as if they were stored with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from headwater.node.kv.subdocument.crc32c import crc32c
from headwater.node.kv.subdocument.document import Document
from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.node.kv.subdocument.path import Path
from headwater.protocol.datatype import Datatype
from headwater.protocol.status import Status

PREFIX = "$"
_NANOSECONDS = 10**9


def _hex64(number: int) -> str:
    return f"0x{number:016x}"


def _datatype_names(datatype: Datatype) -> list[str]:
    bits = (Datatype.SNAPPY, Datatype.JSON, Datatype.XATTR)
    return [str(bit.name).lower() for bit in bits if datatype & bit] or ["raw"]


DOCUMENT_FIELDS: Mapping[str, Callable[[Document], object]] = {
    "CAS": lambda document: _hex64(document.cas),
    "datatype": lambda document: _datatype_names(document.datatype),
    "deleted": lambda document: document.deleted,
    "exptime": lambda document: document.expiry,
    "flags": lambda document: document.flags,
    # A CAS is a hybrid logical clock: its upper bits are the time of the write.
    "last_modified": lambda document: str(document.cas // _NANOSECONDS),
    "revid": lambda document: str(document.rev),
    "seqno": lambda document: _hex64(document.seqno),
    "value_bytes": lambda document: len(document.parts().body),
    "value_crc32c": lambda document: f"0x{crc32c(document.parts().body):08x}",
    "vbucket_uuid": lambda document: _hex64(document.vbuuid),
}


def virtual_xattr_text(document: Document, path: Path) -> str:
    """The text that a path into a virtual attribute is looked up in."""
    name = path[0]
    if name == "$document":
        # One field of it is the common case, and the checksum of a large body is not for nothing.
        wanted = path[1:2] or tuple(DOCUMENT_FIELDS)
        content: object = {
            field: DOCUMENT_FIELDS[field](document)
            for field in wanted
            if isinstance(field, str) and field in DOCUMENT_FIELDS
        }
    elif name == "$XTOC":
        content = list(document.parts().xattrs)
    elif name == "$vbucket" and document.hlc_now_s is not None:
        content = {"HLC": {"mode": "real", "now": str(document.hlc_now_s)}}
    else:
        raise SubdocFailure(Status.SUBDOC_XATTR_UNKNOWN_VATTR)
    return to_json({name: content})


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

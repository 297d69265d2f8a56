"""Writes that bring their metadata along: a change of another cluster, under the CAS and the revision it has there.

The extras have four lengths: options and the length of extended metadata may be there or not. The layouts are those of
kv_engine's engines/ep/docs/protocol/set_with_meta.md and del_with_meta.md; the numbers of the options are those of the
second, which servers go by (the first one has an older SKIP_CONFLICT_RESOLUTION).
"""

from __future__ import annotations

from typing import Any, ClassVar

from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import Layout, Request, message, u16, u32, u64
from headwater.protocol.numbers import Cas, CollectionId, OpenIntFlag


class MetaOptions(OpenIntFlag):
    """What a write with metadata asks for."""

    FORCE = 0x01
    """No conflict resolution, and copies that are not active take it, too."""
    FORCE_ACCEPT = 0x02
    """Needed where the last write wins, and refused where revisions decide."""
    REGENERATE_CAS = 0x04
    """The server gives the version a CAS of its own. Only without conflict resolution."""
    SKIP_CONFLICT_RESOLUTION = 0x08
    IS_EXPIRATION = 0x10
    """A deletion is one because the document has expired."""


_META = (u32("flags"), u32("expiry"), u64("rev_seqno"), u64("meta_cas", Cas))
_OPTIONS = u32("options", MetaOptions)
_META_BYTES = u16("extended_meta_bytes")


@message
class SetWithMeta(Request):
    """Store a document with its metadata, unless the one that is there wins."""

    opcode: ClassVar[int] = Opcode.SET_WITH_META
    layouts = (
        Layout(*_META),
        Layout(*_META, _META_BYTES),
        Layout(*_META, _OPTIONS),
        Layout(*_META, _OPTIONS, _META_BYTES),
    )

    flags: int = 0
    expiry: int = 0
    """A time; of a deletion, when it was deleted."""
    rev_seqno: int
    meta_cas: Cas
    """The CAS that the version has. That of the header is the one of the version to replace, as with other writes."""
    options: MetaOptions | None = None
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""
    extended_meta: bytes | None = None
    """Stands behind the value. Servers ignore it from 4.6 on; None where not even its length is sent."""

    @property
    def extended_meta_bytes(self) -> int:
        return len(self.extended_meta or b"")

    def layout(self) -> Layout:
        return self.layouts[(self.options is not None) * 2 + (self.extended_meta is not None)]

    def encode_value(self) -> bytes:
        return self.value + (self.extended_meta or b"")

    @classmethod
    def decode_value(cls, value: bytes, known: dict[str, Any]) -> dict[str, Any]:
        extended = known.pop("extended_meta_bytes", None)
        if extended is None:
            return {"value": value}
        if extended > len(value):
            raise cls.malformed("value", f"extended metadata of {extended} bytes in a value of {len(value)}")
        cut = len(value) - extended
        return {"value": value[:cut], "extended_meta": value[cut:]}


@message
class SetWithMetaQuiet(SetWithMeta):
    opcode = Opcode.SETQ_WITH_META


@message
class AddWithMeta(SetWithMeta):
    """The same, only where there is no document."""

    opcode = Opcode.ADD_WITH_META


@message
class AddWithMetaQuiet(SetWithMeta):
    opcode = Opcode.ADDQ_WITH_META


@message
class DeleteWithMeta(SetWithMeta):
    """Delete a document, leaving a tombstone with this metadata. The value has the attributes that outlive it."""

    opcode = Opcode.DEL_WITH_META


@message
class DeleteWithMetaQuiet(SetWithMeta):
    opcode = Opcode.DELQ_WITH_META

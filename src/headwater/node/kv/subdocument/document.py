"""What goes into the engine and what comes out of it: a document as it is, and its value as it will be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headwater.errors import MalformedXattrs
from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.protocol.datatype import Datatype
from headwater.protocol.numbers import Cas, Seqno, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.xattrs import ValueParts, decode_xattrs

SYSTEM_XATTR_PREFIX = "_"
"""Extended attributes of the system outlive the document in its tombstone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document or a tombstone, apart from where it is stored."""

    value: bytes
    """With its extended attributes in front where the datatype says so, and always inflated."""

    datatype: Datatype
    """As stored: the SNAPPY bit is shown to the client, and does not describe `value`."""

    cas: Cas = Cas(0)
    seqno: Seqno = Seqno(0)
    vbuuid: Vbuuid = Vbuuid(0)
    rev: int = 0
    flags: int = 0
    expiry: int = 0
    deleted: bool = False
    hlc_now_s: int | None = None
    """The vbucket's clock, for the virtual attribute `$vbucket`."""

    def parts(self) -> ValueParts:
        if not self.datatype & Datatype.XATTR:
            return ValueParts({}, self.value)
        try:
            return decode_xattrs(self.value)
        except MalformedXattrs as error:
            raise SubdocFailure(Status.EINTERNAL, f"the stored document is damaged: {error.reason}") from error


class WriteMacro(Enum):
    """What a value can say of the write that makes it, and is known only when that write is applied."""

    CAS = "CAS"
    SEQNO = "seqno"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValue:
    """The value after a mutation, all but the places where its own CAS and seqno belong."""

    template: bytes
    """The encoded value: extended attributes first, if any. Placeholders are as long as what takes their place."""

    datatype: Datatype
    macros: tuple[tuple[WriteMacro, int], ...] = ()
    """Which macro goes where in the template."""

    def fill(self, *, cas: Cas, seqno: Seqno) -> bytes:
        """The value to store with this CAS and seqno."""
        # Couchbase writes the CAS with its bytes reversed, and clients turn it back.
        digits = {WriteMacro.CAS: cas.to_bytes(8, "little").hex(), WriteMacro.SEQNO: seqno.to_bytes(8, "big").hex()}
        filled = bytearray(self.template)
        for macro, at in self.macros:
            text = f'"0x{digits[macro]}"'.encode()
            filled[at : at + len(text)] = text
        return bytes(filled)

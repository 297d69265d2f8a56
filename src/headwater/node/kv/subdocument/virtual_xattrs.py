"""Documents as the sub-document engine gets and gives them, with what is not stored in them.

Virtual extended attributes are facts about a document that can be looked up as if they were stored with it; macros are
values of extended attributes that the server fills in. Both may show a checksum of the body.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from headwater.errors import MalformedXattrs
from headwater.kernels.memory import read_only, u32
from headwater.node.kv.subdocument.json_text import XATTR_UNKNOWN_VATTR_MACRO, Path
from headwater.protocol.messages.subdocument import MutationSpec, PathFlags
from headwater.protocol.numbers import Cas, Seqno, Vbuuid
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs
from headwater.store.checksums import crc32c

# --- a document as it is, and its value as it will be ---------------------------------------------------------------


SYSTEM_XATTR_PREFIX = "_"
"""Extended attributes of the system outlive the document in its tombstone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubdocDocument:
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
    hlc_now_s: int | None = field(default=None, compare=False)
    """The vbucket's clock, for the virtual attribute `$vbucket`. The document is the same at any time."""

    def parts(self) -> ValueParts:
        if not self.datatype & Datatype.XATTR:
            return ValueParts({}, self.value)
        try:
            return decode_xattrs(self.value)
        except MalformedXattrs as error:
            raise RequestRefused(Status.EINTERNAL, f"the stored document is damaged: {error.reason}") from error


class WriteMacro(Enum):
    """What a value can say of the write that makes it, and is known only when that write is applied."""

    CAS = "CAS"
    SEQNO = "seqno"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValue:
    """The value after a mutation, but for its own CAS and seqno."""

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


# --- virtual attributes ---------------------------------------------------------------------------------------------


PREFIX = "$"
_NANOSECONDS = 10**9


def _hex64(number: int) -> str:
    return f"0x{number:016x}"


def _datatype_names(datatype: Datatype) -> list[str]:
    bits = (Datatype.SNAPPY, Datatype.JSON, Datatype.XATTR)
    return [str(bit.name).lower() for bit in bits if datatype & bit] or ["raw"]


def _checksum(body: bytes) -> str:
    return f"0x{crc32c(read_only(np.frombuffer(body, dtype=np.uint8)), u32(0)):08x}"


DOCUMENT_FIELDS: Mapping[str, Callable[[SubdocDocument], object]] = {
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
    "value_crc32c": lambda document: _checksum(document.parts().body),
    "vbucket_uuid": lambda document: _hex64(document.vbuuid),
}


def virtual_xattr_text(document: SubdocDocument, path: Path) -> bytes:
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
        raise RequestRefused(Status.SUBDOC_XATTR_UNKNOWN_VATTR)
    return to_json({name: content})


def to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# --- macros ---------------------------------------------------------------------------------------------------------
#
# `"${Mutation.CAS}"` and its like speak of the write under way, `"${$document.CAS}"` and its like of the document as it
# was before. The CAS and the seqno of a write are known only when it is applied; until then a placeholder of the same
# length stands in the text, a string that occurs nowhere else in the request or in the document.


_WRITE_MACROS = {b'"${Mutation.CAS}"': WriteMacro.CAS, b'"${Mutation.seqno}"': WriteMacro.SEQNO}
_CRC32C_MACRO = b'"${Mutation.value_crc32c}"'
_DOCUMENT_MACRO = re.compile(rb'"\$\{\$document(?:\.(\w+))?\}"')

_PLACEHOLDER_DIGITS = {**dict.fromkeys(_WRITE_MACROS, 16), _CRC32C_MACRO: 8}


def is_macro(value: bytes) -> bool:
    """Whether the value has the form of a macro; the field of a document macro may still be unknown."""
    return value in _PLACEHOLDER_DIGITS or (value.startswith(b'"${$document') and value.endswith(b'}"'))


class MacroExpansion:
    """The macros of one request: what stands in for them, and where that ends up."""

    def __init__(self, specs: Sequence[MutationSpec], document: SubdocDocument) -> None:
        macros = {spec.value for spec in specs if spec.flags & PathFlags.EXPAND_MACROS}
        self._expanded = {macro: text for macro in macros if (text := _expand_document_macro(macro, document))}
        if not macros.isdisjoint(_PLACEHOLDER_DIGITS):
            texts = [document.value, *(spec.value for spec in specs), *self._expanded.values()]
            self._expanded |= _placeholders(macros, texts)

    def value(self, spec: MutationSpec) -> bytes:
        """The value of a spec, expanded if it is a macro."""
        if not spec.flags & PathFlags.EXPAND_MACROS:
            return spec.value
        if spec.value not in self._expanded:
            raise RequestRefused(XATTR_UNKNOWN_VATTR_MACRO)
        return self._expanded[spec.value]

    def with_checksum(self, encoded: bytes, *, body: bytes) -> bytes:
        """The encoded value with the checksum of the new body where a macro asks for it."""
        placeholder = self._expanded.get(_CRC32C_MACRO)
        if placeholder is None or placeholder not in encoded:
            return encoded
        return encoded.replace(placeholder, f'"{_checksum(body)}"'.encode())

    def positions(self, encoded: bytes) -> tuple[tuple[WriteMacro, int], ...]:
        """Where the CAS and the seqno of the write belong in the encoded value."""
        return tuple(
            (macro, at)
            for name, macro in _WRITE_MACROS.items()
            if name in self._expanded
            for at in _occurrences(encoded, self._expanded[name])
        )


def _expand_document_macro(macro: bytes, document: SubdocDocument) -> bytes | None:
    found = _DOCUMENT_MACRO.fullmatch(macro)
    if found is None:
        return None
    if found[1] is None:
        return to_json({name: field(document) for name, field in DOCUMENT_FIELDS.items()})
    wanted = DOCUMENT_FIELDS.get(found[1].decode())
    return None if wanted is None else to_json(wanted(document))


def _placeholders(macros: set[bytes], texts: Sequence[bytes]) -> dict[bytes, bytes]:
    """Strings that none of the texts has. They are hashes of all of them: no one can write a text that has its own."""
    made: dict[bytes, bytes] = {}
    hashed = hashlib.blake2b()
    for text in texts:
        hashed.update(text)
    for name in sorted(macros & _PLACEHOLDER_DIGITS.keys()):
        while name not in made or any(made[name] in text for text in texts):
            hashed.update(name)
            made[name] = b'"0x%b"' % hashed.hexdigest()[: _PLACEHOLDER_DIGITS[name]].encode()
    return made


def _occurrences(encoded: bytes, placeholder: bytes) -> Iterator[int]:
    at = encoded.find(placeholder)
    while at >= 0:
        yield at
        at = encoded.find(placeholder, at + len(placeholder))

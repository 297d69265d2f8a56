"""Macros: values of extended attributes that the server fills in.

`"${Mutation.CAS}"` and its like speak of the write under way, `"${$document.CAS}"` and its like of the document as it
was before. The CAS and the seqno of a write are known only when it is applied; until then a placeholder of the same
length stands in the text, a string that occurs nowhere else in the request or in the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count

from headwater.node.kv.subdocument.crc32c import crc32c
from headwater.node.kv.subdocument.document import Document, WriteMacro
from headwater.node.kv.subdocument.failure import XATTR_UNKNOWN_VATTR_MACRO, SubdocFailure
from headwater.node.kv.subdocument.virtual_xattrs import DOCUMENT_FIELDS, to_json
from headwater.protocol.messages.subdocument import MutationSpec, PathFlags

_WRITE_MACROS = {b'"${Mutation.CAS}"': WriteMacro.CAS, b'"${Mutation.seqno}"': WriteMacro.SEQNO}
_CRC32C_MACRO = b'"${Mutation.value_crc32c}"'
_DOCUMENT_MACRO = re.compile(rb'"\$\{\$document(?:\.(\w+))?\}"')

_PLACEHOLDER_DIGITS = {**dict.fromkeys(_WRITE_MACROS, 16), _CRC32C_MACRO: 8}
_LIKE_A_PLACEHOLDER = re.compile(rb'(?="0x([0-9a-f]+)")')


def is_macro(value: bytes) -> bool:
    """Whether the value has the form of a macro; the field of a document macro may still be unknown."""
    return value in _PLACEHOLDER_DIGITS or (value.startswith(b'"${$document') and value.endswith(b'}"'))


class MacroExpansion:
    """The macros of one request: what stands in for them, and where that ends up."""

    def __init__(self, specs: Sequence[MutationSpec], document: Document) -> None:
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
            raise SubdocFailure(XATTR_UNKNOWN_VATTR_MACRO)
        return self._expanded[spec.value]

    def with_checksum(self, encoded: bytes, *, body: bytes) -> bytes:
        """The encoded value with the checksum of the new body where a macro asks for it."""
        placeholder = self._expanded.get(_CRC32C_MACRO)
        if placeholder is None or placeholder not in encoded:
            return encoded
        return encoded.replace(placeholder, b'"0x%08x"' % crc32c(body))

    def places(self, encoded: bytes) -> tuple[tuple[WriteMacro, int], ...]:
        """Where the CAS and the seqno of the write belong in the encoded value."""
        return tuple(
            (macro, at)
            for name, macro in _WRITE_MACROS.items()
            if name in self._expanded
            for at in _occurrences(encoded, self._expanded[name])
        )


def _expand_document_macro(macro: bytes, document: Document) -> bytes | None:
    found = _DOCUMENT_MACRO.fullmatch(macro)
    if found is None:
        return None
    if found[1] is None:
        return to_json({name: field(document) for name, field in DOCUMENT_FIELDS.items()}).encode()
    wanted = DOCUMENT_FIELDS.get(found[1].decode())
    return None if wanted is None else to_json(wanted(document)).encode()


def _placeholders(macros: set[bytes], texts: Sequence[bytes]) -> dict[bytes, bytes]:
    taken = {int(digits[:16], 16) for text in texts for digits in _LIKE_A_PLACEHOLDER.findall(text)}
    free = (number for number in count() if number not in taken)
    return {name: b'"0x%0*x"' % (digits, next(free)) for name, digits in _PLACEHOLDER_DIGITS.items() if name in macros}


def _occurrences(encoded: bytes, placeholder: bytes) -> Iterator[int]:
    at = encoded.find(placeholder)
    while at >= 0:
        yield at
        at = encoded.find(placeholder, at + len(placeholder))

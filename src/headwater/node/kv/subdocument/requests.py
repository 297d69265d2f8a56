"""Checks sub-document requests before their documents are read, and provides virtual attributes and macros.

A fault that is found here refuses the whole request. The checks are in Couchbase's order, because the order decides
which status a request with several faults gets.

`SubdocDocument` is a document as the sub-document engine receives it, with its metadata. Virtual extended attributes
are metadata that clients can look up as if it were stored in the document; macros are values of extended attributes
that the server fills in. Both may show a checksum of the body.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import numpy as np

from headwater.errors import MalformedXattrs
from headwater.kernels.memory import read_only, u32
from headwater.node.kv.subdocument import json_text
from headwater.protocol.features import Opcode
from headwater.protocol.messages.subdocument import SPECS_MAX, DocFlags, LookupSpec, MutationSpec, PathFlags
from headwater.protocol.numbers import XATTR_NAME_BYTES_MAX, Cas, Seqno, Vbuuid
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs
from headwater.store.checksums import crc32c

# --- the current document, and its new value ------------------------------------------------------------------------


SYSTEM_XATTR_PREFIX = "_"
"""The prefix of system attributes, which stay in the tombstone of a deleted document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubdocDocument:
    """A document or a tombstone, without its key."""

    value: bytes
    """The inflated value, preceded by the extended attributes if `datatype` has their bit."""

    datatype: Datatype
    """The stored datatype. Its SNAPPY bit is only shown to the client, and does not describe `value`."""

    cas: Cas = Cas(0)
    seqno: Seqno = Seqno(0)
    vbuuid: Vbuuid = Vbuuid(0)
    rev: int = 0
    flags: int = 0
    expiry: int = 0
    deleted: bool = False
    hlc_now_s: int | None = field(default=None, compare=False)
    """The vbucket's clock, for the virtual attribute `$vbucket`. Not compared, as it is no part of the document."""

    def parts(self) -> ValueParts:
        if not self.datatype & Datatype.XATTR:
            return ValueParts({}, self.value)
        try:
            return decode_xattrs(self.value)
        except MalformedXattrs as error:
            raise RequestRefused(Status.EINTERNAL, f"the stored document is damaged: {error.reason}") from error


class WriteMacro(Enum):
    """Macros for properties of the write itself, which are known only when it is applied."""

    CAS = "CAS"
    SEQNO = "seqno"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValue:
    """The value after a mutation, with placeholders for its own CAS and seqno."""

    template: bytes
    """The encoded value: extended attributes first, if any. Placeholders are as long as what replaces them."""

    datatype: Datatype
    macros: tuple[tuple[WriteMacro, int], ...] = ()
    """The macros to fill in, and their positions in the template."""

    def fill(self, *, cas: Cas, seqno: Seqno) -> bytes:
        """The value to store with this CAS and seqno."""
        # Couchbase writes the CAS with its bytes reversed, and clients reverse it again.
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


def virtual_xattr_text(document: SubdocDocument, path: json_text.Path) -> bytes:
    """The JSON text in which a path of a virtual attribute is looked up."""
    name = path[0]
    if name == "$document":
        # Clients mostly ask for one field, and the checksum of a large body is expensive.
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
# Macros such as `"${Mutation.CAS}"` refer to the write itself, those such as `"${$document.CAS}"` to the previous
# version of the document. The CAS and the seqno of a write are known only when it is applied. Until then the text has a
# placeholder of the same length, a string that occurs nowhere else in the request or in the document.


_WRITE_MACROS = {b'"${Mutation.CAS}"': WriteMacro.CAS, b'"${Mutation.seqno}"': WriteMacro.SEQNO}
_CRC32C_MACRO = b'"${Mutation.value_crc32c}"'
_DOCUMENT_MACRO = re.compile(rb'"\$\{\$document(?:\.(\w+))?\}"')

_PLACEHOLDER_DIGITS = {**dict.fromkeys(_WRITE_MACROS, 16), _CRC32C_MACRO: 8}


def is_macro(value: bytes) -> bool:
    """Whether the value has the form of a macro. The field of a document macro may still be unknown."""
    return value in _PLACEHOLDER_DIGITS or (value.startswith(b'"${$document') and value.endswith(b'}"'))


class MacroExpansion:
    """The macros of one request: their values or placeholders, and the positions of these in the new value."""

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
            raise RequestRefused(json_text.XATTR_UNKNOWN_VATTR_MACRO)
        return self._expanded[spec.value]

    def with_checksum(self, encoded: bytes, *, body: bytes) -> bytes:
        """The encoded value, with the checksum of the new body in place of its macro."""
        placeholder = self._expanded.get(_CRC32C_MACRO)
        if placeholder is None or placeholder not in encoded:
            return encoded
        return encoded.replace(placeholder, f'"{_checksum(body)}"'.encode())

    def positions(self, encoded: bytes) -> tuple[tuple[WriteMacro, int], ...]:
        """The positions of the write's CAS and seqno in the encoded value."""
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
    """Strings that occur in none of the texts. They are hashes of all texts, so that no client can guess them."""
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


# --- requests ---------------------------------------------------------------------------------------------------------


_LOOKUP_DOC_FLAGS = DocFlags.ACCESS_DELETED | DocFlags.REPLICA_READ
_KEEPING = DocFlags.ACCESS_DELETED | DocFlags.REVIVE_DOCUMENT


class CommandScope(Enum):
    """The part of the document that a command works on."""

    PATH = auto()
    WHOLE_BODY = auto()
    XATTR_TO_BODY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a command accepts, and the part of the document that it works on."""

    mutates: bool
    scope: CommandScope = CommandScope.PATH
    has_value: bool = False
    empty_path_allowed: bool = False
    path_flags: PathFlags = PathFlags.XATTR
    """The path flags that it accepts. With the scope XATTR_TO_BODY, XATTR is required."""
    doc_flags: DocFlags = _KEEPING


_CREATING = _KEEPING | DocFlags.MKDOC | DocFlags.ADD | DocFlags.CREATE_AS_DELETED
_XATTR, _BINARY, _MKDIR_P = PathFlags.XATTR, PathFlags.BINARY_VALUE, PathFlags.MKDIR_P
_VALUE = _XATTR | PathFlags.EXPAND_MACROS | _BINARY

_lookup = partial(Command, mutates=False, doc_flags=_LOOKUP_DOC_FLAGS)
_mutation = partial(Command, mutates=True)
_whole_body = partial(Command, scope=CommandScope.WHOLE_BODY, empty_path_allowed=True, path_flags=PathFlags(0))
_creation = partial(_mutation, has_value=True, doc_flags=_CREATING)
_DICT = _creation(path_flags=_VALUE | _MKDIR_P)
_PUSH = _creation(empty_path_allowed=True, path_flags=_VALUE | _MKDIR_P)

COMMANDS: Mapping[Opcode, Command] = {
    Opcode.GET: _whole_body(mutates=False, doc_flags=_LOOKUP_DOC_FLAGS),
    Opcode.SET: _whole_body(mutates=True, has_value=True, doc_flags=DocFlags.MKDOC | DocFlags.ADD),
    Opcode.DELETE: _whole_body(mutates=True),
    Opcode.SUBDOC_GET: _lookup(path_flags=_XATTR | _BINARY),
    Opcode.SUBDOC_EXISTS: _lookup(),
    Opcode.SUBDOC_GET_COUNT: _lookup(empty_path_allowed=True),
    Opcode.SUBDOC_DICT_ADD: _DICT,
    Opcode.SUBDOC_DICT_UPSERT: _DICT,
    Opcode.SUBDOC_DELETE: _mutation(),
    Opcode.SUBDOC_REPLACE: _mutation(has_value=True, path_flags=_VALUE, doc_flags=_KEEPING | DocFlags.ADD),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: _PUSH,
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: _PUSH,
    Opcode.SUBDOC_ARRAY_INSERT: _creation(path_flags=_VALUE, doc_flags=_CREATING & ~DocFlags.MKDOC),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: _creation(empty_path_allowed=True, path_flags=_XATTR | _BINARY | _MKDIR_P),
    Opcode.SUBDOC_COUNTER: _creation(path_flags=_XATTR | _MKDIR_P),
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR: _mutation(scope=CommandScope.XATTR_TO_BODY, path_flags=_XATTR | _BINARY),
}

Spec = LookupSpec | MutationSpec

# --- binary values --------------------------------------------------------------------------------------------------

BINARY_PREFIX = b"cb-content-base64-encoded:"
"""An extended attribute is JSON. It stores a binary value as a string with this prefix (kv_engine,
`utilities/string_utilities.h`)."""


def encode_binary(value: bytes) -> bytes:
    """Encode a binary value as the JSON to store."""
    return b'"' + BINARY_PREFIX + b64encode(value) + b'"'


def decode_binary(json: bytes) -> bytes:
    """Decode the binary value of stored JSON. Raises `RequestRefused` if it has none."""
    if not json.startswith(b'"' + BINARY_PREFIX) or not json.endswith(b'"'):
        raise RequestRefused(json_text.FIELD_NOT_BINARY_VALUE)
    try:
        return b64decode(json[1 + len(BINARY_PREFIX) : -1], validate=True)
    except ValueError as error:
        raise RequestRefused(json_text.FIELD_NOT_BINARY_VALUE) from error


# --- checks of a request --------------------------------------------------------------------------------------------

_RESERVED_FIRST = set(string.punctuation) - {"_", PREFIX} | {chr(code) for code in (*range(0x20), 0x7F)}
_EXCLUSIVE = (
    DocFlags.MKDOC | DocFlags.ADD,
    DocFlags.REVIVE_DOCUMENT | DocFlags.CREATE_AS_DELETED,
    DocFlags.REPLICA_READ | DocFlags.ACCESS_DELETED,
)
_CREATES = DocFlags.MKDOC | DocFlags.ADD
_XATTR_NAME_END = re.compile(r"[.\[]")


def check_many(specs: Sequence[Spec], doc_flags: DocFlags, *, mutates: bool) -> None:
    """Check a multi-path request."""
    if not 0 < len(specs) <= SPECS_MAX:
        raise RequestRefused(Status.SUBDOC_INVALID_COMBO, f"a request has 1 to {SPECS_MAX} paths")
    _check_doc_flags(doc_flags)
    for spec in specs:
        _check_spec(spec, doc_flags, mutates=mutates)
    _check_order(specs)
    _check_xattr_names(specs)


def check_one(spec: Spec, doc_flags: DocFlags, *, mutates: bool) -> None:
    """Check a single-path request."""
    _check_doc_flags(doc_flags)
    if doc_flags & DocFlags.CREATE_AS_DELETED:
        # kv_engine's validators have these two rules for single-path requests only. In a multi-path request the flag
        # applies if there is no document, and is ignored if there is one: transactions stage over a tombstone that way.
        if not doc_flags & _CREATES:
            raise RequestRefused(Status.EINVAL, f"document flag CREATE_AS_DELETED needs {_CREATES.name}")
        if not spec.flags & PathFlags.XATTR:
            raise RequestRefused(Status.EINVAL, "CREATE_AS_DELETED is for extended attributes: a tombstone has no body")
    _check_spec(spec, doc_flags, mutates=mutates)


def xattr_name(path: bytes) -> str:
    """The name of the extended attribute at the start of a path."""
    try:
        name = _XATTR_NAME_END.split(path.decode(), maxsplit=1)[0]
    except UnicodeDecodeError as error:
        raise RequestRefused(Status.XATTR_EINVAL, "the path of an extended attribute is not UTF-8") from error
    if not name or len(name.encode()) > XATTR_NAME_BYTES_MAX:
        raise RequestRefused(
            Status.XATTR_EINVAL, f"the name of an extended attribute has 1 to {XATTR_NAME_BYTES_MAX} bytes"
        )
    if name[0] in _RESERVED_FIRST or name in ("_", PREFIX) or b"\0" in path:
        raise RequestRefused(Status.XATTR_EINVAL, "the name of an extended attribute starts with a letter, _ or $")
    return name


def spec_path(spec: Spec) -> json_text.Path:
    """The parsed path of a spec."""
    path = json_text.parse_path(spec.path)
    # The name of an attribute is taken literally: escapes and backticks must not turn it into another name.
    if spec.flags & PathFlags.XATTR and path[0] != xattr_name(spec.path):
        raise RequestRefused(Status.SUBDOC_PATH_EINVAL)
    return path


# --- document flags -------------------------------------------------------------------------------------------------


def _check_doc_flags(doc_flags: DocFlags) -> None:
    for pair in _EXCLUSIVE:
        if pair in doc_flags:
            raise RequestRefused(Status.EINVAL, f"document flags {pair.name} exclude each other")
    if doc_flags & DocFlags.REVIVE_DOCUMENT and not doc_flags & DocFlags.ACCESS_DELETED:
        raise RequestRefused(Status.EINVAL, "document flag REVIVE_DOCUMENT needs ACCESS_DELETED")


# --- each spec by itself --------------------------------------------------------------------------------------------


def _check_spec(spec: Spec, doc_flags: DocFlags, *, mutates: bool) -> None:
    command = COMMANDS.get(spec.opcode)
    if command is None or command.mutates != mutates:
        kind = "a mutation" if mutates else "a lookup"
        raise RequestRefused(Status.SUBDOC_INVALID_COMBO, f"{spec.opcode.name} is not {kind}")
    _check_flags(spec, command, doc_flags)
    if len(spec.path) > json_text.PATH_BYTES_MAX:
        raise RequestRefused(Status.EINVAL, f"a path has at most {json_text.PATH_BYTES_MAX} bytes")
    if command.scope is CommandScope.WHOLE_BODY and spec.path:
        raise RequestRefused(Status.EINVAL, f"{spec.opcode.name} is about the whole document and takes no path")
    _check_xattr(spec, command)
    if not spec.path and not command.empty_path_allowed:
        raise RequestRefused(Status.EINVAL, f"{spec.opcode.name} needs a path")
    if bool(_value(spec)) != command.has_value:
        raise RequestRefused(
            Status.EINVAL, f"{spec.opcode.name} {'needs a' if command.has_value else 'takes no'} value"
        )


def _check_flags(spec: Spec, command: Command, doc_flags: DocFlags) -> None:
    # Plain integers, so that bits without a name count, too.
    if int(spec.flags) & ~int(command.path_flags):
        raise RequestRefused(Status.EINVAL, f"{spec.opcode.name} does not know these path flags")
    if command.scope is CommandScope.XATTR_TO_BODY and not spec.flags & PathFlags.XATTR:
        raise RequestRefused(Status.EINVAL, f"{spec.opcode.name} needs the path flag XATTR")
    if int(doc_flags) & ~int(command.doc_flags):
        raise RequestRefused(Status.EINVAL, f"{spec.opcode.name} does not know these document flags")


def _check_xattr(spec: Spec, command: Command) -> None:
    value, expands, is_binary = _value(spec), spec.flags & PathFlags.EXPAND_MACROS, spec.flags & PathFlags.BINARY_VALUE
    if not spec.flags & PathFlags.XATTR:
        if expands or is_binary:
            raise RequestRefused(
                Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "macros and binary values are for extended attributes"
            )
        return
    if expands and is_binary:
        raise RequestRefused(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "a binary value has no macros")
    if xattr_name(spec.path).startswith(PREFIX) and command.mutates:
        raise RequestRefused(Status.SUBDOC_XATTR_CANT_MODIFY_VATTR, "virtual attributes cannot be changed")
    if not is_binary and BINARY_PREFIX in value:
        # A binary value inside JSON must have the stored encoding.
        try:
            decode_binary(b'"' + value[value.index(BINARY_PREFIX) :].partition(b'"')[0] + b'"')
        except RequestRefused as refused:
            raise RequestRefused(Status.XATTR_EINVAL, "the binary value is not encoded in base64") from refused
    if expands and not is_macro(value):
        raise RequestRefused(Status.SUBDOC_XATTR_UNKNOWN_MACRO, "the value is not a macro")


def _value(spec: Spec) -> bytes:
    return spec.value if isinstance(spec, MutationSpec) else b""


# --- the specs together ---------------------------------------------------------------------------------------------


def _check_order(specs: Sequence[Spec]) -> None:
    are_body_specs = [not spec.flags & PathFlags.XATTR for spec in specs]
    deletes = any(spec.opcode == Opcode.DELETE for spec in specs)
    if deletes and (sum(are_body_specs) > 1 or specs[-1].opcode != Opcode.DELETE):
        raise RequestRefused(Status.SUBDOC_INVALID_COMBO, "a body that is deleted cannot be changed as well")
    if sorted(are_body_specs) != are_body_specs:
        raise RequestRefused(Status.SUBDOC_INVALID_XATTR_ORDER, "extended attributes come before the body")


def _check_xattr_names(specs: Sequence[Spec]) -> None:
    names = {xattr_name(spec.path) for spec in specs if spec.flags & PathFlags.XATTR}
    if len([name for name in names if not name.startswith(PREFIX)]) > 1:
        raise RequestRefused(Status.SUBDOC_XATTR_INVALID_KEY_COMBO, "a request has one extended attribute at most")

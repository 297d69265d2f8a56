"""Checking a sub-document request before its document is read: what each command takes, and what is wrong with one.

A fault here refuses the request as a whole. The checks stand in Couchbase's order, because the order decides which
status a request with several faults gets.
"""

from __future__ import annotations

import re
import string
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from headwater.node.kv.subdocument.json_text import (
    FIELD_NOT_BINARY_VALUE,
    PATH_BYTES_MAX,
    Path,
    parse_path,
)
from headwater.node.kv.subdocument.virtual_xattrs import PREFIX, is_macro
from headwater.protocol.features import Opcode
from headwater.protocol.messages.subdocument import SPECS_MAX, DocFlags, LookupSpec, MutationSpec, PathFlags
from headwater.protocol.numbers import XATTR_NAME_BYTES_MAX
from headwater.protocol.status import RequestRefused, Status

_LOOKUP_DOC_FLAGS = DocFlags.ACCESS_DELETED | DocFlags.REPLICA_READ
_KEEPING = DocFlags.ACCESS_DELETED | DocFlags.REVIVE_DOCUMENT


class CommandScope(Enum):
    """What of the document a command is about."""

    PATH = auto()
    WHOLE_BODY = auto()
    XATTR_TO_BODY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a command takes, and what it is about."""

    mutates: bool
    scope: CommandScope = CommandScope.PATH
    has_value: bool = False
    empty_path_allowed: bool = False
    path_flags: PathFlags = PathFlags.XATTR
    """The flags it knows; XATTR is needed where the scope is XATTR_TO_BODY."""
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
"""How an extended attribute, which is JSON, holds a binary value: as a string that begins like this (kv_engine,
`utilities/string_utilities.h`)."""


def encode_binary(value: bytes) -> bytes:
    """A binary value as the JSON that is stored."""
    return b'"' + BINARY_PREFIX + b64encode(value) + b'"'


def decode_binary(json: bytes) -> bytes:
    """The binary value that stored JSON stands for."""
    if not json.startswith(b'"' + BINARY_PREFIX) or not json.endswith(b'"'):
        raise RequestRefused(FIELD_NOT_BINARY_VALUE)
    try:
        return b64decode(json[1 + len(BINARY_PREFIX) : -1], validate=True)
    except ValueError as error:
        raise RequestRefused(FIELD_NOT_BINARY_VALUE) from error


# --- what is wrong with a request -----------------------------------------------------------------------------------

_RESERVED_FIRST = set(string.punctuation) - {"_", PREFIX} | {chr(code) for code in (*range(0x20), 0x7F)}
_EXCLUSIVE = (
    DocFlags.MKDOC | DocFlags.ADD,
    DocFlags.REVIVE_DOCUMENT | DocFlags.CREATE_AS_DELETED,
    DocFlags.REPLICA_READ | DocFlags.ACCESS_DELETED,
)
_CREATES = DocFlags.MKDOC | DocFlags.ADD
_XATTR_NAME_END = re.compile(r"[.\[]")


def check_many(specs: Sequence[Spec], doc_flags: DocFlags, *, mutates: bool) -> None:
    """Checks a request of many paths."""
    if not 0 < len(specs) <= SPECS_MAX:
        raise RequestRefused(Status.SUBDOC_INVALID_COMBO, f"a request has 1 to {SPECS_MAX} paths")
    _check_doc_flags(doc_flags)
    for spec in specs:
        _check_spec(spec, doc_flags, mutates=mutates)
    _check_order(specs)
    _check_xattr_names(specs)


def check_one(spec: Spec, doc_flags: DocFlags, *, mutates: bool) -> None:
    """Checks a request of one path."""
    _check_doc_flags(doc_flags)
    if doc_flags & DocFlags.CREATE_AS_DELETED:
        # kv_engine's validators have these two rules for single paths only. With many paths the flag says what to do if
        # there is no document, and has no say where there is one: so transactions stage over a tombstone.
        if not doc_flags & _CREATES:
            raise RequestRefused(Status.EINVAL, f"document flag CREATE_AS_DELETED needs {_CREATES.name}")
        if not spec.flags & PathFlags.XATTR:
            raise RequestRefused(Status.EINVAL, "CREATE_AS_DELETED is for extended attributes: a tombstone has no body")
    _check_spec(spec, doc_flags, mutates=mutates)


def xattr_name(path: bytes) -> str:
    """The name of the extended attribute that a path starts with."""
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


def spec_path(spec: Spec) -> Path:
    """The parsed path of a spec."""
    path = parse_path(spec.path)
    # The name of an attribute is taken as it is written: neither escapes nor backticks can make another one of it.
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
    if len(spec.path) > PATH_BYTES_MAX:
        raise RequestRefused(Status.EINVAL, f"a path has at most {PATH_BYTES_MAX} bytes")
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
        # JSON that has a binary value in it must have it as it is stored.
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

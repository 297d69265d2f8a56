"""What each command of a sub-document request may be given, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from headwater.protocol.messages.subdocument import DocFlags, PathFlags
from headwater.protocol.opcodes import Opcode

_LOOKUP_DOC_FLAGS = DocFlags.ACCESS_DELETED | DocFlags.REPLICA_READ
_KEEPING = DocFlags.ACCESS_DELETED | DocFlags.REVIVE_DOCUMENT


class Scope(Enum):
    """What of the document a command is about."""

    PATH = auto()
    WHOLE_BODY = auto()
    XATTR_TO_BODY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a command takes, and what it is about."""

    mutates: bool
    scope: Scope = Scope.PATH
    has_value: bool = False
    empty_path_allowed: bool = False
    path_flags: PathFlags = PathFlags.XATTR
    """The flags it knows; XATTR is needed where the scope is XATTR_TO_BODY."""
    doc_flags: DocFlags = _KEEPING


_CREATING = _KEEPING | DocFlags.MKDOC | DocFlags.ADD | DocFlags.CREATE_AS_DELETED
_VALUE = PathFlags.XATTR | PathFlags.EXPAND_MACROS

_DICT = Command(mutates=True, has_value=True, path_flags=_VALUE | PathFlags.MKDIR_P, doc_flags=_CREATING)
_PUSH = Command(
    mutates=True,
    has_value=True,
    empty_path_allowed=True,
    path_flags=_VALUE | PathFlags.MKDIR_P,
    doc_flags=_CREATING,
)

COMMANDS: Mapping[Opcode, Command] = {
    Opcode.GET: Command(
        mutates=False,
        scope=Scope.WHOLE_BODY,
        empty_path_allowed=True,
        path_flags=PathFlags(0),
        doc_flags=_LOOKUP_DOC_FLAGS,
    ),
    Opcode.SET: Command(
        mutates=True,
        scope=Scope.WHOLE_BODY,
        has_value=True,
        empty_path_allowed=True,
        path_flags=PathFlags(0),
        doc_flags=DocFlags.MKDOC | DocFlags.ADD,
    ),
    Opcode.DELETE: Command(mutates=True, scope=Scope.WHOLE_BODY, empty_path_allowed=True, path_flags=PathFlags(0)),
    Opcode.SUBDOC_GET: Command(mutates=False, doc_flags=_LOOKUP_DOC_FLAGS),
    Opcode.SUBDOC_EXISTS: Command(mutates=False, doc_flags=_LOOKUP_DOC_FLAGS),
    Opcode.SUBDOC_GET_COUNT: Command(mutates=False, empty_path_allowed=True, doc_flags=_LOOKUP_DOC_FLAGS),
    Opcode.SUBDOC_DICT_ADD: _DICT,
    Opcode.SUBDOC_DICT_UPSERT: _DICT,
    Opcode.SUBDOC_DELETE: Command(mutates=True),
    Opcode.SUBDOC_REPLACE: Command(mutates=True, has_value=True, path_flags=_VALUE, doc_flags=_KEEPING | DocFlags.ADD),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: _PUSH,
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: _PUSH,
    Opcode.SUBDOC_ARRAY_INSERT: Command(
        mutates=True,
        has_value=True,
        path_flags=_VALUE,
        doc_flags=_KEEPING | DocFlags.ADD | DocFlags.CREATE_AS_DELETED,
    ),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: Command(
        mutates=True,
        has_value=True,
        empty_path_allowed=True,
        path_flags=PathFlags.XATTR | PathFlags.MKDIR_P,
        doc_flags=_CREATING,
    ),
    Opcode.SUBDOC_COUNTER: Command(
        mutates=True, has_value=True, path_flags=PathFlags.XATTR | PathFlags.MKDIR_P, doc_flags=_CREATING
    ),
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR: Command(mutates=True, scope=Scope.XATTR_TO_BODY),
}

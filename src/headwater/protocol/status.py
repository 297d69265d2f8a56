"""Response statuses (bytes 6 and 7 of a response), what a peer without extended errors gets instead, and the error map.

An unknown status is kept as a number. The errors that statuses raise in a client are in `headwater.errors`.
"""

from __future__ import annotations

import json
from typing import Any

from headwater.errors import STATUS_ERRORS
from headwater.protocol.features import OpenIntEnum


class Status(OpenIntEnum):
    SUCCESS = 0x00
    KEY_ENOENT = 0x01
    KEY_EEXISTS = 0x02
    E2BIG = 0x03
    EINVAL = 0x04
    NOT_STORED = 0x05
    DELTA_BADVAL = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    STREAM_NOT_FOUND = 0x0A
    OPAQUE_NO_MATCH = 0x0B
    CONFIG_ONLY = 0x0D
    NOT_LOCKED = 0x0E
    CAS_VALUE_INVALID = 0x0F
    AUTH_STALE = 0x1F
    AUTH_ERROR = 0x20
    AUTH_CONTINUE = 0x21
    ERANGE = 0x22
    ROLLBACK = 0x23
    EACCESS = 0x24
    NOT_INITIALIZED = 0x25
    UNKNOWN_FRAME_INFO = 0x80
    UNKNOWN_COMMAND = 0x81
    ENOMEM = 0x82
    NOT_SUPPORTED = 0x83
    EINTERNAL = 0x84
    EBUSY = 0x85
    ETMPFAIL = 0x86
    XATTR_EINVAL = 0x87
    UNKNOWN_COLLECTION = 0x88
    NO_COLLECTIONS_MANIFEST = 0x89
    CANNOT_APPLY_MANIFEST = 0x8A
    MANIFEST_IS_AHEAD = 0x8B
    UNKNOWN_SCOPE = 0x8C
    DCP_STREAMID_INVALID = 0x8D
    DURABILITY_INVALID_LEVEL = 0xA0
    DURABILITY_IMPOSSIBLE = 0xA1
    SYNC_WRITE_IN_PROGRESS = 0xA2
    SYNC_WRITE_AMBIGUOUS = 0xA3
    SYNC_WRITE_RE_COMMIT_IN_PROGRESS = 0xA4
    RANGE_SCAN_CANCELLED = 0xA5
    RANGE_SCAN_MORE = 0xA6
    RANGE_SCAN_COMPLETE = 0xA7
    VBUUID_NOT_EQUAL = 0xA8
    SUBDOC_PATH_ENOENT = 0xC0
    SUBDOC_PATH_MISMATCH = 0xC1
    SUBDOC_PATH_EINVAL = 0xC2
    SUBDOC_PATH_E2BIG = 0xC3
    SUBDOC_DOC_E2DEEP = 0xC4
    SUBDOC_VALUE_CANTINSERT = 0xC5
    SUBDOC_DOC_NOT_JSON = 0xC6
    SUBDOC_NUM_ERANGE = 0xC7
    SUBDOC_DELTA_EINVAL = 0xC8
    SUBDOC_PATH_EEXISTS = 0xC9
    SUBDOC_VALUE_ETOODEEP = 0xCA
    SUBDOC_INVALID_COMBO = 0xCB
    SUBDOC_MULTI_PATH_FAILURE = 0xCC
    SUBDOC_SUCCESS_DELETED = 0xCD
    SUBDOC_XATTR_INVALID_FLAG_COMBO = 0xCE
    SUBDOC_XATTR_INVALID_KEY_COMBO = 0xCF
    SUBDOC_XATTR_UNKNOWN_MACRO = 0xD0
    SUBDOC_XATTR_UNKNOWN_VATTR = 0xD1
    SUBDOC_XATTR_CANT_MODIFY_VATTR = 0xD2
    SUBDOC_MULTI_PATH_FAILURE_DELETED = 0xD3
    SUBDOC_INVALID_XATTR_ORDER = 0xD4


SUCCESSFUL = frozenset(
    {
        Status.SUCCESS,
        Status.AUTH_CONTINUE,
        Status.RANGE_SCAN_MORE,
        Status.RANGE_SCAN_COMPLETE,
        Status.SUBDOC_SUCCESS_DELETED,
        Status.SUBDOC_MULTI_PATH_FAILURE,
        Status.SUBDOC_MULTI_PATH_FAILURE_DELETED,
    }
)
"""Statuses whose response carries the command's own extras and value rather than an error context."""

_WITHOUT_XERROR = {
    Status.LOCKED: Status.KEY_EEXISTS,
    Status.SYNC_WRITE_IN_PROGRESS: Status.ETMPFAIL,
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: Status.ETMPFAIL,
}
_NEEDS_COLLECTIONS = frozenset({Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE})
_NEEDS_XERROR = frozenset(
    {
        Status.EACCESS,
        Status.NO_BUCKET,
        Status.AUTH_STALE,
        Status.DURABILITY_INVALID_LEVEL,
        Status.DURABILITY_IMPOSSIBLE,
        Status.SYNC_WRITE_AMBIGUOUS,
        Status.DCP_STREAMID_INVALID,
    }
)


def status_for_peer(status: Status, *, xerror: bool, collections: bool) -> Status | None:
    """Return the status that a peer without extended errors may see; None if the connection is closed instead.

    A connection that did not ask for XERROR in HELLO was written before these statuses existed (kv_engine,
    docs/BinaryProtocol.md, "0x1f HELO", Xerror; the substitutes are those of a 7.0.5 server).
    """
    if xerror:
        return status
    if status in _NEEDS_COLLECTIONS:
        return status if collections else Status.EINVAL
    if status in _NEEDS_XERROR:
        return None
    return _WITHOUT_XERROR.get(status, status)


# --- the error map: what each status is called and how a client should take it (kv_engine, docs/ErrorMap.md) ----------


ERROR_MAP_VERSION = 2
_REVISION = 1

_CONNECTION_STATE = frozenset({Status.NO_BUCKET, Status.AUTH_STALE, Status.AUTH_ERROR, Status.NOT_INITIALIZED})
_CONSTRAINTS = frozenset(
    {Status.KEY_ENOENT, Status.KEY_EEXISTS, Status.NOT_STORED, Status.DELTA_BADVAL, Status.LOCKED, Status.NOT_LOCKED}
)


def error_map(version: int) -> bytes:
    """Return the map as JSON."""
    errors = {
        f"{status.value:x}": {
            "name": status.name,
            "desc": status.name.replace("_", " ").capitalize(),
            "attrs": _attributes(status),
        }
        for status in Status
    }
    return json.dumps({"version": version, "revision": _REVISION, "errors": errors}).encode()


def _attributes(status: Status) -> list[str]:
    if status in SUCCESSFUL:
        return ["success"]
    attributes = []
    if status == Status.NOT_MY_VBUCKET:
        attributes.append("fetch-config")
    if status.name.startswith("SUBDOC_"):
        attributes.append("subdoc")
    if status in _CONSTRAINTS:
        attributes.append("item-only")
    if status in _CONNECTION_STATE:
        attributes.append("conn-state-invalidated")
    error = STATUS_ERRORS.get(status)
    if error is not None and error.retriable and not error.stale_topology:
        attributes += ["temp", "retry-later"]
    return attributes or ["invalid-input"]


class RequestRefused(Exception):
    """A request, or a message of a stream, is answered with an error status."""

    def __init__(self, status: Status, context: str = "", *, body: bytes | None = None, **members: Any) -> None:
        super().__init__(status.name)
        self.status = status
        self.context = context
        self.body = body
        """The JSON body, if one is ready; otherwise it is made of the context and the members."""
        self.members = members
        """Further members of the JSON body, beside `error`."""

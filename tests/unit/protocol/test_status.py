"""Statuses: their numbers, and what a peer that knows no extended errors gets to see of them."""

from __future__ import annotations

import pytest

from headwater.protocol.status import SUCCESSFUL, Status, status_for_peer
from support.cases import each

CLOSED = None

# What kv_engine gives a connection that did not ask for XERROR in HELLO: without collections, and with them.
WITHOUT_XERROR: dict[Status, tuple[Status | None, Status | None]] = {
    Status.LOCKED: (Status.KEY_EEXISTS, Status.KEY_EEXISTS),
    Status.SYNC_WRITE_IN_PROGRESS: (Status.ETMPFAIL, Status.ETMPFAIL),
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: (Status.ETMPFAIL, Status.ETMPFAIL),
    Status.UNKNOWN_COLLECTION: (Status.EINVAL, Status.UNKNOWN_COLLECTION),
    Status.UNKNOWN_SCOPE: (Status.EINVAL, Status.UNKNOWN_SCOPE),
    Status.EACCESS: (CLOSED, CLOSED),
    Status.NO_BUCKET: (CLOSED, CLOSED),
    Status.AUTH_STALE: (CLOSED, CLOSED),
    Status.DURABILITY_INVALID_LEVEL: (CLOSED, CLOSED),
    Status.DURABILITY_IMPOSSIBLE: (CLOSED, CLOSED),
    Status.SYNC_WRITE_AMBIGUOUS: (CLOSED, CLOSED),
    Status.DCP_STREAMID_INVALID: (CLOSED, CLOSED),
}


@each("collections", [False, True])
@each("status", list(Status))
def test_a_peer_without_extended_errors(status: Status, collections: bool) -> None:
    seen = WITHOUT_XERROR.get(status, (status, status))[collections]
    assert status_for_peer(status, xerror=False, collections=collections) is seen


@each("collections", [False, True])
@each("status", list(Status))
def test_a_peer_with_extended_errors_sees_them_all(status: Status, collections: bool) -> None:
    assert status_for_peer(status, xerror=True, collections=collections) is status


# kv_engine, docs/BinaryProtocol.md, "Response Status".
NUMBERS = {
    0x00: "SUCCESS",
    0x01: "KEY_ENOENT",
    0x02: "KEY_EEXISTS",
    0x03: "E2BIG",
    0x04: "EINVAL",
    0x05: "NOT_STORED",
    0x06: "DELTA_BADVAL",
    0x07: "NOT_MY_VBUCKET",
    0x08: "NO_BUCKET",
    0x09: "LOCKED",
    0x0A: "STREAM_NOT_FOUND",
    0x0B: "OPAQUE_NO_MATCH",
    0x0D: "CONFIG_ONLY",
    0x0E: "NOT_LOCKED",
    0x0F: "CAS_VALUE_INVALID",
    0x1F: "AUTH_STALE",
    0x20: "AUTH_ERROR",
    0x21: "AUTH_CONTINUE",
    0x22: "ERANGE",
    0x23: "ROLLBACK",
    0x24: "EACCESS",
    0x25: "NOT_INITIALIZED",
    0x80: "UNKNOWN_FRAME_INFO",
    0x81: "UNKNOWN_COMMAND",
    0x82: "ENOMEM",
    0x83: "NOT_SUPPORTED",
    0x84: "EINTERNAL",
    0x85: "EBUSY",
    0x86: "ETMPFAIL",
    0x87: "XATTR_EINVAL",
    0x88: "UNKNOWN_COLLECTION",
    0x89: "NO_COLLECTIONS_MANIFEST",
    0x8A: "CANNOT_APPLY_MANIFEST",
    0x8B: "MANIFEST_IS_AHEAD",
    0x8C: "UNKNOWN_SCOPE",
    0x8D: "DCP_STREAMID_INVALID",
    0xA0: "DURABILITY_INVALID_LEVEL",
    0xA1: "DURABILITY_IMPOSSIBLE",
    0xA2: "SYNC_WRITE_IN_PROGRESS",
    0xA3: "SYNC_WRITE_AMBIGUOUS",
    0xA4: "SYNC_WRITE_RE_COMMIT_IN_PROGRESS",
    0xA5: "RANGE_SCAN_CANCELLED",
    0xA6: "RANGE_SCAN_MORE",
    0xA7: "RANGE_SCAN_COMPLETE",
    0xA8: "VBUUID_NOT_EQUAL",
    0xC0: "SUBDOC_PATH_ENOENT",
    0xC1: "SUBDOC_PATH_MISMATCH",
    0xC2: "SUBDOC_PATH_EINVAL",
    0xC3: "SUBDOC_PATH_E2BIG",
    0xC4: "SUBDOC_DOC_E2DEEP",
    0xC5: "SUBDOC_VALUE_CANTINSERT",
    0xC6: "SUBDOC_DOC_NOT_JSON",
    0xC7: "SUBDOC_NUM_ERANGE",
    0xC8: "SUBDOC_DELTA_EINVAL",
    0xC9: "SUBDOC_PATH_EEXISTS",
    0xCA: "SUBDOC_VALUE_ETOODEEP",
    0xCB: "SUBDOC_INVALID_COMBO",
    0xCC: "SUBDOC_MULTI_PATH_FAILURE",
    0xCD: "SUBDOC_SUCCESS_DELETED",
    0xCE: "SUBDOC_XATTR_INVALID_FLAG_COMBO",
    0xCF: "SUBDOC_XATTR_INVALID_KEY_COMBO",
    0xD0: "SUBDOC_XATTR_UNKNOWN_MACRO",
    0xD1: "SUBDOC_XATTR_UNKNOWN_VATTR",
    0xD2: "SUBDOC_XATTR_CANT_MODIFY_VATTR",
    0xD3: "SUBDOC_MULTI_PATH_FAILURE_DELETED",
    0xD4: "SUBDOC_INVALID_XATTR_ORDER",
}


def test_the_numbers_of_the_statuses() -> None:
    assert {status.value: status.name for status in Status} == NUMBERS


def test_a_status_nobody_knows_is_kept() -> None:
    status = Status(0x1234)
    assert (status, status.name, status.is_known) == (0x1234, "UNKNOWN_0x1234", False)
    assert status not in SUCCESSFUL
    assert status_for_peer(status, xerror=False, collections=False) == 0x1234
    assert Status.SUCCESS.is_known


@pytest.mark.parametrize("number", [-1, "0x04", None])
def test_what_is_no_number_of_a_status_is_refused(number: object) -> None:
    with pytest.raises(ValueError, match="not a valid Status"):
        Status(number)

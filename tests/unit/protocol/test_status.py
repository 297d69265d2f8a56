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
NUMBERED = {
    0x00: (
        "SUCCESS KEY_ENOENT KEY_EEXISTS E2BIG EINVAL NOT_STORED DELTA_BADVAL NOT_MY_VBUCKET NO_BUCKET LOCKED "
        "STREAM_NOT_FOUND OPAQUE_NO_MATCH"
    ),
    0x0D: "CONFIG_ONLY NOT_LOCKED CAS_VALUE_INVALID",
    0x1F: "AUTH_STALE AUTH_ERROR AUTH_CONTINUE ERANGE ROLLBACK EACCESS NOT_INITIALIZED",
    0x80: (
        "UNKNOWN_FRAME_INFO UNKNOWN_COMMAND ENOMEM NOT_SUPPORTED EINTERNAL EBUSY ETMPFAIL XATTR_EINVAL "
        "UNKNOWN_COLLECTION NO_COLLECTIONS_MANIFEST CANNOT_APPLY_MANIFEST MANIFEST_IS_AHEAD UNKNOWN_SCOPE "
        "DCP_STREAMID_INVALID"
    ),
    0xA0: (
        "DURABILITY_INVALID_LEVEL DURABILITY_IMPOSSIBLE SYNC_WRITE_IN_PROGRESS SYNC_WRITE_AMBIGUOUS "
        "SYNC_WRITE_RE_COMMIT_IN_PROGRESS RANGE_SCAN_CANCELLED RANGE_SCAN_MORE RANGE_SCAN_COMPLETE "
        "VBUUID_NOT_EQUAL"
    ),
    0xC0: (
        "SUBDOC_PATH_ENOENT SUBDOC_PATH_MISMATCH SUBDOC_PATH_EINVAL SUBDOC_PATH_E2BIG SUBDOC_DOC_E2DEEP "
        "SUBDOC_VALUE_CANTINSERT SUBDOC_DOC_NOT_JSON SUBDOC_NUM_ERANGE SUBDOC_DELTA_EINVAL "
        "SUBDOC_PATH_EEXISTS SUBDOC_VALUE_ETOODEEP SUBDOC_INVALID_COMBO SUBDOC_MULTI_PATH_FAILURE "
        "SUBDOC_SUCCESS_DELETED SUBDOC_XATTR_INVALID_FLAG_COMBO SUBDOC_XATTR_INVALID_KEY_COMBO "
        "SUBDOC_XATTR_UNKNOWN_MACRO SUBDOC_XATTR_UNKNOWN_VATTR SUBDOC_XATTR_CANT_MODIFY_VATTR "
        "SUBDOC_MULTI_PATH_FAILURE_DELETED SUBDOC_INVALID_XATTR_ORDER"
    ),
}
"""The names of numbers that follow one another, by the first of them."""


def test_the_numbers_of_the_statuses() -> None:
    numbers = [(first + at, name) for first, names in NUMBERED.items() for at, name in enumerate(names.split())]
    assert [(status.value, status.name) for status in Status] == numbers


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

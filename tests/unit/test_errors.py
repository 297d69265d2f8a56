"""The error tree: its families, what each error keeps, and that every message says what to do next."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path

import pytest

from headwater import errors
from headwater.errors import (
    STATUS_ERRORS,
    BadMagic,
    CaptureError,
    CatalogError,
    CheckpointAhead,
    CheckpointError,
    ConnectionFailed,
    FrameTooLarge,
    GroupError,
    HeadwaterError,
    InvalidInput,
    LakeError,
    LocalProtocolError,
    MalformedMessage,
    Overtaken,
    RemoteProtocolError,
    StatusError,
    StoreError,
    UnknownOpcode,
    VBucketDamaged,
    status_error,
)
from headwater.protocol.status import SUCCESSFUL, Status
from support.cases import each

ALL_ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, HeadwaterError)]
FAMILIES = (
    CaptureError, CatalogError, CheckpointError, ConnectionFailed, GroupError, InvalidInput, LakeError,
    LocalProtocolError, Overtaken, RemoteProtocolError, StatusError, StoreError,
)  # fmt: skip


def make(cls: type[HeadwaterError]) -> HeadwaterError:
    if issubclass(cls, UnknownOpcode | StatusError):
        return cls(0x5A)
    if issubclass(cls, CheckpointAhead):
        return cls(vbucket=7, seqno=20, high_seqno=10)
    if issubclass(cls, VBucketDamaged):
        return cls("something is wrong", vbucket=7)
    if issubclass(cls, Overtaken):
        return cls("node:11210", revision=7)
    return cls("something is wrong")


@each("cls", [cls for cls in ALL_ERRORS if cls is not HeadwaterError])
def test_every_error_belongs_to_one_family(cls: type[HeadwaterError]) -> None:
    assert sum(issubclass(cls, family) for family in FAMILIES) == 1


@each("cls", [cls for cls in ALL_ERRORS if issubclass(cls, RemoteProtocolError | StatusError)])
def test_every_message_ends_in_what_to_do_next(cls: type[HeadwaterError]) -> None:
    error = make(cls)
    assert error.hint
    assert str(error) == f"{error.reason}. {error.hint}"
    assert not error.hint.endswith(".")


def test_an_error_without_a_hint_is_its_reason_alone() -> None:
    assert str(LocalProtocolError("no such thing")) == "no such thing"
    assert str(LocalProtocolError("no such thing", hint="Ask again")) == "no such thing. Ask again"


def test_a_given_hint_replaces_the_default() -> None:
    assert BadMagic("bad", hint="Look closer").hint == "Look closer"
    assert StatusError(0x04, hint="Look closer").hint == "Look closer"


def test_a_remote_error_keeps_its_offset_and_names_it() -> None:
    error = FrameTooLarge("too large", offset=1234)
    assert error.offset == 1234
    assert error.reason == "too large (at byte 1234)"


def test_an_unknown_opcode_is_kept() -> None:
    error = UnknownOpcode(0xEE)
    assert (error.opcode, error.offset) == (0xEE, 1)
    assert "0xee" in str(error)


@pytest.mark.parametrize("name", ["FrameInfo", "Leb128", "Xattrs", "Snappy", "Json", "SystemEvent"])
def test_a_malformed_part_makes_a_malformed_message(name: str) -> None:
    """So that one `except MalformedMessage` is enough to answer EINVAL."""
    assert issubclass(getattr(errors, f"Malformed{name}"), MalformedMessage)


# --- statuses -----------------------------------------------------------------------------------------------------

EXPECTED_STATUS_ERRORS = {
    Status.KEY_ENOENT: errors.KeyNotFound,
    Status.KEY_EEXISTS: errors.KeyExists,
    Status.E2BIG: errors.ValueTooLarge,
    Status.EINVAL: errors.InvalidArguments,
    Status.NOT_STORED: errors.NotStored,
    Status.DELTA_BADVAL: errors.NotANumber,
    Status.NOT_MY_VBUCKET: errors.NotMyVBucket,
    Status.NO_BUCKET: errors.NoBucket,
    Status.LOCKED: errors.Locked,
    Status.STREAM_NOT_FOUND: errors.StreamNotFound,
    Status.OPAQUE_NO_MATCH: errors.OpaqueNoMatch,
    Status.CAS_VALUE_INVALID: errors.CasInvalid,
    Status.RANGE_SCAN_CANCELLED: errors.RangeScanCancelled,
    Status.VBUUID_NOT_EQUAL: errors.VbuuidNotEqual,
    Status.NOT_LOCKED: errors.NotLocked,
    Status.AUTH_STALE: errors.AuthenticationStale,
    Status.AUTH_ERROR: errors.AuthenticationFailed,
    Status.ERANGE: errors.SeqnoOutOfRange,
    Status.ROLLBACK: errors.RollbackRequired,
    Status.EACCESS: errors.AccessDenied,
    Status.UNKNOWN_FRAME_INFO: errors.UnknownFrameInfo,
    Status.UNKNOWN_COMMAND: errors.UnknownCommand,
    Status.ENOMEM: errors.OutOfMemory,
    Status.NOT_SUPPORTED: errors.NotSupported,
    Status.EINTERNAL: errors.InternalError,
    Status.EBUSY: errors.Busy,
    Status.ETMPFAIL: errors.TemporaryFailure,
    Status.XATTR_EINVAL: errors.XattrInvalid,
    Status.UNKNOWN_COLLECTION: errors.UnknownCollection,
    Status.NO_COLLECTIONS_MANIFEST: errors.NoCollectionsManifest,
    Status.CANNOT_APPLY_MANIFEST: errors.ManifestRefused,
    Status.MANIFEST_IS_AHEAD: errors.ManifestIsAhead,
    Status.UNKNOWN_SCOPE: errors.UnknownScope,
    Status.DCP_STREAMID_INVALID: errors.StreamIdInvalid,
    Status.DURABILITY_INVALID_LEVEL: errors.DurabilityLevelInvalid,
    Status.DURABILITY_IMPOSSIBLE: errors.DurabilityImpossible,
    Status.SYNC_WRITE_IN_PROGRESS: errors.SyncWriteInProgress,
    Status.SYNC_WRITE_AMBIGUOUS: errors.SyncWriteAmbiguous,
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: errors.SyncWriteReCommitInProgress,
    **{
        status: errors.SubdocumentError
        for status in Status
        if status.name.startswith("SUBDOC_") and status not in SUCCESSFUL
    },
}

NODE = Path(errors.__file__).parent / "node"


def statuses_named_by_the_node() -> set[Status]:
    named = set()
    for path in NODE.rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "Status":
                named.add(Status[part.attr])
    return named


def test_every_status_that_the_node_sends_has_a_class() -> None:
    named = statuses_named_by_the_node()
    assert Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS in named
    assert named - SUCCESSFUL <= STATUS_ERRORS.keys()


def test_the_table_names_every_status_class_once() -> None:
    assert STATUS_ERRORS == EXPECTED_STATUS_ERRORS
    assert {*STATUS_ERRORS.values()} == {cls for cls in ALL_ERRORS if cls.__base__ is StatusError}
    assert not SUCCESSFUL & STATUS_ERRORS.keys()


@each(("status", "cls"), EXPECTED_STATUS_ERRORS.items())
def test_a_status_has_its_class(status: Status, cls: type[StatusError]) -> None:
    error = status_error(status)
    assert type(error) is cls
    assert error.status == status
    assert f"0x{status:02x}" in str(error)


@pytest.mark.parametrize("status", [0x7777, 0x25, Status.CONFIG_ONLY])
def test_a_status_without_a_class_is_kept(status: int) -> None:
    error = status_error(status, "the server said so")
    assert type(error) is StatusError
    assert error.status == status
    assert error.reason == "the server said so"


def test_retries_are_told_by_the_classes() -> None:
    retriable = {Status(status).name for status, cls in STATUS_ERRORS.items() if cls.retriable}
    assert retriable == {
        "NOT_MY_VBUCKET", "LOCKED", "ENOMEM", "EBUSY", "ETMPFAIL", "MANIFEST_IS_AHEAD", "SYNC_WRITE_IN_PROGRESS",
        "SYNC_WRITE_RE_COMMIT_IN_PROGRESS",
    }  # fmt: skip
    stale = {Status(status).name for status, cls in STATUS_ERRORS.items() if cls.stale_topology}
    assert stale == {"NOT_MY_VBUCKET"}


@each("cls", ALL_ERRORS)
def test_an_error_can_be_raised_and_caught_as_a_headwater_error(cls: type[HeadwaterError]) -> None:
    with pytest.raises(HeadwaterError) as raised:
        raise make(cls)
    assert type(raised.value) is cls


def test_what_is_down_may_come_back() -> None:
    retriable = {cls for cls in ALL_ERRORS if cls.retriable and not issubclass(cls, StatusError)}
    assert retriable == {
        ConnectionFailed,
        errors.HostUnreachable,
        errors.NoAnswer,
        errors.ConnectionClosed,
        errors.TlsBroken,
    }


@each("cls", ALL_ERRORS)
def test_every_error_can_be_told_in_other_words(cls: type[HeadwaterError]) -> None:
    error = make(cls)
    reworded = error.reworded("other words")
    assert type(reworded) is cls
    assert (reworded.reason, reworded.hint) == ("other words", error.hint)
    assert str(reworded) == (f"other words. {error.hint}" if error.hint else "other words")
    assert {**vars(reworded), "reason": error.reason} == vars(error)
    assert error.reason != "other words"


@each("cls", ALL_ERRORS)
def test_every_error_survives_pickling(cls: type[HeadwaterError]) -> None:
    error = make(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)

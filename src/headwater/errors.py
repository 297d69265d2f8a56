"""The whole error tree.

Every error a user can meet is a `HeadwaterError`. Its families:

* `RemoteProtocolError`: the peer's bytes are not the protocol. The connection is of no further use.
* `LocalProtocolError`: our own caller asked for something the protocol does not allow. Nothing was sent.
* `StatusError`: the peer understood the request and refused it. `STATUS_ERRORS` has a class for each status, and one
  for all statuses about a path into a document; a status that is not in the table still gets a `StatusError` that
  keeps its number.
* `StoreError`: the data on disk can't be read or written.
* `LakeError`: the tables that changes are landed in can't be used, or do not match what is to be landed.
* `CatalogError`: a catalog does not answer, or does not register a table.
* `CaptureError`: the input of `headwater decode` is not a capture.
* `InvalidInput`: what the user gave can't be used: a connection string, a key template, a document.
* `CheckpointError`: the position to resume from can't be saved, or is not in the bucket's history.
* `ConnectionFailed`: the peer can't be reached, or the connection to it broke.
* `GroupError`: the members of a consumer group can't agree on who reads what.
* `Overtaken`: two commands were changing one cluster.

Every message ends with what to do next, which is also in `hint` so that programs can show it their own way.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import ClassVar, Self


class HeadwaterError(Exception):
    """The root of all errors raised by Headwater.

    `retriable` means that the same attempt may succeed later. Retry loops check it, and have no lists of their own.
    """

    retriable: ClassVar[bool] = False

    def __init__(self, reason: str, *, hint: str = "") -> None:
        self.reason = reason
        self.hint = hint
        super().__init__(f"{reason}. {hint}" if hint else reason)

    def reworded(self, reason: str) -> Self:
        """A copy of the error with another reason, for example one that names the host it came from."""
        changed = copy(self)
        changed.reason = reason
        changed.args = (f"{reason}. {self.hint}" if self.hint else reason,)
        return changed

    def __reduce__(self) -> tuple[Callable[..., HeadwaterError], tuple[object, ...]]:
        # Spark's processes exchange errors by pickling, and the constructors take other arguments than the errors keep.
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(cls: type[HeadwaterError], args: tuple[object, ...], state: dict[str, object]) -> HeadwaterError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


# --- what came from the peer is not the protocol ------------------------------------------------------------------


class RemoteProtocolError(HeadwaterError):
    """Bytes from the peer that break the protocol, with the offset of the fault and the reason.

    `offset` counts from the first byte of what was being decoded: the connection for a frame buffer, the frame for a
    message, the buffer for a bulk kernel.
    """

    default_hint: ClassVar[str] = "Close the connection: what follows cannot be trusted"

    def __init__(self, reason: str, *, offset: int = 0, hint: str = "") -> None:
        self.offset = offset
        super().__init__(f"{reason} (at byte {offset})", hint=hint or self.default_hint)


class BadMagic(RemoteProtocolError):
    """The first byte of a frame is none of the six magics."""

    default_hint = "Check that the port speaks the Couchbase key-value protocol, and TLS on both ends or on neither"


class WrongProtocol(BadMagic):
    """The server speaks another protocol, such as HTTP."""


class LengthMismatch(RemoteProtocolError):
    """The lengths in a header contradict each other, or the layout of the message they belong to."""


class FrameTooLarge(RemoteProtocolError):
    """A header announces a body above the limit; not one byte of the body was buffered."""

    default_hint = "Raise the frame limit if documents of this size are expected, else close the connection"


class TruncatedFrame(RemoteProtocolError):
    """The bytes end inside a frame."""

    default_hint = "Send the rest of the bytes, or check that the capture was not cut"


class UnknownOpcode(RemoteProtocolError):
    """No message has this opcode."""

    default_hint = "Answer UNKNOWN_COMMAND, or skip the frame: its length is known"

    def __init__(self, opcode: int, *, offset: int = 1) -> None:
        self.opcode = opcode
        super().__init__(f"unknown opcode 0x{opcode:02x}", offset=offset)


class MalformedMessage(RemoteProtocolError):
    """A well-framed message whose extras, key or value do not fit its opcode."""

    default_hint = "Answer EINVAL: the frame itself is sound and the connection can live on"


class MalformedFrameInfo(MalformedMessage):
    """Flexible framing extras that do not parse."""


class MalformedLeb128(MalformedMessage):
    """A collection id that is cut off, longer than 32 bits, or not in its shortest form."""


class MalformedXattrs(MalformedMessage):
    """An extended-attribute section whose lengths or terminators are wrong."""


class MalformedSnappy(MalformedMessage):
    """A value marked as snappy that is not, or that would inflate beyond the limit."""


class MalformedJson(MalformedMessage):
    """A value that is not JSON of the required form."""


class MalformedSystemEvent(MalformedMessage):
    """A system event whose value does not fit its version."""


class UnexpectedMessage(RemoteProtocolError):
    """A sound message that the state of the connection or stream does not allow."""

    default_hint = "Close the connection: the two ends no longer agree on its state"


class SnapshotViolation(RemoteProtocolError):
    """A change outside its snapshot, or a seqno that does not rise."""

    default_hint = "Close the stream and resume from the last complete snapshot"


class CaptureError(HeadwaterError):
    """Input that is not a capture, or that can't be read to its end. The frames before are valid."""


# --- what our own caller asked for is not the protocol ------------------------------------------------------------


class LocalProtocolError(HeadwaterError):
    """A call that the protocol does not allow in this state or with these values."""


# --- what the user gave ------------------------------------------------------------------------------------------


class InvalidInput(HeadwaterError):
    """The input of the user is invalid."""


class InvalidConnectionString(InvalidInput):
    """A connection string that is not `couchbase://host[:port][,host…]/bucket`."""


class NoSuchNetwork(InvalidInput):
    """The nodes have no addresses on the requested network."""


class InvalidKeyTemplate(InvalidInput):
    """An invalid template for keys."""


class InvalidDocument(InvalidInput):
    """A document to write that is not JSON, or that yields no key. The documents before it have been written."""


class InvalidColumns(InvalidInput):
    """Invalid columns for the fields of documents, or columns that a table can't have."""


class InvalidOffsets(InvalidInput):
    """Offsets that can't be read, or that no bucket can have."""


class OffsetsTooNew(InvalidOffsets):
    """Offsets that a newer version of Headwater has written."""


# --- the position to resume from ----------------------------------------------------------------------------------


class CheckpointError(HeadwaterError):
    """A checkpoint can't be used."""


class CheckpointFailed(CheckpointError):
    """A checkpoint can't be read or written. The last saved state is unchanged."""


class CheckpointInUse(CheckpointFailed):
    """Another process uses this checkpoint."""


class CheckpointOfOtherBucket(CheckpointError):
    """The checkpoint belongs to another bucket, or to a deleted one of the same name."""


class CheckpointAhead(CheckpointError):
    """The checkpoint is ahead of the server's history in a vbucket."""

    default_hint: ClassVar[str] = (
        "The server has lost changes or was restored from an older copy: start from the beginning with a new checkpoint"
    )

    def __init__(self, *, vbucket: int, seqno: int, high_seqno: int, hint: str = "") -> None:
        self.vbucket = vbucket
        self.seqno = seqno
        self.high_seqno = high_seqno
        super().__init__(
            f"the checkpoint is at seqno {seqno} of vbucket {vbucket}, and the server's history ends at {high_seqno}",
            hint=hint or self.default_hint,
        )


class BucketReplaced(CheckpointError):
    """The bucket was deleted during a read, and another one has its name."""

    def __init__(self, bucket: str) -> None:
        super().__init__(
            f"bucket {bucket!r} was deleted and made again while it was being read",
            hint="Start from the beginning with a new checkpoint: the old seqnos mean nothing in the new bucket",
        )


class ReadRolledBack(CheckpointError):
    """A failover has taken back a part of the range to read."""


# --- clusters -----------------------------------------------------------------------------------------------------


class Overtaken(HeadwaterError):
    """Another command is changing the cluster, or was faster. This one has stopped and left nothing half done."""

    def __init__(self, node: str, *, revision: int) -> None:
        self.revision = revision
        super().__init__(
            f"another command is changing the cluster: {node} has its config {revision}",
            hint="Let that one come to its end, look at `headwater cluster status`, and run this one again if need be",
        )


# --- connections to the peer --------------------------------------------------------------------------------------


class ConnectionFailed(HeadwaterError):
    """The peer can't be reached, or the connection to it broke."""

    retriable = True


class HostUnreachable(ConnectionFailed):
    """The host does not exist, is unreachable, or nothing listens there."""


class NoAnswer(ConnectionFailed):
    """The peer did not answer in time."""


class ConnectionClosed(ConnectionFailed):
    """The peer closed the connection before it answered."""


class TlsFailed(ConnectionFailed):
    """The two ends can't agree on TLS, or one does not trust the other's certificate."""

    retriable = False


class TlsBroken(TlsFailed):
    """The connection ended during the TLS handshake. The port may not use TLS, or the server may be restarting."""

    retriable = True


# --- consumer groups ----------------------------------------------------------------------------------------------


class GroupError(HeadwaterError):
    """The members of a consumer group can't agree on who reads what."""


class GroupFull(GroupError):
    """The group has the maximum number of members, and all are alive."""


class GroupDocumentInvalid(GroupError):
    """The shared document of the group is invalid, or belongs to another bucket."""


class MemberReplaced(GroupError):
    """Another process has joined the group with the same member id, and has replaced this one."""


# --- the data on disk ---------------------------------------------------------------------------------------------


class StoreError(HeadwaterError):
    """The data can't be read or written."""


class StoreFull(StoreError):
    """The disk is full. Nothing was written, and nothing else has changed."""


class DataInUse(StoreError):
    """Another process uses the data."""


class DataDamaged(StoreError):
    """The files are not what the engine wrote."""


class VBucketDamaged(DataDamaged):
    """The stored data of one vbucket is not what was written. That vbucket is stopped; the others continue."""

    default_hint: ClassVar[str] = (
        "A replica is fetched again from its active copy by itself; where this is the active copy, fail its node over "
        "to a replica and add the node again, or restore a backup"
    )

    def __init__(self, reason: str, *, vbucket: int, hint: str = "") -> None:
        self.vbucket = vbucket
        super().__init__(reason, hint=hint or self.default_hint)


class DataTooNew(StoreError):
    """The data was written by a newer version of Headwater."""


# --- the tables that changes are landed in ------------------------------------------------------------------------


class LakeError(HeadwaterError):
    """The tables can't be used, or do not match what is being landed. They are unchanged."""


class LakeOfOtherBucket(LakeError):
    """The tables belong to another bucket, or to a deleted one of the same name."""


class LakeOutOfStep(LakeError):
    """The changes to land do not begin where the tables end."""


class LakeInUse(LakeError):
    """Another process has written to the tables at the same time."""


class LakeTaken(LakeInUse):
    """Another landing has landed a batch in the tables at the same time. Only one of the two continues."""


class LakeUnreachable(LakeError):
    """The store of the tables did not answer, or rejected requests for a while. A retry may succeed."""


class LakeFull(LakeError):
    """The disk of the tables is full. The tables are unchanged, and a retry succeeds once there is space."""


class LakeGone(LakeError):
    """The tables were moved away, removed or replaced while they were in use. Nothing was written in their place."""


class LakeDamaged(LakeError):
    """The tables are not what Headwater wrote."""


class LakeTooNew(LakeError):
    """The tables were made by a newer version of Headwater."""


class TablesSetAside(LakeError):
    """Everything has landed except for some tables, each with its own fault: a damaged log, a name that can't be a
    folder. The table `changes` has what they lack.
    """


class ColumnsChanged(LakeError):
    """A table has other typed columns than requested."""


class NoConsistentCut(LakeError):
    """The bucket can't be landed as of one moment: its server lacks versions, or no such moment was found."""


class QueryFailed(LakeError):
    """Spark ended a query with its own error."""


class SparkEnded(QueryFailed):
    """Spark's driver has ended: nothing can run until another one is started."""


class CatalogError(HeadwaterError):
    """A catalog does not register a table. The landing continues, and tries again."""


class CatalogUnreachable(CatalogError):
    """A catalog does not answer, or rejects this user."""


# --- what the peer answered ---------------------------------------------------------------------------------------


STATUS_ERRORS: dict[int, type[StatusError]] = {}
"""The class of each status that has one."""


class StatusError(HeadwaterError):
    """The peer answered with a status other than success.

    `stale_topology` means that the client should read the cluster map again before the next attempt.
    """

    stale_topology: ClassVar[bool] = False
    default_hint: ClassVar[str] = "See the server's log for the connection"

    def __init_subclass__(cls, *, status: int | None = None) -> None:
        if status is not None:
            STATUS_ERRORS[status] = cls

    def __init__(self, status: int, reason: str = "", *, hint: str = "") -> None:
        self.status = status
        super().__init__(reason or f"the server answered with status 0x{status:02x}", hint=hint or self.default_hint)


class KeyNotFound(StatusError, status=0x01):
    default_hint = "Check the key, and that the document has not expired"


class UnknownBucket(KeyNotFound):
    default_hint = "Check the bucket's name: upper and lower case differ"


class BucketNotReady(UnknownBucket):
    """The bucket existed before. A server that has just started answers before it has created its buckets."""

    retriable = True
    default_hint = "Wait until the server has started its buckets; if this one was dropped, name another"


class KeyExists(StatusError, status=0x02):
    default_hint = "Read the document again for its newest CAS, or close the stream that is already open"


class ValueTooLarge(StatusError, status=0x03):
    default_hint = "A document has at most 20 MiB, including its extended attributes: make it smaller, or split it"


class InvalidArguments(StatusError, status=0x04):
    default_hint = "The request is malformed for this server: check its version and what was negotiated"


class NotStored(StatusError, status=0x05):
    default_hint = "Write the document first: there is none to append or prepend to"


class NotANumber(StatusError, status=0x06):
    default_hint = "Write the document as a decimal number of 64 bits, or count with another key"


class NotMyVBucket(StatusError, status=0x07):
    retriable = True
    stale_topology = True
    default_hint = "Read the cluster map again and send the request to the vbucket's node"


class NoBucket(StatusError, status=0x08):
    default_hint = "Select a bucket before the first command"


class Locked(StatusError, status=0x09):
    retriable = True
    default_hint = "Wait for the lock to expire, or unlock the document with its CAS"


class StreamNotFound(StatusError, status=0x0A):
    default_hint = "Open the stream again: it has ended, or belongs to another connection"


class OpaqueNoMatch(StatusError, status=0x0B):
    default_hint = "Use the opaque of the stream request in all messages of the stream"


class NotLocked(StatusError, status=0x0E):
    default_hint = "Continue: the document is not locked, or its lock has expired"


class CasInvalid(StatusError, status=0x0F):
    default_hint = "Correct the clock of the machine that the CAS comes from: it is too far in the future"


class AuthenticationStale(StatusError, status=0x1F):
    default_hint = "Authenticate again"


class AuthenticationFailed(StatusError, status=0x20):
    default_hint = "Check the user name and the password"


class SeqnoOutOfRange(StatusError, status=0x22):
    default_hint = "Start must not exceed end, and must be in the given snapshot"


class RollbackRequired(StatusError, status=0x23):
    default_hint = "Roll back to the seqno in the response and request the stream again"


class AccessDenied(StatusError, status=0x24):
    default_hint = "Give the user the role that the command needs on this bucket"


class UnknownFrameInfo(StatusError, status=0x80):
    default_hint = "This server does not support the framing extras of the request: check its version"


class UnknownCommand(StatusError, status=0x81):
    default_hint = "This server does not support the command: check its version"


class OutOfMemory(StatusError, status=0x82):
    retriable = True
    default_hint = "The server is short of memory: wait and try again"


class NotSupported(StatusError, status=0x83):
    default_hint = "With xattrs or collections, enable noop on the connection first"


class InternalError(StatusError, status=0x84):
    default_hint = "The server has failed, not the request: check its log"


class Busy(StatusError, status=0x85):
    retriable = True
    default_hint = "Wait and try again"


class TemporaryFailure(StatusError, status=0x86):
    retriable = True
    default_hint = "Wait and try again"


class XattrInvalid(StatusError, status=0x87):
    default_hint = "Check the name of the extended attribute: 1 to 16 bytes, the first of which is a letter, _ or $"


class UnknownCollection(StatusError, status=0x88):
    default_hint = "Check the collection's name or id: it may have been dropped"


class NoCollectionsManifest(StatusError, status=0x89):
    default_hint = "The server has no collections yet: create one, or name none"


class ManifestRefused(StatusError, status=0x8A):
    default_hint = "Read the collections manifest again, and apply the change to it: there is a newer one"


class ManifestIsAhead(StatusError, status=0x8B):
    retriable = True
    default_hint = "The vbucket has not seen this collections manifest yet: wait briefly and try again"


class UnknownScope(StatusError, status=0x8C):
    default_hint = "Check the scope's name or id: it may have been dropped"


class StreamIdInvalid(StatusError, status=0x8D):
    default_hint = "Pass a sid in every stream request if enable_stream_id is on, and in none if it is off"


class DurabilityLevelInvalid(StatusError, status=0xA0):
    default_hint = "Use majority, majority and persist on the active node, or persist to majority"


class DurabilityImpossible(StatusError, status=0xA1):
    default_hint = "There are too few replicas for this durability level"


class SyncWriteInProgress(StatusError, status=0xA2):
    retriable = True
    default_hint = "Another durable write on this key is in progress: wait and try again"


class SyncWriteAmbiguous(StatusError, status=0xA3):
    default_hint = "Read the document to find out whether the write took place"


class SyncWriteReCommitInProgress(StatusError, status=0xA4):
    retriable = True
    default_hint = "The replicas are receiving the last durable write on this key again: wait and try again"


class RangeScanCancelled(StatusError, status=0xA5):
    default_hint = "Create the scan again: it was cancelled, or took too long"


class VbuuidNotEqual(StatusError, status=0xA8):
    default_hint = "Use a mutation token of this branch of the history, or scan without one"


class SubdocumentError(StatusError):
    default_hint = "Compare the path and the value with the document"


# All of these are about a path into a document. The ones left out are successes with additional information.
STATUS_ERRORS.update(dict.fromkeys((*range(0xC0, 0xCC), *range(0xCE, 0xD3), 0xD4), SubdocumentError))


def status_error(status: int, reason: str = "") -> StatusError:
    """The error for a status; a number that is not in the table becomes a plain `StatusError` that keeps it."""
    return STATUS_ERRORS.get(status, StatusError)(status, reason)

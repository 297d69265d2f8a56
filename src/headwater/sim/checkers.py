"""The checkers of a run: what consumers hold, the rules for their rows and for streams, and what must be stored.

The actors and `run` call the checkers, which read the store's frames and the writers' log. They share only the
typed codec with the code that they judge, and know neither the world nor its actors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from headwater.client.offsets import Offsets
from headwater.protocol.features import WITH_COLLECTIONS, Magic, Opcode
from headwater.protocol.frames import Frame, FrameBuffer, decode_frames
from headwater.protocol.manifest import CollectionDropped, decode_event
from headwater.protocol.messages import dcp_changes, decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_streams import StreamRequest
from headwater.protocol.status import Status
from headwater.sim.network import Tap
from headwater.store.bucket import Bucket

# --- what a consumer holds: the changes it has seen, vbucket by vbucket, from which its documents follow --------------
#
# The state follows the rows and knows nothing of the client. A rollback removes everything above its seqno.


Row = Mapping[str, Any]
Key = tuple[int, bytes]
"""Collection and key."""
Document = tuple[int, int, bytes]
"""Seqno, CAS and value."""
Kept = tuple[int, Key | None, Document | int | None]
"""Seqno, key, and the result: a document, or None after a removal; without a key, the id of a dropped collection."""

_REMOVALS = frozenset({"deletion", "expiration"})
_OTHER_EVENTS = frozenset({"collection_created", "collection_modified", "scope_created", "scope_dropped"})


@dataclass(slots=True)
class ConsumerState:
    """Changes by vbucket, in order."""

    kept: dict[int, list[Kept]] = field(default_factory=dict)
    rollbacks: int = 0

    def copy(self) -> ConsumerState:
        return ConsumerState({vbucket: list(kept) for vbucket, kept in self.kept.items()}, self.rollbacks)

    def apply(self, rows: Iterable[Row], *, ignores_rollbacks: bool = False) -> None:
        for row in rows:
            kept = self.kept.setdefault(row["vbucket"], [])
            op, seqno = row["op"], row["seqno"]
            if op == "rollback":
                self.rollbacks += 1
                if not ignores_rollbacks:
                    while kept and kept[-1][0] > seqno:
                        kept.pop()
            elif op == "mutation":
                kept.append((seqno, (row["collection_id"], row["key"]), (seqno, row["cas"], row["value"])))
            elif op in _REMOVALS:
                kept.append((seqno, (row["collection_id"], row["key"]), None))
            elif op == "collection_dropped":
                kept.append((seqno, None, row["collection_id"]))
            else:
                assert op in _OTHER_EVENTS, f"{op!r} is not known"

    def documents(self, vbucket: int) -> dict[Key, Document]:
        return documents_of(self.kept.get(vbucket, ()))


def documents_of(changes: Iterable[Kept]) -> dict[Key, Document]:
    """Return the documents that result from changes, applied in order."""
    documents: dict[Key, Document] = {}
    apply_changes(documents, changes)
    return documents


def apply_changes(documents: dict[Key, Document], changes: Iterable[Kept]) -> None:
    """Apply later changes to documents, in order."""
    for _, key, what in changes:
        if key is None:
            for gone in [other for other in documents if other[0] == what]:
                del documents[gone]
        elif what is None:
            documents.pop(key, None)
        else:
            assert isinstance(what, tuple)
            documents[key] = what


# --- the rules for the rows of one consumer, over all its lives -------------------------------------------------------
#
# * The seqnos of a vbucket rise, except after a rollback, which must take back something.
# * A change lies within its snapshot, which has a key only once unless all versions were requested.
# * Nothing is read on a branch that another one has replaced.


@dataclass(slots=True)
class _VBucket:
    seqno: int = 0
    vbuuid: int = 0
    past_vbuuids: tuple[int, ...] = ()
    snapshot: tuple[int, int] = (0, 0)
    keys: frozenset[tuple[int, bytes]] = frozenset()


@dataclass(slots=True)
class RowRules:
    vbuckets: dict[int, _VBucket] = field(default_factory=dict)

    def copy(self) -> RowRules:
        """Return a copy for a checkpoint: the rows after it may arrive again."""
        return RowRules({number: replace(vbucket) for number, vbucket in self.vbuckets.items()})

    def check(self, rows: Iterable[Row], *, all_versions: bool) -> None:
        for row in rows:
            vbucket = self.vbuckets.setdefault(row["vbucket"], _VBucket())
            if row["op"] == "rollback":
                _check_rollback(vbucket, row)
            else:
                _check_change(vbucket, row, all_versions=all_versions)


def _check_change(vbucket: _VBucket, row: Row, *, all_versions: bool) -> None:
    seqno, snapshot = row["seqno"], (row["snapshot_start"], row["snapshot_end"])
    assert seqno > vbucket.seqno, f"seqno {seqno} after {vbucket.seqno}: {row}"
    assert snapshot[0] <= seqno <= snapshot[1], f"a change outside its snapshot: {row}"
    _check_branch(vbucket, row)
    if snapshot != vbucket.snapshot:
        vbucket.snapshot, vbucket.keys = snapshot, frozenset()
    if row["key"] is not None and not all_versions:
        key = (row["collection_id"], row["key"])
        assert key not in vbucket.keys, f"a key is twice in a snapshot: {row}"
        vbucket.keys |= {key}
    vbucket.seqno = seqno


def _check_rollback(vbucket: _VBucket, row: Row) -> None:
    said = json.loads(row["value"])
    assert row["seqno"] < said["from_seqno"], f"a rollback that takes nothing back: {row}"
    assert said["from_seqno"] >= vbucket.seqno, f"a rollback from before {vbucket.seqno}: {row}"
    _check_branch(vbucket, row)
    vbucket.seqno = row["seqno"]
    vbucket.snapshot, vbucket.keys = (row["seqno"], row["seqno"]), frozenset()


def _check_branch(vbucket: _VBucket, row: Row) -> None:
    vbuuid = row["vbuuid"]
    assert vbuuid not in vbucket.past_vbuuids, f"a branch that has ended: {row}"
    if vbuuid != vbucket.vbuuid:
        if vbucket.vbuuid:
            vbucket.past_vbuuids += (vbucket.vbuuid,)
        vbucket.vbuuid = vbuuid


# --- what was written and answered: everything needed to decide what must be stored at the end ------------------------


class KnownOutcome(Enum):
    UNDER_WAY = auto()
    ACKNOWLEDGED = auto()
    REFUSED = auto()
    """The write had no effect."""
    UNKNOWN = auto()
    """The write may have taken effect, or may do so later."""


@dataclass(slots=True, kw_only=True)
class Write:
    """One write. No value is written twice, so a value identifies its write."""

    value: bytes | None
    """None for a deletion."""
    is_durable: bool = False
    """Whether a majority of the copies had to have the write before it was acknowledged."""
    may_expire: bool = False
    began_s: float = 0.0
    """When the write was made: if it took effect at all, then after this."""
    ended_s: float | None = None
    """When its outcome was known: if it was acknowledged, it took effect before this."""
    outcome: KnownOutcome = KnownOutcome.UNDER_WAY


@dataclass(slots=True)
class WriteLog:
    by_key: dict[Key, list[Write]] = field(default_factory=dict)
    """In the order in which the writes began: each key has one writer, with one write in progress at a time."""

    def begin(self, key: Key, write: Write) -> Write:
        self.by_key.setdefault(key, []).append(write)
        return write

    def count(self, outcome: KnownOutcome) -> int:
        return sum(write.outcome is outcome for writes in self.by_key.values() for write in writes)


def _stored_messages(bucket: Bucket, vbucket: int, after_seqno: int = 0) -> Iterator[tuple[int, Message]]:
    """Yield the durable messages of a vbucket after a seqno, with their seqnos, which must rise."""
    reached = after_seqno
    for run in bucket.runs(vbucket, after_seqno=after_seqno):
        for frame in decode_frames(bytes(run)):
            message = decode_message(frame, WITH_COLLECTIONS)
            # In a stored abort, the first seqno is the abort's own.
            seqno = int(message.prepared_seqno if isinstance(message, dcp_changes.Abort) else message.seqno)  # type: ignore[attr-defined]
            assert seqno > reached, f"{type(message).__name__} {seqno} is stored after {reached} in vbucket {vbucket}"
            reached = seqno
            yield seqno, message


def stored_changes(bucket: Bucket, vbucket: int, *, after_seqno: int = 0) -> list[Kept]:
    """Return the durable changes of a vbucket after a seqno.

    Prepares and aborts have their own seqnos but change no document: a commit is stored as the mutation itself.
    """
    changes: list[Kept] = []
    for seqno, message in _stored_messages(bucket, vbucket, after_seqno):
        if isinstance(message, dcp_changes.Mutation):
            key = (int(message.collection_id or 0), bytes(message.key))
            changes.append((seqno, key, (seqno, int(message.cas), bytes(message.value))))
        elif isinstance(message, dcp_changes.Deletion | dcp_changes.Expiration):
            changes.append((seqno, (int(message.collection_id or 0), bytes(message.key)), None))
        elif isinstance(message, dcp_changes.SystemEvent):
            event = decode_event(message)
            if isinstance(event, CollectionDropped):
                changes.append((seqno, None, int(event.collection_id)))
    return changes


def visible_seqno(bucket: Bucket, vbucket: int) -> int:
    """Return the last seqno visible to a consumer that does not support durable writes."""
    seqnos = (
        seqno
        for seqno, message in _stored_messages(bucket, vbucket)
        if not isinstance(message, dcp_changes.Abort | dcp_changes.Prepare)
    )
    return max(seqnos, default=0)


def stored_documents(bucket: Bucket, vbucket: int) -> dict[Key, Document]:
    return documents_of(stored_changes(bucket, vbucket))


def differences(whose: str, held: dict[Key, Document], stored: dict[Key, Document]) -> list[str]:
    """Return a line for each key for which a consumer or a copy has something else than is stored."""
    keys = sorted(key for key in held.keys() | stored.keys() if held.get(key) != stored.get(key))
    return [f"{whose} has {held.get(key)} for {key}, and stored is {stored.get(key)}" for key in keys]


def index_differences(bucket: Bucket, vbucket: int) -> list[str]:
    """Return where the index, which is used to read documents, disagrees with the stored changes."""
    wrong = []
    for (collection, key), (seqno, cas, _) in stored_documents(bucket, vbucket).items():
        entry = bucket.find(vbucket, collection, key)  # type: ignore[arg-type]
        if entry is None or entry.is_deleted or (entry.seqno, entry.cas) != (seqno, cas):
            wrong.append(f"the index has {entry} for {key!r}, and stored is seqno {seqno}")
    return wrong


class Needs(Enum):
    """The condition under which a write is permanent."""

    ACKNOWLEDGEMENT = auto()
    MAJORITY = auto()
    """A failover may have removed writes that the copies did not have."""
    NOTHING = auto()
    """A drill may have removed any write."""


def lost_writes(log: WriteLog, stored: dict[Key, Document], needs: Mapping[Key, Needs]) -> list[str]:
    """Return a complaint for each key whose stored value the acknowledged writes rule out."""
    wrong = []
    for key, writes in log.by_key.items():
        found = stored[key][2] if key in stored else None
        if not _is_allowed(writes, found, needs[key]):
            said = ", ".join(_shown(write) for write in writes[-6:])
            wrong.append(f"an acknowledged write of {key} is lost: {found!r} is there after {said}")
    return wrong


def _shown(write: Write) -> str:
    return f"{write.value!r} {'durable ' if write.is_durable else ''}{write.outcome.name}"


def _is_allowed(writes: list[Write], found: bytes | None, needs: Needs) -> bool:
    """Return whether a value is possible after these writes."""
    # A write of unknown outcome may take effect late, after writes that began later.
    may_be: set[bytes | None] = {write.value for write in writes if write.outcome is KnownOutcome.UNKNOWN}
    for write in reversed(writes):
        if write.outcome is KnownOutcome.REFUSED:
            continue
        may_be.add(write.value)
        if write.may_expire:
            may_be.add(None)
        if write.outcome is KnownOutcome.ACKNOWLEDGED and (
            needs is Needs.ACKNOWLEDGEMENT or (needs is Needs.MAJORITY and write.is_durable)
        ):
            return found in may_be
    return found is None or found in may_be


# --- during a run: a consumer between two snapshots holds what the server held at that seqno --------------------------
#
# By the end of a run, many wrong states have been overwritten. The server's history window has all versions, so the
# state that a consumer should hold at any time can be derived from it.


def history_differences(
    name: str,
    documents: Callable[[int], dict[Key, Document]],
    offsets: Offsets,
    active_bucket: Callable[[int], Bucket | None],
) -> Iterator[str]:
    """Yield where a consumer differs from the server's state at its offset, if the server still knows that state."""
    for vbucket, offset in offsets.offsets.items():
        bucket = active_bucket(vbucket)
        if bucket is None or not offset.is_complete or not _is_in_history(bucket, vbucket, offset.vbuuid, offset.seqno):
            continue
        then = documents_of(change for change in stored_changes(bucket, vbucket) if change[0] <= offset.seqno)
        held = documents(vbucket)
        for wrong in differences(name, _of_live_collections(bucket, held), _of_live_collections(bucket, then)):
            yield f"vbucket {vbucket} at seqno {offset.seqno}: {wrong}"


def _is_in_history(bucket: Bucket, vbucket: int, vbuuid: int, seqno: int) -> bool:
    facts = bucket.vbuckets.facts[vbucket]
    if facts is None or facts.failover_log.newest.vbuuid != vbuuid:
        return False
    return facts.history_start_seqno <= seqno <= bucket.vbuckets.durable_seqno(vbucket)


def _of_live_collections(bucket: Bucket, documents: dict[Key, Document]) -> dict[Key, Document]:
    """Return the documents of live collections: those of a dropped collection may disappear at any time."""
    live = {int(collection.id) for _, collection in bucket.manifest.collections()}
    return {key: document for key, document in documents.items() if key[0] in live}


# --- every DCP stream on the simulated network, frame by frame, with the typed codec ----------------------------------
#
# * A change lies within the last announced snapshot, and seqnos rise from one change to the next.
# * A snapshot starts where the stream is, and does not end before it starts.


_CHANGES = frozenset(
    {
        Opcode.DCP_MUTATION,
        Opcode.DCP_DELETION,
        Opcode.DCP_EXPIRATION,
        Opcode.DCP_SYSTEM_EVENT,
        Opcode.DCP_PREPARE,
        Opcode.DCP_COMMIT,
        Opcode.DCP_ABORT,
        Opcode.DCP_SEQNO_ADVANCED,
    }
)
_STREAM = _CHANGES | {Opcode.DCP_SNAPSHOT_MARKER}


@dataclass(slots=True)
class _TappedStream:
    seqno: int
    snapshot: tuple[int, int] | None = None


@dataclass(slots=True)
class _TappedConnection:
    name: str
    from_server: FrameBuffer = field(default_factory=FrameBuffer)
    from_client: FrameBuffer = field(default_factory=FrameBuffer)
    asked: dict[int, StreamRequest] = field(default_factory=dict)
    streams: dict[int, _TappedStream] = field(default_factory=dict)
    is_lost: bool = False


class StreamTap(Tap):
    """Checks all DCP streams. Complaints go to `complain`."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self.changes = 0
        self._complain = complain
        self._connections: dict[int, _TappedConnection] = {}

    def connected(self, connection: int, *, client: str, server: str) -> None:
        self._connections[connection] = _TappedConnection(f"{server} to {client}")

    def closed(self, connection: int) -> None:
        self._connections.pop(connection, None)

    def written(self, connection: int, data: bytes, *, by_server: bool) -> None:
        known = self._connections.get(connection)
        if known is None or known.is_lost:
            return
        buffer = known.from_server if by_server else known.from_client
        buffer.receive_data(data)
        try:
            for frame in buffer.frames():
                self._look(known, frame, by_server=by_server)
        except AssertionError as error:
            known.is_lost = True
            self._complain(f"{known.name}: {error}")

    def _look(self, connection: _TappedConnection, frame: Frame, *, by_server: bool) -> None:
        opcode = frame.opcode
        if frame.magic in (Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE):
            return
        if opcode == Opcode.DCP_STREAM_REQUEST:
            self._look_at_request(connection, frame)
        elif frame.magic.is_request and by_server and opcode in _STREAM:
            self._look_at_change(connection, frame)
        elif frame.magic.is_request and by_server and opcode == Opcode.DCP_STREAM_END:
            connection.streams.pop(frame.opaque, None)

    def _look_at_request(self, connection: _TappedConnection, frame: Frame) -> None:
        if frame.magic.is_request:
            request = decode_message(frame, WITH_COLLECTIONS)
            assert isinstance(request, StreamRequest)
            connection.asked[frame.opaque] = request
        elif frame.specific == Status.SUCCESS and frame.opaque in connection.asked:
            connection.streams[frame.opaque] = _TappedStream(int(connection.asked[frame.opaque].start_seqno))

    def _look_at_change(self, connection: _TappedConnection, frame: Frame) -> None:
        stream = connection.streams.get(frame.opaque)
        if stream is None:
            return
        message = decode_message(frame, WITH_COLLECTIONS)
        if isinstance(message, dcp_changes.SnapshotMarker):
            start, end = int(message.start_seqno), int(message.end_seqno)
            assert max(start, stream.seqno) <= end, f"the snapshot {start} to {end} at seqno {stream.seqno}"
            stream.snapshot = (start, end)
            return
        self.changes += 1
        seqno = int(getattr(message, "seqno", 0) or getattr(message, "commit_seqno", 0) or message.abort_seqno)  # type: ignore[attr-defined]
        name = type(message).__name__
        assert seqno > stream.seqno, f"{name} {seqno} comes after {stream.seqno} in vbucket {frame.specific}"
        assert stream.snapshot is not None, f"{name} {seqno} comes before any snapshot"
        start, end = stream.snapshot
        assert start <= seqno <= end, f"{name} {seqno} is outside its snapshot, {start} to {end}"
        stream.seqno = seqno

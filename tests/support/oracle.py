"""What a correct consumer holds: a dict of documents, and all versions it has seen, to be able to roll back.

This is the minimum for a sink of changes. It knows nothing of the client except the rows of its batches.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.client.kv_connection import KvConnection
from headwater.errors import KeyNotFound
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.manifest import CollectionDropped, decode_event
from headwater.protocol.messages import dcp_changes, dcp_streams, decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.documents import Get, GetResponse
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.status import Status
from support.fault_proxy import ProxiedBucket

Row = Mapping[str, Any]
"""A row of a batch, by column."""

Key = tuple[int, bytes]
"""The id of the collection, and the key in it."""

_REMOVALS = frozenset({"deletion", "expiration"})
_OTHER_EVENTS = frozenset({"collection_created", "collection_modified", "scope_created", "scope_dropped"})


@dataclass(frozen=True, slots=True)
class Document:
    """A version of a document, with enough of it to tell it from any other."""

    seqno: int
    cas: int
    value: bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """The effect of a row, to be repeated after a rollback."""

    seqno: int
    key: Key | None = None
    document: Document | None = None
    """None if the key was removed."""
    dropped_collection: int | None = None


class _VBucketState:
    def __init__(self) -> None:
        self.documents: dict[Key, Document] = {}
        self._kept: list[_Kept] = []

    def take(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._apply(kept)

    def roll_back(self, to_seqno: int) -> None:
        self._kept = [kept for kept in self._kept if kept.seqno <= to_seqno]
        self.documents = {}
        for kept in self._kept:
            self._apply(kept)

    def _apply(self, kept: _Kept) -> None:
        if kept.dropped_collection is not None:
            gone = [key for key in self.documents if key[0] == kept.dropped_collection]
            for key in gone:
                del self.documents[key]
        elif kept.key is not None and kept.document is None:
            self.documents.pop(kept.key, None)
        elif kept.key is not None and kept.document is not None:
            self.documents[kept.key] = kept.document


class ConsumerState:
    """Documents by key, over all vbuckets."""

    def __init__(self) -> None:
        self._vbuckets: defaultdict[int, _VBucketState] = defaultdict(_VBucketState)
        self.rollbacks: list[Row] = []
        self.rows = 0

    def apply(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows += 1
            self._apply_row(row)

    def _apply_row(self, row: Row) -> None:
        vbucket = self._vbuckets[row["vbucket"]]
        op, seqno = row["op"], row["seqno"]
        key = (row["collection_id"], row["key"])
        if op == "rollback":
            self.rollbacks.append(row)
            vbucket.roll_back(seqno)
        elif op == "mutation":
            document = Document(seqno, row["cas"], row["value"])
            vbucket.take(_Kept(seqno, key, document))
        elif op in _REMOVALS:
            vbucket.take(_Kept(seqno, key))
        elif op == "collection_dropped":
            vbucket.take(_Kept(seqno, dropped_collection=row["collection_id"]))
        else:
            assert op in _OTHER_EVENTS, f"nobody knows what {op!r} is"

    def documents(self) -> dict[Key, Document]:
        return {key: found for vbucket in self._vbuckets.values() for key, found in vbucket.documents.items()}


def differences(held: Mapping[Key, Document], stored: Mapping[Key, Document]) -> list[str]:
    """Return what a consumer has wrong, one line per key."""
    keys = sorted(key for key in held.keys() | stored.keys() if held.get(key) != stored.get(key))
    return [f"{key}: held {held.get(key)}, stored {stored.get(key)}" for key in keys]


# The rules for a client's batches, whatever happens to its connections. They share no code with the client.
#
# * Seqnos of a vbucket rise, also from one read to the next, except after a rollback.
# * A change lies within its snapshot, and a snapshot has a key once, unless all versions were requested.
# * Snapshots follow each other. If they are promised to be complete, nothing comes between the parts of one, and a
#   batch does not end inside one, unless it is too large for a batch. A consumer that has left inside a snapshot may
#   find a longer one, or none, when it returns.
# * Nothing is read on a branch that another one has replaced.
# * A rollback states truthfully where it starts, and precedes everything of the new branch.
# * The offsets are at or after the last change that was returned, never before it.


Offset = tuple[int, int, int, int]
"""vbuuid, seqno, snapshot start and end."""


def offsets_of_json(text: str) -> dict[int, Offset]:
    """Parse saved offsets in their documented format."""
    rows = json.loads(text)["offsets"]
    return {
        row[0]: (int(row[1]), int(row[2]), int(row[3]), int(row[4]) if len(row) > 4 else int(row[2])) for row in rows
    }


@dataclass(slots=True)
class _VBucket:
    seqno: int = 0
    """Everything up to this seqno was returned."""
    vbuuid: int = 0
    past_vbuuids: set[int] = field(default_factory=set)
    snapshot: tuple[int, int] = (0, 0)
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    """The keys in the snapshot."""
    was_left: bool = False
    """Whether the consumer has left and returned since the last change."""


class StreamRules:
    """Follows a consumer over all its reads, and raises if it breaks a rule."""

    def __init__(self, *, complete_snapshots: bool, whole_in_step: bool = False, all_versions: bool = False) -> None:
        self._complete_snapshots = complete_snapshots
        self._all_versions = all_versions
        self._whole_in_step = complete_snapshots and whole_in_step
        self._vbuckets: defaultdict[int, _VBucket] = defaultdict(_VBucket)

    def left(self) -> None:
        """Note that the consumer leaves. When it returns, it resumes from the last offsets."""
        for vbucket in self._vbuckets.values():
            vbucket.was_left = True

    def pretend_branch(self, vbucket: int, vbuuid: int) -> None:
        """Note that the consumer will claim to have read only this branch."""
        self._vbuckets[vbucket].vbuuid = vbuuid

    def check(self, rows: Iterable[Row], offsets: Mapping[int, Offset]) -> None:
        """Check a batch or a change, and the client's offsets after it."""
        for row in rows:
            vbucket = self._vbuckets[row["vbucket"]]
            if row["op"] == "rollback":
                self._check_rollback(vbucket, row)
            else:
                self._check_change(vbucket, row)
        for number, offset in offsets.items():
            self._check_offset(number, self._vbuckets[number], offset)

    def _check_change(self, vbucket: _VBucket, row: Row) -> None:
        seqno, snapshot = row["seqno"], (row["snapshot_start"], row["snapshot_end"])
        assert seqno > vbucket.seqno, f"seqno {seqno} after {vbucket.seqno}: {row}"
        assert snapshot[0] <= seqno <= snapshot[1], f"a change outside its snapshot: {row}"
        self._check_branch(vbucket, row["vbuuid"], row)
        if snapshot != vbucket.snapshot:
            self._check_next_snapshot(vbucket, snapshot, row)
            vbucket.snapshot, vbucket.keys = snapshot, set()
        if row["key"] is not None and not self._all_versions:
            key = (row["collection_id"], row["key"])
            assert key not in vbucket.keys, f"a key is twice in a snapshot: {row}"
            vbucket.keys.add(key)
        vbucket.seqno, vbucket.was_left = seqno, False

    def _check_next_snapshot(self, vbucket: _VBucket, snapshot: tuple[int, int], row: Row) -> None:
        assert snapshot[1] > vbucket.seqno, f"snapshots go back: {row}"
        if self._complete_snapshots and not vbucket.was_left:
            # The last seqnos of the snapshot may have been invisible.
            assert snapshot[0] >= vbucket.snapshot[1], f"{vbucket.snapshot} was not complete: {row}"

    def _check_branch(self, vbucket: _VBucket, vbuuid: int, where: object) -> None:
        assert vbuuid not in vbucket.past_vbuuids, f"a branch that has ended: {where}"
        if vbuuid != vbucket.vbuuid:
            if vbucket.vbuuid:
                vbucket.past_vbuuids.add(vbucket.vbuuid)
            vbucket.vbuuid = vbuuid

    def _check_rollback(self, vbucket: _VBucket, row: Row) -> None:
        told = json.loads(row["value"])
        # The client may have been beyond the last change: what lies between was invisible.
        assert told["from_seqno"] >= vbucket.seqno, f"a rollback from {told['from_seqno']} at {vbucket.seqno}: {row}"
        assert told["old_vbuuid"] == vbucket.vbuuid, f"a rollback of another branch than {vbucket.vbuuid}: {row}"
        assert told["new_vbuuid"] == row["vbuuid"], row
        assert row["seqno"] < told["from_seqno"], f"a rollback that takes nothing back: {row}"
        assert row["key"] is None, row
        self._check_branch(vbucket, row["vbuuid"], row)
        vbucket.seqno, vbucket.was_left = row["seqno"], False
        vbucket.snapshot, vbucket.keys = (row["seqno"], row["seqno"]), set()

    def _check_offset(self, number: int, vbucket: _VBucket, offset: Offset) -> None:
        vbuuid, seqno, start, end = offset
        where = f"the offset {offset} of vbucket {number}, which is at {vbucket.seqno}"
        assert start <= seqno <= end, where
        # That also holds here: an offset may be beyond the last change.
        assert seqno >= vbucket.seqno, where
        assert seqno == end or not self._whole_in_step, where
        if seqno:
            self._check_branch(vbucket, vbuuid, where)
        vbucket.seqno = seqno


# The contents of a node, read without the client: by plain streams with the typed codec, and key by key.


RECEIVE_BYTES = 256 * 1024


def streamed_documents(bucket: ProxiedBucket) -> dict[Key, Document]:
    """Return what a consumer without faults has at the end."""
    documents: dict[Key, Document] = {}
    with bucket.connect_directly() as connection:
        connection.request(dcp_streams.Open(key=b"what-is-stored"))
        connection.request(dcp_streams.Control(key=b"enable_noop", value=b"true"))
        requests = [
            dcp_streams.StreamRequest(vbucket=VBucketId(vbucket), opaque=vbucket, flags=dcp_streams.StreamFlags.LATEST)
            for vbucket in range(bucket.vbuckets)
        ]
        connection.sock.sendall(b"".join(request.encode() for request in requests))
        for message in _messages_until_end(connection, streams=bucket.vbuckets):
            _apply(documents, message)
    return documents


def _messages_until_end(connection: KvConnection, *, streams: int) -> Iterator[Message]:
    frames = FrameBuffer()
    while streams:
        data = connection.sock.recv(RECEIVE_BYTES)
        assert data, "the node has closed the connection"
        frames.receive_data(data)
        for frame in frames.frames():
            message = decode_message(frame, connection.outcome.negotiated)
            if isinstance(message, dcp_streams.StreamEnd):
                assert message.reason == dcp_streams.StreamEndReason.OK, message
                streams -= 1
            yield message


def _apply(documents: dict[Key, Document], message: Message) -> None:
    if isinstance(message, dcp_changes.Mutation):
        assert message.collection_id is not None
        documents[message.collection_id, message.key] = Document(message.seqno, message.cas, message.value)
    elif isinstance(message, dcp_changes.Deletion | dcp_changes.Expiration):
        assert message.collection_id is not None
        documents.pop((message.collection_id, message.key), None)
    elif isinstance(message, dcp_changes.SystemEvent):
        event = decode_event(message)
        if isinstance(event, CollectionDropped):
            # Every vbucket sends this event, and ids are never reused: the first event may drop all documents.
            for key in [key for key in documents if key[0] == event.collection_id]:
                del documents[key]
    elif not isinstance(
        message, dcp_changes.SnapshotMarker | dcp_changes.SeqnoAdvanced | dcp_streams.StreamEnd | dcp_streams.DcpNoop
    ):
        assert getattr(message, "status", None) == Status.SUCCESS, message


def read_documents(
    bucket: ProxiedBucket, connection: KvConnection, keys: Iterable[Key]
) -> dict[Key, tuple[int, bytes]]:
    """Read documents one by one. Returns CAS and value of those that exist. Reading removes expired documents."""
    found: dict[Key, tuple[int, bytes]] = {}
    for collection, key in keys:
        place = {"collection_id": CollectionId(collection), "key": key, "vbucket": bucket.vbucket_of(key)}
        try:
            answer = connection.request(Get(**place))
        except KeyNotFound:
            continue
        assert isinstance(answer, GetResponse)
        found[collection, key] = (answer.cas, answer.value)
    return found

"""A bucket: vbuckets, their documents and changes, and the commits that make them durable.

The way of a write: it is entered in the index and in the pending commit at once, so that the next request sees it.
`seal` closes the pending commit, `persist` writes it (this may run in another thread), `publish` makes it known.
Only then may the writer be answered and streams be told. One commit is in flight at a time; all that comes meanwhile
goes into the next, which is the group commit. Should persisting fail, `abandon` takes back everything that is not
durable, and every writer that waits is told so.

Published commits stay in memory, and in the journal, until they are settled into the vbuckets' blocks (`settling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from headwater.errors import LocalProtocolError
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.kernels.memory import Bytes
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid, encode_collection_id
from headwater.protocol.system_events import Event
from headwater.protocol.values import Datatype
from headwater.store.commits import Commit, PendingCommit, YoungCommits
from headwater.store.data_format import (
    MANIFEST,
    BucketFacts,
    Document,
    VBucketFacts,
    block_last_seqno,
    blocks_of,
    commit_key,
    decode_document,
    vbucket_key,
)
from headwater.store.engine import Change, Engine, Put, Table
from headwater.store.index import Entry, Index, index_run
from headwater.store.prepares import Prepares
from headwater.store.runs import as_run, find_seqno, first_seqno, last_seqnos, split_after
from headwater.store.vbuckets import VBuckets, demote, encode_stored_event, promote

_COMMIT_LOW = 0xFFFFFFFF

MakeValue = Callable[[Cas, Seqno], bytes]
"""A value that tells of its own write: it is made once the CAS and the seqno are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a bucket needs from outside: the time, and names for branches of history."""

    now_ns: Callable[[], int]
    new_vbuuid: Callable[[], Vbuuid]

    def now_s(self) -> int:
        return self.now_ns() // 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A change that was taken: durable once the commit of this number is."""

    seqno: Seqno
    cas: Cas
    commit: int


class Bucket:
    """See the module. Opened by `opening.open_bucket`."""

    def __init__(
        self,
        engine: Engine,
        facts: BucketFacts,
        *,
        index: Index,
        manifest: Manifest,
        outside: Outside,
        next_commit: int,
    ) -> None:
        self.engine = engine
        self.facts = facts
        self.index = index
        self.manifest = manifest
        self.outside = outside
        self.vbuckets = VBuckets.empty(facts.vbuckets)
        self.prepares = Prepares(facts.vbuckets)
        self.pending = PendingCommit(next_commit, facts.vbuckets)
        self.in_flight: Commit | None = None
        self.young = YoungCommits()
        """Durable commits that are not settled yet, by number."""
        self.durable_commit = next_commit - 1

    # --- reading --------------------------------------------------------------------------------------------------

    def find(self, vbucket: int, collection_id: CollectionId, key: bytes) -> Entry | None:
        """What the index knows of a document, deleted ones included."""
        return self.index.find(vbucket, as_run(encode_collection_id(collection_id) + key))

    def read(self, vbucket: int, entry: Entry) -> Document:
        """The document of an entry."""
        return decode_document(self.read_frame(vbucket, entry).data)

    def read_frame(self, vbucket: int, entry: Entry) -> Bytes:
        """The stored frame of an entry."""
        young = self._young_frame(vbucket, entry)
        if young is not None:
            return young
        with self.engine.view() as view:
            for _, block in view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=entry.seqno)):
                run = as_run(block)
                start, end = find_seqno(run, entry.seqno)
                assert start >= 0, "the index names a change that is not stored"
                return run[start:end].copy()
        raise AssertionError("the index names a change that is not stored")

    def _young_frame(self, vbucket: int, entry: Entry) -> Bytes | None:
        if entry.commit == self.pending.number & _COMMIT_LOW:
            return self.pending.find(vbucket, entry.seqno)
        for commit in (self.in_flight, self._young_by_low(entry.commit)):
            if commit is not None and commit.number & _COMMIT_LOW == entry.commit:
                run = commit.run(vbucket)
                start, end = find_seqno(run, entry.seqno)
                return run[start:end] if start >= 0 else None
        return None

    def _young_by_low(self, low: int) -> Commit | None:
        high = self.durable_commit & ~_COMMIT_LOW
        return self.young.get(high | low) or self.young.get((high - _COMMIT_LOW - 1) | low)

    def commit_of(self, entry: Entry) -> int:
        """The number of the commit that has to be durable before the entry may be shown to anybody."""
        if entry.commit == self.pending.number & _COMMIT_LOW:
            return self.pending.number
        if self.in_flight is not None and entry.commit == self.in_flight.number & _COMMIT_LOW:
            return self.in_flight.number
        return self.durable_commit

    # --- writing --------------------------------------------------------------------------------------------------

    def put_mutation(
        self, vbucket: int, *, collection_id: CollectionId, key: bytes, value: bytes | MakeValue, datatype: Datatype,
        flags: int = 0, expiry: int = 0, is_locked: bool = False,
    ) -> Written:  # fmt: skip
        """Store a new version of a document. Whether it may be stored is for the caller to decide."""
        seqno, cas, rev_seqno, supersedes = self.coming_version(vbucket, collection_id, key)
        frame = Mutation(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno, flags=flags,
            expiry=expiry, collection_id=collection_id, key=key,
            value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        return self.enter_change(vbucket, frame, supersedes, expiry=expiry, is_locked=is_locked)

    def put_removal(
        self, vbucket: int, *, collection_id: CollectionId, key: bytes, expired: bool = False,
        value: bytes | MakeValue = b"", datatype: Datatype = Datatype.RAW,
    ) -> Written:  # fmt: skip
        """Delete a document, or let it expire. `value` holds the extended attributes that outlive it."""
        seqno, cas, rev_seqno, supersedes = self.coming_version(vbucket, collection_id, key)
        kind = Expiration if expired else Deletion
        frame = kind(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno,
            delete_time=self.outside.now_s(), collection_id=collection_id, key=key,
            value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        written = self.enter_change(vbucket, frame, supersedes, is_deleted=True)
        # An expiration leaves one revision more behind, as real servers have it.
        deleted_rev = rev_seqno + 1 if expired else rev_seqno
        self.vbuckets.deleted_revs[vbucket] = max(int(self.vbuckets.deleted_revs[vbucket]), deleted_rev)
        return written

    def set_locked(self, vbucket: int, collection_id: CollectionId, key: bytes, entry: Entry, *, locked: bool) -> None:
        """Mark a document as locked, so that fast paths leave it alone. A lock is never stored."""
        encoded = as_run(encode_collection_id(collection_id) + key)
        self.index.put(vbucket, encoded, replace(entry, is_locked=locked))

    def coming_version(self, vbucket: int, collection_id: CollectionId, key: bytes) -> tuple[Seqno, Cas, int, bool]:
        """The numbers that a new version will have, and whether there is an older one.

        None of them is taken yet, because making the value or the frame may fail.
        """
        entry = self.find(vbucket, collection_id, key)
        previous = entry.rev_seqno if entry is not None else int(self.vbuckets.deleted_revs[vbucket])
        cas = self.vbuckets.coming_cas(vbucket, self.outside.now_ns())
        return Seqno(int(self.vbuckets.high_seqnos[vbucket]) + 1), cas, previous + 1, entry is not None

    def enter_change(
        self, vbucket: int, change: Mutation | Deletion | Expiration, supersedes: bool, *, expiry: int = 0,
        is_deleted: bool = False, is_locked: bool = False,
    ) -> Written:  # fmt: skip
        """Store a change that has its numbers, and make it the newest version of its document."""
        self.pending.append(vbucket, change.encode())
        self.vbuckets.high_seqnos[vbucket] = change.seqno
        # A commit has the CAS of its prepare, and others may have been given since.
        self.vbuckets.max_cas[vbucket] = max(int(self.vbuckets.max_cas[vbucket]), change.cas)
        self.vbuckets.superseded[vbucket] += supersedes
        entry = Entry(
            seqno=change.seqno, cas=change.cas, rev_seqno=change.rev_seqno, expiry=expiry,
            commit=self.pending.number & _COMMIT_LOW, is_deleted=is_deleted, is_locked=is_locked,
            has_xattrs=Datatype.XATTR in change.datatype,
        )  # fmt: skip
        self.index.put(vbucket, as_run(change.encode_key()), entry)
        return Written(seqno=change.seqno, cas=change.cas, commit=self.pending.number)

    def index_changes(self, vbucket: int, run: Bytes, *, documents: int, commit: int) -> None:
        """Enter a run of changes in the index, and in the numbers that go with it. At most so many are of documents."""
        index, numbers = self.index, self.vbuckets
        index.make_room(vbucket, documents)
        superseded, cas_max, deleted_rev = index_run(
            index.slots, index.tables, vbucket, index.secret, run, commit & _COMMIT_LOW
        )
        numbers.superseded[vbucket] += superseded
        numbers.max_cas[vbucket] = max(int(numbers.max_cas[vbucket]), int(cas_max))
        numbers.deleted_revs[vbucket] = max(int(numbers.deleted_revs[vbucket]), int(deleted_rev))

    # --- vbuckets and collections ---------------------------------------------------------------------------------

    def set_vbucket_state(self, vbucket: int, state: VBucketState) -> int:
        """Give a vbucket a state, making it where it does not exist. Returns the commit that makes it durable.

        One that becomes active begins a new branch of history: another copy may have gone on from its seqno.
        """
        if not 0 <= vbucket < len(self.vbuckets):
            raise LocalProtocolError(f"vbucket {vbucket} is beyond the bucket's {len(self.vbuckets)}")
        facts = self.vbuckets.facts[vbucket]
        if facts is None:
            facts = VBucketFacts(state=state, failover_log=FailoverLog.start(self.outside.new_vbuuid()))
            if state == VBucketState.ACTIVE:
                self.enter_manifest(vbucket)
        elif state == VBucketState.ACTIVE and facts.state != VBucketState.ACTIVE:
            return promote(self, vbucket, facts)
        elif state != VBucketState.ACTIVE:
            return demote(self, vbucket, facts, state)
        return self.set_vbucket_facts(vbucket, facts)

    def set_vbucket_facts(self, vbucket: int, facts: VBucketFacts) -> int:
        self.vbuckets.set_facts(vbucket, facts)
        self.pending.extra.append(Put(Table.VBUCKETS, vbucket_key(vbucket), facts.encode()))
        return self.pending.number

    def set_manifest(self, manifest: Manifest) -> int:
        """Take a newer manifest: every active vbucket tells the difference as system events."""
        events = self.manifest.events_to(manifest)
        self.manifest = manifest
        for vbucket in np.flatnonzero(self.vbuckets.states == VBucketState.ACTIVE).tolist():
            self.enter_events(vbucket, events)
        self.pending.extra.append(Put(Table.BUCKET, MANIFEST, manifest.encode(with_ids_used=True)))
        return self.pending.number

    def enter_manifest(self, vbucket: int) -> None:
        """Tell a vbucket that begins of all collections there are."""
        self.enter_events(vbucket, Manifest().events_to(self.manifest))

    def enter_events(self, vbucket: int, events: list[Event]) -> None:
        """Tell a vbucket the last events up to the bucket's manifest."""
        for event in events:
            self._enter_event(vbucket, event)
        self.vbuckets.manifest_uids[vbucket] = self.manifest.uid

    def _enter_event(self, vbucket: int, event: Event) -> None:
        encoded = encode_stored_event(event)
        frame = SystemEvent(
            vbucket=VBucketId(vbucket), seqno=self.vbuckets.next_seqno(vbucket), event=encoded.event,
            version=encoded.version, key=encoded.key, value=encoded.value,
        )  # fmt: skip
        self.pending.append(vbucket, frame.encode())

    # --- committing -----------------------------------------------------------------------------------------------

    def seal(self) -> Commit | None:
        """Close the pending commit and begin the next; None where there is nothing to commit or one is in flight."""
        if self.pending.is_empty or self.in_flight is not None:
            return None
        self.in_flight = self.pending.seal()
        self.pending.restart(self.in_flight.number + 1)
        return self.in_flight

    def persist(self, commit: Commit) -> None:
        """Write a commit. Touches the engine and the commit only, so that it may run beside everything else."""
        changes: list[Change] = list(commit.extra)
        if len(commit.data):
            changes.append(Put(Table.JOURNAL, commit_key(commit.number), commit.data.data))
        self.engine.write(changes)

    def publish(self, commit: Commit) -> None:
        """The commit in flight is durable."""
        assert commit is self.in_flight
        self.in_flight = None
        self.durable_commit = commit.number
        if len(commit.data):
            self.young[commit.number] = commit
        last_seqnos(commit.data, commit.group_starts, self.vbuckets.durable_seqnos)
        for vbucket, seqno in commit.advanced_seqnos.items():
            self.vbuckets.durable_seqnos[vbucket] = max(int(self.vbuckets.durable_seqnos[vbucket]), seqno)

    def commit_now(self) -> None:
        """Make what is pending durable at once, for callers that can wait. Should that fail, it is still pending.

        Does nothing while a commit is in flight.
        """
        if self.pending.is_empty or self.in_flight is not None:
            return
        commit = self.pending.seal()
        self.persist(commit)
        self.in_flight = commit
        self.pending.restart(commit.number + 1)
        self.publish(commit)

    # --- changes in order -----------------------------------------------------------------------------------------

    def runs(self, vbucket: int, *, after_seqno: int = 0) -> Iterator[Bytes]:
        """The durable changes of a vbucket after a seqno, oldest first, as runs that are valid until the next one."""
        reached = after_seqno
        young = self.young.of(vbucket, after_seqno=after_seqno)
        if not young or first_seqno(young[0].run(vbucket)) > after_seqno + 1:
            with self.engine.view() as view:
                for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=after_seqno + 1)):
                    run = as_run(block)
                    yield run[split_after(run, reached) :]
                    reached = block_last_seqno(key)
        for commit in young:
            run = commit.run(vbucket)
            start = split_after(run, reached)
            if start < len(run):
                yield run[start:]

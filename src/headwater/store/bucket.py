"""A bucket: its vbuckets, their documents and changes, and the commits that make them durable.

Sessions, consumers and the commit loop of a node call it; other modules of the store (`set_run`, `scan`, `search`,
`receiving`, `settling`, `compaction`) are operations on it. It must never wait: what touches a disk is `persist`, which
the caller may run in another thread.

How a write becomes durable: it is entered in the index and in the pending commit at once, so that the next request
sees it. `seal` closes the pending commit, `persist` writes it, `publish` makes it known. Only then may the writer be
answered and the change be streamed. One commit is in flight at a time; changes that come meanwhile go into the next,
which is the group commit. If persisting fails, `settling.abandon` takes back everything that is not durable, and every
writer that waits gets an error.

Published commits stay in memory, and in the journal, until they are settled into the vbuckets' blocks (`settling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from headwater.errors import LocalProtocolError, VBucketDamaged
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.kernels.memory import Bytes, Column
from headwater.protocol.manifest import Collection, Manifest
from headwater.protocol.messages.dcp_changes import Abort, Deletion, Expiration, Mutation, Prepare, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid, encode_collection_id
from headwater.protocol.system_events import Event
from headwater.protocol.values import Datatype
from headwater.store.checked_engine import CheckedEngine, CheckedView
from headwater.store.commits import COMMIT_LOW, GroupCommit, PendingCommit, YoungCommits, joined_runs
from headwater.store.data_format import (
    CLEAN_STOP,
    MANIFEST,
    BucketFacts,
    Document,
    Entry,
    VBucketFacts,
    commit_key,
    decode_document,
    vbucket_key,
)
from headwater.store.engine import Change, DeleteRow, Engine, PutRow, Table
from headwater.store.index import Index, index_run
from headwater.store.prepares import PendingPrepare, Prepares, commit_opaque, decode_prepare
from headwater.store.runs import as_run, find_seqno, first_seqno, last_seqnos, split_after
from headwater.store.vbuckets import VBuckets, encode_stored_event, is_flush, manifest_of_runs

MakeValue = Callable[[Cas, Seqno], bytes]
"""A value that names its own write: it is made once the CAS and the seqno are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnvironment:
    """What a bucket takes from the machine: the time, and names for branches of history."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenVersion:
    """The numbers that a version has got elsewhere and keeps here."""

    cas: Cas | None
    """None for the vbucket's next one."""
    rev_seqno: int


class Bucket:
    """See the module. Opened by `opening.open_bucket`."""

    def __init__(
        self,
        engine: Engine,
        facts: BucketFacts,
        *,
        index: Index,
        manifest: Manifest,
        environment: StoreEnvironment,
        next_commit: int,
    ) -> None:
        self.engine = CheckedEngine.over(engine, facts.name)
        self.facts = facts
        self.index = index
        self.manifest = manifest
        self.environment = environment
        self.vbuckets = VBuckets.empty(facts.vbuckets)
        self.prepares = Prepares(facts.vbuckets)
        self.pending = PendingCommit(next_commit, facts.vbuckets)
        self.in_flight: GroupCommit | None = None
        self.young = YoungCommits()
        """Durable commits that are not settled yet, by number."""
        self.durable_commit = self.opened_commit = next_commit - 1
        self.is_marked_clean = False
        """The mark of a clean stop is still stored, as there was no room to take it away: the next commit does it."""
        self.entered_events = 0
        self.entered_prepares = 0
        """Since this was opened: seqnos that went to events of collections, and to the beginnings and the failures of
        durable writes. All others are changes of documents."""
        self.was_stopped_in_order = True
        """False where the vbuckets that are active began a branch when this was opened."""
        self.on_damage: Callable[[VBucketDamaged], None] = lambda error: None
        """Called with each vbucket that is stopped, in the thread that found the damage."""
        self.max_ttl_s = 0
        """How long documents live at most where their collection does not say; 0 for no bound."""
        self._columns: tuple[Column, Column] = (np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint32))
        self._columns_of: tuple[Manifest | None, int] = (None, 0)

    @property
    def memory_bytes(self) -> int:
        return self.index.memory_bytes + self.young.total_bytes + len(self.pending.frames)

    def max_ttl_s_of(self, collection: Collection) -> int:
        """How long documents of a collection live at most; 0 for no bound. None in the manifest is the bucket's own."""
        return self.max_ttl_s if collection.max_ttl_s is None else collection.max_ttl_s

    @property
    def collection_columns(self) -> tuple[Column, Column]:
        """For kernels: the ids of the collections, ascending, and the longest life of a document in each; 0 for any."""
        manifest, max_ttl_s = self._columns_of
        if manifest is not self.manifest or max_ttl_s != self.max_ttl_s:
            by_id = sorted((found.id, self.max_ttl_s_of(found)) for _, found in self.manifest.collections())
            columns = np.array(by_id, dtype=np.uint32).reshape(-1, 2).T
            self._columns = np.ascontiguousarray(columns[0]), np.ascontiguousarray(columns[1])
            self._columns_of = self.manifest, self.max_ttl_s
        return self._columns

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
        with self.reading(vbucket) as view:
            frame = view.frame(vbucket, entry.seqno)
            assert frame is not None, "the index names a change that is not stored"
            return frame.copy()

    @contextmanager
    def reading(self, vbucket: int) -> Iterator[CheckedView]:
        """A view to read a vbucket in. Damage that is found there stops the vbucket."""
        try:
            with self.engine.view() as view:
                yield view
        except VBucketDamaged as error:
            self.stop_vbucket(error)
            raise

    def stop_vbucket(self, error: VBucketDamaged) -> None:
        """What is stored of a vbucket is damaged: nothing of it is given out or taken from now on."""
        is_new = error.vbucket not in self.vbuckets.damage
        self.vbuckets.stop(error)
        if is_new:
            self.on_damage(error)

    def _young_frame(self, vbucket: int, entry: Entry) -> Bytes | None:
        if entry.commit == self.pending.number & COMMIT_LOW:
            return self.pending.find(vbucket, entry.seqno)
        for commit in (self.in_flight, self._young_by_low(entry.commit)):
            if commit is not None and commit.number & COMMIT_LOW == entry.commit:
                run = commit.run(vbucket)
                start, end = find_seqno(run, entry.seqno)
                return run[start:end] if start >= 0 else None
        return None

    def _young_by_low(self, low: int) -> GroupCommit | None:
        high = self.durable_commit & ~COMMIT_LOW
        return self.young.get(high | low) or self.young.get((high - COMMIT_LOW - 1) | low)

    def commit_of(self, entry: Entry) -> int:
        """The number of the commit that has to be durable before the entry may be shown to a client."""
        if entry.commit == self.pending.number & COMMIT_LOW:
            return self.pending.number
        if self.in_flight is not None and entry.commit == self.in_flight.number & COMMIT_LOW:
            return self.in_flight.number
        return self.durable_commit

    # --- writing --------------------------------------------------------------------------------------------------

    def put_mutation(
        self, vbucket: int, *, collection_id: CollectionId, key: bytes, value: bytes | MakeValue, datatype: Datatype,
        flags: int = 0, expiry: int = 0, is_locked: bool = False, given: GivenVersion | None = None,
    ) -> Written:  # fmt: skip
        """Store a new version of a document. Whether it may be stored is for the caller to decide."""
        seqno, cas, rev_seqno, supersedes = self._coming_version(vbucket, collection_id, key, given)
        frame = Mutation(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno, flags=flags,
            expiry=expiry, collection_id=collection_id, key=key,
            value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        return self._enter_change(vbucket, frame, supersedes, expiry=expiry, is_locked=is_locked)

    def put_removal(
        self, vbucket: int, *, collection_id: CollectionId, key: bytes, expired: bool = False,
        value: bytes | MakeValue = b"", datatype: Datatype = Datatype.RAW, delete_time: int | None = None,
        given: GivenVersion | None = None,
    ) -> Written:  # fmt: skip
        """Delete a document, or let it expire. `value` holds the extended attributes that outlive it.

        It is deleted now, unless it was elsewhere, at another time.
        """
        seqno, cas, rev_seqno, supersedes = self._coming_version(vbucket, collection_id, key, given)
        kind = Expiration if expired else Deletion
        frame = kind(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno,
            delete_time=self.environment.now_s() if delete_time is None else delete_time, collection_id=collection_id,
            key=key, value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        written = self._enter_change(vbucket, frame, supersedes, is_deleted=True)
        # An expiration leaves one revision more behind, as real servers have it.
        deleted_rev = rev_seqno + 1 if expired else rev_seqno
        self.vbuckets.deleted_revs[vbucket] = max(int(self.vbuckets.deleted_revs[vbucket]), deleted_rev)
        return written

    def set_locked(self, vbucket: int, collection_id: CollectionId, key: bytes, entry: Entry, *, locked: bool) -> None:
        """Mark a document as locked, so that fast paths leave it alone. A lock is never stored."""
        encoded = as_run(encode_collection_id(collection_id) + key)
        self.index.put(vbucket, encoded, replace(entry, is_locked=locked))

    def _coming_version(
        self, vbucket: int, collection_id: CollectionId, key: bytes, given: GivenVersion | None = None
    ) -> tuple[Seqno, Cas, int, bool]:
        """The numbers that a new version will have, and whether there is an older one.

        None of them is taken yet, because making the value or the frame may fail.
        """
        entry = self.find(vbucket, collection_id, key)
        previous = entry.rev_seqno if entry is not None else int(self.vbuckets.deleted_revs[vbucket])
        rev_seqno = previous + 1 if given is None else given.rev_seqno
        cas = None if given is None else given.cas
        if cas is None:
            cas = self.vbuckets.coming_cas(vbucket, self.environment.now_ns())
        return self._coming_seqno(vbucket), cas, rev_seqno, entry is not None

    def _coming_seqno(self, vbucket: int) -> Seqno:
        return Seqno(int(self.vbuckets.high_seqnos[vbucket]) + 1)

    def _enter_change(
        self, vbucket: int, change: Mutation | Deletion | Expiration, supersedes: bool, *, expiry: int = 0,
        is_deleted: bool = False, is_locked: bool = False,
    ) -> Written:  # fmt: skip
        """Store a change that has its numbers, and make it the newest version of its document."""
        self._append(vbucket, change.encode(), change.seqno, change.cas)
        self.vbuckets.superseded[vbucket] += supersedes
        entry = Entry(
            seqno=change.seqno, cas=change.cas, rev_seqno=change.rev_seqno, expiry=expiry,
            commit=self.pending.number & COMMIT_LOW, is_deleted=is_deleted, is_locked=is_locked,
            has_xattrs=Datatype.XATTR in change.datatype,
        )  # fmt: skip
        self.index.put(vbucket, as_run(change.encode_key()), entry)
        return Written(seqno=change.seqno, cas=change.cas, commit=self.pending.number)

    def _append(self, vbucket: int, frame: bytes, seqno: Seqno, cas: int) -> None:
        self.pending.append(vbucket, frame)
        self.vbuckets.high_seqnos[vbucket] = seqno
        # A commit has the CAS of its prepare, and others may have been given since.
        self.vbuckets.max_cas[vbucket] = max(int(self.vbuckets.max_cas[vbucket]), cas)

    def index_changes(self, vbucket: int, run: Bytes, *, documents: int, commit: int) -> None:
        """Enter a run of changes in the index, and in the numbers that go with it. At most so many are of documents."""
        index, numbers = self.index, self.vbuckets
        index.make_room(vbucket, documents)
        superseded, cas_max, deleted_rev = index_run(
            index.slots, index.tables, vbucket, index.secret, run, commit & COMMIT_LOW
        )
        numbers.superseded[vbucket] += superseded
        numbers.max_cas[vbucket] = max(int(numbers.max_cas[vbucket]), int(cas_max))
        numbers.deleted_revs[vbucket] = max(int(numbers.deleted_revs[vbucket]), int(deleted_rev))

    # --- durable writes: beginning and deciding -------------------------------------------------------------------

    def put_prepare(
        self, vbucket: int, *, collection_id: CollectionId, key: bytes, value: bytes | MakeValue, datatype: Datatype,
        level: DurabilityLevel, flags: int = 0, expiry: int = 0, is_removal: bool = False,
    ) -> PendingPrepare:  # fmt: skip
        """Begin a durable write. Whether it may begin is for the caller to decide."""
        assert self.prepares.find(vbucket, collection_id, key) is None, "a key has one durable write at a time"
        seqno, cas, rev_seqno, _ = self._coming_version(vbucket, collection_id, key)
        prepare = Prepare(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno, flags=flags,
            # As in real servers, a removal has the time of the deletion here: all copies are to have the same.
            expiry=self.environment.now_s() if is_removal else expiry,
            deleted=int(is_removal), durability=level, collection_id=collection_id, key=key,
            value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        self.entered_prepares += 1
        return self.enter_prepare(prepare)

    def enter_prepare(self, prepare: Prepare) -> PendingPrepare:
        """Store a prepare that has its numbers: one that begins here, or one that was received."""
        assert prepare.collection_id is not None
        vbucket, frame = prepare.vbucket, replace(prepare, opaque=0, frame_infos=()).encode()
        self._append(vbucket, frame, prepare.seqno, prepare.cas)
        # It will be of no use once it is decided, and that is soon.
        self.vbuckets.superseded[vbucket] += 1
        pending = PendingPrepare(
            vbucket=vbucket, seqno=prepare.seqno, cas=prepare.cas, collection_id=prepare.collection_id,
            key=prepare.key, frame=frame, commit=self.pending.number,
        )  # fmt: skip
        self.prepares.add(pending)
        return pending

    def commit_prepare(self, pending: PendingPrepare, *, seqno: Seqno | None = None) -> Written:
        """Make a prepare the newest version of its document, at a new seqno or at the one that was received."""
        vbucket, prepare = pending.vbucket, decode_prepare(pending.frame)
        assert prepare.collection_id is not None
        if seqno is None:
            seqno = self._coming_seqno(vbucket)
        opaque = commit_opaque(seqno - pending.seqno)
        supersedes = self.find(vbucket, prepare.collection_id, prepare.key) is not None
        change: Mutation | Deletion
        if prepare.deleted:
            change = Deletion(
                vbucket=vbucket, opaque=opaque, cas=prepare.cas, datatype=prepare.datatype, seqno=seqno,
                rev_seqno=prepare.rev_seqno, delete_time=prepare.expiry, collection_id=prepare.collection_id,
                key=prepare.key, value=prepare.value,
            )  # fmt: skip
            written = self._enter_change(vbucket, change, supersedes, is_deleted=True)
            self.vbuckets.deleted_revs[vbucket] = max(int(self.vbuckets.deleted_revs[vbucket]), prepare.rev_seqno)
        else:
            change = Mutation(
                vbucket=vbucket, opaque=opaque, cas=prepare.cas, datatype=prepare.datatype, seqno=seqno,
                rev_seqno=prepare.rev_seqno, flags=prepare.flags, expiry=prepare.expiry,
                collection_id=prepare.collection_id, key=prepare.key, value=prepare.value,
            )  # fmt: skip
            written = self._enter_change(vbucket, change, supersedes, expiry=prepare.expiry)
        self.prepares.remove(pending)
        return written

    def abort_prepare(self, pending: PendingPrepare) -> int:
        """Give up a prepare. Returns the commit that makes this durable."""
        abort = Abort(
            vbucket=pending.vbucket, prepared_seqno=pending.seqno, abort_seqno=self._coming_seqno(pending.vbucket),
            collection_id=pending.collection_id, key=pending.key,
        )  # fmt: skip
        self.entered_prepares += 1
        self.enter_abort(abort)
        return self.pending.number

    def enter_abort(self, abort: Abort) -> None:
        """Store an abort that has its numbers, and end its prepare, which may be missing: it was compacted away."""
        assert abort.collection_id is not None
        vbucket = abort.vbucket
        cas = abort.cas or self.vbuckets.coming_cas(vbucket, self.environment.now_ns())
        stored = Abort(
            vbucket=vbucket, cas=cas, prepared_seqno=abort.abort_seqno, abort_seqno=abort.prepared_seqno,
            collection_id=abort.collection_id, key=abort.key,
        )  # fmt: skip
        self._append(vbucket, stored.encode(), abort.abort_seqno, cas)
        pending = self.prepares.find(vbucket, abort.collection_id, abort.key)
        if pending is not None and pending.seqno == abort.prepared_seqno:
            self.prepares.remove(pending)

    # --- the states of vbuckets -----------------------------------------------------------------------------------

    def set_vbucket_state(self, vbucket: int, state: VBucketState) -> int:
        """Give a vbucket a state, making it where it does not exist. Returns the commit that makes it durable.

        One that becomes active begins a new branch of history: another copy may have gone on from its seqno.
        """
        if not 0 <= vbucket < len(self.vbuckets):
            raise LocalProtocolError(f"vbucket {vbucket} is beyond the bucket's {len(self.vbuckets)}")
        facts = self.vbuckets.facts[vbucket]
        if facts is None:
            facts = VBucketFacts(state=state, failover_log=FailoverLog.start(self.environment.new_vbuuid()))
            if state == VBucketState.ACTIVE:
                self.enter_manifest(vbucket)
        elif state == VBucketState.ACTIVE and facts.state != VBucketState.ACTIVE:
            facts = self._promoted(vbucket, facts)
        elif state != VBucketState.ACTIVE:
            facts = self._demoted(vbucket, facts, state)
        return self.set_vbucket_facts(vbucket, facts)

    def set_vbucket_facts(self, vbucket: int, facts: VBucketFacts) -> int:
        self.vbuckets.set_facts(vbucket, facts)
        self.pending.extra.append(PutRow(Table.VBUCKETS, vbucket_key(vbucket), facts.encode()))
        return self.pending.number

    def _promoted(self, vbucket: int, facts: VBucketFacts) -> VBucketFacts:
        """Make a copy the active one. Returns what is stored of it then.

        The branch begins at the high seqno if the snapshot that was being received is complete. If it is not, this copy
        holds a state that never was, and consumers that have the same half of it must go back to where it began.
        """
        high = Seqno(int(self.vbuckets.high_seqnos[vbucket]))
        is_inside_snapshot = facts.snapshot_start_seqno <= high < facts.snapshot_end_seqno
        branch_seqno = facts.snapshot_start_seqno if is_inside_snapshot else high
        log = facts.failover_log.branch(self.environment.new_vbuuid(), at_seqno=branch_seqno)
        history_start = Seqno(min(facts.history_start_seqno, high))
        self._reconcile_collections(vbucket)
        # The copy that was active before may have committed these, and reported so, without this one having received
        # it. The writers of those that it has not committed have no answer yet, or an ambiguous one.
        for pending in self.prepares.of(vbucket):
            if self.manifest.collection_by_id(pending.collection_id) is None:
                self.abort_prepare(pending)
            else:
                self.commit_prepare(pending)
        return replace(facts, state=VBucketState.ACTIVE, failover_log=log, history_start_seqno=history_start)

    def _demoted(self, vbucket: int, facts: VBucketFacts, state: VBucketState) -> VBucketFacts:
        """What is stored of a vbucket that is not to be active.

        What an active one has written is complete as it is. A dead one is not taken for complete: if it was active,
        this was noted when it died, and if it was pending, it may have half of a snapshot.

        Only an active one has a chain of copies, or a pending one, which was given the chain for when it is active.
        """
        facts = replace(facts, state=state, topology=facts.topology if state == VBucketState.PENDING else None)
        if self.vbuckets.states[vbucket] == VBucketState.ACTIVE:
            high = Seqno(int(self.vbuckets.high_seqnos[vbucket]))
            facts = replace(facts, snapshot_start_seqno=high, snapshot_end_seqno=high)
        return facts

    # --- collections ----------------------------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> int:
        """Take a newer manifest: every active vbucket gets the difference as system events."""
        events = self.manifest.events_to(manifest)
        self.manifest = manifest
        for vbucket in np.flatnonzero(self.vbuckets.states == VBucketState.ACTIVE).tolist():
            self._enter_events(vbucket, events)
        self.pending.extra.append(PutRow(Table.BUCKET, MANIFEST, manifest.encode(with_ids_used=True)))
        return self.pending.number

    def enter_manifest(self, vbucket: int) -> None:
        """Begin a vbucket with the events that create all collections of the bucket."""
        self._enter_events(vbucket, Manifest().events_to(self.manifest))

    def vbucket_manifest(self, vbucket: int) -> Manifest:
        """The manifest that the events of a vbucket add up to, those included that are not durable yet."""
        in_flight = () if self.in_flight is None else (self.in_flight.run(vbucket),)
        return manifest_of_runs(chain(self.runs(vbucket), in_flight, self.pending.runs(vbucket)))

    def _reconcile_collections(self, vbucket: int) -> None:
        """A copy learns of collections by its stream, the bucket by the cluster. The one behind catches up."""
        if self.vbuckets.manifest_uids[vbucket] == self.manifest.uid:
            # Only the last event of a manifest carries its uid, so the vbucket has all of it.
            return
        known = self.vbucket_manifest(vbucket)
        if known.uid > self.manifest.uid:
            self.set_manifest(known)
        else:
            self._enter_events(vbucket, known.events_to(self.manifest))

    def _enter_events(self, vbucket: int, events: list[Event]) -> None:
        """Enter the last events up to the bucket's manifest."""
        self.entered_events += len(events)
        for event in events:
            encoded = encode_stored_event(event)
            frame = SystemEvent(
                vbucket=VBucketId(vbucket), seqno=self.vbuckets.next_seqno(vbucket), event=encoded.event,
                version=encoded.version, key=encoded.key, value=encoded.value,
            )  # fmt: skip
            self.pending.append(vbucket, frame.encode())
            self.vbuckets.on_event(vbucket, frame.seqno, self.manifest.uid)
            if is_flush(event):
                self.flush_collection(vbucket, event.collection_id, frame.seqno)
        self.vbuckets.manifest_uids[vbucket] = self.manifest.uid

    def flush_collection(self, vbucket: int, collection_id: CollectionId, seqno: Seqno) -> None:
        """The event of this seqno voids what the collection held. Compaction drops it, as it does superseded changes.

        So a rollback to before the flush can't be exact, and starts again from 0.
        """
        facts = self.vbuckets.facts[vbucket]
        if facts is None or not self.index.entries[vbucket]:
            return
        in_flight = () if self.in_flight is None else (self.in_flight.run(vbucket),)
        runs = chain(self.runs(vbucket), in_flight, self.pending.runs(vbucket))
        self.vbuckets.superseded[vbucket] += self.index.forget_flushed(vbucket, {collection_id: seqno}, runs)
        self.set_vbucket_facts(vbucket, replace(facts, history_start_seqno=seqno))

    # --- committing -----------------------------------------------------------------------------------------------

    @property
    def last_commit(self) -> int:
        """The number of the commit that holds the newest change, durable or not."""
        return self.pending.number - self.pending.is_empty

    def accepted_visible_seqnos(self) -> Column:
        """As `vbuckets.visible_seqnos`, with the changes that are not durable yet."""
        high, visible, completed = np.zeros((3, len(self.vbuckets)), dtype=np.uint64)
        visible[:] = self.vbuckets.visible_seqnos
        for commit in (self.in_flight, self.pending.seal()):
            if commit is not None:
                last_seqnos(commit.data, commit.group_starts, high, visible, completed)
        return visible

    def seal(self) -> GroupCommit | None:
        """Close the pending commit and begin the next; None where there is nothing to commit or one is in flight."""
        if self.pending.is_empty or self.in_flight is not None:
            return None
        self.in_flight = self.pending.seal()
        self.pending.restart(self.in_flight.number + 1)
        return self.in_flight

    def persist(self, commit: GroupCommit) -> None:
        """Write a commit. Touches the engine and the commit only, so that it may run beside everything else."""
        changes: list[Change] = list(commit.extra)
        if len(commit.data):
            changes.append(PutRow(Table.JOURNAL, commit_key(commit.number), commit.data.data))
        if self.is_marked_clean:
            changes.append(DeleteRow(Table.BUCKET, CLEAN_STOP))
        self.engine.write(changes)
        self.is_marked_clean = False

    def publish(self, commit: GroupCommit) -> None:
        """The commit in flight is durable."""
        assert commit is self.in_flight
        self.in_flight = None
        self.durable_commit = commit.number
        if len(commit.data):
            self.young[commit.number] = commit
        numbers = self.vbuckets
        last_seqnos(
            commit.data, commit.group_starts, numbers.durable_seqnos, numbers.visible_seqnos, numbers.completed_seqnos
        )
        for vbucket, seqno in commit.advanced_seqnos.items():
            numbers.durable_seqnos[vbucket] = max(int(numbers.durable_seqnos[vbucket]), seqno)

    def commit_now(self) -> None:
        """Make what is pending durable at once, for callers that can wait. If that fails, it is still pending.

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

    def runs(self, vbucket: int, *, after_seqno: int = 0, needed: Column | None = None) -> Iterator[Bytes]:
        """The durable changes of a vbucket after a seqno, oldest first, as runs that are valid until the next one.

        `needed` are seqnos, ascending: blocks that hold none of them, and no system event, may be left out.
        """
        reached = after_seqno
        young = self.young.of(vbucket, after_seqno=after_seqno)
        if not young or first_seqno(young[0].run(vbucket)) > after_seqno + 1:
            with self.reading(vbucket) as view:
                events_upto = int(self.vbuckets.event_seqnos[vbucket])
                for last, run in view.changes(vbucket, after_seqno=after_seqno, needed=needed, needed_upto=events_upto):
                    yield run[split_after(run, reached) :]
                    reached = last
        for run in joined_runs(young, vbucket):
            start = split_after(run, reached)
            if start < len(run):
                yield run[start:]

    def is_young(self, vbucket: int, *, from_seqno: int) -> bool:
        """Whether the changes from a seqno on are all in commits that are still in memory.

        What was read back when the bucket was opened comes from disk.
        """
        commits = self.young.of(vbucket, after_seqno=from_seqno - 1)
        if not commits or commits[0].number <= self.opened_commit:
            return False
        return first_seqno(commits[0].run(vbucket)) <= from_seqno

"""A bucket: its vbuckets, their documents and changes, and the commits that make them durable.

Sessions, consumers and the commit loop of a node call it; the other modules of the store (`set_run`, `scan`, `search`,
`receiving`, `settling`, `compaction`) are operations on it. It must not wait for the disk: `persist` does the writing,
and the caller may run that in another thread.

How a write becomes durable: the bucket enters it in the index and in the pending commit at once, so that the next
request sees it. `seal` closes the pending commit, `persist` writes it, `publish` makes it visible. Only then may the
node answer the writer and stream the change. One commit is in flight at a time; changes that arrive meanwhile go into
the next one (group commit). If persisting fails, `settling.abandon` takes back everything that is not durable, and
every waiting writer gets an error.

Published commits stay in memory, and in the journal, until `settling` moves them into the vbuckets' blocks. Large runs
of a vbucket that a replica receives become blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from headwater.errors import LocalProtocolError, VBucketDamaged
from headwater.kernels.memory import Bytes, Column
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.frames import DurabilityLevel, encode_collection_id
from headwater.protocol.manifest import Collection, Event, Manifest
from headwater.protocol.messages.dcp_changes import Abort, Deletion, Expiration, Mutation, Prepare, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype
from headwater.store.checked_engine import CheckedEngine, CheckedView, KnownPieces, Scrub
from headwater.store.commits import COMMIT_LOW, GroupCommit, PendingCommit, YoungCommits, joined_runs
from headwater.store.data_format import (
    BUCKET_FACTS,
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
from headwater.store.prepares import PendingPrepare, Prepares, UndecidedPrepares, commit_opaque, decode_prepare
from headwater.store.runs import as_run, find_seqno, first_seqno, last_seqnos, split_after
from headwater.store.vbuckets import (
    RECEIVING_STATES,
    VBucketNumbers,
    is_flush,
    manifest_of_runs,
    raise_to,
    stored_event,
)

MakeValue = Callable[[Cas, Seqno], bytes]
"""Makes a value that contains its own CAS or seqno, once these are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnvironment:
    """The clock and the source of vbuuids that a bucket uses."""

    now_ns: Callable[[], int]
    new_vbuuid: Callable[[], Vbuuid]

    def now_s(self) -> int:
        return self.now_ns() // 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An accepted change. It is durable once the commit with the number `commit` is."""

    seqno: Seqno
    cas: Cas
    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenVersion:
    """The numbers of a version that another node made; this node stores it with the same ones."""

    cas: Cas | None
    """`None` takes the vbucket's next CAS."""
    rev_seqno: int


class Bucket:
    """One bucket (see the module). `opening.open_bucket` opens it.

    Its methods are the operations on a bucket; `vbuckets` and `prepares` are read-only views of its state. The other
    attributes (`engine`, `index`, `numbers`, `undecided`, `pending`, `in_flight`, `young`) are for the modules of the
    store.
    """

    def __init__(
        self,
        engine: Engine,
        facts: BucketFacts,
        manifest: Manifest,
        *,
        environment: StoreEnvironment,
        secret: tuple[int, int],
        next_commit: int,
    ) -> None:
        """`secret` keys the hashes of the index."""
        self.engine = CheckedEngine.over(engine, facts.name)
        self.facts = facts
        self.index = Index(facts.vbuckets, secret=secret)
        self.known_pieces = KnownPieces()
        self.manifest = manifest
        self.environment = environment
        self.numbers = VBucketNumbers.empty(facts.vbuckets)
        self.vbuckets = self.numbers.read_only()
        self.undecided = UndecidedPrepares(facts.vbuckets)
        self.prepares: Prepares = self.undecided
        self.pending = PendingCommit(next_commit, facts.vbuckets)
        self.in_flight: GroupCommit | None = None
        self.young = YoungCommits()
        """Durable commits that are not settled yet, by number."""
        self.damaged_commits: dict[int, set[int]] = {}
        """Damaged commits of the journal, by number, and the vbuckets that each of them stops."""
        self.durable_commit = self.opened_commit = next_commit - 1
        self.written_bytes = 0
        """Bytes of changes made durable since the bucket was opened."""
        self.is_as_found = False
        """True if a full disk kept the opening from storing that the bucket is open; the next commit stores it."""
        self.due_branches: dict[int, FailoverLog] = {}
        """By vbucket, the failover log that the next commit stores: the current one and a new branch."""
        self.entered_events = 0
        self.entered_prepares = 0
        """Seqnos used since the bucket was opened, for events of collections, and for prepares and aborts of durable
        writes. All other seqnos are changes of documents."""
        self.was_stopped_in_order = True
        """False if the active vbuckets began a branch when the bucket was opened."""
        self.on_damage: Callable[[VBucketDamaged], None] = lambda error: None
        """Called with each vbucket that is stopped, in the thread that found the damage."""
        self.max_ttl_s = 0
        """The longest life of a document whose collection sets no limit; 0 disables it."""
        self._columns: tuple[Column, Column] = (np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint32))
        self._columns_of: tuple[Manifest | None, int] = (None, 0)

    def max_ttl_s_of(self, collection: Collection) -> int:
        """Return the longest life of a collection's documents; 0 for no limit. By default it is the bucket's."""
        return self.max_ttl_s if collection.max_ttl_s is None else collection.max_ttl_s

    @property
    def collection_columns(self) -> tuple[Column, Column]:
        """For kernels: the collection ids, ascending, and the longest life of a document in each, 0 for no limit."""
        manifest, max_ttl_s = self._columns_of
        if manifest is not self.manifest or max_ttl_s != self.max_ttl_s:
            by_id = sorted((found.id, self.max_ttl_s_of(found)) for _, found in self.manifest.collections())
            columns = np.array(by_id, dtype=np.uint32).reshape(-1, 2).T
            self._columns = np.ascontiguousarray(columns[0]), np.ascontiguousarray(columns[1])
            self._columns_of = self.manifest, self.max_ttl_s
        return self._columns

    # --- numbers --------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        return self.index.memory_bytes + self.young.total_bytes + len(self.pending.frames)

    @property
    def pending_commit(self) -> int:
        """The number of the commit that takes the next change."""
        return self.pending.number

    @property
    def pending_changes(self) -> int:
        return self.pending.count

    @property
    def pending_bytes(self) -> int:
        """Bytes of changes that are in no sealed commit yet."""
        return self.pending.used_bytes

    @property
    def undurable_bytes(self) -> int:
        return self.pending.used_bytes + (0 if self.in_flight is None else len(self.in_flight.data))

    @property
    def young_bytes(self) -> int:
        """Bytes of commits that are durable and not settled."""
        return self.young.total_bytes

    @property
    def young_commits(self) -> int:
        return len(self.young)

    def young_of(self, vbucket: int) -> list[GroupCommit]:
        """The commits that hold durable changes of a vbucket and are not settled, oldest first."""
        return self.young.of(vbucket)

    @property
    def is_committing(self) -> bool:
        """Whether a commit is being written."""
        return self.in_flight is not None

    def live_documents(self, vbucket: int | None = None) -> int:
        """Count the documents of one vbucket or of all, without the deleted."""
        return self.index.live_documents(vbucket)

    def tombstones(self, vbucket: int) -> int:
        return int(self.index.entries[vbucket]) - self.index.live_documents(vbucket)

    def changed_after(self, commit: int) -> list[int] | None:
        """Return the vbuckets that changed in the one durable commit after `commit`. Returns None if that is unknown:
        after more than one commit, or after one that changed more than documents."""
        newest = self.young.get(self.durable_commit)
        if newest is None or newest.number != commit + 1 or newest.extra or newest.advanced_seqnos:
            return None
        return [*newest.vbuckets(), *newest.in_blocks]

    # --- rows of the node -----------------------------------------------------------------------------------------

    def put_rows(self, rows: Mapping[bytes, bytes | None]) -> int:
        """Store rows in the bucket's own table with the next commit; None removes one. Returns the commit's number."""
        self.pending.extra += [
            DeleteRow(Table.BUCKET, key) if value is None else PutRow(Table.BUCKET, key, value)
            for key, value in rows.items()
        ]
        return self.pending.number

    def stored_row(self, key: bytes) -> bytes | None:
        """Return a durable row of the bucket's own table."""
        with self.engine.view() as view:
            value = view.get(Table.BUCKET, key)
            return None if value is None else bytes(value)

    def stored_rows(self, start: bytes, end: bytes) -> list[bytes]:
        """Return the values of the durable rows from `start` on and before `end`."""
        with self.engine.view() as view:
            return [bytes(value) for _, value in view.scan(Table.BUCKET, start, end)]

    def join(self, uuid: str) -> None:
        """Become part of a cluster's bucket, which has this uuid: the bucket gives up its own collections."""
        self.facts = replace(self.facts, uuid=uuid)
        self.manifest = Manifest()
        self.put_rows({BUCKET_FACTS: self.facts.encode(), MANIFEST: self.manifest.encode(with_ids_used=True)})

    def scrub(self) -> Scrub:
        """Begin a scrub, which checks all stored rows."""
        return Scrub(self.engine.unchecked, self.facts.name)

    def drop_vbuckets(self) -> None:
        """Stop serving all vbuckets, because the bucket is being dropped."""
        for vbucket in range(len(self.vbuckets)):
            self.numbers.set_facts(vbucket, None)

    # --- reading --------------------------------------------------------------------------------------------------

    def find(self, vbucket: int, collection_id: CollectionId, key: bytes) -> Entry | None:
        """Return the index entry of a document, even if it is deleted; None if there is no entry."""
        return self.index.find(vbucket, as_run(encode_collection_id(collection_id) + key))

    def read(self, vbucket: int, entry: Entry) -> Document:
        """Return the document of an index entry."""
        return decode_document(self.read_frame(vbucket, entry).data)

    def read_frame(self, vbucket: int, entry: Entry) -> Bytes:
        """Return the stored frame of an index entry."""
        young = self._young_frame(vbucket, entry)
        if young is not None:
            return young
        with self.reading(vbucket) as view:
            frame = view.frame(vbucket, entry.seqno)
            assert frame is not None, "the index names a change that is not stored"
            return frame.copy()

    @contextmanager
    def reading(self, vbucket: int) -> Iterator[CheckedView]:
        """Open a view to read a vbucket in. Damage found while reading stops the vbucket."""
        try:
            with self.engine.view() as view:
                yield view
        except VBucketDamaged as error:
            self.stop_vbucket(error)
            raise

    def stop_vbucket(self, error: VBucketDamaged) -> None:
        """Stop serving and writing a vbucket, because its stored data is damaged."""
        is_new = error.vbucket not in self.numbers.damage
        self.numbers.stop(error)
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
        """Store a new version of a document. The caller has checked that it may be stored."""
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

        `delete_time` is given if another node deleted the document; the default is now.
        """
        seqno, cas, rev_seqno, supersedes = self._coming_version(vbucket, collection_id, key, given)
        kind = Expiration if expired else Deletion
        frame = kind(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno,
            delete_time=self.environment.now_s() if delete_time is None else delete_time, collection_id=collection_id,
            key=key, value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        written = self._enter_change(vbucket, frame, supersedes, is_deleted=True)
        # An expiration raises the remembered revision by one more, as in real servers.
        deleted_rev = rev_seqno + 1 if expired else rev_seqno
        raise_to(self.numbers.deleted_revs, vbucket, deleted_rev)
        return written

    def set_locked(self, vbucket: int, collection_id: CollectionId, key: bytes, entry: Entry, *, locked: bool) -> None:
        """Set or clear the lock of a document, which makes fast paths leave it alone. A lock is never stored."""
        encoded = as_run(encode_collection_id(collection_id) + key)
        self.index.put(vbucket, encoded, replace(entry, is_locked=locked))

    def next_cas(self, vbucket: int) -> Cas:
        """Take the next CAS of a vbucket."""
        return self.numbers.next_cas(vbucket, self.environment.now_ns())

    def _coming_version(
        self, vbucket: int, collection_id: CollectionId, key: bytes, given: GivenVersion | None = None
    ) -> tuple[Seqno, Cas, int, bool]:
        """Return the numbers that a new version will have, and whether there is an older version.

        The numbers are not taken yet, because making the value or the frame may fail.
        """
        entry = self.find(vbucket, collection_id, key)
        previous = entry.rev_seqno if entry is not None else int(self.numbers.deleted_revs[vbucket])
        rev_seqno = previous + 1 if given is None else given.rev_seqno
        cas = None if given is None else given.cas
        if cas is None:
            cas = self.numbers.coming_cas(vbucket, self.environment.now_ns())
        return self._coming_seqno(vbucket), cas, rev_seqno, entry is not None

    def _coming_seqno(self, vbucket: int) -> Seqno:
        return Seqno(int(self.numbers.high_seqnos[vbucket]) + 1)

    def _enter_change(
        self, vbucket: int, change: Mutation | Deletion | Expiration, supersedes: bool, *, expiry: int = 0,
        is_deleted: bool = False, is_locked: bool = False,
    ) -> Written:  # fmt: skip
        """Store a change whose numbers are set, and make it the newest version of its document."""
        self._append(vbucket, change.encode(), change.seqno, change.cas)
        self.numbers.superseded[vbucket] += supersedes
        entry = Entry(
            seqno=change.seqno, cas=change.cas, rev_seqno=change.rev_seqno, expiry=expiry,
            commit=self.pending.number & COMMIT_LOW, is_deleted=is_deleted, is_locked=is_locked,
            has_xattrs=Datatype.XATTR in change.datatype,
        )  # fmt: skip
        self.index.put(vbucket, as_run(change.encode_key()), entry)
        return Written(seqno=change.seqno, cas=change.cas, commit=self.pending.number)

    def _append(self, vbucket: int, frame: bytes, seqno: Seqno, cas: int) -> None:
        self.pending.append(vbucket, frame)
        self.numbers.high_seqnos[vbucket] = seqno
        # A commit has the CAS of its prepare; higher ones may have been given since.
        raise_to(self.numbers.max_cas, vbucket, cas)

    def index_changes(self, vbucket: int, run: Bytes, *, documents: int, commit: int, expected: int = 0) -> None:
        """Enter a run of changes, of which at most `documents` are of documents, in the index and the numbers.

        `expected` is how many there may be with those of the runs that follow.
        """
        index, numbers = self.index, self.numbers
        index.make_room(vbucket, documents, expected=expected)
        superseded, cas_max, deleted_rev = index_run(
            index.slots, index.tables, vbucket, index.secret, run, commit & COMMIT_LOW
        )
        numbers.superseded[vbucket] += superseded
        raise_to(numbers.max_cas, vbucket, int(cas_max))
        raise_to(numbers.deleted_revs, vbucket, int(deleted_rev))

    # --- durable writes: beginning and deciding -------------------------------------------------------------------

    def put_prepare(
        self, vbucket: int, *, collection_id: CollectionId, key: bytes, value: bytes | MakeValue, datatype: Datatype,
        level: DurabilityLevel, flags: int = 0, expiry: int = 0, is_removal: bool = False,
    ) -> PendingPrepare:  # fmt: skip
        """Begin a durable write. The caller has checked that it may begin."""
        assert self.prepares.find(vbucket, collection_id, key) is None, "a key has one durable write at a time"
        seqno, cas, rev_seqno, _ = self._coming_version(vbucket, collection_id, key)
        prepare = Prepare(
            vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno, flags=flags,
            # As in real servers, a removal has its deletion time here, so that all copies store the same time.
            expiry=self.environment.now_s() if is_removal else expiry,
            deleted=int(is_removal), durability=level, collection_id=collection_id, key=key,
            value=value if isinstance(value, bytes) else value(cas, seqno),
        )  # fmt: skip
        self.entered_prepares += 1
        return self.enter_prepare(prepare)

    def enter_prepare(self, prepare: Prepare) -> PendingPrepare:
        """Store a prepare whose numbers are set: one that begins here, or one that was received."""
        assert prepare.collection_id is not None
        vbucket, frame = prepare.vbucket, replace(prepare, opaque=0, frame_infos=()).encode()
        self._append(vbucket, frame, prepare.seqno, prepare.cas)
        # Counted as superseded already, because it is useless once it is decided, which is soon.
        self.numbers.superseded[vbucket] += 1
        pending = PendingPrepare(
            vbucket=vbucket, seqno=prepare.seqno, cas=prepare.cas, collection_id=prepare.collection_id,
            key=prepare.key, frame=frame, commit=self.pending.number,
        )  # fmt: skip
        self.undecided.add(pending)
        return pending

    def commit_prepare(self, pending: PendingPrepare, *, seqno: Seqno | None = None) -> Written:
        """Make a prepare the newest version of its document, at the seqno that was received, or at a new one."""
        vbucket, prepare = pending.vbucket, decode_prepare(pending.frame)
        assert prepare.collection_id is not None
        if seqno is None:
            seqno = self._coming_seqno(vbucket)
        opaque = commit_opaque(seqno - pending.seqno)
        supersedes = self.find(vbucket, prepare.collection_id, prepare.key) is not None
        kept = ("cas", "datatype", "rev_seqno", "collection_id", "key", "value")
        version: dict[str, Any] = {"vbucket": vbucket, "opaque": opaque, "seqno": seqno}
        version |= {name: getattr(prepare, name) for name in kept}
        if prepare.deleted:
            removal = Deletion(delete_time=prepare.expiry, **version)
            written = self._enter_change(vbucket, removal, supersedes, is_deleted=True)
            raise_to(self.numbers.deleted_revs, vbucket, prepare.rev_seqno)
        else:
            mutation = Mutation(flags=prepare.flags, expiry=prepare.expiry, **version)
            written = self._enter_change(vbucket, mutation, supersedes, expiry=prepare.expiry)
        self.undecided.remove(pending)
        return written

    def abort_prepare(self, pending: PendingPrepare) -> int:
        """Abort a prepare. Returns the number of the commit that makes the abort durable."""
        abort = Abort(
            vbucket=pending.vbucket, prepared_seqno=pending.seqno, abort_seqno=self._coming_seqno(pending.vbucket),
            collection_id=pending.collection_id, key=pending.key,
        )  # fmt: skip
        self.entered_prepares += 1
        self.enter_abort(abort)
        return self.pending.number

    def enter_abort(self, abort: Abort) -> None:
        """Store an abort whose numbers are set, and end its prepare, unless that was compacted away."""
        assert abort.collection_id is not None
        vbucket = abort.vbucket
        cas = abort.cas or self.numbers.coming_cas(vbucket, self.environment.now_ns())
        stored = Abort(
            vbucket=vbucket, cas=cas, prepared_seqno=abort.abort_seqno, abort_seqno=abort.prepared_seqno,
            collection_id=abort.collection_id, key=abort.key,
        )  # fmt: skip
        self._append(vbucket, stored.encode(), abort.abort_seqno, cas)
        pending = self.prepares.find(vbucket, abort.collection_id, abort.key)
        if pending is not None and pending.seqno == abort.prepared_seqno:
            self.undecided.remove(pending)

    def forget_damaged_commits(self, vbuckets: Iterable[int]) -> list[Change]:
        """Forget these emptied vbuckets. Returns the deletions of damaged commits that stop no other vbucket."""
        gone, damaged = set(vbuckets), self.damaged_commits
        self.damaged_commits = {number: stopped - gone for number, stopped in damaged.items() if stopped - gone}
        return [DeleteRow(Table.JOURNAL, commit_key(number)) for number in damaged.keys() - self.damaged_commits.keys()]

    def forget_vbucket(self, vbucket: int) -> None:
        """Drop everything in memory of a vbucket but its facts: it is removed, emptied or about to be loaded."""
        self.numbers.reset_numbers(vbucket)
        self.index.clear(vbucket)
        self.undecided.clear(vbucket)
        self.known_pieces.forget(vbucket)

    # --- the states of vbuckets -----------------------------------------------------------------------------------

    def set_vbucket_state(self, vbucket: int, state: VBucketState) -> int:
        """Set the state of a vbucket, which is made if it does not exist. Returns the commit that makes it durable.

        One that becomes active begins a new branch of history: another copy may hold other changes after its seqno.
        """
        if not 0 <= vbucket < len(self.numbers):
            raise LocalProtocolError(f"vbucket {vbucket} is beyond the bucket's {len(self.numbers)}")
        facts = self.numbers.facts[vbucket]
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
        self.numbers.set_facts(vbucket, facts)
        self.pending.extra.append(PutRow(Table.VBUCKETS, vbucket_key(vbucket), facts.encode()))
        return self.pending.number

    def _promoted(self, vbucket: int, facts: VBucketFacts) -> VBucketFacts:
        """Make a copy the active one. Returns its new facts.

        The branch begins at the high seqno if the snapshot being received is complete. If not, this copy holds a state
        that never was, and consumers with the same half of the snapshot must roll back to where it began.
        """
        high = Seqno(int(self.numbers.high_seqnos[vbucket]))
        is_inside_snapshot = facts.snapshot_start_seqno <= high < facts.snapshot_end_seqno
        branch_seqno = facts.snapshot_start_seqno if is_inside_snapshot else high
        log = facts.failover_log.branch(self.environment.new_vbuuid(), at_seqno=branch_seqno)
        history_start = Seqno(min(facts.history_start_seqno, high))
        self._reconcile_collections(vbucket)
        # The copy that was active before may have committed these and answered their writers before this one received
        # the commits. The writers of the others have no answer yet, or an ambiguous one.
        for pending in self.prepares.of(vbucket):
            if self.manifest.collection_by_id(pending.collection_id) is None:
                self.abort_prepare(pending)
            else:
                self.commit_prepare(pending)
        return replace(facts, state=VBucketState.ACTIVE, failover_log=log, history_start_seqno=history_start)

    def _demoted(self, vbucket: int, facts: VBucketFacts, state: VBucketState) -> VBucketFacts:
        """Return the facts of a vbucket that gets another state than active.

        What an active vbucket wrote is complete. A dead one may not be: if it was active, its facts have said so since
        it died; if it was pending, it may have half of a snapshot.

        Only active vbuckets have a chain of copies, and pending ones, which get it for the time when they are active.
        """
        facts = replace(facts, state=state, topology=facts.topology if state == VBucketState.PENDING else None)
        if self.numbers.states[vbucket] == VBucketState.ACTIVE:
            high = Seqno(int(self.numbers.high_seqnos[vbucket]))
            facts = replace(facts, snapshot_start_seqno=high, snapshot_end_seqno=high)
        return facts

    # --- collections ----------------------------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> int:
        """Adopt a newer manifest: every active vbucket gets the difference as system events."""
        events = self.manifest.events_to(manifest)
        self.manifest = manifest
        for vbucket in np.flatnonzero(self.numbers.states == VBucketState.ACTIVE).tolist():
            self._enter_events(vbucket, events)
        return self.put_rows({MANIFEST: manifest.encode(with_ids_used=True)})

    def enter_manifest(self, vbucket: int) -> None:
        """Begin a vbucket with the events that create all collections of the bucket."""
        self._enter_events(vbucket, Manifest().events_to(self.manifest))

    def vbucket_manifest(self, vbucket: int) -> Manifest:
        """Return the manifest that the events of a vbucket add up to, including events that are not durable yet."""
        return manifest_of_runs(self._accepted_runs(vbucket))

    def _accepted_runs(self, vbucket: int) -> Iterator[Bytes]:
        """All changes of a vbucket, durable or not, oldest first."""
        in_flight = () if self.in_flight is None else (self.in_flight.run(vbucket),)
        return chain(self.runs(vbucket), in_flight, self.pending.runs(vbucket))

    def _reconcile_collections(self, vbucket: int) -> None:
        """A copy learns of collections from its stream, the bucket from the cluster. Update the older of the two."""
        if self.numbers.manifest_uids[vbucket] == self.manifest.uid:
            # Only the last event of a manifest carries its uid, so the vbucket has all of it.
            return
        known = self.vbucket_manifest(vbucket)
        if known.uid > self.manifest.uid:
            self.set_manifest(known)
        else:
            self._enter_events(vbucket, known.events_to(self.manifest))

    def _enter_events(self, vbucket: int, events: list[Event]) -> None:
        """Enter the events that bring a vbucket up to the bucket's manifest."""
        self.entered_events += len(events)
        for event in events:
            frame = stored_event(event, vbucket, self.numbers.next_seqno(vbucket))
            self.pending.append(vbucket, frame.encode())
            self.numbers.on_event(vbucket, frame.seqno, event, manifest_uid=self.manifest.uid)
            if is_flush(event):
                self.flush_collection(vbucket, event.collection_id, frame.seqno)
        self.numbers.manifest_uids[vbucket] = self.manifest.uid

    def enter_again(self, vbucket: int, events: Iterable[SystemEvent]) -> None:
        """Enter system events that a rollback has removed, at new seqnos."""
        for event in events:
            self.entered_events += 1
            self.pending.append(vbucket, replace(event, seqno=self.numbers.next_seqno(vbucket)).encode())

    def flush_collection(self, vbucket: int, collection_id: CollectionId, seqno: Seqno) -> None:
        """Void what a collection held before the flush event at `seqno`. Compaction drops it like superseded changes.

        So a rollback to before the flush can't be exact, and starts again from 0.
        """
        facts = self.numbers.facts[vbucket]
        if facts is None or not self.index.entries[vbucket]:
            return
        forgotten = self.index.forget_flushed(vbucket, {collection_id: seqno}, self._accepted_runs(vbucket))
        self.numbers.superseded[vbucket] += forgotten
        self.set_vbucket_facts(vbucket, replace(facts, history_start_seqno=seqno))

    # --- committing -----------------------------------------------------------------------------------------------

    @property
    def last_commit(self) -> int:
        """The number of the commit that holds the newest change, durable or not."""
        return self.pending.number - self.pending.is_empty

    def accepted_visible_seqnos(self) -> Column:
        """Return `vbuckets.visible_seqnos` as they will be once all accepted changes are durable."""
        high, visible, completed = np.zeros((3, len(self.numbers)), dtype=np.uint64)
        visible[:] = self.numbers.visible_seqnos
        for commit in (self.in_flight, self.pending.seal()):
            if commit is not None:
                last_seqnos(commit.data, commit.group_starts, high, visible, completed)
        return visible

    def commit_of_seqno(self, vbucket: int, seqno: Seqno) -> int:
        """Return the number of the commit that makes a change durable. The change is not durable yet."""
        is_pending = self.in_flight is None or self.pending.find(vbucket, seqno) is not None
        return self.pending.number if is_pending or self.in_flight is None else self.in_flight.number

    def seal(self) -> GroupCommit | None:
        """Close the pending commit and begin the next. Returns None if nothing is pending or a commit is in flight."""
        if self.pending.is_empty or self.in_flight is not None:
            return None
        self.in_flight = self._sealed()
        self.pending.restart(self.in_flight.number + 1)
        return self.in_flight

    def _sealed(self) -> GroupCommit:
        """Close the pending commit.

        A large run of a vbucket that is received here becomes blocks at once, if all changes before it are in blocks.
        Changes of an active vbucket are streamed from memory, so they stay young first.
        """
        self.begin_due_branches()
        commit = self.pending.seal()
        at_once = [
            vbucket
            for vbucket in commit.large_runs().tolist()
            if self.numbers.state(vbucket) in RECEIVING_STATES and not self.young.has_any_of(vbucket)
        ]
        return commit.with_blocks(at_once) if at_once else commit

    def begin_due_branches(self) -> None:
        """Add to the pending commit the branches that could not be stored when the bucket was opened."""
        for vbucket, log in self.due_branches.items():
            facts = self.numbers.facts[vbucket]
            # A vbucket that was removed since, or has begun another branch, needs none.
            if facts is not None and log.entries[1:2] == (facts.failover_log.newest,):
                self.set_vbucket_facts(vbucket, replace(facts, failover_log=log))

    def persist(self, commit: GroupCommit) -> None:
        """Write a commit, perhaps in another thread: uses only the engine, the commit and what the opening left due."""
        changes: list[Change] = [*commit.extra, *commit.block_rows()]
        young = commit.young or commit
        if len(young.data):
            changes.append(PutRow(Table.JOURNAL, commit_key(commit.number), young.row.data, has_room=True))
        if self.is_as_found:
            changes.append(DeleteRow(Table.BUCKET, CLEAN_STOP))
        self.engine.write(changes)
        self.is_as_found, self.due_branches = False, {}

    def publish(self, commit: GroupCommit) -> None:
        """Make the commit in flight visible, now that it is durable."""
        assert commit is self.in_flight
        self.in_flight = None
        self.durable_commit = commit.number
        self.written_bytes += len(commit.data)
        young = commit.young or commit
        if len(young.data):
            self.young[commit.number] = young
        numbers = self.numbers
        last_seqnos(
            commit.data, commit.group_starts, numbers.durable_seqnos, numbers.visible_seqnos, numbers.completed_seqnos
        )
        for vbucket, seqno in commit.advanced_seqnos.items():
            raise_to(numbers.durable_seqnos, vbucket, seqno)

    def commit_now(self) -> None:
        """Make pending changes durable now, for callers that can wait. If that fails, they stay pending.

        Does nothing while a commit is in flight.
        """
        if self.pending.is_empty or self.in_flight is not None:
            return
        commit = self._sealed()
        self.persist(commit)
        self.in_flight = commit
        self.pending.restart(commit.number + 1)
        self.publish(commit)

    # --- changes in order -----------------------------------------------------------------------------------------

    def runs(
        self, vbucket: int, *, after_seqno: int = 0, needed: Column | None = None, wanted: Column | None = None
    ) -> Iterator[Bytes]:
        """Yield the durable changes of a vbucket after a seqno, oldest first, as runs. Each is valid until the next.

        `needed` are seqnos, ascending: blocks that hold none of them, and no system event, may be left out. `wanted`
        are collection ids: changes of other collections may be left out.
        """
        reached = after_seqno
        young = self.young.of(vbucket, after_seqno=after_seqno)
        if not young or first_seqno(young[0].run(vbucket)) > after_seqno + 1:
            with self.reading(vbucket) as view:
                for last, run in view.changes(
                    vbucket,
                    after_seqno=after_seqno,
                    needed=needed,
                    needed_upto=int(self.numbers.event_seqnos[vbucket]),
                    wanted=wanted,
                    known=self.known_pieces,
                ):
                    yield run if reached > after_seqno else run[split_after(run, after_seqno) :]
                    reached = last
        for run in joined_runs(young, vbucket):
            start = split_after(run, reached)
            if start < len(run):
                yield run[start:]

    def is_young(self, vbucket: int, *, from_seqno: int) -> bool:
        """Whether all changes from a seqno on are in commits that are still in memory.

        Commits that were read back when the bucket was opened do not count: they come from disk.
        """
        commits = self.young.of(vbucket, after_seqno=from_seqno - 1)
        if not commits or commits[0].number <= self.opened_commit:
            return False
        return first_seqno(commits[0].run(vbucket)) <= from_seqno

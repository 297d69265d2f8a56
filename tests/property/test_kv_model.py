"""The key-value front end against a dictionary: whatever is done to both, both say the same.

Between the operations time passes, commits are made and settled, vbuckets are compacted, and the bucket is closed or
dies and is opened again. The model is written from Couchbase's description and shares no code with what it judges.
"""

from __future__ import annotations

import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.protocol.features import WITH_COLLECTIONS as STORED_FORM
from headwater.protocol.frames import decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message, documents
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.messages.dcp_changes import Mutation, SystemEvent
from headwater.protocol.messages.documents import RangeScanContinue, RangeScanCreate
from headwater.protocol.messages.subdocument import DocFlags, SubdocDictUpsert
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import Cas, CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.compaction import compact_vbucket, expire_documents, finish_compaction
from headwater.store.settling import settle_now
from headwater.store.vbuckets import Retention
from support.kv_harness import WITH_COLLECTIONS, Client, Node

VBUCKETS = 2
SHORT_LIVED = CollectionId(8)
MAX_TTL_S = 50
U64 = 2**64

# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    vbucket: int
    collection: int
    name: bytes

    def fields(self) -> dict[str, Any]:
        return {"vbucket": VBucketId(self.vbucket), "collection_id": CollectionId(self.collection), "key": self.name}


@dataclass
class Doc:
    value: bytes
    flags: int = 0
    expiry: int = 0
    cas: int = 0


@dataclass
class Said:
    """What the model expects of an operation: the status, and on success what becomes of the document."""

    status: Status
    doc: Doc | None = None
    """The version that is written, or that is there already."""
    writes: bool = True


REMOVED = Said(Status.SUCCESS, None)


@dataclass
class Model:
    now_s: int
    docs: dict[Key, Doc] = field(default_factory=dict)
    locks: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """The CAS and the end of each lock."""

    def live(self, key: Key) -> Doc | None:
        doc = self.docs.get(key)
        return None if doc is None or 0 < doc.expiry <= self.now_s else doc

    def lock(self, key: Key) -> int | None:
        cas, until_s = self.locks.get(key, (0, 0))
        return cas if until_s > self.now_s and self.live(key) else None

    def expiry(self, key: Key, asked: int) -> int:
        if key.collection == SHORT_LIVED:
            return self.now_s + (min(asked, MAX_TTL_S) or MAX_TTL_S)
        return self.now_s + asked if asked else 0

    def obstacle(self, key: Key, cas: int) -> Status | None:
        """Why a document that is there can't be written with this CAS."""
        lock = self.lock(key)
        if lock is not None:
            return None if cas == lock else Status.LOCKED
        return Status.KEY_EEXISTS if cas not in (0, self.docs[key].cas) else None

    # Each operation says what is to be expected; nothing changes before the answer has been seen.

    def store(self, kind: type[documents.Set], key: Key, doc: Doc, cas: int) -> Said:
        found = self.live(key)
        if kind is documents.Add:
            refused = Status.EINVAL if cas else Status.KEY_EEXISTS if found else None
        elif found is None:
            refused = Status.KEY_ENOENT if cas or kind is documents.Replace else None
        else:
            refused = self.obstacle(key, cas)
        return Said(refused) if refused else Said(Status.SUCCESS, doc)

    def existing(self, key: Key, cas: int, missing: Status = Status.KEY_ENOENT) -> Status | None:
        return self.obstacle(key, cas) if self.live(key) else missing

    def extend(self, key: Key, more: bytes, cas: int, *, in_front: bool) -> Said:
        refused = self.existing(key, cas, Status.NOT_STORED)
        if refused:
            return Said(refused)
        doc = self.docs[key]
        value = more + doc.value if in_front else doc.value + more
        return Said(Status.SUCCESS, Doc(value, doc.flags, doc.expiry))

    def count(self, key: Key, delta: int, initial: int, asked: int) -> Said:
        doc = self.live(key)
        if doc is None:
            if asked == documents.COUNTER_MUST_EXIST:
                return Said(Status.KEY_ENOENT)
            return Said(Status.SUCCESS, Doc(b"%d" % initial, 0, self.expiry(key, asked)))
        refused = self.obstacle(key, 0)
        if refused:
            return Said(refused)
        if not doc.value.isdigit() or int(doc.value) >= U64:
            return Said(Status.DELTA_BADVAL)
        count = max(0, int(doc.value) + delta) % U64
        return Said(Status.SUCCESS, Doc(b"%d" % count, doc.flags, doc.expiry))

    def touch(self, key: Key, asked: int) -> Said:
        refused = self.existing(key, 0)
        if refused:
            return Said(refused)
        doc, expiry = self.docs[key], self.expiry(key, asked)
        return Said(Status.SUCCESS, Doc(doc.value, doc.flags, expiry, doc.cas), writes=expiry != doc.expiry)

    def upsert_a(self, key: Key, number: int, cas: int, *, make: bool) -> Said:
        doc = self.live(key)
        refused = self.obstacle(key, cas) if doc else None if make and not cas else Status.KEY_ENOENT
        if doc and not refused and not _is_object(doc.value):
            refused = Status.SUBDOC_DOC_NOT_JSON
        if refused:
            return Said(refused)
        return Said(Status.SUCCESS, Doc(b'{"a":%d}' % number, doc.flags if doc else 0, self.expiry(key, 0)))


def _is_object(value: bytes) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False


# --- the machine --------------------------------------------------------------------------------------------------

COLLECTIONS = st.sampled_from([0, 0, SHORT_LIVED])
KEYS = st.builds(
    lambda number, collection: Key(number % VBUCKETS, collection, b"k%d" % number), st.integers(0, 2), COLLECTIONS
)
VALUES = st.sampled_from([b"", b"7", b"41", b"x", b'{"a":1}', b"%d" % (U64 - 1), b"%d" % U64])
MORE = st.sampled_from([b"7", b"x"])
EXPIRIES = st.sampled_from([0, 0, 5, 20, 90])
DELTAS = st.sampled_from([0, 1, 5, 2**40])
WHICH_CAS = st.sampled_from(["none", "none", "right", "wrong"])


class KeyValueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.node = Node(Path(self.folder.name) / "data", vbuckets=VBUCKETS)
        self.node.set_manifest(Manifest().with_collection("_default", "short", max_ttl_s=MAX_TTL_S))
        self.model = Model(self.node.clock.now_s())
        self.durable = deepcopy(self.model.docs)
        self.seqnos = dict.fromkeys(range(VBUCKETS), 0)
        self.connect()

    def teardown(self) -> None:
        self.node.close()
        self.folder.cleanup()

    def connect(self) -> None:
        self.client: Client = self.node.client(features=WITH_COLLECTIONS)
        self.durable = deepcopy(self.model.docs)

    # --- asking and comparing

    def ask(self, request: Request) -> Any:
        """The answer, which a client would get once it is durable."""
        self.client.send(request)
        data = b"".join(piece.data for piece in self.client.session.outgoing)
        self.client.session.outgoing.clear()
        (response,) = [decode_message(frame, self.client.negotiated) for frame in decode_frames(data)]
        assert isinstance(response, Response)
        return response

    def compare(self, key: Key, said: Said, request: Request) -> Any:
        before = self.model.docs.get(key)
        response = self.ask(request)
        assert response.status == said.status, (request, response)
        if said.status != Status.SUCCESS:
            return response
        if said.doc is None:
            del self.model.docs[key]
        elif said.writes:
            assert before is None or response.cas > before.cas
            self.model.docs[key] = Doc(said.doc.value, said.doc.flags, said.doc.expiry, response.cas)
        else:
            assert response.cas == said.doc.cas
        if said.writes:
            self.model.locks.pop(key, None)
        if getattr(response, "seqno", None) is not None:
            assert response.seqno > self.seqnos[key.vbucket]
            self.seqnos[key.vbucket] = response.seqno
        return response

    def cas(self, key: Key, which: str) -> Cas:
        if which == "none":
            return Cas(0)
        doc = self.model.docs.get(key)
        right = self.model.lock(key) or (doc.cas if doc else 12345)
        return Cas(right if which == "right" else right + 1)

    # --- operations

    @initialize(value=VALUES)
    def begin_with_documents(self, value: bytes) -> None:
        for number in range(3):
            for collection in (0, SHORT_LIVED):
                self.store(Key(number % VBUCKETS, collection, b"k%d" % number), value, 0, 1, "none", documents.Set)

    @rule(key=KEYS, value=VALUES, expiry=EXPIRIES, flags=st.integers(0, 3), which=WHICH_CAS,
          kind=st.sampled_from([documents.Set, documents.Set, documents.Add, documents.Replace]))  # fmt: skip
    def store(self, key: Key, value: bytes, expiry: int, flags: int, which: str, kind: type[documents.Set]) -> None:
        cas = self.cas(key, which)
        said = self.model.store(kind, key, Doc(value, flags, self.model.expiry(key, expiry)), cas)
        self.compare(key, said, kind(**key.fields(), value=value, flags=flags, expiry=expiry, cas=cas))

    @rule(entries=st.lists(st.tuples(KEYS, VALUES), max_size=8))
    def store_many(self, entries: list[tuple[Key, bytes]]) -> None:
        """A run of sets, as bulk loads send them."""
        run = []
        for opaque, (key, value) in enumerate(entries):
            run.append(documents.SetQuiet(**key.fields(), value=value, opaque=opaque))
        self.client.send(*run)
        data = b"".join(piece.data for piece in self.client.session.outgoing)
        self.client.session.outgoing.clear()
        refused = {frame.opaque: Status(frame.specific) for frame in decode_frames(data)}
        expected = {at: Status.LOCKED for at, (key, _) in enumerate(entries) if self.model.lock(key)}
        assert refused == expected
        for at, (key, value) in enumerate(entries):
            if at not in refused:
                cas = self.ask(documents.GetMeta(**key.fields())).cas
                self.model.docs[key] = Doc(value, 0, self.model.expiry(key, 0), cas)

    @rule(key=KEYS, which=WHICH_CAS)
    def delete(self, key: Key, which: str) -> None:
        cas = self.cas(key, which)
        refused = self.model.existing(key, cas)
        self.compare(key, Said(refused) if refused else REMOVED, documents.Delete(**key.fields(), cas=cas))

    @rule(key=KEYS, more=MORE, which=WHICH_CAS, in_front=st.booleans())
    def extend(self, key: Key, more: bytes, which: str, in_front: bool) -> None:
        cas = self.cas(key, which)
        kind = documents.Prepend if in_front else documents.Append
        said = self.model.extend(key, more, cas, in_front=in_front)
        self.compare(key, said, kind(**key.fields(), value=more, cas=cas))

    @rule(key=KEYS, delta=DELTAS, initial=DELTAS, expiry=st.sampled_from([0, 20, documents.COUNTER_MUST_EXIST]),
          down=st.booleans())  # fmt: skip
    def count(self, key: Key, delta: int, initial: int, expiry: int, down: bool) -> None:
        said = self.model.count(key, -delta if down else delta, initial, expiry)
        kind = documents.Decrement if down else documents.Increment
        response = self.compare(key, said, kind(**key.fields(), delta=delta, initial=initial, expiry=expiry))
        if said.doc is not None:
            assert response.count == int(said.doc.value)

    @rule(key=KEYS, expiry=EXPIRIES, get=st.booleans())
    def touch(self, key: Key, expiry: int, get: bool) -> None:
        said = self.model.touch(key, expiry)
        response = self.compare(
            key, said, (documents.GetAndTouch if get else documents.Touch)(**key.fields(), expiry=expiry)
        )
        if get and said.doc is not None:
            assert (response.value, response.flags) == (said.doc.value, said.doc.flags)

    @rule(key=KEYS, number=st.integers(0, 99), which=WHICH_CAS, make=st.booleans())
    def upsert_a(self, key: Key, number: int, which: str, make: bool) -> None:
        cas = self.cas(key, which)
        said = self.model.upsert_a(key, number, cas, make=make)
        doc_flags = DocFlags.MKDOC if make else None
        request = SubdocDictUpsert(**key.fields(), path=b"a", new_value=b"%d" % number, cas=cas, doc_flags=doc_flags)
        self.compare(key, said, request)

    @rule(key=KEYS, lock_s=st.sampled_from([1, 10]))
    def lock(self, key: Key, lock_s: int) -> None:
        response = self.ask(documents.GetLocked(**key.fields(), lock_time_s=lock_s))
        doc = self.model.live(key)
        if doc is None:
            assert response.status == Status.KEY_ENOENT
        elif self.model.lock(key):
            assert response.status == Status.LOCKED
        else:
            assert (response.status, response.value) == (Status.SUCCESS, doc.value)
            self.model.locks[key] = (response.cas, self.model.now_s + lock_s)

    @rule(key=KEYS, right=st.booleans())
    def unlock(self, key: Key, right: bool) -> None:
        lock = self.model.lock(key)
        response = self.ask(documents.Unlock(**key.fields(), cas=Cas(lock if lock and right else 99)))
        if self.model.live(key) is None:
            assert response.status == Status.KEY_ENOENT
        elif lock is None:
            assert response.status == Status.NOT_LOCKED
        else:
            assert response.status == (Status.SUCCESS if right else Status.LOCKED)
            if right:
                del self.model.locks[key]

    @rule(key=KEYS)
    def get(self, key: Key) -> None:
        response = self.ask(documents.Get(**key.fields()))
        doc = self.model.live(key)
        if doc is None:
            assert response.status == Status.KEY_ENOENT
            return
        assert (response.status, response.value, response.flags) == (Status.SUCCESS, doc.value, doc.flags)
        assert response.cas == (U64 - 1 if self.model.lock(key) else doc.cas)

    @rule(key=KEYS)
    def get_meta(self, key: Key) -> None:
        response = self.ask(documents.GetMeta(**key.fields()))
        doc = self.model.live(key)
        if doc is None:
            assert response.status == Status.KEY_ENOENT or response.deleted == 1
        else:
            assert (response.deleted, response.flags, response.expiry) == (0, doc.flags, doc.expiry)

    # --- what happens in between

    @rule(seconds=st.sampled_from([1, 5, 30]))
    def time_passes(self, seconds: int) -> None:
        self.node.clock.advance(seconds)
        self.model.now_s += seconds

    @rule()
    def expire(self) -> None:
        for vbucket in range(VBUCKETS):
            expire_documents(self.node.bucket, vbucket)

    @rule()
    def commit(self) -> None:
        self.node.commit()
        self.durable = deepcopy(self.model.docs)
        seqnos = {entry.vbucket: entry.seqno for entry in self.ask(GetAllVbSeqnos()).seqnos}
        assert all(seqnos[vbucket] >= self.seqnos[vbucket] for vbucket in range(VBUCKETS))

    @rule()
    def settle(self) -> None:
        settle_now(self.node.bucket)

    @rule(vbucket=st.integers(0, VBUCKETS - 1), purges=st.booleans(), keeps_history=st.booleans())
    def compact(self, vbucket: int, purges: bool, keeps_history: bool) -> None:
        history = {} if keeps_history else {"history_s": 0, "history_bytes": 0}
        retention = Retention(**history, **({"purge_age_s": 0} if purges else {}))
        compacted = compact_vbucket(self.node.bucket, vbucket, retention)
        self.node.bucket.engine.write(compacted.changes)
        finish_compaction(self.node.bucket, vbucket, compacted)

    @rule()
    def close_and_open(self) -> None:
        self.node.reopen()
        self.model.locks.clear()
        self.connect()

    @rule()
    def die_and_open(self) -> None:
        """What was not durable is gone, and nothing else."""
        self.node.reopen(in_order=False)
        self.model.docs = deepcopy(self.durable)
        self.model.locks.clear()
        self.seqnos = {v: int(self.node.bucket.vbuckets.high_seqnos[v]) for v in range(VBUCKETS)}
        self.connect()

    @precondition(lambda self: self.node.bucket.pending.is_empty)
    @rule(
        vbucket=st.integers(0, VBUCKETS - 1), collection=st.sampled_from([0, SHORT_LIVED]), items_max=st.integers(0, 2)
    )
    def scan(self, vbucket: int, collection: int, items_max: int) -> None:
        """A range scan has all that is there, in order, and nothing else."""
        expected = {
            key.name: doc
            for key, doc in sorted(self.model.docs.items(), key=lambda item: item[0].name)
            if (key.vbucket, key.collection) == (vbucket, collection) and self.model.live(key)
        }
        wanted = json.dumps({"collection": f"{collection:x}", "range": {"start": "", "end": "/w=="}}).encode()
        place = {"vbucket": VBucketId(vbucket)}
        begun = self.ask(RangeScanCreate(**place, datatype=Datatype.JSON, value=wanted))
        if not expected:
            assert begun.status == Status.KEY_ENOENT
            return
        found = []
        part: Any = None
        while part is None or part.status == Status.RANGE_SCAN_MORE:
            part = self.ask(RangeScanContinue(**place, scan_id=begun.scan_id, items_max=items_max))
            found += part.documents
        assert part.status == Status.RANGE_SCAN_COMPLETE
        assert [(doc.key, Doc(doc.value, doc.flags, doc.expiry, doc.cas)) for doc in found] == list(expected.items())

    # --- what always holds

    @invariant()
    def all_documents_are_found(self) -> None:
        for key in list(self.model.docs):
            self.get(key)

    @precondition(lambda self: self.node.bucket.pending.is_empty)
    @invariant()
    def the_changes_tell_the_same_story(self) -> None:
        told: dict[Key, Doc] = {}
        for vbucket in range(VBUCKETS):
            seqno = 0
            for run in self.node.bucket.runs(vbucket):
                for frame in decode_frames(run.tobytes()):
                    change: Any = decode_message(frame, STORED_FORM)
                    assert change.seqno > seqno
                    seqno = change.seqno
                    if not isinstance(change, SystemEvent):
                        self._tell(told, vbucket, change)
        live = {key: doc for key, doc in told.items() if not 0 < doc.expiry <= self.model.now_s}
        assert live == {key: doc for key, doc in self.model.docs.items() if self.model.live(key)}

    @staticmethod
    def _tell(told: dict[Key, Doc], vbucket: int, change: Any) -> None:
        key = Key(vbucket, change.collection_id, change.key)
        if isinstance(change, Mutation):
            told[key] = Doc(change.value, change.flags, change.expiry, change.cas)
        else:
            told.pop(key, None)


TestKeyValueModel = KeyValueMachine.TestCase
TestKeyValueModel.settings = settings(stateful_step_count=40)

"""Operations of handlers on one document: find it, check its lock and CAS, write a version, and convert values.

Handlers of whole documents and of sub-documents make a `Target` for each request, after the session has checked the
rights. A version may not be durable yet. An answer that depends on it, even if only to say that there is no document,
has to wait until it is: otherwise a crash could revert what a client has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from headwater.errors import MalformedFrameInfo, MalformedSnappy, MalformedXattrs
from headwater.node.durability import TIMEOUT_MS_INFINITE, TIMEOUT_S_DEFAULT, is_possible
from headwater.node.kv.context import TURN_WORK, Context
from headwater.node.kv.subdocument.json_text import is_json
from headwater.node.service import BucketService, Lock
from headwater.protocol import values
from headwater.protocol.features import Feature
from headwater.protocol.frames import DurabilityLevel, RequestInfo, decode_durability, find
from headwater.protocol.manifest import Collection
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import (
    DEFAULT_COLLECTION,
    RELATIVE_EXPIRY_S_MAX,
    VALUE_BYTES_MAX,
    Cas,
    CollectionId,
    VBucketId,
)
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket, GivenVersion, MakeValue, Written
from headwater.store.compaction import expire_document, is_expired
from headwater.store.data_format import Document, Entry, decode_document, inflated_bytes
from headwater.store.prepares import PENDING_BYTES_MAX

NEVER = 0
_TIME_S_MAX = 2**32 - 1

LOCK_S_DEFAULT = 15
LOCK_S_MAX = 30
LOCKS_MAX = 100_000
"""The most locked documents of a bucket."""
LOCKED_CAS = Cas(2**64 - 1)
"""The CAS of a locked document as shown to clients, so that they can't write with it."""


class DocumentRequest(Protocol):
    """A request about one document."""

    @property
    def vbucket(self) -> VBucketId: ...

    @property
    def collection_id(self) -> CollectionId | None: ...

    @property
    def key(self) -> bytes: ...


class _Durability(NamedTuple):
    level: DurabilityLevel
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The document of a request, whether it exists or not."""

    context: Context
    service: BucketService
    vbucket: VBucketId
    collection: Collection
    key: bytes

    @classmethod
    def of(cls, context: Context, request: DocumentRequest, *, state: VBucketState = VBucketState.ACTIVE) -> Target:
        """The target of a request. Refuses it unless its vbucket is here in this state, and its collection exists."""
        check_vbucket(context, request.vbucket, state)
        collection_id = DEFAULT_COLLECTION if request.collection_id is None else request.collection_id
        collection = collection_by_id(context, collection_id)
        service = context.bucket_service
        return cls(context=context, service=service, vbucket=request.vbucket, collection=collection, key=request.key)

    @classmethod
    def to_write(cls, context: Context, request: DocumentRequest) -> Target:
        """The target of a write. Refuses it if the document has an undecided durable write."""
        target = cls.of(context, request)
        in_the_way = target.service.sync_writes.in_the_way(target.vbucket, target.collection.id, target.key)
        if in_the_way is not None:
            raise RequestRefused(in_the_way)
        return target

    @property
    def bucket(self) -> Bucket:
        return self.service.bucket

    # --- reading --------------------------------------------------------------------------------------------------

    def find(self) -> Entry | None:
        """The entry in the index, which may be deleted or expired."""
        return self.bucket.find(self.vbucket, self.collection.id, self.key)

    def read(self, entry: Entry) -> Document:
        """The document of an entry, inflated."""
        context = self.context
        if context.document is None or context.document[0] != entry:
            frame = self.bucket.read_frame(self.vbucket, entry)
            # A worker needs its own copy of what it inflates: the buffer of a pending commit may move meanwhile.
            cost = inflated_bytes(frame.data)
            document = context.work(decode_document, frame.tobytes() if cost > TURN_WORK else frame.data, cost=cost)
            context.document = entry, document
        return context.document[1]

    def newest(self) -> Entry | None:
        """The newest version of the document, or its tombstone. If it has expired, this writes its expiration first."""
        bucket, entry = self.bucket, self.find()
        has_expired = entry is not None and is_expired(entry, bucket.environment.now_s())
        if entry is not None and has_expired and bucket.vbuckets.state(self.vbucket) == VBucketState.ACTIVE:
            if bucket.prepares.find(self.vbucket, self.collection.id, self.key) is not None:
                # An undecided durable write will replace it. Until then no client sees the expired version.
                return None
            expire_document(bucket, self.vbucket, entry)
            self.service.on_change()
            entry = self.find()
        if entry is not None and self.service.ack_when_durable:
            self.context.wait_for(bucket.commit_of(entry))
        return entry

    def live(self) -> Entry | None:
        """The newest version if it is neither deleted nor expired."""
        entry = self.newest()
        # A replica receives expirations from its active copy, but shows no expired document meanwhile.
        if entry is None or entry.is_deleted or is_expired(entry, self.bucket.environment.now_s()):
            return None
        return entry

    def live_or_refuse(self) -> Entry:
        entry = self.live()
        if entry is None:
            raise RequestRefused(Status.KEY_ENOENT)
        return entry

    def xattrs_to_keep(self, entry: Entry) -> bytes:
        """The extended attributes that outlive the document."""
        return values.keep_system_xattrs(self.read(entry).value) if entry.has_xattrs else b""

    def expiry_time(self, asked: int, *, is_time: bool = False) -> int:
        """When the document expires. See the function of this name."""
        now_s, max_ttl_s = self.bucket.environment.now_s(), self.bucket.max_ttl_s_of(self.collection)
        return expiry_time(asked, now_s=now_s, max_ttl_s=max_ttl_s, is_time=is_time)

    # --- locks ----------------------------------------------------------------------------------------------------
    #
    # Locks are kept in memory only, and expire. The index marks a locked document, and a new version has no mark.
    # `service.locks` has the CAS and the expiry of each lock. An entry there is stale and ignored once its document has
    # no mark.

    @property
    def _lock_key(self) -> tuple[int, CollectionId, bytes]:
        return self.vbucket, self.collection.id, self.key

    def lock_on(self, entry: Entry) -> Lock | None:
        """The lock on the document, if it has one that has not expired."""
        lock = self.service.locks.get(self._lock_key) if entry.is_locked else None
        if lock is None or lock.until_ns > self.bucket.environment.now_ns():
            return lock
        self.release(entry)
        return None

    def take_lock(self, entry: Entry, *, lock_s: int) -> Cas:
        """Lock the document. Returns the CAS that unlocks it: a new one, which no client has from an earlier read."""
        service, now_ns = self.service, self.bucket.environment.now_ns()
        if len(service.locks) >= LOCKS_MAX:
            service.locks = {key: lock for key, lock in service.locks.items() if lock.until_ns > now_ns}
            if len(service.locks) >= LOCKS_MAX:
                raise RequestRefused(Status.ETMPFAIL, f"the bucket has {LOCKS_MAX} locked documents")
        cas = self.bucket.next_cas(self.vbucket)
        service.locks[self._lock_key] = Lock(cas=cas, until_ns=now_ns + lock_s * 1_000_000_000)
        self.bucket.set_locked(self.vbucket, self.collection.id, self.key, entry, locked=True)
        return cas

    def release(self, entry: Entry) -> None:
        """Unlock the document, which stays the same version."""
        self.service.locks.pop(self._lock_key, None)
        self.bucket.set_locked(self.vbucket, self.collection.id, self.key, entry, locked=False)

    def check_cas(self, entry: Entry, cas: Cas) -> None:
        """Raise `RequestRefused` if a write with this CAS may not replace this version. The CAS of a lock may."""
        lock = self.lock_on(entry)
        if lock is not None:
            if cas != lock.cas:
                raise RequestRefused(Status.LOCKED)
        elif cas not in (0, entry.cas):
            raise RequestRefused(Status.KEY_EEXISTS)

    def shown_cas(self, entry: Entry) -> Cas:
        return entry.cas if self.lock_on(entry) is None else LOCKED_CAS

    # --- writing --------------------------------------------------------------------------------------------------
    #
    # If a vbucket has copies on other nodes, a durable write is only prepared here, and is answered when a majority has
    # acknowledged that (`node.durability`). If this is the only copy, a durable write is an ordinary one that is
    # answered when it is durable.

    def store(
        self, *, value: bytes | MakeValue, datatype: Datatype, flags: int, expiry: int,
        given: GivenVersion | None = None,
    ) -> Written:  # fmt: skip
        """Store a new version. One with metadata from elsewhere (`given`) is never a durable write."""
        asked = self._asked_durability() if given is None else None
        if asked is not None and self._has_copies():
            return self._prepare(asked, value=value, datatype=datatype, flags=flags, expiry=expiry)
        written = self.bucket.put_mutation(
            self.vbucket, collection_id=self.collection.id, key=self.key, value=value, datatype=datatype, flags=flags,
            expiry=expiry, given=given,
        )  # fmt: skip
        return self._taken(written, must_be_durable=asked is not None)

    def remove(
        self, *, value: bytes | MakeValue, datatype: Datatype, expired: bool = False, delete_time: int | None = None,
        given: GivenVersion | None = None,
    ) -> Written:  # fmt: skip
        """Store a tombstone. `value` holds the extended attributes that outlive the document."""
        asked = self._asked_durability() if given is None and not expired else None
        if asked is not None and self._has_copies():
            return self._prepare(asked, value=value, datatype=datatype, is_removal=True)
        written = self.bucket.put_removal(
            self.vbucket, collection_id=self.collection.id, key=self.key, value=value, datatype=datatype,
            expired=expired, delete_time=delete_time, given=given,
        )  # fmt: skip
        return self._taken(written, must_be_durable=asked is not None)

    def mutation_token(self, written: Written) -> dict[str, Any]:
        """The mutation token of a write as fields of a response; empty unless the session has negotiated tokens."""
        if not self.context.session.has(Feature.MUTATION_SEQNO):
            return {}
        facts = self.bucket.vbuckets.facts[self.vbucket]
        assert facts is not None, "only vbuckets that exist are written to"
        return {"vbuuid": facts.failover_log.newest.vbuuid, "seqno": written.seqno}

    def _taken(self, written: Written, *, must_be_durable: bool) -> Written:
        self.service.locks.pop(self._lock_key, None)  # The new version is not locked.
        self.service.on_change()
        if must_be_durable or self.service.ack_when_durable:
            self.context.wait_for(written.commit)
        return written

    def _asked_durability(self) -> _Durability | None:
        """The durability that the request or the bucket's settings require, whichever level is higher."""
        try:
            asked = decode_durability(self.context.request.frame_infos)
        except MalformedFrameInfo as error:
            raise RequestRefused(Status.EINVAL, error.reason) from error
        least = self.service.settings.durability_min_level
        if asked is None:
            return _Durability(DurabilityLevel(least), TIMEOUT_S_DEFAULT) if least else None
        level, timeout_ms = asked
        if not level.is_known:
            raise RequestRefused(Status.DURABILITY_INVALID_LEVEL)
        if timeout_ms == TIMEOUT_MS_INFINITE:
            # As in the recorded durability session of 8.0.2.
            raise RequestRefused(Status.DURABILITY_INVALID_LEVEL, "a durable write can't have an infinite time-out")
        return _Durability(DurabilityLevel(max(level, least)), timeout_ms / 1000 if timeout_ms else TIMEOUT_S_DEFAULT)

    def _has_copies(self) -> bool:
        """Whether a durable write needs other nodes. One durable copy meets every level if no others are required."""
        if self.service.sync_writes.chains(self.vbucket):
            return True
        if self.service.must_have_copies:
            raise RequestRefused(Status.DURABILITY_IMPOSSIBLE)
        return False

    def _prepare(
        self, asked: _Durability, *, value: bytes | MakeValue, datatype: Datatype, flags: int = 0, expiry: int = 0,
        is_removal: bool = False,
    ) -> Written:  # fmt: skip
        """Begin a durable write. The result has the final CAS, but the seqno of the prepare."""
        sync_writes = self.service.sync_writes
        if not is_possible(sync_writes.chains(self.vbucket)):
            raise RequestRefused(Status.DURABILITY_IMPOSSIBLE)
        if sync_writes.is_full or self.bucket.prepares.held_bytes >= PENDING_BYTES_MAX:
            raise RequestRefused(Status.ETMPFAIL, "too many durable writes are in progress")
        prepare = self.bucket.put_prepare(
            self.vbucket, collection_id=self.collection.id, key=self.key, value=value, datatype=datatype,
            level=asked.level, flags=flags, expiry=expiry, is_removal=is_removal,
        )  # fmt: skip
        entry = self.find()
        if entry is not None and entry.is_locked:
            # The holder of the lock has written, but until the commit the locked version is still the newest.
            self.release(entry)
        self.service.on_change()
        self.context.sync_write = sync_writes.begin(prepare, deadline_s=self.context.service.now_s() + asked.timeout_s)
        return Written(seqno=prepare.seqno, cas=prepare.cas, commit=prepare.commit)


# --- vbuckets and collections -------------------------------------------------------------------------------------


def check_vbucket(context: Context, vbucket: VBucketId, state: VBucketState = VBucketState.ACTIVE) -> None:
    """Refuse a request for a vbucket that is damaged, or not here in this state."""
    refuse_damaged(context, vbucket)
    if context.bucket_service.bucket.vbuckets.state(vbucket) != state:
        refuse_vbucket(context)


def refuse_damaged(context: Context, vbucket: int) -> None:
    """Refuse a request for a vbucket whose stored data is damaged. kv_engine has the same status for a document that it
    can't read (couchstore's checksum errors are temporary failures): the client retries, maybe with a replica."""
    damage = context.bucket_service.bucket.vbuckets.damage.get(vbucket)
    if damage is not None:
        raise RequestRefused(Status.ETMPFAIL, damage.reason)


def refuse_vbucket(context: Context) -> NoReturn:
    """Refuse a request for a vbucket that is not here. The answer has the cluster config, which says where it is."""
    raise RequestRefused(Status.NOT_MY_VBUCKET, body=context.service.cluster_config(context.bucket_service.name))


def collection_by_id(context: Context, collection_id: CollectionId) -> Collection:
    manifest = context.bucket_service.bucket.manifest
    found = manifest.collection_by_id(collection_id)
    if found is None:
        raise RequestRefused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")
    return found[1]


# --- expiry -------------------------------------------------------------------------------------------------------


def expiry_time(asked: int, *, now_s: int, max_ttl_s: int | None, is_time: bool = False) -> int:
    """The time at which a document expires, in seconds since 1970; 0 for never.

    `asked` up to `RELATIVE_EXPIRY_S_MAX` is relative to now, unless `is_time` is set. `max_ttl_s` is the longest life
    that the collection or bucket allows.
    """
    expiry = now_s + asked if NEVER < asked <= RELATIVE_EXPIRY_S_MAX and not is_time else asked
    if max_ttl_s:
        bound = now_s + max_ttl_s
        expiry = bound if expiry == NEVER else min(expiry, bound)
    return min(expiry, _TIME_S_MAX)


def preserves_ttl(context: Context) -> bool:
    """Whether the request preserves the expiry of an existing document."""
    return find(context.request.frame_infos, RequestInfo.PRESERVE_TTL) is not None


# --- values -------------------------------------------------------------------------------------------------------
#
# A compressed body is inflated to check it, but stored as received unless the document has extended attributes. These
# precede the body in the value. Plain commands neither set nor see them, and a new body keeps them.


def received_body(context: Context, value: bytes) -> bytes:
    """The body that a client has sent, inflated."""
    return _received(context, value, context.session.datatypes)


def received_parts(context: Context, value: bytes) -> tuple[bytes, bytes]:
    """The section of extended attributes that a client has sent, which may be empty, and the body."""
    xattrs = Datatype.XATTR if context.session.has(Feature.XATTR) else Datatype.RAW
    value = _received(context, value, context.session.datatypes | xattrs)
    if not context.request.datatype & Datatype.XATTR:
        return b"", value
    try:
        body = values.decode_xattrs(value).body
    except MalformedXattrs as error:
        raise RequestRefused(Status.XATTR_EINVAL, error.reason) from error
    return value[: len(value) - len(body)], body


def _received(context: Context, value: bytes, allowed: Datatype) -> bytes:
    datatype = context.request.datatype
    if int(datatype) & ~int(allowed):
        raise RequestRefused(Status.EINVAL, f"datatype 0x{datatype:02x} was not negotiated, or is not for this command")
    if datatype & Datatype.SNAPPY:
        try:
            inflated_size = values.decompressed_bytes(value)
            if inflated_size > VALUE_BYTES_MAX:
                raise RequestRefused(Status.E2BIG, f"a value has at most {VALUE_BYTES_MAX} bytes when it is inflated")
            value = context.work(values.decompress, value, cost=inflated_size)
        except MalformedSnappy as error:
            raise RequestRefused(Status.EINVAL, error.reason) from error
    _check_size(value)
    return value


def _check_size(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise RequestRefused(Status.E2BIG, f"a value has at most {VALUE_BYTES_MAX} bytes")


def split_value(document: Document) -> tuple[bytes, bytes]:
    """The section of extended attributes, which may be empty, and the body."""
    at = values.body_offset(document.value) if document.datatype & Datatype.XATTR else 0
    return document.value[:at], document.value[at:]


def join_value(context: Context, xattrs: bytes, body: bytes) -> tuple[bytes, Datatype]:
    """The value to store and its datatype. Whether the body is JSON is checked, whatever datatype its writer sent."""
    value = xattrs + body
    _check_size(value)
    datatype = Datatype.JSON if context.work(is_json, body, cost=len(body)) else Datatype.RAW
    return value, datatype | (Datatype.XATTR if xattrs else Datatype.RAW)


def shown_value(context: Context, document: Document) -> dict[str, Any]:
    """The fields of a response that show the body of a document. A value that is stored compressed is sent compressed
    if the client has negotiated that (as in kv_engine's passive mode)."""
    datatypes = context.session.datatypes
    if document.packed is not None and datatypes & Datatype.SNAPPY:
        return {"value": document.packed, "datatype": document.stored_datatype & datatypes}
    return {"value": split_value(document)[1], "datatype": document.datatype & datatypes}


def whole_value(document: Document) -> dict[str, Any]:
    """The fields of a response that shows the document as it is stored, for a peer that accepts every datatype."""
    return {"value": document.stored_value, "datatype": document.stored_datatype}

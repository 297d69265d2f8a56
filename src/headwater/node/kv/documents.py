"""What handlers do to one document: find it, check its lock and its CAS, write a version, and bring values in form.

Handlers of whole documents and of sub-documents call these; whether a client may do so has been checked by then. What
is found may not be durable yet, and an answer that shows it, be it a document or that there is none, has to wait until
it is: otherwise a crash could take back what a client has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np

from headwater.errors import MalformedFrameInfo, MalformedSnappy, MalformedXattrs
from headwater.node.durability import TIMEOUT_MS_INFINITE, TIMEOUT_S_DEFAULT, is_possible
from headwater.node.kv.context import Context
from headwater.node.service import BucketService, Lock, RequestRefused
from headwater.protocol.features import Feature
from headwater.protocol.frames import DurabilityLevel, RequestInfo, decode_durability, find
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.manifest import Collection
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import (
    DEFAULT_COLLECTION,
    RELATIVE_EXPIRY_S_MAX,
    VALUE_BYTES_MAX,
    Cas,
    CollectionId,
    VBucketId,
)
from headwater.protocol.status import Status
from headwater.protocol.values import (
    Datatype,
    body_offset,
    decode_xattrs,
    decompress,
    decompressed_bytes,
    keep_system_xattrs,
)
from headwater.store.bucket import Bucket, GivenVersion, MakeValue, Written
from headwater.store.compaction import expire_document, is_expired
from headwater.store.data_format import Document, Entry
from headwater.store.prepares import PENDING_BYTES_MAX


class DocumentRequest(Protocol):
    """A request about one document."""

    @property
    def vbucket(self) -> VBucketId: ...

    @property
    def collection_id(self) -> CollectionId | None: ...

    @property
    def key(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The document that a request is about, whether it exists or not."""

    service: BucketService
    vbucket: VBucketId
    collection: Collection
    key: bytes

    @property
    def bucket(self) -> Bucket:
        return self.service.bucket

    @property
    def max_ttl_s(self) -> int:
        return self.bucket.max_ttl_s_of(self.collection)

    def find(self) -> Entry | None:
        """What the index knows, deleted and expired documents included."""
        return self.bucket.find(self.vbucket, self.collection.id, self.key)

    def read(self, entry: Entry) -> Document:
        return self.bucket.read(self.vbucket, entry)


def target_of(context: Context, request: DocumentRequest, *, state: VBucketState = VBucketState.ACTIVE) -> Target:
    """The document a request is about. The vbucket must be here and in this state, the collection must exist."""
    service = context.bucket_service
    refuse_damaged(service, request.vbucket)
    if service.bucket.vbuckets.state(request.vbucket) != state:
        refuse_vbucket(context)
    collection_id = DEFAULT_COLLECTION if request.collection_id is None else request.collection_id
    collection = collection_by_id(context, collection_id)
    return Target(service=service, vbucket=request.vbucket, collection=collection, key=request.key)


def target_to_write(context: Context, request: DocumentRequest) -> Target:
    """A document that is to be written. One that has an undecided durable write is left to that."""
    target = target_of(context, request)
    in_the_way = target.service.sync_writes.in_the_way(target.vbucket, target.collection.id, target.key)
    if in_the_way is not None:
        raise RequestRefused(in_the_way)
    return target


def refuse_damaged(service: BucketService, vbucket: int) -> None:
    """A vbucket whose stored data is damaged serves nothing. kv_engine has the same status for a document it can't read
    (couchstore's checksum errors are temporary failures): the client tries again, maybe with a replica by then."""
    damage = service.bucket.vbuckets.damage.get(vbucket)
    if damage is not None:
        raise RequestRefused(Status.ETMPFAIL, damage.reason)


def refuse_vbucket(context: Context) -> NoReturn:
    """The vbucket is not here. The cluster config says where it is."""
    raise RequestRefused(Status.NOT_MY_VBUCKET, body=context.service.cluster_config(context.bucket_service.name))


def collection_by_id(context: Context, collection_id: CollectionId) -> Collection:
    manifest = context.bucket_service.bucket.manifest
    found = manifest.collection_by_id(collection_id)
    if found is None:
        raise RequestRefused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")
    return found[1]


def newest(context: Context, target: Target) -> Entry | None:
    """The newest version of a document, or its tombstone. One that has expired becomes an expiration first."""
    bucket = target.bucket
    entry = target.find()
    has_expired = entry is not None and is_expired(entry, bucket.environment.now_s())
    if entry is not None and has_expired and bucket.vbuckets.state(target.vbucket) == VBucketState.ACTIVE:
        if bucket.prepares.find(target.vbucket, target.collection.id, target.key) is not None:
            # A durable write is about to give it another version. Until then no client sees the old one.
            return None
        expire_document(bucket, target.vbucket, entry)
        target.service.on_change()
        entry = target.find()
    if entry is not None and target.service.ack_when_durable:
        context.wait_for(bucket.commit_of(entry))
    return entry


def live(context: Context, target: Target) -> Entry | None:
    """The newest version of a document that is neither deleted nor expired."""
    entry = newest(context, target)
    # A replica's documents expire when its active copy says so, but no client sees them meanwhile.
    if entry is None or entry.is_deleted or is_expired(entry, target.bucket.environment.now_s()):
        return None
    return entry


def live_or_refuse(context: Context, target: Target) -> Entry:
    entry = live(context, target)
    if entry is None:
        raise RequestRefused(Status.KEY_ENOENT)
    return entry


# --- expiry -------------------------------------------------------------------------------------------------------


_TIME_S_MAX = 2**32 - 1

NEVER = 0


def expiry_time(asked: int, *, now_s: int, max_ttl_s: int | None) -> int:
    """The time at which a document expires, in seconds since 1970; 0 for never.

    A small number counts from now, a large one is a time. A collection may bound the lives of its documents.
    """
    expiry = now_s + asked if NEVER < asked <= RELATIVE_EXPIRY_S_MAX else asked
    return bounded_expiry(expiry, now_s=now_s, max_ttl_s=max_ttl_s)


def bounded_expiry(expiry: int, *, now_s: int, max_ttl_s: int | None) -> int:
    """A time at which a document expires, 0 for never, within the bound of its collection."""
    if max_ttl_s:
        bound = now_s + max_ttl_s
        expiry = bound if expiry == NEVER else min(expiry, bound)
    return min(expiry, _TIME_S_MAX)


def preserves_ttl(request: Request) -> bool:
    """The request asks to leave the expiry of a document that exists as it is."""
    return find(request.frame_infos, RequestInfo.PRESERVE_TTL) is not None


# --- locks --------------------------------------------------------------------------------------------------------
#
# They live in memory only, and run out by themselves. The index marks a locked document, and any new version of it
# loses the mark; who holds the lock and for how long is kept beside it. A record whose document has no mark any more is
# left over and means nothing.


LOCK_S_DEFAULT = 15
LOCK_S_MAX = 30
LOCKS_MAX = 100_000
"""Locks of a bucket at a time."""

LOCKED_CAS = Cas(2**64 - 1)
"""What others see as the CAS of a locked document, so that they can't write with it."""


def lock_on(target: Target, entry: Entry) -> Lock | None:
    """The lock on a document, if it has one that has not run out."""
    lock = target.service.locks.get(_key(target)) if entry.is_locked else None
    if lock is None or lock.until_ns > target.bucket.environment.now_ns():
        return lock
    release(target, entry)
    return None


def take_lock(target: Target, entry: Entry, *, lock_s: int) -> Cas:
    """Lock a document. Returns the CAS that opens it, a new one, so that no client has it from an earlier read."""
    _make_room(target.service)
    now_ns = target.bucket.environment.now_ns()
    cas = target.bucket.vbuckets.next_cas(target.vbucket, now_ns)
    target.service.locks[_key(target)] = Lock(cas=cas, until_ns=now_ns + lock_s * 1_000_000_000)
    target.bucket.set_locked(target.vbucket, target.collection.id, target.key, entry, locked=True)
    return cas


def release(target: Target, entry: Entry) -> None:
    """End a lock. The document is what it was before."""
    forget(target)
    target.bucket.set_locked(target.vbucket, target.collection.id, target.key, entry, locked=False)


def forget(target: Target) -> None:
    """The document has a new version, which is not locked."""
    target.service.locks.pop(_key(target), None)


def check_cas(target: Target, entry: Entry, cas: Cas) -> None:
    """Whether a write with this CAS may replace this version. One with the CAS of a lock may, and ends it."""
    lock = lock_on(target, entry)
    if lock is not None:
        if cas != lock.cas:
            raise RequestRefused(Status.LOCKED)
    elif cas not in (0, entry.cas):
        raise RequestRefused(Status.KEY_EEXISTS)


def shown_cas(target: Target, entry: Entry) -> Cas:
    return entry.cas if lock_on(target, entry) is None else LOCKED_CAS


def _key(target: Target) -> tuple[int, CollectionId, bytes]:
    return target.vbucket, target.collection.id, target.key


def _make_room(service: BucketService) -> None:
    if len(service.locks) < LOCKS_MAX:
        return
    now_ns = service.bucket.environment.now_ns()
    service.locks = {key: lock for key, lock in service.locks.items() if lock.until_ns > now_ns}
    if len(service.locks) >= LOCKS_MAX:
        raise RequestRefused(Status.ETMPFAIL, f"the bucket has {LOCKS_MAX} locked documents")


# --- writing ------------------------------------------------------------------------------------------------------
#
# A write that asks for durability on a vbucket with copies elsewhere is only begun here (`node.durability`): it is
# prepared, and answered when the copies have acknowledged that. Where this is the only copy, a durable write is one
# like any other that is answered when it is durable.


def store(
    context: Context, target: Target, *, value: bytes | MakeValue, datatype: Datatype, flags: int, expiry: int,
    given: GivenVersion | None = None,
) -> Written:  # fmt: skip
    """Store a new version. Whether it may be stored has been decided. One that was made elsewhere is never durable."""
    asked = _asked(context) if given is None else None
    if asked is not None and _has_copies(target):
        return _prepare(context, target, asked, value=value, datatype=datatype, flags=flags, expiry=expiry)
    written = target.bucket.put_mutation(
        target.vbucket,
        collection_id=target.collection.id,
        key=target.key,
        value=value,
        datatype=datatype,
        flags=flags,
        expiry=expiry,
        given=given,
    )
    return _taken(context, target, written, must_be_durable=asked is not None)


def remove(
    context: Context, target: Target, *, value: bytes | MakeValue, datatype: Datatype, expired: bool = False,
    delete_time: int | None = None, given: GivenVersion | None = None,
) -> Written:  # fmt: skip
    """Store a tombstone. `value` holds the extended attributes that outlive the document."""
    asked = _asked(context) if given is None and not expired else None
    if asked is not None and _has_copies(target):
        return _prepare(context, target, asked, value=value, datatype=datatype, is_removal=True)
    written = target.bucket.put_removal(
        target.vbucket, collection_id=target.collection.id, key=target.key, value=value, datatype=datatype,
        expired=expired, delete_time=delete_time, given=given,
    )  # fmt: skip
    return _taken(context, target, written, must_be_durable=asked is not None)


def xattrs_to_keep(target: Target, entry: Entry) -> bytes:
    """The extended attributes that outlive a document."""
    return keep_system_xattrs(target.read(entry).value) if entry.has_xattrs else b""


def mutation_token(context: Context, target: Target, written: Written) -> dict[str, Any]:
    """The fields of a response that say where a write stands in the vbucket's history, if they were asked for."""
    if not context.session.has(Feature.MUTATION_SEQNO):
        return {}
    facts = target.bucket.vbuckets.facts[target.vbucket]
    assert facts is not None, "only vbuckets that exist are written to"
    return {"vbuuid": facts.failover_log.newest.vbuuid, "seqno": written.seqno}


def _taken(context: Context, target: Target, written: Written, *, must_be_durable: bool) -> Written:
    forget(target)
    target.service.on_change()
    if must_be_durable or target.service.ack_when_durable:
        context.wait_for(written.commit)
    return written


# --- durable writes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    level: DurabilityLevel
    timeout_s: float


def _asked(context: Context) -> _Asked | None:
    """The durability that the request asks for, or the bucket for it, whichever is the higher level."""
    try:
        asked = decode_durability(context.request.frame_infos)
    except MalformedFrameInfo as error:
        raise RequestRefused(Status.EINVAL, error.reason) from error
    least = context.bucket_service.settings.durability_min_level
    if asked is None:
        return _Asked(level=DurabilityLevel(least), timeout_s=TIMEOUT_S_DEFAULT) if least else None
    level, timeout_ms = asked
    if not level.is_known:
        raise RequestRefused(Status.DURABILITY_INVALID_LEVEL)
    if timeout_ms == TIMEOUT_MS_INFINITE:
        # As noted with the recorded durability session of 8.0.2.
        raise RequestRefused(Status.DURABILITY_INVALID_LEVEL, "a durable write can't have an infinite time-out")
    timeout_s = timeout_ms / 1000 if timeout_ms else TIMEOUT_S_DEFAULT
    return _Asked(level=DurabilityLevel(max(level, least)), timeout_s=timeout_s)


def _has_copies(target: Target) -> bool:
    """Every level of durability is met by one durable copy, as long as there are no others and none are asked for."""
    if target.service.sync_writes.chains(target.vbucket):
        return True
    if target.service.must_have_copies:
        raise RequestRefused(Status.DURABILITY_IMPOSSIBLE)
    return False


def _prepare(
    context: Context, target: Target, asked: _Asked, *, value: bytes | MakeValue, datatype: Datatype, flags: int = 0,
    expiry: int = 0, is_removal: bool = False,
) -> Written:  # fmt: skip
    """Begin a durable write. What is returned has the CAS that it will have, and for now the prepare's seqno."""
    sync_writes = target.service.sync_writes
    if not is_possible(sync_writes.chains(target.vbucket)):
        raise RequestRefused(Status.DURABILITY_IMPOSSIBLE)
    if sync_writes.is_full or target.bucket.prepares.held_bytes >= PENDING_BYTES_MAX:
        raise RequestRefused(Status.ETMPFAIL, "too many durable writes are in progress")
    prepare = target.bucket.put_prepare(
        target.vbucket, collection_id=target.collection.id, key=target.key, value=value, datatype=datatype,
        level=asked.level, flags=flags, expiry=expiry, is_removal=is_removal,
    )  # fmt: skip
    entry = target.find()
    if entry is not None and entry.is_locked:
        # The lock's holder has written. The version that was locked is still the newest.
        release(target, entry)
    target.service.on_change()
    context.sync_write = sync_writes.begin(prepare, deadline_s=context.service.now_s() + asked.timeout_s)
    return Written(seqno=prepare.seqno, cas=prepare.cas, commit=prepare.commit)


# --- values -------------------------------------------------------------------------------------------------------
#
# A body that comes compressed is checked, and stored as it came unless the document has extended attributes. Those
# stand in front of the body; plain commands neither bring nor see them, and a new body leaves those there are in place.


def received_body(context: Context, value: bytes) -> bytes:
    """The body that a client sends, inflated."""
    return _received(context, value, context.session.datatypes)


def received_parts(context: Context, value: bytes) -> tuple[bytes, bytes]:
    """The section of extended attributes that a client sends, which may be empty, and the body."""
    xattrs = Datatype.XATTR if context.session.has(Feature.XATTR) else Datatype.RAW
    value = _received(context, value, context.session.datatypes | xattrs)
    if not context.request.datatype & Datatype.XATTR:
        return b"", value
    try:
        body = decode_xattrs(value).body
    except MalformedXattrs as error:
        raise RequestRefused(Status.XATTR_EINVAL, error.reason) from error
    return value[: len(value) - len(body)], body


def _received(context: Context, value: bytes, allowed: Datatype) -> bytes:
    datatype = context.request.datatype
    if int(datatype) & ~int(allowed):
        raise RequestRefused(Status.EINVAL, f"datatype 0x{datatype:02x} was not negotiated, or is not for this command")
    if datatype & Datatype.SNAPPY:
        value = _inflated(value)
    check_size(value)
    return value


def check_size(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise RequestRefused(Status.E2BIG, f"a value has at most {VALUE_BYTES_MAX} bytes")


def split_value(document: Document) -> tuple[bytes, bytes]:
    """The section of extended attributes, which may be empty, and the body."""
    at = body_offset(document.value) if document.datatype & Datatype.XATTR else 0
    return document.value[:at], document.value[at:]


def shown_value(context: Context, document: Document) -> dict[str, Any]:
    """The fields of a response that show the body of a document.

    What is stored compressed is sent so, if the client knows of that (as kv_engine does in its passive mode).
    """
    datatypes = context.session.datatypes
    if document.packed is not None and datatypes & Datatype.SNAPPY:
        return {"value": document.packed, "datatype": document.stored_datatype & datatypes}
    return {"value": split_value(document)[1], "datatype": document.datatype & datatypes}


def whole_value(document: Document) -> dict[str, Any]:
    """The fields of a response that has the document as it is stored, for a peer that takes every datatype."""
    return {"value": document.stored_value, "datatype": document.stored_datatype}


def join_value(xattrs: bytes, body: bytes) -> tuple[bytes, Datatype]:
    """The value to store and its datatype: the body is JSON if it is, whatever its writer says."""
    value = xattrs + body
    check_size(value)
    datatype = Datatype.JSON if is_json(np.frombuffer(body, dtype=np.uint8), 0, len(body)) else Datatype.RAW
    return value, datatype | (Datatype.XATTR if xattrs else Datatype.RAW)


def _inflated(value: bytes) -> bytes:
    try:
        if decompressed_bytes(value) > VALUE_BYTES_MAX:
            raise RequestRefused(Status.E2BIG, f"a value has at most {VALUE_BYTES_MAX} bytes when it is inflated")
        return decompress(value)
    except MalformedSnappy as error:
        raise RequestRefused(Status.EINVAL, error.reason) from error

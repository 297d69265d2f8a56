"""Locks on documents. They live in memory only, and run out by themselves.

The index marks a locked document, and any new version of it loses the mark; who holds the lock and for how long is kept
beside it. A record whose document has no mark any more is left over and means nothing.
"""

from __future__ import annotations

from headwater.node.kv.access import Place
from headwater.node.kv.context import Refused
from headwater.node.kv.service import BucketService, Lock
from headwater.protocol.numbers import Cas, CollectionId
from headwater.protocol.status import Status
from headwater.store.index import Entry

LOCKS_MAX = 100_000
"""Locks of a bucket at a time."""

LOCKED_CAS = Cas(2**64 - 1)
"""What others see as the CAS of a locked document, so that they can't write with it."""


def lock_on(place: Place, entry: Entry) -> Lock | None:
    """The lock on a document, if it has one that has not run out."""
    lock = place.service.locks.get(_key(place)) if entry.is_locked else None
    if lock is None or lock.until_ns > place.bucket.outside.now_ns():
        return lock
    release(place, entry)
    return None


def take_lock(place: Place, entry: Entry, *, lock_s: int) -> Cas:
    """Lock a document. Returns the CAS that opens it, a new one, so that nobody has it from an earlier read."""
    _make_room(place.service)
    now_ns = place.bucket.outside.now_ns()
    cas = place.bucket.vbuckets.next_cas(place.vbucket, now_ns)
    place.service.locks[_key(place)] = Lock(cas=cas, until_ns=now_ns + lock_s * 1_000_000_000)
    place.bucket.set_locked(place.vbucket, place.collection.id, place.key, entry, locked=True)
    return cas


def release(place: Place, entry: Entry) -> None:
    """Let go of a lock. The document is what it was before."""
    forget(place)
    place.bucket.set_locked(place.vbucket, place.collection.id, place.key, entry, locked=False)


def forget(place: Place) -> None:
    """The document has a new version, which is not locked."""
    place.service.locks.pop(_key(place), None)


def forget_vbuckets(service: BucketService, vbuckets: set[int]) -> None:
    """These vbuckets are gone, or empty."""
    service.locks = {key: lock for key, lock in service.locks.items() if key[0] not in vbuckets}


def check_cas(place: Place, entry: Entry, cas: Cas) -> None:
    """Whether a write with this CAS may replace this version. One with the CAS of a lock may, and ends it."""
    lock = lock_on(place, entry)
    if lock is not None:
        if cas != lock.cas:
            raise Refused(Status.LOCKED)
    elif cas not in (0, entry.cas):
        raise Refused(Status.KEY_EEXISTS)


def shown_cas(place: Place, entry: Entry) -> Cas:
    return entry.cas if lock_on(place, entry) is None else LOCKED_CAS


def _key(place: Place) -> tuple[int, CollectionId, bytes]:
    return place.vbucket, place.collection.id, place.key


def _make_room(service: BucketService) -> None:
    if len(service.locks) < LOCKS_MAX:
        return
    now_ns = service.bucket.outside.now_ns()
    service.locks = {key: lock for key, lock in service.locks.items() if lock.until_ns > now_ns}
    if len(service.locks) >= LOCKS_MAX:
        raise Refused(Status.ETMPFAIL, f"the bucket has {LOCKS_MAX} locked documents")

"""Writing a document: a new version of it or its tombstone, and what the answer says of it.

A write that asks for durability on a vbucket with copies elsewhere is only begun here (`node.durability`): it is
prepared, and answered when the copies have acknowledged that. Where this is the only copy, a durable write is one like
any other that is answered when it is durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.errors import MalformedFrameInfo
from headwater.node.durability.sync_writes import TIMEOUT_S_DEFAULT
from headwater.node.durability.topology import is_possible
from headwater.node.kv import locks
from headwater.node.kv.access import Place
from headwater.node.kv.context import Context, Refused
from headwater.protocol.datatype import Datatype
from headwater.protocol.features import Feature
from headwater.protocol.frame_info import DurabilityLevel, decode_durability
from headwater.protocol.status import Status
from headwater.protocol.xattrs import keep_system_xattrs
from headwater.store.bucket import MakeValue, Written
from headwater.store.index import Entry
from headwater.store.prepares import PENDING_BYTES_MAX, put_prepare


def store(
    context: Context, place: Place, *, value: bytes | MakeValue, datatype: Datatype, flags: int, expiry: int
) -> Written:
    """Store a new version. Whether it may be stored has been decided."""
    asked = _asked(context)
    if asked is not None and _has_copies(place):
        return _prepare(context, place, asked, value=value, datatype=datatype, flags=flags, expiry=expiry)
    written = place.bucket.put_mutation(
        place.vbucket,
        collection_id=place.collection.id,
        key=place.key,
        value=value,
        datatype=datatype,
        flags=flags,
        expiry=expiry,
    )
    return _taken(context, place, written, must_be_durable=asked is not None)


def remove(context: Context, place: Place, *, value: bytes | MakeValue, datatype: Datatype) -> Written:
    """Store a tombstone. `value` holds the extended attributes that outlive the document."""
    asked = _asked(context)
    if asked is not None and _has_copies(place):
        return _prepare(context, place, asked, value=value, datatype=datatype, is_removal=True)
    written = place.bucket.put_removal(
        place.vbucket, collection_id=place.collection.id, key=place.key, value=value, datatype=datatype
    )
    return _taken(context, place, written, must_be_durable=asked is not None)


def xattrs_to_keep(place: Place, entry: Entry) -> bytes:
    """The extended attributes that outlive a document."""
    return keep_system_xattrs(place.read(entry).value) if entry.has_xattrs else b""


def mutation_token(context: Context, place: Place, written: Written) -> dict[str, Any]:
    """The fields of a response that say where a write stands in the vbucket's history, if they were asked for."""
    if not context.session.has(Feature.MUTATION_SEQNO):
        return {}
    facts = place.bucket.vbuckets.facts[place.vbucket]
    assert facts is not None, "only vbuckets that exist are written to"
    return {"vbuuid": facts.failover_log.newest.vbuuid, "seqno": written.seqno}


def _taken(context: Context, place: Place, written: Written, *, must_be_durable: bool) -> Written:
    locks.forget(place)
    place.service.on_change()
    if must_be_durable or place.service.ack_when_durable:
        context.wait_for(written.commit)
    return written


# --- durable writes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    level: DurabilityLevel
    timeout_s: float


def _asked(context: Context) -> _Asked | None:
    """The durability that the request asks for."""
    try:
        asked = decode_durability(context.request.frame_infos)
    except MalformedFrameInfo as error:
        raise Refused(Status.EINVAL, error.reason) from error
    if asked is None:
        return None
    level, timeout_ms = asked
    if not level.is_known:
        raise Refused(Status.DURABILITY_INVALID_LEVEL)
    return _Asked(level=level, timeout_s=timeout_ms / 1000 if timeout_ms else TIMEOUT_S_DEFAULT)


def _has_copies(place: Place) -> bool:
    """Every level of durability is met by one durable copy as long as there are no others."""
    return bool(place.service.sync_writes.chains(place.vbucket))


def _prepare(
    context: Context, place: Place, asked: _Asked, *, value: bytes | MakeValue, datatype: Datatype, flags: int = 0,
    expiry: int = 0, is_removal: bool = False,
) -> Written:  # fmt: skip
    """Begin a durable write. What is returned has the CAS that it will have, and for now the prepare's seqno."""
    sync_writes = place.service.sync_writes
    if not is_possible(sync_writes.chains(place.vbucket)):
        raise Refused(Status.DURABILITY_IMPOSSIBLE)
    if sync_writes.is_full or place.bucket.prepares.held_bytes >= PENDING_BYTES_MAX:
        raise Refused(Status.ETMPFAIL, "too many durable writes are in progress")
    prepare = put_prepare(
        place.bucket, place.vbucket, collection_id=place.collection.id, key=place.key, value=value, datatype=datatype,
        level=asked.level, flags=flags, expiry=expiry, is_removal=is_removal,
    )  # fmt: skip
    _unlock(place)
    place.service.on_change()
    context.sync_write = sync_writes.begin(prepare, deadline_s=context.service.now_s() + asked.timeout_s)
    return Written(seqno=prepare.seqno, cas=prepare.cas, commit=prepare.commit)


def _unlock(place: Place) -> None:
    """The lock's holder has written. The version that was locked is still the newest."""
    entry = place.find()
    if entry is not None and entry.is_locked:
        locks.release(place, entry)

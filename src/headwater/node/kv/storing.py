"""Writing a document: a new version of it or its tombstone, and what the answer says of it."""

from __future__ import annotations

from typing import Any

from headwater.errors import MalformedFrameInfo
from headwater.node.kv import locks
from headwater.node.kv.access import Place
from headwater.node.kv.context import Context, Refused
from headwater.protocol.datatype import Datatype
from headwater.protocol.features import Feature
from headwater.protocol.frame_info import decode_durability
from headwater.protocol.status import Status
from headwater.protocol.xattrs import keep_system_xattrs
from headwater.store.bucket import MakeValue, Written
from headwater.store.index import Entry


def store(
    context: Context, place: Place, *, value: bytes | MakeValue, datatype: Datatype, flags: int, expiry: int
) -> Written:
    """Store a new version. Whether it may be stored has been decided."""
    must_be_durable = _must_be_durable(context, place)
    written = place.bucket.put_mutation(
        place.vbucket,
        collection_id=place.collection.id,
        key=place.key,
        value=value,
        datatype=datatype,
        flags=flags,
        expiry=expiry,
    )
    return _taken(context, place, written, must_be_durable=must_be_durable)


def remove(context: Context, place: Place, *, value: bytes | MakeValue, datatype: Datatype) -> Written:
    """Store a tombstone. `value` holds the extended attributes that outlive the document."""
    must_be_durable = _must_be_durable(context, place)
    written = place.bucket.put_removal(
        place.vbucket, collection_id=place.collection.id, key=place.key, value=value, datatype=datatype
    )
    return _taken(context, place, written, must_be_durable=must_be_durable)


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


def _must_be_durable(context: Context, place: Place) -> bool:
    """Every level of durability is met by one durable copy as long as there are no others."""
    try:
        asked = decode_durability(context.request.frame_infos)
    except MalformedFrameInfo as error:
        raise Refused(Status.EINVAL, error.reason) from error
    if asked is not None and not asked[0].is_known:
        raise Refused(Status.DURABILITY_INVALID_LEVEL)
    return asked is not None or place.service.ack_when_durable


def _taken(context: Context, place: Place, written: Written, *, must_be_durable: bool) -> Written:
    locks.forget(place)
    place.service.on_change()
    if must_be_durable:
        context.wait_for(written.commit)
    return written

"""Handlers that write a whole document: set, add, replace, delete, append, prepend, touch."""

from __future__ import annotations

from headwater.node.kv.access import Place, live, live_or_refuse, place_to_write
from headwater.node.kv.context import Context, Refused
from headwater.node.kv.expiry import expiry_time, preserves_ttl
from headwater.node.kv.locks import check_cas
from headwater.node.kv.storing import mutation_token, remove, store, xattrs_to_keep
from headwater.node.kv.values import body_of, join_value, received_body, split_value
from headwater.protocol.datatype import Datatype
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.documents import (
    Append,
    Delete,
    GetResponse,
    Prepend,
    Set,
    StoreResponse,
    Touch,
)
from headwater.protocol.numbers import Cas
from headwater.protocol.status import Status
from headwater.store.bucket import Written
from headwater.store.documents import Document
from headwater.store.index import Entry

# --- set, add, replace --------------------------------------------------------------------------------------------


def set_document(context: Context, request: Set) -> StoreResponse:
    """Store a document, whether there is one or not; with a CAS, only over the version that has it."""
    place, body = place_to_write(context, request), received_body(context, request.value)
    entry = live(context, place)
    if entry is not None:
        check_cas(place, entry, request.cas)
    elif request.cas:
        raise Refused(Status.KEY_ENOENT)
    return _store_body(context, request, place, body, over=entry)


def add(context: Context, request: Set) -> StoreResponse:
    """Store a document where there is none."""
    if request.cas:
        raise Refused(Status.EINVAL, "a document that is to be added has no CAS yet")
    place, body = place_to_write(context, request), received_body(context, request.value)
    if live(context, place) is not None:
        raise Refused(Status.KEY_EEXISTS)
    return _store_body(context, request, place, body, over=None)


def replace(context: Context, request: Set) -> StoreResponse:
    """Store a document where there is one."""
    place, body = place_to_write(context, request), received_body(context, request.value)
    entry = live_or_refuse(context, place)
    check_cas(place, entry, request.cas)
    return _store_body(context, request, place, body, over=entry)


def _store_body(context: Context, request: Set, place: Place, body: bytes, *, over: Entry | None) -> StoreResponse:
    # A new body leaves the extended attributes alone, those of users too (kv_engine's mutation context has it so).
    xattrs = split_value(place.read(over))[0] if over is not None and over.has_xattrs else b""
    value, datatype = join_value(xattrs, body)
    expiry = over.expiry if over is not None and preserves_ttl(request) else _expiry(place, request.expiry)
    written = store(context, place, value=value, datatype=datatype, flags=request.flags, expiry=expiry)
    return _stored(context, place, written)


def _expiry(place: Place, asked: int) -> int:
    return expiry_time(asked, now_s=place.bucket.outside.now_s(), max_ttl_s=place.collection.max_ttl_s)


def _stored(context: Context, place: Place, written: Written) -> StoreResponse:
    return context.reply(StoreResponse, cas=written.cas, **mutation_token(context, place, written))


# --- delete -------------------------------------------------------------------------------------------------------


def delete(context: Context, request: Delete) -> StoreResponse:
    place = place_to_write(context, request)
    entry = live_or_refuse(context, place)
    check_cas(place, entry, request.cas)
    kept = xattrs_to_keep(place, entry)
    written = remove(context, place, value=kept, datatype=Datatype.XATTR if kept else Datatype.RAW)
    return _stored(context, place, written)


# --- append and prepend -------------------------------------------------------------------------------------------


def append(context: Context, request: Append) -> StoreResponse:
    return _extend(context, request, in_front=False)


def prepend(context: Context, request: Prepend) -> StoreResponse:
    return _extend(context, request, in_front=True)


def _extend(context: Context, request: Append, *, in_front: bool) -> StoreResponse:
    """Flags, expiry and extended attributes stay as they are."""
    place, more = place_to_write(context, request), received_body(context, request.value)
    entry = live(context, place)
    if entry is None:
        raise Refused(Status.NOT_STORED)
    check_cas(place, entry, request.cas)
    document = place.read(entry)
    xattrs, body = split_value(document)
    value, datatype = join_value(xattrs, more + body if in_front else body + more)
    written = store(context, place, value=value, datatype=datatype, flags=document.flags, expiry=document.expiry)
    return _stored(context, place, written)


# --- touch --------------------------------------------------------------------------------------------------------


def touch(context: Context, request: Touch) -> PlainResponse:
    _, cas = _touch(context, request)
    return context.ok(cas=cas)


def get_and_touch(context: Context, request: Touch) -> GetResponse:
    document, cas = _touch(context, request)
    return context.reply(
        GetResponse,
        cas=cas,
        datatype=context.session.datatype_for_peer(document.datatype),
        flags=document.flags,
        value=body_of(document),
    )


def _touch(context: Context, request: Touch) -> tuple[Document, Cas]:
    """Give a document another expiry. One that has it already stays the version it is."""
    place = place_to_write(context, request)
    entry = live_or_refuse(context, place)
    check_cas(place, entry, request.cas)
    document = place.read(entry)
    expiry = _expiry(place, request.expiry)
    if expiry == document.expiry:
        return document, entry.cas
    written = store(
        context, place, value=document.value, datatype=document.datatype, flags=document.flags, expiry=expiry
    )
    return document, written.cas

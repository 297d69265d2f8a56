"""Handlers for counters: documents that hold a number of 64 bits as decimal digits."""

from __future__ import annotations

from headwater.node.kv.access import Place, live, place_to_write
from headwater.node.kv.context import Context, Refused
from headwater.node.kv.expiry import expiry_time
from headwater.node.kv.locks import check_cas
from headwater.node.kv.storing import mutation_token, store
from headwater.node.kv.values import join_value, split_value
from headwater.protocol.messages.documents import COUNTER_MUST_EXIST, CounterResponse, Decrement, Increment
from headwater.protocol.status import Status
from headwater.store.bucket import Written
from headwater.store.index import Entry

_COUNTS = 2**64
_DIGITS_MAX = len(str(_COUNTS - 1))


def increment(context: Context, request: Increment) -> CounterResponse:
    """Beyond 64 bits it starts again from 0."""
    return _count(context, request, request.delta)


def decrement(context: Context, request: Decrement) -> CounterResponse:
    """It stops at 0."""
    return _count(context, request, -request.delta)


def _count(context: Context, request: Increment, delta: int) -> CounterResponse:
    place = place_to_write(context, request)
    entry = live(context, place)
    if entry is None:
        count, written = _begin(context, request, place)
    else:
        check_cas(place, entry, request.cas)
        count, written = _go_on(context, place, entry, delta)
    return context.reply(CounterResponse, cas=written.cas, count=count, **mutation_token(context, place, written))


def _begin(context: Context, request: Increment, place: Place) -> tuple[int, Written]:
    if request.expiry == COUNTER_MUST_EXIST or request.cas:
        raise Refused(Status.KEY_ENOENT)
    value, datatype = join_value(b"", b"%d" % request.initial)
    now_s = place.bucket.outside.now_s()
    expiry = expiry_time(request.expiry, now_s=now_s, max_ttl_s=place.collection.max_ttl_s)
    return request.initial, store(context, place, value=value, datatype=datatype, flags=0, expiry=expiry)


def _go_on(context: Context, place: Place, entry: Entry, delta: int) -> tuple[int, Written]:
    """The expiry of a counter that exists stays, whatever the request says."""
    document = place.read(entry)
    xattrs, body = split_value(document)
    count = max(0, _number(body) + delta) % _COUNTS
    value, datatype = join_value(xattrs, b"%d" % count)
    return count, store(context, place, value=value, datatype=datatype, flags=document.flags, expiry=document.expiry)


def _number(body: bytes) -> int:
    if not body.isdigit() or len(body) > _DIGITS_MAX or int(body) >= _COUNTS:
        raise Refused(Status.DELTA_BADVAL, "the document is not a number of 64 bits")
    return int(body)

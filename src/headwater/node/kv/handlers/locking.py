"""Handlers that lock a document and let go of it."""

from __future__ import annotations

from headwater.node.kv.access import live_or_refuse, place_of, place_to_write
from headwater.node.kv.context import Context, Refused
from headwater.node.kv.locks import lock_on, release, take_lock
from headwater.node.kv.service import LOCK_S_DEFAULT, LOCK_S_MAX
from headwater.node.kv.values import body_of
from headwater.protocol.features import Feature
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.documents import GetLocked, GetResponse, Unlock
from headwater.protocol.status import Status


def get_locked(context: Context, request: GetLocked) -> GetResponse:
    """Get a document and lock it. The CAS of the answer opens the lock."""
    place = place_to_write(context, request)
    entry = live_or_refuse(context, place)
    if lock_on(place, entry) is not None:
        raise _refused(context, Status.LOCKED)
    document = place.read(entry)
    # A time that is out of bounds is not refused: it means the default.
    asked_s = request.lock_time_s or 0
    lock_s = asked_s if 0 < asked_s <= LOCK_S_MAX else LOCK_S_DEFAULT
    return context.reply(
        GetResponse,
        cas=take_lock(place, entry, lock_s=lock_s),
        datatype=context.session.datatype_for_peer(document.datatype),
        flags=document.flags,
        value=body_of(document),
    )


def unlock(context: Context, request: Unlock) -> PlainResponse:
    if not request.cas:
        raise Refused(Status.EINVAL, "a document is unlocked with the CAS it was locked with")
    place = place_of(context, request)
    entry = live_or_refuse(context, place)
    lock = lock_on(place, entry)
    if lock is None:
        raise _refused(context, Status.NOT_LOCKED)
    if request.cas != lock.cas:
        raise _refused(context, Status.LOCKED)
    release(place, entry)
    return context.ok()


def _refused(context: Context, status: Status) -> Refused:
    """To a client without extended errors, a lock that is in the way of another one is a passing failure."""
    return Refused(status if context.session.has(Feature.XERROR) else Status.ETMPFAIL)

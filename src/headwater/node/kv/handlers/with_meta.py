"""Handlers of writes that bring their metadata along, as replication between clusters and backup tools send them.

The version keeps the CAS and the revision that it has elsewhere. Where there is another version, conflict resolution
decides which of the two is the newer, by revision or by time as the bucket's `conflictResolutionType` says. The rules
are those of kv_engine's set_with_meta.md and del_with_meta.md.
"""

from __future__ import annotations

from headwater.node.kv.context import Context
from headwater.node.kv.documents import (
    Target,
    bounded_expiry,
    check_cas,
    join_value,
    mutation_token,
    newest,
    received_parts,
    remove,
    store,
    target_to_write,
)
from headwater.node.service import RequestRefused
from headwater.protocol.frames import RequestInfo, find
from headwater.protocol.messages.documents import StoreResponse
from headwater.protocol.messages.with_meta import MetaOptions, SetWithMeta
from headwater.protocol.numbers import Cas
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import GivenVersion, Written
from headwater.store.data_format import Entry

_NO_OPTIONS = MetaOptions(0)
_SET_OPTIONS = MetaOptions.FORCE | MetaOptions.REGENERATE_CAS | MetaOptions.SKIP_CONFLICT_RESOLUTION
_DELETE_OPTIONS = _SET_OPTIONS | MetaOptions.IS_EXPIRATION
_UNRESOLVED = MetaOptions.FORCE | MetaOptions.SKIP_CONFLICT_RESOLUTION
_NO_CAS = frozenset({0, 2**64 - 1})
_REV_SEQNO_MAX = 2**48 - 1
"""kv_engine keeps revisions in 48 bits."""
_FUTURE_NS_MAX = 65 * 60 * 1_000_000_000
"""How far a CAS may be ahead of the clock: kv_engine's bound. All later writes of the vbucket get a higher one."""


def set_with_meta(context: Context, request: SetWithMeta) -> StoreResponse:
    return _store(context, request)


def add_with_meta(context: Context, request: SetWithMeta) -> StoreResponse:
    return _store(context, request, only_new=True)


def _store(context: Context, request: SetWithMeta, *, only_new: bool = False) -> StoreResponse:
    given = _given(context, request, _SET_OPTIONS)
    target, entry = _target(context, request)
    if only_new and entry is not None and not entry.is_deleted:
        raise RequestRefused(Status.KEY_EEXISTS)
    _resolve(context, request, target, entry, is_removal=False)
    value, datatype = join_value(*received_parts(context, request.value))
    # Other than in a plain set, the expiry is always a time: nothing is relative to when it arrives here.
    now_s = target.bucket.environment.now_s()
    expiry = bounded_expiry(request.expiry, now_s=now_s, max_ttl_s=target.max_ttl_s)
    written = store(context, target, value=value, datatype=datatype, flags=request.flags, expiry=expiry, given=given)
    return _stored(context, target, written)


def delete_with_meta(context: Context, request: SetWithMeta) -> StoreResponse:
    """Store a tombstone, also where there is no document: it may have come and gone elsewhere."""
    given = _given(context, request, _DELETE_OPTIONS)
    target, entry = _target(context, request)
    _resolve(context, request, target, entry, is_removal=True)
    xattrs, body = received_parts(context, request.value)
    if body:
        raise RequestRefused(Status.EINVAL, "a deleted document has extended attributes at most, and no body")
    written = remove(
        context,
        target,
        value=xattrs,
        datatype=Datatype.XATTR if xattrs else Datatype.RAW,
        expired=bool(_options(request) & MetaOptions.IS_EXPIRATION),
        delete_time=request.expiry or None,
        given=given,
    )
    return _stored(context, target, written)


def _options(request: SetWithMeta) -> MetaOptions:
    return request.options or _NO_OPTIONS


def _given(context: Context, request: SetWithMeta, known: MetaOptions) -> GivenVersion:
    """The numbers of the version, after what can be wrong with the request whatever is stored."""
    options = _options(request)
    if find(request.frame_infos, RequestInfo.DURABILITY) is not None:
        raise RequestRefused(Status.EINVAL, "a version with metadata of another cluster can't be a durable write")
    # set_with_meta.md: with it a client says that it knows of the resolution by time.
    if _is_by_time(context) != bool(options & MetaOptions.FORCE_ACCEPT):
        raise RequestRefused(
            Status.EINVAL, "FORCE_ACCEPT is for buckets in which the last write wins, and needed there"
        )
    if int(options) & ~int(known | MetaOptions.FORCE_ACCEPT):
        raise RequestRefused(Status.EINVAL, f"these options are not known, or not for this command: 0x{options:x}")
    is_regenerated = bool(options & MetaOptions.REGENERATE_CAS)
    if is_regenerated and not options & _UNRESOLVED:
        raise RequestRefused(Status.EINVAL, "REGENERATE_CAS needs SKIP_CONFLICT_RESOLUTION")
    if request.rev_seqno > _REV_SEQNO_MAX:
        raise RequestRefused(Status.EINVAL, f"a revision is {_REV_SEQNO_MAX} at most")
    if not is_regenerated:
        if request.meta_cas in _NO_CAS:
            raise RequestRefused(Status.KEY_EEXISTS, "no version can have this CAS")
        if request.meta_cas > context.service.now_ns() + _FUTURE_NS_MAX:
            raise RequestRefused(
                Status.CAS_VALUE_INVALID,
                f"the CAS is more than {_FUTURE_NS_MAX // 60_000_000_000} minutes ahead of this node's clock",
            )
    return GivenVersion(cas=None if is_regenerated else Cas(request.meta_cas), rev_seqno=max(1, request.rev_seqno))


def _is_by_time(context: Context) -> bool:
    return context.bucket_service.settings.conflict_resolution == "lww"


def _target(context: Context, request: SetWithMeta) -> tuple[Target, Entry | None]:
    """Where to write, and the newest version there, which the CAS of the header allows to replace.

    FORCE would write to replicas and pending vbuckets, too. Theirs is the history of their active copy, which such a
    write would leave, so it is NOT_MY_VBUCKET here as any other.
    """
    target = target_to_write(context, request)
    entry = newest(context, target)
    if entry is not None and not entry.is_deleted:
        check_cas(target, entry, request.cas)
    elif request.cas:
        raise RequestRefused(Status.KEY_ENOENT)
    return target, entry


def _resolve(context: Context, request: SetWithMeta, target: Target, entry: Entry | None, *, is_removal: bool) -> None:
    """Refuse a version that is not newer than the one that is there."""
    if entry is None or _options(request) & _UNRESOLVED:
        return
    theirs = (max(1, request.rev_seqno), int(request.meta_cas))
    ours = (entry.rev_seqno, int(entry.cas))
    if _is_by_time(context):
        theirs, ours = theirs[::-1], ours[::-1]
    if theirs == ours and not is_removal:
        document = target.read(entry)
        expiry = document.delete_time if document.is_deleted else document.expiry
        wins = (request.expiry, -request.flags) > (expiry, -document.flags)
    else:
        wins = theirs > ours
    if not wins:
        raise RequestRefused(Status.KEY_EEXISTS, "the version that is there is the newer one")


def _stored(context: Context, target: Target, written: Written) -> StoreResponse:
    return context.reply(StoreResponse, cas=written.cas, **mutation_token(context, target, written))

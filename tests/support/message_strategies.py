"""Strategies for arbitrary valid messages, one for every class in the message tables.

Header fields, keys, values and the integers of the extras are drawn from a class's own fields and layouts, so a new
class is covered as soon as it exists. Classes whose value has its own structure are in `STRUCTURED`;
`test_codec_properties` fails for one that is missing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from hypothesis import strategies as st

from headwater.errors import RemoteProtocolError
from headwater.protocol import messages
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.frames import FrameInfo, encode_frame_infos, stream_id
from headwater.protocol.messages import documents, subdocument, vbuckets
from headwater.protocol.messages.base import LayoutField
from headwater.protocol.messages.dcp_changes import CacheItem, CacheTransfer, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import GetFailoverLogResponse, StreamRequestResponse, VBucketState
from headwater.protocol.messages.session import GetErrorMap, Hello, HelloResponse
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.protocol.status import SUCCESSFUL, Status
from headwater.protocol.values import Datatype

OPAQUE_RESPONSES: list[type[messages.Response]] = [messages.PlainResponse, messages.ErrorResponse]
MESSAGE_CLASSES: list[type[messages.Message]] = sorted(
    {*messages.REQUESTS.values(), *messages.RESPONSES.values(), *messages.SERVER_REQUESTS.values(), *OPAQUE_RESPONSES},
    key=lambda cls: cls.__name__,
)

u8 = st.integers(0, 2**8 - 1)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
short_bytes = st.binary(max_size=40)

_FRAMING_EXTRAS_BYTES_MAX = 255
_PLAIN_KEY_BYTES_MAX = 255
"""Flexible framing has one byte for the key's length."""


def _fits(infos: tuple[FrameInfo, ...]) -> bool:
    return len(encode_frame_infos(infos)) <= _FRAMING_EXTRAS_BYTES_MAX


frame_infos = st.one_of(
    st.just(()),
    st.tuples(u16.map(stream_id)),
    st.lists(st.builds(FrameInfo, id=st.integers(0, 270), data=st.binary(max_size=24)), max_size=4)
    .map(tuple)
    .filter(_fits),
    st.tuples(st.builds(FrameInfo, id=st.integers(0, 270), data=st.binary(min_size=200, max_size=252))),
)

# --- values with their own structure ------------------------------------------------------------------------------

failover_entries = st.lists(st.builds(FailoverEntry, vbuuid=u64, seqno=u64), max_size=5).map(tuple)
cache_items = st.builds(
    CacheItem,
    cas=u64,
    seqno=u64,
    rev_seqno=u64,
    flags=u32,
    expiry=u32,
    datatype=u8.map(Datatype),
    cache_hint=u8,
    collection_id=u32,
    key=st.binary(min_size=1, max_size=KEY_BYTES_MAX),
    value=short_bytes,
)
_place = {"vbucket": u16, "key": st.binary(max_size=KEY_BYTES_MAX)}
observed_keys = st.builds(vbuckets.ObservedKey, **_place)
observed_documents = st.builds(vbuckets.ObservedDocument, **_place, state=u8.map(vbuckets.KeyState), cas=u64)
scanned_documents = st.builds(
    documents.ScannedDocument,
    flags=u32,
    expiry=u32,
    seqno=u64,
    cas=u64,
    datatype=u8.map(Datatype),
    key=st.binary(max_size=KEY_BYTES_MAX),
    value=short_bytes,
)
path_flags = u8.map(subdocument.PathFlags)
lookup_specs = st.builds(subdocument.LookupSpec, opcode=u8.map(Opcode), flags=path_flags, path=short_bytes)
mutation_specs = st.builds(
    subdocument.MutationSpec, opcode=u8.map(Opcode), flags=path_flags, path=short_bytes, value=short_bytes
)
lookup_results = st.builds(subdocument.LookupResult, status=u16.map(Status), value=short_bytes)
mutation_results = st.one_of(
    st.builds(subdocument.MutationResult, index=u8, status=st.just(Status.SUCCESS), value=short_bytes),
    st.builds(subdocument.MutationResult, index=u8, status=st.integers(1, 2**16 - 1).map(Status)),
)


def _some(
    items: st.SearchStrategy[Any], *, size_min: int = 0, size_max: int = subdocument.SPECS_MAX
) -> st.SearchStrategy[Any]:
    return st.lists(items, min_size=size_min, max_size=size_max).map(tuple)


_marker_v1 = {"start_seqno": u64, "end_seqno": u64, "flags": u32.map(SnapshotFlags)}
_marker_v2_0 = {**_marker_v1, "max_visible_seqno": u64, "high_completed_seqno": u64}
_marker_v2_2 = {**_marker_v2_0, "high_prepared_seqno": u64, "purge_seqno": u64}
_observed = {"vbucket": u16, "vbuuid": u64, "persisted_seqno": u64, "current_seqno": u64}

Parts = st.SearchStrategy[dict[str, Any]]

STRUCTURED: dict[type[messages.Message], Parts] = {
    CacheTransfer: st.fixed_dictionaries({"items": _some(cache_items, size_min=1, size_max=4)}),
    SnapshotMarker: st.one_of(*map(st.fixed_dictionaries, (_marker_v1, _marker_v2_0, _marker_v2_2))),
    StreamRequestResponse: st.one_of(
        st.fixed_dictionaries({"status": st.just(Status.SUCCESS), "failover_log": failover_entries}),
        st.fixed_dictionaries({"status": st.just(Status.ROLLBACK), "rollback_seqno": u64}),
    ),
    GetFailoverLogResponse: st.fixed_dictionaries({"failover_log": failover_entries}),
    Hello: st.fixed_dictionaries({"features": _some(u16.map(Feature))}),
    HelloResponse: st.fixed_dictionaries({"features": _some(u16.map(Feature))}),
    GetErrorMap: st.fixed_dictionaries({"version": u16}),
    vbuckets.GetVBucketResponse: st.fixed_dictionaries({"state": u32.map(VBucketState)}),
    vbuckets.GetAllVbSeqnosResponse: st.fixed_dictionaries(
        {"seqnos": _some(st.builds(vbuckets.VBucketSeqno, vbucket=u16, seqno=u64))}
    ),
    vbuckets.ObserveSeqno: st.fixed_dictionaries({"vbuuid": u64}),
    vbuckets.ObserveSeqnoResponse: st.one_of(
        st.fixed_dictionaries(_observed),
        st.fixed_dictionaries({**_observed, "old_vbuuid": u64, "last_received_seqno": u64}),
    ),
    vbuckets.Observe: st.fixed_dictionaries({"keys": _some(observed_keys, size_min=1)}),
    vbuckets.ObserveResponse: st.fixed_dictionaries({"documents": _some(observed_documents)}),
    documents.RangeScanCreateResponse: st.fixed_dictionaries({"scan_id": st.binary(min_size=16, max_size=16)}),
    documents.RangeScanContinueResponse: st.one_of(
        st.fixed_dictionaries({"has_documents": st.just(0), "keys": _some(short_bytes)}),
        st.fixed_dictionaries({"has_documents": st.just(1), "documents": _some(scanned_documents)}),
    ),
    documents.SetWithMeta: st.fixed_dictionaries({"value": short_bytes, "extended_meta": st.none() | short_bytes}),
    documents.CounterResponse: st.fixed_dictionaries({"count": u64}),
    subdocument.SubdocGet: st.fixed_dictionaries({"path": short_bytes, "new_value": short_bytes}),
    subdocument.MultiLookup: st.fixed_dictionaries({"specs": _some(lookup_specs)}),
    subdocument.MultiMutation: st.fixed_dictionaries({"specs": _some(mutation_specs)}),
    subdocument.MultiLookupResponse: st.fixed_dictionaries({"results": _some(lookup_results)}),
    subdocument.MultiMutationResponse: st.fixed_dictionaries({"results": _some(mutation_results)}),
}


def structured_parts(cls: type[messages.Message]) -> Parts | None:
    """Return the strategy for the fields that a class encodes itself; a class may inherit it."""
    return next((STRUCTURED[base] for base in cls.__mro__ if base in STRUCTURED), None)


# --- messages -----------------------------------------------------------------------------------------------------

_WIDTHS = {"B": u8, "H": u16, "I": u32, "Q": u64}


def _number(field: LayoutField) -> st.SearchStrategy[int | bytes]:
    if field.code not in _WIDTHS:
        return st.binary(min_size=field.width_bytes, max_size=field.width_bytes)
    return _WIDTHS[field.code].map(field.convert)


def _header(cls: type[messages.Message]) -> Parts:
    parts: dict[str, st.SearchStrategy[Any]] = {
        "opaque": u32,
        "cas": u64,
        "datatype": u8.map(Datatype),
        "frame_infos": frame_infos,
    }
    if issubclass(cls, messages.Request):
        parts["vbucket"] = u16
        if cls.magic is Magic.SERVER_REQUEST:
            parts["frame_infos"] = st.just(())  # Server-initiated frames have no room for them.
    elif issubclass(cls, messages.Response) and cls not in OPAQUE_RESPONSES:
        parts["opcode"] = st.sampled_from(cls.opcodes)
        parts["status"] = st.sampled_from(sorted(cls.statuses))
    return st.fixed_dictionaries(parts)


def _opaque_header(cls: type[messages.Message]) -> Parts:
    """Return opcodes and statuses for which a response is a `PlainResponse` or an `ErrorResponse`."""
    opcodes = st.sampled_from(list(Opcode))
    if cls is messages.PlainResponse:
        pairs = st.tuples(opcodes, st.sampled_from(sorted(SUCCESSFUL)))
    else:
        pairs = st.tuples(opcodes, u16.map(Status).filter(lambda status: status not in SUCCESSFUL))
    return (
        pairs.filter(
            lambda pair: pair[0] not in messages.RESPONSES or pair[1] not in messages.RESPONSES[pair[0]].statuses
        )
        .map(lambda pair: {"opcode": pair[0], "status": pair[1]})
        .flatmap(lambda pair: _header(cls).map(lambda header: {**header, **pair}))
    )


def _extras(cls: type[messages.Message]) -> Parts:
    """Return the integers of one of the layouts, except those that are computed during encoding."""
    if cls in OPAQUE_RESPONSES:
        return st.fixed_dictionaries({"extras": short_bytes})
    names = {field.name for field in fields(cls)}
    by_layout = [
        {field.name: _number(field) for field in layout.fields if field.name in names} for layout in cls.layouts
    ]
    if issubclass(cls, vbuckets.SetVBucket):  # The two layouts differ only in width.
        for is_wide, parts in enumerate(by_layout):
            parts["state_is_wide"] = st.just(bool(is_wide))
    return st.one_of(*map(st.fixed_dictionaries, by_layout))


def _key(cls: type[messages.Message], *, collections: bool) -> Parts:
    by_name = {field.name: field for field in fields(cls)}
    if "key" not in by_name:
        return st.just({})
    size_min = 1 if by_name["key"].default is MISSING else 0
    if "collection_id" not in by_name:
        key = st.one_of(short_bytes, st.binary(max_size=_PLAIN_KEY_BYTES_MAX))
        return st.fixed_dictionaries({"key": key.filter(lambda key: len(key) >= size_min)})
    document_key = st.fixed_dictionaries(
        {"key": st.binary(min_size=1, max_size=KEY_BYTES_MAX), "collection_id": u32 if collections else st.none()}
    )
    # A response to a plain get has neither a key nor a collection id.
    return st.one_of(document_key, st.just({})) if issubclass(cls, documents.GetResponse) else document_key


def _value(cls: type[messages.Message]) -> Parts:
    parts = structured_parts(cls)
    if parts is not None:
        return parts
    value = next((field for field in fields(cls) if field.name == "value"), None)
    if value is None:
        return st.just({})
    return st.fixed_dictionaries({"value": st.binary(min_size=1 if value.default is MISSING else 0, max_size=200)})


@cache
def messages_of(cls: type[messages.Message], *, collections: bool) -> st.SearchStrategy[messages.Message]:
    """Return any valid message of the class, with or without collection ids in document keys."""
    header: Callable[[type[messages.Message]], Parts] = _opaque_header if cls in OPAQUE_RESPONSES else _header
    parts = st.tuples(header(cls), _extras(cls), _key(cls, collections=collections), _value(cls))

    def build(drawn: tuple[dict[str, Any], ...]) -> messages.Message:
        known: dict[str, Any] = {}
        for part in drawn:
            known |= part
        return cls(**known)

    return parts.map(build)


def any_message(*, collections: bool) -> st.SearchStrategy[messages.Message]:
    return st.sampled_from(MESSAGE_CLASSES).flatmap(lambda cls: messages_of(cls, collections=collections))


# Junk may be accepted or refused; this checks how it is refused.


@contextmanager
def only(documented: type[RemoteProtocolError], *, within_bytes: int) -> Iterator[None]:
    """Accept only the documented error, which must point into the bytes and have a hint."""
    try:
        yield
    except documented as error:
        _check(error, within_bytes)


def _check(error: RemoteProtocolError, within_bytes: int) -> None:
    assert error.hint
    assert 0 <= error.offset <= within_bytes

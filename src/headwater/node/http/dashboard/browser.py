"""Handlers for a closer look at a bucket: its changes and documents, its vbuckets, and the streams of a connection.

`app` calls them for users who may see the bucket. Documents are read as they are stored; what can't be decoded is shown
as it is, and no handler changes anything.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.responses import Response

from headwater.client.cluster_map import vbucket_of
from headwater.errors import HeadwaterError
from headwater.node.http.call import Call, Json, Refusal
from headwater.node.http.dashboard.samples import BucketSampler
from headwater.node.producer.statistics import StreamStatistics, connection_statistics
from headwater.phrases import parse_number
from headwater.protocol.features import Opcode
from headwater.protocol.manifest import Collection, Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import SEQNO_MAX
from headwater.protocol.values import Datatype, decode_xattrs
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBUCKETS_MAX, Document, VBucketFacts, decode_document
from headwater.store.scan import CollectionDocuments
from headwater.store.search import CAS_MAX, Search, SearchedBucket, SearchResult, search_changes

STREAMS_SHOWN_MAX = 1024
SEARCH_ROWS_MAX = 200
SEARCH_KEY_CHARS_MAX = 250
NAME_CHARS_MAX = 600
"""Names of collections and connections in a query."""
SEARCH_BYTES_MAX = 256 * 1024 * 1024
"""How much stored data one search reads, newest first."""
SEARCH_S_MAX = 1.0
SEARCHES_WAITING_MAX = 16
"""One search runs at a time; this many may wait."""
COUNTED_EVERY_S = 10.0
"""How long a count of documents by collection is reused."""
_COUNTED_AT_ONCE = 16
PREVIEW_CHARS_MAX = 200
VALUE_CHARS_MAX = 256 * 1024
"""How much of one document is shown."""
_NANOSECONDS_PER_MS = 1_000_000
_OPS = {Opcode.DCP_MUTATION: "mutation", Opcode.DCP_DELETION: "deletion", Opcode.DCP_EXPIRATION: "expiration"}
_TIME_MS_MAX = 10**13 - 1
"""In milliseconds since 1970: the year 2286."""
_EVENT_MAX = 10**9
_CANDIDATES_PER_ROW = 3
"""Of the changes that a search finds, some belong to documents that have changed again since, and do not count."""


class BucketBrowser:
    """The handlers. Searches run in a thread, one at a time."""

    def __init__(self, samplers: Mapping[str, BucketSampler]) -> None:
        self._samplers = samplers
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0
        self._counted: dict[str, tuple[Bucket, float, dict[str, Any]]] = {}
        """By bucket: when its documents were last counted by collection, and the result."""

    # --- changes and documents ------------------------------------------------------------------------------------

    async def show_changes(self, call: Call) -> Response:
        """The newest changes, by collection, a part of the key, kind and time; with `before`, the next page."""
        bucket = call.bucket
        found = await self._search(bucket, _wanted(call))
        rows = [show_change(frame, bucket.manifest) for frame in found.frames]
        return Json({"changes": rows, **_extent(found)})

    async def show_versions(self, call: Call) -> Response:
        """The stored versions of one document, newest first: those in the history window, or the last one."""
        bucket = call.bucket
        wanted = _wanted(call)
        if not wanted.key_part or not wanted.collections:
            raise Refusal.message(400, "Name the collection and the key of the document")
        vbucket = vbucket_of(wanted.key_part, len(bucket.vbuckets))
        found = await self._search(bucket, replace(wanted, is_whole_key=True, vbucket=vbucket))
        return Json({"versions": [show_change(frame, bucket.manifest) for frame in found.frames], **_extent(found)})

    async def show_documents(self, call: Call) -> Response:
        """The documents that were changed last, as they are now."""
        bucket = call.bucket
        wanted = _wanted(call, rows_factor=_CANDIDATES_PER_ROW)
        found = await self._search(bucket, wanted)
        current = [frame for frame in found.frames if _is_current(bucket, frame)]
        rows_max = wanted.rows // _CANDIDATES_PER_ROW
        rows = [show_change(frame, bucket.manifest) for frame in current[:rows_max]]
        extent = _extent(found)
        extent["is_complete"] &= len(current) <= rows_max
        return Json({"documents": rows, **extent})

    async def show_document(self, call: Call) -> Response:
        """One document by its key, in the collection that is named or in the first one that has it."""
        bucket = call.bucket
        name = call.query("collection", chars_max=NAME_CHARS_MAX)
        key = call.query("key", chars_max=SEARCH_KEY_CHARS_MAX).encode()
        if not key:
            raise Refusal.message(400, "A document is found by its key")
        vbucket = vbucket_of(key, len(bucket.vbuckets))
        if not bucket.vbuckets.exists(vbucket):
            raise Refusal.message(404, f"The key belongs to vbucket {vbucket}, which is on another node")
        wanted = [_collection(bucket, name)] if name else [one for _, one in bucket.manifest.collections()]
        found = (bucket.find(vbucket, collection.id, key) for collection in wanted)
        entry = next((one for one in found if one is not None), None)
        if entry is None or bucket.commit_of(entry) > bucket.durable_commit:
            raise Refusal.message(404, f"There is no such document in vbucket {vbucket}")
        return Json(show_document(bucket.read(vbucket, entry), bucket.manifest, vbucket=vbucket))

    async def show_collections(self, call: Call) -> Response:
        """How many documents each collection has in the vbuckets that are active here. If there are too many to read
        them all, only some vbuckets are counted, and `share` is their share of all."""
        bucket, name = call.bucket, call.path("bucket")
        known = self._counted.get(name)
        if known is None or known[0] is not bucket or time.monotonic() - known[1] >= COUNTED_EVERY_S:
            async with self._one_search():
                known = self._counted[name] = bucket, time.monotonic(), await _count_collections(bucket)
        return Json(known[2])

    async def _search(self, bucket: Bucket, wanted: Search) -> SearchResult:
        async with self._one_search():
            return await asyncio.to_thread(search_changes, SearchedBucket.of(bucket), wanted, now_s=time.monotonic)

    @asynccontextmanager
    async def _one_search(self) -> AsyncIterator[None]:
        if self._waiting >= SEARCHES_WAITING_MAX:
            raise Refusal.message(503, "Too many searches at once: try again in a moment")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                yield
        finally:
            self._waiting -= 1

    async def finish_searches(self) -> None:
        """Return once all searches that were requested before have ended."""
        async with self._one_at_a_time:
            pass

    # --- vbuckets and connections ---------------------------------------------------------------------------------

    async def show_vbucket(self, call: Call) -> Response:
        """Everything that is known about one vbucket, including its failover log."""
        bucket, text = call.bucket, call.path("vbucket")
        sampler = self._samplers[call.path("bucket")]
        vbucket = parse_number(text, VBUCKETS_MAX)
        if vbucket is None or not bucket.vbuckets.exists(vbucket):
            raise Refusal.message(404, f"There is no vbucket {text[:8]} on this node")
        facts, numbers = bucket.vbuckets.facts[vbucket], bucket.vbuckets
        assert facts is not None, "the vbucket exists"
        return Json(
            {
                "vbucket": vbucket,
                "state": facts.state.name.lower(),
                "documents": int(sampler.live.counts[vbucket]),
                "high_seqno": numbers.high_seqno(vbucket),
                "durable_seqno": numbers.durable_seqno(vbucket),
                "purge_seqno": facts.purge_seqno,
                "history_start_seqno": facts.history_start_seqno,
                "superseded": int(numbers.superseded[vbucket]),
                "lag": int(sampler.lags()[vbucket]),
                "failover_log": _failover_log(facts),
            }
        )

    async def show_event(self, call: Call) -> Response:
        """The vbuckets of an event: where each branch began, and what is known about the one before."""
        history = self._samplers[call.path("bucket")].events
        number = parse_number(call.path("number"), _EVENT_MAX)
        branches = None if number is None else history.branches_of(number)
        if branches is None:
            raise Refusal.message(404, "Only the newest events still know their vbuckets: see the failover logs")
        rows = [
            {"vbucket": vbucket, "vbuuid": f"{one.vbuuid:012x}", "kept": one.kept_seqno, "known": one.known_seqno}
            for vbucket, one in sorted(branches.items())
        ]
        return Json({"branches": rows})

    async def show_branches(self, call: Call) -> Response:
        """The failover logs of the vbuckets whose history has branched."""
        facts = call.bucket.vbuckets.facts
        branched = [
            {"vbucket": vbucket, "state": one.state.name.lower(), "failover_log": _failover_log(one)}
            for vbucket, one in enumerate(facts)
            if one is not None and len(one.failover_log.entries) > 1
        ]
        return Json({"branched": branched, "unbranched": sum(one is not None for one in facts) - len(branched)})

    async def show_streams(self, call: Call) -> Response:
        """The streams of a connection, those furthest behind first."""
        name = call.query("connection", chars_max=NAME_CHARS_MAX)
        producers = call.service.producer_connections()
        connections = connection_statistics(producers, now_s=call.node.now_s(), name=name)
        if not connections:
            raise Refusal.message(404, "There is no such connection any more")
        streams = sorted(connections[0].streams or (), key=lambda one: (-one.backlog_items, one.vbucket))
        return Json({"streams": [_stream(one) for one in streams[:STREAMS_SHOWN_MAX]], "count": len(streams)})


async def _count_collections(bucket: Bucket) -> dict[str, Any]:
    """Count in random order, so that the vbuckets that were counted represent all of them."""
    active = np.flatnonzero(bucket.vbuckets.states == VBucketState.ACTIVE).tolist()
    deadline_s = time.monotonic() + SEARCH_S_MAX

    def is_over() -> bool:
        return time.monotonic() >= deadline_s

    def count(taken: list[CollectionDocuments]) -> list[dict[int, int] | None]:
        return [one.count(is_over=is_over) for one in taken]

    found: Counter[int] = Counter()
    counted = 0
    order = random.sample(active, len(active))
    for first in range(0, len(order), _COUNTED_AT_ONCE):
        taken = [CollectionDocuments.of(bucket, vbucket) for vbucket in order[first : first + _COUNTED_AT_ONCE]]
        for of_vbucket in await asyncio.to_thread(count, taken):
            if of_vbucket is not None:
                counted += 1
                found.update(of_vbucket)
        if is_over():
            break
    return {"documents": {f"{id_:x}": number for id_, number in found.items()}, "share": counted / max(1, len(active))}


def _wanted(call: Call, *, rows_factor: int = 1) -> Search:
    bucket = call.bucket
    rows = call.number("rows", smallest=1, largest=SEARCH_ROWS_MAX, default=50)
    assert rows is not None
    name = call.query("collection", chars_max=NAME_CHARS_MAX)
    return Search(
        rows=rows * rows_factor,
        bytes_max=SEARCH_BYTES_MAX,
        seconds_max=SEARCH_S_MAX,
        key_part=call.query("key", chars_max=SEARCH_KEY_CHARS_MAX).encode(),
        collections=(_collection(bucket, name).id,) if name else (),
        opcodes=_opcodes(call),
        first_cas=_time_ns(call, "from", default=0),
        before=_before(call),
        vbucket=call.number("vbucket", smallest=0, largest=len(bucket.vbuckets) - 1),
    )


def _opcodes(call: Call) -> tuple[int, ...]:
    text = call.query("op", chars_max=NAME_CHARS_MAX)
    by_name = {name: int(opcode) for opcode, name in _OPS.items()}
    if text and text not in by_name:
        raise Refusal.message(400, f"op is one of {', '.join(by_name)}")
    return (by_name[text],) if text else ()


def _time_ns(call: Call, name: str, *, default: int) -> int:
    """A time of the query, in milliseconds since 1970."""
    text = call.query(name, chars_max=NAME_CHARS_MAX)
    time_ms = parse_number(text, _TIME_MS_MAX)
    if text and time_ms is None:
        raise Refusal.message(400, f"{name} is a time in milliseconds since 1970")
    return default if time_ms is None else time_ms * _NANOSECONDS_PER_MS


def _before(call: Call) -> tuple[int, int]:
    """Where the previous page has ended, or the time up to which changes are requested."""
    text = call.query("before", chars_max=NAME_CHARS_MAX)
    if not text:
        return _time_ns(call, "to", default=CAS_MAX), 0
    parts = text.partition("-")
    cas, vbucket = parse_number(parts[0], CAS_MAX), parse_number(parts[2], VBUCKETS_MAX)
    if cas is None or vbucket is None:
        raise Refusal.message(400, "before is the CAS and the vbucket of a change, like 1700000000000000000-12")
    return cas, vbucket


def _collection(bucket: Bucket, name: str) -> Collection:
    scope_name, _, collection_name = name.partition(".")
    found = bucket.manifest.find(scope_name, collection_name)
    if found is None:
        raise Refusal.message(404, f"There is no collection {name!r}")
    return found


def _extent(found: SearchResult) -> dict[str, Any]:
    return {"is_complete": found.is_complete, "searched_bytes": found.searched_bytes}


def _is_current(bucket: Bucket, frame: bytes) -> bool:
    document = decode_document(frame)
    entry = bucket.find(int.from_bytes(frame[6:8]), document.collection_id, document.key)
    return entry is not None and entry.seqno == document.seqno and not entry.is_deleted


def _failover_log(facts: VBucketFacts) -> list[dict[str, object]]:
    # A vbuuid is text, because numbers in a page's script have 53 bits.
    return [{"vbuuid": f"{entry.vbuuid:012x}", "seqno": entry.seqno} for entry in facts.failover_log.entries]


def _stream(stream: StreamStatistics) -> dict[str, object]:
    return {
        "vbucket": stream.vbucket,
        "stream_id": stream.stream_id,
        "state": stream.state,
        "start_seqno": stream.start_seqno,
        # No end. A page's script can't hold the number itself.
        "end_seqno": None if stream.end_seqno == SEQNO_MAX else stream.end_seqno,
        "last_sent_seqno": stream.last_sent_seqno,
        "backlog": stream.backlog_items,
        "frames": stream.frames_sent,
        "bytes": stream.bytes_sent,
    }


# --- changes and documents as the page shows them -----------------------------------------------------------------


def show_change(frame: bytes, manifest: Manifest) -> dict[str, Any]:
    """A change as a row: what happened, to what, when, and how its value begins."""
    document = decode_document(frame)
    body, _ = _parts(document)
    return {
        **_numbers(document, manifest),
        "vbucket": int.from_bytes(frame[6:8]),
        "op": _OPS[Opcode(frame[1])],
        "preview": _text(body[: 4 * PREVIEW_CHARS_MAX])[:PREVIEW_CHARS_MAX],
        "value_bytes": len(body),
    }


def show_document(document: Document, manifest: Manifest, *, vbucket: int) -> dict[str, Any]:
    """A document with its value and its extended attributes."""
    body, xattrs = _parts(document)
    text = _text(body)
    return {
        **_numbers(document, manifest),
        "vbucket": vbucket,
        "is_deleted": document.is_deleted,
        "is_json": Datatype.JSON in document.datatype,
        "value": text[:VALUE_CHARS_MAX],
        "value_bytes": len(body),
        "is_cut": len(text) > VALUE_CHARS_MAX,
        "xattrs": xattrs,
        "flags": document.flags,
        "expiry_s": document.expiry,
    }


def _numbers(document: Document, manifest: Manifest) -> dict[str, Any]:
    found = manifest.collection_by_id(document.collection_id)
    return {
        "key": document.key.decode(errors="replace"),
        "collection": f"{found[0].name}.{found[1].name}" if found else f"dropped 0x{document.collection_id:x}",
        "seqno": document.seqno,
        # As text, because numbers in a page's script have 53 bits.
        "cas": str(document.cas),
        "time_ms": document.cas // _NANOSECONDS_PER_MS,
        "revision": document.rev_seqno,
    }


def _parts(document: Document) -> tuple[bytes, dict[str, Any]]:
    value = document.value
    try:
        if Datatype.XATTR in document.datatype:
            parts = decode_xattrs(value)
            return parts.body, {name: _loaded(text) for name, text in parts.xattrs.items()}
    except HeadwaterError:
        # A client has stored the value in this form, so it is shown in this form.
        return value, {}
    return value, {}


def _loaded(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return _text(value)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")

"""Handlers for what is asked of a bucket when somebody looks closer: changes, documents, vbuckets, connections."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from headwater.client.cluster_map import vbucket_of
from headwater.dashboard.answers import Refused, as_json
from headwater.dashboard.change_search import Found, Stored, Wanted, search_changes
from headwater.dashboard.guard import Asked
from headwater.dashboard.limits import (
    SEARCH_KEY_CHARS_MAX,
    SEARCH_ROWS_MAX,
    SEARCHES_WAITING_MAX,
    STREAMS_SHOWN_MAX,
)
from headwater.dashboard.shown_document import show_change, show_document
from headwater.dashboard.source import NodeSource, StreamNumbers
from headwater.protocol.manifest import Collection
from headwater.protocol.numbers import SEQNO_MAX
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.documents import decode_document

_NAME_CHARS_MAX = 600
_CANDIDATES_PER_ROW = 3
"""Of the changes found, some are of documents that have changed since; they are no documents of today."""


class BucketViews:
    """See the module."""

    def __init__(self, source: NodeSource) -> None:
        self._source = source
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    # --- changes and documents ------------------------------------------------------------------------------------

    async def show_changes(self, asked: Asked) -> Response:
        """The newest changes, by collection and a part of the key."""
        bucket = asked.sampler.bucket
        found = await self._search(bucket, _wanted(asked))
        rows = [show_change(frame, bucket.manifest) for frame in found.frames]
        return as_json({"changes": rows, **_extent(found)})

    async def show_documents(self, asked: Asked) -> Response:
        """The documents that were changed last, as they are now."""
        bucket = asked.sampler.bucket
        wanted = _wanted(asked, rows_factor=_CANDIDATES_PER_ROW)
        found = await self._search(bucket, wanted)
        current = [frame for frame in found.frames if _is_current(bucket, frame)]
        rows_max = wanted.rows // _CANDIDATES_PER_ROW
        rows = [show_change(frame, bucket.manifest) for frame in current[:rows_max]]
        extent = _extent(found)
        extent["is_complete"] &= len(current) <= rows_max
        return as_json({"documents": rows, **extent})

    async def show_document(self, asked: Asked) -> Response:
        """One document by its key, in the collection that is named or in the first that has it."""
        bucket = asked.sampler.bucket
        name = asked.query("collection", chars_max=_NAME_CHARS_MAX)
        key = asked.query("key", chars_max=SEARCH_KEY_CHARS_MAX).encode()
        if not key:
            raise Refused(400, "A document is found by its key")
        vbucket = vbucket_of(key, len(bucket.vbuckets))
        if not bucket.vbuckets.exists(vbucket):
            raise Refused(404, f"The key belongs to vbucket {vbucket}, which is on another node")
        wanted = [_collection(bucket, name)] if name else [one for _, one in bucket.manifest.collections()]
        found = (bucket.find(vbucket, collection.id, key) for collection in wanted)
        entry = next((one for one in found if one is not None), None)
        if entry is None or bucket.commit_of(entry) > bucket.durable_commit:
            raise Refused(404, f"There is no such document in vbucket {vbucket}")
        return as_json(show_document(bucket.read(vbucket, entry), bucket.manifest, vbucket=vbucket))

    async def _search(self, bucket: Bucket, wanted: Wanted) -> Found:
        if self._waiting >= SEARCHES_WAITING_MAX:
            raise Refused(503, "Too many searches at once: try again in a moment")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                return await asyncio.to_thread(search_changes, Stored.of(bucket), wanted)
        finally:
            self._waiting -= 1

    # --- vbuckets and connections ---------------------------------------------------------------------------------

    async def show_vbucket(self, asked: Asked) -> Response:
        """All there is to know of one vbucket, its failover log included."""
        bucket, text = asked.sampler.bucket, asked.request.path_params["vbucket"]
        vbucket = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else -1
        if not bucket.vbuckets.exists(vbucket):
            raise Refused(404, f"There is no vbucket {text[:8]} on this node")
        facts, numbers = bucket.vbuckets.facts[vbucket], bucket.vbuckets
        assert facts is not None, "the vbucket exists"
        return as_json(
            {
                "vbucket": vbucket,
                "state": facts.state.name.lower(),
                "documents": int(asked.sampler.live.counts[vbucket]),
                "high_seqno": int(numbers.high_seqnos[vbucket]),
                "durable_seqno": int(numbers.durable_seqnos[vbucket]),
                "purge_seqno": facts.purge_seqno,
                "history_start_seqno": facts.history_start_seqno,
                "superseded": int(numbers.superseded[vbucket]),
                "lag": int(asked.sampler.lags()[vbucket]),
                "failover_log": _failover_log(facts),
            }
        )

    async def show_branches(self, asked: Asked) -> Response:
        """The failover logs of the vbuckets whose history has branched."""
        facts = asked.sampler.bucket.vbuckets.facts
        branched = [
            {"vbucket": vbucket, "state": one.state.name.lower(), "failover_log": _failover_log(one)}
            for vbucket, one in enumerate(facts)
            if one is not None and len(one.failover_log.entries) > 1
        ]
        return as_json({"branched": branched, "unbranched": sum(one is not None for one in facts) - len(branched)})

    async def show_streams(self, asked: Asked) -> Response:
        """The streams of a connection, those furthest behind first."""
        name = asked.query("connection", chars_max=_NAME_CHARS_MAX)
        connections = self._source.connections(asked.sampler.name, name)
        if not connections:
            raise Refused(404, "There is no such connection any more")
        streams = sorted(connections[0].streams or (), key=lambda one: (-one.backlog_items, one.vbucket))
        return as_json({"streams": [_stream(one) for one in streams[:STREAMS_SHOWN_MAX]], "count": len(streams)})


def _wanted(asked: Asked, *, rows_factor: int = 1) -> Wanted:
    bucket = asked.sampler.bucket
    rows = asked.number("rows", smallest=1, largest=SEARCH_ROWS_MAX, default=50)
    assert rows is not None
    name = asked.query("collection", chars_max=_NAME_CHARS_MAX)
    return Wanted(
        rows=rows * rows_factor,
        key_part=asked.query("key", chars_max=SEARCH_KEY_CHARS_MAX).encode(),
        collections=(_collection(bucket, name).id,) if name else (),
        vbucket=asked.number("vbucket", smallest=0, largest=len(bucket.vbuckets) - 1),
    )


def _collection(bucket: Bucket, name: str) -> Collection:
    scope_name, _, collection_name = name.partition(".")
    found = bucket.manifest.find(scope_name, collection_name)
    if found is None:
        raise Refused(404, f"There is no collection {name!r}")
    return found


def _extent(found: Found) -> dict[str, Any]:
    return {"is_complete": found.is_complete, "searched_bytes": found.searched_bytes}


def _is_current(bucket: Bucket, frame: bytes) -> bool:
    document = decode_document(frame)
    entry = bucket.find(int.from_bytes(frame[6:8]), document.collection_id, document.key)
    return entry is not None and entry.seqno == document.seqno and not entry.is_deleted


def _failover_log(facts: VBucketFacts) -> list[dict[str, object]]:
    # A vbuuid as text: a page's script has numbers of 53 bits.
    return [{"vbuuid": f"{entry.vbuuid:012x}", "seqno": entry.seqno} for entry in facts.failover_log.entries]


def _stream(stream: StreamNumbers) -> dict[str, object]:
    return {
        "vbucket": stream.vbucket,
        "stream_id": stream.stream_id,
        "state": stream.state,
        "start_seqno": stream.start_seqno,
        # No end. The number itself is more than a page's script can hold.
        "end_seqno": None if stream.end_seqno == SEQNO_MAX else stream.end_seqno,
        "last_sent_seqno": stream.last_sent_seqno,
        "backlog": stream.backlog_items,
        "frames": stream.frames_sent,
        "bytes": stream.bytes_sent,
    }

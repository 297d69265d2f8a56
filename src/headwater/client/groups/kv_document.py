"""The way from a group to its document over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headwater.client.checkpoints.kv_port import KvPort
from headwater.client.checkpoints.threaded_kv import ThreadedKv
from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import vbucket_of
from headwater.client.groups.document_port import StoredDocument
from headwater.client.groups.membership import GroupBucket
from headwater.client.kv_connection import Timeouts
from headwater.errors import UnknownBucket, UnknownCollection, UnknownScope
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.documents import Add, Get, GetResponse, Replace
from headwater.protocol.numbers import Cas
from headwater.protocol.status import Status

ANSWER_S_MAX = 4.0
"""A server that is silent for longer is better given up than waited for until the lease has run out."""

_ALREADY_THERE = frozenset({Status.KEY_EEXISTS, Status.NOT_STORED})
_CHANGED_OR_GONE = frozenset({Status.KEY_EEXISTS, Status.KEY_ENOENT})
_NOT_THERE = frozenset({Status.KEY_ENOENT})


def group_bucket(settings: ClientSettings, *, vbuckets: int) -> GroupBucket:
    """The bucket of a client, for a group that shares it."""
    known = settings.timeouts
    short = Timeouts(connect_s=min(known.connect_s, ANSWER_S_MAX), answer_s=min(known.answer_s, ANSWER_S_MAX))

    def open_document(key: bytes, collection: str | None) -> KvDocument:
        # A group tries again by itself, and looks at the document anew each time.
        return KvDocument(ThreadedKv(replace(settings, timeouts=short), retry_s_max=0), key, collection)

    return GroupBucket(vbuckets=vbuckets, open_document=open_document)


class KvDocument:
    """A `DocumentPort` over key-value requests."""

    def __init__(self, kv: KvPort, key: bytes, collection: str | None = None) -> None:
        self._kv = kv
        self._key = key
        self._collection = collection
        self._fields: dict[str, Any] | None = None

    async def read(self) -> StoredDocument | None:
        answer = await self._ask(lambda fields: Get(**fields), none_for=_NOT_THERE)
        if answer is None:
            return None
        assert isinstance(answer, GetResponse)
        return StoredDocument(answer.value, answer.cas)

    async def add(self, value: bytes) -> Cas | None:
        answer = await self._ask(lambda fields: Add(**fields, value=value), none_for=_ALREADY_THERE)
        return None if answer is None else answer.cas

    async def replace(self, value: bytes, cas: Cas) -> Cas | None:
        answer = await self._ask(lambda fields: Replace(**fields, value=value, cas=cas), none_for=_CHANGED_OR_GONE)
        return None if answer is None else answer.cas

    async def close(self) -> None:
        await self._kv.close()

    async def _ask(
        self, make_request: Callable[[dict[str, Any]], Request], *, none_for: frozenset[Status]
    ) -> Response | None:
        """The answer, or None for some statuses. Any other that is no success is raised."""
        fields = await self._place()
        (answer,) = await self._kv.request([make_request(fields)])
        if isinstance(answer, Response):
            return answer
        # It has the status of a document that is missing, and comes of a connection that had to be made anew.
        if isinstance(answer, UnknownBucket) or answer.status not in none_for:
            raise answer
        return None

    async def _place(self) -> dict[str, Any]:
        """What every request for the document has. The collection is found at the first one."""
        if self._fields is None:
            vbuckets = (await self._kv.cluster_map()).vbuckets
            try:
                collection_id = await self._kv.collection_id(self._collection)
            except (UnknownCollection, UnknownScope) as error:
                raise error.retold(f"there is no collection {self._collection!r} for the group's document") from error
            self._fields = {
                "key": self._key,
                "vbucket": vbucket_of(self._key, vbuckets),
                "collection_id": collection_id,
            }
        return self._fields

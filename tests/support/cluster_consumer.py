"""A consumer of the whole cluster: keeps a copy of all documents by the changes that the client gives it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import headwater
from headwater.client.changes import Deletion, Expiration, Mutation, Rollback
from support.node_process import PASSWORD, USER

_SOON: dict[str, Any] = {"reconnect_delay_s_min": 0.01, "reconnect_delay_s_max": 0.2, "poll_interval_s": 0.5}


class ClusterConsumer:
    """Reads on until it is stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changes: defaultdict[int, list[Mutation | Deletion | Expiration]] = defaultdict(list)
        self.rollbacks = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClusterConsumer:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async with headwater.connect(f"{self._url}/default", user=USER, password=PASSWORD) as client:
            async for change in client.changes(start="beginning", **_SOON):
                seen = self._changes[change.vbucket]
                if isinstance(change, Rollback):
                    self.rollbacks += 1
                    seen[:] = [one for one in seen if one.seqno <= change.seqno]
                elif isinstance(change, Mutation | Deletion | Expiration):
                    assert not seen or change.seqno > seen[-1].seqno, "seqnos rise"
                    seen.append(change)

    def documents(self) -> dict[tuple[int, bytes], tuple[int, bytes]]:
        """CAS and value by collection and key."""
        documents: dict[tuple[int, bytes], tuple[int, bytes]] = {}
        for seen in self._changes.values():
            for change in seen:
                key = (change.collection_id, change.key_bytes)
                if isinstance(change, Mutation):
                    documents[key] = (change.cas, bytes(change.value or b""))
                else:
                    documents.pop(key, None)
        return documents

    async def becomes(self, wanted: dict[tuple[int, bytes], tuple[int, bytes]], *, within_s: float = 20.0) -> None:
        """Wait until this consumer has what another one has."""
        assert self._task is not None
        for _ in range(int(within_s / 0.05)):
            if self._task.done():
                self._task.result()
            if self.documents() == wanted:
                return
            await asyncio.sleep(0.05)
        held = self.documents()
        keys = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
        raise AssertionError(
            f"{len(keys)} documents differ: "
            + "; ".join(f"{key}: held {held.get(key)}, stored {wanted.get(key)}" for key in keys[:5])
        )


async def stored_documents(url: str) -> dict[tuple[int, bytes], tuple[int, bytes]]:
    """What a consumer that begins now ends with."""
    consumer = ClusterConsumer(url)
    async with headwater.connect(f"{url}/default", user=USER, password=PASSWORD) as client:
        async for change in client.changes(start="beginning", end="now"):
            if isinstance(change, Mutation | Deletion | Expiration):
                consumer._changes[change.vbucket].append(change)
    return consumer.documents()

"""A real node with its dashboard, in the event loop of a test, with users that have different roles."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, generate_latest

from headwater.cli.land import LandingCollector, LandingMetrics
from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.errors import NotMyVBucket
from headwater.landing.loop import LandingStatus
from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.node.membership import PEER_FEATURES
from headwater.node.node import Node
from headwater.node.options import NodeOptions
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.sasl import Credentials
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from support.node_process import PASSWORD, USER, NodeProcess

ADMIN, READER = ("ann", "pencil"), ("rob", "quill")
OWN = {"X-Headwater-Dashboard": "1"}
VBUCKETS = 16
_LIVE_S_MAX = 20.0
"""A feed never ends by itself, but a test does."""


@dataclass
class World:
    """A node that serves the buckets `beer` and `wine`; the reader may see only `beer`."""

    node: Node
    url: str
    client: httpx.AsyncClient

    @property
    def beer(self) -> Bucket:
        return self.node.bucket_service("beer").bucket

    async def log_in(self, who: tuple[str, str] = ADMIN, **headers: str) -> httpx.Response:
        body = {"user": who[0], "password": who[1]}
        return await self.client.post("/ui/api/login", json=body, headers={"Origin": self.url, **OWN, **headers})

    async def get(self, path: str, **query: Any) -> httpx.Response:
        return await self.client.get(f"/ui/api/{path}", params=query)

    async def write(self, key: str, value: bytes = b"{}", *, vbucket: int = 0, collection: int = DEFAULT_COLLECTION,
                    datatype: Datatype = Datatype.JSON) -> None:  # fmt: skip
        self.beer.put_mutation(
            vbucket, collection_id=CollectionId(collection), key=key.encode(), value=value, datatype=datatype
        )
        await self.committed()

    async def committed(self) -> None:
        """Wait until everything that was accepted is durable."""
        self.node.bucket_service("beer").on_change()
        async with asyncio.timeout(10):
            while not self.beer.pending.is_empty or self.beer.in_flight is not None:
                await asyncio.sleep(0.005)

    async def with_collection(self, scope: str, name: str) -> int:
        def change(manifest: Manifest) -> Manifest:
            return (manifest if manifest.scope(scope) else manifest.with_scope(scope)).with_collection(scope, name)

        manifest = await self.node.change_manifest("beer", change)
        found = manifest.find(scope, name)
        return found.id

    @asynccontextmanager
    async def live(self, bucket: str = "beer") -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """Yield the messages of the live feed."""
        path = f"/ui/api/buckets/{bucket}/live"
        async with asyncio.timeout(_LIVE_S_MAX), self.client.stream("GET", path, timeout=10) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _messages(response)


async def _messages(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    event = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield event, json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[World]:
    settings = NodeOptions(
        data=folder / "data", port=0, http_port=0, buckets=("beer", "wine"), vbuckets=VBUCKETS, user=ADMIN[0],
        password=ADMIN[1], **options,
    )  # fmt: skip
    node = Node(settings)
    started = await node.start()
    reader = node.users.new_user(*READER, [Grant(Role.READER, "beer")], salts=bytes(SALTS_BYTES))
    node._listener.service.users = node.users.add(reader)
    try:
        async with httpx.AsyncClient(base_url=started.http_url) as client:
            yield World(node, started.http_url, client)
    finally:
        await node.stop()


# Real nodes in a cluster, for tests of the dashboard.


BUCKET = "default"


def make_cluster(nodes: Sequence[NodeProcess]) -> None:
    """Form a cluster with one replica of each vbucket."""

    async def steps(coordinator: Coordinator) -> None:
        await coordinator.init(replicas=1)
        for node in nodes[1:]:
            await coordinator.add(node.address)
        await coordinator.rebalance()

    _coordinate(nodes[0], steps)


def fail_over(left: NodeProcess, lost: str) -> None:
    async def steps(coordinator: Coordinator) -> None:
        await coordinator.failover([lost])

    _coordinate(left, steps)


def _coordinate(node: NodeProcess, steps: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def run() -> None:
        login = Login(credentials=Credentials(USER, PASSWORD), bucket=BUCKET, features=PEER_FEATURES)
        coordinator = Coordinator([node.address], login)
        try:
            await steps(coordinator)
        finally:
            coordinator.close()

    asyncio.run(run())


def write(nodes: Sequence[NodeProcess], vbuckets: int, *keys: str) -> list[int]:
    """Write documents, each where its vbucket is active. Returns how many each node has accepted."""
    taken = [0 for _ in nodes]
    connections = [node.connect() for node in nodes]
    try:
        for key in keys:
            request = Set(key=key.encode(), value=b"{}", vbucket=vbucket_of(key.encode(), vbuckets), collection_id=0)
            for at, connection in enumerate(connections):
                try:
                    connection.request(request)
                except NotMyVBucket:
                    continue
                taken[at] += 1
                break
    finally:
        for connection in connections:
            connection.close()
    assert sum(taken) == len(keys)
    return taken


def hold_replicas(node: NodeProcess) -> None:
    """Make the copies on this node fall behind."""
    url = f"{node.http_url}/headwater/buckets/{BUCKET}/replicas/hold"
    answer = httpx.post(url, auth=(USER, PASSWORD))
    assert answer.status_code == 200, answer.text


def keys_of(vbucket: int, vbuckets: int, count: int) -> list[str]:
    """Return keys that belong to a vbucket."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        key = f"v{vbucket}-{number}"
        if vbucket_of(key.encode(), vbuckets) == vbucket:
            found.append(key)
        number += 1
    return found


# A server that shows the metrics of a landing.


@contextmanager
def answering(status: int, body: bytes, authorization: str | None = None, **headers: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.headers["Authorization"] == authorization else 401)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def metrics_text(bucket: str = "beer") -> bytes:
    registry = CollectorRegistry()
    status = LandingStatus(
        is_active=True, doing="reading", batch=2, rows=1200, rollbacks=1, documents=900, tables=2, lag_seqnos=17,
        lag_s=2.5, documents_age_s=4.5, last_batch_s=0.3, last_merge_s=None, failures=0,
    )  # fmt: skip
    metrics = LandingMetrics(bucket, lambda: status, page="http://127.0.0.1:8080/ui/")
    registry.register(LandingCollector(metrics))
    return generate_latest(registry)

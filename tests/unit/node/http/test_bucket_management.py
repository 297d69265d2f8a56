"""Buckets, collections and the cluster by REST, on a node that is alone: what is taken, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.node.http.app import http_app
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions

ADMIN, BUCKET_ADMIN = ("ann", "pencil-1"), ("bob", "crayon-1")
Ask = Callable[..., Awaitable[httpx.Response]]


def with_node(folder: Path, test: Callable[[Node, Ask], Awaitable[None]]) -> None:
    async def run() -> None:
        options = NodeOptions(data=folder, port=0, vbuckets=4, user=ADMIN[0], password=ADMIN[1])
        node = Node(options, NodeEnvironment(serves_http=False))
        await node.start()
        bob = node.users.new_user(*BUCKET_ADMIN, {Grant(Role.BUCKET_ADMIN, "default")}, salts=bytes(SALTS_BYTES))
        await node.change_users(lambda users: users.add(bob))
        transport = httpx.ASGITransport(app=http_app(node), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

                async def ask(
                    method: str, path: str = "", *, auth: tuple[str, str] = ADMIN, **form: Any
                ) -> httpx.Response:
                    return await client.request(method, f"/pools/default{path}", auth=auth, data=form or None)

                await test(node, ask)
        finally:
            await node.stop()

    asyncio.run(run())


def test_settings_that_are_not_honoured_are_refused_with_the_reason(tmp_path: Path) -> None:
    async def test(node: Node, ask: Ask) -> None:
        wrong = {"storageBackend": "magma", "bucketType": "ephemeral", "replicaNumber": "4", "flushEnabled": "maybe"}
        refused = await ask("POST", "/buckets", name="travel", **wrong, maxTTL="60")
        assert (refused.status_code, set(refused.json()["errors"])) == (400, set(wrong))
        for form, field in (
            ({"name": ".hidden"}, "name"),
            ({"name": "default"}, "name"),
            ({"name": "travel", "numVBuckets": "3"}, "numVBuckets"),
            ({"name": "travel", "threadsNumber": "8"}, "threadsNumber"),
        ):
            refused = await ask("POST", "/buckets", **form)
            assert (refused.status_code, list(refused.json()["errors"])) == (400, [field])
        assert list(node.bucket_names()) == ["default"]
        refused = await ask("POST", "/buckets/default", name="other")
        assert refused.json() == {"errors": {"name": "A bucket keeps its name"}}

    with_node(tmp_path, test)


def test_an_admin_of_a_bucket_changes_it_and_no_more(tmp_path: Path) -> None:
    async def test(node: Node, ask: Ask) -> None:
        assert (await ask("PUT", "/buckets/default", flushEnabled="1", auth=BUCKET_ADMIN)).status_code == 200
        assert (await ask("POST", "/buckets/default/controller/doFlush", auth=BUCKET_ADMIN)).status_code == 200
        assert (await ask("DELETE", "/buckets/default", auth=BUCKET_ADMIN)).status_code == 403
        assert (await ask("POST", "/buckets", name="travel", auth=BUCKET_ADMIN)).status_code == 403
        assert (await ask("POST", clusterName="mine", auth=BUCKET_ADMIN)).status_code == 403
        assert list(node.bucket_names()) == ["default"]

    with_node(tmp_path, test)


def test_a_collection_is_changed_in_what_is_given(tmp_path: Path) -> None:
    async def test(node: Node, ask: Ask) -> None:
        collections = "/buckets/default/scopes/_default/collections"
        await ask("POST", collections, name="carts", maxTTL="60")
        assert (await ask("PATCH", f"{collections}/carts", history="true")).json() == {"uid": "2"}
        bucket = node.bucket("default")
        assert bucket is not None
        carts = bucket.manifest.find("_default", "carts")
        assert carts is not None
        assert (carts.max_ttl_s, carts.history) == (60, True)
        for path, form, status in (
            ("carts", {}, 400),
            ("carts", {"maxTTL": "-2"}, 400),
            ("_default", {"maxTTL": "60"}, 400),
            ("nowhere", {"maxTTL": "60"}, 404),
        ):
            assert (await ask("PATCH", f"{collections}/{path}", **form)).status_code == status

    with_node(tmp_path, test)


def test_the_cluster_s_name_and_quota(tmp_path: Path) -> None:
    async def test(node: Node, ask: Ask) -> None:
        before = json.loads(node.cluster_config("default"))
        assert before["clusterName"] == "headwater"
        assert (await ask("POST", clusterName="the lake", memoryQuota="512")).status_code == 200
        after = json.loads(node.cluster_config("default"))
        assert (after["clusterName"], after["clusterUUID"]) == ("the lake", before["clusterUUID"])
        assert after["rev"] > before["rev"], "clients take a config only if it is newer"
        assert after["nodesExt"][0]["nodeUUID"] == node.identity.uuid
        pool = (await ask("GET")).json()
        assert (pool["clusterName"], pool["memoryQuota"]) == ("the lake", 512)
        for form in ({"indexMemoryQuota": "512"}, {"memoryQuota": "1"}, {"clusterName": "a\nb"}):
            refused = await ask("POST", **form)
            assert (refused.status_code, list(refused.json()["errors"])) == (400, list(form))

    with_node(tmp_path, test)

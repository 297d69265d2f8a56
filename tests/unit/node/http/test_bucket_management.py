"""Buckets, collections and the cluster by REST, on a node that is alone: what is taken, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.errors import ConnectionFailed
from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.node.http.app import http_app
from headwater.node.http.bucket_management import OtherNodes, Reply
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.protocol.cluster_config import NodeAddress

ADMIN, BUCKET_ADMIN = ("ann", "pencil-1"), ("bob", "crayon-1")
Ask = Callable[..., Awaitable[httpx.Response]]


@asynccontextmanager
async def asked_node(folder: Path) -> AsyncIterator[tuple[Node, Ask]]:
    options = NodeOptions(data=folder, port=0, vbuckets=4, user=ADMIN[0], password=ADMIN[1])
    node = Node(options, NodeEnvironment(serves_http=False))
    await node.start()
    bob = node.users.new_user(*BUCKET_ADMIN, {Grant(Role.BUCKET_ADMIN, "default")}, salts=bytes(SALTS_BYTES))
    await node.change_users(lambda users: users.add(bob))
    transport = httpx.ASGITransport(app=http_app(node), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def ask(method: str, path: str = "", *, auth: tuple[str, str] = ADMIN, **form: Any) -> httpx.Response:
                return await client.request(method, f"/pools/default{path}", auth=auth, data=form or None)

            yield node, ask
    finally:
        await node.stop()


async def test_settings_that_are_not_honoured_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with asked_node(tmp_path) as (node, ask):
        wrong = {
            "storageBackend": "rocks", "bucketType": "ephemeral", "replicaNumber": "4", "flushEnabled": "maybe",
            "durabilityMinLevel": "all", "compressionMode": "much", "conflictResolutionType": "custom",
        }  # fmt: skip
        refused = await ask("POST", "/buckets", name="travel", **wrong, maxTTL="60")
        assert (refused.status_code, set(refused.json()["errors"])) == (400, set(wrong))
        for form, field in (
            ({"name": ".hidden"}, "name"),
            ({"name": "default"}, "name"),
            ({"name": "travel", "numVBuckets": "3"}, "numVBuckets"),
            ({"name": "travel", "threadsNumber": "8"}, "threadsNumber"),
            ({"name": "travel", "historyRetentionSeconds": "60"}, "historyRetentionSeconds"),
            ({"name": "travel", "storageBackend": "magma", "historyRetentionBytes": "9"}, "historyRetentionBytes"),
            ({"name": "travel", "replicaNumber": "3", "durabilityMinLevel": "majority"}, "durabilityMinLevel"),
        ):
            refused = await ask("POST", "/buckets", **form)
            assert (refused.status_code, list(refused.json()["errors"])) == (400, [field])
        assert list(node.bucket_names()) == ["default"]
        for form in ({"name": "other"}, {"storageBackend": "magma"}, {"conflictResolutionType": "lww"}):
            refused = await ask("POST", "/buckets/default", **form)
            assert (refused.status_code, list(refused.json()["errors"])) == (400, list(form))


async def test_settings_that_are_honoured(tmp_path: Path) -> None:
    asked = {
        "storageBackend": "magma", "durabilityMinLevel": "majority", "compressionMode": "active",
        "conflictResolutionType": "lww", "historyRetentionSeconds": "60", "historyRetentionBytes": str(2**31),
        "historyRetentionCollectionDefault": "true",
    }  # fmt: skip
    async with asked_node(tmp_path) as (node, ask):
        assert (await ask("POST", "/buckets", name="travel", ramQuota="128", **asked)).status_code == 202
        shown = (await ask("GET", "/buckets/travel")).json()
        assert {name: str(shown[name]).lower() for name in asked} == {
            name: text.lower() for name, text in asked.items()
        }
        assert shown["quota"]["rawRAM"] == 128 * 2**20
        settings = node.bucket_service("travel").settings
        retention = settings.retention(node.options.retention, vbuckets=4)
        assert (retention.history_s, retention.history_bytes) == (60, 2**29)
        assert not settings.durable_alone
        # A collection keeps its history unless it says otherwise.
        for form in ({"name": "kept"}, {"name": "plain", "history": "false"}):
            await ask("POST", "/buckets/travel/scopes/_default/collections", **form)
        bucket = node.bucket("travel")
        found = {one.name: one.history for _, one in bucket.manifest.collections()}
        assert (found["kept"], found["plain"]) == (True, False)
        assert (await ask("POST", "/buckets/travel", durabilityMinLevel="none")).status_code == 200
        assert node.bucket_service("travel").settings.durability_min_level == 0
        assert "historyRetentionBytes" not in (await ask("GET", "/buckets/default")).json()


async def test_an_admin_of_a_bucket_changes_it_and_no_more(tmp_path: Path) -> None:
    async with asked_node(tmp_path) as (node, ask):
        flushes = ("/buckets/default/controller/doFlush", "/../../headwater/buckets/default/flush")
        for path in flushes:
            refused = await ask("POST", path, auth=BUCKET_ADMIN)
            assert (refused.status_code, refused.json()) == (400, {"errors": {"_": "Flush is disabled for the bucket"}})
        assert (await ask("PUT", "/buckets/default", flushEnabled="1", auth=BUCKET_ADMIN)).status_code == 200
        for path in flushes:
            assert (await ask("POST", path, auth=BUCKET_ADMIN)).status_code == 200
        assert (await ask("DELETE", "/buckets/default", auth=BUCKET_ADMIN)).status_code == 403
        assert (await ask("POST", "/buckets", name="travel", auth=BUCKET_ADMIN)).status_code == 403
        assert (await ask("POST", clusterName="mine", auth=BUCKET_ADMIN)).status_code == 403
        assert list(node.bucket_names()) == ["default"]


async def test_a_collection_is_changed_in_what_is_given(tmp_path: Path) -> None:
    async with asked_node(tmp_path) as (node, ask):
        collections = "/buckets/default/scopes/_default/collections"
        await ask("POST", collections, name="carts", maxTTL="60")
        assert (await ask("PATCH", f"{collections}/carts", history="true")).json() == {"uid": "2"}
        bucket = node.bucket("default")
        carts = bucket.manifest.find("_default", "carts")
        assert (carts.max_ttl_s, carts.history) == (60, True)
        for path, form, status in (
            ("carts", {}, 400),
            ("carts", {"maxTTL": "-2"}, 400),
            ("_default", {"maxTTL": "60"}, 400),
            ("nowhere", {"maxTTL": "60"}, 404),
        ):
            assert (await ask("PATCH", f"{collections}/{path}", **form)).status_code == status


async def test_the_cluster_s_name_and_quota(tmp_path: Path) -> None:
    async with asked_node(tmp_path) as (node, ask):
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


async def test_a_bucket_that_can_t_be_shared_out_is_on_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    async def answer(others: OtherNodes, *words: str, **rest: Any) -> dict[str, Reply]:
        asked.append(words)
        return {node.kv_address: Reply(202, "") for node in others.nodes}

    def fail(*arguments: Any) -> None:
        raise ConnectionFailed("127.0.0.1:1 can't be reached")

    async with asked_node(tmp_path) as (node, ask):
        monkeypatch.setattr(OtherNodes, "ask", answer)
        monkeypatch.setattr(node, "coordinator", fail)
        node.change_identity(nodes=(NodeAddress(host="127.0.0.1", kv_port=1, http_port=2),))
        refused = await ask("POST", "/buckets", name="travel")
        assert refused.status_code == 503
        assert refused.json() == {"errors": {"_": "The bucket was not made: 127.0.0.1:1 can't be reached"}}
        assert asked == [("POST", "headwater", "buckets"), ("DELETE", "headwater", "buckets", "travel")]
        assert list(node.bucket_names()) == ["default"]

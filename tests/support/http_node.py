"""A node as its HTTP side sees it, and a client of it, which the tests of the routes share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from headwater.node.auth.accounts import Accounts, Change
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.auth.users import DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, Users
from headwater.node.commit_loop import ChangeSignal
from headwater.node.http.app import http_app
from headwater.node.node_folder import NodeFolder, NodeIdentity
from headwater.node.node_state import NodeState
from headwater.node.options import NodeOptions
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import BucketMap, ClusterNodes, NodeAddress, bucket_config, node_config
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Vbuuid
from headwater.store.bucket import Bucket, StoreEnvironment

ADMIN, WRITER, READER, STRANGER = ("ann", "pencil"), ("wim", "crayon"), ("rob", "quill"), ("sid", "chalk")
UUID = "0123456789abcdef0123456789abcdef"
SCOPES = "/pools/default/buckets/beer/scopes"
ENVIRONMENT = StoreEnvironment(now_ns=lambda: 1_700_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(77))


def make_users() -> Users:
    users = Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=4_000)
    grants = {
        ADMIN: {Grant(Role.ADMIN)},
        WRITER: {Grant(Role.WRITER, "beer")},
        READER: {Grant(Role.READER, "beer")},
        STRANGER: {Grant(Role.READER, "wine")},
    }
    for (name, password), granted in grants.items():
        users = users.add(users.new_user(name, password, granted, salts=bytes(SALTS_BYTES)))
    return users


USERS = make_users()


@dataclass
class Node:
    """A node with one real bucket, real users, and a clock that tests set."""

    stored: Bucket
    data: Path
    users: Users = USERS
    server_version: str = "7.6.0-0-headwater"
    is_ready: bool = True
    why_not_ready: str = "it opens bucket 'beer', 1 of 1"
    config_changes: ChangeSignal = field(default_factory=ChangeSignal)
    manifest_changes: ChangeSignal = field(default_factory=ChangeSignal)
    cluster: ClusterNodes = ClusterNodes(
        nodes=(NodeAddress(host="127.0.0.1", kv_port=11210, http_port=8091),), revision=1, uuid=UUID, name="the lake"
    )
    now: float = 1000.0
    logged: list[str] = field(default_factory=list)
    durable_uid: int = 0
    not_reached: dict[str, str] = field(default_factory=dict)
    fault: Exception | None = None
    identity: NodeIdentity = field(default_factory=lambda: NodeIdentity(uuid=UUID, cluster_uuid=UUID))

    def __post_init__(self) -> None:
        self.options = NodeOptions(data=self.data, http_hosts=("node", "x", "lake.example.com"))
        self.service = BucketService(bucket=self.stored)
        self.folder = NodeFolder(self.data)
        self.folder.store_users(self.users)
        self.accounts = Accounts(self.folder, random_bytes=os.urandom)
        self.accounts.load(None, None)
        self.users = self.accounts.in_force
        self.accounts.on_change = self._put_in_force
        self.login_checks = LoginChecks(lambda: self.users, now_s=self.now_s)

    def _put_in_force(self, users: Users) -> None:
        self.users = users
        self.config_changes.notify()

    def is_node_user(self, name: str) -> bool:
        return self.accounts.is_node(name)

    async def change_users(self, change: Change) -> dict[str, str]:
        await self.accounts.change(change)
        return self.not_reached

    def now_s(self) -> float:
        return self.now

    def uptime_s(self) -> float:
        return 12.7

    def log(self, message: str, **about: object) -> None:
        self.logged.append(message)

    def bucket_names(self) -> Iterable[str]:
        return ["beer"]

    def bucket(self, name: str) -> Bucket | None:
        return self.stored if name == self.stored.facts.name else None

    def bucket_service(self, name: str) -> BucketService:
        return self.service

    def cluster_config(self, bucket: str | None) -> bytes:
        if bucket is None:
            return node_config(self.cluster)
        vbucket_map = [[0]] * len(self.stored.vbuckets)
        return bucket_config(self.cluster, BucketMap(name=bucket, uuid=self.stored.facts.uuid, vbucket_map=vbucket_map))

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        if self.fault is not None:
            raise self.fault
        manifest = change(self.stored.manifest)
        self.stored.set_manifest(manifest)
        await asyncio.sleep(0)
        self.stored.commit_now()
        self.durable_uid = manifest.uid
        self.manifest_changes.notify()
        return manifest

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        while self.durable_uid < uid:
            await self.manifest_changes.after(self.manifest_changes.count)


class Client:
    """Calls the application without a server, by default as the admin."""

    def __init__(self, node: Node) -> None:
        self.app = http_app(cast(NodeState, node))

    def __call__(self, method: str, path: str, *, auth: Any = ADMIN, **parts: Any) -> httpx.Response:
        return asyncio.run(self.send(method, path, auth=auth, **parts))

    async def send(self, method: str, path: str, *, auth: Any = ADMIN, **parts: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False, client=("192.0.2.1", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://node:8091") as client:
            return await client.request(method, path, auth=auth, **parts)

"""The HTTP side: what clients bootstrap from, collections, log-ins, refusals, and streams that end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import http.client
import json
import platform
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.errors import StoreFull
from headwater.node.auth.throttle import DELAYS_S, FREE_FAILURES, LoginThrottle
from headwater.node.auth.users import DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, Users
from headwater.node.cluster_config import BucketMap, Cluster, NodeAddress, bucket_config, node_config
from headwater.node.http import call as call_module
from headwater.node.http import config_streams, limits, logins, server
from headwater.node.http.app import ROUTES, http_app
from headwater.node.http.changes import Changes
from headwater.node.http.node_view import BucketUsage, BucketView, NodeView
from headwater.node.http.server import HttpServer
from headwater.protocol.manifest import COLLECTIONS_MAX, Collection, Manifest, Scope
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import CollectionId, ScopeId, Vbuuid
from headwater.store.bucket import Bucket, Outside
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket

ADMIN, WRITER, READER, STRANGER = ("ann", "pencil"), ("wim", "crayon"), ("rob", "quill"), ("sid", "chalk")
UUID = "0123456789abcdef0123456789abcdef"
SCOPES = "/pools/default/buckets/beer/scopes"
OUTSIDE = Outside(now_ns=lambda: 1_700_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(77))


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
    """A node with one real bucket, and a clock that is set by hand."""

    stored: Bucket
    users: Users = USERS
    throttle: LoginThrottle = field(default_factory=LoginThrottle)
    server_version: str = "7.6.0-0-headwater"
    is_ready: bool = True
    config_changes: Changes = field(default_factory=Changes)
    manifest_changes: Changes = field(default_factory=Changes)
    cluster: Cluster = Cluster(
        nodes=(NodeAddress(host="127.0.0.1", kv_port=11210, http_port=8091),), revision=1, uuid=UUID, name="the lake"
    )
    now: float = 1000.0
    logged: list[str] = field(default_factory=list)
    durable_uid: int = 0
    fault: Exception | None = None

    def now_s(self) -> float:
        return self.now

    def uptime_s(self) -> float:
        return 12.7

    def log(self, message: str) -> None:
        self.logged.append(message)

    def bucket_names(self) -> Iterable[str]:
        return ["beer"]

    def bucket(self, name: str) -> BucketView | None:
        facts = self.stored.facts
        return BucketView(name=name, uuid=facts.uuid, manifest=self.stored.manifest) if name == facts.name else None

    def usage(self, bucket: str) -> BucketUsage:
        assert bucket == "beer"
        return BucketUsage(items=3, disk_bytes=4096, memory_bytes=1024, memory_quota_bytes=2048)

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


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(tmp_path / "beer")
    yield engine
    engine.close()


@pytest.fixture
def node(engine: LmdbEngine) -> Node:
    facts = BucketFacts(name="beer", uuid="ab" * 16, vbuckets=4)
    bucket = create_bucket(engine, facts, outside=OUTSIDE, secret=(1, 2))
    for vbucket in range(4):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    bucket.commit_now()
    return Node(bucket)


class Client:
    """Asks the application without a server; one that is not told otherwise is the admin."""

    def __init__(self, node: NodeView) -> None:
        self.app = http_app(node)

    def __call__(self, method: str, path: str, *, auth: Any = ADMIN, **parts: Any) -> httpx.Response:
        return asyncio.run(self.send(method, path, auth=auth, **parts))

    async def send(self, method: str, path: str, *, auth: Any = ADMIN, **parts: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False, client=("192.0.2.1", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://node:8091") as client:
            return await client.request(method, path, auth=auth, **parts)


@pytest.fixture
def ask(node: Node) -> Client:
    return Client(node)


# --- what clients bootstrap from ----------------------------------------------------------------------------------


def test_pools(ask: Client) -> None:
    pools = ask("GET", "/pools").json()
    assert pools["implementationVersion"] == "7.6.0-0-headwater"
    assert pools["uuid"] == UUID
    assert pools["isAdminCreds"] is True
    assert pools["pools"] == [
        {
            "name": "default",
            "uri": f"/pools/default?uuid={UUID}",
            "streamingUri": f"/poolsStreaming/default?uuid={UUID}",
        }
    ]
    assert ask("GET", "/pools", auth=READER).json()["isAdminCreds"] is False


def test_every_uri_that_is_told_leads_somewhere(ask: Client) -> None:
    bucket = ask("GET", "/pools/default/buckets/beer").json()
    pool = ask("GET", "/pools/default").json()
    uris = [ask("GET", "/pools").json()["pools"][0]["uri"], bucket["uri"], pool["buckets"]["uri"]]
    for uri in [*uris, pool["nodeServicesUri"], pool["buckets"]["terseBucketsBase"] + "beer"]:
        assert ask("GET", uri).status_code == 200, uri


def test_the_pool(ask: Client) -> None:
    pool = ask("GET", "/pools/default").json()
    assert (pool["name"], pool["clusterName"]) == ("default", "the lake")
    assert pool["bucketNames"] == [{"bucketName": "beer", "uuid": "ab" * 16}]
    assert pool["nodes"] == [
        {
            "hostname": "127.0.0.1:8091",
            "otpNode": "ns_1@127.0.0.1",
            "os": f"{platform.machine()}-linux",
            "ports": {"direct": 11210},
            "services": ["kv"],
            "version": "7.6.0-0-headwater",
            "clusterCompatibility": 7 << 16 | 6,
            "clusterMembership": "active",
            "recoveryType": "none",
            "status": "healthy",
            "thisNode": True,
            "uptime": "12",
        }
    ]


def test_a_node_that_starts_says_so(node: Node, ask: Client) -> None:
    node.is_ready = False
    assert ask("GET", "/pools/default").json()["nodes"][0]["status"] == "warmup"


def test_a_host_that_the_config_leaves_out_is_the_one_that_was_asked(node: Node, ask: Client) -> None:
    config = {"rev": 3, "nodesExt": [{"services": {"kvSSL": 11207, "mgmtSSL": 18091}}]}
    node.cluster_config = lambda bucket: json.dumps(config).encode()  # type: ignore[method-assign]
    (told,) = ask("GET", "/pools/default").json()["nodes"]
    assert (told["hostname"], told["ports"]) == ("node:18091", {"direct": 11207, "httpsMgmt": 18091})


def test_a_bucket(node: Node, ask: Client) -> None:
    bucket = ask("GET", "/pools/default/buckets/beer").json()
    config = json.loads(node.cluster_config("beer"))
    assert ask("GET", "/pools/default/buckets").json() == [bucket]
    for same in ("name", "uuid", "uri", "streamingUri", "bucketCapabilities", "vBucketServerMap", "nodeLocator"):
        assert bucket[same] == config[same], same
    assert (bucket["bucketType"], bucket["numVBuckets"], bucket["replicaNumber"]) == ("membase", 4, 0)
    assert bucket["nodes"][0]["hostname"] == "127.0.0.1:8091"
    assert bucket["collectionsManifestUid"] == "0"
    assert bucket["quota"] == {"ram": 2048, "rawRAM": 2048}
    assert bucket["basicStats"] == {
        "itemCount": 3,
        "diskUsed": 4096,
        "dataUsed": 4096,
        "memUsed": 1024,
        "quotaPercentUsed": 50,
    }


def test_the_terse_config_is_the_one_of_the_key_value_side(node: Node, ask: Client) -> None:
    answer = ask("GET", "/pools/default/b/beer", auth=READER)
    assert answer.content == node.cluster_config("beer")
    assert answer.headers["content-type"] == "application/json"
    assert ask("GET", "/pools/default/nodeServices").content == node.cluster_config(None)


@pytest.mark.parametrize(
    ("auth", "told"),
    [
        (ADMIN, {"id": "ann", "domain": "admin", "roles": [{"role": "admin"}]}),
        (
            READER,
            {
                "id": "rob",
                "domain": "local",
                "roles": [
                    {"role": "data_dcp_reader", "bucket_name": "beer"},
                    {"role": "data_reader", "bucket_name": "beer"},
                ],
            },
        ),
    ],
)
def test_who_am_i(ask: Client, auth: tuple[str, str], told: dict[str, Any]) -> None:
    assert ask("GET", "/whoami", auth=auth).json() == told


def test_every_role_has_a_name_for_whoami(ask: Client) -> None:
    roles = ask("GET", "/whoami", auth=WRITER).json()["roles"]
    assert {role["role"] for role in roles} == {"data_reader", "data_dcp_reader", "data_writer"}


def test_health_and_readiness_need_no_log_in(node: Node, ask: Client) -> None:
    assert ask("GET", "/", auth=None).status_code == 200
    assert ask("GET", "/health", auth=None).json() == {"status": "ok"}
    assert ask("GET", "/ready", auth=None).json() == {"status": "ready"}
    node.is_ready = False
    assert ask("GET", "/health", auth=None).status_code == 200
    assert (ask("GET", "/ready", auth=None).status_code, ask("GET", "/ready", auth=None).json()) == (
        503,
        {"status": "starting"},
    )


def test_nothing_is_kept_by_caches(ask: Client) -> None:
    assert "no-store" in ask("GET", "/pools").headers["cache-control"]


# --- collections --------------------------------------------------------------------------------------------------


def test_a_new_bucket_has_the_default_collection(ask: Client) -> None:
    default = {"name": "_default", "uid": "0", "maxTTL": 0, "history": False}
    assert ask("GET", SCOPES, auth=READER).json() == {
        "uid": "0",
        "scopes": [{"name": "_default", "uid": "0", "collections": [default]}],
    }


def test_scopes_and_collections_come_and_go(node: Node, engine: LmdbEngine, ask: Client) -> None:
    assert ask("POST", SCOPES, data={"name": "shop"}).json() == {"uid": "1"}
    form = {"name": "orders", "maxTTL": "60", "history": "true"}
    assert ask("POST", f"{SCOPES}/shop/collections", data=form).json() == {"uid": "2"}
    assert ask("POST", f"{SCOPES}/_default/collections", data={"name": "log"}).json() == {"uid": "3"}
    told = ask("GET", SCOPES).json()["scopes"]
    assert told[1] == {
        "name": "shop",
        "uid": "8",
        "collections": [{"name": "orders", "uid": "9", "maxTTL": 60, "history": True}],
    }
    assert [collection["name"] for collection in told[0]["collections"]] == ["_default", "log"]

    assert ask("DELETE", f"{SCOPES}/shop/collections/orders").json() == {"uid": "4"}
    assert ask("DELETE", f"{SCOPES}/shop").json() == {"uid": "5"}
    assert [scope["name"] for scope in ask("GET", SCOPES).json()["scopes"]] == ["_default"]
    assert ask("GET", "/pools/default/buckets/beer").json()["collectionsManifestUid"] == "5"

    close_bucket(node.stored)
    assert open_bucket(engine, outside=OUTSIDE, secret=(1, 2)).manifest.uid == 5
    assert "'ann' changed the collections of bucket 'beer': manifest 5" in node.logged


def test_uids_are_in_base_16(ask: Client) -> None:
    for number in range(11):
        answer = ask("POST", SCOPES, data={"name": f"s{number}"})
    assert answer.json() == {"uid": "b"}
    assert ask("GET", SCOPES).json()["uid"] == "b"


@pytest.mark.parametrize(("asked", "kept"), [("0", None), ("-1", 0), ("1", 1), ("2147483647", 2**31 - 1)])
def test_a_collection_s_time_to_live(node: Node, ask: Client, asked: str, kept: int | None) -> None:
    """REST's 0 is the bucket's own and its -1 is none, where the manifest has nothing and 0."""
    assert ask("POST", f"{SCOPES}/_default/collections", data={"name": "c", "maxTTL": asked}).status_code == 200
    collection = node.stored.manifest.find("_default", "c")
    assert collection is not None
    assert collection.max_ttl_s == kept
    assert ask("GET", SCOPES).json()["scopes"][0]["collections"][1]["maxTTL"] == int(asked)


def test_names_may_have_a_percent_sign(ask: Client) -> None:
    assert ask("POST", SCOPES, data={"name": "a%b"}).status_code == 200
    assert ask("POST", f"{SCOPES}/a%25b/collections", data={"name": "c%20d"}).status_code == 200
    assert ask("DELETE", f"{SCOPES}/a%25b/collections/c%2520d").status_code == 200


@pytest.mark.parametrize("name", ["", "_x", "%x", "a b", "a.b", "ä", "a" * 252])
def test_bad_names(node: Node, ask: Client, name: str) -> None:
    for path in (SCOPES, f"{SCOPES}/_default/collections"):
        answer = ask("POST", path, data={"name": name})
        assert answer.status_code == 400
        assert answer.json()["errors"].keys() == {"name"}
    assert node.stored.manifest.uid == 0


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({}, "name"),
        ({"name": "c", "colour": "red"}, "colour"),
        ({"name": ["c", "d"]}, "name"),
        ({"name": "c", "maxTTL": "soon"}, "maxTTL"),
        ({"name": "c", "maxTTL": "-2"}, "maxTTL"),
        ({"name": "c", "maxTTL": "2147483648"}, "maxTTL"),
        ({"name": "c", "maxTTL": "9" * 5000}, "maxTTL"),
        ({"name": "c", "maxTTL": "--1"}, "maxTTL"),
        ({"name": "c", "maxTTL": "²"}, "maxTTL"),
        ({"name": "c", "history": "maybe"}, "history"),
        ({str(number): "x" for number in range(17)}, "_"),
    ],
)
def test_bad_fields(node: Node, ask: Client, form: dict[str, Any], field: str) -> None:
    answer = ask("POST", f"{SCOPES}/_default/collections", data=form)
    assert answer.status_code == 400
    assert answer.json()["errors"].keys() == {field}
    assert node.stored.manifest.uid == 0


def test_a_body_that_is_not_utf_8(ask: Client) -> None:
    for body in (b"name=\xff", b"name=%ff"):
        assert ask("POST", SCOPES, content=body).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "name", "status", "message"),
    [
        ("POST", SCOPES, "shop", 400, 'Scope with name "shop" already exists'),
        (
            "POST",
            f"{SCOPES}/shop/collections",
            "orders",
            400,
            'Collection with name "orders" in scope "shop" already exists',
        ),
        ("POST", f"{SCOPES}/pub/collections", "orders", 404, 'Scope with name "pub" is not found'),
        ("DELETE", f"{SCOPES}/pub", None, 404, 'Scope with name "pub" is not found'),
        ("DELETE", f"{SCOPES}/_default", None, 400, "Deleting _default scope is not allowed"),
        ("DELETE", f"{SCOPES}/pub/collections/x", None, 404, 'Scope with name "pub" is not found'),
        (
            "DELETE",
            f"{SCOPES}/shop/collections/x",
            None,
            404,
            'Collection with name "x" in scope "shop" is not found',
        ),
        ("POST", "/pools/default/buckets/nope/scopes", "shop", 404, 'Bucket with name "nope" not found'),
    ],
)
def test_changes_that_can_t_be_made(
    node: Node, ask: Client, method: str, path: str, name: str | None, status: int, message: str
) -> None:
    """The words are those that the SDKs look for."""
    node.stored.set_manifest(Manifest().with_scope("shop").with_collection("shop", "orders"))
    answer = ask(method, path, data={"name": name} if name else None)
    assert (answer.status_code, answer.json()) == (status, {"errors": {"_": message}})
    assert node.stored.manifest.uid == 2


def test_one_collection_too_many(node: Node, ask: Client) -> None:
    collections = tuple(Collection(id=CollectionId(8 + at), name=f"c{at}") for at in range(COLLECTIONS_MAX))
    node.stored.manifest = Manifest(scopes=(Scope(id=ScopeId(0), name="_default", collections=collections),))
    answer = ask("POST", f"{SCOPES}/_default/collections", data={"name": "more"})
    assert answer.status_code == 400
    assert "at most 1200 scopes" in answer.json()["errors"]["_"]


def test_a_full_disk(node: Node, ask: Client) -> None:
    node.fault = StoreFull("no room is left", hint="Free disk space")
    answer = ask("POST", SCOPES, data={"name": "shop"})
    assert (answer.status_code, answer.json()) == (503, {"errors": {"_": "no room is left. Free disk space"}})


def test_our_own_faults_are_owned_up_to(node: Node, ask: Client) -> None:
    node.fault = ZeroDivisionError("of ours")
    answer = ask("POST", SCOPES, data={"name": "shop"})
    assert answer.status_code == 500
    assert "an error of its own" in answer.json()["message"]


# --- waiting for a manifest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_manifest_that_is_there(ask: Client, method: str) -> None:
    ask("POST", SCOPES, data={"name": "shop"})
    for uid in ("0", "1"):
        answer = ask(method, f"{SCOPES}/@ensureManifest/{uid}", auth=READER)
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_manifest_that_comes_later(node: Node, ask: Client) -> None:
    async def scenario() -> int:
        waiting = asyncio.create_task(ask.send("POST", f"{SCOPES}/@ensureManifest/1"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await ask.send("POST", SCOPES, data={"name": "shop"})
        return (await waiting).status_code

    assert asyncio.run(scenario()) == 200


def test_a_manifest_that_does_not_come(ask: Client) -> None:
    answer = ask("POST", f"{SCOPES}/@ensureManifest/A", data={"timeout": "10"})
    assert (answer.status_code, answer.json()) == (504, {"message": "The manifest did not come within 0.01 s"})


@pytest.mark.parametrize("uid", ["x", "-1", "1_0", "0x1", "1" * 17])
def test_a_uid_that_is_none(ask: Client, uid: str) -> None:
    assert ask("POST", f"{SCOPES}/@ensureManifest/{uid}").status_code == 400


@pytest.mark.parametrize("timeout", ["soon", "-1", "300001"])
def test_a_timeout_that_is_none(ask: Client, timeout: str) -> None:
    answer = ask("POST", f"{SCOPES}/@ensureManifest/0", data={"timeout": timeout})
    assert (answer.status_code, answer.json()["errors"].keys()) == (400, {"timeout"})


# --- who may ------------------------------------------------------------------------------------------------------

PATHS = {
    path.format(bucket="beer", scope="shop", collection="c", uid="0", vbucket="0"): methods
    for path, methods in ROUTES.items()
}


@pytest.mark.parametrize(("path", "method"), [(path, method) for path, methods in PATHS.items() for method in methods])
def test_everything_needs_a_log_in(ask: Client, path: str, method: str) -> None:
    answer = ask(method, path, auth=None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.json().keys() == {"message"}


@pytest.mark.parametrize(
    ("path", "method"), [(path, method) for path, methods in PATHS.items() for method in methods if "beer" in path]
)
def test_everything_about_a_bucket_needs_a_right_on_it(node: Node, ask: Client, path: str, method: str) -> None:
    answer = ask(method, path, auth=STRANGER)
    assert answer.status_code == 403
    assert answer.json().keys() == {"message", "permissions"}
    assert any("'sid' may not" in line for line in node.logged)


def test_readers_and_writers_may_not_drill(ask: Client) -> None:
    for auth in (READER, WRITER):
        assert (
            ask("POST", "/headwater/buckets/beer/vbuckets/0/rollback", auth=auth, data={"to": "0"}).status_code == 403
        )
        for path in ("hold", "release"):
            assert ask("POST", f"/headwater/buckets/beer/replicas/{path}", auth=auth).status_code == 403


def test_readers_and_writers_may_not_change_collections(ask: Client) -> None:
    for auth in (READER, WRITER):
        answer = ask("POST", SCOPES, auth=auth, data={"name": "shop"})
        assert answer.status_code == 403
        assert answer.json()["permissions"] == ["cluster.collection[beer:.:.].collections!write"]


def test_a_bucket_that_one_may_not_use_might_as_well_not_exist(ask: Client) -> None:
    assert ask("GET", "/pools/default/b/nope", auth=READER).status_code == 403
    assert ask("GET", "/pools/default/b/nope", auth=ADMIN).status_code == 404


def test_others_buckets_are_not_listed(ask: Client) -> None:
    assert ask("GET", "/pools/default/buckets", auth=STRANGER).json() == []
    assert ask("GET", "/pools/default", auth=STRANGER).json()["bucketNames"] == []


@pytest.mark.parametrize(
    "header",
    [
        "Bearer abc",
        "Basic",
        "Basic !!!",
        "Basic " + base64.b64encode(b"no colon").decode(),
        "Basic " + base64.b64encode(b":no name").decode(),
        "Basic " + base64.b64encode(b"\xff:x").decode(),
        "Basic " + base64.b64encode(b"n" * 129 + b":x").decode(),
    ],
)
def test_credentials_that_can_t_be_read(node: Node, ask: Client, header: str) -> None:
    answer = ask("GET", "/pools", auth=None, headers={"Authorization": header})
    assert answer.status_code == 401
    assert len(node.throttle) == 0


def test_a_password_may_have_colons(node: Node, ask: Client) -> None:
    node.users = node.users.add(node.users.new_user("kim", "a:b:ü", {Grant(Role.READER)}, salts=bytes(SALTS_BYTES)))
    assert ask("GET", "/pools", auth=("kim", "a:b:ü".encode())).status_code == 200


def test_pages_of_other_sites_may_not_use_a_browser_s_log_in(ask: Client) -> None:
    def post(origin: str) -> int:
        return ask("POST", SCOPES, data={"name": "shop"}, headers={"Origin": origin}).status_code

    assert (post("http://evil.example"), post("null"), post("http://node:8092")) == (403, 403, 403)
    assert post("http://node:8091") == 200
    assert ask("GET", SCOPES, headers={"Origin": "http://evil.example"}).status_code == 200


# --- log-ins that fail, and that are remembered -------------------------------------------------------------------


def test_failed_log_ins_are_throttled_and_logged_without_the_password(node: Node, ask: Client) -> None:
    for _ in range(FREE_FAILURES):
        assert ask("GET", "/pools", auth=("ann", "secret-guess")).status_code == 401
    answer = ask("GET", "/pools")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json() == {"message": "Too many failed log-ins: try again in 1 s"}
    assert "log-in of 'ann' from 192.0.2.1 over HTTP failed" in node.logged
    assert not any("secret-guess" in line or "pencil" in line for line in node.logged)
    node.now += DELAYS_S[0]
    assert ask("GET", "/pools").status_code == 200
    assert len(node.throttle) == 0


def test_a_remembered_password_does_not_get_around_the_throttle(ask: Client) -> None:
    assert ask("GET", "/pools").status_code == 200
    for _ in range(FREE_FAILURES):
        ask("GET", "/pools", auth=("ann", "guess"))
    assert ask("GET", "/pools").status_code == 429


def test_users_that_do_not_exist_fail_alike(ask: Client) -> None:
    wrong, unknown = ask("GET", "/pools", auth=("ann", "x")), ask("GET", "/pools", auth=("nobody", "x"))
    assert (wrong.status_code, wrong.json()) == (unknown.status_code, unknown.json())


@dataclass
class CountingUsers:
    """Users that count how often a password is checked."""

    users: Users
    checks: int = 0

    def check_password(self, name: str, password: str) -> bool:
        self.checks += 1
        return self.users.check_password(name, password)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.users, name)


@pytest.fixture
def counting(node: Node) -> CountingUsers:
    counting = CountingUsers(node.users)
    node.users = counting  # type: ignore[assignment]
    return counting


def test_polling_does_not_check_the_password_every_time(node: Node, counting: CountingUsers, ask: Client) -> None:
    for _ in range(5):
        assert ask("GET", "/pools").status_code == 200
    assert counting.checks == 1
    node.now += limits.LOGIN_KNOWN_S
    assert ask("GET", "/pools").status_code == 200
    assert counting.checks == 2
    assert ask("GET", "/pools", auth=("ann", "pencils")).status_code == 401
    assert counting.checks == 3


def test_many_at_once_are_checked_once(counting: CountingUsers, ask: Client) -> None:
    async def scenario() -> list[int]:
        answers = await asyncio.gather(*(ask.send("GET", "/pools") for _ in range(10)))
        return [answer.status_code for answer in answers]

    assert asyncio.run(scenario()) == [200] * 10
    assert counting.checks == 1


def test_a_user_who_is_removed_or_changed_is_not_remembered(node: Node, ask: Client) -> None:
    assert ask("GET", "/pools").status_code == 200
    without = node.users.remove("ann")
    node.users = without
    assert ask("GET", "/pools").status_code == 401
    node.users = without.add(without.new_user("ann", "other", {Grant(Role.ADMIN)}, salts=bytes(SALTS_BYTES)))
    assert ask("GET", "/pools").status_code == 401
    assert ask("GET", "/pools", auth=("ann", "other")).status_code == 200


def test_only_so_many_are_remembered(node: Node, ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "LOGINS_KNOWN_MAX", 2)
    counting = CountingUsers(node.users)
    node.users = counting  # type: ignore[assignment]
    for auth in (ADMIN, READER, WRITER, ADMIN):
        assert ask("GET", "/pools", auth=auth).status_code == 200
    assert counting.checks == 4


def test_only_so_many_may_wait_for_a_check(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "LOGINS_WAITING_MAX", 2)

    async def scenario() -> list[int]:
        answers = await asyncio.gather(*(ask.send("GET", "/pools") for _ in range(4)))
        return sorted(answer.status_code for answer in answers)

    assert asyncio.run(scenario()) == [200, 200, 503, 503]


# --- what is refused ----------------------------------------------------------------------------------------------


def test_paths_that_do_not_exist(ask: Client) -> None:
    for path in ("/pool", "/pools/other", "/pools/default/buckets/beer/docs", f"{SCOPES}/a/b"):
        answer = ask("GET", path)
        assert (answer.status_code, answer.json()) == (404, {"message": "There is nothing here: begin at /pools"})


def test_methods_that_are_not_allowed(ask: Client) -> None:
    answer = ask("PUT", SCOPES)
    assert answer.status_code == 405
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))
    assert answer.json()["message"].startswith("PUT is not allowed here")
    assert ask("GET", f"{SCOPES}/shop").status_code == 405


def test_head_is_get_without_the_body(ask: Client) -> None:
    for path in ("/pools", "/pools/default/b/beer", "/pools/default/bs/beer"):
        assert ask("HEAD", path).status_code == 200


def test_long_heads_are_refused(ask: Client) -> None:
    for parts in ({"headers": {"X-Long": "x" * limits.HEAD_BYTES_MAX}}, {"params": {"q": "x" * limits.HEAD_BYTES_MAX}}):
        answer = ask("GET", "/pools", **parts)
        assert (answer.status_code, answer.json()) == (431, {"message": "Path and headers have at most 16384 bytes"})


def test_long_bodies_are_refused(ask: Client) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b"x" * 8192

    for body in (b"x" * (limits.BODY_BYTES_MAX + 1), pieces()):
        answer = ask("POST", SCOPES, content=body)
        assert (answer.status_code, answer.json()) == (413, {"message": "A body has at most 65536 bytes"})


def test_slow_bodies_are_refused(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "REQUEST_S_MAX", 0.05)

    async def trickle() -> AsyncIterator[bytes]:
        yield b"name="
        await asyncio.sleep(10)

    assert ask("POST", SCOPES, content=trickle()).status_code == 408


# --- a server, and streams ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(node: Node) -> AsyncIterator[tuple[HttpServer, int]]:
    bound = socket.create_server(("127.0.0.1", 0))
    http_server = HttpServer(node)
    await http_server.listen(bound)
    try:
        yield http_server, bound.getsockname()[1]
    finally:
        await http_server.stop()


async def stream_of(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    credentials = base64.b64encode(b"rob:quill").decode()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {credentials}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding: chunked" in head.lower()
    return reader, writer


async def chunk_of(reader: asyncio.StreamReader) -> bytes:
    chunk_bytes = int(await asyncio.wait_for(reader.readline(), 5), 16)
    return (await reader.readexactly(chunk_bytes + 2))[:-2]


async def config_of(reader: asyncio.StreamReader) -> dict[str, Any]:
    chunk = await chunk_of(reader)
    assert chunk.endswith(b"}\n\n\n\n")
    config: dict[str, Any] = json.loads(chunk)
    return config


def change_config(node: Node) -> None:
    nodes = (*node.cluster.nodes, NodeAddress(host="127.0.0.1", kv_port=11310, http_port=9091))
    node.cluster = Cluster(nodes=nodes, revision=node.cluster.revision + 1, uuid=UUID)
    node.config_changes.notify()


@pytest.mark.parametrize(
    "path", ["/pools/default/bs/beer", "/pools/default/bucketsStreaming/beer", "/poolsStreaming/default"]
)
def test_a_stream_says_the_config_again_when_it_changes_and_ends_with_the_node(node: Node, path: str) -> None:
    async def scenario() -> None:
        async with serving(node) as (http_server, port):
            reader, writer = await stream_of(port, path)
            for nodes in (1, 2, 3):
                assert len((await config_of(reader))["nodes"]) == nodes
                change_config(node)
            await config_of(reader)
            await http_server.stop()
            assert await chunk_of(reader) == b""
            assert await reader.read() == b""
            writer.close()

    asyncio.run(scenario())


def test_a_stream_says_the_config_again_now_and_then(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_streams, "STREAM_REPEAT_S", 0.02)

    async def scenario() -> None:
        async with serving(node) as (_, port):
            reader, writer = await stream_of(port, "/pools/default/bs/beer")
            assert [(await config_of(reader))["rev"] for _ in range(3)] == [1, 1, 1]
            writer.close()

    asyncio.run(scenario())


def test_a_stream_ends_when_its_bucket_is_gone(node: Node) -> None:
    async def scenario() -> None:
        async with serving(node) as (_, port):
            reader, writer = await stream_of(port, "/pools/default/bs/beer")
            await config_of(reader)
            node.bucket = lambda name: None  # type: ignore[method-assign]
            node.config_changes.notify()
            assert await chunk_of(reader) == b""
            writer.close()

    asyncio.run(scenario())


def test_only_so_many_streams(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_streams, "STREAMS_MAX", 1)

    async def status(port: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        headers = {"Authorization": "Basic " + base64.b64encode(b"rob:quill").decode()}
        await asyncio.to_thread(connection.request, "GET", "/pools/default/bs/beer", headers=headers)
        response = await asyncio.to_thread(connection.getresponse)
        response.close()
        connection.close()
        return response.status

    async def scenario() -> None:
        async with serving(node) as (_, port):
            reader, writer = await stream_of(port, "/pools/default/bs/beer")
            await config_of(reader)
            assert await status(port) == 503
            writer.close()
            await asyncio.sleep(0.1)
            assert await status(port) == 200

    asyncio.run(scenario())


def test_a_client_that_goes_leaves_nothing_behind(node: Node) -> None:
    async def scenario() -> int:
        async with serving(node) as (http_server, port):
            streams = http_server._app.state.streams
            for _ in range(3):
                reader, writer = await stream_of(port, "/pools/default/bs/beer")
                await config_of(reader)
                writer.close()
            await asyncio.sleep(0.1)
            gc.collect()
            await asyncio.sleep(0)
            assert isinstance(streams, config_streams.ConfigStreams)
            return streams.open

    assert asyncio.run(scenario()) == 0


def test_silent_connections_are_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S_MAX", 0.1)

    async def scenario() -> None:
        async with serving(node) as (_, port):
            for sent in (b"", b"GET / HT"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()

    asyncio.run(scenario())


def test_a_connection_that_trickles_its_second_request_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S_MAX", 0.2)

    async def scenario() -> None:
        async with serving(node) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.3)
            for _ in range(3):
                writer.write(b"G")
                await asyncio.sleep(0.08)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    asyncio.run(scenario())


def test_a_client_s_own_word_for_its_address_is_not_taken(node: Node) -> None:
    async def scenario() -> None:
        async with serving(node) as (_, port):
            url = f"http://127.0.0.1:{port}/pools"
            async with httpx.AsyncClient() as client:
                for number in range(FREE_FAILURES):
                    await client.get(url, auth=("ann", "x"), headers={"X-Forwarded-For": f"192.0.2.{number}"})
                assert (await client.get(url, auth=ADMIN)).status_code == 429

    asyncio.run(scenario())


def test_two_sockets_stop_together(node: Node) -> None:
    async def scenario() -> None:
        http_server = HttpServer(node)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [bound.getsockname()[1] for bound in sockets]
        for bound in sockets:
            await http_server.listen(bound)
        async with httpx.AsyncClient() as client:
            for port in ports:
                assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        await http_server.stop()
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(scenario())


def test_a_server_that_can_t_start_says_so(node: Node) -> None:
    async def scenario() -> None:
        closed = socket.create_server(("127.0.0.1", 0))
        closed.close()
        with pytest.raises(OSError, match="descriptor"):
            await HttpServer(node).listen(closed)

    asyncio.run(scenario())


# --- the signal ---------------------------------------------------------------------------------------------------


def test_no_change_is_missed() -> None:
    async def scenario() -> None:
        changes = Changes()
        seen = changes.count
        changes.notify()
        await asyncio.wait_for(changes.after(seen), 1)
        waiting = [asyncio.create_task(changes.after(changes.count)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        changes.notify()
        await asyncio.wait_for(asyncio.gather(*waiting), 1)

    asyncio.run(scenario())

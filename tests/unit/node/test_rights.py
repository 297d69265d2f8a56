"""Which role may do what: every command of the key-value side and every route of HTTP, against a table of its own.

The commands and routes come from the node's tables, so one that is new and not in the tables here fails. What each may
be done by is written down here a second time, and not read from the code that is judged.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route

from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from headwater.node.http import app as http_side
from headwater.node.http.call import Call
from headwater.node.kv.handlers import HANDLERS
from headwater.node.node_state import NodeState
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import CacheItem
from headwater.protocol.messages.session import Hello
from headwater.protocol.messages.vbuckets import ObservedKey
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId
from headwater.protocol.status import Status
from support.http_node import Node as HttpNode
from support.kv_harness import FEATURES, PASSWORD, Client, Node

DATA = {"use", "read", "stream", "write"}
MAY: dict[str, set[str]] = {
    "reader": {"use", "read", "stream"},
    "writer": DATA,
    "admin": DATA | {"manage", "node", "whole node"},
    "bucket_admin": {"use", "manage"},
    "bucket_full_access": DATA,
    "data_reader": {"use", "read"},
    "data_writer": {"use", "write"},
    "data_dcp_reader": {"use", "read", "stream"},
    "ro_admin": {"use"},
} | {role.value: set() for role in Role if role.startswith(("query_", "fts_", "analytics_", "views_"))}
"""By role, what its users may do on a bucket that the role is on; or on the whole node, if it is on all of them."""

COMMANDS = {
    "": """Hello SaslListMechanisms SaslAuth SaslStep GetErrorMap Noop Version Quit QuitQuiet SelectBucket
        GetClusterConfig""",
    "use": "GetCollectionsManifest GetCollectionId GetScopeId",
    "read": """Stat Get GetQuiet GetWithKey GetWithKeyQuiet GetReplica GetEx GetExReplica GetMeta GetMetaQuiet
        GetRandomKey RangeScanCreate RangeScanContinue RangeScanCancel SubdocGet SubdocExists SubdocGetCount MultiLookup
        GetVBucket GetAllVbSeqnos SeqnoPersistence ObserveSeqno Observe GetFailoverLogByKv""",
    "write": """Set SetQuiet Add AddQuiet Replace ReplaceQuiet Delete DeleteQuiet Append AppendQuiet Prepend
        PrependQuiet Touch Unlock SetWithMeta SetWithMetaQuiet AddWithMeta AddWithMetaQuiet DeleteWithMeta
        DeleteWithMetaQuiet""",
    # The answers show what is in the document.
    "read write": """GetAndTouch GetAndTouchQuiet Increment IncrementQuiet Decrement DecrementQuiet GetLocked
        MultiMutation SubdocDictAdd SubdocDictUpsert SubdocDelete SubdocReplace SubdocArrayPushLast SubdocArrayPushFirst
        SubdocArrayInsert SubdocArrayAddUnique SubdocCounter""",
    "manage": "Flush FlushQuiet Verbosity",
    "node": "SetVBucket DeleteVBucket SetCollectionsManifest",
    "whole node": "SetClusterConfig",
    "stream": """Open Control StreamRequest BufferAck SeqnoAcknowledged AddStream StreamEnd SnapshotMarker Mutation
        Deletion Expiration DcpFlush SetVBucketState SystemEvent Prepare Commit Abort SeqnoAdvanced OsoSnapshot
        CacheTransfer CacheTransferEnd CloseStream GetFailoverLog DcpNoop""",
}

BUCKET, OWN = "/pools/default/buckets/{bucket}", "/headwater/buckets/{bucket}"
USERS, GROUPS = "/settings/rbac/users", "/settings/rbac/groups"
PAGE = "/ui/api/buckets/{bucket}"
ROUTES = {
    "open": """GET / GET /health GET /healthz GET /ready GET /readyz GET /ui GET /ui/ GET /ui/assets/{name}
        GET /ui/api/session POST /ui/api/login POST /ui/api/logout""",
    "": """GET /pools GET /pools/default GET /pools/nodes GET /poolsStreaming/default GET /pools/default/nodeServices
        GET /pools/default/buckets GET /whoami POST /controller/changePassword GET /metrics
        GET /headwater/health""",
    "use": f"""GET {BUCKET} GET /pools/default/bucketsStreaming/{{bucket}} GET /pools/default/b/{{bucket}}
        GET /pools/default/bs/{{bucket}} GET {BUCKET}/scopes GET {BUCKET}/scopes/@ensureManifest/{{uid}}
        POST {BUCKET}/scopes/@ensureManifest/{{uid}} GET {OWN}/health""",
    "read": f"GET {OWN}/dcp",
    "read stream": f"""GET {PAGE}/live GET {PAGE}/health GET {PAGE}/changes GET {PAGE}/documents GET {PAGE}/document
        GET {PAGE}/versions GET {PAGE}/vbuckets/{{vbucket}} GET {PAGE}/branches GET {PAGE}/events/{{number}}
        GET {PAGE}/streams GET {PAGE}/collections""",
    "manage": f"""POST {BUCKET} PUT {BUCKET} POST {BUCKET}/controller/doFlush POST {BUCKET}/scopes
        DELETE {BUCKET}/scopes/{{scope}} POST {BUCKET}/scopes/{{scope}}/collections
        PATCH {BUCKET}/scopes/{{scope}}/collections/{{collection}}
        DELETE {BUCKET}/scopes/{{scope}}/collections/{{collection}} POST {OWN}/flush
        POST {OWN}/vbuckets/{{vbucket}}/rollback POST {OWN}/replicas/hold POST {OWN}/replicas/release
        POST {OWN}/connections/cut""",
    "whole node": f"""POST /pools/default POST /pools/default/buckets DELETE {BUCKET} DELETE {OWN} POST /headwater/node
        POST /headwater/buckets GET /settings/rbac/roles GET {USERS} GET {USERS}/{{domain}}
        GET {USERS}/{{domain}}/{{name:path}} PUT {USERS}/{{domain}}/{{name:path}}
        DELETE {USERS}/{{domain}}/{{name:path}} GET {GROUPS} GET {GROUPS}/{{name:path}} PUT {GROUPS}/{{name:path}}
        DELETE {GROUPS}/{{name:path}}""",
}
NO = {401, 403}


def test_every_role_is_judged() -> None:
    assert set(MAY) == {role.value for role in Role}


# --- key-value ----------------------------------------------------------------------------------------------------


def rights(needs: str) -> set[str]:
    return {needs} if needs == "whole node" else set(needs.split())


NEEDS = {name: rights(needs) for needs, names in COMMANDS.items() for name in names.split()}
_GIVEN: dict[str, Any] = {
    "key": b"k", "path": b"p", "value": b"{}", "scan_id": bytes(16), "specs": (),
    "keys": (ObservedKey(vbucket=VBucketId(0), key=b"k"),),
    "items": (CacheItem(seqno=Seqno(1), collection_id=CollectionId(0), key=b"k"),),
}  # fmt: skip


def sample(cls: type[Request]) -> Request:
    """A request that can be decoded. What it asks for need not make sense: its right is judged before that."""
    needed = [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
    return cls(**{name: _GIVEN.get(name, 1) for name in needed})


def statuses(client: Client, request: Request) -> set[Status]:
    return {response.status for response in client.call_all(request)}


def test_every_command_is_judged() -> None:
    assert {cls.__name__ for cls in HANDLERS} == NEEDS.keys()


@pytest.mark.parametrize("role", MAY)
def test_a_role_is_let_in_by_commands(node: Node, role: str) -> None:
    client = judged = node.client(user="admin" if not MAY[role] else role)
    if not MAY[role]:
        judged.session.user = role  # It can't even select a bucket.
    for cls in HANDLERS:
        needs = NEEDS[cls.__name__]
        if not needs or not MAY[role] >= needs:
            continue
        if client.session.dcp is not None or client.session.consumer is not None:
            client = node.client(user=role)
        assert Status.EACCESS not in statuses(client, sample(cls)), f"{role}: {cls.__name__}"
    for cls in HANDLERS:
        if not MAY[role] >= NEEDS[cls.__name__]:
            assert statuses(judged, sample(cls)) == {Status.EACCESS}, f"{role}: {cls.__name__}"


def test_a_stranger_is_let_in_by_what_needs_no_right(node: Node) -> None:
    for cls in HANDLERS:
        client = Client(node)
        client.succeed(Hello(key=b"test", features=FEATURES))
        answered = statuses(client, sample(cls))
        # That one looks for itself, as it may be about no bucket.
        is_open = not NEEDS[cls.__name__] and cls.__name__ != "GetClusterConfig"
        assert (answered == {Status.EACCESS}) != is_open, cls.__name__


# --- HTTP ---------------------------------------------------------------------------------------------------------


@cache
def users() -> Users:
    """Two users a role, with the role on the bucket of the paths, and on another one."""
    made = Users(decoy_secret=bytes(32), iterations=4096)
    for role in Role:
        for bucket in ("default", "other"):
            name = f"{role.value}-{bucket}"
            made = made.add(made.new_user(name, PASSWORD, [Grant(role, bucket)], salts=bytes(SALTS_BYTES)))
        made = made.add(made.new_user(role.value, PASSWORD, [Grant(role)], salts=bytes(SALTS_BYTES)))
    return made


def routes_judged() -> dict[tuple[str, str], str]:
    judged: dict[tuple[str, str], str] = {}
    for needs, routes in ROUTES.items():
        words = routes.split()
        judged |= dict.fromkeys(zip(words[::2], words[1::2], strict=True), needs)
    return judged


async def _reached(call: Call) -> Response:
    return Response(status_code=299)


@pytest.fixture
def app(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The HTTP side, whose handlers are not reached: it is what stands before them that is judged."""
    reached = {
        path: {method: replace(endpoint, handle=_reached) for method, endpoint in endpoints.items()}
        for path, endpoints in http_side.ROUTES.items()
    }
    monkeypatch.setattr(http_side, "ROUTES", reached)
    http_node = HttpNode(node.bucket, tmp_path)
    http_node.users = users()
    return http_side.http_app(cast(NodeState, http_node))


def test_every_route_is_judged(app: Any) -> None:
    assert all(isinstance(route, Route) for route in app.routes)
    found = {(method, route.path) for route in app.routes for method in route.methods or {"GET"} if method != "HEAD"}
    assert found == routes_judged().keys()


@pytest.mark.parametrize("role", MAY)
async def test_a_role_is_let_in_by_routes(app: Any, role: str) -> None:
    for user, on in ((role, "node"), (f"{role}-default", "default"), (f"{role}-other", "other")):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=("192.0.2.1", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://node:8091") as client:
            await client.post(
                "/ui/api/login",
                json={"user": user, "password": PASSWORD},
                headers={"Origin": "http://node:8091", "X-Headwater-Dashboard": "1"},
            )
            for (method, path), needs in routes_judged().items():
                if needs == "open":
                    continue
                wanted = rights(needs)
                may = not wanted or (wanted <= MAY[role] and on == "node")
                may = may or (wanted <= MAY[role] - {"whole node"} and on == "default")
                asked = path.replace("{bucket}", "default").replace("{name:path}", "x")
                answer = await client.request(method, asked, auth=(user, PASSWORD))
                assert (answer.status_code not in NO) == may, f"{user}: {method} {path}: {answer.status_code}"

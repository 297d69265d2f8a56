"""The application: the table of routes, and what every request has to pass before its handler.

In this order: the head's size, whether the node is ready, the path, the method, the origin, the log-in, the right, the
bucket. A user who may not use a bucket does not learn whether there is one.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.errors import LocalProtocolError, StoreError
from headwater.log_fields import Fields, LogEvent
from headwater.node.auth.users import Action
from headwater.node.http import collections, drill, pools, users
from headwater.node.http import drill as dcp_connections
from headwater.node.http.call import (
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    Call,
    ConfigStreams,
    Json,
    NodeView,
    Refusal,
    body_too_long,
    forbidden,
    no_bucket,
)
from headwater.node.http.logins import Extension, Logins, MakeExtension

_LOGIN_KEY_BYTES = 32
_HEALTH = ("/health", "/healthz")
_READINESS = ("/ready", "/readyz")
_RETRY_AFTER_S = 1

Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A handler, and the right that it needs: on the bucket of the path, or on the node where the path has none.

    Every user may use what needs none.
    """

    handle: Handler
    needs: Action | None = None


_BUCKET = "/pools/default/buckets/{bucket}"
_USERS = "/settings/rbac/users"
_OWN_BUCKET = "/headwater/buckets/{bucket}"
"""For what Couchbase has no path."""

ROUTES: dict[str, dict[str, Endpoint]] = {
    "/pools": {"GET": Endpoint(pools.show_pools)},
    "/pools/default": {"GET": Endpoint(pools.show_pool)},
    "/poolsStreaming/default": {"GET": Endpoint(pools.stream_pool)},
    "/pools/default/nodeServices": {"GET": Endpoint(pools.show_node_services)},
    "/pools/default/buckets": {"GET": Endpoint(pools.show_buckets)},
    _BUCKET: {"GET": Endpoint(pools.show_bucket, Action.USE)},
    "/pools/default/bucketsStreaming/{bucket}": {"GET": Endpoint(pools.stream_bucket, Action.USE)},
    "/pools/default/b/{bucket}": {"GET": Endpoint(pools.show_config, Action.USE)},
    "/pools/default/bs/{bucket}": {"GET": Endpoint(pools.stream_config, Action.USE)},
    "/whoami": {"GET": Endpoint(users.who_am_i)},
    "/controller/changePassword": {"POST": Endpoint(users.change_password)},
    "/settings/rbac/roles": {"GET": Endpoint(users.show_roles, Action.SECURITY)},
    _USERS: {"GET": Endpoint(users.show_users, Action.SECURITY)},
    f"{_USERS}/{{domain}}": {"GET": Endpoint(users.show_users, Action.SECURITY)},
    f"{_USERS}/{{domain}}/{{name:path}}": {
        "GET": Endpoint(users.show_user, Action.SECURITY),
        "PUT": Endpoint(users.put_user, Action.SECURITY),
        "DELETE": Endpoint(users.remove_user, Action.SECURITY),
    },
    f"{_BUCKET}/scopes": {
        "GET": Endpoint(collections.show_manifest, Action.USE),
        "POST": Endpoint(collections.create_scope, Action.ADMIN),
    },
    f"{_BUCKET}/scopes/@ensureManifest/{{uid}}": {
        "GET": Endpoint(collections.ensure_manifest, Action.USE),
        "POST": Endpoint(collections.ensure_manifest, Action.USE),
    },
    f"{_BUCKET}/scopes/{{scope}}": {"DELETE": Endpoint(collections.drop_scope, Action.ADMIN)},
    f"{_BUCKET}/scopes/{{scope}}/collections": {"POST": Endpoint(collections.create_collection, Action.ADMIN)},
    f"{_BUCKET}/scopes/{{scope}}/collections/{{collection}}": {
        "DELETE": Endpoint(collections.drop_collection, Action.ADMIN)
    },
    f"{_OWN_BUCKET}/dcp": {"GET": Endpoint(dcp_connections.show_connections, Action.READ)},
    f"{_OWN_BUCKET}/vbuckets/{{vbucket}}/rollback": {"POST": Endpoint(drill.roll_back, Action.ADMIN)},
    f"{_OWN_BUCKET}/replicas/hold": {"POST": Endpoint(drill.hold_replicas, Action.ADMIN)},
    f"{_OWN_BUCKET}/replicas/release": {"POST": Endpoint(drill.release_replicas, Action.ADMIN)},
}

_PERMISSIONS = {
    Action.USE: "cluster.bucket[{bucket}].settings!read",
    Action.READ: "cluster.bucket[{bucket}].stats!read",
    Action.ADMIN: "cluster.collection[{bucket}:.:.].collections!write",
    Action.SECURITY: "cluster.admin.security.admin!write",
}


def http_app(node: NodeView, make_extension: MakeExtension | None = None) -> Starlette:
    """The HTTP side of a node.

    `app.state.streams` and `app.state.extension` are to be closed before the server waits for requests to end.
    """
    logins = Logins(node, key=secrets.token_bytes(_LOGIN_KEY_BYTES))
    extension = None if make_extension is None else make_extension(logins)
    streams = ConfigStreams(node)

    def route(path: str, endpoints: dict[str, Endpoint]) -> Route:
        async def handle(request: Request) -> Response:
            # Starlette lets HEAD in wherever GET is.
            endpoint = endpoints["GET" if request.method == "HEAD" else request.method]
            _check_origin(request)
            user = await logins.user_of(request)
            call = Call(node=node, streams=streams, request=request, user=user, needs=endpoint.needs)
            _check_right(call)
            return await endpoint.handle(call)

        return Route(path, handle, methods=list(endpoints))

    app = Starlette(
        routes=[
            *_open_routes(node, extension),
            *(route(path, endpoints) for path, endpoints in ROUTES.items()),
            *(() if extension is None else extension.routes),
        ],
        middleware=[Middleware(_HeadLimit), Middleware(_WhenReady, node=node)],
        exception_handlers={
            Refusal: _refuse,
            HTTPException: _refuse_route,
            LocalProtocolError: _refuse_change,
            StoreError: _refuse_for_now,
            Exception: _own_up,
        },
    )
    app.state.streams = streams
    app.state.extension = extension
    return app


def _open_routes(node: NodeView, extension: Extension | None) -> list[Route]:
    """What needs no log-in, and tells nothing that is worth one."""

    async def root(request: Request) -> Response:
        if extension is not None and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(extension.home, status_code=303)
        # gocbcore sees by this that the node is alive.
        return Json({"name": "headwater", "uri": "/pools"})

    async def health(request: Request) -> Response:
        return Json({"status": "ok"})

    async def ready(request: Request) -> Response:
        return Json({"status": "ready"}) if node.is_ready else _not_ready(node)

    return [
        Route("/", root),
        *(Route(path, health) for path in _HEALTH),
        *(Route(path, ready) for path in _READINESS),
    ]


# --- before the handler -------------------------------------------------------------------------------------------


class _HeadLimit:
    """Refuses what is too long before anything looks at it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _size_refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)


class _WhenReady:
    """Tells that the node is not ready: its buckets and users are not there yet, or not any more."""

    def __init__(self, app: ASGIApp, node: NodeView) -> None:
        self._app = app
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_served = scope["type"] != "http" or self._node.is_ready or scope["path"] in (*_HEALTH, *_READINESS)
        await (self._app if is_served else _not_ready(self._node))(scope, receive, send)


def _not_ready(node: NodeView) -> Response:
    told = {"status": "not ready", "message": f"The node is not ready: {node.why_not_ready}"}
    return Json(told, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})


def _size_refusal(scope: Scope) -> Refusal | None:
    head_bytes = len(scope["path"].encode(errors="replace")) + len(scope["query_string"])
    head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if head_bytes > HEAD_BYTES_MAX:
        return Refusal.message(431, f"Path and headers have at most {HEAD_BYTES_MAX} bytes", Connection="close")
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    # The parser has made sure that it is a number.
    return body_too_long() if int(announced) > BODY_BYTES_MAX else None


def _check_origin(request: Request) -> None:
    """A page of another site must not use the log-in that a browser remembers."""
    origin = request.headers.get("origin")
    if origin is None or request.method in ("GET", "HEAD"):
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise Refusal.message(403, "Pages of other sites may not change anything here")


def _check_right(call: Call) -> None:
    bucket, needs = call.request.path_params.get("bucket"), call.needs
    if needs is None and not call.is_allowed:
        raise Refusal.message(401, "The user was removed while its password was checked")
    if needs is not None and not call.is_allowed:
        method, path = call.request.method, call.request.url.path
        message = f"{call.user!r} may not {method} {path!r}"
        about: Fields = {"event": LogEvent.DENIED, "user": call.user, "method": method, "path": path}
        if bucket is not None:
            about["bucket"] = bucket
        call.node.log(message, **about)
        raise forbidden(_PERMISSIONS[needs].format(bucket=bucket))
    if bucket is not None and call.node.bucket(bucket) is None:
        raise no_bucket(bucket)


# --- what was raised ----------------------------------------------------------------------------------------------


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed here, but {allowed} is"
    else:
        message = "There is nothing here: begin at /pools" if error.status_code == 404 else error.detail
    return Json({"message": message}, error.status_code, headers=error.headers)


async def _refuse_change(request: Request, error: Exception) -> Response:
    """The manifest, or the users, do not allow the change, such as one collection too many."""
    return Refusal.errors(400, str(error)).response()


async def _refuse_for_now(request: Request, error: Exception) -> Response:
    return Refusal.errors(503, str(error)).response()


async def _own_up(request: Request, error: Exception) -> Response:
    """The error itself goes on to the server, which logs it."""
    return Json({"message": "The node has met an error of its own: its log has more"}, 500)

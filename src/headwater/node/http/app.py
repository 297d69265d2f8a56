"""The HTTP application: the table of routes, and the checks that every request passes before its handler.

One application serves the node's whole HTTP side: what clients bootstrap from and manage, as in Couchbase's cluster
manager, and the dashboard under `/ui`. `HttpServer` runs it. Every request passes these checks, in this order: the
head's size, the host, whether the node is ready, the path, the method, the origin, the log-in, the right, the bucket. A
user who may not use a bucket does not learn whether it exists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.errors import LocalProtocolError, StoreError
from headwater.http.serving import AppServer, HeadLimit, HostCheck, PageHandler, with_page_headers
from headwater.log_fields import Fields, LogEvent
from headwater.node.auth.users import Action
from headwater.node.http import bucket_management, buckets, pools, users
from headwater.node.http.call import Call, ConfigStreams, Json, Logins, Refusal, Sessions, may_see
from headwater.node.http.dashboard.dashboard import Dashboard
from headwater.node.node_state import NodeState

_HEALTH = ("/health", "/healthz")
_READINESS = ("/ready", "/readyz")
_METRICS = "/metrics"
_RETRY_AFTER_S = 1

Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A handler, and the right that it needs: on the bucket of the path, or on the node if the path has none.

    Every user may call a handler that needs no right (`ANY_USER`).
    """

    handle: Handler
    needs: Action | None


ANY_USER = None
_BUCKET = "/pools/default/buckets/{bucket}"
_USERS = "/settings/rbac/users"
_GROUPS = "/settings/rbac/groups"
_OWN_BUCKET = "/headwater/buckets/{bucket}"
"""For operations that have no path in Couchbase."""


async def _show_health(call: Call) -> Response:
    dashboard: Dashboard = call.request.app.state.dashboard
    return await dashboard.show_health(call)


async def _show_node_health(call: Call) -> Response:
    dashboard: Dashboard = call.request.app.state.dashboard
    return await dashboard.show_node_health(call)


ROUTES: dict[str, dict[str, Endpoint]] = {
    "/pools": {"GET": Endpoint(pools.show_pools, ANY_USER)},
    "/pools/default": {
        "GET": Endpoint(pools.show_pool, ANY_USER),
        "POST": Endpoint(bucket_management.change_pool, Action.SECURITY),
    },
    # The SDKs' own tests read the versions of the nodes here.
    "/pools/nodes": {"GET": Endpoint(pools.show_pool, ANY_USER)},
    "/poolsStreaming/default": {"GET": Endpoint(pools.stream_pool, ANY_USER)},
    "/pools/default/nodeServices": {"GET": Endpoint(pools.show_node_services, ANY_USER)},
    "/pools/default/buckets": {
        "GET": Endpoint(pools.show_buckets, ANY_USER),
        "POST": Endpoint(bucket_management.create_bucket, Action.SECURITY),
    },
    _BUCKET: {
        "GET": Endpoint(pools.show_bucket, Action.USE),
        "POST": Endpoint(bucket_management.update_bucket, Action.ADMIN),
        "PUT": Endpoint(bucket_management.update_bucket, Action.ADMIN),
        "DELETE": Endpoint(bucket_management.drop_bucket, Action.SECURITY),
    },
    f"{_BUCKET}/controller/doFlush": {"POST": Endpoint(bucket_management.flush_bucket, Action.ADMIN)},
    "/pools/default/bucketsStreaming/{bucket}": {"GET": Endpoint(pools.stream_bucket, Action.USE)},
    "/pools/default/b/{bucket}": {"GET": Endpoint(pools.show_config, Action.USE)},
    "/pools/default/bs/{bucket}": {"GET": Endpoint(pools.stream_config, Action.USE)},
    "/whoami": {"GET": Endpoint(users.who_am_i, ANY_USER)},
    "/controller/changePassword": {"POST": Endpoint(users.change_password, ANY_USER)},
    "/settings/rbac/roles": {"GET": Endpoint(users.show_roles, Action.SECURITY)},
    _USERS: {"GET": Endpoint(users.show_users, Action.SECURITY)},
    f"{_USERS}/{{domain}}": {"GET": Endpoint(users.show_users, Action.SECURITY)},
    f"{_USERS}/{{domain}}/{{name:path}}": {
        "GET": Endpoint(users.show_user, Action.SECURITY),
        "PUT": Endpoint(users.put_user, Action.SECURITY),
        "DELETE": Endpoint(users.remove_user, Action.SECURITY),
    },
    _GROUPS: {"GET": Endpoint(users.show_groups, Action.SECURITY)},
    f"{_GROUPS}/{{name:path}}": {
        "GET": Endpoint(users.show_group, Action.SECURITY),
        "PUT": Endpoint(users.put_group, Action.SECURITY),
        "DELETE": Endpoint(users.remove_group, Action.SECURITY),
    },
    f"{_BUCKET}/scopes": {
        "GET": Endpoint(buckets.show_manifest, Action.USE),
        "POST": Endpoint(buckets.create_scope, Action.ADMIN),
    },
    f"{_BUCKET}/scopes/@ensureManifest/{{uid}}": {
        "GET": Endpoint(buckets.ensure_manifest, Action.USE),
        "POST": Endpoint(buckets.ensure_manifest, Action.USE),
    },
    f"{_BUCKET}/scopes/{{scope}}": {"DELETE": Endpoint(buckets.drop_scope, Action.ADMIN)},
    f"{_BUCKET}/scopes/{{scope}}/collections": {"POST": Endpoint(buckets.create_collection, Action.ADMIN)},
    f"{_BUCKET}/scopes/{{scope}}/collections/{{collection}}": {
        "PATCH": Endpoint(buckets.update_collection, Action.ADMIN),
        "DELETE": Endpoint(buckets.drop_collection, Action.ADMIN),
    },
    "/headwater/health": {"GET": Endpoint(_show_node_health, ANY_USER)},
    "/headwater/node": {"POST": Endpoint(bucket_management.change_node, Action.SECURITY)},
    "/headwater/buckets": {"POST": Endpoint(bucket_management.create_bucket_here, Action.SECURITY)},
    _OWN_BUCKET: {"DELETE": Endpoint(bucket_management.drop_bucket_here, Action.SECURITY)},
    f"{_OWN_BUCKET}/flush": {"POST": Endpoint(bucket_management.flush_bucket_here, Action.ADMIN)},
    f"{_OWN_BUCKET}/health": {"GET": Endpoint(_show_health, Action.USE)},
    f"{_OWN_BUCKET}/dcp": {"GET": Endpoint(buckets.show_connections, Action.READ)},
    f"{_OWN_BUCKET}/vbuckets/{{vbucket}}/rollback": {"POST": Endpoint(buckets.roll_back, Action.ADMIN)},
    f"{_OWN_BUCKET}/connections/cut": {"POST": Endpoint(buckets.cut_connections, Action.ADMIN)},
    f"{_OWN_BUCKET}/replicas/hold": {"POST": Endpoint(buckets.hold_replicas, Action.ADMIN)},
    f"{_OWN_BUCKET}/replicas/release": {"POST": Endpoint(buckets.release_replicas, Action.ADMIN)},
}
"""The routes for programs, which use HTTP's basic authentication. The page's routes are in `_page_routes`."""

_PERMISSIONS = {
    Action.USE: "cluster.bucket[{bucket}].settings!read",
    Action.READ: "cluster.bucket[{bucket}].stats!read",
    Action.ADMIN: "cluster.collection[{bucket}:.:.].collections!write",
    Action.SECURITY: "cluster.admin.security.admin!write",
}

PAGE = "/ui"


def http_app(node: NodeState) -> Starlette:
    """The HTTP application of a node.

    Close `app.state.streams` and `app.state.dashboard` before the server waits for requests to end.
    """
    logins, streams = Logins(node), ConfigStreams(node)
    sessions = Sessions(node, logins, path=PAGE)
    dashboard = Dashboard(node, logins, sessions)

    def route(path: str, endpoints: dict[str, Endpoint]) -> Route:
        async def handle(request: Request) -> Response:
            # Starlette accepts HEAD wherever it accepts GET.
            endpoint = endpoints["GET" if request.method == "HEAD" else request.method]
            _check_origin(request)
            user = await logins.user_of(request)
            call = Call(node=node, streams=streams, request=request, user=user, needs=endpoint.needs)
            _check_right(call)
            return await endpoint.handle(call)

        return Route(path, handle, methods=list(endpoints))

    def with_session(handle: Handler) -> PageHandler:
        """Restrict a handler to users who have logged in on the page and may see the bucket of the path."""

        async def checked(request: Request) -> Response:
            user, bucket = sessions.user_of(request), request.path_params["bucket"]
            if user is None:
                raise Refusal.message(401, "Log in first")
            if not may_see(node, user, bucket) or node.bucket(bucket) is None:
                raise Refusal.message(403, f"You may not see a bucket {bucket!r}")
            return await handle(Call(node=node, streams=streams, request=request, user=user))

        return checked

    app = Starlette(
        routes=[
            *_open_routes(node),
            *(route(path, endpoints) for path, endpoints in ROUTES.items()),
            *_page_routes(dashboard, sessions, with_session),
        ],
        middleware=[
            Middleware(HeadLimit),
            Middleware(
                HostCheck,
                what="node",
                hosts=node.options.own_names,
                hint="see --http-host",
                is_tls_only=not node.options.serves_plain,
                health=(*_HEALTH, *_READINESS),
                watched=(_METRICS,),
            ),
            Middleware(_WhenReady, node=node),
        ],
        exception_handlers={
            Refusal: _refuse,
            HTTPException: _refuse_route,
            LocalProtocolError: _refuse_change,
            StoreError: _refuse_for_now,
            Exception: _report_failure,
        },
    )
    app.state.streams = streams
    app.state.dashboard = dashboard
    return app


def _open_routes(node: NodeState) -> list[Route]:
    """The routes that need no log-in, and show nothing that would be worth one."""

    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{PAGE}/", status_code=303)
        # gocbcore checks with this request that the node is alive.
        return Json({"name": "headwater", "uri": "/pools"})

    async def health(request: Request) -> Response:
        return Json({"status": "ok"})

    async def ready(request: Request) -> Response:
        if not node.is_ready:
            return _not_ready(node)
        # A restart would not repair damaged vbuckets, so the node is ready all the same.
        buckets = [node.bucket(name) for name in list(node.bucket_names())]
        damaged = sum(len(bucket.vbuckets.damage) for bucket in buckets if bucket is not None)
        return Json({"status": "ready"} | ({"damaged_vbuckets": damaged} if damaged else {}))

    return [
        Route("/", root),
        *(Route(path, health) for path in _HEALTH),
        *(Route(path, ready) for path in _READINESS),
    ]


def _page_routes(
    dashboard: Dashboard, sessions: Sessions, with_session: Callable[[Handler], PageHandler]
) -> list[Route]:
    """The dashboard's page, what its script reads, and the metrics."""
    browser = dashboard.browser
    of_bucket: dict[str, Handler] = {
        "live": dashboard.stream_live,
        "health": dashboard.show_health,
        "changes": browser.show_changes,
        "documents": browser.show_documents,
        "document": browser.show_document,
        "versions": browser.show_versions,
        "vbuckets/{vbucket}": browser.show_vbucket,
        "branches": browser.show_branches,
        "collections": browser.show_collections,
        "events/{number}": browser.show_event,
        "streams": browser.show_streams,
    }
    handlers: dict[str, PageHandler] = {
        PAGE: dashboard.files.show_page,
        f"{PAGE}/": dashboard.files.show_page,
        f"{PAGE}/assets/{{name}}": dashboard.files.show_file,
        f"{PAGE}/api/session": sessions.show,
        **{f"{PAGE}/api/buckets/{{bucket}}/{path}": with_session(handle) for path, handle in of_bucket.items()},
        _METRICS: dashboard.show_metrics,
    }
    changes = {f"{PAGE}/api/login": sessions.log_in, f"{PAGE}/api/logout": sessions.log_out}
    return [
        *(Route(path, with_page_headers(handle)) for path, handle in handlers.items()),
        *(Route(path, with_page_headers(handle), methods=["POST"]) for path, handle in changes.items()),
    ]


# --- before the handler -------------------------------------------------------------------------------------------


class _WhenReady:
    """Answers 503 while the node is not ready: its buckets and users are not open yet, or not any more."""

    def __init__(self, app: ASGIApp, node: NodeState) -> None:
        self._app = app
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_served = scope["type"] != "http" or self._node.is_ready or scope["path"] in (*_HEALTH, *_READINESS)
        await (self._app if is_served else _not_ready(self._node))(scope, receive, send)


def _not_ready(node: NodeState) -> Response:
    content = {"status": "not ready", "message": f"The node is not ready: {node.why_not_ready}"}
    return Json(content, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})


def _check_origin(request: Request) -> None:
    """Refuse changes by a page of another site, which would use the log-in that a browser remembers."""
    origin = request.headers.get("origin")
    if origin is None or request.method in ("GET", "HEAD"):
        return
    if origin.partition("://")[2] != request.headers.get("host"):
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
        permissions = [_PERMISSIONS[needs].format(bucket=bucket)]
        raise Refusal(403, {"message": "Forbidden. User needs the following permissions", "permissions": permissions})
    if bucket is not None and call.node.bucket(bucket) is None:
        is_of_bucket_itself = "/scopes" not in call.request.scope["route"].path
        # The SDKs' bucket managers look for these words, and their collection managers for the others.
        raise Refusal(404, "Requested resource not found.") if is_of_bucket_itself else Refusal.no_bucket(bucket)


# --- errors that handlers raise -----------------------------------------------------------------------------------


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
    """The manifest or the users do not allow the change, for example one collection too many."""
    return Refusal.errors(400, str(error)).response()


async def _refuse_for_now(request: Request, error: Exception) -> Response:
    return Refusal.errors(503, str(error)).response()


async def _report_failure(request: Request, error: Exception) -> Response:
    """The server also gets the error, and logs it."""
    return Json({"message": "The node has met an error of its own: its log has more"}, 500)


# --- the server ----------------------------------------------------------------------------------------------------


class HttpServer(AppServer):
    """The HTTP side of a node, on any number of sockets.

    server = HttpServer(node)
    await server.listen(plain_socket)
    await server.listen(tls_socket, tls=context)
    …  # the node gets ready; requests are answered with 503 until it is
    server.dashboard.start()
    …
    await server.stop()
    """

    def __init__(self, node: NodeState) -> None:
        app = http_app(node)
        super().__init__(app, connections_max=node.options.limits.http_connections_max)
        self.streams: ConfigStreams = app.state.streams
        self.dashboard: Dashboard = app.state.dashboard

    async def stop(self) -> None:
        """End the streams, let requests in progress finish, and close the sockets."""
        self.streams.close()
        self.dashboard.close()
        await super().stop()

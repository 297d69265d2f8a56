"""The management side of a node, Couchbase's or Headwater's: where it is, and requests to it over HTTP.

`buckets`, `collections`, `users`, `drill` and `load` use it, and the test nodes of `headwater.testing`. Passwords go
into the header of a request and nowhere else.
"""

from __future__ import annotations

import base64
import functools
import http
import http.client
import json
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import rich_click as click

from headwater.cli.options import LoginOptions, connection_options, json_option
from headwater.client.connection_string import Address, BootstrapBy, ConnectionString, find_hosts, parse_address
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import ConnectionFailed, HeadwaterError, InvalidConnectionString, MalformedJson, TlsFailed
from headwater.protocol.cluster_config import PORT_MAX, ClusterConfig, ConfigNode, malformed_config
from headwater.protocol.sasl import Credentials

HTTP_PORT = 8091
HTTP_TLS_PORT = 18091

CONNECT_S = 10.0
ANSWER_S = 40.0
"""Above what a node may take to answer, which is 30 s where it waits for others."""

ANSWER_BYTES_MAX = 16 * 1024 * 1024
NAME_BYTES_MAX = 4096
_MESSAGE_CHARS_MAX = 300
_AS_THEY_ARE = "surrogateescape"
_SCHEMES = {"http": False, "https": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementUrl:
    """A URL, read: a connection string, or the HTTP address itself."""

    addresses: tuple[Address, ...]
    tls: bool
    is_http: bool
    """The port is the management port. Otherwise it is a key-value port, to be asked for that one."""
    bucket: str
    """Empty where there is none, and none is needed."""
    user: str | None = None
    listed: ConnectionString | None = None
    """The connection string itself, where DNS may list other hosts for it."""

    @classmethod
    def parse(cls, text: str, *, needs_bucket: bool = True) -> ManagementUrl:
        url = cls._parse_http(text) if text.partition("://")[0].lower() in _SCHEMES else cls._parse_string(text)
        if not url.bucket and needs_bucket:
            raise InvalidConnectionString(
                "the URL names no bucket", hint="Write couchbase://host/bucket, or http://host:8091/bucket"
            )
        return url

    @classmethod
    def _parse_string(cls, text: str) -> ManagementUrl:
        string = ConnectionString.parse(text)
        by = string.bootstrap_by(string.addresses[0])
        addresses = tuple(address for address in string.addresses if string.bootstrap_by(address) is by)
        return cls(
            addresses=addresses,
            tls=string.tls,
            is_http=by is BootstrapBy.HTTP,
            bucket=string.bucket or "",
            user=string.user,
            listed=None if string.srv_name is None else string,
        )

    @classmethod
    def _parse_http(cls, text: str) -> ManagementUrl:
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise InvalidConnectionString(f"the URL is not valid: {error}") from error
        user, _, host = parts.netloc.rpartition("@")
        if ":" in user:
            # The URL itself is not repeated: it has a password in it.
            raise InvalidConnectionString(
                "the URL has a password in it, which others could read",
                hint="Give the password by --password or HEADWATER_PASSWORD",
            )
        tls = _SCHEMES[parts.scheme]
        bucket = unquote(parts.path).strip("/")
        if "/" in bucket:
            raise InvalidConnectionString(
                "the URL has more than a bucket behind the host", hint="Write http://host:8091/bucket"
            )
        address = parse_address(host, default_port=HTTP_TLS_PORT if tls else HTTP_PORT)
        return cls(addresses=(address,), tls=tls, is_http=True, bucket=bucket, user=unquote(user) or None)


# --- where it is --------------------------------------------------------------------------------------------------


def find_management(
    url: ManagementUrl, *, credentials: Credentials, tls: ssl.SSLContext | None, http_port: int | None = None
) -> Address:
    """The management port of the first node that answers. A key-value port is asked for it, as every SDK does."""
    addresses = url.addresses if url.listed is None else find_hosts(url.listed)
    first = addresses[0]
    if http_port is not None:
        return Address(first.host, http_port)
    if url.is_http:
        return first
    login = Login(credentials=credentials, bucket=None, tls=tls)
    failure: ConnectionFailed | None = None
    for address in addresses:
        try:
            with KvConnection.open(address, login) as connection:
                config = connection.outcome.cluster_config
        except ConnectionFailed as error:
            failure = failure or error
        else:
            return Address(address.host, _management_port(config, tls=url.tls))
    assert failure is not None
    raise failure


def _management_port(config: bytes | None, *, tls: bool) -> int:
    failure: MalformedJson | None = None
    try:
        node = ClusterConfig.decode(config or b"").this_node
        port = None if node is None else node.http_port(tls=tls)
    except MalformedJson as error:
        port, failure = None, error
    if port is None:
        raise HeadwaterError(
            f"the config of the node has no management port{' with TLS' if tls else ''}",
            hint="Give it with --http-port",
        ) from failure
    return port


def _failed(address: Address, error: OSError) -> ConnectionFailed:
    if isinstance(error, ssl.SSLError):
        return TlsFailed(
            f"no TLS with {address}: {error.reason or error}",
            hint="Trust its certificate with --tls-ca, or check that the port has TLS",
        )
    return ConnectionFailed(
        f"{address} can't be reached: {error.strerror or error}",
        hint="Check that the node runs; --http-port names its management port",
    )


# --- requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and the JSON that came with it; what is not JSON is kept as text."""

    status: int
    content: Any

    def accepted(self) -> Any:
        """The content of a success; of anything else the error for it."""
        if self.status in (http.HTTPStatus.OK, http.HTTPStatus.ACCEPTED):
            return self.content
        reason, hint = _REFUSALS.get(self.status, (f"the node answered with status {self.status}", ""))
        raise HeadwaterError(self._words() or reason, hint=hint)

    def _words(self) -> str:
        """What the node itself says, in one line."""
        members = self.content if isinstance(self.content, dict) else {}
        errors = members.get("errors", members.get("message", ""))
        if isinstance(errors, dict):
            errors = [text if name == "_" else f"{name}: {text}" for name, text in errors.items()]
        words = "; ".join(str(text) for text in (errors if isinstance(errors, list) else [errors]))
        return " ".join(words.split()).rstrip(".")[:_MESSAGE_CHARS_MAX]


_REFUSALS: dict[int, tuple[str, str]] = {
    http.HTTPStatus.UNAUTHORIZED: ("the user name or the password is wrong", "Check --user and --password"),
    http.HTTPStatus.FORBIDDEN: ("the user may not do this", "Give the user the role admin on the bucket"),
    http.HTTPStatus.NOT_FOUND: ("there is no such bucket", "Check the names: upper and lower case differ"),
    http.HTTPStatus.GATEWAY_TIMEOUT: (
        "the nodes take long",
        "Look again in a minute with `headwater collections list`",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """The management side of a node."""

    address: Address
    credentials: Credentials = field(repr=False)
    tls: ssl.SSLContext | None = None

    def ask(self, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        # Bytes of the command line that are not UTF-8 are sent as they are, for the node to refuse.
        target = "/" + "/".join(quote(part, safe="@", errors=_AS_THEY_ARE) for part in path)
        login = f"{self.credentials.user}:{self.credentials.password}".encode(errors=_AS_THEY_ARE)
        headers = {"Authorization": f"Basic {base64.b64encode(login).decode()}", "Accept": "application/json"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        body = None if form is None else urlencode(form, errors=_AS_THEY_ARE)
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX + 1)
        except http.client.HTTPException as error:
            raise HeadwaterError(
                f"{self.address} does not speak HTTP", hint="Give the management port with --http-port"
            ) from error
        except OSError as error:
            raise _failed(self.address, error) from error
        finally:
            connection.close()
        return Answer(response.status, self._decode(answer))

    def name(self) -> object:
        """What the node calls itself at its root. It is asked without a log-in, so that no password is sent in clear
        for it: `land` may have logged in with SCRAM."""
        connection = self._connection()
        try:
            connection.request("GET", "/", headers={"Accept": "application/json"})
            content = self._decode(connection.getresponse().read(NAME_BYTES_MAX))
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return content.get("name") if isinstance(content, dict) else None

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.address.host, self.address.port
        if self.tls is None:
            return http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=self.tls)

    def _decode(self, body: bytes) -> Any:
        if len(body) > ANSWER_BYTES_MAX:
            raise HeadwaterError(f"the answer of {self.address} has more than {ANSWER_BYTES_MAX} bytes")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return body.decode(errors="replace")


def find_node_page(url: str, credentials: Credentials | None, tls: ssl.SSLContext | None) -> str | None:
    """The dashboard of the node of a URL; None where that is no node of ours, or can't be found out."""
    if credentials is None:
        return None
    try:
        where = ManagementUrl.parse(url, needs_bucket=False)
        address = find_management(where, credentials=credentials, tls=tls)
    except (HeadwaterError, OSError):
        return None
    is_ours = Management(address=address, credentials=credentials, tls=tls).name() == "headwater"
    return f"{'http' if tls is None else 'https'}://{address}/ui/" if is_ours else None


# --- the options of a command -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The values of `management_options`."""

    login: LoginOptions
    http_port: int | None = None

    def open(self, where: ManagementUrl) -> Management:
        """The management side of the node of a URL. The node is looked for, and who logs in may be asked."""
        credentials = self.login.needed_credentials(where)
        tls = self.login.tls_context(where)
        address = find_management(where, credentials=credentials, tls=tls, http_port=self.http_port)
        return Management(address=address, credentials=credentials, tls=tls)


def management_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command its `access`, by the options of all commands and `--http-port`; and `--json`, for its answer."""

    @connection_options
    @click.option(
        "--http-port",
        type=click.IntRange(1, PORT_MAX),
        metavar="PORT",
        help="The management port. The node is asked for it by default.",
    )
    @json_option
    @functools.wraps(command)
    def wrapped(login: LoginOptions, http_port: int | None, **rest: Any) -> None:
        command(access=Access(login=login, http_port=http_port), **rest)

    return wrapped


# --- scopes and collections ---------------------------------------------------------------------------------------


_WAIT_MS = 30_000
_CAN_T_WAIT = frozenset({http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED})
"""What servers say that have no way to wait for a manifest, or not for this user."""
_HINT = "Check that it is a Couchbase or Headwater node"


def scopes_of(url: str, access: Access) -> BucketScopes:
    """Of the bucket of a URL."""
    where = ManagementUrl.parse(url)
    return BucketScopes(where.bucket, lambda: access.open(where))


class BucketScopes:
    """Asked and changed over HTTP. The node is looked for when it is needed first."""

    def __init__(self, name: str, find: Callable[[], Management]) -> None:
        self._name = name
        self._find = functools.cache(find)

    def ask(self, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        return self._find().ask(method, "pools", "default", "buckets", self._name, "scopes", *path, form=form)

    def wait_for(self, changed: Answer) -> str:
        """The uid of the manifest that a change has made, once every node has it."""
        content = changed.accepted()
        uid = content.get("uid") if isinstance(content, dict) else None
        if not isinstance(uid, str):
            raise HeadwaterError("the answer has no manifest uid", hint=_HINT)
        waited = self.ask("POST", "@ensureManifest", uid, form={"timeout": str(_WAIT_MS)})
        if waited.status not in _CAN_T_WAIT:
            waited.accepted()
        return uid

    def create(self, scope: str, collection: str | None = None, **settings: str) -> str:
        """Create a scope, or a collection in it. Gives the uid of the manifest, once every node has it."""
        if collection is None:
            return self.wait_for(self.ask("POST", form={"name": scope}))
        return self.wait_for(self.ask("POST", scope, "collections", form={"name": collection, **settings}))

    def update(self, scope: str, collection: str, **settings: str) -> str:
        return self.wait_for(self.ask("PATCH", scope, "collections", collection, form=settings))

    def create_missing(self, names: Iterable[str]) -> None:
        """Have all of these collections, each of them `scope.collection`."""
        there = self._names()
        for name in names:
            scope, _, collection = name.partition(".")
            if scope not in there:
                self.create(scope)
                there[scope] = set()
            if collection not in there[scope]:
                self.create(scope, collection)
                there[scope].add(collection)

    def _names(self) -> dict[str, set[str]]:
        manifest = self.ask("GET").accepted()
        try:
            return {
                scope["name"]: {collection["name"] for collection in scope["collections"]}
                for scope in manifest["scopes"]
            }
        except (LookupError, TypeError) as error:
            raise HeadwaterError("the answer is no list of collections", hint=_HINT) from error


# --- all nodes of a cluster ---------------------------------------------------------------------------------------


def nodes_of_cluster(first: Management, *, bucket: str = "") -> list[Management]:
    """A node, and the others of the cluster that it is in, or that this bucket of it is in.

    Of a Couchbase cluster it is the one node alone: there, what is done on one is done on all of them.
    """
    pools = first.ask("GET", "pools").accepted()
    if not isinstance(pools, dict) or "headwater" not in str(pools.get("implementationVersion", "")):
        return [first]
    path = ("b", bucket) if bucket else ("nodeServices",)
    answer = first.ask("GET", "pools", "default", *path).accepted()
    try:
        members = ClusterConfig.of(answer).nodes
        if not any(member.is_this_node for member in members):
            # It was left out of the cluster whose config it gives, or has never been in one.
            return [first]
        others = [_address(member, first) for member in members if not member.is_this_node]
    except MalformedJson as error:
        raise HeadwaterError(
            "the config of the node lacks addresses of its cluster", hint="Give --this-node-only, and each node's URL"
        ) from error
    return [first, *(replace(first, address=address) for address in others)]


def _address(node: ConfigNode, first: Management) -> Address:
    port = node.http_port(tls=first.tls is not None)
    if port is None:
        raise malformed_config("a node has no management port")
    return Address(node.host or first.address.host, port)

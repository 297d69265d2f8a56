"""The management side of a Couchbase or Headwater node: how to find it, and HTTP requests to it.

`buckets`, `collections`, `users`, `drill`, `load` and the test nodes of `headwater.testing` use it. Passwords are
sent only in the header of a request.
"""

from __future__ import annotations

import functools
import http
import http.client
import json
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from headwater.cli.options import LoginOptions, connection_options, errors_reported, json_option
from headwater.cli.output import click
from headwater.client.connection_string import Address, BootstrapBy, ConnectionString, find_hosts, parse_address
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import ConnectionFailed, HeadwaterError, InvalidConnectionString, MalformedJson, TlsFailed
from headwater.http import ANSWER_S, AS_THEY_ARE, ask
from headwater.phrases import printable
from headwater.protocol.cluster_config import PORT_MAX, ClusterConfig, ConfigNode, malformed_config
from headwater.protocol.sasl import Credentials

HTTP_PORT = 8091
HTTP_TLS_PORT = 18091

_MESSAGE_CHARS_MAX = 300
_SCHEMES = {"http": False, "https": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementUrl:
    """A parsed URL: a connection string, or the HTTP address itself."""

    addresses: tuple[Address, ...]
    tls: bool
    is_http: bool
    """True if the port is the management port. Otherwise it is a key-value port, whose server reports that port."""
    bucket: str
    """Empty if the URL names none and none is needed."""
    user: str | None = None
    listed: ConnectionString | None = None
    """The connection string itself, if DNS may list other hosts for it."""

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
            # The message omits the URL, which contains a password.
            raise InvalidConnectionString(
                "the URL contains a password, which others could read",
                hint="Give the password with --password or HEADWATER_PASSWORD",
            )
        tls = _SCHEMES[parts.scheme]
        bucket = unquote(parts.path).strip("/")
        if "/" in bucket:
            raise InvalidConnectionString(
                "the URL has more than a bucket after the host", hint="Write http://host:8091/bucket"
            )
        address = parse_address(host, default_port=HTTP_TLS_PORT if tls else HTTP_PORT)
        return cls(addresses=(address,), tls=tls, is_http=True, bucket=bucket, user=unquote(user) or None)


# --- finding the management port ----------------------------------------------------------------------------------


def find_management(
    url: ManagementUrl, *, credentials: Credentials, tls: ssl.SSLContext | None, http_port: int | None = None
) -> Address:
    """Return the management port of the first node that answers, asking it on its key-value port as SDKs do."""
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
            continue
        with suppress(MalformedJson):
            node = ClusterConfig.decode(config or b"").this_node
            if node is not None and (port := node.http_port(tls=url.tls)) is not None:
                return Address(address.host, port)
        raise HeadwaterError(
            f"the config of the node has no management port{' with TLS' if url.tls else ''}",
            hint="Give it with --http-port",
        )
    assert failure is not None
    raise failure


# --- requests -----------------------------------------------------------------------------------------------------


def no_list(of: str) -> HeadwaterError:
    return HeadwaterError(f"the answer is not a list of {of}", hint="Check that it is a Couchbase or Headwater node")


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and the JSON content of the response, or its text if it is not JSON."""

    status: int
    content: Any

    def accepted(self) -> Any:
        """Return the content of a success. Raises `HeadwaterError` for any other status."""
        if self.status in (http.HTTPStatus.OK, http.HTTPStatus.ACCEPTED):
            return self.content
        reason, hint = _REFUSALS.get(self.status, (f"the node answered with status {self.status}", ""))
        raise HeadwaterError(self._words() or reason, hint=hint)

    def _words(self) -> str:
        """Return the node's own message, on one line."""
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
    credentials: Credentials | None = field(repr=False)
    tls: ssl.SSLContext | None = None
    answer_s: float = ANSWER_S
    """How long the node may take to answer."""
    token: str | None = field(default=None, repr=False)
    """The token for the page of a landing, which has no users."""

    def ask(self, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        target = "/" + "/".join(quote(part, safe="@", errors=AS_THEY_ARE) for part in path)
        headers, login = {"Accept": "application/json"}, None
        if self.credentials is not None:
            login = self.credentials.user, self.credentials.password
        elif self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        to: Any = {"headers": headers, "login": login, "form": form, "tls": self.tls, "answer_s": self.answer_s}
        try:
            return Answer(*ask(self.address.host, self.address.port, method, target, **to))
        except http.client.HTTPException as error:
            raise HeadwaterError(
                f"{self.address} does not speak HTTP", hint="Give the management port with --http-port"
            ) from error
        except ssl.SSLError as error:
            raise TlsFailed(
                f"no TLS with {self.address}: {error.reason or error}",
                hint="Trust its certificate with --tls-ca, or check that the port uses TLS",
            ) from error
        except OSError as error:
            raise ConnectionFailed(
                f"{self.address} can't be reached: {error.strerror or error}",
                hint="Check that the node is running; --http-port sets its management port",
            ) from error


def find_node_page(url: str, credentials: Credentials | None, tls: ssl.SSLContext | None) -> str | None:
    """Return the dashboard of the URL's node, or None if it is not a Headwater node or can't be reached."""
    if credentials is None:
        return None
    try:
        where = ManagementUrl.parse(url, needs_bucket=False)
        address = find_management(where, credentials=credentials, tls=tls)
        # Without a login, so that no password is sent unencrypted: `land` may have logged in with SCRAM.
        root = Management(address=address, credentials=None, tls=tls).ask("GET").content
    except (HeadwaterError, OSError):
        return None
    is_ours = isinstance(root, dict) and root.get("name") == "headwater"
    return f"{'http' if tls is None else 'https'}://{address}/ui/" if is_ours else None


# --- the node of a command ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ManagedNode:
    """The node of a URL, for one command. The first request finds the node, and asks for the password if necessary."""

    where: ManagementUrl
    login: LoginOptions
    http_port: int | None = None
    as_json: bool = False

    @functools.cached_property
    def management(self) -> Management:
        credentials = self.login.needed_credentials(self.where)
        tls = self.login.tls_context(self.where)
        address = find_management(self.where, credentials=credentials, tls=tls, http_port=self.http_port)
        return Management(address=address, credentials=credentials, tls=tls)

    def ask(self, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        return self.management.ask(method, *path, form=form)

    def print(self, sentence: str, members: dict[str, Any]) -> None:
        """Print what was done: a sentence, or these members as one line of JSON."""
        click.echo(json.dumps(members) if self.as_json else printable(sentence))


http_port_option = click.option(
    "--http-port",
    type=click.IntRange(1, PORT_MAX),
    metavar="PORT",
    help="The management port. By default, the command asks the node for it.",
)


def managed(*, needs_bucket: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the node that its URL names, and the connection options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.argument("url", metavar="URL")
        @connection_options
        @http_port_option
        @json_option
        @errors_reported
        @functools.wraps(command)
        def wrapped(url: str, login: LoginOptions, http_port: int | None, as_json: bool, **rest: Any) -> None:
            where = ManagementUrl.parse(url, needs_bucket=needs_bucket)
            command(ManagedNode(where=where, login=login, http_port=http_port, as_json=as_json), **rest)

        return wrapped

    return decorate


# --- scopes and collections ---------------------------------------------------------------------------------------


_WAIT_MS = 30_000
_CAN_T_WAIT = frozenset({http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED})
"""The answers of servers that can't wait for a manifest, or not for this user."""


class BucketScopes:
    """The scopes and collections of the bucket that a URL names, read and changed over HTTP."""

    def __init__(self, node: ManagedNode) -> None:
        self._node = node

    def ask(self, method: str, *path: str, form: dict[str, str] | None = None) -> Answer:
        bucket = ("pools", "default", "buckets", self._node.where.bucket)
        return self._node.ask(method, *bucket, "scopes", *path, form=form)

    def wait_for(self, changed: Answer) -> str:
        """Wait until every node has the manifest that a change has created. Returns the manifest's uid."""
        content = changed.accepted()
        uid = content.get("uid") if isinstance(content, dict) else None
        if not isinstance(uid, str):
            raise HeadwaterError(
                "the answer has no manifest uid", hint="Check that it is a Couchbase or Headwater node"
            )
        waited = self.ask("POST", "@ensureManifest", uid, form={"timeout": str(_WAIT_MS)})
        if waited.status not in _CAN_T_WAIT:
            waited.accepted()
        return uid

    def create(self, scope: str, collection: str | None = None, **settings: str) -> str:
        """Create a scope, or a collection in it. Returns the uid of the manifest once every node has it."""
        if collection is None:
            return self.wait_for(self.ask("POST", form={"name": scope}))
        return self.wait_for(self.ask("POST", scope, "collections", form={"name": collection, **settings}))

    def update(self, scope: str, collection: str, **settings: str) -> str:
        return self.wait_for(self.ask("PATCH", scope, "collections", collection, form=settings))

    def create_missing(self, names: Iterable[str]) -> None:
        """Create those of these collections that do not exist. Each is a `scope.collection`."""
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
            raise no_list("collections") from error


# --- all nodes of a cluster ---------------------------------------------------------------------------------------


def nodes_of_cluster(first: Management, *, bucket: str = "") -> list[Management]:
    """Return a node and the other nodes of its cluster, or of the cluster of one of its buckets.

    For a Couchbase cluster, return the one node alone: there, a change on one node applies to all.
    """
    pools = first.ask("GET", "pools").accepted()
    if not isinstance(pools, dict) or "headwater" not in str(pools.get("implementationVersion", "")):
        return [first]
    path = ("b", bucket) if bucket else ("nodeServices",)
    answer = first.ask("GET", "pools", "default", *path).accepted()
    try:
        members = ClusterConfig.of(answer).nodes
        if not any(member.is_this_node for member in members):
            # The node has left the cluster whose config it returns, or has never been in one.
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

"""Finds a bucket: the first host that answers, the cluster map that it returns, and the bucket's collections.

The asyncio client, Spark's planners and the loader start here; `blocking_bucket` is the same for callers without an
event loop. The map is read over the key-value protocol, or over HTTP if only the cluster manager's port is known. This
module must use nothing but the running event loop, which may be simulated, and a thread for DNS.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import BinaryIO, TypeVar, cast
from urllib.parse import quote

import h11

from headwater import errors
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address, BootstrapBy, ConnectionString, find_hosts
from headwater.client.kv_asyncio import AsyncKvConnection, open_transport, raise_if_tls
from headwater.client.kv_connection import Login, broken, is_loopback
from headwater.client.pieces import OpenSpool
from headwater.client.retries import HostFailures
from headwater.client.settings import ClientSettings
from headwater.client.threads import in_daemon_thread
from headwater.protocol.exchange import ANSWER_BYTES_MAX
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionIdResponse, GetCollectionsManifest
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.sasl import Credentials, Mechanism
from headwater.protocol.status import Status

T = TypeVar("T")

RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """The cluster map that the first usable host returned."""

    cluster_map: ClusterMap
    asked: Address
    """The host that returned the map."""
    by: BootstrapBy

    @property
    def bucket_uuid(self) -> str:
        """A bucket of the same name with another UUID is another bucket."""
        return self.cluster_map.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """What a client knows about a bucket before it reads it."""

    cluster_map: ClusterMap
    manifest: Manifest
    has_collections: bool


# --- hosts --------------------------------------------------------------------------------------------------------


async def hosts_of(where: ConnectionString) -> tuple[Address, ...]:
    """Return the hosts of the connection string, or those that DNS lists for it, in order."""
    if where.srv_name is None:
        return where.addresses
    return await in_daemon_thread(partial(find_hosts, where))


async def first_that_works(addresses: Iterable[Address], attempt: Callable[[Address], Awaitable[T]]) -> T:
    """Return the first result of `attempt` that succeeds, trying the hosts in order. If all fail: see
    `HostFailures`."""
    failures = HostFailures()
    for address in addresses:
        try:
            return await attempt(address)
        except errors.HeadwaterError as error:
            failures.add(address, error)
    raise failures.verdict()


async def bootstrap(settings: ClientSettings, *, random_bytes: RandomBytes = os.urandom) -> Bootstrap:
    """Ask one host after the other until one returns a usable cluster map."""
    login = replace(settings.login(), random_bytes=random_bytes)

    async def ask(address: Address) -> Bootstrap:
        by = settings.where.bootstrap_by(address)
        if by is BootstrapBy.HTTP:
            cluster_map = await fetch_map_over_http(address, settings)
        else:
            connection = await _open_first(address, login)
            connection.abort()
            cluster_map = settings.decode_map(connection.outcome.cluster_config, asked=address)
        return Bootstrap(cluster_map=cluster_map, asked=address, by=by)

    return await first_that_works(await hosts_of(settings.where), ask)


async def connect_any(settings: ClientSettings, *, random_bytes: RandomBytes = os.urandom) -> AsyncKvConnection:
    """Connect to the first usable host, or to a node that it names over HTTP."""
    login = replace(settings.login(), random_bytes=random_bytes)

    async def connect(address: Address) -> AsyncKvConnection:
        if settings.where.bootstrap_by(address) is BootstrapBy.KV:
            return await _open_first(address, login)
        nodes = (await fetch_map_over_http(address, settings)).nodes
        return await first_that_works(nodes, lambda node: AsyncKvConnection.open(node, login))

    return await first_that_works(await hosts_of(settings.where), connect)


async def _open_first(address: Address, login: Login) -> AsyncKvConnection:
    """Connect to a host that the user named, perhaps with the wrong port."""
    try:
        return await AsyncKvConnection.open(address, login)
    except errors.ConnectionClosed as error:
        if login.tls is None:
            await raise_if_tls(address, login.timeouts, error)
        raise


def map_of(connection: AsyncKvConnection, settings: ClientSettings) -> ClusterMap:
    """Decode the cluster map that a connection received during its handshake."""
    return settings.decode_map(connection.outcome.cluster_config, asked=connection.address)


# --- scopes and collections ---------------------------------------------------------------------------------------


async def look_at_bucket(settings: ClientSettings, *, random_bytes: RandomBytes = os.urandom) -> BucketView:
    """Read the bucket's map, scopes and collections, over its own connection to any host."""
    connection = await connect_any(settings, random_bytes=random_bytes)
    try:
        return await view_over(connection, map_of(connection, settings))
    finally:
        connection.close()


async def view_over(connection: AsyncKvConnection, cluster_map: ClusterMap) -> BucketView:
    """Read the bucket's current collections, and combine them with a known map."""
    has_collections = connection.outcome.negotiated.collections
    manifest = await read_manifest(connection) if has_collections else Manifest()
    return BucketView(cluster_map=cluster_map, manifest=manifest, has_collections=has_collections)


async def read_manifest(connection: AsyncKvConnection) -> Manifest:
    """Read the scopes and collections of a connection's bucket. Nodes also read those of other nodes with this."""
    try:
        answer = await connection.request(GetCollectionsManifest())
    except errors.StatusError as error:
        raise error.reworded(f"the collections can't be read: {error.reason}") from error
    assert isinstance(answer, PlainResponse)
    return Manifest.decode(answer.value)


async def find_collection(connection: AsyncKvConnection, name: str | None) -> CollectionId | None:
    """Return the id of a collection given as `scope.collection`, or of the default collection for None.

    Without collections on the connection: None, or `NotSupported` if a name is given.
    """
    if not connection.outcome.negotiated.collections:
        if name is None:
            return None
        raise errors.NotSupported(
            Status.NOT_SUPPORTED,
            f"{connection.address} has no collections",
            hint="Omit the collection, or use a server of version 7 or newer",
        )
    if name is None:
        return DEFAULT_COLLECTION
    if len(name.split(".")) != 2 or not all(name.split(".")):
        raise errors.InvalidInput(
            f"{name!r} is not a scope and a collection", hint="Write scope.collection, such as _default.users"
        )
    try:
        answer = await connection.request(GetCollectionId(value=name.encode()))
    except (errors.UnknownCollection, errors.UnknownScope) as error:
        what = "scope of collection" if isinstance(error, errors.UnknownScope) else "collection"
        raise type(error)(
            error.status, f"there is no {what} {name!r}", hint="Create it first, or check the name"
        ) from error
    except errors.StatusError as error:
        # Older servers use a general status for an unknown collection.
        raise errors.status_error(
            error.status, f"collection {name!r} can't be found: {Status(error.status).name}"
        ) from error
    assert isinstance(answer, GetCollectionIdResponse)
    return CollectionId(answer.id)


# --- the map over HTTP --------------------------------------------------------------------------------------------
#
# The terse config (`/pools/default/b/BUCKET`) is the same JSON as in the key-value protocol. Servers that lack it
# offer a stream of configs (`/pools/default/bs/BUCKET`), each ended by four newlines; the first is enough.
#
# HTTP's basic authentication shows the password to anyone who listens, as SASL PLAIN does, so the same rule applies:
# the client sends it only over TLS, to this machine, or if the caller selects PLAIN. A client certificate replaces it.
#
# Each exchange has one deadline and a size limit, whatever the server does.

_END_OF_CONFIG = b"\n\n\n\n"
_HTTP = b"HTTP/"
_TLS_ALERT = b"\x15\x03"
_PORT_HINT = "Check that the port is the cluster manager's (8091, or 18091 with TLS)"


async def fetch_map_over_http(address: Address, settings: ClientSettings) -> ClusterMap:
    """Fetch the newest cluster map from the cluster manager at `address`, or raise an error that says why not."""
    bucket = quote(settings.bucket, safe="")
    status, config = await _ask_over_http(address, settings, f"/pools/default/b/{bucket}")
    if status == HTTPStatus.NOT_FOUND:
        status, config = await _ask_over_http(address, settings, f"/pools/default/bs/{bucket}")
    if status != HTTPStatus.OK:
        raise _refused_over_http(address, settings, status)
    return settings.decode_map(config, asked=address)


HttpAnswer = tuple[int, bytes]
"""The status, and the config if the status is 200."""


async def _ask_over_http(address: Address, settings: ClientSettings, path: str) -> HttpAnswer:
    timeouts = settings.timeouts
    call = await open_transport(lambda: _HttpCall(address, settings, path), address, settings.tls_context(), timeouts)
    try:
        async with asyncio.timeout(timeouts.answer_s):
            return await call.answer
    except TimeoutError as error:
        raise broken(address, error, waited_s=timeouts.answer_s) from error
    except errors.ConnectionClosed as error:
        if settings.tls is None:
            await raise_if_tls(address, timeouts, error)
        raise
    finally:
        call.transport.abort()


class _HttpCall(asyncio.Protocol):
    """One request and its answer. h11 does the HTTP."""

    transport: asyncio.Transport

    def __init__(self, address: Address, settings: ClientSettings, path: str) -> None:
        self.answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._address = address
        self._settings = settings
        self._path = path
        self._http = h11.Connection(h11.CLIENT)
        self._first_bytes = b""
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        headers = [
            ("Host", str(self._address)),
            ("User-Agent", self._settings.agent),
            ("Accept", "application/json"),
            ("Connection", "close"),
        ]
        settings = self._settings
        try:
            if settings.credentials is not None:
                is_local = is_loopback(transport.get_extra_info("socket"))
                is_safe = settings.tls is not None or is_local or settings.mechanism is Mechanism.PLAIN
                headers.append(("Authorization", f"Basic {_basic(settings.credentials, is_safe=is_safe)}"))
        except errors.HeadwaterError as error:
            self._fail(error)
        else:
            request = h11.Request(method="GET", target=self._path, headers=headers)
            self.transport.write((self._http.send(request) or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    def data_received(self, data: bytes) -> None:
        if self.answer.done():
            return
        try:
            self._check_first_bytes(data)
            self._http.receive_data(data)
            self._take_events()
        except h11.RemoteProtocolError as error:
            self._fail(self._closed() if not data else self._not_http(), error)
        except errors.HeadwaterError as error:
            self._fail(error)

    def eof_received(self) -> None:
        self.data_received(b"")

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self.data_received(b"")
        else:
            self._fail(broken(self._address, error) if isinstance(error, OSError) else error)

    def _check_first_bytes(self, data: bytes) -> None:
        """Detect other protocols early: they send no line end, and h11 would wait for one."""
        self._first_bytes = (self._first_bytes + data)[: len(_HTTP)]
        if self._first_bytes.startswith(_TLS_ALERT):
            raise errors.TlsFailed(
                f"{self._address} uses TLS, and this connection does not",
                hint="Write couchbases://, or use the port without TLS (8091)",
            )
        if not _HTTP.startswith(self._first_bytes):
            raise self._not_http()

    def _take_events(self) -> None:
        while not self.answer.done():
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                self._take_body(event.data)
            elif isinstance(event, h11.Response) and event.status_code != HTTPStatus.OK:
                self.answer.set_result((event.status_code, b""))
            elif isinstance(event, h11.EndOfMessage):
                self.answer.set_result((HTTPStatus.OK, bytes(self._body)))
            elif event is h11.NEED_DATA:
                return

    def _take_body(self, data: bytes) -> None:
        searched = max(0, len(self._body) - len(_END_OF_CONFIG))
        self._body += data
        # A stream of configs does not end, and only its first config matters.
        if (end := self._body.find(_END_OF_CONFIG, searched)) >= 0:
            self.answer.set_result((HTTPStatus.OK, bytes(self._body[:end])))
        elif len(self._body) > ANSWER_BYTES_MAX:
            raise errors.RemoteProtocolError(
                f"the answer of {self._address} has more than {ANSWER_BYTES_MAX} bytes",
                offset=ANSWER_BYTES_MAX,
                hint=_PORT_HINT,
            )

    def _closed(self) -> errors.ConnectionClosed:
        return errors.ConnectionClosed(f"{self._address} closed the connection before it had answered", hint=_PORT_HINT)

    def _not_http(self) -> errors.WrongProtocol:
        return errors.WrongProtocol(f"{self._address} does not speak HTTP", hint=_PORT_HINT)

    def _fail(self, error: Exception, cause: Exception | None = None) -> None:
        if not self.answer.done():
            error.__cause__ = cause
            self.answer.set_exception(error)
            # The caller may have been cancelled; asyncio does not log an exception that was retrieved.
            self.answer.exception()


def _basic(credentials: Credentials, *, is_safe: bool) -> str:
    if not is_safe:
        raise errors.AuthenticationFailed(
            Status.AUTH_ERROR,
            "the password would be sent in clear text",
            hint="Use couchbases:// with port 18091, omit the port, or select the mechanism PLAIN to allow it",
        )
    if ":" in credentials.user:
        raise errors.AuthenticationFailed(
            Status.AUTH_ERROR, "a user with a colon in the name can't log in over HTTP", hint="Omit the port"
        )
    return base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()


def _refused_over_http(address: Address, settings: ClientSettings, status: int) -> errors.HeadwaterError:
    if status == HTTPStatus.UNAUTHORIZED:
        if settings.credentials is None:
            return errors.AuthenticationFailed(
                Status.AUTH_ERROR,
                f"{address} requires a log-in",
                hint="Give a user and a password, or a client certificate that the server maps to a user",
            )
        return errors.AuthenticationFailed(
            Status.AUTH_ERROR, f"{address} refused the log-in: the user or the password is wrong"
        )
    if status == HTTPStatus.FORBIDDEN:
        return errors.AccessDenied(
            Status.EACCESS,
            f"{address}: the user may not use bucket {settings.bucket!r}",
            hint="Check the bucket's name, and give the user a role on it",
        )
    if status == HTTPStatus.NOT_FOUND:
        kind = errors.BucketNotReady if settings.bucket_was_seen else errors.UnknownBucket
        return kind(Status.KEY_ENOENT, f"{address}: there is no bucket {settings.bucket!r}")
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return errors.TemporaryFailure(Status.ETMPFAIL, f"{address} is too busy: HTTP status {status}")
    return errors.RemoteProtocolError(
        f"{address} does not return the cluster map: HTTP status {status}",
        hint=f"{_PORT_HINT}, and TLS on both ends or on neither",
    )


# --- what a client needs from its machine -------------------------------------------------------------------------


def _open_spool() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="headwater-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnvironment:
    random: Callable[[], float] = random.random
    random_bytes: Callable[[int], bytes] = os.urandom
    open_spool: OpenSpool = _open_spool
    look: Callable[[ClientSettings], Awaitable[BucketView]] | None = None
    """Replaces the look at the bucket over its own connection."""

    async def look_at(self, settings: ClientSettings) -> BucketView:
        """Look at the bucket once."""
        if self.look is not None:
            return await self.look(settings)
        return await look_at_bucket(settings, random_bytes=self.random_bytes)

"""The cluster map of a bucket, for those who want no more than that: a planner that deals out vbuckets, for example.

This is an edge: it blocks.
"""

from __future__ import annotations

import base64
import http.client
import io
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address, BootstrapBy, find_hosts
from headwater.client.handshake import Credentials
from headwater.client.kv_connection import (
    KvConnection,
    broken,
    first_that_works,
    is_loopback,
    open_socket,
    raise_if_tls,
    send_all,
)
from headwater.client.settings import ClientSettings
from headwater.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionClosed,
    HeadwaterError,
    InvalidInput,
    NotSupported,
    RemoteProtocolError,
    StatusError,
    TemporaryFailure,
    TlsFailed,
    UnexpectedMessage,
    UnknownBucket,
    UnknownCollection,
    UnknownScope,
    WrongProtocol,
    status_error,
)
from headwater.protocol.exchange import ANSWER_BYTES_MAX
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionIdResponse, GetCollectionsManifest
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.sasl import Mechanism
from headwater.protocol.status import Status

# The cluster map over HTTP, from the cluster manager: for where only its port is known, or reachable at first.
#
# The terse config (`/pools/default/b/BUCKET`) is the same JSON as that of the key-value protocol. Servers that do not
# have it have a stream of configs (`/pools/default/bs/BUCKET`) that begins with it, each ended by four newlines.
#
# HTTP's basic authentication shows the password to whoever listens, just as SASL PLAIN does, so the same rule is kept:
# it is sent over TLS, or to this machine, or where the caller names PLAIN. A client certificate takes its place.
#
# One exchange has one deadline and a limit to its size, whatever the server does. This is an edge: it blocks.


_END_OF_CONFIG = b"\n\n\n\n"
_READ_BYTES = 64 * 1024
_PORT_HINT = "Check that the port is the cluster manager's (8091, or 18091 with TLS)"


def fetch_map_over_http(address: Address, settings: ClientSettings) -> ClusterMap:
    """The newest cluster map, as the cluster manager at `address` tells it; or an error that says why not."""
    return settings.decode_map(fetch_config(address, settings), asked=address)


def fetch_config(address: Address, settings: ClientSettings) -> bytes:
    """The config as JSON."""
    bucket = quote(settings.bucket, safe="")
    answer = _ask_over_http(address, settings, f"/pools/default/b/{bucket}")
    if answer.status == http.HTTPStatus.NOT_FOUND:
        answer = _ask_over_http(address, settings, f"/pools/default/bs/{bucket}")
    if answer.status != http.HTTPStatus.OK:
        raise _refused(address, settings, answer.status)
    return answer.config


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    config: bytes


def _ask_over_http(address: Address, settings: ClientSettings, path: str) -> _Answer:
    sock = open_socket(address, settings.tls_context(), settings.timeouts)
    wire = _Wire(sock, settings.timeouts.answer_s)
    try:
        wire.send(_request(address, settings, path, is_loopback=is_loopback(sock)))
        # All that it wants of a socket is a file to read from.
        response = http.client.HTTPResponse(cast(socket.socket, wire), method="GET")
        response.begin()
        config = _read_config(response, address) if response.status == http.HTTPStatus.OK else b""
        return _Answer(response.status, config)
    except (http.client.HTTPException, OSError) as error:
        failure = _failure(address, settings, error)
        if settings.tls is None and isinstance(failure, ConnectionClosed):
            raise_if_tls(address, settings.timeouts, failure)
        raise failure from error
    finally:
        sock.close()


def _request(address: Address, settings: ClientSettings, path: str, *, is_loopback: bool) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {address}",
        f"User-Agent: {settings.agent}",
        "Accept: application/json",
        "Connection: close",
    ]
    if settings.credentials is not None:
        is_safe = settings.tls is not None or is_loopback or settings.mechanism is Mechanism.PLAIN
        lines.append(f"Authorization: Basic {_basic(settings.credentials, is_safe=is_safe)}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _basic(credentials: Credentials, *, is_safe: bool) -> str:
    if not is_safe:
        raise AuthenticationFailed(
            Status.AUTH_ERROR,
            "the password would be sent in clear, for anybody to read",
            hint="Use couchbases:// with port 18091, leave the port out, or name the mechanism PLAIN to allow it",
        )
    if ":" in credentials.user:
        raise AuthenticationFailed(
            Status.AUTH_ERROR, "HTTP can't log in a user with a colon in the name", hint="Leave the port out"
        )
    return base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()


def _read_config(response: http.client.HTTPResponse, address: Address) -> bytes:
    """The answer up to its end, or to the end of the first config of a stream."""
    body = bytearray()
    while data := response.read1(_READ_BYTES):
        searched = max(0, len(body) - len(_END_OF_CONFIG))
        body += data
        end = body.find(_END_OF_CONFIG, searched)
        if end >= 0:
            return bytes(body[:end])
        if len(body) > ANSWER_BYTES_MAX:
            raise RemoteProtocolError(
                f"the answer of {address} has more than {ANSWER_BYTES_MAX} bytes",
                offset=ANSWER_BYTES_MAX,
                hint=_PORT_HINT,
            )
    if response.length:
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


class _Wire(io.RawIOBase):
    """A socket to be read as a file, up to a deadline: a byte now and then does not put it off."""

    def __init__(self, sock: socket.socket, within_s: float) -> None:
        self._sock = sock
        self._deadline_s = time.monotonic() + within_s

    def send(self, data: bytes) -> None:
        self._sock.settimeout(self._left_s())
        send_all(self._sock, data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._left_s())
        return self._sock.recv_into(buffer)

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


# --- what is wrong ------------------------------------------------------------------------------------------------


def _refused(address: Address, settings: ClientSettings, status: int) -> HeadwaterError:
    if status == http.HTTPStatus.UNAUTHORIZED:
        if settings.credentials is None:
            return AuthenticationFailed(
                Status.AUTH_ERROR,
                f"{address} wants a log-in",
                hint="Give a user and a password, or a client certificate that the server knows a user for",
            )
        return AuthenticationFailed(
            Status.AUTH_ERROR, f"{address} refused the log-in: the user or the password is wrong"
        )
    if status == http.HTTPStatus.FORBIDDEN:
        return AccessDenied(
            Status.EACCESS,
            f"{address}: the user may not use bucket {settings.bucket!r}",
            hint="Check the bucket's name, and give the user a role on it",
        )
    if status == http.HTTPStatus.NOT_FOUND:
        return UnknownBucket(Status.KEY_ENOENT, f"{address}: there is no bucket {settings.bucket!r}")
    if status in (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE):
        return TemporaryFailure(Status.ETMPFAIL, f"{address} is too busy: HTTP status {status}")
    return RemoteProtocolError(
        f"{address} does not give the cluster map: HTTP status {status}",
        hint=f"{_PORT_HINT}, and TLS on both ends or on neither",
    )


def _failure(address: Address, settings: ClientSettings, error: http.client.HTTPException | OSError) -> HeadwaterError:
    # The first is an OSError, too.
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return ConnectionClosed(f"{address} closed the connection before it had answered", hint=_PORT_HINT)
    if isinstance(error, http.client.BadStatusLine) and str(error.args[0]).startswith("\x15\x03"):
        return TlsFailed(
            f"{address} speaks TLS, and this connection does not",
            hint="Write couchbases://, or take the port without TLS (8091)",
        )
    if isinstance(error, OSError):
        return broken(address, error, waited_s=settings.timeouts.answer_s)
    return WrongProtocol(f"{address} does not speak HTTP", hint=_PORT_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """What the first host that answers has told."""

    cluster_map: ClusterMap
    asked: Address
    """The host that has told it."""
    by: BootstrapBy

    @property
    def bucket_uuid(self) -> str:
        """Another one under the same name is another bucket."""
        return self.cluster_map.uuid


def bootstrap(settings: ClientSettings) -> Bootstrap:
    """Ask the hosts of the connection string, or those that DNS lists for it, in their order, until one tells the map.

    What is raised if none does is that of the host which tells most: see `host_failures`.
    """
    return first_that_works(find_hosts(settings.where), lambda address: _ask(address, settings))


def _ask(address: Address, settings: ClientSettings) -> Bootstrap:
    by = settings.where.bootstrap_by(address)
    if by is BootstrapBy.HTTP:
        cluster_map = fetch_map_over_http(address, settings)
    else:
        with KvConnection.open(address, settings.login()) as connection:
            cluster_map = settings.decode_map(connection.outcome.cluster_config, asked=address)
    return Bootstrap(cluster_map=cluster_map, asked=address, by=by)


# A cluster as one client sees it: connect to any host of the connection string, read its map, reach every node.


class KvCluster:
    """The nodes of one bucket."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._login = settings.login()

    def connect(self) -> KvConnection:
        """A connection to the first host that can be used, or to a node that it tells of over HTTP."""
        return first_that_works(find_hosts(self._settings.where), self._connect)

    def _connect(self, address: Address) -> KvConnection:
        if self._settings.where.bootstrap_by(address) is BootstrapBy.KV:
            return KvConnection.open(address, self._login)
        nodes = fetch_map_over_http(address, self._settings).nodes
        return first_that_works(nodes, lambda node: KvConnection.open(node, self._login))

    def open(self, address: Address) -> socket.socket:
        """A socket to one node that is logged in and has its bucket."""
        connection = KvConnection.open(address, self._login)
        if connection.buffered_bytes:
            connection.close()
            raise UnexpectedMessage(f"{address} has sent more than the answers")
        return connection.sock

    def read_map(self) -> ClusterMap:
        """The newest cluster map."""
        with self.connect() as connection:
            return self.map_of(connection)

    def map_of(self, connection: KvConnection) -> ClusterMap:
        """The cluster map that a connection was given when it was opened."""
        return self._settings.decode_map(connection.outcome.cluster_config, asked=connection.address)

    def collection_ids(self, connection: KvConnection, names: Sequence[str]) -> tuple[CollectionId, ...]:
        """The ids of collections, given as `scope.collection`; the default collection where none is named.

        With no collections on the connection there are no ids, and none may be named.
        """
        if not connection.outcome.negotiated.collections:
            if names:
                raise NotSupported(
                    Status.NOT_SUPPORTED,
                    f"{connection.address} has no collections",
                    hint="Leave --collection out, or use a server of version 7 or newer",
                )
            return ()
        return tuple(_collection_id(connection, name) for name in names) or (DEFAULT_COLLECTION,)


def _collection_id(connection: KvConnection, name: str) -> CollectionId:
    if len(name.split(".")) != 2 or not all(name.split(".")):
        raise InvalidInput(
            f"{name!r} is not a scope and a collection", hint="Write scope.collection, such as _default.users"
        )
    try:
        answer = connection.request(GetCollectionId(value=name.encode()))
    except (UnknownCollection, UnknownScope) as error:
        what = "scope of collection" if isinstance(error, UnknownScope) else "collection"
        raise type(error)(
            error.status, f"there is no {what} {name!r}", hint="Create it first, or check the name"
        ) from error
    except StatusError as error:
        # Older servers have no word of their own for it.
        raise status_error(error.status, f"collection {name!r} can't be found: {Status(error.status).name}") from error
    assert isinstance(answer, GetCollectionIdResponse)
    return CollectionId(answer.id)


# One look at a bucket before it is read: its map, and its scopes and collections.


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    cluster_map: ClusterMap
    manifest: Manifest
    has_collections: bool


def look_at_bucket(settings: ClientSettings) -> BucketView:
    """Connect to any host, blocking. Raises what is in the way of it."""
    cluster = KvCluster(settings)
    with cluster.connect() as connection:
        has_collections = connection.outcome.negotiated.collections
        return BucketView(
            cluster_map=cluster.map_of(connection),
            manifest=read_manifest(connection) if has_collections else Manifest(),
            has_collections=has_collections,
        )


def read_manifest(connection: KvConnection) -> Manifest:
    try:
        answer = connection.request(GetCollectionsManifest())
    except StatusError as error:
        raise error.retold(f"the collections can't be read: {error.reason}") from error
    assert isinstance(answer, PlainResponse)
    return Manifest.decode(answer.value)

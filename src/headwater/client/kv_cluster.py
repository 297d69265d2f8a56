"""A cluster as one client sees it: connect to any host of the connection string, read its map, reach every node."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from headwater.client.cluster_map import ClusterMap, Network
from headwater.client.connection_string import Address, ConnectionString
from headwater.client.handshake import Credentials
from headwater.client.kv_connection import KvConnection, Login, TlsSettings
from headwater.errors import (
    ConnectionFailed,
    InvalidConnectionString,
    InvalidInput,
    NotSupported,
    StatusError,
    TlsFailed,
    UnknownCollection,
    UnknownScope,
    status_error,
)
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionIdResponse
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.status import Status


class KvCluster:
    """The nodes of one bucket."""

    def __init__(
        self,
        where: ConnectionString,
        credentials: Credentials | None,
        *,
        tls: TlsSettings | None = None,
        agent: str = "headwater",
    ) -> None:
        if where.bucket is None:
            raise InvalidConnectionString("the connection string names no bucket", hint="Write couchbase://host/bucket")
        if tls is not None and not where.tls:
            raise InvalidInput(
                "there are TLS options, but no TLS", hint="Write couchbases:// for a connection with TLS"
            )
        self._where = where
        self._network = _network(where)
        context = (tls or TlsSettings()).context() if where.tls else None
        self._login = Login(credentials=credentials, bucket=where.bucket, tls=context, agent=agent)

    def connect(self) -> KvConnection:
        """A connection to the first host that can be reached."""
        failures: list[ConnectionFailed] = []
        for address in self._where.addresses:
            try:
                return KvConnection.open(address, self._login)
            except TlsFailed:
                raise
            except ConnectionFailed as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        raise ConnectionFailed(
            "no host can be reached: " + "; ".join(error.reason for error in failures), hint=failures[0].hint
        )

    def open(self, address: Address) -> socket.socket:
        """A socket to one node that is logged in and has its bucket."""
        return KvConnection.open(address, self._login).sock

    def read_map(self) -> ClusterMap:
        """The newest cluster map."""
        with self.connect() as connection:
            return self.map_of(connection)

    def map_of(self, connection: KvConnection) -> ClusterMap:
        """The cluster map that a connection was given when it was opened."""
        config = connection.outcome.cluster_config
        if config is None:
            raise NotSupported(
                Status.NOT_SUPPORTED,
                f"{connection.address} has no cluster config",
                hint="Check that the server is a Couchbase or Headwater node with this bucket",
            )
        return ClusterMap.decode(config, asked=connection.address, tls=self._where.tls, network=self._network)

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


def _network(where: ConnectionString) -> Network:
    name = where.option("network", Network.AUTO)
    if name not in tuple(Network):
        raise InvalidConnectionString(f"there is no network {name!r}", hint=f"Use one of {', '.join(Network)}")
    return Network(name)


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

"""A cluster as one client sees it: connect to any host of the connection string, read its map, reach every node."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address, BootstrapBy
from headwater.client.host_failures import first_that_works
from headwater.client.http_bootstrap import fetch_map_over_http
from headwater.client.kv_connection import KvConnection
from headwater.client.srv_lookup import find_hosts
from headwater.errors import (
    InvalidInput,
    NotSupported,
    StatusError,
    UnexpectedMessage,
    UnknownCollection,
    UnknownScope,
    status_error,
)
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionIdResponse
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.status import Status


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

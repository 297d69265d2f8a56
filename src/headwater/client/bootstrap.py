"""The cluster map of a bucket, for those who want no more than that: a planner that deals out vbuckets, for example.

This is an edge: it blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address, BootstrapBy
from headwater.client.host_failures import first_that_works
from headwater.client.http_bootstrap import fetch_map_over_http
from headwater.client.kv_connection import KvConnection
from headwater.client.srv_lookup import find_hosts


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

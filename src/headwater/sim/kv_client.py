"""What simulated clients do before they read or write: find the bucket, without a thread and without a real socket."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from headwater.client.bucket_view import BucketView
from headwater.client.client_settings import ClientSettings
from headwater.client.connection_string import Address
from headwater.client.host_failures import HostFailures
from headwater.client.kv_connection import Login
from headwater.errors import HeadwaterError
from headwater.node.replication.peer_connection import PeerConnection
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.vbuckets import GetCollectionsManifest


def login_of(settings: ClientSettings, random: Random) -> Login:
    return replace(settings.login(), random_bytes=random.randbytes)


async def connect_any(settings: ClientSettings, random: Random) -> PeerConnection:
    """A connection to the first host of the connection string that answers."""
    failures = HostFailures()
    for address in settings.addresses:
        try:
            return await PeerConnection.open(address, login_of(settings, random))
        except HeadwaterError as error:
            failures.add(address, error)
    raise failures.verdict()


async def look_at_bucket(settings: ClientSettings, random: Random) -> BucketView:
    """As the client's own, which blocks."""
    connection = await connect_any(settings, random)
    try:
        answer = await connection.request(GetCollectionsManifest())
        assert isinstance(answer, PlainResponse)
        return BucketView(
            cluster_map=settings.decode_map(connection.outcome.cluster_config, asked=connection.address),
            manifest=Manifest.decode(answer.value),
            has_collections=True,
        )
    finally:
        connection.close()


def seed_addresses(hosts: list[str], port: int) -> tuple[Address, ...]:
    return tuple(Address(host, port) for host in hosts)

"""What simulated clients do before they read or write: find the bucket, and ask how far it is, without a thread and
without a real socket. The client's own means for it block, so these do the same under asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from headwater.client.bucket_view import BucketView
from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.host_failures import HostFailures
from headwater.client.kv_connection import Login
from headwater.client.survey import SURVEY_NAME, VBucketStatus
from headwater.errors import HeadwaterError, NotMyVBucket
from headwater.node.replication.peer_connection import PeerConnection
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.dcp_connection import Open, OpenFlags
from headwater.protocol.messages.dcp_stream import GetFailoverLog, GetFailoverLogResponse, VBucketState
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, GetCollectionsManifest
from headwater.protocol.numbers import VBucketId

SURVEY_RETRY_S = 0.1
_NAME_RANDOM_BYTES = 6


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


class PatientSurveyor:
    """Asks the nodes for high seqnos and failover logs, as the client's `Surveyor` does, until all have answered.

    Connections are kept from one survey to the next. What goes wrong is tried again without an end: in a simulation
    every fault ends.
    """

    def __init__(self, settings: ClientSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        self._map: ClusterMap | None = None
        self._connections: dict[Address, PeerConnection] = {}

    @property
    def cluster_map(self) -> ClusterMap:
        """As it was when the last survey was made: it may be out of date by now."""
        assert self._map is not None, "a survey reads the map"
        return self._map

    async def survey(self, vbuckets: Iterable[VBucketId] | None = None) -> dict[VBucketId, VBucketStatus]:
        """The state of these vbuckets, or of all. Waits for those that have no active node at the moment."""
        found: dict[VBucketId, VBucketStatus] = {}
        while True:
            try:
                if self._map is None:
                    self._map = (await look_at_bucket(self._settings, self._random)).cluster_map
                every = map(VBucketId, range(self._map.vbuckets))
                missing = sorted(set(every if vbuckets is None else vbuckets) - found.keys())
                if not missing:
                    return found
                found |= await self._ask_nodes(self._map, missing)
                if not set(missing) - found.keys():
                    return found
            except HeadwaterError:
                self.close()
            self._map = None
            await asyncio.sleep(SURVEY_RETRY_S)

    async def _ask_nodes(
        self, cluster_map: ClusterMap, vbuckets: Iterable[VBucketId]
    ) -> dict[VBucketId, VBucketStatus]:
        by_node: dict[Address, list[VBucketId]] = {}
        for vbucket in vbuckets:
            node = cluster_map.active_node(vbucket)
            if node >= 0:
                by_node.setdefault(cluster_map.nodes[node], []).append(vbucket)
        found: dict[VBucketId, VBucketStatus] = {}
        for address, asked in by_node.items():
            connection = await self._connection(address)
            # In this order: a seqno is never of an older branch than the log that it is taken with.
            logs = await _failover_logs(connection, asked)
            answer = await connection.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))
            assert isinstance(answer, GetAllVbSeqnosResponse)
            highs = {entry.vbucket: entry.seqno for entry in answer.seqnos}
            for vbucket in logs.keys() & highs.keys():
                found[vbucket] = VBucketStatus(high_seqno=highs[vbucket], failover_log=logs[vbucket])
        return {vbucket: found[vbucket] for vbucket in sorted(found)}

    async def _connection(self, address: Address) -> PeerConnection:
        known = self._connections.get(address)
        if known is None or known.is_closed:
            known = await PeerConnection.open(address, login_of(self._settings, self._random))
            self._connections[address] = known
            # Servers give failover logs on DCP connections only.
            name = f"{SURVEY_NAME}:{self._random.randbytes(_NAME_RANDOM_BYTES).hex()}"
            await known.request(Open(key=name.encode(), flags=OpenFlags.PRODUCER))
        return known

    def close(self) -> None:
        for connection in self._connections.values():
            connection.abort()
        self._connections.clear()


async def _failover_logs(connection: PeerConnection, vbuckets: list[VBucketId]) -> dict[VBucketId, FailoverLog]:
    """The logs of those that the node has."""
    answers = await asyncio.gather(
        *(connection.request(GetFailoverLog(vbucket=vbucket)) for vbucket in vbuckets), return_exceptions=True
    )
    logs: dict[VBucketId, FailoverLog] = {}
    for vbucket, answer in zip(vbuckets, answers, strict=True):
        if isinstance(answer, GetFailoverLogResponse):
            logs[vbucket] = FailoverLog.of(answer.failover_log)
        elif not isinstance(answer, NotMyVBucket):
            assert isinstance(answer, BaseException), f"{answer} is no failover log"
            raise answer
    return logs

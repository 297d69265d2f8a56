"""The high seqnos of all vbuckets and the branches of their history, which planners request from all nodes.

Planners ask repeatedly, so connections are kept; `blocking_bucket.Surveyor` is the same for callers without an event
loop. No request returns the failover logs of all vbuckets, so there is one per vbucket. These are sent together and
their answers read without the typed codec, because a plan of 1,024 vbuckets is made several times a second.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from headwater import errors
from headwater.client.bootstrap import BucketView, RandomBytes, bootstrap, connect_any, view_over
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import ClientSettings
from headwater.phrases import counted
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.base import PlainResponse
from headwater.protocol.messages.session import Version
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.status import Status

SURVEY_NAME = "headwater-survey"
_NAME_RANDOM_BYTES = 6
RETRIES_MAX = 20
RETRY_DELAY_S = 0.25
"""During a rebalance or a failover, vbuckets may have no active node for a short time."""


_OURS = b"headwater"
"""Part of the version that a Headwater node reports."""
_ITEMS = re.compile(r"0x[0-9a-f]{1,8}:0x([0-9a-f]{1,8}):items")


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketStatus:
    """The state of a vbucket. It has two seqnos: the last changes may be durable writes that clients do not see.

    A read to "now" ends at `high_seqno`. Its offset may still reach `last_seqno`: a stream that begins before a hidden
    end learns of it (`protocol.messages.dcp_changes.SeqnoAdvanced`), an earlier one does not.
    """

    high_seqno: Seqno
    """The last seqno that clients see."""
    failover_log: FailoverLog
    last_seqno: Seqno = Seqno(0)
    """The last seqno of all; `high_seqno` if not given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_seqno", max(self.last_seqno, self.high_seqno))


class AsyncSurveyor:
    """Asks the nodes of a bucket. Made by `open`; call `close` at the end."""

    def __init__(self, settings: ClientSettings, cluster_map: ClusterMap, random_bytes: RandomBytes) -> None:
        self.cluster_map = cluster_map
        self._settings = replace(settings, bucket_was_seen=True)
        self._random_bytes = random_bytes
        self._connections: dict[Address, AsyncKvConnection] = {}
        """Key-value connections, which return the seqnos that clients see."""
        self._dcp_connections: dict[Address, AsyncKvConnection] = {}
        """DCP connections with sync writes, which return failover logs and the last seqnos of all."""
        self._manifests: AsyncKvConnection | None = None
        """The connection for reading collections."""

    @classmethod
    async def open(cls, settings: ClientSettings, *, random_bytes: RandomBytes = os.urandom) -> Self:
        return cls(settings, (await bootstrap(settings, random_bytes=random_bytes)).cluster_map, random_bytes)

    def close(self) -> None:
        """Close the connections. They are opened again when needed."""
        manifests, self._manifests = self._manifests, None
        for connection in (*self._connections.values(), *self._dcp_connections.values(), manifests):
            if connection is not None:
                connection.abort()
        self._connections.clear()
        self._dcp_connections.clear()

    async def refresh_map(self) -> None:
        """Read the cluster map again, over new connections."""
        self.close()
        newer = (await bootstrap(self._settings, random_bytes=self._random_bytes)).cluster_map
        if newer.uuid != self.cluster_map.uuid:
            raise errors.BucketReplaced(self.cluster_map.bucket)
        self.cluster_map = newer

    # --- asking ---------------------------------------------------------------------------------------------------

    async def survey(self, vbuckets: Iterable[VBucketId] | None = None) -> dict[VBucketId, VBucketStatus]:
        """Return the state of these vbuckets, or of all. Waits for vbuckets that are moving between nodes."""
        wanted = set(range(self.cluster_map.vbuckets) if vbuckets is None else vbuckets)
        found: dict[VBucketId, VBucketStatus] = {}
        for attempt in range(RETRIES_MAX):
            try:
                found |= await self.ask_once(VBucketId(vbucket) for vbucket in wanted - found.keys())
                if len(found) == len(wanted):
                    return found
                failure: errors.HeadwaterError = self._homeless(wanted - found.keys())
            except errors.ConnectionFailed as error:
                failure = error
            if attempt:
                await asyncio.sleep(RETRY_DELAY_S)
            await self.refresh_map()
        raise failure

    async def ask_once(self, vbuckets: Iterable[VBucketId]) -> dict[VBucketId, VBucketStatus]:
        """Return the state of those vbuckets whose node, according to the map, confirms that it has them."""
        by_node: dict[Address, list[VBucketId]] = {}
        for vbucket in sorted(vbuckets):
            node = self.cluster_map.active_node(vbucket)
            if node >= 0:
                by_node.setdefault(self.cluster_map.nodes[node], []).append(vbucket)
        found: dict[VBucketId, VBucketStatus] = {}
        for address, asked in by_node.items():
            try:
                dcp = await self._dcp_connection(address)
                # Keep this order, so that a seqno is never on an older branch than the log that comes with it.
                logs = await _failover_logs(dcp, asked)
                highs = await _high_seqnos(await self._connection(address))
                lasts = await _high_seqnos(dcp)
            except BaseException:
                for connections in (self._connections, self._dcp_connections):
                    if address in connections:
                        connections.pop(address).abort()
                raise
            found |= {
                vbucket: VBucketStatus(high_seqno=highs[vbucket], failover_log=log, last_seqno=lasts[vbucket])
                for vbucket, log in logs.items()
                if vbucket in highs and vbucket in lasts
            }
        return found

    async def high_seqnos(self) -> dict[VBucketId, Seqno]:
        """Return the high seqno of every vbucket. It does not retry: raises if a request fails or the map is stale."""
        found: dict[VBucketId, Seqno] = {}
        try:
            for address in self._active_addresses:
                found |= await _high_seqnos(await self._connection(address))
            missing = set(range(self.cluster_map.vbuckets)) - found.keys()
            if missing:
                raise self._homeless(missing)
        except BaseException:
            self.close()
            raise
        return found

    async def are_ours(self) -> bool:
        """Return whether all nodes with active vbuckets are Headwater's."""
        connections = [await self._connection(address) for address in self._active_addresses]
        answers = [await connection.request(Version()) for connection in connections]
        return all(isinstance(answer, PlainResponse) and _OURS in answer.value for answer in answers)

    async def has_change_streams(self) -> bool:
        """Return whether all of these nodes can stream every version of a document, at least for a while."""
        try:
            for address in self._active_addresses:
                dcp = await self._dcp_connection(address)
                await dcp.request(dcp_streams.Control(key=b"change_streams", value=b"true"))
        except errors.StatusError:
            return False
        return True

    @property
    def _active_addresses(self) -> list[Address]:
        """The addresses of the nodes that have active vbuckets."""
        nodes = {self.cluster_map.active_node(vbucket) for vbucket in range(self.cluster_map.vbuckets)}
        return [self.cluster_map.nodes[node] for node in sorted(nodes) if node >= 0]

    async def documents_by_collection(self) -> dict[int, int]:
        """Return the number of documents by collection id; empty if the nodes do not count them.

        Servers report these counts in their statistics, as `SCOPE:COLLECTION:items`.
        """
        found: Counter[int] = Counter()
        for statistics in await self._statistics("collections"):
            for name, text in statistics.items():
                if (match := _ITEMS.fullmatch(name)) is not None and text.isdecimal():
                    found[int(match[1], 16)] += int(text)
        return dict(found)

    async def documents(self) -> int:
        """Return the number of documents in the bucket; 0 if the nodes do not count them."""
        found = [statistics.get("curr_items", "") for statistics in await self._statistics("")]
        return sum(int(text) for text in found if text.isdecimal())

    async def _statistics(self, group: str) -> list[Mapping[str, str]]:
        """Return the statistics of all nodes with active vbuckets; empty if one of them lacks this group."""
        found: list[Mapping[str, str]] = []
        for address in self._active_addresses:
            try:
                found.append(await (await self._connection(address)).statistics(group))
            except errors.StatusError:
                return []
        return found

    async def look(self) -> BucketView:
        """Return the bucket's current collections, with the cluster map that is already known."""
        if self._manifests is None:
            self._manifests = await connect_any(self._settings, random_bytes=self._random_bytes)
        try:
            return await view_over(self._manifests, self.cluster_map)
        except BaseException:
            connection, self._manifests = self._manifests, None
            connection.abort()
            raise

    def _homeless(self, vbuckets: set[int]) -> errors.NotMyVBucket:
        return errors.NotMyVBucket(
            Status.NOT_MY_VBUCKET,
            f"there is no active node for {counted(len(vbuckets), 'vbucket')}, vbucket {min(vbuckets)} among them",
            hint="Wait for the failover or the rebalance to end, and check that all nodes are up",
        )

    async def _connection(self, address: Address) -> AsyncKvConnection:
        known = self._connections.get(address)
        if known is None:
            known = self._connections[address] = await self._open(address)
        return known

    async def _dcp_connection(self, address: Address) -> AsyncKvConnection:
        known = self._dcp_connections.get(address)
        if known is None:
            known = self._dcp_connections[address] = await self._open(address)
            # Servers return failover logs only on DCP connections, and the seqnos of prepares only on those with sync
            # writes. A server that refuses the control has no prepares.
            name = f"{SURVEY_NAME}:{self._random_bytes(_NAME_RANDOM_BYTES).hex()}"
            await known.request(dcp_streams.Open(key=name.encode(), flags=dcp_streams.OpenFlags.PRODUCER))
            with suppress(errors.StatusError):
                await known.request(dcp_streams.Control(key=b"enable_sync_writes", value=b"true"))
        return known

    async def _open(self, address: Address) -> AsyncKvConnection:
        login = replace(self._settings.login(), random_bytes=self._random_bytes)
        return await AsyncKvConnection.open(address, login)


async def _high_seqnos(connection: AsyncKvConnection) -> dict[VBucketId, Seqno]:
    answer = await connection.request(GetAllVbSeqnos(state=dcp_streams.VBucketState.ACTIVE))
    assert isinstance(answer, GetAllVbSeqnosResponse)
    return {entry.vbucket: entry.seqno for entry in answer.seqnos}


async def _failover_logs(connection: AsyncKvConnection, vbuckets: list[VBucketId]) -> dict[VBucketId, FailoverLog]:
    """Return the failover logs of those vbuckets that the node has."""
    logs: dict[VBucketId, FailoverLog] = {}
    requests = [dcp_streams.GetFailoverLog(vbucket=vbucket) for vbucket in vbuckets]
    for vbucket, answer in zip(vbuckets, connection.send(requests), strict=True):
        frame = (await answer)[-1].frame
        if frame.specific not in (Status.SUCCESS, Status.NOT_MY_VBUCKET):
            raise errors.status_error(frame.specific, f"the failover log of vbucket {vbucket} can't be read")
        if frame.specific == Status.SUCCESS:
            logs[vbucket] = FailoverLog.of(dcp_streams.decode_failover_log(frame.value))
    return logs

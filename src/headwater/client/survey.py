"""How far every vbucket is, and the branches of its history: what a planner has to know, asked of all nodes at once.

This is an edge: it blocks. Connections are kept, since planners ask again and again.

There is no request for the failover logs of all vbuckets, so there is one for each; they are sent together and their
answers read without the typed codec, because a plan of 1,024 vbuckets is made several times a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from headwater.client.bootstrap import bootstrap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection
from headwater.client.settings import ClientSettings
from headwater.errors import BucketReplaced, ConnectionFailed, HeadwaterError, NotMyVBucket, status_error
from headwater.phrases import counted
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.dcp_streams import GetFailoverLog, Open, OpenFlags, VBucketState, decode_failover_log
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.status import Status

SURVEY_NAME = "headwater-survey"
_NAME_RANDOM_BYTES = 6
RETRIES_MAX = 20
RETRY_DELAY_S = 0.25
"""While a rebalance or a failover is under way vbuckets may be with nobody, for a short time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketStatus:
    high_seqno: Seqno
    failover_log: FailoverLog


class Surveyor:
    """Asks the nodes of a bucket. Use it in `with`, or `close` it."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._connections: dict[Address, KvConnection] = {}
        self.cluster_map = bootstrap(settings).cluster_map

    def survey(self, vbuckets: Iterable[VBucketId] | None = None) -> dict[VBucketId, VBucketStatus]:
        """The state of these vbuckets, or of all. Waits for those that are on their way from node to node."""
        wanted = set(range(self.cluster_map.vbuckets) if vbuckets is None else vbuckets)
        found: dict[VBucketId, VBucketStatus] = {}
        for attempt in range(RETRIES_MAX):
            try:
                found |= self._ask_nodes({VBucketId(vbucket) for vbucket in wanted - found.keys()})
                if len(found) == len(wanted):
                    return found
                failure: HeadwaterError = self._homeless(wanted - found.keys())
            except ConnectionFailed as error:
                failure = error
            if attempt:
                time.sleep(RETRY_DELAY_S)
            self.refresh_map()
        raise failure

    def high_seqnos(self) -> dict[VBucketId, Seqno]:
        """How far all vbuckets are. Asked once: what fails is raised, and so is a map that is out of date."""
        found: dict[VBucketId, Seqno] = {}
        try:
            for node in {self.cluster_map.active_node(vbucket) for vbucket in range(self.cluster_map.vbuckets)}:
                if node >= 0:
                    found |= _high_seqnos(self._connection(self.cluster_map.nodes[node]))
            missing = set(range(self.cluster_map.vbuckets)) - found.keys()
            if missing:
                raise self._homeless(missing)
        except BaseException:
            self.close()
            raise
        return found

    def refresh_map(self) -> None:
        """Read the cluster map again, over new connections."""
        self.close()
        newer = bootstrap(self._settings).cluster_map
        if newer.uuid != self.cluster_map.uuid:
            raise BucketReplaced(self.cluster_map.bucket)
        self.cluster_map = newer

    def _homeless(self, vbuckets: set[int]) -> NotMyVBucket:
        return NotMyVBucket(
            Status.NOT_MY_VBUCKET,
            f"there is no active node for {counted(len(vbuckets), 'vbucket')}, vbucket {min(vbuckets)} among them",
            hint="Wait for the failover or the rebalance to end, and look whether all nodes are up",
        )

    def _ask_nodes(self, vbuckets: set[VBucketId]) -> dict[VBucketId, VBucketStatus]:
        by_node: dict[Address, list[VBucketId]] = {}
        for vbucket in vbuckets:
            node = self.cluster_map.active_node(vbucket)
            if node >= 0:
                by_node.setdefault(self.cluster_map.nodes[node], []).append(vbucket)
        found: dict[VBucketId, VBucketStatus] = {}
        for address, asked in by_node.items():
            try:
                connection = self._connection(address)
                # In this order: a seqno is never of an older branch than the log it is told with.
                logs = _failover_logs(connection, asked)
                highs = _high_seqnos(connection)
            except BaseException:
                # Answers may still be on their way, and nobody must take them for those to the next questions.
                if address in self._connections:
                    self._connections.pop(address).close()
                raise
            found |= {
                vbucket: VBucketStatus(high_seqno=highs[vbucket], failover_log=log)
                for vbucket, log in logs.items()
                if vbucket in highs
            }
        return found

    def _connection(self, address: Address) -> KvConnection:
        if address not in self._connections:
            connection = KvConnection.open(address, self._settings.login())
            self._connections[address] = connection
            # Servers tell failover logs on DCP connections only.
            name = f"{SURVEY_NAME}:{os.urandom(_NAME_RANDOM_BYTES).hex()}"
            connection.request(Open(key=name.encode(), flags=OpenFlags.PRODUCER))
        return self._connections[address]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _high_seqnos(connection: KvConnection) -> dict[VBucketId, Seqno]:
    answer = connection.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))
    assert isinstance(answer, GetAllVbSeqnosResponse)
    return {entry.vbucket: entry.seqno for entry in answer.seqnos}


def _failover_logs(connection: KvConnection, vbuckets: list[VBucketId]) -> dict[VBucketId, FailoverLog]:
    """The logs of those that the node has."""
    logs: dict[VBucketId, FailoverLog] = {}
    for answer in connection.answers(GetFailoverLog(vbucket=vbucket) for vbucket in vbuckets):
        vbucket, frame = answer.request.vbucket, answer.frame
        if frame.specific not in (Status.SUCCESS, Status.NOT_MY_VBUCKET):
            raise status_error(frame.specific, f"the failover log of vbucket {vbucket} can't be read")
        if frame.specific == Status.SUCCESS:
            logs[vbucket] = FailoverLog.of(decode_failover_log(frame.value))
    return logs

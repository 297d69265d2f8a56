"""Replication: one connection to each node that has active vbuckets, for all copies of them that this node keeps.

A membership passes each new config to its `ReplicationManager`, which keeps a `Replicator` for every source. This node
opens an ordinary DCP connection, and its consumer endpoint requests the streams. If the connection breaks, the node
opens it again after a delay that grows, and that is random so that the nodes do not all reconnect at once. If a stream
ends because its vbucket is no longer active there, the node requests it again until a newer config says where it is. A
copy that is damaged here is emptied once its source has confirmed that it has the vbucket, and streamed from the start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.errors import HeadwaterError, StatusError, StoreError
from headwater.log_fields import LogEvent, fields
from headwater.node.consumer.connection import ConsumerConnection, ConsumerSettings
from headwater.node.replication.proxy import PRODUCER_FLAGS
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import PublishedConfig
from headwater.protocol.messages.dcp_streams import AddStream, GetFailoverLog, Open
from headwater.protocol.numbers import CONNECTION_NAME_BYTES_MAX, VBucketId
from headwater.store.settling import reset_vbucket

logger = logging.getLogger(__name__)

TICK_S = 0.25
FIRST_S = 0.05
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
STREAM_RETRY_S = 0.5
"""Delay before a stream that was refused or has ended is requested again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The node to replicate from, and how to log in to it."""

    address: Address
    login: Login
    this_name: str
    """The name under which the cluster knows this node."""


def connection_name(source: Source, bucket: str) -> str:
    """The name on real servers, so that both ends see which copies it feeds. One for each pair of nodes and bucket."""
    name = f"replication:{source.address}->{source.this_name}:{bucket}"
    if len(name.encode()) <= CONNECTION_NAME_BYTES_MAX:
        return name
    # If it were cut, two pairs of nodes could have the same name, and each would replace the other's connection.
    return f"replication:{hashlib.sha256(name.encode()).hexdigest()}"


class Replicator:
    """The connection to one source. `follow` may be called at any time; `stop` ends it."""

    def __init__(
        self,
        service: BucketService,
        source: Source,
        *,
        random_bytes: Callable[[int], bytes],
        now_s: Callable[[], float],
        is_held: bool = False,
    ) -> None:
        self.source = source
        self._is_held = is_held
        self._service = service
        self._random_bytes = random_bytes
        self._now_s = now_s
        self._wanted: dict[VBucketId, float] = {}
        """The vbuckets to stream, and the earliest time to request each of them again."""
        self._connection: AsyncKvConnection | None = None
        self._consumer: ConsumerConnection | None = None
        self._lost: asyncio.Future[HeadwaterError] | None = None
        self._task = asyncio.create_task(self._run_forever())
        self._task.add_done_callback(self._on_task_end)

    @property
    def is_connected(self) -> bool:
        return self._consumer is not None

    def wanted(self) -> list[VBucketId]:
        return list(self._wanted)

    def streaming(self) -> list[VBucketId]:
        return [] if self._consumer is None else list(self._consumer.streams)

    def follow(self, vbuckets: list[VBucketId]) -> None:
        """Stream exactly these vbuckets from now on."""
        before, self._wanted = self._wanted, {vbucket: self._wanted.get(vbucket, 0.0) for vbucket in vbuckets}
        dropped = [vbucket for vbucket in before if vbucket not in self._wanted]
        if self._consumer is not None:
            for vbucket in dropped:
                self._consumer.close_stream(vbucket)
            self._add_streams(self._consumer)
            self._pump()

    @property
    def held_bytes(self) -> int:
        """Received bytes that wait while replication is held."""
        return self._consumer.held_bytes if self._is_held and self._consumer is not None else 0

    def hold(self) -> None:
        """Process nothing until `release`, also on connections that are opened meanwhile."""
        self._is_held = True
        if self._consumer is not None:
            self._consumer.hold()

    def release(self) -> None:
        self._is_held = False
        if self._consumer is not None:
            self._consumer.release()
            self.on_data(b"")

    def on_durable(self) -> None:
        """The bucket has published a commit."""
        if self._consumer is not None:
            self._consumer.on_durable()
            self._pump()

    def on_void(self) -> None:
        """A commit could not be written: reconnect, and request the lost changes again."""
        if self._consumer is not None:
            self._consumer.on_void()
            self._end(HeadwaterError("what was received could not be stored"))

    def cancel(self) -> None:
        """Stop receiving now, without waiting for the task to end."""
        self._disconnect()
        self._task.cancel()

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def stop(self) -> None:
        self.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical(
                "replication from %s has failed",
                self.source.address,
                exc_info=task.exception(),
                extra=self._failure(str(task.exception()), task.exception()),
            )

    def _failure(self, reason: str, error: BaseException | None) -> dict[str, Any]:
        return fields(
            event=LogEvent.REPLICATION_FAILED,
            bucket=self._service.name,
            address=str(self.source.address),
            error=type(error).__name__,
            reason=reason,
        )

    # --- the connection -------------------------------------------------------------------------------------------

    async def _run_forever(self) -> None:
        retry_s = RETRY_FIRST_S
        # The config reaches all nodes at once, and the source has to know our log-in before we connect.
        await asyncio.sleep(FIRST_S)
        while True:
            began_s = self._now_s()
            try:
                await self._run()
            except HeadwaterError as error:
                logger.info(
                    "bucket %s: replication from %s: %s",
                    *(self._service.name, self.source.address, error.reason),
                    extra=self._failure(error.reason, error),
                )
            finally:
                self._disconnect()
            if self._now_s() - began_s > RETRY_MAX_S:
                retry_s = RETRY_FIRST_S
            await asyncio.sleep(retry_s * (0.5 + self._random_bytes(1)[0] / 255))
            retry_s = min(RETRY_MAX_S, 2 * retry_s)

    async def _run(self) -> None:
        """Run one connection until it is lost."""
        source = self.source
        name = connection_name(source, self._service.name)
        connection = self._connection = await AsyncKvConnection.open(source.address, source.login)
        await connection.request(Open(flags=PRODUCER_FLAGS, key=name.encode()))
        consumer = ConsumerConnection(
            self._service,
            name=name,
            peer=str(source.address),
            settings=ConsumerSettings(consumer_name=source.this_name),
            now_s=self._now_s(),
            negotiated=connection.outcome.negotiated,
        )
        self._lost = asyncio.get_running_loop().create_future()
        self._consumer = consumer
        if self._is_held:
            consumer.hold()
        unfetched = await self._empty_damaged(connection)
        consumer.start()
        connection.attach(self)
        while not self._lost.done():
            if self._damaged() - unfetched:
                self._end(HeadwaterError("a copy was found damaged, and is fetched again"))
            consumer.tick(self._now_s())
            self._add_streams(consumer)
            self._pump()
            await asyncio.wait([self._lost], timeout=TICK_S)
        raise self._lost.result()

    def _damaged(self) -> set[VBucketId]:
        return {vbucket for vbucket in self._wanted if vbucket in self._service.bucket.vbuckets.damage}

    async def _empty_damaged(self, connection: AsyncKvConnection) -> set[VBucketId]:
        """Empty the damaged copies that the source has whole. Returns those that the source does not have."""
        unfetched: set[VBucketId] = set()
        for vbucket in self._damaged():
            try:
                await connection.request(GetFailoverLog(vbucket=vbucket))
            except StatusError:
                unfetched.add(vbucket)  # What is left here may be the only remains.
                continue
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._service.when_at_rest(partial(self._empty, vbucket, done))
            await done
        return unfetched

    def _empty(self, vbucket: VBucketId, done: asyncio.Future[None]) -> None:
        name, source = self._service.name, str(self.source.address)
        try:
            if vbucket in self._service.bucket.vbuckets.damage:
                reset_vbucket(self._service.bucket, vbucket)
            logger.warning(
                "bucket %s: vbucket %d was damaged and is fetched from %s again",
                *(name, vbucket, source),
                extra=fields(event=LogEvent.VBUCKET_FETCHED, bucket=name, vbucket=vbucket, address=source),
            )
        except StoreError as error:
            about = fields(event=LogEvent.STORE_FAILED, bucket=name, vbucket=vbucket, reason=error.reason)
            logger.error("bucket %s: vbucket %d could not be emptied: %s", name, vbucket, error, extra=about)
        finally:
            if not done.done():
                done.set_result(None)

    def _disconnect(self) -> None:
        if self._consumer is not None:
            self._consumer.disconnect()
            self._consumer = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _add_streams(self, consumer: ConsumerConnection) -> None:
        now_s = self._now_s()
        for vbucket, not_before_s in self._wanted.items():
            if vbucket not in consumer.streams and now_s >= not_before_s:
                self._wanted[vbucket] = now_s + STREAM_RETRY_S
                consumer.add_stream(AddStream(vbucket=vbucket))

    def _pump(self) -> None:
        """Send what is pending, and pause reading while the store is behind."""
        if self._consumer is None or self._connection is None:
            return
        self._connection.write(self._consumer.data_to_send())
        if self._consumer.is_full:
            self._connection.pause_reading()
        else:
            self._connection.resume_reading()

    def _end(self, error: HeadwaterError) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(error)

    # --- received data --------------------------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        if self._consumer is None:
            return
        try:
            self._consumer.receive_data(data)
            while self._consumer.is_held_back:
                self._consumer.receive_data(b"")
        except HeadwaterError as error:
            self._end(error)
            return
        self._pump()

    def on_lost(self, error: HeadwaterError) -> None:
        self._end(error)

    def on_writable(self, is_writable: bool) -> None:
        """Ignored: a consumer sends little, and must send all of it."""


# --- all sources of a bucket --------------------------------------------------------------------------------------


class ReplicationManager:
    """The replication of one bucket: after each new config, streams each vbucket from its new source."""

    def __init__(
        self,
        service: BucketService,
        *,
        login: Callable[[PublishedConfig], Login],
        random_bytes: Callable[[int], bytes],
        now_s: Callable[[], float],
    ) -> None:
        self._service = service
        self._login = login
        self._random_bytes = random_bytes
        self._now_s = now_s
        self._replicators: dict[str, Replicator] = {}
        self._ending: list[Replicator] = []
        self.is_held = False
        """Received changes are not processed: for a drill, in which copies have to be behind."""
        service.statistics["replication"] = self.statistics

    def follow(self, config: PublishedConfig, wanted: Mapping[int, list[int]], *, name: str) -> None:
        """From each of these nodes, stream these vbuckets and no others. `name` is this node's name."""
        login = self._login(config)
        names = config.names()
        by_name = {names[node]: (node, dict.fromkeys(vbuckets)) for node, vbuckets in wanted.items()}
        # First end what is no longer wanted, so that a vbucket that has moved has only one stream at a time.
        for source in list(self._replicators):
            there = by_name.get(source)
            if there is None or self._replicators[source].source.login.credentials != login.credentials:
                self._end(source)
            else:
                kept = [vbucket for vbucket in self._replicators[source].streaming() if vbucket in there[1]]
                self._replicators[source].follow(kept)
        for source, (node, vbuckets) in by_name.items():
            if source not in self._replicators:
                address = Address(config.nodes[node].host, config.nodes[node].kv_port_for(tls=login.tls is not None))
                self._replicators[source] = Replicator(
                    self._service,
                    Source(address=address, login=login, this_name=name),
                    random_bytes=self._random_bytes,
                    now_s=self._now_s,
                    is_held=self.is_held,
                )
            self._replicators[source].follow([VBucketId(vbucket) for vbucket in vbuckets])

    def hold(self) -> int:
        """Let the copies fall behind, until `release` or the next start. Returns the number of copies."""
        self.is_held = True
        for replicator in self._replicators.values():
            replicator.hold()
        return self._copies()

    def release(self) -> int:
        self.is_held = False
        for replicator in self._replicators.values():
            replicator.release()
        return self._copies()

    def _copies(self) -> int:
        return sum(len(replicator.wanted()) for replicator in self._replicators.values())

    def on_durable(self) -> None:
        for replicator in self._replicators.values():
            replicator.on_durable()

    def on_void(self) -> None:
        for replicator in self._replicators.values():
            replicator.on_void()

    def statistics(self) -> Iterator[tuple[str, object]]:
        """For each copy: its source, whether it is being streamed, and how much of its snapshot is not durable yet."""
        numbers = self._service.bucket.vbuckets
        yield "held", "true" if self.is_held else "false"
        for source, replicator in self._replicators.items():
            streaming = replicator.streaming()
            yield f"{source}:connected", "true" if replicator.is_connected else "false"
            yield f"{source}:held_bytes", replicator.held_bytes
            for vbucket in replicator.wanted():
                facts = numbers.facts[vbucket]
                end = 0 if facts is None else facts.snapshot_end_seqno
                yield f"vb_{vbucket}:source", source
                yield f"vb_{vbucket}:stream", "open" if vbucket in streaming else "waiting"
                yield f"vb_{vbucket}:behind", max(0, end - numbers.durable_seqno(vbucket))

    async def stop(self) -> None:
        for source in list(self._replicators):
            self._end(source)
        for replicator in self._ending:
            await replicator.stop()

    def _end(self, source: str) -> None:
        replicator = self._replicators.pop(source)
        replicator.follow([])
        replicator.cancel()
        self._ending = [one for one in self._ending if not one.is_over] + [replicator]

"""The buckets of a node from creation to removal: opened at the start, created and dropped while the node runs.

`node_state` has one `BucketLifecycle` and gives its services to the rest of the node. Creating and dropping each take
effect with a single write, which decides what is left after a crash:

* a bucket exists once its facts and settings are stored. The next start removes a folder without facts, and a bucket
  that was created for several nodes but never received the config of its cluster;
* a bucket is gone once `node.json` names it as dropped. Its files are removed then, at the latest by the next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from headwater.errors import LocalProtocolError, StoreError
from headwater.kernels.machine_code import compile_kernels
from headwater.log_fields import LogEvent, fields
from headwater.node.commit_loop import CommitLoop
from headwater.node.membership import ClusterMembership, MemberSettings, is_member
from headwater.node.node_folder import Folder, NodeEnvironment, NodeIdentity
from headwater.node.options import BucketSettings, NodeOptions, stored_settings
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import NodeAddress
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.data_format import BucketFacts
from headwater.store.engine import Engine
from headwater.store.opening import close_bucket, create_bucket, open_bucket, stored_facts

logger = logging.getLogger(__name__)

KERNEL_PACKAGES = (
    "headwater.protocol.kernels.frame_runs",
    "headwater.protocol.kernels.json_check",
    "headwater.kernels.siphash",
    "headwater.store",
    "headwater.node",
)
"""The packages whose kernels a node calls. It compiles them before it is ready: on a new machine that takes up to a
minute, during which it could answer no client. Later starts load the compiled kernels from disk."""
BUCKETS_MAX = 30
"""Couchbase's default bound. Each bucket has a thread and a file of its own."""
CLUSTER_NAME = "headwater"
"""The default name of a cluster. gocbcore labels its metrics with the name, so it must not be empty."""
_UUID_BYTES = 16


class BucketLifecycle:
    """Opens, creates, drops and closes buckets. Call everything except `open_all` in the node's event loop."""

    def __init__(
        self,
        options: NodeOptions,
        environment: NodeEnvironment,
        folder: Folder,
        member_settings: MemberSettings,
        *,
        on_durable: Callable[[], None],
        on_void: Callable[[BucketService, Collection[int]], None],
    ) -> None:
        self.options = options
        self._environment = environment
        self._store_environment = StoreEnvironment(now_ns=environment.now_ns, new_vbuuid=environment.new_vbuuid)
        self._folder = folder
        self._member_settings = member_settings
        self._on_durable = on_durable
        self._on_void = on_void
        self.identity: NodeIdentity
        self._stored_identity: NodeIdentity | None = None
        self.services: dict[str, BucketService] = {}
        self.loops: dict[str, CommitLoop] = {}
        self.memberships: dict[str, ClusterMembership] = {}
        self._engines: dict[str, Engine] = {}
        self._buckets: dict[str, Bucket] = {}
        """The buckets that are open. Once all are, `serve_all` builds a service for each."""
        self._closed: set[str] = set()
        self._changing = asyncio.Lock()
        self.is_stopping = False

    # --- starting and stopping ------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Open the engines. If another process holds one of them, this fails before anything has changed."""
        self._stored_identity = self._folder.load_identity()
        self.identity = self._stored_identity or NodeIdentity(
            uuid=self._environment.random_bytes(_UUID_BYTES).hex(),
            cluster_uuid=self._environment.random_bytes(_UUID_BYTES).hex(),
            cluster_name=CLUSTER_NAME,
        )
        asked = [name for name in self.options.buckets if name not in self.identity.dropped]
        for name in self.identity.dropped.intersection(self.options.buckets):
            hint = "`headwater buckets create` makes a new one"
            about = fields(event=LogEvent.BUCKETS_CHANGED, bucket=name)
            logger.warning("bucket %s was dropped, and --bucket does not make it again: %s", name, hint, extra=about)
        for name in dict.fromkeys((*self._folder.bucket_names(), *asked)):
            self._engines[name] = self._folder.open_engine(name)
        for name in [name for name in self._engines if name in self.identity.dropped]:
            self._remove(name)
        self._folder.remove_dropped()
        self._forget_dropped()
        if self.options.cluster_name is not None:
            self.change_identity(cluster_name=self.options.cluster_name)

    def open_all(self, report: Callable[[str], None]) -> None:
        """Open the buckets, which may take long. May run in a thread. Calls `report` with what the node is doing."""
        report("it loads or compiles its kernels")
        compile_kernels(*KERNEL_PACKAGES)
        for number, name in enumerate(list(self._engines), start=1):
            if self.is_stopping:
                return
            report(f"it opens bucket {name!r}, {number} of {len(self._engines)}")
            self._open(name, report)

    def serve_all(self) -> None:
        for name in self._buckets:
            self._serve(name)

    async def stop(self) -> None:
        """Wait until a bucket that is being created or dropped is done, then stop the loops and close all buckets."""
        async with self._changing:
            for name, loop in list(self.loops.items()):
                await loop.stop()
                self.services[name].range_scans.end_all()
            self.close_buckets()

    def close_buckets(self) -> None:
        """Close the buckets that are open and were not closed before."""
        for name in [name for name in list(self._buckets) if name not in self._closed]:
            self._closed.add(name)
            try:
                close_bucket(self._buckets[name])
            except StoreError as error:
                about = fields(
                    event=LogEvent.STORE_FAILED, bucket=name, error=type(error).__name__, reason=error.reason
                )
                logger.error("bucket %s was not closed in order: %s", name, error, extra=about)

    def close_engines(self) -> None:
        for engine in self._engines.values():
            engine.close()

    # --- one bucket -----------------------------------------------------------------------------------------------

    def _open(self, name: str, report: Callable[[str], None]) -> None:
        engine = self._engines[name]
        if stored_facts(engine) is None:
            if name in self.options.buckets:
                self._buckets[name] = self._create(name, BucketSettings(), vbuckets=self.options.vbuckets)
            else:
                self._remove(name)
            return
        bucket = open_bucket(engine, environment=self._store_environment, secret=self._secret())
        if not engine.was_left_alone:
            logger.warning(
                "bucket %s was not stopped in order, or is a copy: its history begins a new branch",
                name,
                extra=fields(event=LogEvent.NEW_BRANCH, bucket=name),
            )
        if not is_member(bucket):
            if stored_settings(bucket).is_forming:
                self._remove(name)
                return
            self._activate(bucket)
        self._buckets[name] = bucket

    def _create(self, name: str, settings: BucketSettings, *, vbuckets: int) -> Bucket:
        uuid = self._environment.random_bytes(_UUID_BYTES).hex()
        bucket = create_bucket(
            self._engines[name],
            BucketFacts(name=name, uuid=uuid, vbuckets=vbuckets),
            environment=self._store_environment,
            secret=self._secret(),
            rows=settings.rows(),
        )
        if not settings.is_forming:
            self._activate(bucket)
        return bucket

    def _secret(self) -> tuple[int, int]:
        return self._environment.random_number(bits=64), self._environment.random_number(bits=64)

    def _activate(self, bucket: Bucket) -> None:
        """Make all vbuckets active if the bucket has none yet: it is new, or a crash interrupted its creation."""
        if self.options.bare or any(bucket.vbuckets.facts):
            return
        for vbucket in range(len(bucket.vbuckets)):
            bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
        bucket.commit_now()

    def _serve(self, name: str) -> BucketService:
        bucket, options = self._buckets[name], self.options
        loop = CommitLoop(
            bucket,
            retention=lambda: service.settings.retention(options.retention, vbuckets=len(bucket.vbuckets)),
            expiry_every_s=options.expiry_every_s,
            compact_every_s=options.compact_every_s,
            scrub_bytes_per_s=options.scrub_bytes_per_s,
            on_durable=self._on_durable,
            on_void=lambda commits: self._on_void(service, commits),
            on_failed=self._environment.end_process,
        )
        service = BucketService(
            bucket=bucket,
            ack_when_durable=options.ack_when_durable,
            on_change=loop.on_change,
            when_at_rest=loop.run_at_rest,
            is_at_rest=loop.is_at_rest,
            scrubbed=lambda: loop.scrubbed,
            settings=stored_settings(bucket),
        )
        self.loops[name], self.services[name] = loop, service
        loop.start()
        self.memberships[name] = ClusterMembership(service, loop, self._member_settings)
        return service

    # --- while the node runs --------------------------------------------------------------------------------------

    async def create(self, name: str, settings: BucketSettings, *, vbuckets: int, address: NodeAddress) -> None:
        """Create a bucket. Raises `LocalProtocolError` if it can't be created, `StoreError` if it was not stored."""
        async with self._one_change():
            if name in self.services:
                raise LocalProtocolError("Bucket with given name already exists")
            if len(self.services) >= BUCKETS_MAX:
                raise LocalProtocolError(
                    f"a node has at most {BUCKETS_MAX} buckets", hint="Drop one that is no longer needed"
                )
            self.change_identity(dropped=self.identity.dropped - {name})
            try:
                self._engines[name] = await _in_thread(self._folder.open_engine, name)
                self._buckets[name] = await _in_thread(partial(self._create, vbuckets=vbuckets), name, settings)
            except BaseException:
                if name in self._engines:
                    self._engines.pop(name).close()
                self._folder.remove_bucket(name)
                raise
            self._closed.discard(name)
            self._serve(name)
            await self.memberships[name].start(address)

    async def drop(
        self, name: str, *, forget: Callable[[str], Awaitable[None]] | None, close: Callable[[BucketService], None]
    ) -> None:
        """Drop a bucket with all its data.

        `forget` stops the dashboard from reading it. `close` ends its streams and connections, after its vbuckets.
        """
        async with self._one_change():
            if name not in self.services:
                raise LocalProtocolError(f"there is no bucket {name!r}")
            # From here on the bucket is gone, whatever happens: the next start completes what remains to be done.
            self.change_identity(dropped=self.identity.dropped | {name})
            service = self.services.pop(name)
            if forget is not None:
                await forget(name)
            await self.memberships[name].stop()
            await self.loops.pop(name).stop()
            service.bucket.drop_vbuckets()
            close(service)
            service.range_scans.end_all()
            # Only now: until its connections were closed, their requests could still use the whole bucket.
            await self.memberships.pop(name).leave()
            del self._buckets[name]
            await _in_thread(self._remove, name)
            self._forget_dropped()

    @asynccontextmanager
    async def _one_change(self) -> AsyncIterator[None]:
        """Create or drop one bucket at a time. Raises `LocalProtocolError` if the node is stopping."""
        async with self._changing:
            if self.is_stopping:
                raise LocalProtocolError("the node stops", hint="Try again when it has started")
            yield

    def _remove(self, name: str) -> None:
        self._engines.pop(name).close()
        self._folder.remove_bucket(name)

    def _forget_dropped(self) -> None:
        """Forget dropped buckets whose files are gone, unless `--bucket` would create them again."""
        self.change_identity(dropped=self.identity.dropped & set(self.options.buckets))

    def change_identity(self, **changes: Any) -> None:
        """Change the node's identity. Write it only if it differs: a node must be able to start on a full disk."""
        identity = replace(self.identity, **changes)
        if identity != self._stored_identity:
            self._folder.store_identity(identity)
        self.identity = self._stored_identity = identity


async def _in_thread(action: Callable[..., Any], *arguments: Any) -> Any:
    """Run an action that waits for the disk in a thread, so that clients do not wait for it."""
    return await asyncio.get_running_loop().run_in_executor(None, action, *arguments)

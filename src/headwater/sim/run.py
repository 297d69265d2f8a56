"""One run of one seed: start everything, inject faults, wait until the cluster is quiet, and judge the result."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from headwater import errors
from headwater.client.bootstrap import connect_any
from headwater.client.cluster_map import ClusterMap, vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import ClientSettings
from headwater.kernels.machine_code import compile_kernels
from headwater.node.bucket_lifecycle import KERNEL_PACKAGES
from headwater.protocol.frames import DurabilityLevel, FrameInfo, durability
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.documents import Delete, Get, Set
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.numbers import DEFAULT_COLLECTION, SEQNO_MAX, CollectionId
from headwater.protocol.snapshots import StreamOffset
from headwater.sim import checkers
from headwater.sim.consumers import AnyConsumer, Consumer, LandingConsumer, LandingMutant, Mutant
from headwater.sim.event_loop import SimulationFault
from headwater.sim.faults import Faults, Operators, config_of
from headwater.sim.landing_judge import BucketTruth
from headwater.sim.network import Process, login_of
from headwater.sim.world import NodeHost, RunPlan, World

READY_S_MAX = 60.0
QUIET_S_MAX = 90.0
LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedReport:
    """The result of a seed."""

    seed: int
    digest: str
    complaints: tuple[str, ...]
    simulated_s: float
    steps: int
    counts: dict[str, int] = field(hash=False)
    lines: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not self.complaints


class Cast:
    """The actors of a run, except the nodes, which belong to the world."""

    def __init__(self, world: World, mutant: Mutant | LandingMutant | None) -> None:
        plan = world.plan
        self.writers = [Writer(world, number) for number in range(1, plan.writers + 1)]
        self.writers += [Writer(world, 1, is_hot=True)] if plan.hot_keys else []
        following = mutant if isinstance(mutant, Mutant) else None
        landing = mutant if isinstance(mutant, LandingMutant) else None
        truth = BucketTruth(world)
        self.landings = [LandingConsumer(world, number, landing, truth) for number in range(1, plan.landings + 1)]
        self.consumers: list[AnyConsumer] = [
            *(Consumer(world, number, following) for number in range(1, plan.consumers + 1)),
            *self.landings,
        ]


def run_seed(
    seed: int,
    *,
    mutant: Mutant | LandingMutant | None = None,
    keeps_trace: bool = False,
    plan: RunPlan | None = None,
) -> SeedReport:
    """Run a seed to its end. The same seed gives the same report."""
    compile_kernels(*KERNEL_PACKAGES)
    world = World(plan or RunPlan.draw(seed), keeps_trace=keeps_trace)
    cast = Cast(world, mutant)
    began_s = world.loop.time()
    faults = Faults(world, cast.consumers)
    # The nodes' log messages about intentional faults are useless.
    logging.disable(logging.CRITICAL)
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        world.loop.run_until_complete(world.director.run(world.loop, _direct(world, cast, faults)))
    except SimulationFault as fault:
        world.complain(f"the simulation can't go on: {fault}")
    finally:
        # Before `close`, which breaks off everything that still waits.
        report = SeedReport(
            seed=seed,
            digest=world.trace.digest,
            complaints=tuple(world.complaints),
            simulated_s=world.loop.time() - began_s,
            steps=world.loop.steps,
            counts=_counts(world, cast, faults),
            lines=tuple(world.trace.lines),
        )
        world.loop.close()
        logging.disable(logging.NOTSET)
        if gc_was_on:
            gc.enable()
    return report


def _counts(world: World, cast: Cast, faults: Faults) -> dict[str, int]:
    counts = Counter(faults.counts)
    counts["writes acknowledged"] = world.writes.count(checkers.KnownOutcome.ACKNOWLEDGED)
    counts["writes unknown"] = world.writes.count(checkers.KnownOutcome.UNKNOWN)
    counts["rows consumed"] = world.rows
    counts["rollbacks consumed"] = sum(consumer.rollbacks for consumer in cast.consumers)
    counts["changes streamed"] = world.tap.changes
    if cast.landings:
        counts["batches landed"] = sum(landing.batches for landing in cast.landings)
        counts["rows behind the plan"] = sum(landing.rows_behind_plan for landing in cast.landings)
    return dict(counts)


async def _direct(world: World, cast: Cast, faults: Faults) -> None:
    for host in world.hosts:
        host.start()
    await _until(lambda: all(host.is_ready for host in world.hosts), READY_S_MAX)
    operators = Operators(world, faults) if world.plan.nodes > 1 else None
    if operators is not None:
        await operators.make_cluster()
    for writer in cast.writers:
        writer.start()
    for consumer in cast.consumers:
        consumer.start()
    await faults.run(world.loop.time() + world.plan.busy_s)
    world.trace.note("director", "no more faults")
    await faults.end()
    if operators is not None:
        await _until(lambda: all(host.is_ready for host in world.hosts), READY_S_MAX)
        await operators.recover()
    await asyncio.gather(*(writer.stop() for writer in cast.writers))
    world.is_quiet = True
    world.trace.note("director", "no more writes")
    if not await _until(lambda: _is_settled(world, cast), QUIET_S_MAX):
        world.complain("it does not become quiet")
    try:
        _judge(world, cast)
    except AssertionError as error:
        world.complain(f"what is stored is wrong: {error}")


async def _until(is_so: Callable[[], bool], within_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while loop.time() < deadline_s:
        if is_so():
            return True
        await asyncio.sleep(LOOK_EVERY_S)
    return False


# --- judging ------------------------------------------------------------------------------------------------------


def _is_settled(world: World, cast: Cast) -> bool:
    """Return whether all consumers and copies have reached the end. Whether they are right is judged later."""
    if not _is_agreed(world):
        return False
    for vbucket in range(world.plan.vbuckets):
        host = world.active_host(vbucket)
        if host is None:
            return False
        numbers = host.bucket.vbuckets
        if numbers.high_seqnos[vbucket] != numbers.durable_seqnos[vbucket]:
            return False
        if not all(_has_reached(consumer, vbucket, host) for consumer in cast.consumers):
            return False
        if not all(_has_copied(copy, host, vbucket) for copy in copies_of(host, world, vbucket)):
            return False
    return True


def _is_agreed(world: World) -> bool:
    """Return whether all nodes use the same config."""
    if world.plan.nodes == 1:
        return True
    configs = [config_of(host) for host in world.hosts if host.is_ready]
    return all(config == configs[0] for config in configs)


def copies_of(active: NodeHost, world: World, vbucket: int) -> list[NodeHost]:
    """Return the hosts that must have a copy, according to the config of the active node."""
    config = config_of(active) if world.plan.nodes > 1 else None
    if config is None:
        return []
    names = [config.names()[node] for node in config.rows[vbucket][1:] if node >= 0]
    return [host for host in world.hosts if host.address in names]


def _has_copied(copy: NodeHost, active: NodeHost, vbucket: int) -> bool:
    if not copy.is_ready:
        return False
    ours, theirs = copy.bucket.vbuckets, active.bucket.vbuckets
    return bool(
        ours.facts[vbucket] is not None
        and ours.durable_seqnos[vbucket] == theirs.durable_seqnos[vbucket]
        and ours.vbuuids[vbucket] == theirs.vbuuids[vbucket]
    )


def _has_reached(consumer: AnyConsumer, vbucket: int, active: NodeHost) -> bool:
    high = active.bucket.vbuckets.high_seqno(vbucket)
    if consumer.failure is not None:
        return True
    offset = None if consumer.offsets is None else consumer.offsets.get(vbucket)  # type: ignore[arg-type]
    if offset is None:
        return checkers.visible_seqno(active.bucket, vbucket) == 0
    if not _is_on_a_branch(active, vbucket, offset):
        return False
    return offset.seqno == high or checkers.visible_seqno(active.bucket, vbucket) <= offset.seqno <= high


def _is_on_a_branch(active: NodeHost, vbucket: int, offset: StreamOffset) -> bool:
    """Return whether an offset lies in the server's current history, and not just at a seqno that exists there."""
    facts = active.bucket.vbuckets.facts[vbucket]
    assert facts is not None
    shared = facts.failover_log.branch_end(offset.vbuuid, high_seqno=SEQNO_MAX)
    return offset.seqno <= (shared or 0)


def _judge(world: World, cast: Cast) -> None:
    stored: dict[checkers.Key, checkers.Document] = {}
    for vbucket in range(world.plan.vbuckets):
        host = world.active_host(vbucket)
        if host is None:
            world.complain(f"vbucket {vbucket} is active on no node, or on more than one")
            continue
        documents = checkers.stored_documents(host.bucket, vbucket)
        stored |= documents
        for wrong in checkers.index_differences(host.bucket, vbucket):
            world.complain(f"{host.name}: {wrong}")
        for consumer in cast.consumers:
            for wrong in checkers.differences(consumer.name, consumer.documents(vbucket), documents):
                world.complain(f"vbucket {vbucket}: {wrong}")
        for copy in copies_of(host, world, vbucket):
            _judge_copy(world, copy, host, vbucket)
    if not _is_agreed(world):
        world.complain("the nodes go by different configs")
    _judge_writes(world, stored)
    for fault in (*world.loop.faults, *world.loop.failed_tasks()):
        world.complain(fault)


def _judge_copy(world: World, copy: NodeHost, active: NodeHost, vbucket: int) -> None:
    """Check that a copy has the same documents, an index that finds them, and the same history."""
    ours, theirs = copy.bucket.vbuckets.facts[vbucket], active.bucket.vbuckets.facts[vbucket]
    if ours is None or theirs is None or not copy.is_ready:
        world.complain(f"{copy.name} has no copy of vbucket {vbucket}")
        return
    held, stored = checkers.stored_documents(copy.bucket, vbucket), checkers.stored_documents(active.bucket, vbucket)
    for wrong in (*checkers.differences(copy.name, held, stored), *checkers.index_differences(copy.bucket, vbucket)):
        world.complain(f"the copy of vbucket {vbucket} on {copy.name}: {wrong}")
    if ours.failover_log.newest.vbuuid != theirs.failover_log.newest.vbuuid:
        world.complain(f"the copy of vbucket {vbucket} on {copy.name} is on another branch")


def _judge_writes(world: World, stored: dict[checkers.Key, checkers.Document]) -> None:
    vbuckets = {key: vbucket_of(key[1], world.plan.vbuckets) for key in world.writes.by_key}
    needs = {
        key: checkers.Needs.NOTHING
        if vbucket in world.drilled
        else checkers.Needs.MAJORITY
        if vbucket in world.failed_over
        else checkers.Needs.ACKNOWLEDGEMENT
        for key, vbucket in vbuckets.items()
    }
    for wrong in checkers.lost_writes(world.writes, stored, needs):
        world.complain(wrong)


# --- writers ---------------------------------------------------------------------------------------------------------
#
# Each writer has its own keys, finds their nodes by the cluster map, and records the answers. A writer of hot keys
# rewrites a few documents over and over, with hardly a pause, so some of them change between any two steps of a
# consumer: DCP then sends only the newest version, and the one that a plan expected never arrives.


RETRY_S = 0.1
REFUSALS_MAX = 10
EXPIRY_S = 1
OTHER_COLLECTION_CHANCE = 0.3
HOT_HOSTS = 100
"""The number of the first host for writers of hot keys."""
DURABLE_TIMEOUT_MS = 2000
HOT_WEIGHTS = {"set": 1.0, "delete": 0.05}
"""The weights for hot keys: a document that is missing half of the time would hide that it is out of date."""
_LEVELS = {"majority": DurabilityLevel.MAJORITY, "persist": DurabilityLevel.PERSIST_TO_MAJORITY}


class Writer:
    """One process with several keys and, if the plan says so, several writes in progress."""

    def __init__(self, world: World, number: int, *, is_hot: bool = False) -> None:
        self.name = f"hot-{number}" if is_hot else f"writer-{number}"
        self.is_stopped = False
        self._world = world
        self._random = world.random_of(self.name)
        host = f"10.0.1.{HOT_HOSTS + number if is_hot else number}"
        self._process = Process(self.name, host, random=self._random)
        self._settings: ClientSettings = world.client_settings()
        self._map: ClusterMap | None = None
        self._connections: dict[Address, AsyncKvConnection] = {}
        self._values = count(1)
        plan = world.plan
        keys = plan.hot_keys if is_hot else plan.keys_per_writer
        self._keys = [b"%s-%d" % (self.name.encode(), key) for key in range(keys)]
        self._lanes_count = keys if is_hot else plan.lanes
        self._pause_s = plan.hot_pause_s if is_hot else plan.write_pause_s
        self._weights = HOT_WEIGHTS if is_hot else plan.write_weights
        self._lanes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        lanes = self._lanes_count
        for lane in range(lanes):
            keys = self._keys[lane::lanes]
            self._lanes.append(self._process.run(self._world.loop, self._write_on(keys), name=f"lane-{lane}"))

    async def stop(self) -> None:
        self.is_stopped = True
        await asyncio.gather(*self._lanes)
        for connection in self._connections.values():
            connection.close()

    async def _write_on(self, keys: list[bytes]) -> None:
        random = self._random
        while not self.is_stopped:
            await asyncio.sleep(random.expovariate(1 / self._pause_s))
            others = list(self._world.collections)
            is_other = bool(others) and random.random() < OTHER_COLLECTION_CHANCE
            collection = random.choice(others) if is_other else DEFAULT_COLLECTION
            await self._write(
                random.choice(keys), collection, random.choices(list(self._weights), list(self._weights.values()))[0]
            )

    async def _write(self, key: bytes, collection: int, kind: str) -> None:
        target = {
            "collection_id": CollectionId(collection),
            "key": key,
            "vbucket": vbucket_of(key, self._world.plan.vbuckets),
        }
        if kind == "get":
            await self._ask(Get(**target), None)  # type: ignore[arg-type]
            return
        value = None if kind == "delete" else b'{"by":"%s","n":%d}' % (self.name.encode(), next(self._values))
        infos: tuple[FrameInfo, ...] = ()
        if kind in _LEVELS:
            infos = (durability(_LEVELS[kind], timeout_ms=DURABLE_TIMEOUT_MS),)
        expires = kind == "expire"
        began_s = self._world.loop.time()
        write = checkers.Write(value=value, is_durable=bool(infos), may_expire=expires, began_s=began_s)
        if collection == DEFAULT_COLLECTION:
            self._world.writes.begin((collection, key), write)
        if value is None:
            request: Request = Delete(frame_infos=infos, **target)  # type: ignore[arg-type]
        else:
            expiry = EXPIRY_S if expires else 0
            request = Set(value=value, expiry=expiry, frame_infos=infos, **target)  # type: ignore[arg-type]
        await self._ask(request, write)

    async def _ask(self, request: Request, write: checkers.Write | None) -> None:
        """Send a request until its outcome is known: refusals not about the write itself are retried a few times."""
        outcome = checkers.KnownOutcome.REFUSED
        for _ in range(REFUSALS_MAX):
            try:
                connection = await self._connection(request.vbucket)
            except errors.HeadwaterError:
                self._map = None
                await asyncio.sleep(RETRY_S)
                if self.is_stopped:
                    break
                continue
            try:
                await connection.request(request)
                outcome = checkers.KnownOutcome.ACKNOWLEDGED
                break
            except (errors.ConnectionFailed, errors.SyncWriteAmbiguous) as error:
                if isinstance(error, errors.ConnectionFailed):
                    connection.abort()
                    self._map = None
                outcome = checkers.KnownOutcome.UNKNOWN
                break
            except errors.StatusError as error:
                if isinstance(error, errors.KeyNotFound) or not error.retriable:
                    break
                self._map = None
                await asyncio.sleep(RETRY_S)
        if write is not None:
            write.outcome, write.ended_s = outcome, self._world.loop.time()

    async def _connection(self, vbucket: int) -> AsyncKvConnection:
        if self._map is None:
            self._map = await self._read_map()
        address = self._map.address_of(vbucket)  # type: ignore[arg-type]
        known = self._connections.get(address)
        if known is None or known.is_closed:
            opened = await AsyncKvConnection.open(address, login_of(self._settings, self._random))
            known = self._connections.get(address)
            if known is not None and not known.is_closed:
                opened.close()  # Another lane was faster.
                return known
            known = self._connections[address] = opened
        return known

    async def _read_map(self) -> ClusterMap:
        connection = await connect_any(self._settings, random_bytes=self._random.randbytes)
        try:
            answer = await connection.request(GetClusterConfig())
            assert isinstance(answer, PlainResponse)
            return self._settings.decode_map(answer.value, asked=connection.address)
        finally:
            connection.close()

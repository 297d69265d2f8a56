"""One run of one seed: start everything, let things happen, wait until it is quiet, and judge."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.client.cluster_map import vbucket_of
from headwater.kernels.machine_code import compile_kernels
from headwater.node.bucket_lifecycle import KERNEL_PACKAGES
from headwater.protocol.numbers import SEQNO_MAX
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.checkers import (
    Document,
    Key,
    KnownOutcome,
    Needs,
    differences,
    index_differences,
    lost_writes,
    stored_documents,
    visible_seqno,
)
from headwater.sim.consumers import AnyConsumer, Consumer, LandingConsumer, LandingMutant, Mutant
from headwater.sim.event_loop import SimulationFault
from headwater.sim.faults import Faults, Operators, config_of
from headwater.sim.landing_judge import BucketTruth
from headwater.sim.world import NodeHost, RunPlan, World
from headwater.sim.writers import Writer

READY_S_MAX = 60.0
QUIET_S_MAX = 90.0
LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedReport:
    """What came of a seed."""

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
    """The actors of a run but for the nodes, which are the world's."""

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
    # What nodes log about faults that were made on purpose is of no use.
    logging.disable(logging.CRITICAL)
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        world.loop.run_until_complete(world.director.run(world.loop, _direct(world, cast, faults)))
    except SimulationFault as fault:
        world.complain(f"the simulation can't go on: {fault}")
    finally:
        # Before the end, at which everything that still waits is broken off.
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
    counts["writes acknowledged"] = world.writes.count(KnownOutcome.ACKNOWLEDGED)
    counts["writes unknown"] = world.writes.count(KnownOutcome.UNKNOWN)
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
    """Whether all consumers and copies have reached the end. Whether they are right is another question."""
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
    """Whether all nodes go by the same config."""
    if world.plan.nodes == 1:
        return True
    configs = [config_of(host) for host in world.hosts if host.is_ready]
    return all(config == configs[0] for config in configs)


def copies_of(active: NodeHost, world: World, vbucket: int) -> list[NodeHost]:
    """The hosts that have to have a copy, by the config of the one that has it active."""
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
        return visible_seqno(active.bucket, vbucket) == 0
    if not _is_on_a_branch(active, vbucket, offset):
        return False
    return offset.seqno == high or visible_seqno(active.bucket, vbucket) <= offset.seqno <= high


def _is_on_a_branch(active: NodeHost, vbucket: int, offset: StreamOffset) -> bool:
    """Whether an offset is in the history that the server has now, and not only at a seqno that it has as well."""
    facts = active.bucket.vbuckets.facts[vbucket]
    assert facts is not None
    shared = facts.failover_log.branch_end(offset.vbuuid, high_seqno=SEQNO_MAX)
    return offset.seqno <= (shared or 0)


def _judge(world: World, cast: Cast) -> None:
    stored: dict[Key, Document] = {}
    for vbucket in range(world.plan.vbuckets):
        host = world.active_host(vbucket)
        if host is None:
            world.complain(f"vbucket {vbucket} is active on no node, or on more than one")
            continue
        documents = stored_documents(host.bucket, vbucket)
        stored |= documents
        for wrong in index_differences(host.bucket, vbucket):
            world.complain(f"{host.name}: {wrong}")
        for consumer in cast.consumers:
            for wrong in differences(consumer.name, consumer.documents(vbucket), documents):
                world.complain(f"vbucket {vbucket}: {wrong}")
        for copy in copies_of(host, world, vbucket):
            _judge_copy(world, copy, host, vbucket)
    if not _is_agreed(world):
        world.complain("the nodes go by different configs")
    _judge_writes(world, stored)
    for fault in (*world.loop.faults, *world.loop.failed_tasks()):
        world.complain(fault)


def _judge_copy(world: World, copy: NodeHost, active: NodeHost, vbucket: int) -> None:
    """A copy has the same documents, finds them by its index, and knows the same history."""
    ours, theirs = copy.bucket.vbuckets.facts[vbucket], active.bucket.vbuckets.facts[vbucket]
    if ours is None or theirs is None or not copy.is_ready:
        world.complain(f"{copy.name} has no copy of vbucket {vbucket}")
        return
    held, stored = stored_documents(copy.bucket, vbucket), stored_documents(active.bucket, vbucket)
    for wrong in (*differences(copy.name, held, stored), *index_differences(copy.bucket, vbucket)):
        world.complain(f"the copy of vbucket {vbucket} on {copy.name}: {wrong}")
    if ours.failover_log.newest.vbuuid != theirs.failover_log.newest.vbuuid:
        world.complain(f"the copy of vbucket {vbucket} on {copy.name} is on another branch")


def _judge_writes(world: World, stored: dict[Key, Document]) -> None:
    vbuckets = {key: vbucket_of(key[1], world.plan.vbuckets) for key in world.writes.by_key}
    needs = {
        key: Needs.NOTHING
        if vbucket in world.drilled
        else Needs.MAJORITY
        if vbucket in world.failed_over
        else Needs.ACKNOWLEDGEMENT
        for key, vbucket in vbuckets.items()
    }
    for wrong in lost_writes(world.writes, stored, needs):
        world.complain(wrong)

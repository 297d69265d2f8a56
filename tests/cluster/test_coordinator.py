"""The coordinator on real nodes: what it makes of them, what it refuses, and that it can be run again."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.cluster import rebalance as failover
from headwater.cluster.coordinator import Coordinator
from headwater.cluster.nodes import NodePort, with_handing_over
from headwater.cluster.planning import Row
from headwater.errors import HeadwaterError, InvalidInput, StatusError, StoreFull
from headwater.protocol.features import Feature
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from headwater.protocol.sasl import Credentials
from headwater.protocol.status import Status
from support.clusters import LOGIN, VBUCKETS, ClusterProcesses, InProcessNodes, in_process, soon
from support.node_process import PASSWORD, USER

KEYS = [b"key-%d" % number for number in range(60)]


def states(nodes: InProcessNodes) -> Counter[tuple[int, str]]:
    return Counter((number, state) for vbucket in range(VBUCKETS) for number, state in nodes.copies(vbucket).items())


# --- making one ---------------------------------------------------------------------------------------------------


async def test_empty_nodes_share_the_vbuckets_at_once(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        config = await coordinator.init(replicas=1)
        assert config.settled
        await nodes.store(KEYS)
        assert await nodes.found(KEYS) == KEYS
        await soon(lambda: states(nodes)[0, "active"] + states(nodes)[1, "active"] == VBUCKETS)
        assert states(nodes) == {(0, "active"): 4, (0, "replica"): 4, (1, "active"): 4, (1, "replica"): 4}


async def test_a_cluster_is_made_once(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes, nodes.coordinator(0) as coordinator:
        first = await coordinator.init(replicas=1)
        assert (await coordinator.init(replicas=1)).revision == first.revision
        with pytest.raises(InvalidInput, match="in a cluster of 1 node already"):
            await coordinator.init(replicas=2)


async def test_without_a_cluster_nothing_can_be_done(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes, nodes.coordinator(0) as coordinator:
        with pytest.raises(InvalidInput, match="is not in a cluster"):
            await coordinator.status()


async def test_a_bare_node_becomes_a_member(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes, nodes.coordinator(0) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        bare = await nodes.start_new(bare=True)
        await coordinator.add(nodes.address(bare))
        await coordinator.rebalance()
        assert await nodes.found(KEYS) == KEYS
        assert states(nodes)[bare, "active"] == 4


async def test_the_bucket_is_one_and_the_same_everywhere(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0) as coordinator:
        await coordinator.init(replicas=1)
        await coordinator.add(nodes.address(1))
        configs = [json.loads(node.cluster_config("default")) for node in nodes.running.values()]
        assert configs[0]["uuid"] == configs[1]["uuid"]
        assert [[node.get("thisNode", False) for node in config["nodesExt"]] for config in configs] == [
            [True, False],
            [False, True],
        ]
        assert not any("login" in config["headwater"] for config in configs)
        whole = json.loads(nodes.running[1].cluster_config(None))
        assert [node["services"]["kv"] for node in whole["nodesExt"]] == [nodes.address(0).port, nodes.address(1).port]


async def test_nodes_that_do_not_fit(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0) as coordinator:
        await coordinator.init(replicas=1)
        wide = await nodes.start_new(vbuckets=16)
        with pytest.raises(InvalidInput, match=r"has 16 vbuckets on .*, and 8 here.*--vbuckets 8"):
            await coordinator.add(nodes.address(wide))
        await nodes.stop(wide)
        await nodes.stop(0)
        await nodes.store(KEYS[:3])
        await nodes.start(0)
        with pytest.raises(InvalidInput, match=r"has 3 documents of its own, which would be lost.*--force"):
            await coordinator.add(nodes.address(1))
        await coordinator.add(nodes.address(1), force=True)
        await coordinator.rebalance()
        assert await nodes.found(KEYS[:3]) == []


# --- moving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.05, pytest.param(0.15, marks=pytest.mark.soak), 0.3])
async def test_a_rebalance_that_was_cut_short_is_run_again(tmp_path: Path, after_s: float) -> None:
    async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        for node in (1, 2):
            await coordinator.add(nodes.address(node))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_for_ever(coordinator), after_s)
        async with nodes.coordinator(2) as another:
            await another.rebalance()
            status = await another.status()
        assert status.settled
        assert status.missing == 0
        assert await nodes.found(KEYS) == KEYS
        await soon(lambda: sum(states(nodes).values()) == 2 * VBUCKETS)


async def _for_ever(coordinator: Coordinator) -> None:
    """A rebalance to and fro, so that it is cut short wherever it is."""
    while True:
        await coordinator.rebalance()
        await asyncio.sleep(0)


async def test_two_coordinators_do_not_both_succeed(tmp_path: Path) -> None:
    async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0) as coordinator:
        await coordinator.init(replicas=1)
        for node in (1, 2):
            await coordinator.add(nodes.address(node))
        async with nodes.coordinator(1) as another:
            results = await asyncio.gather(coordinator.rebalance(), another.rebalance(), return_exceptions=True)
            assert any(isinstance(result, HeadwaterError) for result in results)
            await another.rebalance()
            assert (await another.status()).settled


async def test_a_node_that_leaves_has_nothing_left_to_serve(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        await coordinator.remove(nodes.name(0))
        assert await nodes.found(KEYS) == KEYS
        assert states(nodes)[0, "active"] == 0
        with pytest.raises(InvalidInput, match="is not a node of the cluster"):
            await coordinator.remove(nodes.name(0))
        with pytest.raises(InvalidInput, match="no node would be left"):
            await coordinator.remove(nodes.name(1))


async def test_a_node_that_can_t_be_reached_stops_a_rebalance(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.stop(1)
        with pytest.raises(HeadwaterError, match=r"can't be reached.*cluster failover"):
            await coordinator.rebalance()


# --- failing over -------------------------------------------------------------------------------------------------


async def test_a_failover_without_copies_needs_force(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=0)
        await nodes.store(KEYS)
        await nodes.stop(1)
        with pytest.raises(InvalidInput, match=r"4 vbuckets would be lost.*--force"):
            await coordinator.failover([nodes.name(1)])
        done = await coordinator.failover([nodes.name(1)], force=True)
        assert len(done.lost) == 4
        assert states(nodes) == {(0, "active"): VBUCKETS}
        await nodes.store(KEYS)


async def test_a_node_that_comes_back_loses_what_it_had_alone(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(KEYS[:40])
        await soon(lambda: nodes.is_even())
        await nodes.stop(1)
        await coordinator.failover([nodes.name(1)])
        await nodes.stop(0)
        # Nobody tells it, so it goes on, and takes writes that nobody else will ever have.
        starting = asyncio.create_task(nodes.start(1))
        assert await _answer_while_starting(nodes, 1) == Status.ETMPFAIL
        await starting
        alone = await nodes.try_to_store(b"alone-%d" % number for number in range(10))
        assert alone
        await nodes.start(0)
        await soon(lambda: states(nodes)[1, "active"] == 0)
        await nodes.store(KEYS[40:])
        await coordinator.add(nodes.address(1))
        await coordinator.rebalance()
        assert await nodes.found(KEYS) == KEYS
        assert await nodes.found(alone) == []
        await soon(lambda: nodes.is_even())


async def _answer_while_starting(nodes: InProcessNodes, number: int) -> int:
    """What a node says to a reader before it has heard from the others, or given up to wait for them."""
    while True:
        try:
            connection = await AsyncKvConnection.open(nodes.address(number), LOGIN)
            break
        except HeadwaterError:
            await asyncio.sleep(0.02)
    try:
        await connection.request(Get(vbucket=VBucketId(0), key=KEYS[0], collection_id=DEFAULT_COLLECTION))
    except StatusError as error:
        return error.status
    finally:
        connection.close()
    return Status.SUCCESS


async def test_a_node_that_was_failed_over_hears_of_it_before_it_serves(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        await soon(lambda: nodes.is_even())
        await nodes.stop(1)
        await coordinator.failover([nodes.name(1)])
        await nodes.start(1)
        assert states(nodes) == {(0, "active"): VBUCKETS, (1, "dead"): 4, (1, "replica"): 4}
        assert await nodes.found(KEYS) == KEYS


async def test_a_node_keeps_its_config(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        config = await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        for number in (0, 1):
            await nodes.stop(number)
        await asyncio.gather(nodes.start(0), nodes.start(1))
        status = await coordinator.status()
        assert status.revision == config.revision
        assert await nodes.found(KEYS) == KEYS
        await nodes.store([b"after"])
        await soon(lambda: nodes.is_even())


async def test_statistics_tell_of_the_copies(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        await soon(lambda: nodes.is_even())
        connection = await AsyncKvConnection.open(nodes.address(1), LOGIN)
        statistics = await connection.statistics("replication")
        connection.close()
        assert statistics[f"{nodes.name(0)}:connected"] == "true"
        copies = [vbucket for vbucket in range(VBUCKETS) if nodes.copies(vbucket)[1] == "replica"]
        assert [name for name in statistics if name.endswith(":stream")] == [f"vb_{copy}:stream" for copy in copies]
        assert {statistics[f"vb_{copy}:stream"] for copy in copies} == {"open"}
        assert {statistics[f"vb_{copy}:behind"] for copy in copies} == {"0"}


async def test_states_that_could_not_be_stored_are_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0) as coordinator:
        await coordinator.init(replicas=1)
        engine = nodes.running[1].bucket_service("default").bucket.engine
        write, failures = engine.write, iter([StoreFull("no room"), StoreFull("no room")])

        def fail_at_first(changes: Any) -> None:
            for failure in failures:
                raise failure
            write(changes)

        monkeypatch.setattr(engine, "write", fail_at_first)
        await coordinator.add(nodes.address(1))
        assert next(failures, None) is None
        assert states(nodes)[1, "active"] == 0
        await coordinator.rebalance()
        assert states(nodes)[1, "active"] == 4


async def test_log_in_of_the_nodes_is_not_the_admin_s(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes, nodes.coordinator(0) as coordinator:
        config = await coordinator.init(replicas=0)
        assert config.login.password != LOGIN.credentials.password
        assert repr(config).count(config.login.password) == 0


# --- failover of living node ------------------------------------------------------------------------------------------

DURABLE_LOGIN = replace(LOGIN, features=(*LOGIN.features, Feature.ALT_REQUEST, Feature.SYNC_REPLICATION))
LATE_KEYS = [b"late-%d" % number for number in range(60)]


async def is_written_durably(connection: AsyncKvConnection, key: bytes) -> bool:
    request = Set(
        vbucket=VBucketId(vbucket_of(key, VBUCKETS)),
        collection_id=DEFAULT_COLLECTION,
        key=key,
        value=b'{"a": 1}',
        frame_infos=(durability(DurabilityLevel.MAJORITY, timeout_ms=1500),),
    )
    try:
        await connection.request(request)
    except HeadwaterError:
        return False
    return True


async def test_a_majority_that_comes_about_during_the_failover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are compared, one is chosen, and only then the other one gets, and acknowledges, a write."""
    promote = failover._promote
    acknowledged: list[bytes] = []
    async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=2)
        numbers = {nodes.name(number): number for number in range(3)}
        key = next(key for key in KEYS if nodes.copies(vbucket_of(key, VBUCKETS))[0] == "active")
        late = next(key for key in LATE_KEYS if nodes.copies(vbucket_of(key, VBUCKETS))[0] == "active")
        connection = await AsyncKvConnection.open(nodes.address(0), DURABLE_LOGIN)
        assert await is_written_durably(connection, key), "the copies are there"

        async def write_then_promote(port_of: Any, rows: Mapping[VBucketId, Row], *rest: Any) -> int:
            chosen = rows[VBucketId(vbucket_of(late, VBUCKETS))][0]
            assert chosen is not None
            nodes.running[numbers[chosen]].hold_replicas("default")
            if await is_written_durably(connection, late):
                acknowledged.append(late)
            promoted = await promote(port_of, rows, *rest)
            nodes.running[numbers[chosen]].release_replicas("default")
            return promoted

        monkeypatch.setattr(failover, "_promote", write_then_promote)
        await coordinator.failover([nodes.name(0)])
        connection.close()
        await nodes.stop(0)
        assert await nodes.found([key, *acknowledged]) == [key, *acknowledged]


async def test_a_vbucket_on_its_way_stays_where_it_is_active(tmp_path: Path) -> None:
    """Another node is lost meanwhile. The copy that was to take over has as much, but that one goes on writing."""
    async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=2)
        await nodes.store(KEYS)
        publisher = await coordinator._publisher()
        vbucket = next(VBucketId(vb) for vb in range(VBUCKETS) if nodes.copies(vb)[0] == "active")
        await publisher.publish(lambda config: with_handing_over(config, {vbucket: nodes.name(1)}))
        await nodes.stop(2)
        await coordinator.failover([nodes.name(2)])
        assert nodes.copies(vbucket)[0] == "active"
        assert await nodes.found(KEYS) == KEYS


# --- the admin's password changes, then a node is lost: when it comes back, the others let it in and tell it so -------

NEW_PASSWORD = "another secret for tests"
LOST = 2
HEARD_S_MAX = 30.0


async def fail_over(processes: ClusterProcesses) -> None:
    coordinator = Coordinator(
        [processes.nodes[0].address], replace(processes.login, credentials=Credentials(USER, NEW_PASSWORD))
    )
    try:
        await coordinator.failover([processes.names[LOST]])
    finally:
        coordinator.close()


async def wait_until_it_has_nothing_active(processes: ClusterProcesses) -> None:
    # Started with --user and --password, it has the admin's old password again. That is its own business.
    port = NodePort(processes.nodes[LOST].address, processes.login)
    give_up_s = time.monotonic() + HEARD_S_MAX
    try:
        while active := sum(copy.state == VBucketState.ACTIVE for copy in (await port.copies()).values()):
            assert time.monotonic() < give_up_s, f"{active} vbuckets are active on two nodes"
            await asyncio.sleep(0.1)
    finally:
        port.close()


def test_a_lost_node_hears_that_it_is_out(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, vbuckets=8) as processes:
        processes.form()
        processes.nodes[LOST].kill()
        changed = CliRunner().invoke(
            main,
            ["users", "change", processes.url(0), USER, "--new-password", NEW_PASSWORD],
            env={"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD},
        )
        assert (changed.exit_code, changed.stdout) == (1, f"changed {USER}\n"), changed.output
        assert f"not on {processes.names[LOST]}" in changed.stderr
        asyncio.run(fail_over(processes))
        processes.nodes[LOST].start()
        asyncio.run(wait_until_it_has_nothing_active(processes))

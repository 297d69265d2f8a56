"""Real partitions of a cluster: no acknowledged durable write is lost, and no vbucket has two active nodes.

Three nodes are hosts of a network of the test's own (`support.network`). Each has writers on its own host, which reach
it however it is cut off: so a node that was failed over and does not know it is asked for durable writes all the time.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.durable_writes import (
    BareConnection,
    DurableWriter,
    Write,
    check_never_two_actives,
    check_none_lost,
    vbucket_of,
)
from support.forked_program import run_program
from support.network import Network, why_not
from support.node_process import PASSWORD, SERVE, USER, NodeProcess

SEED = 29
PARTITIONS = 20
NODES = ("a", "b", "c")
OPERATOR = "o"
VBUCKETS = 16
WRITERS, KEYS = 3, 32
PORT, HTTP_PORT = 11210, 8091
COMMAND_S_MAX = 120.0
ANSWER_S_MAX = 5.0
RECOVERY_S_MAX = 60.0


class PartitionedCluster:
    """Three nodes and an operator, each on a host of its own."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        self.nodes = {
            host: NodeProcess(
                folder / host,
                *("--host", network.address(host), "--port", str(PORT), "--http-port", str(HTTP_PORT), "--insecure"),
                *("--vbuckets", str(VBUCKETS)),
                program=("-m", "support.network", network.namespace(host), *SERVE),
            )
            for host in NODES
        }

    def name(self, host: str) -> str:
        return f"{self.network.address(host)}:{PORT}"

    def run(self, *words: str, hosts: tuple[str, ...] = NODES) -> Any:
        """`headwater cluster` on the operator's host. Returns what it prints."""
        verb, *rest = words
        url = f"couchbase://{','.join(map(self.name, hosts))}/default"
        login = ("--user", USER, "--password", PASSWORD, "--json")
        namespace = self.network.namespace(OPERATOR)
        command = ("-m", "support.network", namespace, "-m", "headwater", "cluster", verb, url, *rest, *login)
        done = run_program(*command, timeout=COMMAND_S_MAX)
        assert done.returncode == 0, f"cluster {' '.join(words)}: {done.stderr}"
        return json.loads(done.stdout)

    def connect(self, host: str) -> BareConnection:
        """To a node, from its own host."""
        sock = self.network.connect(host, host, PORT, timeout_s=ANSWER_S_MAX)
        return BareConnection(sock, USER, PASSWORD, "default")

    def read(self, key: bytes) -> bytes:
        """From the node that has the vbucket active: there must be one, and one only."""
        found = []
        for host in NODES:
            connection = self.connect(host)
            status, value = connection.get(key, vbucket_of(key, VBUCKETS))
            connection.close()
            if status == 0:
                found.append(value)
        assert len(found) == 1, f"{key!r} is active on {len(found)} nodes"
        return found[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PartitionedCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        made = PartitionedCluster(tmp_path, stack.enter_context(Network(*NODES, OPERATOR)))
        for node in made.nodes.values():
            stack.enter_context(node).start()
        made.run("init", "--replicas", "2")
        yield made
    for node in made.nodes.values():
        assert "Traceback" not in node.log(), node.log()[-10_000:]


class Writers:
    """Some on the host of each node."""

    def __init__(self, cluster: PartitionedCluster) -> None:
        self.by_host = {
            host: [
                DurableWriter(
                    host,
                    partial(cluster.connect, host),
                    vbuckets=VBUCKETS,
                    keys=[b"%s-%d-%d" % (host.encode(), number, key) for key in range(KEYS)],
                )
                for number in range(WRITERS)
            ]
            for host in NODES
        }
        self.all = [writer for writers in self.by_host.values() for writer in writers]

    def wait(self, *hosts: str, more: int = 20) -> None:
        """Wait until these nodes have acknowledged some more writes, together."""
        wanted, until_s = self._acknowledged(hosts) + more, time.monotonic() + RECOVERY_S_MAX
        while self._acknowledged(hosts) < wanted:
            assert time.monotonic() < until_s, f"no durable write is acknowledged by {hosts}"
            time.sleep(0.02)

    def _acknowledged(self, hosts: Iterable[str]) -> int:
        return sum(len(writer.acknowledged) for host in hosts for writer in self.by_host[host])


def _write(node: str, *, seqno: int, at_s: float) -> Write:
    return Write(node, 0, b"key", seqno, at_s, at_s + 1, ord(node), seqno)


def test_the_check_of_a_diary() -> None:
    one_after_the_other = [_write("a", seqno=1, at_s=0), _write("a", seqno=2, at_s=2), _write("b", seqno=3, at_s=2.5)]
    assert check_never_two_actives(one_after_the_other) == 2
    for second in (_write("b", seqno=2, at_s=4), _write("b", seqno=3, at_s=0.5)):
        with pytest.raises(AssertionError, match="vbucket 0 has"):
            check_never_two_actives([*one_after_the_other[:2], second])


@pytest.mark.soak
def test_durable_writes_through_partitions(cluster: PartitionedCluster) -> None:
    rng, network, writers = random.Random(SEED), cluster.network, Writers(cluster)
    for writer in writers.all:
        writer.start()
    for number in range(PARTITIONS):
        lost = NODES[number % len(NODES)]
        kept = tuple(host for host in NODES if host != lost)
        for host in NODES:
            writers.wait(host)
        network.cut_off({lost})
        time.sleep(rng.uniform(0, 3))
        match number % 4:
            case 0 | 1:  # It is failed over, and hears of it when the network heals.
                cluster.run("failover", cluster.name(lost), hosts=kept)
                writers.wait(*kept)
                network.heal()
            case 2:  # The network heals while it is failed over.
                healing = threading.Timer(rng.uniform(0, 5), network.heal)
                healing.start()
                cluster.run("failover", cluster.name(lost), hosts=kept)
                healing.join()
            case 3:  # It was short: no node is failed over.
                network.heal()
                continue
        time.sleep(rng.uniform(0, 1))
        cluster.run("add", cluster.name(lost), "--rebalance", hosts=kept)
        print(f"partition {number}: {len(writers.all[0].acknowledged)}", flush=True)
    for host in NODES:
        writers.wait(host)
    for writer in writers.all:
        writer.stop()
    writes = [write for writer in writers.all for write in writer.acknowledged]
    reigns = check_never_two_actives(writes)
    keys = check_none_lost(writers.all, cluster.read)
    unknown = sum(writer.unknown for writer in writers.all)
    print(f"{PARTITIONS} partitions, {len(writes)} acknowledged, {unknown} unknown, {reigns} reigns, {keys} keys")
    assert reigns > VBUCKETS

"""`headwater cluster`: what it prints, as lines and as JSON, and what it says to what can't be done."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest.mock import ANY

import httpx
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.cluster.nodes import NodePort
from support.clusters import LOGIN, VBUCKETS, ClusterProcesses, InProcessNodes, in_process
from support.forked_program import HEADWATER, run_program, start_program
from support.node_process import PASSWORD, USER, NodeProcess, run_serve


async def cluster(*arguments: str) -> Result:
    """The command, in a thread beside the nodes."""
    env = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD, "COLUMNS": "200"}
    return await asyncio.to_thread(CliRunner().invoke, main, ["cluster", *arguments], env=env)


async def done(*arguments: str) -> str:
    result = await cluster(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


async def refused(*arguments: str) -> str:
    result = await cluster(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    [sentence] = result.stderr.splitlines()
    return sentence


def url(nodes: InProcessNodes, *numbers: int) -> str:
    return f"couchbase://{','.join(nodes.name(number) for number in numbers)}/default"


async def test_a_cluster_from_its_making_to_its_last_node(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        here, first, second = url(nodes, 0), nodes.name(0), nodes.name(1)
        assert await done("init", here) == "bucket default is a cluster of 1 node with 1 replica\n"
        added = await done("add", here, second)
        assert added == f"{second} is one of 2 nodes; it gets vbuckets with `headwater cluster rebalance`\n"
        assert "replicas missing: run `headwater cluster rebalance`" in await done("status", here)
        assert await done("rebalance", here) == "4 vbuckets handed over, 8 copies built\n"
        lines = (await done("status", here)).splitlines()
        assert lines[0].startswith(f"bucket default, {VBUCKETS} vbuckets with 1 replica, config ")
        assert lines[1].split() == ["NODE", "HTTP", "ACTIVE", "REPLICA", "BUILDING", "BEHIND"]
        assert [line.split()[0] for line in lines[2:]] == [first, second]
        assert lines[2].split()[2:] == ["4", "4", "0", "0"]
        left = await done("remove", here, second, "--json")
        assert json.loads(left) == {"handed_over": 4, "built": 0}
        status = json.loads(await done("status", here, "--json"))
        assert [node["name"] for node in status["nodes"]] == [first]
        assert status["missing"] == VBUCKETS


async def test_a_failover(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        both, lost = url(nodes, 0, 1), nodes.name(1)
        assert await done("init", both) == "bucket default is a cluster of 2 nodes with 1 replica\n"
        await nodes.stop(1)
        lost_one = await cluster("status", both)
        assert (lost_one.exit_code, "copy of 4 of 8 vbuckets" in lost_one.stdout) == (4, True), lost_one.output
        assert (
            await done("failover", both, lost) == f"{lost} failed over: 4 vbuckets promoted, what was lost is unknown\n"
        )
        await nodes.start(1)
        assert (await done("add", both, lost, "--rebalance")) == f"{lost} is one of 2 nodes\n"


async def test_a_failover_that_loses_vbuckets(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        both, lost = url(nodes, 0, 1), nodes.name(1)
        await done("init", both, "--replicas", "0")
        await nodes.stop(1)
        assert await refused("failover", both, lost) == (
            "Error: 4 vbuckets would be lost, because no other node has them (1, 3, 5, 7). "
            "Start the node again, or give --force to continue without them"
        )
        forced = await done("failover", both, lost, "--force")
        assert forced == (
            f"{lost} failed over: 0 vbuckets promoted, what was lost is unknown; "
            "4 vbuckets had no copy and began again, empty: 1, 3, 5, 7\n"
        )


async def test_what_can_t_be_done(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes:
        here = url(nodes, 0)
        assert await refused("status", here) == (
            f"Error: {nodes.name(0)} is not in a cluster. Create one with `headwater cluster init`"
        )
        await done("init", here)
        assert "is not a node of the cluster. Its nodes are" in await refused("failover", here, "10.9.9.9:11210")
        assert "no node would be left" in await refused("remove", here, nodes.name(0))
        assert "127.0.0.1:1 can't be reached" in await refused("add", here, "127.0.0.1:1")
        assert "names no bucket. Write couchbase://host/bucket" in await refused(
            "status", here.removesuffix("/default")
        )
        assert "the user or the password is wrong" in await refused("status", here, "--password", "wrong")
        assert (await cluster("init", here, "--replicas", "4")).exit_code == 2


async def test_nodes_that_were_told_different_things_are_named(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        everywhere = url(nodes, 0, 1)
        await done("init", everywhere)
        known = nodes.running[0].membership("default").config
        ports = [NodePort(nodes.address(number), LOGIN) for number in (0, 1)]
        newer = replace(known, revision=known.revision + 1)
        # At the same time: nodes take newer configs from each other.
        await asyncio.gather(*(ports[number].publish(replace(newer, coordinator=str(number))) for number in (0, 1)))
        for port in ports:
            port.close()
        told = f"{nodes.name(0)}: another config, left by commands that ran at the same time"
        assert told in await done("status", everywhere)
        await done("rebalance", everywhere)
        assert "another config" not in await done("status", everywhere)


# --- cluster buckets --------------------------------------------------------------------------------------------------


def ask(node: NodeProcess, method: str, path: str, **form: str) -> httpx.Response:
    url = f"{node.http_url}/pools/default{path}"
    return httpx.request(method, url, auth=(USER, PASSWORD), data=form or None, timeout=30)


def config(node: NodeProcess, bucket: str) -> Any:
    return ask(node, "GET", f"/b/{bucket}").raise_for_status().json()


def names(node: NodeProcess) -> list[str]:
    return [bucket["name"] for bucket in ask(node, "GET", "/buckets").json()]


def test_buckets_of_three_nodes(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, vbuckets=8) as cluster:
        first, second, third = cluster.nodes
        cluster.form()
        assert ask(second, "POST", "/buckets", name="travel", numVBuckets="16", replicaNumber="1").status_code == 202
        made = config(third, "travel")
        assert [len(set(row)) for row in made["vBucketServerMap"]["vBucketMap"]] == [2] * 16
        assert {row[0] for row in made["vBucketServerMap"]["vBucketMap"]} == {0, 1, 2}
        assert len({node["nodeUUID"] for node in made["nodesExt"]}) == 3

        # Settings and names are the same everywhere.
        assert ask(third, "POST", "/buckets/travel", flushEnabled="1", replicaNumber="2").status_code == 200
        assert ask(third, "POST", "", clusterName="the lake").status_code == 200
        changed = ask(first, "GET", "/buckets/travel").json()
        assert ("flush" in changed["controllers"], changed["replicaNumber"]) == (True, 2)
        for bucket in ("default", "travel"):
            assert (config(second, bucket)["clusterName"], config(second, bucket)["clusterUUID"]) == (
                "the lake",
                config(first, "default")["clusterUUID"],
            )

        # Without one of the nodes nothing is half done.
        third.kill()
        refused = ask(first, "POST", "/buckets", name="shop")
        assert refused.status_code == 503
        assert f"not on {third.address}: it can't be reached" in refused.json()["errors"]["_"]
        refused = ask(first, "DELETE", "/buckets/travel")
        assert refused.status_code == 503
        assert str(third.address) in refused.json()["errors"]["_"]
        assert (names(first), names(second)) == (["default", "travel"], ["default"])
        third.start()
        assert names(third) == ["default", "travel"]

        # Asked again, the rest is done; and the nodes know each other without any bucket.
        assert ask(first, "DELETE", "/buckets/travel").status_code == 200
        assert ask(second, "DELETE", "/buckets/default").status_code == 200
        assert [names(node) for node in cluster.nodes] == [[], [], []]
        assert ask(third, "POST", "/buckets", name="again", numVBuckets="8").status_code == 202
        assert [names(node) for node in cluster.nodes] == [["again"]] * 3
        assert config(first, "again")["clusterName"] == "the lake"


# --- `headwater serve --nodes`: a whole cluster by one command, which is there again the next time --------------------

OPTIONS = ("--nodes", "2", "--vbuckets", "8", "--user", USER, "--password", PASSWORD, "--json")


def _cluster(command: str, url: str, *arguments: str) -> dict[str, Any]:
    words = ("cluster", command, f"{url}/default", *arguments, "--json", "--user", USER, "--password", PASSWORD)
    done = run_program(*HEADWATER, *words, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _status(url: str) -> dict[str, Any]:
    return _cluster("status", url)


def start_nodes(data: Path, log: IO[str]) -> subprocess.Popen[str]:
    """Each node is a new interpreter, which the command starts as it always does."""
    return start_program(
        *HEADWATER, "serve", "--data", str(data), *OPTIONS, stdout=subprocess.PIPE, stderr=log, text=True
    )


def test_it_is_the_same_cluster_the_next_time_and_goes_on_when_a_node_dies(tmp_path: Path) -> None:
    """Also after a kill -9 of the process that supervises the nodes: they must not hold the data without it."""
    seen = []
    for end in (signal.SIGKILL, signal.SIGINT):
        with (tmp_path / "log").open("a") as log:
            process = start_nodes(tmp_path / "data", log)
        try:
            ready = json.loads(process.stdout.readline())
            status = _status(ready["ready"])
            assert status["settled"]
            seen.append((ready["ready"], status["uuid"], status["revision"]))
            nodes = [os.pidfd_open(_node_pid(process.pid, f"node-{number}")) for number in (1, 2)]
            if end is signal.SIGINT:
                victim = _lose_a_node(process.pid, ready["ready"])
            process.send_signal(end)
            assert process.wait(30) == (0 if end is signal.SIGINT else -end)
            for node in nodes:
                assert select.select([node], [], [], 30)[0], "a node goes on without its supervisor"
                os.close(node)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert seen[0] == seen[1]
    assert sorted(path.name for path in (tmp_path / "data").glob("node-*")) == ["node-1", "node-2"]
    log_text = (tmp_path / "log").read_text()
    assert "Traceback" not in log_text
    assert "INFO" not in log_text, "connections between the nodes would bury the ready line"
    assert f"node {victim} has ended with -9: go on without it with `headwater cluster failover" in log_text
    assert f"node {victim} is running again" in log_text
    assert log_text.count("has ended with") == 2


LOGIN_WORDS = ("--user", USER, "--password", PASSWORD)


def health(url: str, *more: str) -> tuple[int, Any]:
    result = CliRunner().invoke(main, ["health", "--json", url, *LOGIN_WORDS, *more])
    return result.exit_code, json.loads(result.stdout or "{}")


def _lose_a_node(supervisor: int, url: str) -> str:
    victim = url.removeprefix("couchbase://").split(",")[0]
    code, well = health(f"{url}/default")
    assert (code, well["text"]) == (0, "Healthy: 2 nodes answer, every vbucket has its 1 replica"), well
    os.kill(_node_pid(supervisor, "node-1"), signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while (bad := health(url))[0] != 4 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert bad[1]["text"].startswith("No node that can be reached has the active copy of 4 of 8 vbuckets"), bad
    assert [one["check"] for one in bad[1]["findings"]] == ["unserved", "nodes", "unknown-replicas", "unanswered"]
    assert health(url, "--password", "wrong")[0] == 1
    restart = bad[1]["do"].partition("`")[2].partition("`")[0]
    assert restart.startswith("headwater cluster restart-node /"), bad
    assert restart.endswith(victim)
    for code, words in ((0, "is running again"), (1, "is running already")):
        again = CliRunner().invoke(main, restart.split()[1:])
        assert (again.exit_code, words in again.output) == (code, True), again.output
    while (whole := health(url))[0] != 0 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert whole == (0, ANY), whole
    os.kill(_node_pid(supervisor, "node-1"), signal.SIGKILL)
    _cluster("failover", url, victim)
    [left] = _status(url)["nodes"]
    assert (left["active"], left["is_reachable"]) == (8, True)
    code, warned = health(f"{url}/default")
    assert (code, warned["text"]) == (3, "8 replicas missing: losing a node loses documents"), warned
    return victim


def _node_pid(parent: int, folder: str) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    [found] = [int(pid) for pid in children if folder in Path(f"/proc/{pid}/cmdline").read_text()]
    return found


def test_what_is_for_one_node_only(tmp_path: Path) -> None:
    done = run_serve("--data", str(tmp_path), "--nodes", "2", "--upr-port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: --upr-port is for one node. Omit it, or omit --nodes\n"


def test_fewer_nodes_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps([{"port": 1, "http_port": 2}] * 3))
    done = run_serve("--data", str(tmp_path), "--nodes", "2", "--user", USER, "--password", PASSWORD)
    assert done.returncode == 1
    assert "has the data of 3 nodes" in done.stderr

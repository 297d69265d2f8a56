"""`headwater cluster`: what it prints, as lines and as JSON, and what it says to what can't be done."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.cluster.nodes import NodePort
from support.clusters import LOGIN, VBUCKETS, InProcessNodes, in_process
from support.node_process import PASSWORD, USER


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


def test_a_cluster_from_its_making_to_its_last_node(tmp_path: Path) -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_failover(tmp_path: Path) -> None:
    async def run() -> None:
        async with in_process(tmp_path, 2) as nodes:
            both, lost = url(nodes, 0, 1), nodes.name(1)
            assert await done("init", both) == "bucket default is a cluster of 2 nodes with 1 replica\n"
            await nodes.stop(1)
            assert "can't be reached" in await done("status", both)
            assert (
                await done("failover", both, lost)
                == f"{lost} failed over: 4 vbuckets promoted, what was lost is unknown\n"
            )
            await nodes.start(1)
            assert (await done("add", both, lost, "--rebalance")) == f"{lost} is one of 2 nodes\n"

    asyncio.run(run())


def test_a_failover_that_loses_vbuckets(tmp_path: Path) -> None:
    async def run() -> None:
        async with in_process(tmp_path, 2) as nodes:
            both, lost = url(nodes, 0, 1), nodes.name(1)
            await done("init", both, "--replicas", "0")
            await nodes.stop(1)
            assert await refused("failover", both, lost) == (
                "Error: 4 vbuckets would be lost, as no other node has them (1, 3, 5, 7). "
                "Start the node again, or give --force to go on without them"
            )
            forced = await done("failover", both, lost, "--force")
            assert forced == (
                f"{lost} failed over: 0 vbuckets promoted, what was lost is unknown; "
                "4 vbuckets had no copy and began again, empty: 1, 3, 5, 7\n"
            )

    asyncio.run(run())


def test_what_can_t_be_done(tmp_path: Path) -> None:
    async def run() -> None:
        async with in_process(tmp_path, 1) as nodes:
            here = url(nodes, 0)
            assert await refused("status", here) == (
                f"Error: {nodes.name(0)} is in no cluster. Make one with `headwater cluster init`"
            )
            await done("init", here)
            assert "is no node of the cluster. Its nodes are" in await refused("failover", here, "10.9.9.9:11210")
            assert "no node would be left" in await refused("remove", here, nodes.name(0))
            assert "127.0.0.1:1 can't be reached" in await refused("add", here, "127.0.0.1:1")
            assert "names no bucket. Write couchbase://host/bucket" in await refused(
                "status", here.removesuffix("/default")
            )
            assert "the user or the password is wrong" in await refused("status", here, "--password", "wrong")
            assert (await cluster("init", here, "--replicas", "4")).exit_code == 2

    asyncio.run(run())


def test_nodes_that_were_told_different_things_are_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with in_process(tmp_path, 2) as nodes:
            everywhere = url(nodes, 0, 1)
            await done("init", everywhere)
            known = nodes.running[0].membership("default").config
            assert known is not None
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

    asyncio.run(asyncio.wait_for(run(), 60))

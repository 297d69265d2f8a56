"""`headwater replicate`: the proxy from the command line, between a producer and a consumer."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.cli import replicate as command
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.vbuckets import DeleteVBucket, SetVBucket
from headwater.protocol.numbers import VBucketId
from support.clusters import LOGIN, VBUCKETS, InProcessNodes, in_process, soon
from support.fault_proxy import Delay, FaultProxy, Stall, Way
from support.forked_program import HEADWATER, start_program
from support.node_process import PASSWORD, USER, NodeProcess
from support.strict_server import V7_0_5, V8_0_2, ServerVersion, StrictServer

KEYS = [b"key-%d" % number for number in range(40)]
FOLLOWED_S_MAX = 60.0
"""Far beyond what it takes, the start of the command included."""


async def _run(
    *arguments: str, interrupt_when: Callable[[], bool] | None = None, ends_within_s: float = 40
) -> tuple[int, str, str]:
    login = ("--user", USER, "--password", PASSWORD)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_program(*HEADWATER, "replicate", *arguments, *login, **pipes) as process:
        if interrupt_when is not None:
            await soon(interrupt_when, within_s=FOLLOWED_S_MAX)
            process.send_signal(signal.SIGINT)
        output, errors = await asyncio.to_thread(process.communicate, timeout=ends_within_s)
    return process.returncode, output, errors


async def _as_replicas(nodes: InProcessNodes, number: int) -> None:
    connection = await AsyncKvConnection.open(nodes.address(number), LOGIN)
    for vbucket in range(VBUCKETS):
        await connection.request(SetVBucket(vbucket=VBucketId(vbucket), state=VBucketState.REPLICA))
    connection.close()


def _urls(nodes: InProcessNodes, *, source: str | None = None, target: str | None = None) -> list[str]:
    names = {"--from": source or nodes.name(0), "--to": target or nodes.name(1)}
    return [part for option, name in names.items() for part in (option, f"couchbase://{name}/default")]


@pytest.mark.parametrize("version", [V7_0_5, V8_0_2], ids=lambda version: version.name)
async def test_once_copies_what_is_there(tmp_path: Path, version: ServerVersion) -> None:
    """Between nodes that refuse what real servers of this version refuse."""
    async with in_process(tmp_path, 1) as nodes:
        await nodes.store(KEYS)
        await nodes.start_new(bare=True)
        await _as_replicas(nodes, 1)
        strict = [StrictServer(nodes.address(number), version) for number in (0, 1)]
        async with strict[0] as source, strict[1] as target:
            urls = _urls(nodes, source=str(source.address), target=str(target.address))
            code, output, errors = await _run(*urls, "--once", "--json")
        assert (code, errors, source.faults + target.faults) == (0, "", [])
        assert json.loads(output)["changes"] == len(KEYS)
        assert nodes.durable_seqnos(1) == nodes.durable_seqnos(0)
        assert nodes.copies(0) == {0: "active", 1: "replica"}


@pytest.mark.parametrize("way", ["--once", "--takeover"])
async def test_it_ends_when_the_target_has_persisted_everything(tmp_path: Path, way: str) -> None:
    """The last changes are on their way for a while: what the proxy has sent is not what the target has."""

    def late(connection: int) -> list[Delay]:
        return [Delay(Way.TO_SERVER, after_bytes, 0.3) for after_bytes in (8_000, 20_000)] if connection == 0 else []

    async with in_process(tmp_path, 1) as nodes:
        await nodes.store(b"key-%d" % number for number in range(400))
        await nodes.start_new(bare=True)
        await _as_replicas(nodes, 1)
        with FaultProxy(nodes.address(1).port, late) as slow:
            before = nodes.durable_seqnos(0)
            code, _, errors = await _run(*_urls(nodes, target=f"127.0.0.1:{slow.port}"), way)
            assert (code, errors) == (0, "")
            assert nodes.durable_seqnos(1) == before


async def test_a_target_that_does_not_persist_all_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_STUCK_S_MAX", 0.5)
    async with in_process(tmp_path, 1) as nodes:
        await nodes.store(b"key-%d" % number for number in range(400))
        await nodes.start_new(bare=True)
        await _as_replicas(nodes, 1)
        with FaultProxy(nodes.address(1).port, lambda n: [Stall(Way.TO_SERVER, 20_000)] * (n == 0)) as stalled:
            login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
            arguments = ["replicate", *_urls(nodes, target=f"127.0.0.1:{stalled.port}"), "--once"]
            result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=login)
        assert (result.exit_code, result.stdout) == (1, "")
        behind = [
            number for number, seqno in enumerate(nodes.durable_seqnos(0)) if nodes.durable_seqnos(1)[number] < seqno
        ]
        vbuckets = f"{len(behind)} vbucket{'s' * (len(behind) > 1)}"
        assert result.stderr.startswith(
            f"Error: --to has not persisted all of {vbuckets}: the first is vbucket {behind[0]}, at seqno "
            f"{nodes.durable_seqnos(1)[behind[0]]} of {nodes.durable_seqnos(0)[behind[0]]}. Check the log of --to"
        ), result.stderr


async def test_a_takeover_hands_the_vbuckets_over(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes:
        await nodes.store(KEYS)
        await nodes.start_new(bare=True)
        await _as_replicas(nodes, 1)
        code, output, errors = await _run(*_urls(nodes), "--takeover", "--vbuckets", "0-2,5")
        assert (code, errors) == (0, "")
        assert output.startswith("4 vbuckets handed over, ")
        assert [nodes.copies(vbucket) for vbucket in (2, 3)] == [{0: "dead", 1: "active"}, {0: "active", 1: "replica"}]
        assert await nodes.found(KEYS) == KEYS


async def test_it_follows_until_it_is_interrupted(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes:
        await nodes.start_new(bare=True)
        await _as_replicas(nodes, 1)
        service = nodes.running[1].bucket_service("default")

        def has_followed() -> bool:
            return sum(nodes.durable_seqnos(1)) == len(KEYS)

        running = asyncio.create_task(_run(*_urls(nodes), interrupt_when=has_followed))
        await soon(lambda: len(service.receivers) == VBUCKETS)
        await nodes.store(KEYS)
        code, output, errors = await running
        assert (code, output, errors) == (130, "", "Error: interrupted\n")
        assert nodes.durable_seqnos(1) == nodes.durable_seqnos(0)


async def test_what_can_t_be_replicated(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes:
        await nodes.start_new(bare=True)
        for arguments, sentence in {
            ("--once",): "vbucket 0 can't be replicated: it is not active at --from, or no replica at --to. Name",
            ("--vbuckets", "x"): "'x' is not a vbucket. Write numbers and ranges, such as 0-15,20",
            ("--vbuckets", "0-5000"): "'0-5000' is not a valid range of vbuckets",
        }.items():
            login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
            command = ["replicate", *_urls(nodes), *arguments]
            result = await asyncio.to_thread(CliRunner().invoke, main, command, env=login)
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr.count("\n") == 1
            assert result.stderr.startswith(f"Error: {sentence}"), result.stderr


# --- many documents, back and forth -------------------------------------------------------------------------------

MANY_VBUCKETS = 64
COMPARED = ("high_seqno", "num_items", "max_cas", "purge_seqno")


async def _contents(connection: AsyncKvConnection) -> dict[str, str]:
    """What tells two copies of a vbucket apart: how far it is, what it holds, and the newest change in it."""
    details = await connection.statistics("vbucket-details")
    return {name: number for name, number in details.items() if name.rpartition(":")[2] in COMPARED}


async def _set_all(connection: AsyncKvConnection, *requests: type[Any], **fields: Any) -> None:
    for request in requests:
        given = fields if request is SetVBucket else {}
        await connection.request_all([request(vbucket=VBucketId(number), **given) for number in range(MANY_VBUCKETS)])


@pytest.mark.parametrize(
    ("documents", "turns"), [(5_000, 2), pytest.param(1_000_000, 20, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_the_target_is_equal_when_the_command_ends(tmp_path: Path, documents: int, turns: int) -> None:
    """All documents go from one node to the other, and back again, each time into a node that was emptied."""

    async def run(source: NodeProcess, target: NodeProcess) -> None:
        ends = [(node, await AsyncKvConnection.open(node.address, LOGIN)) for node in (source, target)]
        await _set_all(ends[1][1], SetVBucket, state=VBucketState.REPLICA)
        for _ in range(turns):
            (source, at_source), (target, at_target) = ends
            urls = ("--from", f"{source.url}/default", "--to", f"{target.url}/default")
            vbuckets = ("--vbuckets", f"0-{MANY_VBUCKETS - 1}")
            code, output, errors = await _run(*urls, *vbuckets, "--once", "--json", ends_within_s=600)
            copied, expected = await _contents(at_target), await _contents(at_source)
            assert (code, errors) == (0, "")
            assert copied == expected
            assert json.loads(output)["changes"] == documents
            await _set_all(at_source, SetVBucket, state=VBucketState.DEAD)
            await _set_all(at_target, SetVBucket, state=VBucketState.ACTIVE)
            await _set_all(at_source, DeleteVBucket, SetVBucket, state=VBucketState.REPLICA)
            ends.reverse()
        for _, connection in ends:
            connection.close()

    options = ("--vbuckets", str(MANY_VBUCKETS))
    with NodeProcess(tmp_path / "a", *options) as source, NodeProcess(tmp_path / "b", *options, "--bare") as target:
        source.start()
        target.start()
        login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
        arguments = ["load", f"{source.url}/default", "--generate", str(documents)]
        assert CliRunner().invoke(main, arguments, env=login).exit_code == 0
        asyncio.run(run(source, target))

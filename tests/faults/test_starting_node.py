"""A node that is not ready yet: it says so, and it can be stopped, which leaves everything as it was.

The kernels are compiled again for most of these, so that a start takes long enough to be looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headwater.node.node import Node
from headwater.node.options import NodeOptions
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION
from support.acknowledged_writes import statistics
from support.fault_proxy import free_port
from support.node_process import PASSWORD, USER, NodeProcess, StartNode, run_serve, serve_command

FEW_VBUCKETS = ("--vbuckets", "16")
WAIT_S_MAX = 60.0


@contextmanager
def starting(data: Path, http_port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A node on a machine that has no compiled kernels, for as long as it compiles."""
    kernels = data.with_name("kernels")
    shutil.rmtree(kernels, ignore_errors=True)
    ports = ("--port", "0", "--http-port", str(http_port))
    command = serve_command("--data", str(data), *ports, "--user", USER, "--password", PASSWORD, *options)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "NUMBA_CACHE_DIR": str(kernels), "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(url: str) -> httpx.Response:
    """The first answer there is."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            return httpx.get(url, timeout=WAIT_S_MAX)
        except httpx.ConnectError:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def branches(node: NodeProcess) -> dict[str, str]:
    with node.connect() as connection:
        details = statistics(connection, "vbucket-details")
    return {name: value for name, value in details.items() if name.endswith(":uuid")}


def test_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with starting(tmp_path / "data", port, *FEW_VBUCKETS) as process:
        assert answer(f"{url}/healthz").status_code == 200
        for path in ("/readyz", "/pools", "/ui/", "/metrics"):
            refusal = httpx.get(f"{url}{path}", timeout=WAIT_S_MAX)
            assert refusal.status_code == 503
            assert refusal.json()["message"].startswith("The node is not ready: it ")
        assert process.poll() is None
        check_says_that_it_compiles(read_line(process))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_stop_is_a_clean_one(start_node: StartNode, number: signal.Signals) -> None:
    node = start_node(*FEW_VBUCKETS, "--bucket", "default", "--bucket", "other")
    with node.connect() as connection:
        connection.request(Set(key=b"k", value=b"1", collection_id=DEFAULT_COLLECTION))
    before = branches(node)
    assert node.stop() == 0
    port = free_port()
    with starting(node.data, port) as process:
        answer(f"http://127.0.0.1:{port}/healthz")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=WAIT_S_MAX)
        assert (process.returncode, stdout) == (0, "")
        assert "Traceback" not in stderr
    node.start()
    assert branches(node) == before


def test_a_copy_stays_a_copy_where_the_start_is_given_up(start_node: StartNode, tmp_path: Path) -> None:
    """Its original may have gone on, so it must begin a branch of its own, however often it is started in vain."""
    node = start_node(*FEW_VBUCKETS)
    before = branches(node)
    assert node.stop() == 0
    copy = tmp_path / "copy" / "data"
    shutil.copytree(node.data, copy)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = ("--port", "0", "--http-port", str(taken.getsockname()[1]))
        assert run_serve("--data", str(copy), *ports, "--user", USER, "--password", PASSWORD).returncode == 1
    with NodeProcess(copy) as copied:
        after = branches(copied.start())
    assert all(after[name] != before[name] for name in before)


async def test_a_start_that_is_cancelled_leaves_its_buckets_in_order(tmp_path: Path) -> None:
    """Those that are open by then are closed, and so is the one that is being opened."""
    names = tuple(f"bucket-{number}" for number in range(8))
    options = NodeOptions(data=tmp_path, port=0, http_port=0, buckets=names, vbuckets=64, user=USER, password=PASSWORD)

    def failover_logs(node: Node) -> list[object]:
        stored = [node.bucket_service(name).bucket.vbuckets.facts for name in names]
        return [facts.failover_log for bucket in stored for facts in bucket if facts is not None]

    first = Node(options)
    await first.start()
    before = failover_logs(first)
    await first.stop()
    for place in (1, 4, 8):
        node = Node(options)
        starting = asyncio.create_task(node.start())
        while not starting.done() and f" {place} of 8" not in node.why_not_ready:
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled():
            await node.stop()
    last = Node(options)
    await last.start()
    assert failover_logs(last) == before
    await last.stop()


def test_a_cluster_that_starts_can_be_stopped(tmp_path: Path) -> None:
    """Its log is JSON here, so that what is said of compiling is seen in both forms."""
    options = ("--nodes", "2", "--log-format", "json")
    with starting(tmp_path / "data", free_port(), *FEW_VBUCKETS, *options) as process:
        check_says_that_it_compiles(json.loads(read_line(process))["message"])
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=WAIT_S_MAX)
        assert process.returncode == 0
        assert "Traceback" not in stderr


def read_line(process: subprocess.Popen[str]) -> str:
    return process.stderr.readline()


def check_says_that_it_compiles(line: str) -> None:
    assert "compiling the kernels of this command" in line
    assert "`headwater kernels`" in line


def test_nothing_is_said_where_nothing_is_compiled(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    assert node.stop() == 0
    node.start()
    assert "compiling" not in node.log()

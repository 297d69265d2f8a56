"""Two nodes with a replica of each other, and how one of them is lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import headwater as hw
from demo.commands import BUCKET, HEADWATER, PASSWORD, USER, CommandFailed, headwater, started

VBUCKETS = 128
"""The parts of the bucket. Couchbase Server has 1024, or 128 since version 8; fewer make the demo quicker."""


@dataclass(slots=True)
class Node:
    """`headwater serve` in a process of its own."""

    process: subprocess.Popen[str]
    data: Path
    log: Path
    address: str = ""
    http: str = ""

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CommandFailed(f"a node did not start: {self.log.read_text().strip()}")
        ready = json.loads(line)
        self.address, self.http = ready["ready"].removeprefix("couchbase://"), ready["http"]

    @property
    def url(self) -> str:
        return f"couchbase://{self.address}/{BUCKET}"


class Cluster:
    """Each node is active for half of the vbuckets, as the parts of a bucket are called, and has a copy of the rest."""

    def __init__(self, first: Node, second: Node) -> None:
        self.first = first
        self.second = second

    @property
    def url(self) -> str:
        """Of both, so that a client finds the one that is left."""
        return f"couchbase://{self.first.address},{self.second.address}/{BUCKET}"

    def form(self) -> None:
        for node in (self.first, self.second):
            node.wait_until_ready()
        headwater("cluster", "init", self.url, "--replicas", "1")

    def second_again(self) -> str:
        """The command that starts the second node where it was, as it is known by its address."""
        port, http_port = (address.rpartition(":")[2] for address in (self.second.address, self.second.http))
        return f"headwater serve --data {self.second.data} --port {port} --http-port {http_port}"

    def on_first(self, keys: Iterable[str]) -> str:
        """The first of these keys that the first node is active for."""
        with hw.blocking.connect(self.url, user=USER, password=PASSWORD) as client:
            nodes = client.cluster_map
        vbuckets = ((key, hw.vbucket_of(key.encode(), nodes.vbuckets)) for key in keys)
        return next(key for key, vbucket in vbuckets if str(nodes.address_of(vbucket)) == self.first.address)

    def hold_replicas(self) -> None:
        """From now on the first node's changes are nowhere else."""
        headwater("drill", "hold-replicas", self.second.url)

    def kill_first(self) -> None:
        self.first.process.kill()
        self.first.process.wait()

    def fail_over(self) -> None:
        """The second node goes on alone, with what it has."""
        headwater("cluster", "failover", self.second.url, self.first.address)


@contextmanager
def started_cluster(folder: Path) -> Iterator[Cluster]:
    """The nodes are being started, and end with the block."""
    with ExitStack() as running:
        yield Cluster(*(running.enter_context(_started_node(folder / name)) for name in ("node-1", "node-2")))


@contextmanager
def _started_node(data: Path) -> Iterator[Node]:
    ports = ("--port", "0", "--http-port", "0")
    command = [*HEADWATER, "serve", "--data", str(data), "--vbuckets", str(VBUCKETS), *ports, "--json"]
    path = data.with_name(f"{data.name}.log")
    with path.open("w") as log, started(command, stderr=log) as process:
        yield Node(process, data, path)

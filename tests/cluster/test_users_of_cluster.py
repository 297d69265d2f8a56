"""`headwater users` against real nodes of a cluster: all have the users, and the one that is away is told of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import AuthenticationFailed
from headwater.protocol.sasl import Credentials
from support.clusters import ClusterProcesses
from support.node_process import PASSWORD, USER, NodeProcess

ADD = ("kim", "--role", "data_reader[default]", "--new-password", "violets")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("cluster"), 3, vbuckets=4) as processes:

        async def form() -> None:
            async with processes.coordinator(0, 1, 2) as coordinator:
                await coordinator.init(replicas=1)

        asyncio.run(form())
        yield processes


def run(processes: ClusterProcesses, command: str, *arguments: str, seed: int = 0) -> Result:
    login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD, "HEADWATER_NEW_PASSWORD": None}
    return CliRunner().invoke(main, ["users", command, processes.url(seed), *arguments], env=login)


def done(processes: ClusterProcesses, command: str, *arguments: str, seed: int = 0) -> str:
    result = run(processes, command, *arguments, seed=seed)
    assert result.exit_code == 0, result.output
    return result.stdout


def log_in(node: NodeProcess, password: str) -> None:
    KvConnection.open(node.address, Login(credentials=Credentials("kim", password), bucket="default")).close()


def test_a_user_is_on_all_nodes(processes: ClusterProcesses) -> None:
    assert done(processes, "add", *ADD) == "added kim on 3 of 3 nodes\n"
    for node in processes.nodes:
        log_in(node, "violets")
    assert "exists already" in run(processes, "add", *ADD).stderr
    assert done(processes, "change", "kim", "--new-password", "daisies", seed=1) == "changed kim on 3 of 3 nodes\n"
    for node in processes.nodes:
        log_in(node, "daisies")
    listed = done(processes, "list")
    assert "kim" in listed
    assert "@cluster" not in listed
    assert all(line.endswith("3 of 3") for line in listed.splitlines()[1:])
    assert done(processes, "remove", "kim", seed=2) == "removed kim on 3 of 3 nodes\n"
    for node in processes.nodes:
        with pytest.raises(AuthenticationFailed):
            log_in(node, "daisies")
    assert "there is no user 'kim'" in run(processes, "remove", "kim").stderr


def test_a_node_that_is_away_is_told_of_and_made_up_for(processes: ClusterProcesses) -> None:
    away = processes.nodes[2]
    missing = away.http_url.removeprefix("http://")
    away.kill()
    result = run(processes, "add", *ADD)
    assert (result.exit_code, result.stdout) == (1, "added kim on 2 of 3 nodes\n")
    assert result.stderr.startswith(f"Error: not done on {missing}: {missing} can't be reached")
    assert result.stderr.count("\n") == 1
    away.start()

    found = json.loads(done(processes, "list", "--json"))["users"]
    assert [(user["user"], len(user["nodes"])) for user in found] == [(USER, 3), ("kim", 2)]
    told = done(processes, "add", *ADD)
    assert told.startswith("added kim on 1 of 3 nodes; 127.0.0.1:")
    assert told.endswith(" had it already\n")
    log_in(away, "violets")
    assert done(processes, "remove", "kim", "--this-node-only", seed=2) == "removed kim\n"
    assert "; " + missing + " did not have it" in done(processes, "remove", "kim")


def test_the_last_admin_stays_everywhere(processes: ClusterProcesses) -> None:
    result = run(processes, "remove", USER)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("the node would have no admin left") == 3

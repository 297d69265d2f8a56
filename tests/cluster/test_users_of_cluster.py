"""Users of a cluster, by the command and by the SDK: all nodes have them, also those that were away or join later."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from couchbase.exceptions import UserNotFoundException
from couchbase.management.users import Group, Role, User

from headwater.cli import main
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import AuthenticationFailed
from headwater.node.auth import users as node_users
from headwater.protocol.sasl import Credentials
from support.clusters import ClusterProcesses, in_process
from support.node_process import PASSWORD, USER, NodeProcess
from support.sdk import connected

ADD = ("kim", "--group", "readers", "--new-password", "violets")
HEARD_S_MAX = 30.0


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("cluster"), 3, vbuckets=4) as processes:
        processes.form()
        assert done(processes, "put-group", "readers", "--role", "data_reader[default]") == "stored readers\n"
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
    assert done(processes, "add", *ADD) == "added kim\n"
    for node in processes.nodes:
        log_in(node, "violets")
    assert "already exists" in run(processes, "add", *ADD, seed=1).stderr
    assert done(processes, "change", "kim", "--new-password", "daisies", seed=1) == "changed kim\n"
    for node in processes.nodes:
        log_in(node, "daisies")
    listed = done(processes, "list")
    assert "kim" in listed
    assert "@cluster" not in listed
    assert all(line.endswith("3 of 3") for line in listed.splitlines()[1:])
    assert done(processes, "remove", "kim", seed=2) == "removed kim\n"
    for node in processes.nodes:
        with pytest.raises(AuthenticationFailed):
            log_in(node, "daisies")
    assert "there is no user 'kim'" in run(processes, "remove", "kim").stderr


def test_the_user_manager_of_an_sdk_changes_all_nodes(processes: ClusterProcesses) -> None:
    """It goes to any node with each request, and takes for granted what it has been answered by another one."""
    with connected(processes.url(0, 1, 2), USER, PASSWORD) as cluster:
        manager = cluster.users()
        manager.upsert_group(Group(name="lake", description="Who reads", roles={Role("data_reader", bucket="*")}))
        for number in range(4):
            user = User(username=f"sdk-{number}", password="violets", groups={"lake"}, roles=set())
            manager.upsert_user(user)
            assert manager.get_user(user.username).user.groups == {"lake"}
            manager.drop_user(user.username)
            with pytest.raises(UserNotFoundException):
                manager.get_user(user.username)


def test_a_node_that_is_away_is_named_and_hears_of_it_later(processes: ClusterProcesses) -> None:
    away = processes.nodes[2]
    away.kill()
    result = run(processes, "add", *ADD)
    assert (result.exit_code, result.stdout) == (1, "added kim\n")
    assert result.stderr.startswith(f"Error: not on {away.address}: {away.address} can't be reached")
    assert result.stderr.count("\n") == 1
    away.start()
    _wait_until(lambda: can_log_in(away, "violets"))
    assert done(processes, "remove", "kim", seed=2) == "removed kim\n"


def test_a_node_that_joins_later_has_the_users_too(processes: ClusterProcesses, tmp_path: Path) -> None:
    done(processes, "add", *ADD)
    with ClusterProcesses(tmp_path, 1, vbuckets=4) as joining:
        (new,) = joining.nodes
        assert run(joining, "add", "own", *ADD[1:]).exit_code == 1, "there is no group here"
        assert run(joining, "add", "own", "--role", "admin", "--new-password", "violets").exit_code == 0

        async def join_and_leave(leaves: bool) -> None:
            async with processes.coordinator(0) as coordinator:
                await (coordinator.remove(str(new.address)) if leaves else coordinator.add(new.address))

        asyncio.run(join_and_leave(leaves=False))
        _wait_until(lambda: can_log_in(new, "violets"))
        listed = json.loads(done(processes, "list", "--json"))["users"]
        assert sorted((user["user"], len(user["nodes"])) for user in listed) == [(USER, 4), ("kim", 4)]
        asyncio.run(join_and_leave(leaves=True))
    done(processes, "remove", "kim")


async def test_a_node_of_an_older_version_is_named(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        async with nodes.coordinator(0, 1) as coordinator:
            await coordinator.init(replicas=0)
        nodes.running[1].bucket_service("default").node_statistics.clear()
        missing = await nodes.running[0].change_users(lambda users: users.put_group(node_users.Group(name="lake")))
        assert missing == {nodes.name(1): "its version does not share users"}


def test_the_last_admin_stays(processes: ClusterProcesses) -> None:
    result = run(processes, "remove", USER)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("the node would have no admin left") == 1


def can_log_in(node: NodeProcess, password: str) -> bool:
    try:
        log_in(node, password)
    except AuthenticationFailed:
        return False
    return True


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HEARD_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, "the node has not heard of the change"
        time.sleep(0.1)

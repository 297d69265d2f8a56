"""The plug-in as others use it: runs of pytest with tests of their own, on real nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[2]
NODE_TESTS = """
    import pytest

    import headwater
    from headwater.client.changes import Deletion, Mutation, Rollback
    from headwater.errors import HeadwaterError
    from headwater.testing.nursery import NodeFailed

    def test_it_is_ready_with_nothing_in_it(headwater_node):
        # The first one waits for everything to be imported.
        with headwater_node.connect() as client:
            assert list(client.changes(end="now")) == []
            assert client.cluster_map.vbuckets == 16
        assert "Traceback" not in headwater_node.log

    def test_the_next_one_is_ready_in_under_a_second(headwater_node):
        assert headwater_node.process.ready_s < 1.0

    def test_documents(headwater_node):
        headwater_node.write({"fox": {"legs": 4}, "raw": b"\\xff"})
        headwater_node.remove("raw")
        with headwater_node.connect() as client:
            found = {change.key: change for change in client.changes(end="now")}
        assert found["fox"].json() == {"legs": 4}
        assert isinstance(found["raw"], Deletion)
        assert headwater_node.high_seqnos()[headwater_node.vbucket_of("fox")] == 1

    def test_keys_and_values_of_bytes(headwater_node):
        odd = b"no \\xff utf-8"
        headwater_node.write({odd: bytearray(b"\\x00"), b"fox": 1, "owl": memoryview(b"hoot")})
        with headwater_node.connect() as client:
            found = {change.key_bytes: change for change in client.changes(end="now")}
        assert {key: change.value for key, change in found.items()} == {odd: b"\\x00", b"fox": b"1", b"owl": b"hoot"}
        assert found[odd].vbucket == headwater_node.vbucket_of(odd) == headwater_node.vbucket_of(found[odd].key)
        headwater_node.write({found[odd].key: 2})
        headwater_node.remove(odd, b"fox", "owl")
        with headwater_node.connect() as client:
            removed = [change.key_bytes for change in client.changes(end="now") if isinstance(change, Deletion)]
        assert sorted(removed) == sorted(found)

    def test_the_login_is_needed(headwater_node):
        with pytest.raises(HeadwaterError):
            with headwater.blocking.connect(headwater_node.url, user=headwater_node.user, password="wrong"):
                pass

    def test_collections(headwater_node):
        headwater_node.create_collection("shop.orders", maxTTL=60)
        headwater_node.write({"o1": 1}, collection="shop.orders")
        with headwater_node.connect() as client:
            [change] = [c for c in client.changes(end="now", collections=["shop.orders"]) if isinstance(c, Mutation)]
        assert (change.scope, change.collection, change.key) == ("shop", "orders", "o1")
        headwater_node.drop_collection("shop.orders")
        headwater_node.drop_collection("shop")

    def test_a_rollback(headwater_node):
        for number in (1, 2, 3):
            headwater_node.write({"fox": number})
        vbucket = headwater_node.vbucket_of("fox")
        with headwater_node.connect() as client:
            changes = client.changes()
            assert next(changes).json() == 3
            assert headwater_node.rollback(vbucket, 1) == 1
            rollback = next(changes)
            assert isinstance(rollback, Rollback) and rollback.seqno <= 1
            assert next(changes).json() == 1

    def test_a_cut(headwater_node):
        headwater_node.write({"fox": 1})
        with headwater_node.connect() as client:
            changes = client.changes()
            assert next(changes).json() == 1
            assert headwater_node.cut_connections() >= 1
            headwater_node.write({"fox": 2})
            assert next(changes).json() == 2
        assert "cuts all connections of the bucket" in headwater_node.log

    def test_a_pause(headwater_node):
        headwater_node.write({"fox": 1})
        headwater_node.pause()
        with pytest.raises(HeadwaterError):
            from headwater.client.settings import Timeouts
            with headwater_node.connect(timeouts=Timeouts(connect_s=0.3, answer_s=0.3)):
                pass
        headwater_node.resume()
        with headwater_node.connect() as client:
            assert len(list(client.changes(end="now"))) == 1

    @pytest.mark.parametrize("how", ["restart", "kill"])
    def test_data_and_ports_outlive_the_process(headwater_node, how):
        headwater_node.write({"fox": 1})
        url = headwater_node.url
        if how == "restart":
            headwater_node.restart()
        else:
            headwater_node.kill()
            headwater_node.kill()
            headwater_node.start()
        assert headwater_node.url == url
        with headwater_node.connect() as client:
            assert [change.key for change in client.changes(end="now")] == ["fox"]

    def test_it_is_not_started_twice(headwater_node):
        with pytest.raises(NodeFailed, match="running"):
            headwater_node.start()

    @pytest.mark.headwater(vbuckets=4, buckets=("a", "b"), options=("--history-seconds", "0"))
    def test_another_kind_of_node(headwater_node):
        assert headwater_node.url.endswith("/a")
        headwater_node.write({"fox": 1})
        with headwater_node.connect("b") as client:
            assert list(client.changes(end="now")) == []

    @pytest.mark.headwater(options=("--vbuckets", "3"))
    @pytest.mark.xfail(raises=NodeFailed, strict=True)
    def test_a_node_that_can_t_start(headwater_node):
        pass
"""
CLUSTER_TESTS = """
    import asyncio

    import pytest

    import headwater
    from headwater.client.changes import Mutation, Rollback
    from headwater.testing.nursery import NodeFailed

    def keys_of(cluster):
        with cluster.connect() as client:
            return {change.key for change in client.changes(end="now") if isinstance(change, Mutation)}

    def test_a_failover_loses_nothing_that_was_replicated(headwater_cluster):
        headwater_cluster.write({f"k{n}": n for n in range(40)})
        headwater_cluster.wait_until_replicated()
        headwater_cluster.failover()
        assert keys_of(headwater_cluster) == {f"k{n}" for n in range(40)}

    def test_a_failover_takes_back_what_was_not(headwater_cluster):
        headwater_cluster.write({"fox": 1})
        headwater_cluster.wait_until_replicated()
        with headwater_cluster.connect() as client:
            changes = client.changes()
            assert next(changes).json() == 1
            headwater_cluster.lose({"fox": 2})
        assert keys_of(headwater_cluster) == {"fox"}
        with headwater_cluster.connect() as client:
            assert [change.json() for change in client.changes(end="now")] == [1]

    def test_a_consumer_has_seen_what_is_lost(headwater_cluster):
        headwater_cluster.write({"fox": 1})
        headwater_cluster.wait_until_replicated()
        lost = headwater_cluster.active_node(headwater_cluster.nodes[0].vbucket_of("fox"))
        for node in headwater_cluster.nodes:
            node.hold_replicas()
        headwater_cluster.write({"fox": 2})
        with headwater_cluster.connect() as client:
            changes = client.changes()
            while next(changes).json() != 2:
                pass
            headwater_cluster.failover(lost)
            assert isinstance(next(changes), Rollback)

    def test_a_rollback_reaches_a_consumer(headwater_cluster):
        for number in (1, 2):
            headwater_cluster.write({"fox": number})
        headwater_cluster.wait_until_replicated()
        vbucket = headwater_cluster.nodes[0].vbucket_of("fox")
        with headwater_cluster.connect() as client:
            changes = client.changes()
            assert next(changes).json() == 2
            headwater_cluster.rollback(vbucket, 1)
            assert isinstance(next(changes), Rollback)

    def test_a_node_that_was_lost_comes_back(headwater_cluster):
        headwater_cluster.write({f"k{n}": n for n in range(40)})
        headwater_cluster.wait_until_replicated()
        lost, other = headwater_cluster.nodes
        headwater_cluster.failover(lost)
        headwater_cluster.write({"fox": 1, b"\\xff": 2})
        with pytest.raises(NodeFailed, match="no node would be left"):
            headwater_cluster.failover(other)
        assert other.process.is_running
        headwater_cluster.bring_back(lost)
        status = headwater_cluster.status()
        assert (status.settled, status.missing, [node.active for node in status.nodes]) == (True, 0, [8, 8])
        headwater_cluster.wait_until_replicated()
        headwater_cluster.failover(other)
        assert keys_of(headwater_cluster) == {*(f"k{n}" for n in range(40)), "fox", "\\udcff"}

    @pytest.mark.headwater(replicas=0)
    def test_a_failover_that_would_lose_vbuckets_kills_no_node(headwater_cluster):
        with pytest.raises(NodeFailed, match="8 vbuckets would be lost"):
            headwater_cluster.failover()
        assert all(node.process.is_running for node in headwater_cluster.nodes)

    def test_inside_of_an_event_loop(headwater_cluster):
        async def scenario():
            headwater_cluster.write({"fox": 1})
            headwater_cluster.wait_until_replicated()
            assert headwater_cluster.status().settled
            headwater_cluster.failover()
            async with headwater.connect(
                headwater_cluster.url, user=headwater_cluster.user, password=headwater_cluster.password
            ) as client:
                assert [change.key async for change in client.changes(end="now")] == ["fox"]

        asyncio.run(scenario())

    @pytest.mark.headwater(nodes=3, replicas=2, vbuckets=8)
    def test_another_kind_of_cluster(headwater_cluster):
        status = headwater_cluster.status()
        assert (len(status.nodes), status.replicas, status.vbuckets) == (3, 2, 8)
"""


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(tests)
    return pytester.runpytest_subprocess("-p", "headwater.testing.plugin", "-q", *options, timeout=240)


CACHE = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
"""Where compiled kernels are. The runs have a home of their own."""


@pytest.fixture(autouse=True)
def _only_our_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named in each run, whether this environment has it installed as an entry point or not."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def test_nodes_and_clusters(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_clusters=CLUSTER_TESTS)
    run(pytester, NODE_TESTS, "--strict-markers").assert_outcomes(passed=21, xfailed=1)


def test_nothing_is_imported_where_it_is_not_used(pytester: pytest.Pytester) -> None:
    tests = """
        import sys

        def test_nothing():
            assert [name for name in ("numba", "numpy", "pyarrow", "headwater.client") if name in sys.modules] == []
    """
    run(pytester, tests).assert_outcomes(passed=1)


def test_markers_that_can_not_be_meant(pytester: pytest.Pytester) -> None:
    said = {
        ("node", "vbucket=4"): "takes vbuckets, buckets, options by name here, and not*vbucket",
        ("node", 'buckets="travel"'): "buckets is 'travel', which is no tuple of strings. Write buckets=(\"travel\",)",
        ("node", "buckets=()"): "buckets is (), which is no tuple of strings",
        ("cluster", 'options="--bare"'): "options is '--bare', which is no tuple of strings",
        ("cluster", "nodes=1"): "1 node can't hold 1 replica beside the active copies*Give replicas=0",
        ("cluster", "nodes=2, replicas=3"): "2 nodes can't hold 3 replicas",
    }
    tests = [
        f"@pytest.mark.headwater({asked})\ndef test_{number}(headwater_{fixture}):\n    pass\n"
        for number, (fixture, asked) in enumerate(said)
    ]
    result = run(pytester, "\n".join(["import pytest", *tests]))
    result.assert_outcomes(errors=len(said))
    result.stdout.fnmatch_lines([f"*{sentence}*" for sentence in said.values()])


def test_a_test_that_fails_shows_the_logs(pytester: pytest.Pytester) -> None:
    tests = """
        def test_one(headwater_node):
            headwater_node.kill()
            headwater_node.start()
            assert False

        def test_two(headwater_cluster):
            headwater_cluster.nodes[1].kill()
            headwater_cluster.nodes[1].start()
            assert False

        def test_that_passes(headwater_node):
            pass
    """
    result = run(pytester, tests)
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        ["*- Log of headwater_node -*", "*begins a new branch*", "*- Log of headwater_cluster.nodes?1? -*"]
    )


def test_a_dead_nursery_is_replaced(pytester: pytest.Pytester) -> None:
    tests = """
        import os, signal
        import pytest
        from headwater.testing.nursery import NodeFailed

        def test_one(headwater_node, _headwater_nursery):
            os.kill(_headwater_nursery._process.pid, signal.SIGKILL)
            _headwater_nursery._process.wait()

        def test_two(headwater_node):
            headwater_node.write({"fox": 1})

        def test_three(headwater_node, _headwater_nursery, monkeypatch):
            os.kill(_headwater_nursery._process.pid, signal.SIGKILL)
            monkeypatch.setattr(_headwater_nursery._process, "poll", lambda: None)
            headwater_node.kill()
            with pytest.raises(NodeFailed, match="has ended with exit code -9"):
                headwater_node.start()
            headwater_node.start()
    """
    run(pytester, tests).assert_outcomes(passed=3)


def test_nodes_do_not_outlive_a_run_that_is_killed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, signal

        def test_it(headwater_node):
            with open("address", "w") as file:
                file.write(str(headwater_node.address))
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "headwater.testing.plugin", "-q", str(pytester.path)]
    subprocess.run(command, cwd=pytester.path, check=False, capture_output=True, timeout=120)
    host, _, port = (pytester.path / "address").read_text().rpartition(":")
    code = (
        "import socket, sys, time\n"
        "for _ in range(200):\n"
        "    try:\n"
        "        socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()\n"
        "    except ConnectionError:\n"
        "        sys.exit(0)\n"
        "    time.sleep(0.05)\n"
        "sys.exit('the node lives')\n"
    )
    subprocess.run([sys.executable, "-c", code, host, port], check=True)


def test_the_package_names_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, module)] = project["entry-points"]["pytest11"].items()
    assert (name, import_module(module).MARKER) == ("headwater", "headwater")

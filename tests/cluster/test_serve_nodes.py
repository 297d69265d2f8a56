"""`headwater serve --nodes`: a whole cluster by one command, which is there again the next time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

from support.forked_program import HEADWATER, run_program, start_program
from support.node_process import PASSWORD, USER, run_serve

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


def test_it_is_the_same_cluster_the_next_time(tmp_path: Path) -> None:
    """Also after a kill -9 of the process that supervises the nodes: they must not hold the data without it."""
    seen = []
    for end in (signal.SIGKILL, signal.SIGINT):
        with (tmp_path / "log").open("a") as log:
            process = start_nodes(tmp_path / "data", log)
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            status = _status(ready["ready"])
            assert status["settled"]
            seen.append((ready["ready"], status["uuid"], status["revision"]))
            nodes = [os.pidfd_open(_node_pid(process.pid, f"node-{number}")) for number in (1, 2)]
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


def test_the_others_go_on_when_a_node_dies(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        process = start_nodes(tmp_path / "data", log)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["ready"]
        victim = url.removeprefix("couchbase://").split(",")[0]
        os.kill(_node_pid(process.pid, "node-1"), signal.SIGKILL)
        _cluster("failover", url, victim)
        [left] = _status(url)["nodes"]
        assert (left["active"], left["is_reachable"]) == (8, True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    log_text = (tmp_path / "log").read_text()
    assert f"node {victim} has ended with -9: go on without it with `headwater cluster failover" in log_text
    assert log_text.count("has ended with") == 1


def _node_pid(parent: int, folder: str) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    [found] = [int(pid) for pid in children if folder in Path(f"/proc/{pid}/cmdline").read_text()]
    return found


def test_what_is_for_one_node_only(tmp_path: Path) -> None:
    done = run_serve("--data", str(tmp_path), "--nodes", "2", "--upr-port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: --upr-port is for one node. Leave it out, or leave --nodes out\n"


def test_fewer_nodes_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps([{"port": 1, "http_port": 2}] * 3))
    done = run_serve("--data", str(tmp_path), "--nodes", "2", "--user", USER, "--password", PASSWORD)
    assert done.returncode == 1
    assert "has the data of 3 nodes" in done.stderr

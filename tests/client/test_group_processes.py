"""Members in processes of their own at a real node: they share, take over from one that was killed, and leave."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.forked_program import start_program
from support.group_member_process import VBUCKETS, SharedLog
from support.node_process import NodeProcess

WAIT_S_MAX = 60.0
"""Far beyond what anything here takes."""


class GroupLog:
    """What the members have written so far, and what follows from it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reading(self) -> dict[str, set[int]]:
        """What each member reads now. A vbucket that two have read at once fails the test."""
        reading: dict[str, set[int]] = defaultdict(set)
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines():
            entry = json.loads(line)
            member, vbuckets = entry["member"], set(entry["vbuckets"])
            match entry["event"]:
                case "began":
                    for other, taken in reading.items():
                        assert not taken & vbuckets, f"{member} took {taken & vbuckets} while {other} read them"
                    reading[member] |= vbuckets
                case "ended":
                    reading[member] -= vbuckets
                case "killed" | "left":
                    del reading[member]
        return dict(reading)

    def wait_for(self, shares: list[int]) -> dict[str, set[int]]:
        """Until everything is read, in such shares."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < deadline_s:
            reading = self.reading()
            if sorted(map(len, reading.values())) == shares:
                assert set().union(*reading.values()) == set(range(VBUCKETS))
                return reading
            time.sleep(0.05)
        raise AssertionError(f"the shares are {[len(read) for read in self.reading().values()]}, not {shares}")


StartMember = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def log(tmp_path: Path) -> GroupLog:
    return GroupLog(tmp_path / "group.log")


@pytest.fixture
def start_member(group_node: NodeProcess, log: GroupLog) -> Iterator[StartMember]:
    group = log.path.parent.name

    with ExitStack() as stack:

        def start(name: str) -> subprocess.Popen[bytes]:
            arguments = (f"{group_node.url}/default", group, name, str(log.path))
            process = start_program("-m", "support.group_member_process", *arguments)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def test_members_share_take_over_and_leave(start_member: StartMember, log: GroupLog) -> None:
    processes = {name: start_member(name) for name in ("ada", "bea", "cleo")}
    shares = log.wait_for([21, 21, 22])

    processes["ada"].send_signal(signal.SIGKILL)
    processes["ada"].wait()
    SharedLog(str(log.path), "ada").write("killed")
    taken_over = log.wait_for([32, 32])
    for name in ("bea", "cleo"):
        assert shares[name] <= taken_over[name], "what was not the dead member's has moved"

    processes["bea"].terminate()
    assert processes["bea"].wait(WAIT_S_MAX) == 0
    log.wait_for([VBUCKETS])

    start_member("ada")
    log.wait_for([32, 32])


def test_a_member_that_stalls_beyond_its_lease_joins_again(start_member: StartMember, log: GroupLog) -> None:
    processes = {name: start_member(name) for name in ("ada", "bea")}
    log.wait_for([32, 32])
    processes["ada"].send_signal(signal.SIGSTOP)
    # It can't write that it has stopped, so from here on it is taken to read nothing.
    SharedLog(str(log.path), "ada").write("killed")
    log.wait_for([VBUCKETS])
    processes["ada"].send_signal(signal.SIGCONT)
    log.wait_for([32, 32])

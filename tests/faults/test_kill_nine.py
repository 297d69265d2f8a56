"""kill -9: whatever was answered is there, whatever was never sent is not, and the failover logs say what happened."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.client.kv_connection import KvConnection
from headwater.errors import DataInUse
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, FAILOVER_LOG_ENTRIES_MAX, VBucketId, Vbuuid
from headwater.store.bucket import StoreEnvironment
from headwater.store.checked_engine import CheckedEngine
from headwater.store.data_format import BucketFacts, VBucketFacts, vbucket_of_key
from headwater.store.engine import PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import create_bucket
from headwater.store.settling import YOUNG_COMMITS_MAX
from support.acknowledged_writes import PipelinedWriter, WriteHistory, check_history, statistics
from support.cases import case_apart
from support.forked_program import run_program, start_program
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

SEED = 20
KILLS = 3
SOAK_KILLS = 1_000
LOAD_S_MAX = 0.6
WRITERS = 2
KEYS = 300
VBUCKETS = 16

MILLION = 1_000_000
MILLION_READY_S_MAX = 3.0

OPTIONS = (
    "--vbuckets", str(VBUCKETS),
    # Keep house as often as possible and keep nothing, so that kills meet that, too.
    "--compact-interval", "0.05", "--expiry-interval", "0.05",
    "--history-seconds", "0", "--history-bytes", "0", "--purge-age-seconds", "0",
)  # fmt: skip


def newest_branches(connection: KvConnection) -> list[int]:
    """The newest vbuuid of every vbucket."""
    details = statistics(connection, "vbucket-details")
    assert all(details[f"vb_{vbucket}"] == "active" for vbucket in range(VBUCKETS))
    return [int(details[f"vb_{vbucket}:uuid"]) for vbucket in range(VBUCKETS)]


def stored_failover_logs(data: Path) -> dict[int, FailoverLog]:
    """What lies on the disk of a node that is not running."""
    engine = CheckedEngine(LmdbEngine(data / "buckets" / "default"), "default")
    try:
        with engine.view() as view:
            stored = view.scan(Table.VBUCKETS, b"", b"\xff" * 4)
            return {vbucket_of_key(key): VBucketFacts.decode(value).failover_log for key, value in stored}
    finally:
        engine.close()


def write_and_kill(node: NodeProcess, history: WriteHistory, *, round_number: int, after_s: float) -> int:
    """Kill a node while it is written to. Returns how many writes it has answered."""
    writers = [
        PipelinedWriter(
            node, history, name=f"{round_number}-{number}", key_prefix=str(number), keys=KEYS, vbuckets=VBUCKETS
        )
        for number in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        assert writer.has_answers.wait(30), "the node does not answer"
    time.sleep(after_s)
    node.kill()
    for writer in writers:
        writer.join(30)
        assert not writer.is_alive()
        assert not writer.faults, writer.faults[:5]
    return sum(writer.answered for writer in writers)


@pytest.mark.parametrize("kills", [KILLS, pytest.param(SOAK_KILLS, marks=pytest.mark.soak)])
def test_kill_nine_under_load(start_node: StartNode, kills: int) -> None:
    rng = random.Random(SEED)
    node = start_node(*OPTIONS)
    with node.connect() as connection:
        branches = [newest_branches(connection)]
    history = WriteHistory()
    answered, unsettled = 0, list[int]()
    for round_number in range(kills):
        answered += write_and_kill(node, history, round_number=round_number, after_s=rng.uniform(0, LOAD_S_MAX))
        node.start()
        with node.connect() as connection:
            documents = check_history(connection, history, vbuckets=VBUCKETS)
            known = statistics(connection)
            assert known["curr_items"] == str(documents), "there are documents that nobody wrote"
            unsettled.append(int(known["ep_unsettled_commits"]))
            branches.append(newest_branches(connection))
    print(f"{kills} kills, {answered} answered writes, {documents} documents, last ready in {node.ready_s:.2f} s")
    assert max(unsettled) < 2 * YOUNG_COMMITS_MAX, "in lives this short the journal grows"
    assert node.stop() == 0
    logs = stored_failover_logs(node.data)
    for vbucket in range(VBUCKETS):
        expected = [newest[vbucket] for newest in reversed(branches)]
        assert [entry.vbuuid for entry in logs[VBucketId(vbucket)].entries] == expected[:FAILOVER_LOG_ENTRIES_MAX]
        assert len(set(expected)) == kills + 1


# --- killed while it starts ---------------------------------------------------------------------------------------


def test_killed_while_it_starts(start_node: StartNode) -> None:
    """Each start that got as far as opening the data adds a branch, and none of them loses anything."""
    rng = random.Random(SEED)
    node = start_node(*OPTIONS, fresh=True)
    document = {"key": b"lasting", "collection_id": DEFAULT_COLLECTION}
    with node.connect() as connection:
        connection.request(Set(value=b"1", **document))
    usual_s = node.ready_s
    node.kill()
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "serve", "--data", str(node.data), "--port", "0", "--http-port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(rng.uniform(usual_s / 2, usual_s))
        process.kill()
        process.wait()
    node.start()
    with node.connect() as connection:
        assert connection.request(Get(**document)).value == b"1"
        newest_branches(connection)


def test_killed_while_it_makes_a_bucket(start_node: StartNode, tmp_path: Path) -> None:
    """The bucket is there and its vbuckets are not: the next start has to make them."""
    data = tmp_path / "data"
    engine = LmdbEngine(data / "buckets" / "default")
    facts = BucketFacts(name="default", uuid="0" * 32, vbuckets=VBUCKETS)
    create_bucket(
        engine, facts, environment=StoreEnvironment(now_ns=time.time_ns, new_vbuuid=lambda: Vbuuid(1)), secret=(1, 2)
    )
    engine.close()
    node = start_node(*OPTIONS, data=data)
    with node.connect() as connection:
        assert len(newest_branches(connection)) == VBUCKETS


# --- a million documents ------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_ready_with_a_million_documents(start_node: StartNode) -> None:
    node = start_node()
    load = [sys.executable, "-m", "headwater", "load", f"{node.url}/default", "--generate", str(MILLION), "--json"]
    subprocess.run([*load, "--user", USER, "--password", PASSWORD], check=True, capture_output=True)
    took_s = []
    for _ in range(5):
        node.kill()
        node.start()
        took_s.append(node.ready_s)
        with node.connect() as connection:
            assert statistics(connection)["curr_items"] == str(MILLION)
    node.kill()
    shutil.rmtree(node.data)
    print(f"ready with {MILLION} documents after {', '.join(f'{seconds:.2f}' for seconds in took_s)} s")
    assert max(took_s) < MILLION_READY_S_MAX


# --- the engine and other processes: one at a time has the data, and a copy or a killed one is noticed --------------


TABLE = Table.BLOCKS


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from headwater.store.engine import PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
LmdbEngine(Path(sys.argv[1])).write([PutRow(Table.BLOCKS, b"b", b"2")])
os.kill(os.getpid(), signal.SIGKILL)
"""


def closed_engine(folder: Path, **rows: bytes) -> None:
    engine = LmdbEngine(folder)
    engine.write([PutRow(TABLE, key.encode(), value) for key, value in rows.items()])
    engine.close()


def left_alone(folder: Path) -> bool:
    engine = LmdbEngine(folder)
    engine.close()
    return engine.was_left_alone


def test_data_that_was_not_closed_is_not(tmp_path: Path) -> None:
    closed_engine(tmp_path / "data", a=b"1")
    killed = run_program("-c", WRITE_AND_DIE, str(tmp_path / "data"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not left_alone(tmp_path / "data")
    assert not left_alone(tmp_path / "data"), "to look at it changes nothing: a start may be given up before it begins"
    closed_engine(tmp_path / "data", b=b"3")
    assert left_alone(tmp_path / "data"), "it was opened and closed in order by now"


@case_apart("cp -r {data} {copy}", id="cp -r")
@case_apart("cp -a {data} {copy}", id="cp -a")
@case_apart("mkdir {copy}; tar -C {data} -c . | tar -C {copy} -x", id="tar")
def test_a_copy_is_not_left_alone(tmp_path: Path, copy: str) -> None:
    closed_engine(tmp_path / "data", a=b"1")
    subprocess.run(copy.format(data=tmp_path / "data", copy=tmp_path / "copy"), shell=True, check=True)
    assert not left_alone(tmp_path / "copy")
    assert left_alone(tmp_path / "data")
    # Laid over the original it is the same file with other contents, and their old time if the copy has kept it.
    closed_engine(tmp_path / "data", a=b"2")
    subprocess.run(["cp", "-a", f"{tmp_path}/copy/.", str(tmp_path / "data")], check=True)
    assert not left_alone(tmp_path / "data")


HOLD = """
import sys, time
from pathlib import Path
from headwater.store.lmdb_engine import LmdbEngine
engine = LmdbEngine(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
engine.close()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the data open."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = start_program("-c", HOLD, str(folder), **pipes)
    assert process.stdout.readline() == "held\n"
    return process


def check_is_held(folder: Path) -> None:
    with pytest.raises(DataInUse) as raised:
        LmdbEngine(folder)
    assert raised.value.reason == f"another process uses the data in {folder}"
    assert raised.value.hint == "Stop it, or give this one its own folder"


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "kill -9"])
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, is_killed: bool) -> None:
    with holder(tmp_path) as process:
        check_is_held(tmp_path)
        check_is_held(tmp_path)
        if is_killed:
            process.send_signal(signal.SIGKILL)
        else:
            process.communicate("\n")
        process.wait()
        engine = LmdbEngine(tmp_path)
        engine.write([PutRow(TABLE, name.encode(), name.upper().encode()) for name in reversed("aceg")])
        engine.close()

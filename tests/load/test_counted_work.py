"""How much work changes are, counted and not timed: Python's calls, the system's calls, and memory held at once.

A machine is fast one day and slow the next, and counts are the same. What a change costs is what a thousand more of
them add: nothing may be done for each one in Python on the way from the socket to the disk, to a stream, to a replica,
to an Arrow batch and to a table. The bounds are about twice what was counted when they were written.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import headwater
from headwater.lake.lake import Task, run_here
from headwater.lake.verify import compare
from headwater.landing.query import Landing
from headwater.landing.source_options import SourceOptions
from headwater.protocol.messages.dcp_streams import StreamFlags
from headwater.protocol.messages.documents import SetQuiet
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from headwater.store.engine import Change, PutRow
from support.dcp_world import COLLECTIONS, World
from support.node_process import PASSWORD, USER, NodeProcess, StartNode
from support.replication_world import Link, make_replica

VBUCKETS = 8
FEW, MANY = 20_000, 40_000
PIECE_BYTES = 1 << 18
"""What a socket hands over, or takes, at once."""


class Count:
    calls = 0


@contextmanager
def counted() -> Iterator[Count]:
    """How often functions are called meanwhile, Python's own and those of libraries, in every thread that starts."""
    count = Count()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            count.calls += 1

    before = sys.getprofile()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield count
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def per_million(few: int, many: int) -> float:
    return (many - few) / (MANY - FEW) * 1e6


def beyond(bounds: dict[str, int], few: dict[str, int], many: dict[str, int]) -> dict[str, float]:
    """The works that call more functions for a million changes than they may."""
    calls = {work: per_million(few[work], many[work]) for work in bounds}
    return {work: count for work, count in calls.items() if count > bounds[work]}


# --- a node -------------------------------------------------------------------------------------------------------


def set_frames(documents: int, *, pad: str = "") -> bytes:
    return b"".join(
        SetQuiet(
            vbucket=VBucketId(number % VBUCKETS),
            collection_id=DEFAULT_COLLECTION,
            key=b"user::%d" % number,
            value=b'{"n":%d,"name":"someone","city":"somewhere%s"}' % (number, pad.encode()),
        ).encode()
        for number in range(documents)
    )


def node_work(folder: Path, documents: int) -> tuple[dict[str, int], int]:
    """The calls of each work of a node, and the bytes that a backfill holds at once."""
    source, target = World(folder / "source"), World(folder / "target")
    make_replica(target)
    link = Link(source, target)
    for vbucket in range(VBUCKETS):
        link.add(vbucket)
    client = source.node.client(features=COLLECTIONS)
    sets = set_frames(documents)
    counts: dict[str, int] = {}
    with counted() as count:
        for piece in (sets[at : at + PIECE_BYTES] for at in range(0, len(sets), PIECE_BYTES)):
            client.send(piece)
            source.commit()
    counts["sets"] = count.calls
    assert sum(source.high_seqno(vbucket) for vbucket in range(VBUCKETS)) == documents
    source.settle()

    sent: list[bytes] = []
    with counted() as count:
        while produced := link.producer.session.dcp.produce(PIECE_BYTES):
            sent.append(produced)
    counts["live streams"] = count.calls
    with counted() as count:
        for piece in sent:
            link.receiver.send(piece)
            target.commit()
            link.receiver.data()
    counts["replication"] = count.calls
    assert sum(target.high_seqno(vbucket) for vbucket in range(VBUCKETS)) == documents

    consumer = source.consumer(features=COLLECTIONS)
    for vbucket in range(VBUCKETS):
        consumer.open(vbucket=VBucketId(vbucket), flags=StreamFlags.LATEST)
    received = 0
    tracemalloc.start()
    with counted() as count:
        while produced := consumer.session.dcp.produce(PIECE_BYTES):
            received += len(produced)
    counts["backfill"] = count.calls
    held_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received > len(sets)
    source.close()
    target.close()
    return counts, held_bytes


NODE_CALLS_MAX = {"sets": 240_000, "live streams": 110_000, "replication": 170_000, "backfill": 120_000}
"""For a million changes."""
BACKFILL_BYTES_MAX = 4 * 1024 * 1024
"""Held at once, however much there is to stream."""


def test_a_node_does_nothing_for_each_change_in_python(tmp_path: Path) -> None:
    few, _ = node_work(tmp_path / "few", FEW)
    many, held_bytes = node_work(tmp_path / "many", MANY)
    assert beyond(NODE_CALLS_MAX, few, many) == {}
    assert held_bytes <= BACKFILL_BYTES_MAX


COPIES_MAX = {"sets": 0.4, "commit": 1.1, "settling": 1.6, "backfill": 0.4}
"""How much memory a work takes at once beyond what was held before, for a byte of large documents."""


def test_a_node_does_not_copy_large_values_more_often_than_it_must(tmp_path: Path) -> None:
    world, sets = World(tmp_path), set_frames(16, pad="x" * PIECE_BYTES)
    client, written = world.node.client(features=COLLECTIONS), 0
    write = world.bucket.engine.unchecked.write

    def counting(changes: Sequence[Change]) -> None:
        nonlocal written
        written += sum(len(change.value) for change in changes if isinstance(change, PutRow))
        write(changes)

    def receive() -> None:
        for at in range(0, len(sets), PIECE_BYTES):
            client.send(sets[at : at + PIECE_BYTES])

    def stream() -> None:
        consumer = world.consumer(features=COLLECTIONS)
        for vbucket in range(VBUCKETS):
            consumer.open(vbucket=VBucketId(vbucket), flags=StreamFlags.LATEST)
        while consumer.session.dcp.produce(PIECE_BYTES):
            pass

    world.bucket.engine.unchecked.write = counting
    works = {"sets": receive, "commit": world.commit, "settling": world.settle, "backfill": stream}
    for _ in range(2):  # The first time kernels are loaded, and memory grows that is kept.
        copies, written = {}, 0
        tracemalloc.start()
        for work, do in works.items():
            held_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            do()
            copies[work] = (tracemalloc.get_traced_memory()[1] - held_bytes) / len(sets)
        tracemalloc.stop()
    assert {work: count for work, count in copies.items() if count > COPIES_MAX[work]} == {}
    assert written <= 2.1 * len(sets), "once in the journal, and once in a block"
    world.close()


# --- a client, and a landing --------------------------------------------------------------------------------------


class InThisProcess:
    """Runs the tasks of a landing here, where they are counted, and not in Spark's workers."""

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        return run_here(tasks)

    def cancel(self) -> None: ...


def load(node: NodeProcess, bucket: str, documents: int, *options: str) -> None:
    command = [sys.executable, "-m", "headwater", "load", f"couchbase://{node.address}/{bucket}", *options]
    subprocess.run([*command, "--generate", str(documents), "--user", USER, "--password", PASSWORD], check=True)


def client_work(node: NodeProcess, bucket: str, documents: int, folder: Path) -> tuple[dict[str, int], int]:
    """The calls of each work of a client, and how often the node asks the system to read and to write for one."""
    counts: dict[str, int] = {}
    url = f"couchbase://{node.address}/{bucket}"
    before = system_calls(node.pid)
    with counted() as count, headwater.blocking.connect(url, user=USER, password=PASSWORD) as client:
        assert sum(batch.num_rows for batch in client.batches(end="now")) == documents
    node_system_calls = system_calls(node.pid) - before
    counts["batches"] = count.calls
    with counted() as count, headwater.blocking.connect(url, user=USER, password=PASSWORD) as client:
        assert sum(1 for _ in client.changes(end="now")) == documents
    counts["changes"] = count.calls
    landing = Landing(source={"url": url, "user": USER, "password": PASSWORD}, into=str(folder / bucket))
    with counted() as count:
        landing.start(InThisProcess()).awaitTermination()
    counts["landing"] = count.calls
    return counts, node_system_calls


def system_calls(pid: int) -> int:
    """To read and to write, files and sockets."""
    found = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(found["syscr"]) + int(found["syscw"])


CLIENT_CALLS_MAX = {"batches": 150_000, "changes": 5_000_000, "landing": 250_000}
"""For a million changes. Typed changes are objects, and each has to be made."""
SYSTEM_CALLS_MAX = 5_000


def test_a_client_does_nothing_for_each_change_in_python(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--vbuckets", str(VBUCKETS), "--bucket", "warm", "--bucket", "few", "--bucket", "many")
    for bucket, documents in (("warm", 100), ("few", FEW), ("many", MANY)):
        load(node, bucket, documents)
    client_work(node, "warm", 100, tmp_path)  # Kernels are loaded, and modules imported.
    few, few_calls = client_work(node, "few", FEW, tmp_path)
    many, many_calls = client_work(node, "many", MANY, tmp_path)
    assert beyond(CLIENT_CALLS_MAX, few, many) == {}
    assert per_million(few_calls, many_calls) <= SYSTEM_CALLS_MAX


LARGE_DOCUMENTS, LARGE_BYTES = 256, 1 << 17
LAKE_COPIES_MAX = {"landing": 12.0, "verify": 12.0}
"""How many bytes Arrow is asked for, in all, for a byte of large documents."""


@pytest.mark.skipif(not hasattr(pa.MemoryPool, "total_bytes_allocated"), reason="older Arrow does not count them")
def test_a_lake_does_not_copy_large_values_more_often_than_it_must(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--vbuckets", str(VBUCKETS), "--bucket", "large")
    load(node, "large", LARGE_DOCUMENTS, "--value-bytes", str(LARGE_BYTES))
    source = {"url": f"couchbase://{node.address}/large", "user": USER, "password": PASSWORD}
    landing = Landing(source=source, into=str(tmp_path / "lake"))
    works = {
        "landing": lambda: landing.start(InThisProcess()).awaitTermination(),
        "verify": lambda: compare(SourceOptions.make(source).settings, landing.into),
    }
    copies = {}
    for work, do in works.items():
        before = pa.default_memory_pool().total_bytes_allocated()
        do()
        allocated = pa.default_memory_pool().total_bytes_allocated() - before
        copies[work] = allocated / (LARGE_DOCUMENTS * LARGE_BYTES)
    assert {work: count for work, count in copies.items() if count > LAKE_COPIES_MAX[work]} == {}

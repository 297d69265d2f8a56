"""Reads that start at a time, on a real node that is written to, fails over and forgets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater import Rollback
from headwater.client import start_search
from headwater.client.checkpoints import FileCheckpoint
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions
from headwater.errors import InvalidInput
from headwater.protocol.messages.documents import Delete, MetaOptions, Set, SetWithMeta
from headwater.protocol.numbers import DEFAULT_COLLECTION, Cas, VBucketId
from support.fault_proxy import ProxiedBucket, ProxiedNode
from support.node_process import PASSWORD, USER

VBUCKETS = 4
LOGIN = {"user": USER, "password": PASSWORD}
BUCKETS = tuple(f"bucket{number}" for number in range(12))
"""Each for one test: a version from the future sets the clock of its vbucket."""
READ_S_MAX = 60.0
_unused = iter(BUCKETS)
_numbers = count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    with ProxiedNode(tmp_path_factory.mktemp("times") / "data", vbuckets=VBUCKETS, buckets=BUCKETS) as node:
        yield node


@pytest.fixture(autouse=True)
def many_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few documents are searched like large ones."""
    monkeypatch.setattr(start_search, "SCANNED_SEQNOS_MAX", 3)
    monkeypatch.setattr(start_search, "MARGIN_S", 0)


class Writer:
    """Writes to any vbucket, and knows the CAS of the newest version of each key."""

    def __init__(self, bucket: ProxiedBucket) -> None:
        self.bucket = bucket
        self.newest: dict[str, int] = {}
        self.connection = bucket.connect_directly()

    def put(self, *keys: str, vbucket: int) -> None:
        for key in keys:
            self._send(Set(key=key.encode(), value=b"{}", **_in(vbucket)), key)

    def delete(self, *keys: str, vbucket: int) -> None:
        for key in keys:
            self._send(Delete(key=key.encode(), **_in(vbucket)), key)

    def put_from_elsewhere(self, key: str, at: datetime, *, vbucket: int) -> None:
        cas = Cas(int(at.timestamp()) * 1_000_000_000 >> 16 << 16)
        meta = {"rev_seqno": 1, "meta_cas": cas, "options": MetaOptions.SKIP_CONFLICT_RESOLUTION}
        self._send(SetWithMeta(key=key.encode(), value=b"{}", **meta, **_in(vbucket)), key)

    def put_many(self, count: int) -> None:
        """In every vbucket, and a deletion among them."""
        for vbucket in range(VBUCKETS):
            keys = [f"key{next(_numbers)}" for _ in range(count)]
            self.put(*keys, vbucket=vbucket)
            self.delete(keys[count // 2], vbucket=vbucket)

    def _send(self, request: Any, key: str) -> None:
        self.newest[key] = self.connection.request(request).cas

    def close(self) -> None:
        self.connection.close()

    def moment(self) -> datetime:
        """A time after all that was written, and before all that will be."""
        time.sleep(0.002)
        now = datetime.now(UTC)
        time.sleep(0.002)
        return now

    def since(self, at: datetime) -> dict[str, int]:
        return {key: cas for key, cas in self.newest.items() if (cas >> 16 << 16) / 1e9 >= at.timestamp()}


def _in(vbucket: int) -> dict[str, Any]:
    return {"collection_id": DEFAULT_COLLECTION, "vbucket": VBucketId(vbucket)}


@pytest.fixture
def writer(node: ProxiedNode) -> Iterator[Writer]:
    with closing(Writer(ProxiedBucket(node, next(_unused)))) as writer:
        yield writer


def read(writer: Writer, start: Any, **options: Any) -> list[Any]:
    with headwater.blocking.connect(writer.bucket.url, **LOGIN) as client:
        return list(client.changes(start=start, end="now", **options))


def keys(changes: list[Any], *, vbucket: int) -> list[str]:
    return [change.key for change in changes if change.vbucket == vbucket]


# --- while it is written to -------------------------------------------------------------------------------------------

Face = Callable[[str, datetime], AsyncIterator[Any]]


async def with_asyncio(url: str, at: datetime) -> AsyncIterator[Any]:
    async with headwater.connect(url, **LOGIN) as client:
        async for change in client.changes(start=at):
            yield change


async def without_asyncio(url: str, at: datetime) -> AsyncIterator[Any]:
    with headwater.blocking.connect(url, **LOGIN) as client:
        changes = client.changes(start=at.isoformat())
        while True:
            yield await asyncio.to_thread(next, changes)


@pytest.mark.parametrize("face", [with_asyncio, without_asyncio])
def test_all_changes_since_then_and_no_others(writer: Writer, face: Face) -> None:
    writer.put_many(30)
    at = writer.moment()
    writer.put_many(10)
    stop = threading.Event()

    def write_on() -> None:
        for number in count():
            if stop.is_set():
                return
            writer.put(f"busy{number % 20}", vbucket=number % VBUCKETS)

    thread = threading.Thread(target=write_on)

    async def follow() -> dict[str, int]:
        seen: dict[str, int] = {}
        async with asyncio.timeout(READ_S_MAX):
            async for change in face(writer.bucket.url, at):
                assert change.changed_at >= at
                seen[change.key] = change.cas
                if len(seen) > 20 and not stop.is_set():
                    stop.set()
                    thread.join()
                if stop.is_set() and seen.items() >= writer.since(at).items():
                    return seen
        raise AssertionError

    thread.start()
    try:
        seen = asyncio.run(follow())
    finally:
        stop.set()
        thread.join()
    assert seen == writer.since(at)
    assert len(seen) > VBUCKETS * 10


@pytest.mark.parametrize(
    ("start", "has_all"),
    [
        (lambda: "-1h", True),
        (lambda: "2001-01-01", True),
        (lambda: datetime.now(UTC), False),
        (lambda: f"{time.time():.3f}", False),
    ],
)
def test_times_before_and_after_everything(writer: Writer, start: Callable[[], Any], has_all: bool) -> None:
    writer.put_many(5)
    time.sleep(0.01)
    found = {change.key for change in read(writer, start())}
    assert found == (set(writer.newest) if has_all else set())


def test_a_time_in_the_future_is_refused(writer: Writer) -> None:
    with pytest.raises(InvalidInput, match="in the future"):
        read(writer, datetime.now(UTC) + timedelta(hours=1))


# --- clocks that are not this node's ----------------------------------------------------------------------------------


def test_versions_from_elsewhere(writer: Writer) -> None:
    """The order in the vbucket decides what is read, and the CAS where that begins."""
    long_ago, soon = datetime(2015, 1, 1, tzinfo=UTC), datetime.now(UTC) + timedelta(minutes=5)
    writer.put("old", vbucket=0)
    writer.put("older", vbucket=1)
    writer.put_from_elsewhere("from-the-future", soon, vbucket=2)
    writer.put("after-the-future", vbucket=2)
    at = writer.moment()
    writer.put("new", vbucket=0)
    writer.put_from_elsewhere("late", long_ago, vbucket=0)
    writer.put_from_elsewhere("alone", long_ago, vbucket=1)
    found = read(writer, at)
    assert keys(found, vbucket=0)[-2:] == ["new", "late"]
    assert "old" not in keys(found, vbucket=0)
    assert keys(found, vbucket=1) == [], "nothing since then, by the CAS"
    assert keys(found, vbucket=2) == ["from-the-future", "after-the-future"]


# --- versions ---------------------------------------------------------------------------------------------------------


def test_all_versions_since_then_where_they_are_kept(writer: Writer) -> None:
    for _ in range(5):
        writer.put("often", vbucket=3)
    at = writer.moment()
    for _ in range(4):
        writer.put("often", vbucket=3)
    assert keys(read(writer, at), vbucket=3) == ["often"]
    assert keys(read(writer, at, history=True), vbucket=3) == ["often"] * 4
    assert len(keys(read(writer, "-1h", history=True), vbucket=3)) >= 9


def test_deletions_that_were_purged_since_then(tmp_path: Path) -> None:
    """The node says up to where, so that the start lies before that all the same."""
    forgetful = ("--purge-age-seconds", "0", "--history-seconds", "0", "--history-bytes", "0")
    with (
        ProxiedNode(tmp_path / "data", *forgetful, "--compact-interval", "0.05", vbuckets=VBUCKETS) as node,
        closing(Writer(ProxiedBucket(node))) as writer,
    ):
        writer.put(*(f"old{number}" for number in range(20)), vbucket=0)
        at = writer.moment()
        writer.put("new", "doomed", vbucket=0)
        writer.delete("doomed", vbucket=0)
        with headwater.blocking.connect(writer.bucket.url, **LOGIN) as client:
            give_up_s = time.monotonic() + READ_S_MAX
            while not (found := client.find_start(ReadOptions(start=at))[VBucketId(0)]).purge_seqno:
                assert time.monotonic() < give_up_s, "the deletion is not purged"
                writer.put("busy", vbucket=0)
                writer.bucket.roll_back(1, 0)
        assert found.seqno == 20 < found.purge_seqno
        assert keys(read(writer, at), vbucket=0) == ["new", "busy"]


# --- failovers --------------------------------------------------------------------------------------------------------


def test_a_failover_before_and_one_after_the_start(writer: Writer) -> None:
    writer.put("before", vbucket=0)
    at = writer.moment()
    writer.put("kept", "lost", vbucket=0)
    high = writer.bucket.high_seqnos(writer.connection)[0]
    writer.bucket.roll_back(0, high - 1)
    writer.put("again", vbucket=0)
    with headwater.blocking.connect(writer.bucket.url, **LOGIN) as client:
        changes = client.changes(start=at, vbuckets=[0])
        assert [next(changes).key for _ in range(2)] == ["kept", "again"]
        writer.bucket.roll_back(0, high - 1)
        undone = next(changes)
        assert isinstance(undone, Rollback)
        assert undone.seqno < high


# --- where it goes on -------------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_the_start(writer: Writer, tmp_path: Path) -> None:
    """Saved at once: a program that died would look for another `-1ms`."""
    path = tmp_path / "checkpoint"
    writer.put_many(5)
    time.sleep(0.01)
    with headwater.blocking.connect(writer.bucket.url, **LOGIN) as client:
        client.changes(start="-1ms", checkpoint=FileCheckpoint(path)).start()
        assert len(Offsets.from_json(path.read_text()).offsets) == VBUCKETS
    at = writer.moment()
    writer.put_many(3)
    time.sleep(0.01)
    for expected in (writer.since(at), {}):
        found = read(writer, "-1ms", checkpoint=FileCheckpoint(path))
        assert {change.key: change.cas for change in found} == expected

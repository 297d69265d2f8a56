"""What a landing says, and does, when something around it fails: a disk that is full, a lake that is moved away, a task
that raises, a signal. Whatever layer an error comes through, the user reads one sentence with its cause.

The full disk is a small tmpfs of its own; where this user may not mount one, those tests are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from headwater.errors import HeadwaterError, LakeError, LakeFull, LakeGone, QueryFailed
from headwater.lake.lake import results, run_task
from headwater.landing import loop
from headwater.landing.query import LandingQuery
from headwater.spark.executors import SparkRunner
from support.driven_source import RunHere, SimulatedLanding
from support.forked_program import HEADWATER
from support.landings import LOGIN, WAIT_S_MAX, SourceBucket, wait_until

ROOM_BYTES = 2_000_000
BIG = b'{"text":"%s"}'


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all room."""
    filling = disk / "filling"
    with open(filling, "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filling


class RunAsExecutors(RunHere):
    """Tasks fail as they do in a worker of Spark."""

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        return results([run_task(task) for task in tasks])


@dataclass
class FailingLanding(SimulatedLanding):
    def start(self, *, every: float | None = None) -> LandingQuery:
        self.batches.clear()
        return self.landing.start(RunAsExecutors(), every=every, on_batch=self.batches.append)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(loop, "_RETRY_S_MIN", 0.05)
    monkeypatch.setattr(loop, "_RETRY_S_MAX", 0.1)
    return monkeypatch


def test_a_landing_waits_for_room_and_goes_on_by_itself(
    bucket: SourceBucket, small_disk: Path, patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = FailingLanding(bucket, small_disk / "lake")
    bucket.put([b"a"], b'{"n":1}')
    query = pipeline.start(every=0.05)
    try:
        query.processAllAvailable()
        filling = fill(small_disk)
        bucket.put([b"b", b"c"], b'{"n":2}')
        wait_until(lambda: query.landing_status.failures > loop.FAILURES_MAX + 3)
        wait_until(lambda: query.landing_status.doing == "waiting for room")
        status = query.landing_status
        assert status.is_active
        assert status.failure is not None
        assert status.failure.startswith(f"the disk of {small_disk}/lake/")
        assert "is full. Free space there: the landing resumes by itself" in status.failure
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [line.partition(":")[0] for line in said] == ["waiting for room"], "it is said once"
        filling.unlink()
        query.processAllAvailable()
        assert query.landing_status.failure is None
    finally:
        query.stop()
    pipeline.check_equal()


def test_a_batch_that_does_not_fit_leaves_the_room_that_there_was(
    bucket: SourceBucket, small_disk: Path, patched: pytest.MonkeyPatch
) -> None:
    """Half of a batch would take the room that is made for the next attempt. With --once the wait has an end."""
    patched.setattr(loop, "ROOM_WAIT_S_MAX", 0.5)
    pipeline = FailingLanding(bucket, small_disk / "lake")
    pipeline.land()
    for number in range(30):
        bucket.put([b"%d" % number], BIG % os.urandom(100_000).hex().encode())
    free = shutil.disk_usage(small_disk).free
    with pytest.raises(LakeFull, match=r"is full\. Free space there"):
        pipeline.land()
    assert free - shutil.disk_usage(small_disk).free < 100_000
    bucket.delete([b"%d" % number for number in range(30)])
    pipeline.land()
    pipeline.check_equal()


# --- a lake that is not there any more --------------------------------------------------------------------------------


def moved(lake: Path) -> None:
    lake.rename(lake.with_name("moved"))


def removed(lake: Path) -> None:
    shutil.rmtree(lake)


def replaced(lake: Path) -> None:
    lake.rename(lake.with_name("moved"))
    shutil.copytree(lake.with_name("moved"), lake)


@pytest.mark.parametrize("away", [moved, removed, replaced])
def test_a_lake_that_goes_away_while_it_is_written(
    bucket: SourceBucket, tmp_path: Path, patched: pytest.MonkeyPatch, away: Callable[[Path], None]
) -> None:
    pipeline = FailingLanding(bucket, tmp_path / "lake")
    bucket.put([b"a"], b'{"n":1}')
    query = pipeline.start(every=0.05)
    try:
        query.processAllAvailable()
        away(pipeline.folder)
        left = content(pipeline.folder)
        bucket.put([b"b"], b'{"n":2}')
        with pytest.raises(LakeGone, match=f"the tables in {pipeline.folder} were moved, removed or replaced"):
            query.awaitTermination(WAIT_S_MAX)
    finally:
        query.stop()
    assert content(pipeline.folder) == left, "nothing was written where it was"


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "landing.json"}


# --- a task that fails, through Spark ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raises:
    """A task that fails."""

    error: BaseException

    def run(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            LakeFull,
            "disk of /data/x is full. Free space there",
        ),
        (OSError(errno.EDQUOT, "Quota"), LakeFull, "the disk quota of the tables is used up. Free space there"),
        (OSError(errno.EROFS, "Read-only"), LakeError, "its file system is read-only. Mount it for writing"),
        (
            PermissionError(errno.EACCES, "denied", "/data/x"),
            LakeError,
            "can't be used: permission denied. Let",
        ),
        (OSError(errno.EIO, "I/O"), LakeError, "its disk fails (input/output error). See the system's log"),
        (OSError(errno.ENAMETOOLONG, "long"), LakeError, "a name is too long for its file system. Give"),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28]"), LakeFull, "is full"),
        (DeltaError("Generic LocalFileSystem error\n ↳ No space left on device (os error 28)"), LakeFull, "is full"),
        (DeltaError("Generic S3 error: 503 Service Unavailable"), LakeError, "the store asks to slow down. Try again"),
        (MemoryError(), QueryFailed, "a task has run out of memory. Run fewer tasks at a time"),
        (pa.ArrowMemoryError("malloc of size 64 failed"), QueryFailed, "a task has run out of memory"),
        (pa.ArrowInvalid("Column 'a':\n no"), QueryFailed, "work on the tables failed: ArrowInvalid: Column 'a': no"),
        (KeyError("x"), QueryFailed, "work on the tables failed: KeyError: 'x'"),
        (LakeError("no", hint="Do this"), LakeError, "no. Do this"),
    ],
    ids=lambda value: None if isinstance(value, str | type) else type(value).__name__,
)
def test_an_error_of_a_task_is_a_sentence(error: Exception, kind: type[HeadwaterError], sentence: str) -> None:
    with pytest.raises(kind) as raised:
        results([run_task(Raises(error))])
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_comes_through_spark_as_it_is(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    task = SimpleNamespace(run=partial(Path("/dev/full").write_bytes, b"no room"))
    with pytest.raises(LakeFull) as raised:
        SparkRunner(spark)([task])
    assert raised.value.hint.startswith("Free space there")
    assert raised.value.__cause__ is None
    assert capfd.readouterr().err == "", "Spark has nothing to say of it"


# --- as a process -----------------------------------------------------------------------------------------------------


def test_a_landing_is_ended_by_sigterm_and_spark_says_nothing(bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.put([b"a"], b'{"n":1}')
    command = (*HEADWATER, "land", bucket.url, "--into", str(tmp_path / "lake"), "--every", "1s", "-q", "--json")
    environment = {**os.environ, **LOGIN, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, *command, "--master", "local[1]", "--memory", "1g"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert '"batch": 0' in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=WAIT_S_MAX)
    assert (process.returncode, stderr) == (143, "Stopped. The same command resumes from here.\n")
    assert not list(tmp_path.glob("headwater-spark-*")), "a log of nothing is not kept"

"""Bytes on the disk while documents are updated at a steady rate: flat after the bound, whatever is landed.

Times and sizes are those of the defaults, shortened together: `HEADWATER_BYTES_S=1800` is half an hour with 100,000
documents and the defaults themselves. Bytes are counted by a walk over the directory.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.lake import dead_files
from headwater.spark.freshness import WAIT_S_MAX, Freshness
from support.driven_source import SimulatedLanding, without_spark
from support.landings import DEFAULT, SourceBucket, SparkNode

WHOLE_S = 1800.0
RUN_S = float(os.environ.get("HEADWATER_BYTES_S", "120"))
SCALE = RUN_S / WHOLE_S
DOCUMENTS = round(100_000 * SCALE)
EVERY_S = 5.0 * SCALE
SAMPLES = 30
TICK_S = 0.05


class SteadyWriter(threading.Thread):
    """Updates random documents, so many a second, each answered before the next is sent."""

    def __init__(self, bucket: SourceBucket, updates_per_s: int) -> None:
        super().__init__(name="writer", daemon=True)
        self.written = 0
        self._bucket, self._updates_per_s = bucket, updates_per_s
        self._stopping = threading.Event()

    def run(self) -> None:
        numbers, began_s = random.Random(8), time.monotonic()
        while not self._stopping.wait(TICK_S):
            for _ in range(round((time.monotonic() - began_s) * self._updates_per_s) - self.written):
                write(self._bucket, numbers.randrange(DOCUMENTS), self.written)
                self.written += 1

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def write(bucket: SourceBucket, number: int, turn: int) -> None:
    bucket.put([b"key-%d" % number], b'{"number": %d, "turn": %d, "name": "n%d"}' % (number, turn, number * 7919))


def size_bytes(folder: Path) -> int:
    """All files in it. One that is deleted meanwhile counts as none."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(path, name))
            except FileNotFoundError:
                continue
    return total


def live_bytes(table: Path) -> int:
    return sum(pa.table(DeltaTable(table).get_add_actions(flatten=True)).column("size_bytes").to_pylist())


@pytest.mark.soak
@pytest.mark.parametrize("updates_per_s", [20, 1000])
def test_bytes_are_flat_after_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates_per_s: int) -> None:
    without_spark(monkeypatch)
    monkeypatch.setattr(dead_files, "READERS_S_MIN", dead_files.READERS_S_MIN * SCALE)
    monkeypatch.setattr(dead_files, "DEAD_BYTES_MIN", round(dead_files.DEAD_BYTES_MIN * SCALE))
    with SparkNode(tmp_path / "node", vbuckets=64) as node:
        bucket = SourceBucket(node)
        for number in range(DOCUMENTS):
            write(bucket, number, -1)
        fresh = Freshness(wait_s_max=WAIT_S_MAX * SCALE)
        landing = replace(SimulatedLanding(bucket, tmp_path / "lake"), fresh=fresh, groups=None)
        landing.land()
        documents, changes = (landing.folder / table for table in (f"documents/{DEFAULT}", "changes"))
        began_s, seen = time.monotonic(), []
        writer, query = SteadyWriter(bucket, updates_per_s), landing.start(every_s=EVERY_S)
        writer.start()
        for sample in range(SAMPLES + 1):
            query.awaitTermination(max(0.0, began_s + sample * RUN_S / SAMPLES - time.monotonic()))
            on_disk, live, log = size_bytes(documents), live_bytes(documents), size_bytes(documents / "_delta_log")
            seen.append((on_disk - log) / live)
            print(
                f"{updates_per_s}/s {time.monotonic() - began_s:6.0f} s: documents {on_disk / 1e6:7.2f} MB, "
                f"live {live / 1e6:6.2f} MB, log {log / 1e6:5.2f} MB, changes {size_bytes(changes) / 1e6:7.2f} MB, "
                f"live {live_bytes(changes) / 1e6:7.2f} MB; {writer.written} updates, "
                f"version {DeltaTable(documents).version()}",
                flush=True,
            )
        writer.stop()
        query.processAllAvailable()
        query.stop()
        landing.check_equal()
        bucket.close()
    # The newest versions are kept for readers: what a merge a minute leaves in five. Two more are on their way.
    versions = dead_files.READERS_S_MIN / fresh.wait_s_max * (2 if updates_per_s == 1000 else 1)
    print(f"bytes in times of the live table: {[round(it, 1) for it in seen]}")
    half = SAMPLES // 2
    assert max(seen) < 3 + max(4.0, versions)
    assert max(seen[half:]) < 1.3 * max(seen[half // 2 : half]), "it is flat after the bound"

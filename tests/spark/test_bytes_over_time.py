"""Bytes on the disk while documents are updated at a steady rate: flat after the bound, whatever is landed.

Times and sizes are those of the defaults, shortened together: `HEADWATER_BYTES_S=1800` is half an hour with 100,000
documents and the defaults themselves. Bytes are counted by a walk over the directory.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.lake import upkeep
from headwater.landing.planning import WAIT_S_MAX, Freshness
from support.document_writer import SET, DocumentWriter
from support.driven_source import SimulatedLanding
from support.landings import DEFAULT, SourceBucket, SparkNode
from support.node_process import NodeProcess

WHOLE_S = 1800.0
RUN_S = float(os.environ.get("HEADWATER_BYTES_S", "120"))
SCALE = RUN_S / WHOLE_S
DOCUMENTS = round(100_000 * SCALE)
EVERY_S = 5.0 * SCALE
SAMPLES = 30
VBUCKETS = 64


class SteadyWriter(DocumentWriter):
    """Writes every document once, and then random ones, so many a second."""

    def __init__(self, node: NodeProcess, updates_per_s: int) -> None:
        super().__init__(node, documents=DOCUMENTS, vbuckets=VBUCKETS, writes_per_s=updates_per_s, seed=8)
        while self.writes < DOCUMENTS:
            self._write_batch()
        self._batch_writes = updates_per_s // 10

    def _next_write(self) -> bytes:
        number = self.writes if self.writes < DOCUMENTS else self._random.randrange(DOCUMENTS)
        self.writes += 1
        value = b'{"number": %d, "turn": %d, "name": "n%d"}' % (number, self.writes, number * 7919)
        return self._request(SET, number, extras=bytes(8), value=value)


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
    monkeypatch.setattr(upkeep, "READERS_S_MIN", upkeep.READERS_S_MIN * SCALE)
    monkeypatch.setattr(upkeep, "DEAD_BYTES_MIN", round(upkeep.DEAD_BYTES_MIN * SCALE))
    with SparkNode(tmp_path / "node", vbuckets=VBUCKETS) as node:
        bucket, writer = SourceBucket(node), SteadyWriter(node.process, updates_per_s)
        fresh = Freshness(wait_s_max=WAIT_S_MAX * SCALE)
        landing = replace(SimulatedLanding(bucket, tmp_path / "lake"), fresh=fresh, groups=None)
        landing.land()
        documents, changes = (landing.folder / table for table in (f"documents/{DEFAULT}", "changes"))
        began_s, seen = time.monotonic(), []
        query = landing.start(every=EVERY_S)
        writer.start()
        for sample in range(SAMPLES + 1):
            query.awaitTermination(max(0.0, began_s + sample * RUN_S / SAMPLES - time.monotonic()))
            on_disk, live, log = size_bytes(documents), live_bytes(documents), size_bytes(documents / "_delta_log")
            seen.append((on_disk - log) / live)
            print(
                f"{updates_per_s}/s {time.monotonic() - began_s:6.0f} s: documents {on_disk / 1e6:7.2f} MB, "
                f"live {live / 1e6:6.2f} MB, log {log / 1e6:5.2f} MB, changes {size_bytes(changes) / 1e6:7.2f} MB, "
                f"live {live_bytes(changes) / 1e6:7.2f} MB; {writer.writes - DOCUMENTS} updates, "
                f"version {DeltaTable(documents).version()}",
                flush=True,
            )
        writer.stop()
        query.processAllAvailable()
        query.stop()
        landing.check_equal()
        writer.close()
        bucket.close()
    print(f"bytes in times of the live table: {[round(it, 1) for it in seen]}")
    half = SAMPLES // 2
    # The versions of five minutes are kept for readers, of which there are two a minute at most, and more at first.
    assert max(seen) < 12
    assert max(seen[half:]) < 1.3 * max(seen[half // 2 : half]), "it is flat after the bound"

"""What is left of a read at its end, held against a dictionary that is written, rolled back and flushed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.transfer.export_files import DocumentSpool
from support.commands import batch_of, document, event, rollback

COLLECTIONS = {8: "orders", 9: "users"}


def place(vbucket: int, seqno: int, snapshot: tuple[int, int]) -> dict[str, int]:
    return {"vbucket": vbucket, "seqno": seqno, "snapshot_start": snapshot[0], "snapshot_end": snapshot[1]}


def in_collection(collection_id: int) -> dict[str, Any]:
    return {"scope": "shop", "collection": COLLECTIONS[collection_id], "collection_id": collection_id}


def exported(folder: Path, batches: list[pa.RecordBatch]) -> dict[tuple[str, bytes], bytes]:
    spool = DocumentSpool(folder)
    for batch in batches:
        spool.add(batch)
    found = {}
    for name in spool.collections():
        for batch in spool.documents(name):
            for row in batch.to_pylist():
                assert (name[1], row["key"]) not in found, "a key is there once"
                found[name[1], row["key"]] = row["value"]
    return found


class History:
    """Writes rows as a server would send them, and knows what they add up to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: list[dict[str, Any]] = []
        self.states: dict[int, list[tuple[int, dict[tuple[int, bytes], bytes]]]] = {
            vbucket: [(0, {})] for vbucket in (3, 5)
        }
        """Of each vbucket: the seqnos at which a snapshot was complete, and what was there then."""

    def snapshot(self, vbucket: int) -> None:
        seqno, before = self.states[vbucket][-1]
        now = dict(before)
        keys = self.random.sample([(c, b"k%d" % k) for c in COLLECTIONS for k in range(4)], self.random.randint(1, 6))
        end = seqno + len(keys)
        for number, (collection_id, key) in enumerate(keys, start=1):
            where = place(vbucket, seqno + number, (seqno, end)) | in_collection(collection_id)
            if self.random.random() < 0.25:
                self.rows.append(document(op="deletion", key=key, value=None, **where))
                now.pop((collection_id, key), None)
            else:
                value = b"%d" % self.random.randrange(10**9)
                self.rows.append(document(key=key, value=value, **where))
                now[collection_id, key] = value
        self.states[vbucket].append((end, now))

    def roll_back(self, vbucket: int) -> None:
        keep = self.random.randint(1, len(self.states[vbucket]))
        from_seqno = self.states[vbucket][-1][0]
        del self.states[vbucket][keep:]
        self.rows.append(rollback(vbucket=vbucket, seqno=self.states[vbucket][-1][0], from_seqno=from_seqno))

    def drop(self, vbucket: int) -> None:
        seqno, before = self.states[vbucket][-1]
        gone = self.random.choice(list(COLLECTIONS))
        op = self.random.choice(["collection_dropped", "collection_created"])
        where = place(vbucket, seqno + 1, (seqno, seqno + 1)) | in_collection(gone)
        self.rows.append(event(op, **where))
        now = {name: value for name, value in before.items() if name[0] != gone}
        self.states[vbucket].append((seqno + 1, now))

    def batches(self) -> Iterator[pa.RecordBatch]:
        at = 0
        while at < len(self.rows):
            size = self.random.randint(1, 9)
            yield batch_of(*self.rows[at : at + size])
            at += size


@pytest.mark.parametrize("seed", range(60))
def test_what_is_exported_is_what_the_history_adds_up_to(tmp_path: Path, seed: int) -> None:
    history = History(seed)
    for _ in range(history.random.randint(1, 30)):
        vbucket = history.random.choice([3, 5])
        step = history.random.choices([history.snapshot, history.roll_back, history.drop], weights=[6, 1, 1])[0]
        step(vbucket)
    # Keys of one name are in one vbucket only, as a hash would have it.
    rows = [row for row in history.rows if row["key"] is None or (row["key"][-1] % 2 == 0) == (row["vbucket"] == 3)]
    history.rows = rows
    expected = {
        (COLLECTIONS[collection_id], key): value
        for vbucket, states in history.states.items()
        for (collection_id, key), value in states[-1][1].items()
        if (key[-1] % 2 == 0) == (vbucket == 3)
    }
    assert exported(tmp_path, list(history.batches())) == expected


def test_a_bucket_at_rest_keeps_no_keys_in_memory(tmp_path: Path) -> None:
    rows = [document(key=b"k%d" % n, **place(7, n, (0, 100)), **in_collection(8)) for n in range(1, 101)]
    spool = DocumentSpool(tmp_path)
    spool.add(batch_of(*rows[:50]))
    spool.add(batch_of(*rows[50:]))
    assert spool._survivors._later == []
    assert spool.rows == 100

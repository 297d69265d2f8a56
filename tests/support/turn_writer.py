"""A writer whose writes have one order, and a checker that compares every version of the tables with it.

The writer has one document for each vbucket and collection. It writes them in turn, each write with the next number,
and acknowledged before the next begins: after write 17, the bucket is exactly what writes 0 to 17 have left. So the
contents of a table are a state of the bucket if they are what the writes up to its highest number have left.

The checker reads logs and files with deltalake, and uses none of our code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deltalake import DeltaTable

from support.landings import DEFAULT, SourceBucket
from support.live_bucket import Working

OTHER = "_default.other"


class TurnWriter(Working):
    """Writes without a pause until the `with` block ends."""

    def __init__(self, bucket: SourceBucket) -> None:
        super().__init__("turn writer", bucket)
        self._bucket.create_collection(OTHER)
        vbuckets = bucket.node.vbuckets
        self.turns = [
            (bucket.keys("turn", 1, vbucket=vbucket)[0].decode(), collection)
            for vbucket in range(vbuckets)
            for collection in (DEFAULT, OTHER)
        ]
        self.acknowledged_s: list[float] = []
        """By number: when the write was acknowledged."""
        for _ in self.turns:
            self._write()

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._write()

    def _write(self) -> None:
        number = len(self.acknowledged_s)
        key, collection = self.turns[number % len(self.turns)]
        self._bucket.put([key.encode()], b'{"n":%d}' % number, into=collection)
        self.acknowledged_s.append(time.time())

    def newest(self, upto: int, turn: int) -> int:
        """Return the last write of a turn among those up to a number."""
        return upto - (upto - turn) % len(self.turns)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a table of documents."""

    number: int
    batch: int
    as_of_s: float | None
    rows: Mapping[str, int]
    """By key: the number of the write in the document."""


def versions(folder: Path, collection: str) -> Iterator[Version]:
    """Yield all versions in the log that say which batch they belong to."""
    path = folder / "documents" / collection
    for number in range((DeltaTable(path).version() or 0) + 1):
        lines = (path / "_delta_log" / f"{number:020}.json").read_text().splitlines()
        about = next(json.loads(line)["commitInfo"] for line in lines if "commitInfo" in json.loads(line))
        if "headwater.batch" in about:
            rows = DeltaTable(path, version=number).to_pyarrow_table(columns=["key", "document"]).to_pylist()
            as_of = about.get("headwater.as_of")
            yield Version(
                number,
                int(about["headwater.batch"]),
                None if as_of is None else datetime.fromisoformat(as_of).timestamp(),
                {row["key"]: json.loads(row["document"])["n"] for row in rows},
            )


@dataclass
class CutChecker:
    """Checks every version of the tables, when the writer has stopped."""

    folder: Path
    writer: TurnWriter
    looked_at: int = 0
    torn: int = 0
    """The number of versions that are not a state that the bucket had."""

    def check(self, *, consistent: bool) -> None:
        tables = {collection: [*versions(self.folder, collection)] for collection in (DEFAULT, OTHER)}
        for collection, held in tables.items():
            for version in held:
                if version.rows:
                    self._look(version.rows, self._turns(collection), version.as_of_s)
        for batch in sorted({version.batch for held in tables.values() for version in held if version.rows}):
            # All collections of a batch: for each table, the newest version up to that batch.
            of_batch = {
                collection: [version for version in held if version.batch <= batch][-1]
                for collection, held in tables.items()
            }
            rows = {
                (key, collection): number
                for collection, version in of_batch.items()
                for key, number in version.rows.items()
            }
            numbers = [rows.get(turn, -1) for turn in self.writer.turns]
            self._judge(numbers, range(len(self.writer.turns)))
        if consistent:
            assert not self.torn, f"{self.torn} of {self.looked_at} are states that the bucket never had"

    def _turns(self, collection: str) -> list[int]:
        return [turn for turn, (_, of) in enumerate(self.writer.turns) if of == collection]

    def _look(self, rows: Mapping[str, int], turns: Sequence[int], as_of_s: float | None) -> None:
        """Check the guide's promise: every vbucket is as it was at some time, and has everything that was
        acknowledged before `as_of`."""
        numbers = [rows.get(self.writer.turns[turn][0], -1) for turn in turns]
        acknowledged = self.writer.acknowledged_s
        for turn, number in zip(turns, numbers, strict=True):
            assert number < 0 or number % len(self.writer.turns) == turn, "another document"
        assert as_of_s is not None, "the bucket was surveyed"
        before = next((at for at in range(len(acknowledged) - 1, -1, -1) if acknowledged[at] <= as_of_s), None)
        assert before is not None, "the first documents were there when it began"
        late = {
            turn: number
            for turn, number in zip(turns, numbers, strict=True)
            if number < self.writer.newest(before, turn)
        }
        assert not late, f"write {before} was acknowledged before {as_of_s}, and the table has {late}"
        self._judge(numbers, turns)

    def _judge(self, numbers: Sequence[int], turns: Sequence[int]) -> None:
        self.looked_at += 1
        highest = max(numbers)
        self.torn += any(
            number != self.writer.newest(highest, turn) for turn, number in zip(turns, numbers, strict=True)
        )

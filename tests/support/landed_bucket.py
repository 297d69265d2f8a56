"""A bucket with the tables that it is landed in, and what must be true of both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.verify import Verification, compare
from headwater.spark.freshness import Freshness
from headwater.spark.landing import Landing
from headwater.spark.landing_loop import LandedBatch
from support.lake_checks import check_no_duplicates, table_rows
from support.spark_node import SourceBucket

GROUPS = 2
"""Fewer tasks of Spark than by default: here they hold a few rows each."""
ALWAYS_FRESH = Freshness(merge_share=1)
NEVER_FRESH = Freshness(merge_share=0, wait_s_max=1e9)
"""Merges are left to the end of a landing, and to what is urgent."""

Document = tuple[bytes, bytes]
"""Key and value."""


@dataclass
class LandedBucket:
    """Lands with Spark, and looks at the tables without it."""

    bucket: SourceBucket
    spark: SparkSession
    folder: Path
    rules: MergeRules = field(default_factory=MergeRules)
    fresh: Freshness = ALWAYS_FRESH
    options: dict[str, str] = field(default_factory=dict)
    batches: list[LandedBatch] = field(default_factory=list)
    """Of the last landing."""

    @property
    def landing(self) -> Landing:
        return Landing(
            source={**self.bucket.options, "minPartitions": "2", **self.options},
            into=str(self.folder),
            lake=LakeSettings(merging=self.rules),
            fresh=self.fresh,
            groups=GROUPS,
        )

    def land(self) -> None:
        """Land what there is."""
        self.batches.clear()
        self.landing.start(self.spark, on_batch=self.batches.append).awaitTermination()

    @property
    def rolled_back(self) -> dict[int, int]:
        """By vbucket the seqno that was kept, in the last landing."""
        return {vbucket: kept for batch in self.batches for vbucket, kept in batch.rollbacks.items()}

    # --- what is there --------------------------------------------------------------------------------------------

    def compare(self) -> Verification:
        return compare(self.bucket.settings, str(self.folder))

    def rows(self, kind: str, collection: str | None = None) -> list[dict[str, Any]]:
        """The rows of a table as anybody can read them."""
        return table_rows(self.folder / kind if collection is None else self.folder / kind / collection)

    def documents(self, collection: str) -> dict[bytes, bytes]:
        found = [(key_of(row), value_of(row)) for row in self.rows("documents", collection)]
        assert len(dict(found)) == len(found), "a document is there twice"
        return dict(found)

    @property
    def tables(self) -> set[str]:
        return {path.name for path in (self.folder / "documents").iterdir()}

    def version(self) -> int:
        version = DeltaTable(self.folder / "changes").version()
        assert version is not None
        return version

    # --- what must be true ----------------------------------------------------------------------------------------

    def check_equal(self) -> None:
        """The tables are the bucket, by the digests and by what `changes` says."""
        found = self.compare()
        assert found.is_equal, [one.sentence for one in found.findings]
        assert found.pending == 0
        changes = self.rows("changes")
        check_no_duplicates(changes)
        check_delivery(changes)


def key_of(row: dict[str, Any]) -> bytes:
    key: bytes = row["key"].encode() if row["key_bytes"] is None else row["key_bytes"]
    return key


def value_of(row: dict[str, Any]) -> bytes:
    value: bytes = row["content"] if row["document"] is None else row["document"].encode()
    return value


def check_delivery(changes: list[dict[str, Any]]) -> None:
    """Also among those that are void, no change came twice in one batch, and none after it was taken back."""
    counts = Counter((row["batch"], row["vbucket"], row["seqno"]) for row in changes if row["op"] != "rollback")
    assert [place for place, count in counts.items() if count > 1] == []
    for rollback in (row for row in changes if row["op"] == "rollback"):
        taken_back = [
            row
            for row in changes
            if row["vbucket"] == rollback["vbucket"]
            and row["batch"] < rollback["batch"]
            and row["seqno"] > rollback["seqno"]
            and row["op"] != "rollback"
        ]
        assert all(row["void"] for row in taken_back)

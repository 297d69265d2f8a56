"""A lake that an earlier version has made goes on. (`data/` has one that the version before 0.2 made with the model
bucket: groups that are merged up to different batches, and places that are not the ends of snapshots.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.lake.commits import merge
from headwater.lake.lake import Lake, landed_selection
from headwater.protocol.numbers import VBucketId
from support.lake_model import SmallLake, check_documents, check_no_duplicates, lake_of_before, merging, with_columns

DEFAULT = "_default._default"


@pytest.fixture
def earlier(tmp_path: Path) -> SmallLake:
    return lake_of_before(tmp_path, with_columns(merging(history=True), {"*": "n INT"}))


def test_what_it_does_not_say_is_not_known(earlier: SmallLake) -> None:
    lake = earlier.lake
    assert (lake.state.batch, lake.state.as_of_s, lake.state.totals, lake.state.rollbacks) == (1, None, None, None)
    assert lake.boundaries == {}, "its places are not the ends of snapshots"
    assert not lake.held_offsets()[VBucketId(0)].is_whole
    assert str(landed_selection(lake)) == "all collections"


def test_its_groups_are_merged_to_one_batch(earlier: SmallLake) -> None:
    documents = earlier.lake.tables[DEFAULT].documents
    assert documents is not None
    assert documents.merged == {0: 0, 1: 1}
    merge(earlier.lake)
    assert documents.merged == {0: 1, 1: 1}
    check_documents(earlier.rows(f"documents/{DEFAULT}"), earlier.bucket.sent_documents())


def test_it_is_landed_into_and_takes_rollbacks(earlier: SmallLake) -> None:
    earlier.write(0, "key-1", value=b'{"n": 3}')
    earlier.land([0])
    assert earlier.lake.boundaries == {VBucketId(0): [22], VBucketId(1): [0], VBucketId(2): [], VBucketId(3): [0]}
    assert earlier.reopen().boundaries == earlier.lake.boundaries
    earlier.bucket.fail_over(0, 21)
    earlier.bucket.fail_over(2, 1)
    earlier.write(2, "f", value=b'{"n": 4}')
    earlier.land()
    lake = Lake.open(str(earlier.directory))
    assert lake is not None
    assert lake.held_offsets() == earlier.bucket.offsets()
    check_documents(earlier.rows(f"documents/{DEFAULT}"), earlier.bucket.sent_documents())
    check_no_duplicates(earlier.rows("changes"))
    assert [row["key"] for row in earlier.rows(f"rejects/{DEFAULT}")] == []
    # It keeps its format, so that the version before can still read it.
    for entry in earlier.directory.rglob("_delta_log/*.json"):
        assert "headwater.state.difference" not in entry.read_text(), entry

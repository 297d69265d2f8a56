"""Tables that another engine has written again: they are landed into as before, and what is equal stays equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.upkeep import join_files
from headwater.lake.verify_scan import FindingKind
from support.lake_model import SmallLake, verify_model, with_columns

NAME = "_default._default"
TABLES = ["changes", f"documents/{NAME}", f"history/{NAME}", f"rejects/{NAME}"]
COLUMNS = "n INT, s STRING, tags ARRAY<STRING>, place STRUCT<city: STRING, zip: INT>"
FITS = b'{"n":1,"s":"a","tags":["x","y"],"place":{"city":"Graz","zip":8010}}'


@pytest.fixture
def small(tmp_path: Path) -> SmallLake:
    """With some files in every table."""
    return filled(tmp_path / "lake", LakeSettings(merging=MergeRules(history=True)))


def filled(directory: Path, settings: LakeSettings) -> SmallLake:
    small = SmallLake(directory, settings=with_columns(settings, {"*": COLUMNS}))
    for number in range(3):
        for vbucket in range(4):
            small.write(vbucket, *(f"k-{number}-{at}" for at in range(4)), value=FITS)
            small.write(vbucket, f"odd-{number}", value=b'{"n":"no number"}')
            small.bucket.change(vbucket, "mutation", 0, b"\xff%d" % number, b"\x00", is_json=False)
            if vbucket < 2:
                # In the other group nothing is replaced, so that it has a file from each batch.
                small.write(vbucket, "often", value=FITS)
        small.land()
    return small


def optimize(table: DeltaTable) -> None:
    table.optimize.compact()


def z_order(table: DeltaTable) -> None:
    table.optimize.z_order(["key"])


def update(table: DeltaTable) -> None:
    assert table.update(predicate="seqno > 0", updates={"flags": "flags"})["num_updated_rows"] > 0


def overwrite(table: DeltaTable) -> None:
    write_deltalake(table, table.to_pyarrow_table(), mode="overwrite")


def merge(table: DeltaTable) -> None:
    rows = table.to_pyarrow_table()
    on = "t.vbucket = s.vbucket and t.seqno = s.seqno"
    merging = table.merge(rows, on, source_alias="s", target_alias="t").when_matched_update_all()
    assert merging.execute()["num_target_rows_updated"] == rows.num_rows


def delete_and_append(table: DeltaTable) -> None:
    rows = table.to_pyarrow_table()
    assert table.delete("seqno > 0")["num_deleted_rows"] == rows.num_rows
    write_deltalake(table, rows, mode="append")


REWRITES = [optimize, z_order, update, overwrite, merge, delete_and_append]


@pytest.mark.parametrize(
    ("rewrite", "table"),
    [
        # Each way and each table in every run, and all pairs of them in the soak.
        pytest.param(rewrite, table, marks=[] if at % len(TABLES) == place else pytest.mark.soak)
        for at, rewrite in enumerate(REWRITES)
        for place, table in enumerate(TABLES)
    ],
)
def test_what_is_rewritten_is_equal_and_landed_into(
    small: SmallLake, rewrite: Callable[[DeltaTable], None], table: str
) -> None:
    before = set(DeltaTable(small.directory / table).file_uris())
    rewrite(DeltaTable(small.directory / table))
    assert before != set(DeltaTable(small.directory / table).file_uris()), "it has been written again"
    small.reopen()
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    # Everything that a merge does: replace, remove, add, and take back.
    for vbucket in range(4):
        small.write(vbucket, "often", "k-0-1", "new", value=FITS)
        small.bucket.change(vbucket, "deletion", 0, b"k-1-1")
        small.bucket.change(vbucket, "mutation", 0, b"odd-1", FITS)
    small.land()
    small.bucket.fail_over(1, small.bucket.vbuckets[1].whole_seqnos[-2])
    small.write(1, "after", value=FITS)
    small.land()
    join_files(small.lake, file_bytes=1 << 20)
    small.reopen()
    found = verify_model(small.lake, small.bucket)
    assert found.findings.first() == ()
    assert (found.counts[NAME].pending, found.counts[NAME].differing) == (0, 0)
    assert found.counts[NAME].landed == len(small.rows(f"documents/{NAME}"))


def test_variants_that_are_rewritten(tmp_path: Path) -> None:
    """Also where the parts of a variant are the other way round. One that is shredded is not taken for another."""
    small = filled(tmp_path / "lake", LakeSettings(merging=MergeRules(history=True), document="variant"))
    for table in TABLES[1:]:
        optimize(DeltaTable(small.directory / table))
    small.reopen()
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    rewrite_variants(
        small, lambda metadata, value: pa.StructArray.from_arrays([value, metadata], ["value", "metadata"])
    )
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    for vbucket in range(4):
        small.write(vbucket, "often", "new", value=FITS)
    small.land()
    join_files(small.lake, file_bytes=1 << 20)
    small.reopen()
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    rewrite_variants(
        small,
        lambda metadata, value: pa.StructArray.from_arrays(
            [metadata, value, value], ["metadata", "value", "typed_value"]
        ),
    )
    (found,) = (it for it in verify_model(small.lake, small.bucket).findings.first() if it.kind.endswith("file"))
    assert "shredded" in found.sentence


def rewrite_variants(small: SmallLake, shape: Callable[[pa.Array, pa.Array], pa.Array]) -> None:
    """Write a file of documents again, with its variants in another shape."""
    table = small.lake.tables[NAME].documents
    assert table is not None
    file = table.log.files()[0]
    rows = pq.read_table(small.directory / "documents" / NAME / file.path, partitioning=None)
    rows = rows.replace_schema_metadata(None)
    metadata, value = rows["document"].combine_chunks().flatten()
    rows = rows.set_column(rows.schema.get_field_index("document"), "document", shape(metadata, value))
    path = file.path.replace(".parquet", "-again.parquet")
    pq.write_table(rows, small.directory / "documents" / NAME / path)
    size_bytes = (small.directory / "documents" / NAME / path).stat().st_size
    table.commit(add=[replace(file, path=path, size_bytes=size_bytes)], remove=[file])
    small.reopen()


def test_what_is_changed_is_named_and_can_be_landed_over(small: SmallLake) -> None:
    table = DeltaTable(small.directory / "documents" / NAME)
    table.update(predicate="key = 'often' and vbucket = 1", updates={"document": "'{}'"})
    table.delete("key = 'k-1-1' and vbucket = 3")
    small.reopen()
    found = verify_model(small.lake, small.bucket).findings.first()
    kinds = {(one.kind, one.vbucket) for one in found}
    assert kinds == {
        (FindingKind.MISSING, 3), (FindingKind.DIFFERS, 1), (FindingKind.TYPED_COLUMN, 1)
    }  # fmt: skip
    assert all("rewritten by another engine" in one.sentence for one in found if one.kind is not FindingKind.MISSING)
    small.write(1, "often", value=FITS)
    small.write(3, "k-1-1", value=FITS)
    small.land()
    small.reopen()
    assert verify_model(small.lake, small.bucket).findings.first() == ()

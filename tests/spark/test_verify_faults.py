"""`headwater verify` finds what is wrong with a lake, and names it: the document or the file, and its table."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headwater.errors import LakeTaken
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake_look import keep_landing, read_landing
from headwater.lake.location import Location
from headwater.lake.repair import read_from_bucket, repair
from headwater.lake.verify import Verification, compare
from headwater.lake.verify_scan import FindingKind
from support.driven_source import SimulatedLanding
from support.landings import SourceBucket

VBUCKETS = 4
PEOPLE = "_default.people"
DEFAULT = "_default._default"
CHANGES, DOCUMENTS, HISTORY, REJECTS = "changes", f"documents/{PEOPLE}", f"history/{PEOPLE}", f"rejects/{PEOPLE}"
TABLES = (CHANGES, DOCUMENTS, HISTORY, REJECTS)
KEYS = [f"person-{number}" for number in range(40)]
REMOVED, ODD, CHANGED, TAGGED = KEYS[0], "odd", KEYS[1], "tagged"


def land(bucket: SourceBucket, folder: Path) -> None:
    """With all that a lake can have: typed columns, rejects, history, extended attributes."""
    SimulatedLanding(
        bucket,
        folder,
        rules=MergeRules(history=True),
        columns={PEOPLE: "name STRING, age INT, tags ARRAY<STRING>"},
        options={"xattrs": "true"},
    ).land()


@dataclass
class Landed:
    """A bucket, and a copy of its lake that may be damaged."""

    bucket: SourceBucket
    folder: Path

    def table(self, name: str) -> DeltaTable:
        return DeltaTable(self.folder / name)

    def rewrite(self, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
        """Another engine writes a table again."""
        rows = self.table(name).to_pyarrow_table()
        changed = change(rows)
        assert not changed.equals(rows), "the corruption has changed nothing"
        write_deltalake(self.folder / name, changed, mode="overwrite")

    def update(self, name: str, where: str, **values: str) -> None:
        assert self.table(name).update(predicate=where, updates=values)["num_updated_rows"] > 0

    def delete(self, name: str, where: str) -> None:
        assert self.table(name).delete(where)["num_deleted_rows"] > 0

    def file(self, name: str) -> Path:
        """One that the table's log names, in one of its groups."""
        return Path(sorted(self.table(name).file_uris())[-1])

    def verify(self) -> Verification:
        return compare(self.bucket.settings, str(self.folder))


@pytest.fixture(scope="module")
def lake(_buckets: Iterator[SourceBucket], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Landed]:
    bucket = next(_buckets)
    folder = tmp_path_factory.mktemp("verified") / "lake"
    bucket.create_collection(PEOPLE)
    for number, key in enumerate(KEYS):
        value = b'{"name":"%d","age":%d,"tags":["a","b"]}' % (number, 20 + number)
        bucket.put([key.encode()], value, into=PEOPLE)
    bucket.put([ODD.encode()], b'{"name":"odd","age":"unknown"}', into=PEOPLE)
    bucket.put([TAGGED.encode()], b'{"n":1}')
    bucket.set_xattr(TAGGED.encode(), b"owner", b'"me"')
    bucket.put([b"binary", b"\xff\xfe"], b"\x00\xff")
    land(bucket, folder)
    bucket.put([CHANGED.encode()], b'{"name":"new","age":50,"tags":[]}', into=PEOPLE)
    bucket.delete([REMOVED.encode()], of=PEOPLE)
    land(bucket, folder)
    yield Landed(bucket, folder)
    bucket.close()


@pytest.fixture
def landed(lake: Landed, tmp_path: Path) -> Landed:
    shutil.copytree(lake.folder, tmp_path / "lake")
    return Landed(lake.bucket, tmp_path / "lake")


def test_a_sound_lake_is_equal(landed: Landed) -> None:
    found = landed.verify()
    assert found.findings == ()
    assert found.is_equal
    assert {one.name: (one.landed, one.pending, one.differing) for one in found.collections} == {
        DEFAULT: (3, 0, 0),
        PEOPLE: (40, 0, 0),
    }
    assert found.sentence == "Equal: 43 documents in 2 collections."


# --- corruptions ----------------------------------------------------------------------------------------------------


def where(key: str) -> str:
    return f"key = '{key}'"


def with_first(column: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    """Sets a column in the row of a key."""

    def change(rows: pa.Table) -> pa.Table:
        values = rows.column(column).to_pylist()
        values[rows.column("key").to_pylist().index(TAGGED)] = value
        at = rows.schema.get_field_index(column)
        return rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))

    return change


def with_again(of: str, /, **values: Any) -> Callable[[pa.Table], pa.Table]:
    """Has the newest row of a key once more, with other values."""

    def change(rows: pa.Table) -> pa.Table:
        newest = max((row for row in rows.to_pylist() if row["key"] == of), key=lambda row: row["seqno"])
        again = pa.Table.from_pylist([{**newest, **values}], rows.schema)
        return pa.concat_tables([rows, again])

    return change


def in_content(key: str) -> Callable[[pa.Table], pa.Table]:
    """Has JSON in the column of what is none."""

    def change(rows: pa.Table) -> pa.Table:
        changed = [
            {**row, "content": row["document"].encode(), "document": None} if row["key"] == key else row
            for row in rows.to_pylist()
        ]
        return pa.Table.from_pylist(changed, rows.schema)

    return change


def flip(landed: Landed, name: str) -> None:
    """One bit in the middle of a file's data."""
    path = landed.file(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)


def cut_off(landed: Landed, name: str) -> None:
    path = landed.file(name)
    path.write_bytes(path.read_bytes()[:-100])


Corruption = Callable[[Landed], None]
CORRUPTIONS: dict[str, tuple[Corruption, FindingKind, str, str]] = {
    "a value in changes is null": (
        lambda it: it.update(CHANGES, where(KEYS[2]), value="NULL"), FindingKind.DIFFERS, CHANGES, KEYS[2],
    ),
    "a row of changes is deleted": (
        lambda it: it.delete(CHANGES, where(KEYS[2])), FindingKind.MISSING, CHANGES, KEYS[2],
    ),
    "a row of changes is void": (
        lambda it: it.update(CHANGES, where(KEYS[2]), void="true"), FindingKind.MISSING, CHANGES, KEYS[2],
    ),
    "a removal in changes is deleted": (
        lambda it: it.delete(CHANGES, where(REMOVED) + " and op = 'deletion'"), FindingKind.EXTRA, CHANGES, REMOVED,
    ),
    "both rows of a removed document are deleted": (
        lambda it: it.delete(CHANGES, where(REMOVED)), FindingKind.MISSING, CHANGES, REMOVED,
    ),
    "a change is there twice": (
        lambda it: it.rewrite(CHANGES, with_again(KEYS[2])), FindingKind.TWICE, CHANGES, KEYS[2],
    ),
    "a superseded version in changes is another": (
        lambda it: it.update(CHANGES, where(CHANGED) + " and batch = 0", flags="9"),
        FindingKind.MISSING, HISTORY, CHANGED,
    ),
    "all rows of history are deleted": (
        lambda it: it.delete(HISTORY, "true"), FindingKind.MISSING, HISTORY, KEYS[2],
    ),
    "an ended version of history is deleted": (
        lambda it: it.delete(HISTORY, where(CHANGED) + " and not is_current"), FindingKind.MISSING, HISTORY, CHANGED,
    ),
    "two versions hold at once": (
        lambda it: it.update(HISTORY, where(CHANGED) + " and not is_current", valid_to_seqno="valid_to_seqno + 1"),
        FindingKind.VALIDITY, HISTORY, CHANGED,
    ),
    "a version that has ended is current": (
        lambda it: it.update(HISTORY, where(REMOVED), is_current="true"), FindingKind.VALIDITY, HISTORY, REMOVED,
    ),
    "all rejects are deleted": (
        lambda it: it.delete(REJECTS, "true"), FindingKind.MISSING, REJECTS, ODD,
    ),
    "a reason is another": (
        lambda it: it.update(REJECTS, where(ODD), reason="'no reason'"), FindingKind.DIFFERS, REJECTS, ODD,
    ),
    "a reject that fits": (
        lambda it: it.update(REJECTS, where(ODD), key="'even'"), FindingKind.EXTRA, REJECTS, "even",
    ),
    "UPDATE of documents": (
        lambda it: it.update(DOCUMENTS, where(KEYS[2]), document="'{}'"), FindingKind.DIFFERS, DOCUMENTS, KEYS[2],
    ),
    "the CAS is another": (
        lambda it: it.update(DOCUMENTS, where(KEYS[2]), cas="cas + 1"), FindingKind.DIFFERS, DOCUMENTS, KEYS[2],
    ),
    "the time is another": (
        lambda it: it.update(DOCUMENTS, where(KEYS[2]), changed_at="NULL"), FindingKind.DIFFERS, DOCUMENTS, KEYS[2],
    ),
    "DELETE of documents": (
        lambda it: it.delete(DOCUMENTS, where(KEYS[2])), FindingKind.MISSING, DOCUMENTS, KEYS[2],
    ),
    "a document that the bucket does not have": (
        lambda it: it.rewrite(DOCUMENTS, with_again(KEYS[2], key="stranger")), FindingKind.EXTRA, DOCUMENTS, "stranger",
    ),
    "a document in a group that there is not": (
        lambda it: it.rewrite(DOCUMENTS, with_again(KEYS[2], key="stranger", vbucket_group=99, vbucket=77)),
        FindingKind.EXTRA, DOCUMENTS, "stranger",
    ),
    "a change in a vbucket that there is not": (
        lambda it: it.rewrite(CHANGES, with_again(KEYS[2], vbucket=77)), FindingKind.EXTRA, CHANGES, KEYS[2],
    ),
    "a document is there twice": (
        lambda it: it.rewrite(DOCUMENTS, with_again(KEYS[2])), FindingKind.TWICE, DOCUMENTS, KEYS[2],
    ),
    "a document that was removed is there": (
        lambda it: it.rewrite(DOCUMENTS, with_again(KEYS[2], key=REMOVED)), FindingKind.EXTRA, DOCUMENTS, REMOVED,
    ),
    "a typed column is another": (
        lambda it: it.update(DOCUMENTS, where(KEYS[2]), age="age + 1"), FindingKind.TYPED_COLUMN, DOCUMENTS, KEYS[2],
    ),
    "a nested column is another": (
        lambda it: it.update(DOCUMENTS, where(KEYS[2]), tags="NULL"), FindingKind.TYPED_COLUMN, DOCUMENTS, KEYS[2],
    ),
    "an xattr is another": (
        lambda it: it.rewrite(f"documents/{DEFAULT}", with_first("xattrs", [("owner", b'"you"')])),
        FindingKind.DIFFERS, f"documents/{DEFAULT}", TAGGED,
    ),
    "an xattr of changes is gone": (
        lambda it: it.rewrite(CHANGES, with_first("xattrs", None)), FindingKind.DIFFERS, CHANGES, TAGGED,
    ),
    "the value is in the wrong column": (
        lambda it: it.rewrite(DOCUMENTS, in_content(KEYS[2])), FindingKind.DIFFERS, DOCUMENTS, KEYS[2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_found_and_named(landed: Landed, name: str) -> None:
    corrupt, kind, table, what = CORRUPTIONS[name]
    corrupt(landed)
    found = landed.verify()
    assert not found.is_equal
    named = {(one.kind, one.table, one.what) for one in found.findings}
    assert (kind, table, what) in named, [one.sentence for one in found.findings]
    assert found.differing > 0
    assert found.sentence.startswith("Not equal: ")


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [
        (flip, FindingKind.DAMAGED_FILE),
        (cut_off, FindingKind.DAMAGED_FILE),
        (lambda it, table: it.file(table).unlink(), FindingKind.MISSING_FILE),
        (lambda it, table: it.file(table).write_bytes(b""), FindingKind.DAMAGED_FILE),
    ],
    ids=["a bit is flipped", "the end is cut off", "it is removed", "it is empty"],
)
def test_a_bad_file_of_each_table_is_named(
    landed: Landed, corrupt: Callable[[Landed, str], None], kind: FindingKind
) -> None:
    paths = {table: landed.file(table).relative_to(landed.folder / table) for table in TABLES}
    for table in TABLES:
        corrupt(landed, table)
    found = landed.verify()
    assert not found.is_equal
    named = sorted((one.table, one.what) for one in found.findings if one.kind is kind)
    assert named == sorted((table, str(path)) for table, path in paths.items())
    assert f"4 files are {kind.partition(' ')[0]}" in found.sentence


def test_a_rewritten_file_is_told_by_its_engine(landed: Landed) -> None:
    landed.update(DOCUMENTS, where(KEYS[2]), flags="9")
    (one,) = landed.verify().findings
    assert one.file is not None
    assert (landed.folder / DOCUMENTS / one.file).exists()
    assert f"file {one.file}, rewritten by another engine, " in one.sentence


def test_a_table_that_was_removed_is_named(landed: Landed) -> None:
    shutil.rmtree(landed.folder / DOCUMENTS)
    found = landed.verify()
    assert (FindingKind.MISSING_TABLE, DOCUMENTS) in found.counts
    assert found.sentence == "Not equal: 1 table is missing; 41 newer changes are pending."


def log_entries(landed: Landed, table: str) -> list[Path]:
    return sorted((landed.folder / table / "_delta_log").glob("*.json"))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("entry", [0, -1])
def test_a_log_that_is_damaged_is_named(landed: Landed, table: str, entry: int) -> None:
    path = log_entries(landed, table)[entry]
    path.write_bytes(path.read_bytes()[:-20] + b"\xff")
    found = landed.verify()
    assert [(one.kind, one.table) for one in found.findings] == [(FindingKind.DAMAGED_LOG, table)]
    assert "\n" not in found.findings[0].sentence
    assert found.sentence == "Not equal: 1 log is damaged."


def test_a_log_that_has_lost_its_last_batch_is_named(landed: Landed) -> None:
    log_entries(landed, CHANGES)[-1].unlink()
    found = landed.verify()
    assert not found.is_equal
    (one,) = (one for one in found.findings if one.kind is FindingKind.DAMAGED_LOG)
    assert one.sentence.startswith("changes: _delta_log ends with batch 0, and documents/")
    assert "1 log is damaged" in found.sentence


# --- lakes that nothing was landed into -------------------------------------------------------------------------------


def test_a_lake_whose_landings_have_all_failed_is_not_equal(bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.put([b"a", b"b"], b"{}")

    def fail(step: str) -> None:
        if step in ("commit changes", "run merges"):
            raise RuntimeError(step)

    landing = SimulatedLanding(bucket, tmp_path, step=fail)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            landing.land()
    found = compare(bucket.settings, str(tmp_path))
    assert {one.kind for one in found.findings} == {FindingKind.NEVER_LANDED}
    assert found.sentence == (
        "Not equal: no landing has succeeded yet: see why it fails, and land again; 2 newer changes are pending."
    )
    landing.step = lambda step: None
    landing.land()
    assert compare(bucket.settings, str(tmp_path)).is_equal


def test_a_table_that_was_never_merged_is_not_equal(bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.put([b"a", b"b"], b"{}")

    def fail(step: str) -> None:
        if step == "run merges":
            raise RuntimeError(step)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            SimulatedLanding(bucket, tmp_path, step=fail).land()
        bucket.put([b"c"], b"{}")
    # A first merge may still be under way while the last batch is young.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.lake.verify.MAKING_S_MAX", 0.0)
        found = compare(bucket.settings, str(tmp_path))
    assert [(one.kind, one.table) for one in found.findings] == [(FindingKind.NEVER_LANDED, f"documents/{DEFAULT}")]


# --- repairing ------------------------------------------------------------------------------------------------------


def test_a_repair_reads_from_the_bucket_what_changes_has_lost(landed: Landed) -> None:
    landed.update(CHANGES, where(KEYS[2]), value="NULL", scope="'other'")
    landed.delete(DOCUMENTS, where(KEYS[3]))
    location = Location.of(str(landed.folder))
    done = repair(location, landed.verify, read_from_bucket(landed.bucket.settings))
    assert done.left.is_equal, [one.sentence for one in done.left.findings]
    assert [sentence.partition(":")[0] for sentence in done.done] == [CHANGES, DOCUMENTS]
    assert [sentence.partition(":")[0] for sentence in done.lost] == [CHANGES]
    assert done.left.landed == 43
    # The next landing goes on from there.
    land(landed.bucket, landed.folder)
    assert landed.verify().is_equal


def test_a_repair_ends_where_a_landing_is_at_work(landed: Landed) -> None:
    location = Location.of(str(landed.folder))
    note = read_landing(location)
    assert note is not None
    keep_landing(location, replace(note, is_running=True, time_s=time.time()))
    with pytest.raises(LakeTaken, match="Stop it"):
        repair(location, landed.verify, read_from_bucket(landed.bucket.settings))


def test_a_lake_that_was_rewritten_is_landed_into_again(bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.create_collection(PEOPLE)
    keys = [f"person-{number}".encode() for number in range(20)]
    bucket.put(keys, b'{"name":"a","age":1,"tags":["x"]}', into=PEOPLE)
    bucket.put([ODD.encode()], b'{"age":"unknown"}', into=PEOPLE)
    bucket.put([TAGGED.encode()], b"{}")
    bucket.set_xattr(TAGGED.encode(), b"owner", b'"me"')
    land(bucket, tmp_path / "lake")
    landed = Landed(bucket, tmp_path / "lake")
    for name in (CHANGES, DOCUMENTS, HISTORY, REJECTS, f"documents/{DEFAULT}"):
        write_deltalake(landed.folder / name, landed.table(name).to_pyarrow_table(), mode="overwrite")
    assert landed.verify().findings == ()
    bucket.put(keys[:3], b'{"name":"b"}', into=PEOPLE)
    bucket.delete(keys[3:5], of=PEOPLE)
    bucket.set_xattr(TAGGED.encode(), b"owner", b'"you"')
    land(bucket, landed.folder)
    found = landed.verify()
    assert found.findings == ()
    assert (found.landed, found.pending) == (20, 0)

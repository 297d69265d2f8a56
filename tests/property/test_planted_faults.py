"""`headwater verify` finds every fault that is planted in a lake and names its table; `headwater repair` repairs it.

The planter knows Parquet and the text of Delta's log, and nothing of Headwater. What it changes in a file it does not
leave for the statistics to find: those of the file go from the log, or are the fault.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.lake import layout, upkeep
from headwater.lake.change_files import ChangeReport, ChangeWriter
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.layout import STATE_FOLDER
from headwater.lake.location import Location
from headwater.lake.repair import repair
from headwater.lake.table_state import unpack_state
from headwater.lake.typed_columns import TypedColumns
from headwater.lake.upkeep import grow_groups, join_files, trim_changes
from headwater.lake.verify import Verification
from headwater.protocol.numbers import VBucketId
from support.lake_model import HOTEL, ModelBucket, SmallLake, batches, compare_model, use_vectors

VBUCKETS = 4
STEADY, ROLLED, EMPTY = (0, 1), 2, 3
"""Vbuckets: without a rollback, with one, and one that nothing was ever written to."""
DROPPED = 9
PEOPLE = "inventory.hotel"
CHANGES, DOCUMENTS, HISTORY, REJECTS = "changes", *(f"{it}/{PEOPLE}" for it in ("documents", "history", "rejects"))
Row = dict[str, Any]


def built(directory: Path, *, columns: str | None = "n BIGINT, name STRING", history: bool = True) -> SmallLake:
    """A lake with all that there can be: removals, rollbacks, dropped collections, odd keys and values, rejects,
    extended attributes, several batches, and changes that are not landed yet."""
    bucket = ModelBucket(VBUCKETS)
    bucket.has_xattrs = True
    bucket.names[DROPPED] = ("inventory", "route")
    settings = LakeSettings(
        merging=MergeRules(history=history), columns={} if columns is None else {"*": TypedColumns.from_ddl(columns)}
    )
    small = SmallLake(directory, bucket=bucket, groups=2, settings=settings)
    owner = (("owner", b'"me"'),)
    for vbucket in (*STEADY, ROLLED):
        for number in range(6):
            value = b'{"n": %d, "name": "%c"}' % (number, 97 + number)
            bucket.change(vbucket, "mutation", HOTEL, b"key-%d" % number, value, flags=7, expiry=9, xattrs=owner)
        bucket.change(vbucket, "mutation", HOTEL, b"odd", b'{"n": "two"}')
        bucket.change(vbucket, "mutation", HOTEL, b"\xff\xfe", b"\x00\xff", is_json=False)
        bucket.change(vbucket, "mutation", 0, b"other", b"{}")
        bucket.change(vbucket, "mutation", DROPPED, b"gone", b"{}")
    small.land()
    for vbucket in (*STEADY, ROLLED):
        bucket.change(vbucket, "mutation", HOTEL, b"key-1", b'{"n": 11}')
        bucket.change(vbucket, "deletion", HOTEL, b"key-2")
        bucket.change(vbucket, "expiration", HOTEL, b"key-3")
        bucket.change(vbucket, "collection_dropped", DROPPED)
    small.land()
    bucket.change(ROLLED, "mutation", HOTEL, b"dead", b"{}")
    small.land([ROLLED])
    bucket.fail_over(ROLLED, bucket.vbuckets[ROLLED].high_seqno - 1)
    for vbucket in (*STEADY, ROLLED):
        bucket.change(vbucket, "mutation", HOTEL, b"key-4", b'{"n": 44}', xattrs=owner)
        bucket.change(vbucket, "mutation", HOTEL, b"last", b'{"n": "three"}')
    small.land()
    # What is pending must not hide a fault of what is landed.
    bucket.change(0, "mutation", HOTEL, b"key-5", b'{"n": 55}')
    return small


def with_vectors(directory: Path) -> SmallLake:
    small = built(directory)
    use_vectors(small.lake)
    return small


@cache
def sound(make: Callable[[Path], SmallLake] = built) -> tuple[ModelBucket, Path]:
    """Made once; every fault gets a copy."""
    small = make(Path(tempfile.mkdtemp(prefix="sound-lake-")))
    return small.bucket, small.directory


# --- the planter ------------------------------------------------------------------------------------------------------


@dataclass
class Planter:
    """A copy of a lake, in which faults are planted at random places."""

    folder: Path
    bucket: ModelBucket
    random: random.Random

    def newest(self, row: Row) -> bool:
        """The bucket still has this very version."""
        key = row["key_bytes"] if row["key_bytes"] is not None else (row["key"] or "").encode()
        ours = [it for it in self.bucket.vbuckets[row["vbucket"]].changes if it.key == key]
        ours = [it for it in ours if it.collection_id == row["collection_id"]]
        return bool(ours) and ours[-1].seqno == row["seqno"]

    # --- the log ------------------------------------------------------------------------------------------------------

    def entries(self, table: str) -> list[Path]:
        return sorted((self.folder / table / "_delta_log").glob("*.json"))

    def edit_log(self, table: str, edit: Callable[[dict[str, Any]], None]) -> None:
        """Change every action of a table's log."""
        for path in self.entries(table):
            actions = [json.loads(line) for line in path.read_text().splitlines()]
            for action in actions:
                edit(action)
            path.write_text("".join(f"{json.dumps(action, separators=(',', ':'))}\n" for action in actions))

    def live(self, table: str) -> list[dict[str, Any]]:
        """The `add` actions that hold."""
        found: dict[str, dict[str, Any]] = {}
        for path in self.entries(table):
            for line in path.read_text().splitlines():
                action = json.loads(line)
                if "add" in action:
                    found[action["add"]["path"]] = action["add"]
                if "remove" in action:
                    found.pop(action["remove"]["path"], None)
        return [found[path] for path in sorted(found)]

    def edit_add(self, table: str, path: str, edit: Callable[[dict[str, Any]], None]) -> None:
        def change(action: dict[str, Any]) -> None:
            if action.get("add", {}).get("path") == path:
                edit(action["add"])

        self.edit_log(table, change)

    # --- the files ----------------------------------------------------------------------------------------------------

    def rows(self, table: str) -> Iterator[tuple[str, int, Row]]:
        for add in self.live(table):
            for number, row in enumerate(pq.ParquetFile(self.folder / table / add["path"]).read().to_pylist()):
                yield add["path"], number, {**row, **add["partitionValues"]}

    def pick(self, table: str, where: Callable[[Row], bool]) -> tuple[str, int, Row]:
        found = [it for it in self.rows(table) if where(it[2])]
        assert found, "there is no such row"
        return self.random.choice(found)

    def write(self, table: str, path: str, rows: list[Row]) -> None:
        """Write a file again. The log says of it how many rows and bytes it has, and nothing else."""
        file = self.folder / table / path
        schema = pq.ParquetFile(file).schema_arrow.remove_metadata()  # another engine does not know our checksums
        pq.write_table(pa.Table.from_pylist([{it: row.get(it) for it in schema.names} for row in rows], schema), file)

        def restate(add: dict[str, Any]) -> None:
            add["size"], add["stats"] = file.stat().st_size, json.dumps({"numRecords": len(rows)})

        self.edit_add(table, path, restate)

    def change(self, table: str, where: Callable[[Row], bool], changed: Callable[[Row], Row | None]) -> None:
        """Change a row, or take it out."""
        path, number, row = self.pick(table, where)
        rows = pq.ParquetFile(self.folder / table / path).read().to_pylist()
        new = changed(row)
        assert new is None or {it: new[it] for it in rows[number]} != rows[number], "nothing was changed"
        self.write(table, path, [*rows[:number], *([] if new is None else [new]), *rows[number + 1 :]])

    def add(self, table: str, where: Callable[[Row], bool], made: Callable[[Row], Row]) -> None:
        """Add a row that is made from another one."""
        path, _, row = self.pick(table, where)
        rows = pq.ParquetFile(self.folder / table / path).read().to_pylist()
        self.write(table, path, [*rows, made(row)])

    def restate(self, table: str, edit: Callable[[dict[str, Any], random.Random], None]) -> None:
        """Change what the log says of a file."""
        add = self.random.choice([it for it in self.live(table) if json.loads(it["stats"])["numRecords"]])

        def change(action: dict[str, Any]) -> None:
            stats = json.loads(action["stats"])
            edit(stats, random.Random(self.random.random()))
            action["stats"] = json.dumps(stats)

        self.edit_add(table, add["path"], change)

    def edit_state(self, table: str, edit: Callable[[dict[str, Any]], None]) -> None:
        """Change what the commits of a table say that it holds."""

        for path in (self.folder / table / STATE_FOLDER).iterdir():
            members = unpack_state(path.read_bytes())
            edit(members)
            path.write_bytes(gzip.compress(json.dumps(members).encode()))


# --- the faults -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something to plant, and what has to be found."""

    name: str
    table: str
    plant: Callable[[Planter], None]
    column: str | None = None
    """That the finding has to name."""
    kinds: tuple[str, ...] = ()
    with_vectors: bool = False
    """The files of the lake have dead rows."""


def other(value: Any) -> Any:
    """Another value of the same type."""
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, datetime):
        return value + timedelta(hours=1)
    if isinstance(value, list):
        return [*value, ("more", b"1")]
    return value + (b"x" if isinstance(value, bytes) else "x")


def with_other(column: str, **values: Any) -> Callable[[Row], Row]:
    return lambda row: {**row, column: values.get(column, other(row[column]))}


def is_live_in_bucket(planter: Planter) -> Callable[[Row], bool]:
    return lambda row: (
        row.get("op", "mutation") == "mutation" and not row.get("void", False)
        and row["collection_id"] == HOTEL and planter.newest(row)
    )  # fmt: skip


def is_text(row: Row) -> bool:
    return row["key_bytes"] is None and row.get("document", "") is not None


BUCKET_COLUMNS = (
    *("vbucket", "seqno", "rev", "collection_id", "key", "key_bytes", "datatype", "flags", "expiry", "cas"),
    *("changed_at", "xattrs"),
)
"""Columns that the bucket has, and every table."""
STRANGE: dict[str, Any] = {"key_bytes": b"key-0", "xattrs": [("owner", b'"you"')]}
"""What is put into them where another value of the same type is none."""


def in_bucket(table: str, column: str) -> Fault:
    def plant(planter: Planter) -> None:
        live = is_live_in_bucket(planter)
        planter.change(table, lambda row: live(row) and is_text(row), with_other(column, **STRANGE))

    kinds = ("differs", "extra", "missing", "twice", "column", "validity")
    return Fault(f"{table}: another {column}", table, plant, kinds=kinds)


def in_record(column: str, where: Callable[[Row], bool], changed: Callable[[Row], Row], name: str = "") -> Fault:
    def plant(planter: Planter) -> None:
        planter.change(CHANGES, where, changed)

    return Fault(f"{CHANGES}: {name or f'another {column}'}", CHANGES, plant, column=column)


def is_steady(row: Row) -> bool:
    return row["vbucket"] in STEADY and row["collection_id"] == HOTEL


def in_table(table: str, column: str, where: Callable[[Row], bool], *kinds: str, **values: Any) -> Fault:
    def plant(planter: Planter) -> None:
        planter.change(table, where, with_other(column, **values))

    return Fault(f"{table}: another {column}", table, plant, column=None if kinds else column, kinds=kinds)


def in_partition(table: str, column: str, values: dict[str, str]) -> Fault:
    """A file lies in another partition: what its path says counts for nothing, what the log says does."""

    def plant(planter: Planter) -> None:
        add = planter.random.choice([it for it in planter.live(table) if it["partitionValues"][column] in values])
        value = values[add["partitionValues"][column]]
        planter.edit_add(table, add["path"], lambda it: it["partitionValues"].update({column: value}))

    return Fault(f"{table}: another {column}", table, plant, kinds=("extra", "missing", "column", "validity"))


def statistics(table: str, name: str, edit: Callable[[dict[str, Any], random.Random], None]) -> Fault:
    return Fault(f"{table}: {name}", table, lambda planter: planter.restate(table, edit), kinds=("statistics",))


def set_bound(bounds: str, column: str, value: Any) -> Callable[[dict[str, Any], random.Random], None]:
    def edit(stats: dict[str, Any], _: random.Random) -> None:
        assert stats[bounds][column] != value
        stats[bounds][column] = value

    return edit


def set_size(planter: Planter, table: str) -> None:
    add = planter.random.choice(planter.live(table))
    planter.edit_add(table, add["path"], lambda it: it.update(size=it["size"] + 1))


def damage(planter: Planter, table: str) -> None:
    add = planter.random.choice(planter.live(table))
    path = planter.folder / table / add["path"]
    data = bytearray(path.read_bytes())
    data[planter.random.randrange(len(data))] ^= 1 << planter.random.randrange(8)
    path.write_bytes(data)


def remove_file(planter: Planter, table: str) -> None:
    (planter.folder / table / planter.random.choice(planter.live(table))["path"]).unlink()


def damage_vectors(planter: Planter, table: str) -> None:
    (path,) = (planter.folder / table).glob("*.bin")
    data = bytearray(path.read_bytes())
    data[planter.random.randrange(len(data))] ^= 1 << planter.random.randrange(8)
    path.write_bytes(data)


def edit_vectors(table: str, name: str, edit: Callable[[list[dict[str, Any]]], object], *kinds: str) -> Fault:
    """Change what the log says of the vectors of a table's files."""

    def plant(planter: Planter) -> None:
        adds = planter.live(table)
        edit(adds)
        for add in adds:
            planter.edit_add(table, add["path"], lambda it, add=add: (it.clear(), it.update(add)))

    return Fault(f"{table}: {name}", table, plant, kinds=kinds, with_vectors=True)


def swap_vectors(adds: list[dict[str, Any]]) -> None:
    adds[0]["deletionVector"], adds[1]["deletionVector"] = adds[1]["deletionVector"], adds[0]["deletionVector"]


def fabricated(row: Row) -> Row:
    return {**row, "key": "fabricated", "seqno": 1, "vbucket": EMPTY}


def move_offset(members: dict[str, Any]) -> None:
    """The offsets of a whole state are texts of numbers; of a difference they are lists."""
    offsets = json.dumps(members["offsets"])
    members["offsets"] = json.loads(offsets.replace("16", "17", 1)) if "16" in offsets else members["offsets"]


ROWS = ("extra", "missing", "twice", "differs")
TABLES = (CHANGES, DOCUMENTS, HISTORY, REJECTS)
TIME = datetime(2020, 1, 1, tzinfo=UTC)
FAULTS = [
    *(in_bucket(table, column) for table in (CHANGES, DOCUMENTS, HISTORY) for column in BUCKET_COLUMNS),
    in_bucket(CHANGES, "value"), in_bucket(DOCUMENTS, "document"), in_bucket(HISTORY, "document"),
    *(in_table(table, "content", lambda row: row["content"] is not None, *ROWS) for table in (DOCUMENTS, HISTORY)),
    # The columns of `changes` that only a landing knows.
    in_record("vbuuid", is_steady, with_other("vbuuid")),
    in_record("op", is_steady, with_other("op")),
    in_record("scope", is_steady, with_other("scope")),
    in_record("scope", is_steady, with_other("scope", scope=None), "no scope"),
    in_record("collection", is_steady, with_other("collection")),
    in_record("batch", is_steady, with_other("batch", batch=2)),
    in_record("batch", is_steady, with_other("batch", batch=99), "a batch that was not landed"),
    in_record("landed_at", is_steady, with_other("landed_at")),
    in_record("snapshot_start", is_steady, lambda row: {**row, "snapshot_start": row["seqno"] + 1}),
    in_record("snapshot_end", is_steady, with_other("snapshot_end", snapshot_end=1000)),
    in_record("snapshot_end", is_steady, lambda row: {**row, "snapshot_end": row["seqno"] - 1}, "an end before it"),
    in_record("void", is_steady, with_other("void")),
    in_record("void", lambda row: row["void"], with_other("void"), "a dead row that is not void"),
    Fault("changes: a removal of another kind", CHANGES, lambda it: it.change(
        CHANGES, lambda row: row["op"] == "deletion" and is_steady(row), with_other("op", op="expiration"),
    ), kinds=("differs",)),
    Fault("changes: a superseded version of another time", CHANGES, lambda it: it.change(
        CHANGES, lambda row: row["key"] == "key-1" and row["batch"] == 0, with_other("changed_at"),
    ), column="changed_at"),
    # Rows.
    *(Fault(f"{table}: a row in a vbucket that nothing was written to", table, lambda it, table=table: it.add(
        table, lambda row: row["vbucket"] == ROLLED and row["collection_id"] == HOTEL and not row.get("void"),
        fabricated,
    ), kinds=("extra",)) for table in TABLES),
    *(Fault(f"{table}: a row behind the offset", table, lambda it, table=table: it.add(
        table, is_steady, lambda row: {**row, "key": "later", "key_bytes": None, "seqno": 500},
    ), kinds=("extra",)) for table in TABLES),
    *(Fault(f"{table}: a row less", table, lambda it, table=table: it.change(
        table, is_steady, lambda row: None,
    ), kinds=("missing",)) for table in TABLES),
    *(Fault(f"{table}: a row twice", table, lambda it, table=table: it.add(table, is_steady, dict), kinds=(
        "twice", "validity",
    )) for table in TABLES),
    Fault("changes: a superseded version less", CHANGES, lambda it: it.change(
        CHANGES, lambda row: row["key"] == "key-1" and row["batch"] == 0, lambda row: None,
    ), kinds=("missing",)),
    # The columns of the other tables.
    *(in_table(table, "vbuuid", is_steady) for table in (DOCUMENTS, HISTORY, REJECTS)),
    *(in_table(table, "n", lambda row: row["n"] is not None, "typed column") for table in (DOCUMENTS, HISTORY)),
    *(in_table(table, "name", lambda row: row["name"] is not None, "typed column") for table in (DOCUMENTS, HISTORY)),
    in_table(HISTORY, "name", lambda row: row["name"] is not None, "typed column", name=None),
    in_table(HISTORY, "valid_from", is_steady),
    in_table(HISTORY, "valid_to", lambda row: row["valid_to"] is not None and is_steady(row)),
    in_table(HISTORY, "valid_to", lambda row: row["valid_to"] is None and is_steady(row), valid_to=TIME),
    in_table(HISTORY, "valid_to_seqno", lambda row: row["valid_to_seqno"] is not None and is_steady(row)),
    *(in_table(REJECTS, column, is_text, *ROWS, "column", **STRANGE) for column in (
        "vbucket", "seqno", "rev", "collection_id", "key", "key_bytes", "document", "datatype", "flags", "expiry",
        "cas", "changed_at", "field", "reason",
    )),
    in_table(REJECTS, "content", lambda row: True, *ROWS, content=b"x"),
    in_partition(HISTORY, "is_current", {"true": "false", "false": "true"}),
    *(in_partition(table, "vbucket_group", {"0": "1", "1": "0"}) for table in (DOCUMENTS, HISTORY, REJECTS)),
    # What the logs say of files, by which engines pass them over.
    *(fault for table in TABLES for fault in (
        statistics(table, "more rows in the log", lambda stats, _: stats.update(numRecords=stats["numRecords"] + 1)),
        statistics(table, "no rows in the log", lambda stats, _: stats.update(numRecords=0)),
        statistics(table, "another least seqno", set_bound("minValues", "seqno", 400)),
        statistics(table, "another highest seqno", set_bound("maxValues", "seqno", 0)),
        statistics(table, "another least key", set_bound("minValues", "key", "zzz")),
        statistics(table, "another highest key", set_bound("maxValues", "key", "aaa")),
        statistics(table, "another least time", set_bound("minValues", "changed_at", "2030-01-01T00:00:00.000Z")),
        statistics(table, "another highest vbucket", set_bound("maxValues", "vbucket", -1)),
        statistics(table, "more nulls", lambda stats, _: stats["nullCount"].update(key=777)),
        Fault(f"{table}: other bytes", table, lambda it, table=table: set_size(it, table), kinds=("statistics",)),
    )),
    *(statistics(HISTORY, f"another highest {column}", set_bound("maxValues", column, "2000-01-01T00:00:00.000Z"))
      for column in ("valid_from",)),
    # Files and logs.
    *(Fault(f"{table}: a bit is flipped", table, lambda it, table=table: damage(it, table), kinds=("damaged file",))
      for table in TABLES),
    *(Fault(f"{table}: a file is missing", table, lambda it, table=table: remove_file(it, table), kinds=(
        "missing file",
    )) for table in TABLES),
    *(Fault(f"{table}: another offset", table, lambda it, table=table: it.edit_state(table, move_offset), kinds=(
        "damaged log",
    )) for table in (DOCUMENTS, HISTORY)),
    # Deletion vectors. Those of rejects lie in the log.
    *(fault for table in (DOCUMENTS, HISTORY, REJECTS) for fault in (
        edit_vectors(table, "the vector of another file", swap_vectors, *ROWS, "validity", "damaged file"),
        edit_vectors(table, "no vector", lambda adds: adds[-1].pop("deletionVector"), "twice", "validity"),
        edit_vectors(table, "more dead rows in the log", lambda adds: adds[0]["deletionVector"].update(
            cardinality=adds[0]["deletionVector"]["cardinality"] + 1), "damaged file"),
    )),
    *(Fault(f"{table}: a bit of the vectors is flipped", table, lambda it, table=table: damage_vectors(it, table),
            kinds=("damaged file",), with_vectors=True) for table in (DOCUMENTS, HISTORY)),
    *(Fault(f"{table}: the vectors are missing", table, lambda it, table=table: [
        path.unlink() for path in (it.folder / table).glob("*.bin")
    ], kinds=("damaged file",), with_vectors=True) for table in (DOCUMENTS, HISTORY)),
    edit_vectors(REJECTS, "another vector in the log", lambda adds: adds[0]["deletionVector"].update(
        pathOrInlineDv="0" * len(adds[0]["deletionVector"]["pathOrInlineDv"])), "damaged file"),
]  # fmt: skip


def read_model(bucket: ModelBucket) -> Callable[[Lake, ChangeWriter, Collection[int]], ChangeReport]:
    """Reads the bucket for a repair."""

    def read(_: Lake, writer: ChangeWriter, vbuckets: Collection[int]) -> ChangeReport:
        rows = [bucket.row(vbucket, change, 0) for vbucket in vbuckets for change in bucket.vbuckets[vbucket].changes]
        report = writer.write(batches(rows, 100))
        offsets = bucket.offsets([*vbuckets])
        report.reached = {VBucketId(vbucket): offsets[VBucketId(vbucket)] for vbucket in vbuckets}
        return report

    return read


def sentences(found: Verification) -> list[str]:
    return [f"{one.kind}, {one.column}: {one.sentence}" for one in found.findings]


def check_found_and_repaired(fault: Fault, seed: int) -> None:
    bucket, directory = sound(with_vectors if fault.with_vectors else built)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "lake"
        shutil.copytree(directory, copy)
        fault.plant(Planter(copy, bucket, random.Random(seed)))
        after = repair(Location.of(str(copy)), lambda: compare_model(copy, bucket), read_model(bucket))
        found = after.found
        assert not found.is_equal, "it was not found"
        named = [one for one in found.findings if one.table == fault.table]
        if fault.column is not None:
            assert fault.column in {one.column for one in named}, sentences(found)
        if fault.kinds:
            assert {*fault.kinds} & {str(one.kind) for one in named}, sentences(found)
        assert after.left.is_equal, (sentences(found), after.done, sentences(after.left))
        assert after.done


@pytest.mark.parametrize(
    "fault",
    # A quarter of them in every run: each takes most of a second.
    [pytest.param(fault, marks=[pytest.mark.soak] if at % 4 else []) for at, fault in enumerate(FAULTS)],
    ids=lambda fault: fault.name,
)
def test_each_kind_of_fault_is_found_and_repaired(fault: Fault) -> None:
    check_found_and_repaired(fault, 1)


@pytest.mark.soak
@settings(max_examples=100)
@given(fault=st.sampled_from(FAULTS), seed=st.integers(0, 2**32))
def test_a_fault_is_found_wherever_it_is(fault: Fault, seed: int) -> None:
    check_found_and_repaired(fault, seed)


def test_every_column_of_every_table_has_a_fault() -> None:
    bucket, directory = sound()
    planter = Planter(directory, bucket, random.Random(0))
    for table in TABLES:
        columns = {column for _, _, row in planter.rows(table) for column in row}
        planted = {fault.name.rpartition(" ")[2] for fault in FAULTS if fault.table == table}
        assert columns <= planted


# --- sound lakes ------------------------------------------------------------------------------------------------------


def trimmed(folder: Path) -> SmallLake:
    small = built(folder)
    with patch.object(upkeep, "TRIM_ROWS_PER_DOCUMENT", 0):
        assert trim_changes(small.lake, datetime.now(UTC) + timedelta(days=1)) > 0
    return small


def joined_and_grown(folder: Path, make: Callable[[Path], SmallLake] = built) -> SmallLake:
    small = make(folder)
    with patch.object(upkeep, "JOIN_FILES_MIN", 2), patch.object(layout, "GROUP_DOCUMENTS", 1):
        assert join_files(small.lake) > 0
        grow_groups(small.lake)
    assert small.lake.facts.groups == VBUCKETS
    return small


SOUND: dict[str, Callable[[Path], SmallLake]] = {
    "all there can be": built,
    "inferred columns": lambda folder: built(folder, columns=None),
    "no history": lambda folder: built(folder, history=False),
    "trimmed": trimmed,
    "joined, and cut into more groups": joined_and_grown,
    "deletion vectors": with_vectors,
    "joined, of files with deletion vectors": lambda folder: joined_and_grown(folder, with_vectors),
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_lake(name: str, tmp_path: Path) -> None:
    small = SOUND[name](tmp_path)
    found = compare_model(tmp_path, small.bucket)
    assert found.is_equal, sentences(found)
    assert found.pending == 1
    # Nor after it has been landed into once more.
    small.reopen()
    small.land()
    assert compare_model(tmp_path, small.bucket).is_equal

"""The log of a table: commits that are whole, transactions that stay, and what the table holds."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, QueryBuilder, TableFeatures, write_deltalake

from headwater.client.offsets import Offsets
from headwater.errors import LakeDamaged, LakeError, LakeInUse
from headwater.lake import delta_log
from headwater.lake.data_files import DataFile, FileWriter, read_files
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.layout import (
    FORMAT_PROPERTY,
    FORMAT_VERSION,
    STATE_FOLDER,
    DocumentForm,
    TableKind,
    documents_schema,
)
from headwater.lake.location import Location
from headwater.lake.table_state import LandedTotals, TableState, unpack_state
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.lake_model import mark_rows

SCHEMA = pa.schema([pa.field("seqno", pa.int64()), pa.field("text", pa.string())])


def state(seqno: int, **collections: str) -> TableState:
    at = Seqno(seqno)
    offset = StreamOffset(vbuuid=Vbuuid(2**64 - 1), seqno=at, snapshot_start=at, snapshot_end=at)
    return TableState(
        offsets=Offsets("5ab1e", {VBucketId(3): offset}),
        collections={int(id_.removeprefix("id")): name for id_, name in collections.items()},
    )


def create(directory: Path, **properties: str) -> DeltaLog:
    return DeltaLog.create(
        Location(str(directory)), SCHEMA, ranges=["seqno"], properties=properties, transactions={}, state=state(0)
    )


def write(log: DeltaLog, *seqnos: int) -> DataFile:
    writer = FileWriter(log.location, SCHEMA, ranges=["seqno"])
    writer.write_row_group(pa.table({"seqno": seqnos, "text": [str(seqno) for seqno in seqnos]}))
    return writer.close()


def seqnos(directory: Path) -> list[int]:
    return sorted(DeltaTable(directory).to_pyarrow_table().column("seqno").to_pylist())


def test_a_file_is_live_only_when_a_commit_names_it(tmp_path: Path) -> None:
    assert DeltaLog.open(Location(str(tmp_path))) is None
    log = create(tmp_path)
    file = write(log, 1, 2)
    assert seqnos(tmp_path) == []
    log.commit(TableCommit(add=[file], state=state(2)))
    assert seqnos(tmp_path) == [1, 2]
    (live,) = log.files()
    assert (live.path, live.rows, live.size_bytes, live.ranges) == (file.path, 2, file.size_bytes, {"seqno": (1, 2)})
    again = create(tmp_path)
    assert (again.files(), again.state()) == (log.files(), state(2)), "a table that is there is left as it is"
    log.commit(TableCommit(add=[write(log, 3)], remove=[file], state=state(3)))
    assert seqnos(tmp_path) == [3]


def test_transactions_and_offsets_come_back(tmp_path: Path) -> None:
    log = create(tmp_path)
    log.commit(TableCommit(transactions={"query": 4, "headwater.batch": 7}, state=state(9, id8="inventory.hotel")))
    again = DeltaLog.open(log.location)
    assert again is not None
    assert [again.transaction(name) for name in ("query", "headwater.batch", "other")] == [4, 7, None]
    assert again.state() == state(9, id8="inventory.hotel")


def test_the_state_is_that_of_the_version_that_is_open(tmp_path: Path) -> None:
    """Not that of what another process has committed since: the files are not those either."""
    log, other = create(tmp_path), create(tmp_path)
    other.commit(TableCommit(add=[write(other, 1)], state=state(1)))
    log.refresh()
    other.commit(TableCommit(add=[write(other, 2)], state=state(2)))
    assert (log.state(), len(log.files())) == (state(1), 1)
    log.refresh()
    assert (log.state(), len(log.files())) == (state(2), 2)


def test_offsets_are_found_behind_commits_of_others(tmp_path: Path) -> None:
    log = create(tmp_path)
    log.commit(TableCommit(add=[write(log, 1)], state=state(1)))
    for number in range(70):
        table = DeltaTable(tmp_path)
        table.alter.set_table_properties({"note": str(number)}, raise_if_not_exists=False)
    log.refresh()
    assert log.state() == state(1)


def test_all_is_kept_when_the_log_is_cleaned(tmp_path: Path) -> None:
    log = create(tmp_path)
    log.commit(TableCommit(add=[write(log, 1)], transactions={"query": 3}, state=state(1)))
    table = DeltaTable(tmp_path)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 hours"})
    log.refresh()
    old = time.time() - 60 * 24 * 3600
    for entry in (tmp_path / "_delta_log").iterdir():
        os.utime(entry, (old, old))
    log.clean(state(1), retention_hours=0)
    assert not (tmp_path / "_delta_log" / f"{0:020}.json").exists()
    again = DeltaLog.open(log.location)
    assert again is not None
    assert (again.state(), again.transaction("query")) == (state(1), 3)
    assert seqnos(tmp_path) == [1]


def test_a_log_that_can_not_be_read_or_that_others_cleaned_is_an_error(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), SCHEMA, commit_properties=CommitProperties(custom_metadata={"other": "x"}))
    log = DeltaLog.open(Location(str(tmp_path)))
    assert log is not None
    with pytest.raises(LakeDamaged, match="no longer has the offsets"):
        log.state()
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text("no log")
    with pytest.raises(LakeDamaged, match="can't be read"):
        DeltaLog.open(Location(str(tmp_path)))


def test_partition_values_come_back_as_they_were_written(tmp_path: Path) -> None:
    schema = pa.schema([*SCHEMA, pa.field("vbucket_group", pa.int32()), pa.field("is_current", pa.bool_())])
    partition = [("vbucket_group", "3"), ("is_current", "true")]
    log = DeltaLog.create(
        Location(str(tmp_path)), schema, partition_by=["vbucket_group", "is_current"], ranges=["seqno"],
        properties={}, transactions={}, state=state(0),
    )  # fmt: skip
    writer = FileWriter(log.location, SCHEMA, ranges=["seqno"], partition=partition)
    writer.write_row_group(pa.table({"seqno": [1], "text": ["a"]}))
    log.commit(TableCommit(add=[writer.close()], state=state(1)))
    assert log.files()[0].partition == tuple(partition)
    assert DeltaTable(tmp_path).to_pyarrow_table().to_pylist() == [
        {"seqno": 1, "text": "a", "vbucket_group": 3, "is_current": True}
    ]


def test_a_table_that_can_not_be_made_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    in_the_way = tmp_path / "changes"
    in_the_way.write_text("no directory")
    with pytest.raises(
        LakeError, match=r"the table at .*/changes can't be created: .*\. Check that the directory"
    ) as caught:
        create(in_the_way)
    assert "\n" not in str(caught.value)


# --- states as differences ----------------------------------------------------------------------------------------


def random_states(count: int) -> Iterator[TableState]:
    """Vbuckets that go on, most of the time: some change their branch, are half-way in a snapshot, or are lost."""
    draw = random.Random(5)
    offsets = {VBucketId(vbucket): offset(draw.getrandbits(64), 1) for vbucket in range(200)}
    for number in range(count):
        for vbucket in draw.sample(sorted(offsets), 150):
            before = offsets[vbucket]
            offsets[vbucket] = offset(before.vbuuid, before.seqno + draw.randrange(1, 50))
        if number % 7 == 3:
            offsets[VBucketId(7)] = offset(draw.getrandbits(64), 2)
            offsets[VBucketId(8)] = offset(1, 5, end=9)
        if number % 11 == 5:
            offsets.pop(VBucketId(number), None)
            offsets[VBucketId(1000 + number)] = offset(3, 2**60)
        yield TableState(
            offsets=Offsets("5ab1e", offsets),
            batch=number,
            as_of_s=None if number % 3 else number / 7,
            collections={8: "a.b"} if number > 20 else {},
            rollbacks={7: 2} if number % 7 == 3 else {},
            totals=LandedTotals(rows=number),
            writer="me",
        )


def offset(vbuuid: int, seqno: int, *, end: int | None = None) -> StreamOffset:
    at = Seqno(seqno)
    return StreamOffset(vbuuid=Vbuuid(vbuuid), seqno=at, snapshot_start=at, snapshot_end=Seqno(end or seqno))


def test_states_come_back_from_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_log, "WHOLE_STATE_COMMITS", 8)
    log = create(tmp_path)
    states = [state(0), *random_states(24)]
    for number, after in enumerate(states[1:], 1):
        log.commit(TableCommit(state=after))
        if number % 5 == 0:
            again = DeltaLog.open(log.location)
            assert again is not None
            log = again
            assert [*log.states()] == states[number::-1]
    files = [path.read_bytes() for path in state_files(tmp_path)]
    is_whole = ["since" not in unpack_state(data) for data in files]
    assert [version for version, whole in enumerate(is_whole) if whole] == [0, 1, 9, 17]
    sizes = [len(data) for data in files]
    assert max(size for size, whole in zip(sizes, is_whole, strict=True) if not whole) * 3 < sizes[1]
    history = DeltaTable(tmp_path).history()
    assert max(len(str(info)) for info in history[:-1]) < 500, "but for what delta-rs says of the creation"


def state_files(table: Path) -> list[Path]:
    return sorted((table / STATE_FOLDER).iterdir())


def test_cleaning_leaves_every_state_that_a_version_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of commits that have failed lie among the others."""
    monkeypatch.setattr(delta_log, "WHOLE_STATE_COMMITS", 8)
    log = create(tmp_path)
    states = [state(0), *random_states(40)]
    for number, after in enumerate(states[1:], 1):
        with monkeypatch.context() as crash:
            crash.setattr(DeltaLog, "_put_entry", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                log.commit(TableCommit(state=states[0]))
        assert log.state() == states[number - 1]
        log.commit(TableCommit(state=after))
        if number == 25:
            DeltaTable(tmp_path).create_checkpoint()
            old = time.time() - 60 * 24 * 3600
            for entry in (tmp_path / "_delta_log").iterdir():
                os.utime(entry, (old, old))
    DeltaTable(tmp_path).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(state_files(tmp_path)) == 81
    log.clean(states[40], retention_hours=24)
    oldest = int(min((tmp_path / "_delta_log").glob("*.json")).stem)
    assert 20 < oldest <= 26
    left = [path.name for path in state_files(tmp_path)]
    assert {int(name[:20]) for name in left} == {*range(oldest - 8, log.version + 1)}
    again = DeltaLog.open(log.location)
    assert again is not None
    assert [*again.states()][-len(states) + oldest :] == states[: oldest - 1 : -1]
    assert (found := DeltaLog.open(log.location, version=oldest)) is not None
    assert found.state() == states[oldest]


def test_a_state_that_is_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
    log = create(tmp_path)
    for number in (1, 2):
        log.commit(TableCommit(state=state(number)))
    first, middle, last = state_files(tmp_path)
    middle.unlink()
    assert [*log.states()] == [state(2)], "a state that is gone is like an entry that was cleaned"
    content = last.read_bytes()
    for damaged in (content[:-9], content[:-6] + bytes(6), b""):
        last.write_bytes(damaged)
        with pytest.raises(LakeDamaged, match=rf"{STATE_FOLDER} is damaged .*\. Restore it from a backup"):
            log.state()
    last.write_bytes(content)
    first.unlink()
    again = DeltaLog.open(log.location)
    assert again is not None
    with pytest.raises(LakeDamaged, match=f"{STATE_FOLDER} lacks {last.name}, or the file that it names. Restore it"):
        again.state()


def test_a_table_of_the_format_before_goes_on(tmp_path: Path) -> None:
    """Its states are in the commits, as texts."""
    log, states = create(tmp_path), [state(0), *random_states(6)]
    for after in states[1:5]:
        log.commit(TableCommit(state=after))
    for entry in (tmp_path / "_delta_log").iterdir():
        entry.write_text("".join(with_state_of_before(tmp_path, line) for line in entry.read_text().splitlines()))
    shutil.rmtree(tmp_path / STATE_FOLDER)
    again = DeltaLog.open(log.location)
    assert again is not None
    assert [*again.states()] == states[4::-1]
    again.add_columns([pa.field("more", pa.int64())], states[4])
    for after in states[5:]:
        again.commit(TableCommit(state=after))
    found = DeltaLog.open(log.location)
    assert found is not None
    assert [*found.states()] == [*states[:4:-1], states[4], states[4], *states[4::-1]]
    assert found.properties[FORMAT_PROPERTY] == str(FORMAT_VERSION)
    has_metadata = ["metaData" in entry.read_text() for entry in sorted((tmp_path / "_delta_log").iterdir())]
    assert has_metadata == [True, False, False, False, False, True, True, False, False], "its format, then its columns"


def with_state_of_before(table: Path, line: str) -> str:
    action = json.loads(line)
    if name := action.get("commitInfo", {}).pop("headwater.state.file", None):
        members, kind = unpack_state((table / STATE_FOLDER / name).read_bytes()), "headwater.state"
        if "since" in members:
            members["since"], kind = int(members["since"].partition("-")[0]), "headwater.state.difference"
        action["commitInfo"][kind] = b64encode(zlib.compress(json.dumps(members).encode())).decode()
    return json.dumps(action, separators=(",", ":")).replace('"headwater.format":"6"', '"headwater.format":"5"') + "\n"


# --- deletion vectors ---------------------------------------------------------------------------------------------


def test_dead_rows_are_marked_and_stay_so(tmp_path: Path) -> None:
    """By two commits on top of each other, in the log and in a file, through a checkpoint that the log begins with,
    and an append of another writer."""
    log = create(tmp_path)
    log.set_vectors(True, state(0))
    protocol = DeltaTable(tmp_path).protocol()
    assert (protocol.min_reader_version, protocol.reader_features) == (3, ["deletionVectors"])
    files = [write(log, *range(10)), write(log, *range(10, 20))]
    log.commit(TableCommit(add=files, state=state(1)))
    log.commit(mark_rows(log, lambda row: row["seqno"] in (1, 2), inline_bytes_max=0))
    log.commit(mark_rows(log, lambda row: row["seqno"] == 7))
    log.commit(mark_rows(log, lambda row: row["seqno"] == 10, inline_bytes_max=0))
    left = [0, 3, 4, 5, 6, 8, 9, *range(11, 20)]

    def check(found: DeltaLog | None, left: list[int]) -> None:
        assert found is not None
        # Files that were written in one millisecond have no order.
        assert sorted(file.live_rows for file in found.files() if file.vector is not None) == [7, 9]
        rows = pa.concat_tables(read_files(found.location, found.files(), ["seqno"]))
        assert sorted(seqnos_of(rows)) == left
        table = QueryBuilder().register("t", DeltaTable(tmp_path)).execute("SELECT seqno FROM t").read_all()
        assert sorted(seqnos_of(pa.table(table))) == left

    check(log, left)
    check(DeltaLog.open(log.location), left)
    old = DeltaLog.open(log.location, version=log.version - 1)
    assert old is not None
    assert sum(file.live_rows for file in old.files()) == len(left) + 1
    log.commit(TableCommit(state=state(2)))
    DeltaTable(tmp_path).create_checkpoint()
    for version in range(log.version):
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    write_deltalake(tmp_path, pa.table({"seqno": [20], "text": ["x"]}), mode="append")
    log.refresh()
    check(log, [*left, 20])
    check(DeltaLog.open(log.location), [*left, 20])
    with pytest.raises(AssertionError, match="not live"):
        log.commit(TableCommit(remove=[files[0]], state=state(3)))
    log.commit(TableCommit(remove=[file for file in log.files() if file.vector is not None], state=state(3)))
    assert [file.vector for file in log.files()] == [None]
    log.set_vectors(False, state(4))
    assert (seqnos(tmp_path), log.state()) == ([20], state(4))
    assert DeltaTable(tmp_path).protocol().min_reader_version == 1
    assert log.schema == SCHEMA


def seqnos_of(rows: pa.Table) -> list[int]:
    return list(rows.column("seqno").to_pylist())


def test_of_many_writers_of_a_version_one_succeeds(tmp_path: Path) -> None:
    create(tmp_path)
    logs = [create(tmp_path) for _ in range(4)]

    def commit(number: int) -> bool:
        try:
            logs[number].commit(TableCommit(add=[write(logs[number], number)], state=state(number)))
        except LakeInUse:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        done = [*threads.map(commit, range(4))]
    assert (sum(done), seqnos(tmp_path)) == (1, [done.index(True)])
    assert [path.name for path in (tmp_path / "_delta_log").iterdir() if path.name.startswith(".")] == []


def test_a_table_with_a_feature_that_is_not_known_is_not_written(tmp_path: Path) -> None:
    log = create(tmp_path)
    DeltaTable(tmp_path).alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    log.refresh()
    with pytest.raises(LakeError, match="another program has turned on rowTracking"):
        log.commit(TableCommit(state=state(1)))


def test_a_description_leaves_variants_as_they_are(tmp_path: Path) -> None:
    log = DeltaLog.create(
        Location(str(tmp_path)), documents_schema(xattrs=False, form=DocumentForm.VARIANT), ranges=["key"],
        properties={}, transactions={}, state=state(1),
    )  # fmt: skip
    log.keep_description(TableKind.DOCUMENTS, "a.b", state(2))
    types = {column["name"]: column["type"] for column in log.columns}
    assert (log.description, types["document"]) == ("The live documents of a.b", "variant")


def test_a_table_of_an_earlier_version_gets_its_description(tmp_path: Path) -> None:
    log = create(tmp_path)
    log.commit(TableCommit(add=[write(log, 1)], state=state(1)))
    log._table.alter.set_column_metadata("text", {"comment": "mine"})
    log.refresh()
    for _ in range(2):
        log.keep_description(TableKind.CHANGES, "", state(2))
    assert log.version == 3
    assert log.description.startswith("Every change that was landed")
    comments = {column["name"]: column["metadata"]["comment"] for column in log.columns}
    assert comments == {"seqno": "The number of the change within its vbucket", "text": "mine"}
    assert seqnos(tmp_path) == [1]
    log._table.alter.set_table_description("mine")
    log.refresh()
    log.keep_description(TableKind.CHANGES, "", state(2))
    assert (log.description, log.state()) == ("mine", state(2))

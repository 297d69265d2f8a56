"""Reading the documents of a lake in this process, all of them or by their keys."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from headwater.errors import InvalidInput
from headwater.lake import data_files
from headwater.lake.data_files import FileReader
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.landing import documents
from headwater.protocol.numbers import vbucket_of
from support.lake_model import SmallLake

NAME = "_default._default"
ODD = b"odd-\xff"
KEYS = [*(f"key-{number}" for number in range(200)), "key-ü"]


@pytest.fixture(params=[False, True], ids=["rewriting", "vectors"])
def lake(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallLake:
    """Documents in several files and row groups, some of them superseded, removed, or not merged yet."""
    monkeypatch.setattr(data_files, "KEYED_ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", 10)
    small = SmallLake(tmp_path, settings=LakeSettings(merging=MergeRules(on_read=request.param)))
    for turn, step in enumerate((1, 3, 7, 11)):
        for key in KEYS[::step]:
            small.write(vbucket_of(key.encode(), 4), key, value=b'{"turn": %d}' % turn)
        if turn == 1:
            small.bucket.change(vbucket_of(b"key-8", 4), "deletion", 0, b"key-8")
            small.bucket.change(vbucket_of(ODD, 4), "mutation", 0, ODD, b'{"turn": -1}')
        small.land(merges=turn < 3)
    return small


def test_a_lookup_finds_what_a_read_of_everything_has(lake: SmallLake) -> None:
    into = str(lake.directory)
    everything = {row["key"]: row for row in documents(into, NAME).read_all().to_pylist()}
    shown_odd = ODD.decode(errors="backslashreplace")
    assert everything.keys() == {*KEYS, shown_odd} - {"key-8"}
    turns = {key: max(turn for turn, step in enumerate((1, 3, 7, 11)) if at % step == 0) for at, key in enumerate(KEYS)}
    assert {key: row["document"] for key, row in everything.items() if key in turns} == {
        key: f'{{"turn": {turn}}}' for key, turn in turns.items() if key != "key-8"
    }
    for wanted in ([*KEYS, shown_odd], KEYS[5:9], [shown_odd], ["key-8"], ["none"], []):
        found = documents(into, NAME, keys=wanted).read_all().to_pylist()
        expected = [everything[key] for key in wanted if key in everything]
        assert sorted(found, key=lambda row: row["key"]) == sorted(expected, key=lambda row: row["key"])
    frame = pl.DataFrame(documents(into, NAME, columns=["document"], keys=KEYS[:1]))
    assert frame.to_dicts() == [{"document": '{"turn": 3}'}]


def test_a_lookup_reads_the_row_groups_that_hold_the_keys(lake: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    monkeypatch.setattr(
        FileReader,
        "read",
        lambda self, row_group, columns=None, original=FileReader.read: (
            read.append((self.file.path, row_group)) or original(self, row_group, columns)  # type: ignore[func-returns-value]
        ),
    )
    assert documents(str(lake.directory), NAME, keys=["key-1"]).read_all().num_rows == 1
    table = lake.lake.tables[NAME].documents
    assert table is not None
    row_groups = 0
    for file in table.log.files():
        with FileReader(table.log.location, file) as reader:
            row_groups += len(reader.row_groups)
    paths = {file.path for file in table.log.files()}
    of_documents = {place for place in read if place[0] in paths}
    most = 1 if any(file.vector for file in table.log.files()) else len(paths)
    assert 1 <= len(of_documents) <= most < row_groups


def test_what_can_not_be_read(lake: SmallLake) -> None:
    into = str(lake.directory)
    for arguments, sentence in (
        ({"collection": "no.table"}, "there is no table of 'no.table'"),
        ({"columns": ["none"]}, "has no column 'none'"),
        ({"keys": "key-1"}, "keys takes a collection"),
        ({"keys": ["key"] * 100_001}, "at most 100,000 keys"),
        ({"batch": -7}, "batch"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            documents(into, **{"collection": NAME, **arguments})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="does not contain the tables"):
        documents(str(lake.directory / "elsewhere"), NAME)

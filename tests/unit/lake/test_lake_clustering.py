"""Tables that are clustered by columns: files are sorted by them, whatever is merged, and a query reads little."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, QueryBuilder

from headwater.errors import InvalidColumns
from headwater.lake import data_files
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.typed_columns import ColumnMode, TypedColumns, choose_cluster_columns
from support.lake_model import SmallLake, check_sorted, verify_model

NAME = "_default._default"
DOCUMENTS = f"documents/{NAME}"
CITIES = [f"city-{number}" for number in range(8)]


def clustered(*names: str, file_bytes: int = 1, columns: str | None = None) -> LakeSettings:
    fixed = {} if columns is None else {"*": TypedColumns.from_ddl(columns)}
    return LakeSettings(merging=MergeRules(file_bytes=file_bytes), columns=fixed, cluster_by={"*": names})


def write_cities(small: SmallLake, *, turn: int = 0, step: int = 1) -> None:
    """Every document is in another city every time, so no order of keys is one of cities."""
    for number in range(0, 64, step):
        city, since = CITIES[(number * 5 + turn) % 8], f"20{number % 7 + 10}-01-01"
        value = b'{"city": "%s", "since": "%s", "n": %d}' % (city.encode(), since.encode(), number)
        small.write(number % 4, f"key-{number:02}", value=value)


def check(small: SmallLake, *cluster_by: str) -> None:
    check_sorted(small.directory / DOCUMENTS, cluster_by)
    assert verify_model(small.lake, small.bucket).findings.first() == ()


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "KEYED_ROW_GROUP_ROWS", 4)


@pytest.mark.usefixtures("small_row_groups")
def test_a_query_on_the_columns_reads_few_files_in_every_engine(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=clustered("city", "since"))
    write_cities(small)
    small.land()
    write_cities(small, turn=2, step=2)
    small.land()
    check(small, "city", "since")
    table = tmp_path / DOCUMENTS
    expected = sorted(row["key"] for row in small.rows(DOCUMENTS) if row["city"] == "city-3")
    assert len(expected) == 8
    delta = DeltaTable(table)
    needed = {*delta.file_uris(file_pruning_predicate="city = 'city-3'")}
    assert (len(delta.file_uris()), len(needed)) == (16, 2)
    for path in {*delta.file_uris()} - needed:
        Path(path).unlink()
    queried = QueryBuilder().register("t", delta).execute("SELECT key FROM t WHERE city = 'city-3'").read_all()
    relation = duckdb.from_arrow(delta.to_pyarrow_dataset()).filter("city = 'city-3'").project("key")
    assert sorted(queried["key"].to_pylist()) == expected
    assert sorted(key for (key,) in relation.fetchall()) == expected
    assert sorted(pl.scan_delta(str(table)).filter(city="city-3").collect()["key"].to_list()) == expected


@pytest.mark.usefixtures("small_row_groups")
def test_a_query_reads_few_row_groups_of_a_large_file(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, groups=1, settings=clustered("city", file_bytes=2**20))
    write_cities(small)
    small.land()
    (fragment,) = DeltaTable(tmp_path / DOCUMENTS).to_pyarrow_dataset().get_fragments()
    chosen = fragment.split_by_row_group(ds.field("city") == "city-3")
    assert (fragment.num_row_groups, len(chosen)) == (16, 2)


def test_a_column_that_is_inferred_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = SmallLake(tmp_path, groups=1, settings=clustered("city", "tags"))
    for number in range(9, 0, -1):
        small.write(0, f"key-{number}", value=b'{"n": %d}' % number)
    small.land()
    assert [row["key"] for row in small.rows(DOCUMENTS)] == [f"key-{number}" for number in range(1, 10)]
    assert not caplog.messages, "the columns of a new table come with its first documents"
    for value in (b'{"n": 1}', b'{"city": "Zug", "tags": ["x"]}', b'{"n": 2, "city": "Bern"}', b'{"n": 3}'):
        small.write(0, f"key-{len(value) % 9}", value=value)
        small.land()
    check(small, "city")
    assert [message.split(", since")[0] for message in caplog.messages] == [
        f"{NAME}: documents are not clustered by city, tags",
        f"{NAME}: documents are not clustered by tags",
    ]


def test_another_order_counts_for_what_is_written_from_then_on(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, groups=1, settings=LakeSettings())

    def land(turn: int) -> None:
        write_cities(small, turn=turn)
        small.land()

    land(0)
    check_sorted(tmp_path / DOCUMENTS, ())
    # Not said is as before; the key alone is an order, too.
    for settings, order in (
        (clustered("city"), ("city",)),
        (LakeSettings(), ("city",)),
        (clustered("changed_at", "city"), ("changed_at", "city")),
        (clustered(*choose_cluster_columns("key")), ()),
    ):
        small.reopen(settings)
        land(len(order) + 1)
        assert small.lake.tables[NAME].cluster_by == order
        check(small, *order)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"columns": {"*": TypedColumns.from_ddl("n INT")}},
            "tables can't be clustered by 'city': there is no such",
        ),
        (
            {"columns": {"a.b": TypedColumns.from_ddl("city BOOLEAN")}},
            "a.b can't be clustered by 'city': its values have no order",
        ),
        ({"infer": False}, "Name a number, text, date or time: key, changed_at, seqno, vbucket"),
    ],
)
def test_columns_that_are_not_there_are_refused_before_anything_is_made(settings: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidColumns, match=says):
        LakeSettings(cluster_by={"*": ("city",)}, **settings)  # type: ignore[arg-type]


def test_columns_that_a_table_does_not_have_are_refused_when_it_is_opened(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=LakeSettings(columns={"*": TypedColumns.from_ddl("n INT")}))
    small.write(0, "a")
    small.land()
    with pytest.raises(InvalidColumns, match=rf"{NAME} can't be clustered by 'city'"):
        small.reopen(clustered("city"))
    with pytest.raises(InvalidColumns, match="'document': its values have no order"):
        clustered("document")
    switched = LakeSettings(columns={"*": ColumnMode.INFER}, cluster_by={"*": ("city",)})
    small.reopen(switched)
    write_cities(small)
    small.land()
    check(small, "city")


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "a,b,c,d,e", "a b", "x" * 256])
def test_texts_that_name_no_columns(text: str) -> None:
    with pytest.raises(InvalidColumns, match="Name one to 4 columns, each once"):
        choose_cluster_columns(text)


@pytest.mark.parametrize(
    ("text", "names"), [("city", ("city",)), (" city , since,key", ("city", "since")), ("key", ()), ("key,city", ())]
)
def test_texts_that_name_columns(text: str, names: tuple[str, ...]) -> None:
    assert choose_cluster_columns(text) == names

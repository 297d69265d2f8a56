"""Typed columns of a lake: what does not fit, fields that come up later, and tables that are switched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable

from headwater.errors import ColumnsChanged, InvalidColumns, InvalidInput
from headwater.lake import typed_columns
from headwater.lake.column_rules import ColumnRules, choose_rules
from headwater.lake.commits import merge
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.layout import history_schema
from headwater.lake.typed_columns import ColumnMode, TypedColumns
from support.lake_model import Follower, SmallLake, check_inferred, lake_of_before, merging, verify_model, with_columns

DEFAULT = "_default._default"
DOCUMENTS = f"documents/{DEFAULT}"
INFER = LakeSettings(columns={"*": ColumnMode.INFER})


def held(small: SmallLake, *columns: str) -> dict[str, Any]:
    """By key: what some columns hold."""
    return {row["key"]: tuple(row[column] for column in columns) for row in small.rows(DOCUMENTS)}


def check(small: SmallLake) -> None:
    check_inferred(small.directory, DEFAULT)
    assert verify_model(small.lake, small.bucket).findings.first() == ()


def test_a_value_that_does_not_fit_nulls_its_own_column_until_it_does(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=with_columns(LakeSettings(), {"*": "n INT, city STRING"}))
    small.write(0, "good", value=b'{"n": 5, "city": "Bern"}')
    small.write(0, "bad", value=b'{"n": "five", "city": "Basel"}')
    small.land()
    assert held(small, "n", "city") == {"good": (5, "Bern"), "bad": (None, "Basel")}
    assert [(row["key"], row["document"], row["field"], row["reason"]) for row in small.rows(f"rejects/{DEFAULT}")] == [
        ("bad", '{"n": "five", "city": "Basel"}', "n", "column n: INT can't hold a string like this")
    ]
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    small.write(0, "bad", value=b'{"n": 6, "city": "Basel"}')
    small.land()
    assert small.rows(f"rejects/{DEFAULT}") == []


def test_a_new_table_has_columns_for_the_fields_of_its_documents(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", value=b'{"n": 5, "tags": ["x"], "home": {"zip": 3000}}')
    small.write(3, "b", value=b'{"n": 2.5, "key": 1}')
    small.land()
    assert held(small, "n", "tags", "home") == {"a": (5.0, ["x"], {"zip": 3000}), "b": (2.5, None, None)}
    assert small.rows(f"rejects/{DEFAULT}") == []
    check(small)


def test_fields_may_be_called_as_the_columns_of_changes_are(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", value=b'{"op": 5, "scope": "x", "collection": true, "batch": 1, "void": "no"}')
    small.write(0, "b", value=b'{"op": 6, "scope": "y", "value": {"x": 1}}')
    small.land()
    small.write(0, "a", value=b'{"op": 7, "scope": "z"}')
    small.land()
    assert held(small, "op", "scope", "collection") == {"a": (7, "z", None), "b": (6, "y", None)}
    check(small)


def test_fields_that_come_up_later_add_columns_in_one_commit_without_data(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", "b", value=b'{"n": 1}')
    small.land()
    before = DeltaTable(tmp_path / DOCUMENTS)
    small.write(0, "c", value=b'{"n": 2.5, "x": true}')
    small.write(1, "d", value=b'{"n": 2, "y": "z"}')
    small.land()
    after = DeltaTable(tmp_path / DOCUMENTS)
    operations = [entry["operation"] for entry in after.history()][: after.version() - before.version()]
    assert operations == ["WRITE", "SET TBLPROPERTIES", "ADD COLUMN"], "the properties say which have statistics"
    assert {*before.file_uris()} & {*after.file_uris()}, "old rows are not written again"
    assert held(small, "n", "n_double", "x", "y") == {
        "a": (1, None, None, None),
        "b": (1, None, None, None),
        "c": (None, 2.5, True, None),
        "d": (2, None, None, "z"),
    }
    check(small)


def test_a_document_that_was_pending_when_its_field_came_up_has_it_in_the_column(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    for number in range(4):
        small.write(number, f"key-{number}", value=b'{"f%d": %d}' % (number, number))
        small.land(merges=number == 3)
    small.bucket.fail_over(1, 0)
    small.write(1, "back", value=b'{"f9": 9}')
    small.land()
    assert held(small, "f0", "f9") == {
        "key-0": (0, None),
        "key-2": (None, None),
        "key-3": (None, None),
        "back": (None, 9),
    }
    check(small)


@pytest.mark.parametrize(
    "step", ["add columns", "run merges again", "commit rejects", "commit documents", "switch columns"]
)
def test_a_crash_between_any_two_commits_is_made_good(tmp_path: Path, step: str) -> None:
    def crash(name: str) -> None:
        if name.startswith(step):
            raise RuntimeError(name)

    small = SmallLake(tmp_path, settings=LakeSettings(infer=False))
    small.write(0, "a", value=b'{"n": 1, "m": 2}')
    small.land()
    small.write(3, "b", value=b'{"n": 1.5, "m": "x"}')
    small.write(3, "broken", value=b'{"n": ')
    small.land(merges=False)
    small.reopen(INFER).step = crash
    with pytest.raises(RuntimeError):
        merge(small.lake)
    assert verify_model(small.reopen(), small.bucket).findings.first() == ()
    # What has been begun is completed, whether it is asked for again or not.
    small.reopen(INFER if step == "switch columns" else LakeSettings())
    small.write(0, "c", value=b'{"n": 3, "o": 1}')
    small.land()
    assert held(small, "n", "m", "o") == {
        "a": (1.0, "2", None),
        "b": (1.5, "x", None),
        "broken": (None, None, None),
        "c": (3.0, None, 1),
    }
    check(small)


def test_files_with_and_without_a_column_are_joined_and_open_everywhere(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, vbuckets=1, groups=1)
    for number in range(9):
        small.write(0, f"key-{number}", value=b'{"f%d": {"x": %d}, "n": %d}' % (number, number, number))
        small.land()
    # The eighth merge has joined what the others have left.
    path = str(tmp_path / DOCUMENTS)
    dataset = DeltaTable(path).to_pyarrow_dataset()
    expected = (36, 9, 4)
    fields = pl.col("n").sum().alias("n"), pl.len(), pl.col("f4").struct.field("x").sum()
    assert pl.read_delta(path).select(*fields).row(0) == expected
    assert duckdb.from_arrow(dataset).aggregate("sum(n), count(*), sum(f4.x)").fetchall() == [expected]
    files = DeltaTable(path).file_uris()
    of_files = duckdb.read_parquet(files, union_by_name=True, hive_partitioning=True)
    assert of_files.aggregate("sum(n), count(*), sum(f4.x)").fetchall() == [expected]
    check(small)
    assert len(files) == 2


def versions(small: SmallLake, *columns: str) -> list[tuple[Any, ...]]:
    """What some columns of the history hold, in the order of its changes."""
    rows = sorted(small.rows(f"history/{DEFAULT}"), key=lambda row: (row["vbucket"], row["seqno"]))
    return [(row["key"], *(row[column] for column in columns)) for row in rows]


def test_versions_have_the_columns_of_the_documents_and_bring_columns_for_fields_of_their_own(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=merging(history=True))
    small.write(0, "a", value=b'{"total": 1, "gone": "x", "Valid_From": 7}')
    small.write(0, "a", "b", value=b'{"total": 2}')
    small.write(3, "c", value=b'{"total": 2.5}')
    small.write(3, "c", value=b'{"total": 3}')
    small.land()
    assert versions(small, "total", "gone") == [
        ("a", 1, "x"),
        ("a", 2, None),
        ("b", 2, None),
        ("c", 2.5, None),
        ("c", 3, None),
    ]
    assert held(small, "total", "gone") == {"a": (2.0, None), "b": (2.0, None), "c": (3.0, None)}
    small.bucket.fail_over(3, 1)
    small.write(3, "c", value=b'{"total": 4, "late": true}')
    small.write(0, "a", value=b'{"total": "none"}')
    small.land()
    assert versions(small, "total", "late")[-2:] == [("c", 2.5, None), ("c", 4, True)]
    assert versions(small, "total")[3] == ("a", None)
    names = [{*DeltaTable(tmp_path / kind / DEFAULT).schema().to_arrow().names} for kind in ("documents", "history")]
    assert names[1] - names[0] == {"valid_from", "valid_to", "valid_to_seqno", "is_current"}
    assert names[0] - names[1] == {"Valid_From"}, "a history has a column of that name"
    check_inferred(tmp_path, DEFAULT, "history")
    check(small)


def on_mismatch(what: str, **merging_rules: bool) -> LakeSettings:
    return replace(merging(**merging_rules), rules={"*": ColumnRules(on_mismatch=what)})


def test_values_of_another_type_go_to_a_column_beside_and_back_when_they_are_to_be_rejected(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=on_mismatch("column", history=True))
    small.write(0, "a", value=b'{"n": 1, "home": {"zip": 1}, "n__string": true}')
    small.land()
    small.write(1, "b", value=b'{"n": "two", "home": "Bern", "n__string": 5}')
    small.write(2, "c", value=b'{"n": 2.5}')
    small.write(3, "d", value=b'{"n": 18446744073709551616}')
    small.write(3, "e", value=b'{"n": {"x": [1]}, "n": "\\ud800"}')
    small.land()
    beside = {
        "a": (1, None, None, True, None, None),
        "b": (None, None, "two", None, "5", "Bern"),
        "c": (None, 2.5, None, None, None, None),
        "d": (None, None, "18446744073709551616", None, None, None),
        "e": (None, None, None, None, None, None),
    }
    columns = ("n", "n_double", "n__string_2", "n__string", "n__string__string", "home__string")
    assert held(small, *columns) == {row[0]: row[1:] for row in versions(small, *columns)} == beside
    says = "column n: BIGINT can't hold a string like this, and there is no room for a column beside it"
    assert [(row["key"], row["reason"]) for row in small.rows(f"rejects/{DEFAULT}")] == [("e", says)]
    check(small)
    small.reopen(on_mismatch("reject", history=True))
    small.write(0, "f", value=b'{"n": "six"}')
    small.land()
    assert [row[2] for row in held(small, *columns).values()] == [None] * 6
    assert len(small.rows(f"rejects/{DEFAULT}")) == 6
    assert versions(small, "n__string_2")[1:3] == [("f", None), ("b", "two")]
    check(small)
    small.reopen(on_mismatch("column"))
    assert small.lake.has_pending
    merge(small.lake)
    assert held(small, *columns) == {**beside, "f": (None, None, "six", None, None, None)}
    check(small)


def test_so_many_columns_beside_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_columns, "BESIDE_MAX", 1)
    small = SmallLake(tmp_path, settings=on_mismatch("column"))
    small.write(0, "a", value=b'{"n": 1, "m": 1}')
    small.land()
    for vbucket, value in enumerate((b'{"n": "x"}', b'{"m": "x"}')):
        small.write(vbucket * 3, "b", value=value)
    small.land()
    (reject,) = small.rows(f"rejects/{DEFAULT}")
    assert "no room for a column beside it" in reject["reason"]
    check(small)


def by_rules(**texts: str) -> LakeSettings:
    return replace(
        merging(history=True, change_feed=True),
        rules=choose_rules(**{name: {"*": text} for name, text in texts.items()}),
    )


def test_columns_are_left_out_and_renamed_by_patterns_and_others_when_the_rules_change(tmp_path: Path) -> None:
    small = SmallLake(
        tmp_path, settings=by_rules(exclude="x_*, ?id", rename="n AS total, addr_* AS address_*, key AS k")
    )
    value = b'{"n": 1, "total": 5, "addr_city": "Bern", "x_a": 1, "x_b": 2, "aid": 3, "key": "K", "first name": "Eva"}'
    small.write(0, "a", value=value)
    small.land()
    small.write(3, "b", value=b'{"n": 2.5, "idle": true}')
    small.land()
    names = ("total", "total_double", "address_city", "k", "idle")
    before = {"a": (1, None, "Bern", "K", None), "b": (None, 2.5, None, None, True)}
    copy = Follower(tmp_path / DOCUMENTS)
    own = {*history_schema(xattrs=False).names, "vbucket_group", "is_current"}
    for kind in ("documents", "history"):
        assert {*DeltaTable(tmp_path / kind / DEFAULT).schema().to_arrow().names} - own == {*names}
    assert held(small, *names) == {row[0]: row[1:] for row in versions(small, *names)} == before
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    small.reopen(by_rules(exclude="", include="n, *name", rename="first name AS name"))
    small.write(0, "a", value=value)
    small.land()
    assert held(small, "n", "name") == {"a": (1.0, "Eva"), "b": (2.5, None)}
    assert {*held(small, *names).values()} == {(None,) * len(names)}
    copy.follow()
    # No version is parsed again, and each keeps what it has when it ends.
    assert versions(small, "n", "total") == [("a", None, 1), ("a", 1, None), ("b", None, None)]
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    with pytest.raises(InvalidColumns, match="has a column of that name, for the field 'addr_city'"):
        small.reopen(by_rules(include="n", rename="n AS address_city"))
    assert not small.reopen(LakeSettings()).has_pending


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"rename": "a AS c, b AS C"}, "two columns would have the name 'C': 'b' and 'a'"),
        ({"rename": "a* AS c"}, "two columns would have the name 'c': all fields like 'a*'"),
        ({"rename": "a AS a"}, "renames nothing: it has that name already"),
        ({"rename": "a AS b", "exclude": "?"}, "renames nothing: it gets no column"),
        ({"rename": "a AS b", "include": "b"}, "renames nothing: it gets no column"),
        ({"rename": "a AS Cas"}, "has a column of its own"),
        ({"rename": "a AS b c"}, "can't be renamed to 'b c'"),
        ({"rename": "a AS b*"}, "Where new has a *"),
        ({"rename": "a=b"}, "'a=b' is not a rename"),
        ({"exclude": "a,,b"}, "'' is not a pattern of field names"),
        ({"include": ",".join(map(str, range(257)))}, "more than 256 patterns"),
    ],
)
def test_rules_that_can_not_be_kept_are_refused(texts: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidColumns) as refused:
        by_rules(**texts)
    assert says in str(refused.value)


@pytest.mark.parametrize("columns", ["n INT", ColumnMode.NONE])
def test_rules_are_for_columns_that_are_inferred(columns: str) -> None:
    choice = columns if isinstance(columns, ColumnMode) else TypedColumns.from_ddl(columns)
    with pytest.raises(InvalidInput, match="are for those that are inferred"):
        LakeSettings(columns={DEFAULT: choice}, rules={DEFAULT: ColumnRules(on_mismatch="column")})
    with pytest.raises(InvalidColumns, match="Use reject or column"):
        ColumnRules(on_mismatch="raise")


def test_without_columns(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=LakeSettings(infer=False))
    small.write(0, "a", value=b'{"n": 1}')
    small.land()
    assert "n" not in small.rows(DOCUMENTS)[0]
    small.reopen(LakeSettings())
    small.write(0, "b", value=b'{"n": 1}')
    small.land()
    assert "n" not in small.rows(DOCUMENTS)[0], "a table stays as it was made"


def test_other_columns_than_a_table_has_are_refused(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=with_columns(LakeSettings(), {DEFAULT: "n INT"}))
    small.write(0, "a")
    small.land()
    for columns in ({DEFAULT: "n BIGINT"}, {"*": "m INT"}):
        with pytest.raises(ColumnsChanged, match="n INT"):
            Lake.open(str(tmp_path), settings=with_columns(LakeSettings(), columns))
    small.reopen(LakeSettings())
    small.write(0, "b")
    small.land()
    assert sorted(row["n"] for row in small.rows(f"documents/{DEFAULT}")) == [1, 1]
    inferred = SmallLake(tmp_path / "inferred")
    inferred.write(0, "a", value=b'{"n": 1}')
    inferred.land()
    for settings in (with_columns(LakeSettings(), {"*": "n BIGINT"}), LakeSettings(infer=False)):
        with pytest.raises(ColumnsChanged, match="inferred n BIGINT"):
            inferred.reopen(settings)


def test_a_lake_of_the_version_before_stays_as_it_is_and_can_be_switched(tmp_path: Path) -> None:
    small = lake_of_before(tmp_path, merging(history=True))
    small.write(2, "f", value=b'{"n": "no", "x": 1}')
    small.land()
    assert "x" not in small.rows(DOCUMENTS)[0]
    assert {"n"} <= {*small.rows(f"history/{DEFAULT}")[0]}, "versions have the fixed columns from now on"
    assert ["field" in row for row in small.rows(f"rejects/{DEFAULT}")] == [False, False]
    assert verify_model(small.lake, small.bucket).findings.first() == ()
    small.reopen(replace(INFER, merging=small.lake.settings.merging))
    assert small.lake.has_pending
    merge(small.lake)
    assert held(small, "n", "x")["f"] == (None, 1)
    assert sorted((row["key"], row["field"]) for row in small.rows(f"rejects/{DEFAULT}")) == [("e", "n"), ("f", "n")]
    assert not small.reopen().has_pending
    small.write(2, "f", value=b'{"n": 3, "x": 2}')
    small.land()
    assert versions(small, "n", "x")[-2:] == [("f", None, None), ("f", 3, 2)], "no version is parsed again"
    check(small)


def test_of_equal_names_in_an_object_the_last_counts_in_every_type_of_column(tmp_path: Path) -> None:
    members = ", ".join(f'"user-{number}": 1' for number in range(65))
    small = SmallLake(tmp_path)
    small.write(0, "a", value=b'{"n": 1, "m": {"b": 1, "B": "x", "b": 2}, "s": {"x": 1, "x": 2}, "n": 3}')
    small.write(0, "b", value=f'{{"m": {{{members}, "user-7": null, "\\u0075ser-8": 5, "z\\u0000z": 4}}}}'.encode())
    small.write(0, "c", value=b'{"l": [{"X": 1, "x": 1, "X": 2}], "s": {"x": "no", "x": 5}}')
    small.land()
    rows = duckdb.execute(
        f"SELECT key, n, m, s, l FROM read_parquet('{tmp_path}/{DOCUMENTS}/*/*.parquet') ORDER BY key"
    ).fetchall()
    names = {f"user-{number}": "1" for number in range(65)} | {"user-7": None, "user-8": "5", "z\0z": "4"}
    assert rows == [
        ("a", 3, {"B": "x", "b": "2"}, {"x": "2"}, None),
        ("b", None, names, None, None),
        ("c", None, None, {"x": "5"}, [{"x": 1, "X": 2}]),
    ]
    check(small)


def test_numbers_that_no_column_of_numbers_holds_are_rejected_and_never_rounded(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "amount", value=b'{"n": 9007199254740993, "d": 1.5}')
    small.write(1, "whole", value=b'{"n": 123456789012345678901, "d": 18446744073709551615}')
    small.write(
        2, "large", value=b'{"n": 1e400, "d": -1e999, "l": [18446744073709551616], "only": 9999999999999999999}'
    )
    small.land()
    small.write(1, "later", value=b'{"n": 99999999999999999999, "d": 2, "l": [1], "only": 5}')
    small.land()
    assert held(small, "n", "d", "l", "only") == {
        "amount": (2.0**53, 1.5, None, None),
        "whole": (None, None, None, None),
        "large": (None, None, ["18446744073709551616"], None),
        "later": (None, 2.0, ["1"], 5),
    }
    fields = sorted((row["key"], row["field"], row["reason"]) for row in small.rows(f"rejects/{DEFAULT}"))
    assert fields == [
        ("large", "d", "column d: DOUBLE can't hold a number like this"),
        ("large", "n", "column n: DOUBLE can't hold a number like this"),
        ("large", "only", "column only: BIGINT can't hold a number like this"),
        ("later", "n", "column n: DOUBLE can't hold a number like this"),
        ("whole", "d", "column d: DOUBLE can't hold a number like this"),
        ("whole", "n", "column n: DOUBLE can't hold a number like this"),
    ]
    assert verify_model(small.lake, small.bucket).findings.first() == ()

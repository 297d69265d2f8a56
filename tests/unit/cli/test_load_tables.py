"""`headwater load` of CSV and Parquet files: what arrives, and what is said of rows that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from support.loading_server import PASSWORD, USER, LoadingCluster

LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}


@pytest.fixture
def cluster() -> Iterator[LoadingCluster]:
    with LoadingCluster().running() as running:
        yield running


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["load", *arguments], input=stdin, env=LOGIN)


def loaded(*arguments: str, stdin: bytes = b"") -> int:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return int(json.loads(result.stdout)["documents"])


def failed(*arguments: str, stdin: bytes = b"") -> list[str]:
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    return result.stderr.splitlines()


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def test_a_csv_file(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = tmp_path / "users.csv"
    file.write_text('id,name,zip\n7,"Ada, the first",01234\n8,Bo,90210\n')
    assert loaded(cluster.url(), str(file), "--key", "user::{id}") == 2
    assert cluster.values() == {
        "user::7": {"id": 7, "name": "Ada, the first", "zip": "01234"},
        "user::8": {"id": 8, "name": "Bo", "zip": "90210"},
    }


def test_a_csv_file_from_standard_input(cluster: LoadingCluster) -> None:
    options = ("--format", "csv", "--delimiter", ";", "--text", "id", "--key", "{id}-{#}")
    assert loaded(cluster.url(), "-", *options, stdin=b"id;n\n7;1\n8;2\n") == 2
    assert cluster.values() == {"7-1": {"id": "7", "n": 1}, "8-2": {"id": "8", "n": 2}}


def test_tabs(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = tmp_path / "users.TSV"
    file.write_text("id\tname\n1\ta,b\n")
    loaded(cluster.url(), str(file))
    loaded(cluster.url(), "-", "--format", "csv", "--delimiter", "\\t", "--key", "x{#}", stdin=file.read_bytes())
    assert cluster.values() == {"doc::1": {"id": 1, "name": "a,b"}, "x1": {"id": 1, "name": "a,b"}}


def test_a_parquet_file(cluster: LoadingCluster, tmp_path: Path) -> None:
    rows = [{"id": number, "tags": ["a", None], "home": {"city": "Graz"}} for number in range(10_000)]
    file = write_parquet(tmp_path / "users.parquet", rows, row_group_size=3000)
    assert loaded(cluster.url(), file, "--key", "u{id}") == 10_000
    assert cluster.values() == {f"u{row['id']}": row for row in rows}


def test_a_parquet_file_is_known_by_its_first_bytes(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "part-00000", [{"a": 1}])
    assert loaded(cluster.url(), file) == 1
    assert cluster.values() == {"doc::1": {"a": 1}}


def test_rows_before_a_bad_one_are_written(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", [{"id": 1}, {"id": 2}, {"id": None}, {"id": 4}])
    said = failed(cluster.url(), file, "--key", "{id}")
    assert said[0].startswith("Error: row 3: the field 'id' is neither a string nor a whole number. Every document")
    assert said[1:] == ["2 documents were written"]
    assert cluster.values().keys() == {"1", "2"}


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("a.csv", b"a,b\n1\n", (), "row 1: expected 2 columns, got 1"),
        ("a.csv", b"", (), "the file has no header"),
        ("a.csv", b"a\n1\n", ("--key", "{b}"), "row 1: the document has no field 'b'"),
        ("a.csv", b"a\n1\n", ("--text", "b"), "the file has no column 'b'"),
        ("a.jsonl", b"{}\n", ("--text", "b"), "--delimiter and --text are for CSV, and this is jsonl"),
        ("a.parquet", b"PAR1 and no more", (), "the file is no Parquet file that can be read: "),
    ],
)
def test_files_that_will_not_do(
    cluster: LoadingCluster, tmp_path: Path, name: str, content: bytes, options: tuple[str, ...], said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    first, *rest = failed(cluster.url(), str(file), *options)
    assert first.startswith(f"Error: {said}")
    assert rest == ["0 documents were written"]


def test_what_is_no_parquet_has_a_hint(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 and no more")
    assert failed(cluster.url(), str(file))[0].endswith(". Check the file, or give --format")


@pytest.mark.parametrize("sign", ["", ";;", '"', "\n"])
def test_delimiters_that_are_none(sign: str) -> None:
    assert run("couchbase://127.0.0.1/a", "-", "--delimiter", sign).exit_code == 2

"""`headwater export` from a real node: what is in the files, and what is said of what can't be."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.client.cluster_map import vbucket_of
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import CollectionId, VBucketId
from support.commands import LOGIN, VBUCKETS, TailedBucket, serving_buckets
from support.node_process import NodeProcess

BUCKETS = ("people", "mixed", "empty", "shops", "nested", "busy")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving_buckets(tmp_path_factory, *BUCKETS) as started:
        yield started


def bucket_with(node: NodeProcess, name: str, lines: list[Any], key: str = "{id}") -> TailedBucket:
    bucket = TailedBucket(node, name)
    run_ok(["load", bucket.url, "-", "--key", key], "\n".join(json.dumps(line) for line in lines))
    return bucket


def run_ok(arguments: list[str], stdin: str = "") -> str:
    result = CliRunner().invoke(main, arguments, env=LOGIN, input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def export(bucket: TailedBucket, into: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["export", bucket.url, "--into", str(into), *options], env=LOGIN)


def exported(bucket: TailedBucket, into: Path, *options: str) -> dict[str, Any]:
    result = export(bucket, into, *options, "--json")
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def lines_of(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: str(line["_key"]))


@pytest.fixture(scope="module")
def people(node: NodeProcess) -> TailedBucket:
    return bucket_with(
        node,
        "people",
        [{"id": f"p{n:04}", "age": n, "ratio": n / 4, "ok": n % 2 == 0, "name": f'Ada "{n}"'} for n in range(3000)],
    )


def test_json_lines(people: TailedBucket, tmp_path: Path) -> None:
    told = exported(people, tmp_path / "out" / "people.jsonl")
    assert told["documents"] == 3000
    assert told["files"] == [str(tmp_path / "out" / "people.jsonl")]
    found = lines_of(tmp_path / "out" / "people.jsonl")
    assert found[7] == {"_key": "p0007", "id": "p0007", "age": 7, "ratio": 1.75, "ok": False, "name": 'Ada "7"'}
    assert len(found) == 3000
    assert os.listdir(tmp_path / "out") == ["people.jsonl"], "nothing else is left"


def test_parquet(people: TailedBucket, tmp_path: Path) -> None:
    assert exported(people, tmp_path / "people.parquet")["documents"] == 3000
    table = pq.read_table(tmp_path / "people.parquet")
    types = [pa.string(), pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.string()]
    assert (table.schema.names, table.schema.types) == (["_key", "id", "age", "ratio", "ok", "name"], types)
    assert sorted(table.column("age").to_pylist()) == list(range(3000))


def test_only_what_is_alive(node: NodeProcess, tmp_path: Path) -> None:
    bucket = bucket_with(node, "shops", [{"id": n, "v": 1} for n in range(20)])
    for command in (["create", bucket.url, "s"], ["create", bucket.url, "s.a"], ["create", bucket.url, "s.gone"]):
        run_ok(["collections", *command])
    for collection in ("s.a", "s.gone"):
        run_ok(["load", bucket.url, "--generate", "30", "--collection", collection])
    run_ok(["load", bucket.url, "-", "--key", "{id}"], '{"id": 3, "v": 2}')
    bucket.delete("4")
    run_ok(["collections", "drop", bucket.url, "s.gone"])
    told = exported(bucket, tmp_path / "out")
    assert told["collections"] == {"_default._default": 19, "s.a": 30}
    assert sorted(os.listdir(tmp_path / "out")) == ["_default._default.jsonl", "s.a.jsonl"]
    found = {line["_key"]: line["v"] for line in lines_of(tmp_path / "out" / "_default._default.jsonl")}
    assert found == {str(n): 2 if n == 3 else 1 for n in range(20) if n != 4}
    only = exported(bucket, tmp_path / "a.csv", "--collection", "s.a")
    assert only["collections"] == {"s.a": 30}


def test_under_writes_every_document_is_there_once(node: NodeProcess, tmp_path: Path) -> None:
    bucket = bucket_with(node, "busy", [{"id": n, "v": 0} for n in range(2000)])
    is_done = threading.Event()

    def write_on() -> None:
        for version in itertools.count(1):
            if is_done.is_set():
                return
            bucket.write(*(str(n) for n in range(0, 2000, 10)), value=b'{"v":%d}' % version)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for number in range(3):
            exported(bucket, tmp_path / f"{number}.jsonl")
    finally:
        is_done.set()
        writer.join()
    for number in range(3):
        found = lines_of(tmp_path / f"{number}.jsonl")
        assert [int(line["_key"]) for line in sorted(found, key=lambda line: int(line["_key"]))] == list(range(2000))
        assert all(line["v"] == 0 for line in found if int(line["_key"]) % 10)


def test_several_collections_do_not_fit_in_one_file(node: NodeProcess, tmp_path: Path) -> None:
    result = export(TailedBucket(node, "shops"), tmp_path / "all.jsonl")
    assert result.exit_code == 1
    assert "can't hold the documents of 2 collections: _default._default, s.a. Give a directory" in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def mixed(node: NodeProcess) -> TailedBucket:
    bucket = TailedBucket(node, "mixed")
    bucket.write("object", value=b' {"a": 1,\n "b":[1,2]}')
    bucket.write("none", value=b"{ }")
    bucket.write("list", value=b"[1, 2]")
    bucket.write("bytes", value=b"\xff\x00")
    with closing(node.connect("mixed")) as connection:
        key = b"\xfe key"
        where = VBucketId(vbucket_of(key, VBUCKETS))
        connection.request(Set(vbucket=where, collection_id=CollectionId(0), key=key, value=b"{}"))
    return bucket


def test_json_lines_hold_everything(mixed: TailedBucket, tmp_path: Path) -> None:
    assert exported(mixed, tmp_path / "m.jsonl")["documents"] == 5
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert sorted(lines, key=str) == [
        {"_key": "bytes", "_flags": 0, "_value_base64": "/wA="},
        {"_key": "list", "_flags": 0, "_value": [1, 2]},
        {"_key": "none", "_flags": 0},
        {"_key": "object", "_flags": 0, "a": 1, "b": [1, 2]},
        {"_key_base64": "/iBrZXk=", "_flags": 0},
    ]
    result = export(mixed, tmp_path / "n.jsonl", "--no-key")
    assert result.exit_code == 1
    assert "it is not JSON" in result.stderr
    found = [json.loads(line) for line in (tmp_path / "n.jsonl").read_text().splitlines()]
    assert sorted(map(str, found)) == sorted(map(str, [{"a": 1, "b": [1, 2]}, {}, [1, 2], {}]))


def test_columns_say_what_they_can_t_hold(mixed: TailedBucket, tmp_path: Path) -> None:
    result = export(mixed, tmp_path / "m.parquet", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["left_out"] == {"the key is not UTF-8": 1, "it is not JSON": 1, "it is JSON, but no object": 1}
    assert told["columns_as_text"] == ["b"]
    assert "As JSON text, because nested or of several kinds: b" in result.stderr
    assert r"1 document left out, such as '\xfe key': the key is not UTF-8. JSON lines" in result.stderr
    rows = pq.read_table(tmp_path / "m.parquet").sort_by("_key").to_pylist()
    assert rows == [{"_key": "none", "a": None, "b": None}, {"_key": "object", "a": 1, "b": "[1,2]"}]


def test_columns_of_several_kinds(node: NodeProcess, tmp_path: Path) -> None:
    lines = [{"id": 1, "x": 1}, {"id": 2, "x": "one"}, {"id": 3, "x": 1.5, "big": 2**70, "a b": 1}, {"id": 4, "ID": 5}]
    bucket = bucket_with(node, "nested", lines)
    told = exported(bucket, tmp_path / "n.parquet", "--no-key")
    assert told["fields_without_column"] == ["a b", "ID"]
    rows = pq.read_table(tmp_path / "n.parquet").sort_by("id").to_pylist()
    assert rows == [
        {"id": 1, "x": "1", "big": None},
        {"id": 2, "x": "one", "big": None},
        {"id": 3, "x": "1.5", "big": str(2**70)},
        {"id": 4, "x": None, "big": None},
    ]


@pytest.mark.parametrize("name", ["e.jsonl", "e.csv", "e.parquet"])
def test_an_empty_bucket(node: NodeProcess, tmp_path: Path, name: str) -> None:
    assert exported(TailedBucket(node, "empty"), tmp_path / name)["documents"] == 0
    assert (tmp_path / name).exists()
    assert exported(TailedBucket(node, "empty"), tmp_path / "folder")["files"] == []


def test_a_file_that_is_there_is_left_alone(people: TailedBucket, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("mine")
    result = export(people, tmp_path / "p.jsonl")
    assert result.exit_code == 1
    assert "already exists. Give another file or directory, or --overwrite" in result.stderr
    assert (tmp_path / "p.jsonl").read_text() == "mine"
    exported(people, tmp_path / "p.jsonl", "--overwrite")
    assert len(lines_of(tmp_path / "p.jsonl")) == 3000


def test_a_failure_leaves_nothing_behind(people: TailedBucket, tmp_path: Path) -> None:
    result = export(people, tmp_path / "p.jsonl", "--collection", "no.such")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    assert "can't be written to" in export(people, tmp_path / "file" / "below" / "p.jsonl").stderr

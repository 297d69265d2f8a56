"""`headwater tail` on a real node: what it prints, what it leaves out, and where it goes on."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.client.offsets import Offsets
from support.commands import VBUCKETS, TailedBucket, documents, json_lines, places, serving_buckets
from support.node_process import NodeProcess

COUNT = 3000
BUCKETS = ("full", "shown", "named", "kept", "rolled", "young", "attributed", "timed")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving_buckets(tmp_path_factory, *BUCKETS) as started:
        yield started


@pytest.fixture(scope="module")
def full(node: NodeProcess) -> TailedBucket:
    """A bucket with many documents that nobody changes."""
    bucket = TailedBucket(node, "full")
    bucket.fill(COUNT)
    return bucket


@pytest.fixture
def bucket(node: NodeProcess, request: pytest.FixtureRequest) -> TailedBucket:
    """The bucket of this test alone, which has the first word of the test's name."""
    return TailedBucket(node, request.node.name.split("_")[1])


# --- forms --------------------------------------------------------------------------------------------------------


def test_full_json(full: TailedBucket) -> None:
    lines = json_lines(full.tail_process("--json"))
    assert sorted(line["key"] for line in lines) == documents(COUNT)
    assert {line["op"] for line in lines} == {"mutation"}
    assert all(line["value"]["id"] == int(line["key"].removeprefix("doc::")) for line in lines)
    for vbucket in range(VBUCKETS):
        seqnos = [seqno for where, seqno in places(lines) if where == vbucket]
        assert seqnos == list(range(1, len(seqnos) + 1))


def test_full_arrow(full: TailedBucket) -> None:
    table = pa.ipc.open_stream(io.BytesIO(full.tail_process("--format", "arrow"))).read_all()
    assert sorted(table["key"].to_pylist()) == documents(COUNT)
    assert set(table["op"].to_pylist()) == {"mutation"}
    assert "xattrs" not in table.schema.names


def test_young_buckets_are_fine(bucket: TailedBucket) -> None:
    assert bucket.tail() == b""
    assert bucket.lines() == []
    table = pa.ipc.open_stream(io.BytesIO(bucket.tail("--format", "arrow", "--xattrs"))).read_all()
    assert (table.num_rows, table.schema.names[-1]) == (0, "xattrs")


def test_shown_to_people(bucket: TailedBucket) -> None:
    bucket.write("fox", value=b'{\n  "legs": 4\n}')
    bucket.write("goose", value=b"honk")
    bucket.delete("goose")
    lines = bucket.tail_process("--collection", "_default._default").decode().splitlines()
    shown = sorted(re.split("  +", line, maxsplit=2)[2] for line in lines)
    assert shown == [
        "deletion             _default._default  goose",
        'mutation             _default._default  fox  {   "legs": 4 }',
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  \d+:\d+ +\w", line) for line in lines)


# --- what is left out ---------------------------------------------------------------------------------------------


def test_full_keys_only(full: TailedBucket) -> None:
    lines = full.lines("--no-value", "--limit", "20")
    assert len(lines) == 20
    assert not any({"value", "value_base64"} & line.keys() for line in lines)


def test_full_by_vbucket(full: TailedBucket) -> None:
    lines = full.lines("--vbucket", "3", "--vbucket", "7-9")
    assert {vbucket for vbucket, _ in places(lines)} == {3, 7, 8, 9}


def test_full_by_key(full: TailedBucket) -> None:
    assert sorted(full.keys("--key", "doc::1?", "--key", "doc::2")) == [*documents(19)[1:11], "doc::2"]


def test_named_collections_and_scopes(bucket: TailedBucket) -> None:
    for name in ("shop", "shop.orders", "shop.users", "zoo", "zoo.foxes"):
        bucket.command("collections", "create", bucket.url, name)
    ids = {
        f"{scope['name']}.{collection['name']}": int(collection["uid"], 16)
        for scope in json.loads(bucket.command("collections", "list", bucket.url, "--json"))["scopes"]
        for collection in scope["collections"]
    }
    for name, number in ids.items():
        bucket.write(f"in {name}", collection=number)

    def found(*options: str) -> list[str]:
        return sorted(line["key"] for line in bucket.lines(*options) if line["op"] == "mutation")

    assert found() == sorted(f"in {name}" for name in ids)
    assert found("--collection", "shop.orders") == ["in shop.orders"]
    assert found("--collection", "shop.orders", "--collection", "zoo.foxes") == ["in shop.orders", "in zoo.foxes"]
    assert found("--scope", "shop") == ["in shop.orders", "in shop.users"]
    assert found("--scope", "shop", "--collection", "zoo.foxes") == ["in shop.orders", "in shop.users", "in zoo.foxes"]
    ops = {line["op"] for line in bucket.lines()}
    assert ops == {"mutation", "scope_created", "collection_created"}
    assert b"collection created   shop.orders" in bucket.tail()


# --- where it goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters", [(), ("--key", "doc::*1*"), ("--snapshots", "as-they-come"), ("--buffer-bytes", "4K")]
)
def test_full_in_two_parts(full: TailedBucket, tmp_path: Path, filters: tuple[str, ...]) -> None:
    file = str(tmp_path / "place.json")
    expected = full.keys(*filters)
    first = full.keys("--limit", "1234", "--offsets-file", file, *filters)
    rest = full.keys("--from", file, "--offsets-file", file, *filters)
    assert len(first) == min(1234, len(expected))
    assert sorted(first + rest) == sorted(expected), "nothing twice, nothing missing"
    assert full.keys("--from", Path(file).read_text(), *filters) == []


def test_full_in_many_forms_of_one_place(full: TailedBucket, tmp_path: Path) -> None:
    """The place is the same, whatever is printed."""
    places_left = set()
    for options in (("--json",), ("--format", "pretty"), ("--format", "arrow")):
        file = tmp_path / "place.json"
        full.tail("--limit", "77", "--vbucket", "5", "--offsets-file", str(file), *options)
        places_left.add(file.read_text())
    [place] = places_left
    assert Offsets.from_json(place).vbuckets == (5,)


def test_kept_in_a_checkpoint(bucket: TailedBucket, tmp_path: Path) -> None:
    bucket.fill(500)
    file = str(tmp_path / "place.json")
    parts = [bucket.keys("--checkpoint", file, "--limit", "150") for _ in range(3)]
    assert [len(part) for part in parts] == [150, 150, 150]
    parts.append(bucket.keys("--checkpoint", file))
    assert sorted(key for part in parts for key in part) == documents(500)
    bucket.write("later")
    assert bucket.keys("--checkpoint", file, "--from", "now") == ["later"], "--from is for the first run"
    assert bucket.keys("--checkpoint", file) == []


def test_full_checkpoint_of_more_vbuckets_than_are_read(full: TailedBucket, tmp_path: Path) -> None:
    file = str(tmp_path / "place.json")
    full.keys("--checkpoint", file)
    assert full.keys("--checkpoint", file, "--vbucket", "3") == []
    assert full.keys("--checkpoint", file) == [], "the others are still known"


def test_rolled_back_histories_are_told(bucket: TailedBucket, tmp_path: Path) -> None:
    bucket.fill(300)
    file = str(tmp_path / "place.json")
    before = bucket.lines("--checkpoint", file)
    reached = max(seqno for vbucket, seqno in places(before) if vbucket == 3)
    bucket.command("drill", "rollback", bucket.url, "--vbucket", "3", "--to", "5")
    [change, *rest] = bucket.lines("--from", file, "--key", "nothing")
    assert (change["op"], change["vbucket"], change["from_seqno"]) == ("rollback", 3, reached)
    assert change["seqno"] <= 5
    assert rest == []
    assert f"ROLLBACK of vbucket 3 from seqno {reached} to {change['seqno']}".encode() in bucket.tail("--from", file)
    again = json_lines(bucket.tail("--json", "--checkpoint", file))
    assert again[0] == change
    assert all(vbucket == 3 for vbucket, _ in places(again))
    assert bucket.lines("--checkpoint", file) == [], "it is told once"


def test_attributed_documents(bucket: TailedBucket) -> None:
    bucket.write("fox", "goose", value=b'{"legs":4}')
    bucket.set_xattr("fox", "found", b'{"by":"ann"}')
    others = ("--history", "--compression", "--connections-per-node", "2", "--name", "a test")
    found = {line["key"]: (line["value"], line.get("xattrs")) for line in bucket.lines("--xattrs", *others)}
    assert found == {"fox": ({"legs": 4}, {"found": {"by": "ann"}}), "goose": ({"legs": 4}, None)}
    assert not any("xattrs" in line for line in bucket.lines())
    assert all(line["value"] == {"legs": 4} for line in bucket.lines())


def test_timed_start(bucket: TailedBucket, tmp_path: Path) -> None:
    """Each vbucket starts at its first change since then, and a run that sees none can be resumed as well."""
    bucket.fill(200)
    bucket.delete("doc::1")
    time.sleep(0.01)
    at = datetime.now(UTC)
    offsets = tmp_path / "offsets"
    assert bucket.keys("--start-at", at.isoformat(), "--offsets-file", str(offsets)) == []
    assert len(Offsets.from_json(offsets.read_text()).offsets) == VBUCKETS
    bucket.write("doc::7", "new")
    bucket.delete("doc::8")
    for start in (at.isoformat(), f"{at.timestamp():.6f}", str(offsets)):
        lines = bucket.lines("--start-at", start)
        assert sorted((line["key"], line["op"]) for line in lines) == [
            ("doc::7", "mutation"),
            ("doc::8", "deletion"),
            ("new", "mutation"),
        ]
    assert len(bucket.keys("--from", "-1h")) == 201

"""`headwater export` of one bucket and `headwater load` into another: both have the same documents then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater.blocking import connect
from headwater.cli import main
from headwater.client.changes import Mutation
from headwater.client.cluster_map import vbucket_of
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.transfer.json_lines import MEMBERS
from headwater.transfer.set_frames import JSON_FLAGS
from support.cases import case_apart
from support.commands import LOGIN, VBUCKETS, serving_buckets
from support.node_process import NodeProcess

COLLECTIONS = {"_default._default": 0, "shop.orders": 9, "shop.users": 10}
IN_2040 = 2_208_988_800
BUCKETS = ("tricky", "random", "csv", "parquet", "wrong", "made")


@dataclass(frozen=True, slots=True)
class Document:
    collection: str
    key: bytes
    value: bytes
    flags: int = JSON_FLAGS
    expiry: int = 0


TRICKY = [
    Document("_default._default", b"object", b'{"a":1,"b":[1,{"c":null}],"d":"\\u00e4 \xc3\xa4 \\" \\\\"}'),
    Document("_default._default", b"empty", b"{}"),
    Document("_default._default", b"spaced", b'{ "a" : 1 }'),
    Document("_default._default", b"twice", b'{"a":1,"a":2}'),
    Document("_default._default", b"large number", b'{"n":123456789012345678901234567890.10e-3}'),
    Document("_default._default", b"list", b"[1, 2]"),
    Document("_default._default", b"number", b"7"),
    Document("_default._default", b"string", b'"text"'),
    Document("_default._default", b"null", b"null"),
    Document("_default._default", b"bytes", b"\xff\x00\xfe", flags=0x03000000),
    Document("_default._default", b"text", b"no JSON\nat all", flags=0x04000000),
    Document("_default._default", b"nothing", b"", flags=0),
    Document("_default._default", b"own names", b'{"_key":"mine","_flags":1,"_value":2,"x":3}'),
    Document("_default._default", b"own name inside", b'{"x":{"_key":"mine"},"y":"_key"}'),
    Document("_default._default", b"own name last", b'{"x":1,"_value_base64":"/w=="}'),
    Document("_default._default", b"flags", b'{"x":1}', flags=2**32 - 1),
    Document("_default._default", b"no flags", b'{"x":1}', flags=0),
    Document("_default._default", b"expires", b'{"x":1}', expiry=IN_2040),
    Document("_default._default", b"all of it", b"[]", flags=1, expiry=IN_2040 + 1),
    Document("_default._default", b"\xfe\xff no text", b'{"x":1}', flags=5),
    Document("_default._default", b"\xfe\xff no text and no JSON", b"\xff", expiry=IN_2040),
    Document("_default._default", 'quotes " \\ and\nlines, ö and 😀'.encode(), b'{"x":1}'),
    Document("_default._default", b"\x00\x1f\x7f", b'{"x":1}'),
    Document("_default._default", b"k" * 246, b'{"x":1}'),
    Document("shop.orders", b"object", b'{"another":"collection"}'),
    Document("shop.users", b"object", b'{"another":"collection"}', expiry=IN_2040),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Each bucket has another one that it is loaded into."""
    names = [f"{name}{end}" for name in BUCKETS for end in ("", "-loaded")]
    with serving_buckets(tmp_path_factory, *names) as started:
        for name in names:
            for what in ("shop", "shop.orders", "shop.users") if name not in ("wrong-loaded", "made-loaded") else ():
                run_ok("collections", "create", f"{started.url}/{name}", what)
        yield started


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, arguments, env=LOGIN, input=stdin)


def run_ok(*arguments: str, stdin: str = "") -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def write(node: NodeProcess, bucket: str, documents: list[Document]) -> None:
    with closing(node.connect(bucket)) as connection:
        for document in documents:
            connection.request(
                Set(
                    vbucket=VBucketId(vbucket_of(document.key, VBUCKETS)),
                    collection_id=CollectionId(COLLECTIONS[document.collection]),
                    key=document.key,
                    value=document.value,
                    flags=document.flags,
                    expiry=document.expiry,
                )
            )


def documents_of(node: NodeProcess, bucket: str) -> dict[tuple[str, bytes], Document]:
    """What is there, as DCP tells it."""
    login = {"user": LOGIN["HEADWATER_USER"], "password": LOGIN["HEADWATER_PASSWORD"]}
    found: dict[tuple[str, bytes], Document] = {}
    with connect(f"{node.url}/{bucket}", **login) as client:
        for change in client.changes(end="now"):
            if isinstance(change, Mutation):
                name = f"{change.scope}.{change.collection}"
                document = Document(name, change.key_bytes, change.value, change.flags, change.expiry)
                found[name, change.key_bytes] = document
    return found


def load_what_is_exported(node: NodeProcess, bucket: str, folder: Path, *options: str) -> None:
    run_ok("export", f"{node.url}/{bucket}", "--into", str(folder), *options)
    told = json.loads(run_ok("load", f"{node.url}/{bucket}-loaded", str(folder), "--json"))
    assert told["documents"] == len(documents_of(node, bucket))


# --- JSON lines ---------------------------------------------------------------------------------------------------


def test_json_lines_bring_everything_back(node: NodeProcess, tmp_path: Path) -> None:
    write(node, "tricky", TRICKY)
    load_what_is_exported(node, "tricky", tmp_path / "backup")
    assert documents_of(node, "tricky") == documents_of(node, "tricky-loaded")
    assert sorted(documents_of(node, "tricky-loaded").values(), key=repr) == sorted(TRICKY, key=repr)


def test_a_line_break_between_tokens_becomes_a_space(node: NodeProcess, tmp_path: Path) -> None:
    """The one thing that is not the same to the byte: a line is a line."""
    write(node, "wrong", [Document("_default._default", b"broken", b' {"a":\n1}\r\n')])
    run_ok("export", f"{node.url}/wrong", "--into", str(tmp_path / "one.jsonl"))
    run_ok("load", f"{node.url}/wrong-loaded", str(tmp_path / "one.jsonl"))
    [found] = documents_of(node, "wrong-loaded").values()
    assert (found.key, found.value) == (b"broken", b'{"a": 1}')


def random_documents(random: Random, count: int) -> list[Document]:
    return [
        Document(
            random.choice(list(COLLECTIONS)),
            random.choice((b"%d" % number, random.randbytes(12), f"{number}-ö\n".encode())),
            random.choice((random_json(random, 3), json.dumps({"n": number}).encode(), random.randbytes(30))),
            random.choice((JSON_FLAGS, random.getrandbits(32))),
            random.choice((0, IN_2040 + number)),
        )
        for number in range(count)
    ]


def random_json(random: Random, depth: int) -> bytes:
    def value(depth: int) -> Any:
        kinds = [None, True, random.random(), random.getrandbits(70), random.choice(NAMES)]
        if depth:
            kinds += [[value(depth - 1) for _ in range(2)], {random.choice(NAMES): value(depth - 1) for _ in range(3)}]
        return random.choice(kinds)

    return json.dumps(value(depth), ensure_ascii=random.random() < 0.5).encode()


NAMES = (*MEMBERS, "a", "b", "ä", 'quote"', "back\\slash", "new\nline", "")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_random_documents_come_back(node: NodeProcess, tmp_path: Path, seed: int) -> None:
    documents = random_documents(Random(seed), 500)
    write(node, "random", documents)
    load_what_is_exported(node, "random", tmp_path / "backup")
    found = documents_of(node, "random-loaded")
    assert found == documents_of(node, "random")
    last = {(document.collection, document.key): document for document in documents}
    assert all(found[place] == document for place, document in last.items())


# --- columns ------------------------------------------------------------------------------------------------------

ROWS = [
    {"name": "Ada", "age": 36, "ratio": 0.1, "ok": True},
    {"name": 'quote " and\nline', "age": -5, "ratio": 1e300},
    {"name": "", "age": 2**62, "ok": False},
    {"age": 1},
    {"_id": "x", "name": "ö"},
]
NESTED = {"tags": ["a", {"b": None}], "place": {"lat": 1.5}}
KEYS = [b"7", b"1e5", b"true", 'key "ö",'.encode(), b"-"]


@pytest.mark.parametrize(("bucket", "rows"), [("csv", ROWS), ("parquet", [*ROWS[:4], {**ROWS[4], **NESTED}])])
def test_columns_bring_keys_and_fields_back(node: NodeProcess, tmp_path: Path, bucket: str, rows: list[Any]) -> None:
    written = [Document("shop.users", key, json.dumps(row).encode()) for key, row in zip(KEYS, rows, strict=True)]
    write(node, bucket, written)
    load_what_is_exported(node, bucket, tmp_path / "backup", "--format", bucket)
    found = {key: json.loads(document.value) for (_, key), document in documents_of(node, f"{bucket}-loaded").items()}
    assert found == dict(zip(KEYS, rows, strict=True))


# --- what is not to be ------------------------------------------------------------------------------------------------


def test_options_count_for_more_than_what_a_line_says(node: NodeProcess) -> None:
    line = '{"_key":"a","x":1}'
    url = f"{node.url}/wrong-loaded"
    run_ok("load", url, "-", "--key", "own::{_key}", stdin=line)
    run_ok("load", url, "-", "--expiry", "0", stdin='{"_key":"e","_expiry":9}')
    found = documents_of(node, "wrong-loaded")
    assert found["_default._default", b"own::a"].value == line.encode(), "with a template a line is a document"
    assert found["_default._default", b"e"].expiry == 0


def test_a_folder_is_loaded_as_a_whole_or_not_at_all(node: NodeProcess, tmp_path: Path) -> None:
    for name in ("_default._default", "shop.users"):
        (tmp_path / f"{name}.jsonl").write_text('{"_key":"never"}\n')
    result = run("load", f"{node.url}/wrong-loaded", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: there is no scope of collection 'shop.users'. Create it")
    assert ("_default._default", b"never") not in documents_of(node, "wrong-loaded")


def test_collections_that_are_not_there_can_be_made(node: NodeProcess, tmp_path: Path) -> None:
    for name in ("_default._default", "new.one", "new.two"):
        (tmp_path / f"{name}.jsonl").write_text('{"_key":"k"}\n')
    url = f"{node.url}/made-loaded"
    for _ in range(2):
        told = json.loads(run_ok("load", url, str(tmp_path), "--create-collections", "--json"))
        assert told["documents"] == 3
    assert documents_of(node, "made-loaded").keys() == {
        (name, b"k") for name in ("_default._default", "new.one", "new.two")
    }


def test_an_error_names_the_file(node: NodeProcess, tmp_path: Path) -> None:
    path = tmp_path / "_default._default.jsonl"
    path.write_text('{"_key":"a"}\n{"x":1}\n')
    result = run("load", f"{node.url}/wrong-loaded", str(tmp_path))
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"Error: {path}: line 2: there is no key in front. ")
    assert second == "1 document was written"


@case_apart([], "there is no file of a collection in")
@case_apart(["notes.txt"], "notes.txt is not called as the file of a collection")
@case_apart(["users.jsonl"], "users.jsonl is not called as the file of a collection")
@case_apart(["a.b.jsonl", "a.b.csv"], "has two files of a.b, a.b.csv and a.b.jsonl. Choose with --format")
def test_folders_that_are_no_exports(node: NodeProcess, tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    result = run("load", f"{node.url}/wrong-loaded", str(tmp_path))
    assert result.exit_code == 1
    assert said in result.stderr


def test_only_a_folder_names_collections(node: NodeProcess, tmp_path: Path) -> None:
    url = f"{node.url}/wrong-loaded"
    for arguments, said in (
        (("--generate", "1", "--create-collections"), "--create-collections is for a folder"),
        ((str(tmp_path), "--collection", "a.b"), "named after: no --collection"),
    ):
        result = run("load", url, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr

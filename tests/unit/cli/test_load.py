"""`headwater load` against a small cluster in threads: what arrives, what is printed, and how it leaves."""

from __future__ import annotations

import json
import re
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from headwater.cli import main, output
from headwater.client.cluster_map import vbucket_of
from headwater.protocol.messages.documents import Set
from headwater.protocol.status import Status
from headwater.transfer import loader
from headwater.transfer.set_frames import JSON_FLAGS
from support.cases import case_apart
from support.fault_proxy import free_port
from support.loading_server import PASSWORD, USER, VBUCKETS, LoadingCluster
from support.machine import self_signed

LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}


@pytest.fixture
def cluster() -> Iterator[LoadingCluster]:
    with LoadingCluster().running() as running:
        yield running


def run(*arguments: str, stdin: bytes | str = b"", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["load", *arguments], input=stdin, env=LOGIN if env is None else env)


def loaded(*arguments: str, stdin: bytes | str = b"") -> dict[str, Any]:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    assert printed["error"] is None
    return printed


def failed(
    *arguments: str, stdin: bytes | str = b"", env: dict[str, str] | None = None, exit_code: int = 1
) -> list[str]:
    """The lines on standard error."""
    result = run(*arguments, stdin=stdin, env=env)
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_the_lines_of_a_file(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = tmp_path / "users.jsonl"
    file.write_text('{"id": 7, "name": "Ada"}\n\n{"id": "eight"}\n', encoding="utf-8")
    assert loaded(cluster.url(), str(file), "--key", "user::{id}")["documents"] == 2
    assert cluster.values() == {"user::7": {"id": 7, "name": "Ada"}, "user::eight": {"id": "eight"}}
    assert loaded(cluster.url(), str(file))["documents"] == 2
    assert {"doc::1", "doc::3"} <= cluster.values().keys()
    assert {message.flags for message in cluster.documents.values()} == {JSON_FLAGS}


def test_standard_input(cluster: LoadingCluster) -> None:
    assert loaded(cluster.url(), "-", "--key", "{#}", stdin="1\n[2]")["documents"] == 2
    assert cluster.values() == {"1": 1, "2": [2]}
    assert loaded(cluster.url(), "-", stdin="")["documents"] == 0


def test_generated_documents(cluster: LoadingCluster) -> None:
    assert loaded(cluster.url(), "--generate", "5000", "--value-bytes", "300", "--seed", "5")["documents"] == 5000
    found = cluster.values()
    assert found.keys() == {f"doc::{number}" for number in range(1, 5001)}
    assert all(found[f"doc::{number}"]["id"] == number for number in range(1, 5001))
    assert {len(message.value) for message in cluster.documents.values()} == {300}


def test_documents_are_dealt_out_over_collections(cluster: LoadingCluster) -> None:
    cluster.collections |= {"shop.orders": 8, "shop.users": 300}
    options = ("--collection", "shop.orders", "--collection", "shop.users", "--collection", "_default._default")
    loaded(cluster.url(), "--generate", "5001", "--key", "{#}", *options)
    for collection, rest in ((8, 1), (300, 2), (0, 0)):
        assert cluster.values(collection).keys() == {str(number) for number in range(1, 5002) if number % 3 == rest}


def test_a_server_without_collections_gets_plain_keys(cluster: LoadingCluster) -> None:
    cluster.served = frozenset()
    loaded(cluster.url(), "--generate", "10")
    assert cluster.values(None).keys() == {f"doc::{number}" for number in range(1, 11)}
    assert "has no collections" in failed(cluster.url(), "--generate", "1", "--collection", "a.b")[0]


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_connections(cluster: LoadingCluster, connections: int) -> None:
    loaded(cluster.url(), "--generate", "1000", "--connections", str(connections))
    assert len(cluster.documents) == 1000
    assert cluster.connections == 1 + connections, "one to ask, and those that load"


def test_what_is_written_to_a_key_later_wins(cluster: LoadingCluster) -> None:
    lines = "".join(json.dumps({"k": number % 10, "n": number}) + "\n" for number in range(6_000))
    loaded(cluster.url(), "-", "--key", "{k}", stdin=lines)
    assert cluster.values() == {str(number): {"k": number, "n": 5_990 + number} for number in range(10)}


def test_every_node_gets_its_own(tmp_path: Path) -> None:
    cluster = LoadingCluster(owners=[vbucket % 3 for vbucket in range(VBUCKETS)])
    with cluster.running(nodes=3):
        loaded(cluster.url(), "--generate", "3000")
    assert len(cluster.documents) == 3000
    assert all(cluster.by_node)


def test_expiry(cluster: LoadingCluster) -> None:
    loaded(cluster.url(), "-", "--expiry", "60", stdin="1")
    loaded(cluster.url(), "-", "--expiry", str(40 * 86400), "--key", "late{#}", stdin="1")
    short, late = (cluster.documents[0, key].expiry for key in (b"doc::1", b"late1"))
    assert short == 60
    assert late == pytest.approx(time.time() + 40 * 86400, abs=100), "a date: it is too long for seconds"


def test_what_the_server_puts_off_is_sent_again(cluster: LoadingCluster) -> None:
    refused: set[bytes] = set()

    def put_off_once(message: Set) -> Status | None:
        if message.key[-1:] in b"37" and message.key not in refused:
            refused.add(message.key)
            return Status.ETMPFAIL
        return None

    cluster.judge = put_off_once
    result = loaded(cluster.url(), "--generate", "2000")
    assert len(refused) == 400
    assert (result["documents"], result["retries"]) == (2000, 400)
    assert len(cluster.documents) == 2000
    assert result["bytes"] == 2000 * (24 + 8 + 1 + 200) + sum(len(key) for _, key in cluster.documents)


def test_vbuckets_that_have_moved_are_followed() -> None:
    """The first config is out of date: it gives every vbucket to the first node."""
    owners = [vbucket % 2 for vbucket in range(VBUCKETS)]
    cluster = LoadingCluster(owners=owners, told_owners=[0] * VBUCKETS)
    with cluster.running(nodes=2):
        result = loaded(cluster.url(), "--generate", "2000")
    moved = sum(owners[vbucket_of(key, VBUCKETS)] for _, key in cluster.documents)
    assert (result["documents"], result["retries"]) == (2000, moved)
    assert cluster.by_node == [2000 - moved, moved]


def test_a_vbucket_that_nobody_has(cluster: LoadingCluster) -> None:
    cluster.owners[3] = -1
    lines = failed(cluster.url(), "--generate", "10")
    assert "vbucket 3 has no active node" in lines[0]


def test_documents_that_are_put_off_for_ever(cluster: LoadingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.transfer.loader.RETRY_S_MAX", 0.1)
    cluster.judge = lambda message: Status.ETMPFAIL if message.key == b"doc::5" else None
    lines = failed(cluster.url(), "--generate", "10")
    assert "refused document 'doc::5'" in lines[0]
    assert "ETMPFAIL. Wait and try again" in lines[0]
    assert lines[1] == "9 documents were written"


@case_apart('{"id": 3', "line 3 is not JSON. Write one document per line")
@case_apart('{"no": 3}', "line 3: the document has no field 'id'")
@case_apart('{"id": null}', "line 3: the field 'id' is neither a string nor a whole number")
def test_a_bad_line(cluster: LoadingCluster, bad: str, sentence: str) -> None:
    lines = failed(cluster.url(), "-", "--key", "{id}", stdin=f'{{"id": 1}}\n{{"id": 2}}\n{bad}\n{{"id": 4}}\n')
    assert lines[0].startswith(f"Error: {sentence}")
    assert lines[1:] == ["2 documents were written"]
    assert cluster.values().keys() == {"1", "2"}


def test_a_bad_template(cluster: LoadingCluster) -> None:
    lines = failed(cluster.url(), "-", "--key", "user", stdin="1")
    assert lines[0].startswith("Error: the key template 'user' makes every key the same. Write {#}")
    assert lines[1] == "0 documents were written"
    assert cluster.connections == 0


@case_apart("_default.orders", "there is no collection '_default.orders'. Create it first")
@case_apart("shop.orders", "there is no scope of collection 'shop.orders'. Create it first")
@case_apart("orders", "'orders' is not a scope and a collection. Write scope.collection")
@case_apart("a.b.c", "'a.b.c' is not a scope and a collection")
@case_apart("a.", "'a.' is not a scope and a collection")
def test_an_unknown_collection(cluster: LoadingCluster, collection: str, sentence: str) -> None:
    lines = failed(cluster.url(), "--generate", "1", "--collection", collection)
    assert sentence in lines[0]
    assert lines[1:] == ["0 documents were written"]


def test_a_host_that_is_down(cluster: LoadingCluster) -> None:
    down = f"127.0.0.1:{free_port()}"
    lines = failed(f"couchbase://{down},{down}/travel", "--generate", "1")
    assert lines[0].startswith("Error: no host can be reached: ")
    assert loaded(f"couchbase://{down},127.0.0.1:{cluster.ports[0]}/travel", "--generate", "1")["documents"] == 1


def test_a_document_that_is_refused_for_good(cluster: LoadingCluster) -> None:
    cluster.judge = lambda message: Status.E2BIG if message.key == b"doc::500" else None
    result = run(cluster.url(), "--generate", "1000", "--json")
    assert result.exit_code == 1
    assert "the server refused document 'doc::500': E2BIG" in result.stderr
    printed = json.loads(result.stdout)
    assert "E2BIG" in printed["error"]
    assert printed["documents"] == len(cluster.documents) == 999
    assert "999 documents were written" in result.stderr


def test_a_server_that_goes_away(cluster: LoadingCluster) -> None:
    def die(message: Set) -> Status | None:
        if len(cluster.documents) == 5000:
            raise ConnectionError("the plug was pulled")
        return None

    cluster.judge = die
    lines = failed(cluster.url(), "--generate", "100000")
    assert "closed the connection" in lines[0] or "broke" in lines[0]
    written = int(lines[1].split(" ")[0].replace(",", ""))
    assert 0 < written <= len(cluster.documents)


def test_a_server_that_says_nothing(cluster: LoadingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(loader, "_WAIT_S_MAX", 0.05)
    silence = threading.Event()

    def wait(message: Set) -> Status | None:
        silence.wait(10)
        return None

    cluster.judge = wait
    try:
        lines = failed(cluster.url(), "--generate", "1")
    finally:
        silence.set()
    assert "has not answered for" in lines[0]


def test_an_input_that_cannot_be_read(cluster: LoadingCluster, tmp_path: Path) -> None:
    assert run(cluster.url(), str(tmp_path / "missing")).exit_code == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.transfer.json_lines.JsonLines.batches", broken_batches)
        lines = failed(cluster.url(), "-", stdin="1")
    assert lines == ["Error: the input can't be read: Input/output error", "0 documents were written"]


def broken_batches(_: object) -> Iterator[Any]:
    yield from ()
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("arguments", [(), ("-", "--generate", "1"), ("--generate", "0")])
def test_a_command_line_that_is_wrong(arguments: tuple[str, ...]) -> None:
    assert run("couchbase://h/b", *arguments).exit_code == 2


def test_who_logs_in(cluster: LoadingCluster) -> None:
    [said, _] = failed(cluster.url(), "--generate", "1", "--password", "quill")
    assert said.endswith("the user or the password is wrong. Check the user name and the password")
    login = ("--user", USER, "--password", PASSWORD)
    assert run(cluster.url(), "--generate", "1", *login, env={}).exit_code == 0
    url = cluster.url().replace("//", f"//{USER}@")
    assert run(url, "--generate", "1", env={"HEADWATER_PASSWORD": PASSWORD}).exit_code == 0
    lines = failed(cluster.url(), "--generate", "1", env={})
    assert "the user may not use bucket 'travel'" in lines[0]
    assert "password" in failed(url, "--generate", "1", env={})[0]


def test_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with LoadingCluster(tls=context).running() as cluster:
        assert loaded(cluster.url(), "--generate", "20000", "--tls-ca", str(certificate))["documents"] == 20_000
        assert len(cluster.documents) == 20_000
        [said, _] = failed(cluster.url(), "--generate", "1")
        assert "is not trusted" in said
        assert "--tls-ca" in said
        assert loaded(cluster.url(), "--generate", "1", "--tls-skip-verify")["documents"] == 1


def test_the_result(cluster: LoadingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SECONDS_MIN", 0.0)
    result = run(cluster.url(), "--generate", "1234")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert re.fullmatch(r"1,234 documents in \d+\.\d\d s: [\d,]+ documents/s, [\d,]+\.\d MB/s\n", result.stdout)
    monkeypatch.undo()
    assert re.fullmatch(r"1 document in \d+\.\d\d s\n", run(cluster.url(), "-", stdin="1").stdout)
    result = loaded(cluster.url(), "--generate", "100")
    assert result.keys() == {"documents", "seconds", "documents_per_s", "bytes", "mb_per_s", "retries", "error"}
    assert result["documents_per_s"] == pytest.approx(100 / result["seconds"], rel=0.01)


# --- tables -------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def test_a_csv_file(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = tmp_path / "users.csv"
    file.write_text('id,name,zip\n7,"Ada, the first",01234\n8,Bo,90210\n')
    assert loaded(cluster.url(), str(file), "--key", "user::{id}")["documents"] == 2
    assert cluster.values() == {
        "user::7": {"id": 7, "name": "Ada, the first", "zip": "01234"},
        "user::8": {"id": 8, "name": "Bo", "zip": "90210"},
    }


def test_a_csv_file_from_standard_input(cluster: LoadingCluster) -> None:
    options = ("--format", "csv", "--delimiter", ";", "--text", "id", "--key", "{id}-{#}")
    assert loaded(cluster.url(), "-", *options, stdin=b"id;n\n7;1\n8;2\n")["documents"] == 2
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
    assert loaded(cluster.url(), file, "--key", "u{id}")["documents"] == 10_000
    assert cluster.values() == {f"u{row['id']}": row for row in rows}


def test_a_parquet_file_is_known_by_its_first_bytes(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "part-00000", [{"a": 1}])
    assert loaded(cluster.url(), file)["documents"] == 1
    assert cluster.values() == {"doc::1": {"a": 1}}


def test_rows_before_a_bad_one_are_written(cluster: LoadingCluster, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", [{"id": 1}, {"id": 2}, {"id": None}, {"id": 4}])
    said = failed(cluster.url(), file, "--key", "{id}")
    assert said[0].startswith("Error: row 3: the field 'id' is neither a string nor a whole number. Every document")
    assert said[1:] == ["2 documents were written"]
    assert cluster.values().keys() == {"1", "2"}


@case_apart("a.csv", b"a,b\n1\n", (), "row 1: expected 2 columns, got 1")
@case_apart("a.csv", b"", (), "the file has no header")
@case_apart("a.csv", b"a\n1\n", ("--key", "{b}"), "row 1: the document has no field 'b'")
@case_apart("a.csv", b"a\n1\n", ("--text", "b"), "the file has no column 'b'")
@case_apart("a.jsonl", b"{}\n", ("--text", "b"), "--delimiter and --text are for CSV, and this is jsonl")
@case_apart(
    "a.parquet", b"PAR1 and no more", (), "the file is not a readable Parquet file: .*Check the file, or give --format"
)
def test_files_that_will_not_do(
    cluster: LoadingCluster, tmp_path: Path, name: str, content: bytes, options: tuple[str, ...], said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    first, *rest = failed(cluster.url(), str(file), *options)
    assert re.match(f"Error: {said}", first)
    assert rest == ["0 documents were written"]


@pytest.mark.parametrize("sign", ["", ";;", '"', "\n"])
def test_delimiters_that_are_none(sign: str) -> None:
    assert run("couchbase://127.0.0.1/a", "-", "--delimiter", sign).exit_code == 2

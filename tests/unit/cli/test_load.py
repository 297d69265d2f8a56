"""`headwater load` against a small cluster in threads: what arrives, what is printed, and how it leaves."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main, output
from headwater.client.cluster_map import vbucket_of
from headwater.protocol.messages.documents import Set
from headwater.protocol.status import Status
from headwater.transfer import loader
from headwater.transfer.set_frames import JSON_FLAGS
from support.fault_proxy import free_port
from support.loading_server import PASSWORD, USER, VBUCKETS, LoadingCluster

LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgXsrHYqq74MQbpC0K
CSIDZQ9U1M/bsB4ZySs6g3CkzUqhRANCAAQFt8Nd2gdYMeDMn+MLwHf7qRbrGKv5
KLmQ2h5ES2EdPLvfTDA7Pse8r+EfDLOIqIyCtqPyWEp3RliQKDlU/24M
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUf93o/fR1zYWytpKfwzez0DRDs1IwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTExNTA2Mjc1NloYDzIxMjYxMDIy
MDYyNzU2WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQFt8Nd2gdYMeDMn+MLwHf7qRbrGKv5KLmQ2h5ES2EdPLvfTDA7Pse8
r+EfDLOIqIyCtqPyWEp3RliQKDlU/24Mo28wbTAdBgNVHQ4EFgQUwqDTV407olVD
xWe4UQ57NaxPbvMwHwYDVR0jBBgwFoAUwqDTV407olVDxWe4UQ57NaxPbvMwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIgQNg53FJNlgUcJRaWsC8Oq8XSC2bAHjbO5anjbIjfdbwCIQDF
5IpxD1Tl34xP8BYLIOi8jROusp4QpwooI/NBfdYatQ==
-----END CERTIFICATE-----
"""
"""For localhost and 127.0.0.1, signed by itself, for a hundred years; used by these tests alone."""


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
    lines = "".join(json.dumps({"k": number % 10, "n": number}) + "\n" for number in range(30_000))
    loaded(cluster.url(), "-", "--key", "{k}", stdin=lines)
    assert cluster.values() == {str(number): {"k": number, "n": 29_990 + number} for number in range(10)}


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


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ('{"id": 3', "line 3 is not JSON. Write one document a line"),
        ('{"no": 3}', "line 3: the document has no field 'id'"),
        ('{"id": null}', "line 3: the field 'id' is neither a string nor a whole number"),
    ],
)
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


@pytest.mark.parametrize(
    ("collection", "sentence"),
    [
        ("_default.orders", "there is no collection '_default.orders'. Create it first"),
        ("shop.orders", "there is no scope of collection 'shop.orders'. Create it first"),
        ("orders", "'orders' is not a scope and a collection. Write scope.collection"),
        ("a.b.c", "'a.b.c' is not a scope and a collection"),
        ("a.", "'a.' is not a scope and a collection"),
    ],
)
def test_an_unknown_collection(cluster: LoadingCluster, collection: str, sentence: str) -> None:
    lines = failed(cluster.url(), "--generate", "1", "--collection", collection)
    assert sentence in lines[0]
    assert lines[1:] == ["0 documents were written"]


def test_a_wrong_password(cluster: LoadingCluster) -> None:
    lines = failed(cluster.url(), "--generate", "1", "--password", "quill")
    assert lines[0].endswith("the user or the password is wrong. Check the user name and the password")


def test_an_unknown_bucket_or_none(cluster: LoadingCluster) -> None:
    assert "there is no bucket 'other'" in failed(cluster.url("/other"), "--generate", "1")[0]
    assert "names no bucket" in failed(cluster.url(""), "--generate", "1")[0]


def test_a_connection_string_that_is_none() -> None:
    assert "does not start with couchbase://" in failed("localhost", "--generate", "1")[0]
    assert "there is no network 'x'" in failed("couchbase://h/b?network=x", "--generate", "1")[0]


def test_a_host_that_is_down(cluster: LoadingCluster) -> None:
    down = f"127.0.0.1:{free_port()}"
    lines = failed(f"couchbase://{down}/travel", "--generate", "1")
    assert (
        lines[0]
        == f"Error: {down} can't be reached: Connection refused. Check the address, and that the server is running"
    )
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


def test_a_server_that_speaks_nonsense() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        lines = failed(f"couchbase://127.0.0.1:{listener.getsockname()[1]}/b", "--generate", "1")
        thread.join()
    assert "is not a magic byte" in lines[0]
    assert "Check that the port speaks the Couchbase key-value protocol" in lines[0]


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
    login = ("--user", USER, "--password", PASSWORD)
    assert run(cluster.url(), "--generate", "1", *login, env={}).exit_code == 0
    url = cluster.url().replace("//", f"//{USER}@")
    assert run(url, "--generate", "1", env={"HEADWATER_PASSWORD": PASSWORD}).exit_code == 0
    lines = failed(cluster.url(), "--generate", "1", env={})
    assert "the user may not use bucket 'travel'" in lines[0]
    assert "password" in failed(url, "--generate", "1", env={})[0]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    file = tmp_path / "certificate.pem"
    file.write_text(CERTIFICATE)
    return file


@pytest.fixture
def tls_cluster(certificate: Path) -> Iterator[LoadingCluster]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with LoadingCluster(tls=context).running() as running:
        yield running


def test_tls_with_a_ca(tls_cluster: LoadingCluster, certificate: Path) -> None:
    assert loaded(tls_cluster.url(), "--generate", "20000", "--tls-ca", str(certificate))["documents"] == 20_000
    assert len(tls_cluster.documents) == 20_000


def test_tls_without_trust(tls_cluster: LoadingCluster) -> None:
    lines = failed(tls_cluster.url(), "--generate", "1")
    assert "is not trusted" in lines[0]
    assert "--tls-ca" in lines[0]
    assert loaded(tls_cluster.url(), "--generate", "1", "--tls-skip-verify")["documents"] == 1


def test_tls_where_there_is_none(cluster: LoadingCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"what?")

        thread = threading.Thread(target=hang_up)
        thread.start()
        lines = failed(f"couchbases://127.0.0.1:{listener.getsockname()[1]}/b", "--generate", "1")
        thread.join()
    assert "does not speak TLS" in lines[0]
    assert "couchbases://" in failed(cluster.url(), "--generate", "1", "--tls-skip-verify")[0]
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    assert "can't be used" in failed("couchbases://h/b", "--generate", "1", "--tls-ca", str(junk))[0]


def test_the_rate_at_the_end(cluster: LoadingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SECONDS_MIN", 0.0)
    result = run(cluster.url(), "--generate", "1234")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert re.fullmatch(r"1,234 documents in \d+\.\d\d s: [\d,]+ documents/s, [\d,]+\.\d MB/s\n", result.stdout)


def test_a_small_load_has_no_rate(cluster: LoadingCluster) -> None:
    assert re.fullmatch(r"1 document in \d+\.\d\d s\n", run(cluster.url(), "-", stdin="1").stdout)


def test_the_result_as_json(cluster: LoadingCluster) -> None:
    result = loaded(cluster.url(), "--generate", "100")
    assert result.keys() == {"documents", "seconds", "documents_per_s", "bytes", "mb_per_s", "retries", "error"}
    assert result["documents_per_s"] == pytest.approx(100 / result["seconds"], rel=0.01)

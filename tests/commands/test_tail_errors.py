"""What `headwater tail` says to what it can't use: one sentence with what to do, and never a traceback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.client.offsets import Offsets
from support.cases import case, case_apart
from support.commands import LOGIN, VBUCKETS, TailedBucket, serving_buckets
from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TailedBucket]:
    with serving_buckets(tmp_path_factory, "travel", "other") as node:
        bucket = TailedBucket(node, "travel")
        bucket.fill(50)
        yield bucket


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["tail", "--to", "now", *arguments], env=LOGIN if env is None else env)


def failed(*arguments: str, env: dict[str, str] | None = None) -> str:
    """The one sentence."""
    result = run(*arguments, env=env)
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    [sentence] = result.stderr.splitlines()
    assert sentence.startswith("Error: ")
    return sentence


# --- getting in ---------------------------------------------------------------------------------------------------


def test_who_logs_in_and_where(bucket: TailedBucket) -> None:
    url = bucket.url.replace("//", f"//{USER}@")
    assert run(url, env={"HEADWATER_PASSWORD": PASSWORD}).exit_code == 0
    assert run(bucket.url, "--user", USER, "--password", PASSWORD, env={}).exit_code == 0
    sentence = failed(bucket.url, "--password", "wrong")
    assert sentence.endswith("the user or the password is wrong. Check the user name and the password")
    assert "travel" in failed(bucket.url, env={})
    assert "a password was given without a user" in failed(bucket.url, "--password", "pencil", env={})
    assert "there is no bucket 'nope'" in failed(f"{bucket.node.url}/nope")
    assert "names no bucket. Write couchbase://host/bucket" in failed(bucket.node.url)
    assert "does not start with couchbase://" in failed("localhost")


def test_a_host_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        down = f"127.0.0.1:{listener.getsockname()[1]}"
    assert failed(f"couchbase://{down}/travel").startswith(f"Error: {down} can't be reached: Connection refused. ")


def test_a_server_that_speaks_nonsense() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.recv(1000)
                    sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)

        threading.Thread(target=talk, daemon=True).start()
        sentence = failed(f"couchbase://127.0.0.1:{listener.getsockname()[1]}/travel")
        listener.shutdown(socket.SHUT_RDWR)
    assert "is not a magic byte" in sentence
    assert "Check that the port speaks the Couchbase key-value protocol" in sentence


def test_tls(bucket: TailedBucket, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with NodeProcess(tmp_path / "data", "--vbuckets", "4", *tls).start() as node:
        url = f"{node.url}/default"
        assert url.startswith("couchbases://")
        assert run(url, "--tls-ca", str(certificate)).exit_code == 0
        assert run(url, "--tls-skip-verify").exit_code == 0
        assert "is not trusted" in failed(url)
        assert "uses TLS, and this connection does not" in failed(url.replace("couchbases", "couchbase"))
    assert "does not speak TLS" in failed(bucket.url.replace("couchbase", "couchbases"))
    assert "TLS options were given, but the connection does not use TLS" in failed(bucket.url, "--tls-skip-verify")


# --- what is read -------------------------------------------------------------------------------------------------


@case_apart(("--collection", "shop.orders"), 'scope "shop" is unknown. Use one of these: _default')
@case_apart(("--collection", "_default.orders"), 'collection "_default.orders" is unknown. ')
@case_apart(("--collection", "orders"), 'collection "orders" is unknown. ')
@case_apart(("--scope", "shop"), 'scope "shop" is unknown. ')
@case_apart(("--vbucket", "16"), f"there is no vbucket 16: the bucket has {VBUCKETS}. ")
@case_apart(("--buffer-bytes", "10"), "buffer_bytes is 10. Use 1024 to ")
@case_apart(("--name", ""), "'' is not a valid name for a reader. ")
def test_what_the_bucket_does_not_have(bucket: TailedBucket, options: tuple[str, ...], sentence: str) -> None:
    assert failed(bucket.url, *options).startswith(f"Error: {sentence}")


@case(())
@case(("--to", "yesterday"))
@case(("--format", "xml"))
@case(("--format", "arrow", "--json"))
@case(("--vbucket", "x"))
@case(("--vbucket", "99999"))
@case(("--vbucket", "9-3"))
@case(("--buffer-bytes", "much"))
@case(("--limit", "0"))
@case(("--offsets-file", "/"))
@case(("--tls-ca", "/missing"))
def test_a_command_line_that_is_wrong(options: tuple[str, ...]) -> None:
    arguments = ("couchbase://127.0.0.1:1/travel", *options) if options else ()
    assert run(*arguments).exit_code == 2


# --- places -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(bucket: TailedBucket, tmp_path: Path) -> Path:
    """The end of the bucket."""
    file = tmp_path / "place.json"
    bucket.tail("--offsets-file", str(file))
    return file


def test_a_file_that_is_missing_or_damaged(bucket: TailedBucket, place: Path) -> None:
    assert "'/missing' is no file, and nothing to start from" in failed(bucket.url, "--from", "/missing")
    place.write_text(place.read_text()[:-20])
    assert f"{place}: the offsets can't be used: the text is not JSON" in failed(bucket.url, "--from", str(place))
    assert f"the checkpoint {place} is damaged" in failed(bucket.url, "--checkpoint", str(place))


def test_the_offsets_of_another_bucket(bucket: TailedBucket, place: Path) -> None:
    other = f"{bucket.node.url}/other"
    for option in ("--from", "--checkpoint"):
        sentence = failed(other, option, str(place))
        assert sentence.startswith("Error: the checkpoint belongs to the bucket with uuid ")


def test_offsets_that_are_ahead_of_the_server(bucket: TailedBucket, place: Path) -> None:
    members = json.loads(place.read_text())
    members["offsets"][3][2:] = [10**6, 10**6]
    sentence = failed(bucket.url, "--from", json.dumps(members))
    assert sentence.startswith("Error: the checkpoint is at seqno 1000000 of vbucket 3, and the server's history ends ")
    assert "start from the beginning" in sentence


def test_vbuckets_that_the_bucket_does_not_have(bucket: TailedBucket, place: Path) -> None:
    members = json.loads(place.read_text())
    members["offsets"][-1][0] = 500
    assert "there is no vbucket 500" in failed(bucket.url, "--from", json.dumps(members))


def test_places_that_can_not_be_kept(bucket: TailedBucket) -> None:
    assert "there is no folder /missing" in failed(bucket.url, "--checkpoint", "/missing/place.json")
    assert "can't be written to '/missing/place.json'" in failed(bucket.url, "--offsets-file", "/missing/place.json")


def test_a_checkpoint_that_is_in_use(bucket: TailedBucket, place: Path) -> None:
    with bucket.start("--checkpoint", str(place), "--from", "now", stderr=-1, stdout=-1) as process:
        try:
            bucket.write("news")
            process.stdout.read(1)
            assert "another reader uses the checkpoint" in failed(bucket.url, "--checkpoint", str(place))
        finally:
            process.kill()


def test_a_bad_reply_of_the_server_is_printed_without_its_control_characters(bucket: TailedBucket) -> None:
    sentence = failed(bucket.url, "--collection", "a\x1b[2J.b")
    assert "\x1b" not in sentence


def test_the_place_of_nothing(bucket: TailedBucket, tmp_path: Path) -> None:
    """Where nothing has come there is a place all the same."""
    file = tmp_path / "place.json"
    assert run(f"{bucket.node.url}/other", "--offsets-file", str(file)).exit_code == 0
    assert Offsets.from_json(file.read_text()).bucket_uuid


def test_a_failed_read_is_no_whole_arrow_stream(bucket: TailedBucket) -> None:
    assert failed(bucket.url, "--format", "arrow", "--collection", "no.thing")


def test_a_failed_start_leaves_the_place_as_it_was(bucket: TailedBucket, place: Path) -> None:
    before = place.read_text()
    failed(f"{bucket.node.url}/other", "--from", str(place), "--offsets-file", str(place))
    assert place.read_text() == before
    failed(f"{bucket.node.url}/other", "--from", before, "--offsets-file", f"{place}.new")
    assert not Path(f"{place}.new").exists()

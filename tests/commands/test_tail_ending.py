"""How `headwater tail` ends: by signals, by a reader that leaves, by a node that is gone, by a disk that is full."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pyarrow as pa
import pytest

from headwater.client.offsets import Offsets
from support.commands import END_S_MAX, VBUCKETS, TailedBucket, documents, json_lines, serving_buckets, start_tail
from support.node_process import PASSWORD, USER, NodeProcess

COUNT = 20_000
VALUE_BYTES = 500
"""Far more than a pipe holds."""
BUCKETS = ("many", "few", "live", "idle")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving_buckets(tmp_path_factory, *BUCKETS) as started:
        yield started


@pytest.fixture(scope="module")
def many(node: NodeProcess) -> TailedBucket:
    bucket = TailedBucket(node, "many")
    bucket.fill(COUNT, VALUE_BYTES)
    return bucket


def read_line(stream: IO[bytes] | None) -> bytes:
    return stream.readline()


def stderr_of(process: subprocess.Popen[bytes]) -> list[str]:
    return process.stderr.read().decode().splitlines()


def resumed(command: str, *options: str) -> list[str]:
    """The keys that the printed command gives, up to now."""
    words = shlex.split(command)
    assert words[:2] == ["headwater", "tail"]
    with start_tail(*words[2:], "--to", "now", *options, **PIPES) as process:
        stdout, stderr = process.communicate(timeout=END_S_MAX)
    assert (process.returncode, stderr) == (0, b"")
    return [line["key"] for line in json_lines(stdout)]


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "exit_code", "word"), [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 143, "Ended")]
)
def test_a_signal_in_the_middle(many: TailedBucket, number: signal.Signals, exit_code: int, word: str) -> None:
    with many.start("--json", **PIPES) as process:
        first = read_line(process.stdout)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=END_S_MAX)
    assert process.returncode == exit_code
    keys = [line["key"] for line in json_lines(first + stdout)]
    assert len(keys) < COUNT
    [said, command] = stderr.decode().splitlines()
    assert said == f"{word} after {len(keys):,} changes. To resume from there:"
    assert sorted(keys + resumed(command)) == documents(COUNT), "nothing twice, nothing missing"


def test_a_signal_while_there_is_nothing_to_read(node: NodeProcess, tmp_path: Path) -> None:
    bucket = TailedBucket(node, "few")
    bucket.fill(100)
    file = tmp_path / "place.json"
    with bucket.start("--json", "--offsets-file", str(file), **PIPES) as process:
        for _ in range(100):
            read_line(process.stdout)
        process.send_signal(signal.SIGINT)
        [said, command] = stderr_of(process)
        assert process.wait(END_S_MAX) == 130
    assert said.startswith("Interrupted after 100 changes.")
    assert shlex.split(command)[-2:] == ["--from", str(file)]
    assert Offsets.from_json(file.read_text()).vbuckets == tuple(range(VBUCKETS))
    assert resumed(command) == []


def test_a_signal_before_the_bucket_is_known() -> None:
    """There is a server that takes connections and says nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        start_tail(f"couchbase://127.0.0.1:{listener.getsockname()[1]}/b", **PIPES) as process,
    ):
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=END_S_MAX)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")


def test_a_reader_that_takes_nothing_can_not_hold_it(many: TailedBucket) -> None:
    with many.start("--json", **PIPES) as process:
        taken = read_line(process.stdout)
        process.send_signal(signal.SIGTERM)
        [said, command] = stderr_of(process)
        assert process.wait(END_S_MAX) == 143
        taken += process.stdout.read()
    # The last line is cut, and the rest of what was being written comes again.
    whole = taken[: taken.rindex(b"\n") + 1]
    keys = {line["key"] for line in json_lines(whole)}
    assert keys | set(resumed(command)) == set(documents(COUNT))
    assert said.startswith("Ended after ")


def test_an_arrow_stream_that_is_interrupted_is_whole(many: TailedBucket) -> None:
    with many.start("--format", "arrow", **PIPES) as process:
        start = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=END_S_MAX)
    assert process.returncode == 130
    table = pa.ipc.open_stream(start + stdout).read_all()
    keys = table["key"].to_pylist()
    words = shlex.split(stderr.decode().splitlines()[1])
    words[words.index("--format") + 1] = "jsonl"
    assert sorted(keys + resumed(shlex.join(words))) == documents(COUNT)


def test_from_now_goes_on_from_then(node: NodeProcess) -> None:
    bucket = TailedBucket(node, "idle")
    bucket.fill(50)
    with bucket.start("--json", "--from", "now", "--checkpoint", f"{node.data}.place", **PIPES) as process:
        wait_for_streams(node, "idle")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=END_S_MAX)
    assert (process.returncode, stdout) == (130, b"")
    bucket.write("meanwhile")
    assert resumed(stderr.decode().splitlines()[1]) == ["meanwhile"]


def wait_for_streams(node: NodeProcess, bucket: str) -> None:
    """Until a consumer follows all vbuckets of the bucket, with no end."""
    with httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD)) as http:
        end_s = time.monotonic() + END_S_MAX
        while time.monotonic() < end_s:
            connections = http.get(f"/headwater/buckets/{bucket}/dcp").json()["connections"]
            streams = [stream for connection in connections for stream in connection["streams"] or ()]
            if sum(stream["end_seqno"] is None for stream in streams) == VBUCKETS:
                return
            time.sleep(0.02)
    raise AssertionError("the streams have not come")


# --- readers that leave -------------------------------------------------------------------------------------------


def piped(bucket: TailedBucket, *options: str, into: str) -> bytes:
    """What comes out at the end of the pipe. The command ends well, and says nothing."""
    with bucket.start(*options, **PIPES) as process:
        # The process has the only reading end, so that it is closed when the process ends.
        with subprocess.Popen(into.split(), stdin=process.stdout, stdout=subprocess.PIPE) as reader:
            process.stdout.close()
            printed, _ = reader.communicate(timeout=END_S_MAX)
        assert (process.wait(END_S_MAX), stderr_of(process)) == (0, [])
    return printed


@pytest.mark.parametrize("form", ["jsonl", "pretty", "arrow"])
def test_head(many: TailedBucket, form: str) -> None:
    assert len(piped(many, "--format", form, into="head -c 100")) == 100


def test_head_of_what_comes_seldom(node: NodeProcess) -> None:
    """The one line has come, nothing follows, and still it ends."""
    bucket = TailedBucket(node, "live")
    bucket.write("only")
    assert [line["key"] for line in json_lines(piped(bucket, "--json", into="head -1"))] == ["only"]


def test_a_closed_pipe_keeps_no_place(many: TailedBucket, tmp_path: Path) -> None:
    file = tmp_path / "place.json"
    assert piped(many, "--json", "--offsets-file", str(file), into="head -1")
    assert not file.exists(), "how much was read is not known"


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_full_disk(many: TailedBucket) -> None:
    with open("/dev/full", "wb") as full, many.start("--json", stdout=full, stderr=subprocess.PIPE) as process:
        lines = stderr_of(process)
    assert process.returncode == 1
    assert lines == [
        "Error: standard output can't be written: No space left on device. Check the disk and the space on it"
    ]


def test_a_node_that_is_gone(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "data", "--vbuckets", str(VBUCKETS)).start() as node:
        bucket = TailedBucket(node, "default")
        bucket.fill(10)
        with bucket.start("--json", "--give-up-after-s", "5", **PIPES) as process:
            for _ in range(10):
                read_line(process.stdout)
            node.kill()
            [error, said, command] = stderr_of(process)
    assert process.returncode == 1
    # Not that the connection was closed, which was long ago and is no reason.
    why = r"127\.0\.0\.1:\d+ can't be reached: .*\. Check the address, and that the server is running"
    assert re.fullmatch(rf"Error: vbucket \d+ has been unreachable for 5 seconds: {why}", error)
    assert said == "10 changes came before that. To resume from there:"
    assert Offsets.from_json(shlex.split(command)[-1]).vbuckets == tuple(range(VBUCKETS))

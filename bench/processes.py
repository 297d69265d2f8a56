"""Servers and commands as separate processes, as users run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kv_driver import Login

HEADWATER = [sys.executable, "-m", "headwater"]
LOGIN = Login(user="bench", password="bench-password", bucket="default")
_CREDENTIALS = ["--user", LOGIN.user, "--password", LOGIN.password]


@dataclass(frozen=True, slots=True)
class NodeProcess:
    process: subprocess.Popen[bytes]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def memory_bytes(self) -> int:
        return memory_bytes(self.process.pid)

    def cpu_s(self) -> float:
        """The processor time of the process, in user and system mode."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Return a process's anonymous memory: the system can reclaim mapped pages of data files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


@contextmanager
def data_folder() -> Iterator[Path]:
    """Yield a folder on the project's disk: a temporary folder may be in memory, where nothing is durable."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir="."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def node(folder: Path, *options: str) -> Iterator[NodeProcess]:
    command = [*HEADWATER, "serve", "--data", str(folder), "--port", "0", "--http-port", "0", "--json", *_CREDENTIALS]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield NodeProcess(process, ready["ready"])
    finally:
        process.terminate()
        process.wait()


@contextmanager
def memcached() -> Iterator[int | None]:
    """Yield the free port of a memcached, or None if it is not installed."""
    if shutil.which("memcached") is None:
        yield None
        return
    port = _free_port()
    as_user = ["-u", "nobody"] if os.getuid() == 0 else []
    process = subprocess.Popen(["memcached", *as_user, "-l", "127.0.0.1", "-p", str(port), "-m", "2048", "-t", "4"])
    try:
        _wait_for(port)
        yield port
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class S3Server:
    port: int

    @property
    def options(self) -> dict[str, str]:
        """The options as a user gives them. The server accepts any key."""
        return {
            "aws_endpoint_url": f"http://127.0.0.1:{self.port}",
            "aws_allow_http": "true",
            "aws_access_key_id": LOGIN.user,
            "aws_secret_access_key": LOGIN.password,
            "aws_region": "us-east-1",
        }

    def make_bucket(self, name: str) -> str:
        """Create a bucket. Returns its URI."""
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")).close()
        return f"s3://{name}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run an empty S3 server of moto."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, tries=400)
        yield S3Server(port)
    finally:
        process.kill()
        process.wait()


def load(url: str, *options: str, bucket: str = LOGIN.bucket) -> dict[str, Any]:
    """Run `headwater load` and return its report."""
    command = [*HEADWATER, "load", f"{url}/{bucket}", *options, "--json", *_CREDENTIALS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def collections(url: str, action: str, *arguments: str) -> dict[str, Any]:
    """Run `headwater collections` and return its report."""
    command = [*HEADWATER, "collections", action, f"{url}/{LOGIN.bucket}", *arguments, "--json", *_CREDENTIALS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _wait_for(port: int, *, tries: int = 100) -> None:
    for _ in range(tries):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"no server has started on port {port}")

"""A node whose disk is full tells writers to try later, loses nothing that was answered, and goes on by itself.

The disk is filled by a limit on the size of files, which the kernel enforces like a full disk, and which can be set and
lifted while the node runs. Each bucket has a file of its own. New files and mapped ones need a
disk that is full in earnest: a small file system is mounted for those, and filled.
"""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path

import httpx
import pytest

from headwater.client.cluster_map import vbucket_of
from headwater.errors import KeyNotFound, StatusError
from headwater.protocol.messages.documents import Get, GetResponse, Set
from headwater.protocol.status import Status
from support.node_process import NodeProcess, StartNode

VBUCKETS = 16
VALUE = b"x" * 20_000


def limit_files(node: NodeProcess, size_bytes: int) -> None:
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def data_bytes(node: NodeProcess) -> int:
    return (Path(node.data) / "buckets" / "default" / "data.mdb").stat().st_size


def write(
    node: NodeProcess, keys: Iterable[bytes], *, bucket: str = "default", value: bytes = VALUE
) -> dict[bytes, Status]:
    """Set every key, one after the other, and return how each was answered."""
    statuses = {}
    with node.connect(bucket) as connection:
        for key in keys:
            request = Set(vbucket=vbucket_of(key, VBUCKETS), collection_id=0, key=key, value=value + key)
            try:
                statuses[key] = connection.request(request).status
            except StatusError as error:
                statuses[key] = Status(error.status)
    return statuses


def values(node: NodeProcess, keys: list[bytes]) -> dict[bytes, bytes | None]:
    found = {}
    with node.connect() as connection:
        for key in keys:
            try:
                answer = connection.request(Get(vbucket=vbucket_of(key, VBUCKETS), collection_id=0, key=key))
            except KeyNotFound:
                found[key] = None
            else:
                assert isinstance(answer, GetResponse)
                found[key] = answer.value
    return found


def test_a_full_disk_is_a_temporary_failure_and_loses_nothing(start_node: StartNode) -> None:
    node = start_node("--vbuckets", str(VBUCKETS))
    before = [b"before-%d" % number for number in range(50)]
    assert set(write(node, before).values()) == {Status.SUCCESS}

    limit_files(node, data_bytes(node))
    during = [b"during-%d" % number for number in range(8)]
    answered = write(node, during)
    assert Status.ETMPFAIL in answered.values()
    assert set(answered.values()) <= {Status.SUCCESS, Status.ETMPFAIL}

    limit_files(node, resource.RLIM_INFINITY)
    after = [b"after-%d" % number for number in range(20)]
    assert set(write(node, after).values()) == {Status.SUCCESS}, "the node goes on by itself"

    kept = [*before, *after, *(key for key, status in answered.items() if status == Status.SUCCESS)]
    refused = [key for key, status in answered.items() if status == Status.ETMPFAIL]
    for _ in range(2):
        assert values(node, kept) == {key: VALUE + key for key in kept}
        assert set(values(node, refused).values()) == {None}, "what was refused has not happened"
        node.kill()
        node.start()
    assert "the disk is full" in node.log()


def test_another_bucket_goes_on(start_node: StartNode) -> None:
    node = start_node("--vbuckets", str(VBUCKETS), "--bucket", "default", "--bucket", "other")
    assert set(write(node, [b"k-%d" % number for number in range(100)]).values()) == {Status.SUCCESS}
    limit_files(node, data_bytes(node))
    answered: dict[bytes, Status] = {}
    is_over = threading.Event()
    endless = takewhile(lambda key: not is_over.is_set(), (b"k-%d" % number for number in count()))
    filler = threading.Thread(target=lambda: answered.update(write(node, endless)))
    filler.start()
    try:
        others = write(node, [b"o-%d" % number for number in range(400)], bucket="other", value=b"x")
    finally:
        is_over.set()
        filler.join()
    assert set(others.values()) == {Status.SUCCESS}
    assert Status.ETMPFAIL in answered.values(), "the disk was full meanwhile"


# --- a file system that is full -----------------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB, which only root can mount."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk]
    else:
        with image.open("wb") as file:
            file.truncate(24 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        mount = ["mount", "-o", "loop", image, disk]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"can't mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> Path:
    """Take all that is left of a disk, to the last block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break
        os.fsync(file.fileno())
    return filler


def make_bucket(node: NodeProcess, name: str) -> int:
    form = {"name": name, "ramQuota": "100"}
    auth = (node.user or "", node.password)
    return httpx.post(f"{node.http_url}/pools/default/buckets", data=form, auth=auth, timeout=30).status_code


def test_a_node_lives_and_starts_on_a_full_file_system(start_node: StartNode, small_disk: Path) -> None:
    """LMDB maps its lock file, and a page of it that the disk has no room for is SIGBUS."""
    node = start_node("--vbuckets", str(VBUCKETS), data=small_disk)
    kept = [b"k-%d" % number for number in range(20)]
    assert set(write(node, kept).values()) == {Status.SUCCESS}
    filler = fill(small_disk)
    for is_killed in (True, True, False):
        assert make_bucket(node, "more") == 503
        assert values(node, kept) == {key: VALUE + key for key in kept}, "what is there can be read"
        assert set(write(node, [b"refused"]).values()) == {Status.ETMPFAIL}
        if is_killed:
            node.kill()
            node.start()
    filler.unlink()
    later = [b"later-%d" % number for number in range(20)]
    assert set(write(node, later).values()) == {Status.SUCCESS}, "the node goes on by itself"
    assert make_bucket(node, "more") == 202
    node.kill()
    node.start()
    assert values(node, [*kept, *later, b"refused"]) == {key: VALUE + key for key in (*kept, *later)} | {
        b"refused": None
    }
    assert sorted(path.name for path in (small_disk / "buckets").iterdir()) == ["default", "more"]

"""A node whose disk is full tells writers to try later, loses nothing that was answered, and goes on by itself.

The disk is filled by a limit on the size of files, which the kernel enforces like a full disk, and which can be set and
lifted while the node runs.
"""

from __future__ import annotations

import resource
from pathlib import Path

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


def write(node: NodeProcess, keys: list[bytes]) -> dict[bytes, Status]:
    """Set every key, one after the other, and return how each was answered."""
    statuses = {}
    with node.connect() as connection:
        for key in keys:
            request = Set(vbucket=vbucket_of(key, VBUCKETS), collection_id=0, key=key, value=VALUE + key)
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
    assert "no room is left" in node.log()

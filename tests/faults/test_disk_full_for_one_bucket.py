"""Where the disk is full for one bucket, writes to another are none of its business.

The limit is on the size of a file, and each bucket has one of its own.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path

from headwater.client.cluster_map import vbucket_of
from headwater.errors import StatusError, TemporaryFailure
from headwater.protocol.messages.documents import Set
from support.node_process import NodeProcess, StartNode

VBUCKETS = 16
ROUNDS = 400


def write(node: NodeProcess, bucket: str, *, value: bytes, rounds: int, stop: threading.Event) -> list[StatusError]:
    """Write one document after the other, and return what was refused."""
    refused = []
    with node.connect(bucket) as connection:
        for number in range(rounds):
            if stop.is_set():
                break
            key = b"k-%d" % number
            request = Set(vbucket=vbucket_of(key, VBUCKETS), collection_id=0, key=key, value=value)
            try:
                connection.request(request)
            except StatusError as error:
                refused.append(error)
    return refused


def test_the_other_bucket_goes_on(start_node: StartNode) -> None:
    node = start_node("--vbuckets", str(VBUCKETS), "--bucket", "default", "--bucket", "other")
    running = threading.Event()
    assert write(node, "default", value=b"x" * 20_000, rounds=100, stop=running) == []
    size_bytes = (Path(node.data) / "buckets" / "default" / "data.mdb").stat().st_size
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    refused: list[StatusError] = []
    full = threading.Event()
    filler = threading.Thread(
        target=lambda: refused.extend(write(node, "default", value=b"x" * 20_000, rounds=10**6, stop=full))
    )
    filler.start()
    try:
        assert write(node, "other", value=b"x", rounds=ROUNDS, stop=running) == []
    finally:
        full.set()
        filler.join()
    assert any(isinstance(error, TemporaryFailure) for error in refused), "the disk was full meanwhile"

"""Two nodes and a link between them, without a cluster: a durable write, kill -9 of the active node, set-vbucket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import SyncWriteAmbiguous
from headwater.node.replication.proxy import Proxy
from headwater.protocol.features import Feature
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from headwater.protocol.sasl import Credentials
from support.node_process import PASSWORD, USER, NodeProcess, exchange

VBUCKET = VBucketId(0)
FEATURES = frozenset(
    {
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.JSON,
        Feature.XATTR,
        Feature.COLLECTIONS,
        Feature.ALT_REQUEST,
        Feature.SYNC_REPLICATION,
        Feature.MUTATION_SEQNO,
    }
)
LOGIN = Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=FEATURES)


def set_state(node: NodeProcess, state: VBucketState, *chain: str | None) -> None:
    value = json.dumps({"topology": [chain]}).encode() if chain else b""
    with KvConnection.open(node.address, LOGIN) as connection:
        connection.request(SetVBucket(vbucket=VBUCKET, state=state, value=value))


def write(node: NodeProcess, key: bytes, *, timeout_ms: int = 20_000) -> int:
    """A durable write. Returns the seqno that the answer tells."""
    info = durability(DurabilityLevel.MAJORITY, timeout_ms=timeout_ms)
    request = Set(vbucket=VBUCKET, collection_id=DEFAULT_COLLECTION, key=key, value=b'"kept"', frame_infos=(info,))
    with KvConnection.open(node.address, LOGIN) as connection:
        answer = connection.request(request)
    seqno: int = answer.seqno  # type: ignore[attr-defined]
    return seqno


def read(node: NodeProcess, key: bytes) -> bytes:
    with KvConnection.open(node.address, LOGIN) as connection:
        answer = connection.request(Get(vbucket=VBUCKET, collection_id=DEFAULT_COLLECTION, key=key))
    value: bytes = answer.value  # type: ignore[attr-defined]
    return value


def check_order(node: NodeProcess) -> None:
    """Requests in one write: answers come in order, and who reads what was written before them gets it."""
    info = durability(DurabilityLevel.MAJORITY)
    place = {"vbucket": VBUCKET, "collection_id": DEFAULT_COLLECTION, "key": b"ordered"}
    requests = b""
    for number in range(10):
        requests += Set(**place, value=b"%d" % number, frame_infos=(info,), opaque=2 * number).encode()  # type: ignore[arg-type]
        requests += Get(**place, opaque=2 * number + 1).encode()  # type: ignore[arg-type]
    with KvConnection.open(node.address, LOGIN) as connection:
        answers = exchange(connection, requests, answers=20)
    assert [(answer.opaque, answer.specific) for answer in answers] == [(number, 0) for number in range(20)]
    assert [answer.value for answer in answers[1::2]] == [b"%d" % number for number in range(10)]


def test_what_was_answered_is_there_when_the_replica_is_promoted(tmp_path: Path) -> None:
    active, replica = (NodeProcess(tmp_path / name, "--vbuckets", "4") for name in ("active", "replica"))
    with active.start(), replica.start():
        asyncio.run(_write_and_fail_over(active, replica))


async def _write_and_fail_over(active: NodeProcess, replica: NodeProcess) -> None:
    names = str(active.address), str(replica.address)
    await asyncio.to_thread(set_state, replica, VBucketState.REPLICA)
    await asyncio.to_thread(set_state, active, VBucketState.ACTIVE, *names)
    try:
        await asyncio.to_thread(write, active, b"early", timeout_ms=200)
    except SyncWriteAmbiguous:
        pass
    else:
        raise AssertionError("nobody has acknowledged")
    proxy = await Proxy.open(active.address, replica.address, source_login=LOGIN, target_login=LOGIN, name="link")
    await proxy.add_stream(VBUCKET, StreamFlags(0))
    seqnos = [await asyncio.to_thread(write, active, b"key-%d" % number) for number in range(20)]
    assert seqnos == list(range(4, 44, 2)), "a prepare and a commit each, after one that was aborted"
    await asyncio.to_thread(check_order, active)
    active.kill()
    proxy.close()
    await asyncio.to_thread(set_state, replica, VBucketState.ACTIVE, names[1], None)
    for number in range(20):
        assert await asyncio.to_thread(read, replica, b"key-%d" % number) == b'"kept"'

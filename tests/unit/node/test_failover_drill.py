"""The failover drill inside the node: collections that the copy had not heard of, locks, and refusals."""

from __future__ import annotations

import pytest

from headwater.errors import InvalidInput
from headwater.node.membership import roll_back_vbucket
from headwater.protocol.features import WITH_COLLECTIONS as COLLECTIONS_ON
from headwater.protocol.frames import decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import dcp_streams, decode_message
from headwater.protocol.messages.dcp_changes import Mutation, SystemEvent
from headwater.protocol.messages.documents import Get, GetLocked, Set
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId
from headwater.protocol.status import Status
from support.cases import case_apart
from support.kv_harness import WITH_COLLECTIONS, Client, Node

VBUCKET = VBucketId(2)
DEFAULT = CollectionId(0)


def history(node: Node) -> list[tuple[int, str]]:
    """What is stored of the vbucket: seqnos, and what they are of."""
    found = []
    for run in node.bucket.runs(VBUCKET):
        for frame in decode_frames(run.tobytes()):
            message = decode_message(frame, COLLECTIONS_ON)
            assert isinstance(message, Mutation | SystemEvent)
            found.append((int(message.seqno), message.key.decode()))
    return found


def test_collections_made_since_are_told_again(node: Node) -> None:
    client = node.client(features=WITH_COLLECTIONS)
    client.succeed(Set(vbucket=VBUCKET, collection_id=DEFAULT, key=b"a", value=b"1"))
    manifest = Manifest().with_collection("_default", "early")
    node.set_manifest(manifest)
    client.succeed(Set(vbucket=VBUCKET, collection_id=DEFAULT, key=b"b", value=b"1"))
    node.set_manifest(manifest.with_collection("_default", "late"))
    client.succeed(Set(vbucket=VBUCKET, collection_id=DEFAULT, key=b"c", value=b"1"))
    assert history(node) == [(1, "a"), (2, "early"), (3, "b"), (4, "late"), (5, "c")]
    rolled = roll_back_vbucket(node.bucket_service, VBUCKET, Seqno(2))
    node.commit()
    assert (rolled.to_seqno, rolled.high_seqno_before) == (2, 5)
    assert history(node) == [(1, "a"), (2, "early"), (3, "late")]
    facts = node.bucket.vbuckets.facts[VBUCKET]
    assert (facts.failover_log.newest.vbuuid, facts.failover_log.newest.seqno) == (rolled.vbuuid, 2)


def test_what_was_not_committed_yet_is_counted_and_goes(node: Node, client: Client) -> None:
    client.send(Set(vbucket=VBUCKET, key=b"a", value=b"1"), Set(vbucket=VBUCKET, key=b"b", value=b"1"))
    rolled = roll_back_vbucket(node.bucket_service, VBUCKET, Seqno(1))
    assert rolled.high_seqno_before == 2
    assert len(client.received()) == 2
    assert client.refused(Get(vbucket=VBUCKET, key=b"b")) == Status.KEY_ENOENT


def test_a_manifest_that_was_not_committed_yet_is_kept(node: Node, client: Client) -> None:
    client.succeed(Set(vbucket=VBUCKET, key=b"a", value=b"1"))
    node.bucket_service.set_manifest(Manifest().with_collection("_default", "late"))
    roll_back_vbucket(node.bucket_service, VBUCKET, Seqno(0))
    node.commit()
    assert history(node) == [(1, "late")]


def test_a_consumer_that_could_not_be_told_in_time_is_told_later(node: Node, client: Client) -> None:
    """The vbucket has gone on beyond what the consumer has, but on another branch."""
    for key in (b"a", b"b", b"c"):
        client.succeed(Set(vbucket=VBUCKET, key=key, value=b"1"))
    consumer = node.client()
    consumer.succeed(dcp_streams.Open(key=b"slow"))
    consumer.succeed(dcp_streams.Control(key=b"connection_buffer_size", value=b"100"))
    consumer.succeed(dcp_streams.StreamRequest(vbucket=VBUCKET))
    connection = consumer.session.dcp
    connection.produce(1_000_000)
    assert not connection.window.is_open
    roll_back_vbucket(node.bucket_service, VBUCKET, Seqno(1))
    for key in (b"x", b"y", b"z"):
        client.succeed(Set(vbucket=VBUCKET, key=key, value=b"1"))
    assert connection.produce(1_000_000) == b""
    connection.on_buffer_ack(1_000)
    (frame,) = decode_frames(connection.produce(1_000_000))
    end = decode_message(frame, consumer.negotiated)
    assert isinstance(end, dcp_streams.StreamEnd)
    assert end.reason == dcp_streams.StreamEndReason.ROLLBACK


def test_locks_of_the_vbucket_are_gone(node: Node, client: Client) -> None:
    for vbucket in (VBUCKET, VBucketId(3)):
        client.succeed(Set(vbucket=vbucket, key=b"a", value=b"1"))
        client.succeed(GetLocked(vbucket=vbucket, key=b"a"))
    roll_back_vbucket(node.bucket_service, VBUCKET, Seqno(1))
    client.succeed(Set(vbucket=VBUCKET, key=b"a", value=b"2"))
    assert client.refused(Set(vbucket=VBucketId(3), key=b"a", value=b"2")) == Status.LOCKED


@case_apart(8, 0, "no vbucket 8")
@case_apart(0xFFFF, 0, "no vbucket 65535")
@case_apart(2, 1, "beyond the high seqno 0")
@case_apart(5, 0, "5 is replica")
def test_what_can_not_be_rolled_back(node: Node, vbucket: int, seqno: int, words: str) -> None:
    node.bucket.set_vbucket_state(5, dcp_streams.VBucketState.REPLICA)
    with pytest.raises(InvalidInput, match=words):
        roll_back_vbucket(node.bucket_service, VBucketId(vbucket), Seqno(seqno))

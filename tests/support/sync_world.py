"""Durable writes in a world without sockets: a writer, the topology of its vbucket, and replicas played by hand."""

from __future__ import annotations

import json
from typing import Any

from headwater.protocol.features import Feature
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.base import Response
from headwater.protocol.messages.dcp_changes import SeqnoAcknowledged
from headwater.protocol.messages.dcp_streams import OpenFlags, VBucketState
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId
from headwater.protocol.status import Status
from support.dcp_world import COLLECTIONS, VBUCKET, Consumer, World
from support.kv_harness import Client

ACTIVE, REPLICA, SECOND = "node-a", "node-b", "node-c"
MAJORITY = durability(DurabilityLevel.MAJORITY)
REPLICA_FLAGS = OpenFlags.PRODUCER | OpenFlags.INCLUDE_XATTRS | OpenFlags.INCLUDE_DELETE_TIMES


def set_topology(world: World, *chains: list[str | None], state: VBucketState = VBucketState.ACTIVE) -> None:
    """Tell the vbucket who has copies of it, as the cluster does."""
    value = json.dumps({"topology": chains or None}).encode()
    writer(world).succeed(SetVBucket(vbucket=VBUCKET, state=state, value=value))


def writer(world: World, *features: Feature) -> Client:
    return world.node.client(features=(*COLLECTIONS, *features))


def durable_set(key: str = "k", value: bytes = b"1", *, info: Any = MAJORITY, **fields: Any) -> Set:
    return Set(
        vbucket=VBUCKET, collection_id=DEFAULT_COLLECTION, key=key.encode(), value=value, frame_infos=(info,), **fields
    )


def plain(kind: type[Any], key: str = "k", **fields: Any) -> Any:
    return kind(vbucket=VBUCKET, collection_id=DEFAULT_COLLECTION, key=key.encode(), **fields)


def value_of(world: World, key: str = "k") -> bytes | None:
    """What a reader gets."""
    answer: Any = writer(world).call(plain(Get, key))
    return answer.value if answer.status == Status.SUCCESS else None


def answers(client: Client) -> list[Response]:
    """What a client has got by now. What was decided is made durable first."""
    client.node.commit()
    client.send(b"")
    return client.received()


def statuses(client: Client) -> list[str]:
    return [answer.status.name for answer in answers(client)]


class PlayedReplica:
    """A consumer that takes part in durable writes and acknowledges when a test says so."""

    def __init__(self, world: World, name: str = REPLICA, **controls: str) -> None:
        self.world = world
        given = {"enable_sync_writes": "true", "consumer_name": name, **controls}
        self.consumer: Consumer = world.consumer(flags=REPLICA_FLAGS, features=COLLECTIONS, name=f"to-{name}", **given)

    def open(self, **fields: Any) -> list[str]:
        return self.consumer.stream(**fields)

    def brief(self) -> list[str]:
        """What comes now that everything is durable."""
        self.world.commit()
        return self.consumer.brief()

    def acknowledge(self, seqno: int, vbucket: int = VBUCKET) -> None:
        self.consumer.send(SeqnoAcknowledged(vbucket=VBucketId(vbucket), prepared_seqno=Seqno(seqno)))


def tick(world: World, seconds: float = 0) -> None:
    """Let time pass, and let the node look at it."""
    world.node.clock.advance(seconds)
    world.node.bucket_service.sync_writes.tick(world.node.service.now_s())
    world.commit()

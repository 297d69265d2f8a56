"""What changes between two stream requests of a connection counts for the second, though much of it is kept."""

from __future__ import annotations

from headwater.protocol.messages.dcp_changes import Deletion, Expiration
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamRequestResponse
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRequestValue
from support.dcp_world import COLLECTIONS, World, of_type, stream_request


def test_a_control_counts_for_the_streams_that_are_asked_for_after_it(world: World) -> None:
    for vbucket in (0, 1):
        world.put("a", vbucket=vbucket)
        world.bucket.put_removal(vbucket, collection_id=0, key=b"a", expired=True)
    world.commit()
    consumer = world.consumer(flags=OpenFlags.PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES)
    consumer.open()
    assert len(of_type(consumer.received(), Deletion)) == 1
    consumer.control("enable_expiry_opcode", "true")
    consumer.open(vbucket=1)
    assert len(of_type(consumer.received(), Expiration)) == 1


def test_a_collection_counts_from_its_creation_to_its_drop(world: World) -> None:
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open(vbucket=1)
    created = world.set_manifest(world.bucket.manifest.with_collection("_default", "orders"))
    orders = created.find("_default", "orders")
    assert orders is not None
    value = StreamRequestValue(collections=(orders.id,)).encode()
    assert isinstance(consumer.call(stream_request(value=value)), StreamRequestResponse)
    world.set_manifest(created.without_collection("_default", "orders"))
    assert consumer.refused(stream_request(value=value, vbucket=2)) == Status.UNKNOWN_COLLECTION

"""A copy is promoted: where its new branch begins, which collections it tells, and what clients see of it."""

from __future__ import annotations

from dataclasses import replace

from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import CollectionId, Seqno
from headwater.protocol.values import Datatype
from support.dcp_world import COLLECTIONS, VBUCKET, World, brief
from support.replication_world import WITH_EVERY_VERSION, Link, change_log, documents


def _facts(world: World):
    facts = world.bucket.vbuckets.facts[VBUCKET]
    assert facts is not None
    return facts


def _id(manifest: Manifest, name: str) -> CollectionId:
    collection = manifest.find("_default", name)
    return collection.id


def test_the_branch_begins_at_the_end_of_a_complete_snapshot(world: World, replica: World) -> None:
    world.store("a", "b", "c")
    Link(world, replica).add()
    replica.set_state(VBucketState.ACTIVE)
    assert [entry.seqno for entry in _facts(replica).failover_log.entries] == [3, 0]


def test_the_branch_begins_where_a_snapshot_did_that_has_not_come_to_its_end(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    link.add()
    world.write(*(f"k{number}" for number in range(50)), value=bytes(2000))
    while replica.high_seqno() < 10:
        link.step(5000)
    link.cut()
    replica.set_state(VBucketState.ACTIVE)
    assert [entry.seqno for entry in _facts(replica).failover_log.entries] == [2, 0]
    assert replica.high_seqno() >= 10, "what it has it keeps"


def test_after_a_promotion_clients_stream_what_the_copy_holds_and_what_is_written(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    link.add()
    link.cut()
    old_vbuuid = world.vbuuid()
    replica.set_state(VBucketState.ACTIVE)
    replica.write("new")
    client = replica.consumer()
    assert client.stream() == ["marker 0..3", "set a@1", "set b@2", "set new@3"]
    resumed = replica.consumer()
    resumed.open(start_seqno=Seqno(2), vbuuid=old_vbuuid)
    assert resumed.brief() == ["marker 2..3", "set new@3"]


def test_the_old_source_becomes_a_copy_of_the_new_one(world: World, replica: World) -> None:
    """It rolls back what it had alone."""
    world.store("a", "b")
    link = Link(world, replica)
    link.add()
    link.cut()
    world.write("lost", "b")
    replica.set_state(VBucketState.ACTIVE)
    replica.write("new")
    world.set_state(VBucketState.REPLICA)
    Link(replica, world).add()
    assert change_log(world.bucket) == change_log(replica.bucket)
    assert [key for _, key in documents(world.bucket)] == [b"a", b"b", b"new"]
    assert _facts(world).failover_log == _facts(replica).failover_log


# --- collections --------------------------------------------------------------------------------------------------


def test_a_promoted_copy_tells_of_collections_that_came_and_went_meanwhile(world: World, replica: World) -> None:
    manifest = world.set_manifest(Manifest().with_collection("_default", "c"))
    world.write("in c", collection=_id(manifest, "c"))
    link = Link(world, replica)
    link.add()
    link.cut()
    replica.set_manifest(manifest.without_collection("_default", "c").with_collection("_default", "d"))
    assert replica.high_seqno() == 2, "a copy is told by its stream alone"
    replica.set_state(VBucketState.ACTIVE)
    assert replica.bucket.vbucket_manifest(0) == replica.bucket.manifest
    lines = replica.consumer(features=COLLECTIONS).stream()
    assert sorted(line for line in lines if line.startswith("event")) == [
        "event COLLECTION_CREATED@1", "event COLLECTION_CREATED@4", "event COLLECTION_DROPPED@3"
    ]  # fmt: skip


@WITH_EVERY_VERSION
def test_a_promoted_copy_that_has_heard_of_everything_tells_nothing(world: World, replica: World) -> None:
    world.set_manifest(Manifest().with_scope("s").with_collection("s", "c", history=True))
    link = Link(world, replica)
    link.add()
    high = replica.high_seqno()
    replica.set_state(VBucketState.ACTIVE)
    assert replica.high_seqno() == high
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_a_copy_knows_more_than_its_bucket(world: World, replica: World) -> None:
    """Its stream has told it of a collection before the cluster has told the node."""
    manifest = world.set_manifest(Manifest().with_collection("_default", "c"))
    world.write("in c", collection=_id(manifest, "c"))
    link = Link(world, replica)
    link.add()
    assert replica.bucket.manifest == manifest
    replica.settle()
    replica.compact()
    assert (_id(manifest, "c"), b"in c") in documents(replica.bucket), "compaction takes it for dropped"


def test_a_bucket_that_is_behind_takes_the_manifest_of_a_promoted_copy(world: World, replica: World) -> None:
    manifest = world.set_manifest(Manifest().with_collection("_default", "c"))
    Link(world, replica).add()
    replica.bucket.manifest = Manifest()
    replica.set_state(VBucketState.ACTIVE)
    assert replica.bucket.manifest == manifest
    assert replica.high_seqno() == world.high_seqno()


def test_the_manifest_of_a_vbucket_is_what_its_events_add_up_to(world: World) -> None:
    manifest = Manifest()
    for number in range(6):
        manifest = manifest.with_scope(f"s{number}").with_collection(f"s{number}", "c", max_ttl_s=number or None)
        world.set_manifest(manifest)
    for change in (
        lambda m: m.without_scope("s1"),
        lambda m: m.without_collection("s2", "c"),
        lambda m: m.without_collection("_default", "_default"),
        lambda m: m.with_collection("s2", "d", history=True),
    ):
        manifest = world.set_manifest(change(manifest))
        assert world.bucket.vbucket_manifest(0) == manifest
    world.settle()
    world.node.reopen()
    assert world.bucket.vbucket_manifest(0) == manifest
    assert world.bucket.vbuckets.manifest_uids[0] == manifest.uid


def test_events_that_are_not_durable_yet_count(world: World) -> None:
    manifest = Manifest().with_collection("_default", "c")
    world.bucket.set_manifest(manifest)
    assert world.bucket.vbucket_manifest(0) == manifest
    commit = world.bucket.seal()
    assert commit is not None
    assert world.bucket.vbucket_manifest(0) == manifest
    world.bucket.persist(commit)
    world.bucket.publish(commit)
    assert world.bucket.vbucket_manifest(0) == manifest


def test_a_collection_with_history_is_told_as_such(world: World) -> None:
    world.set_manifest(Manifest().with_collection("_default", "c", history=True))
    modern = world.consumer(features=COLLECTIONS, flatbuffers_system_events="true")
    modern.open()
    (_, event) = modern.received()
    assert event.version == 2
    old = world.consumer(features=COLLECTIONS)
    old.open()
    (_, event) = old.received()
    assert event.version == 0
    assert brief([event]) == ["event COLLECTION_CREATED@1"]


def test_a_promoted_copy_goes_on_from_the_highest_cas_and_revision(world: World, replica: World) -> None:
    world.node.clock.advance(1000)
    world.write("a", "a", "b")
    world.remove("b")
    world.commit()
    Link(world, replica).add()
    replica.set_state(VBucketState.ACTIVE)
    written = [
        replica.bucket.put_mutation(0, collection_id=CollectionId(0), key=key, value=b"1", datatype=Datatype.JSON)
        for key in (b"a", b"b", b"c")
    ]
    assert written[0].cas > world.bucket.vbuckets.max_cas[0]
    entries = [replica.bucket.find(0, CollectionId(0), key) for key in (b"a", b"b", b"c")]
    assert [entry.rev_seqno for entry in entries if entry] == [3, 3, 3]


def test_demotion_makes_what_was_written_complete(world: World) -> None:
    world.bucket.set_vbucket_facts(
        0, replace(_facts(world), snapshot_start_seqno=Seqno(1), snapshot_end_seqno=Seqno(90))
    )
    world.write("a", "b")
    world.set_state(VBucketState.REPLICA)
    assert (_facts(world).snapshot_start_seqno, _facts(world).snapshot_end_seqno) == (2, 2)

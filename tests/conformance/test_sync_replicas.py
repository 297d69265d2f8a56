"""Durable writes over two nodes: a copy that acknowledges, and what it knows when it has to take over."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from headwater.protocol.frames import DurabilityLevel, decode_frames, durability
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import dcp_changes
from headwater.protocol.messages.base import Message, Request, Response
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.store.settling import roll_back
from support.cases import case_apart
from support.dcp_world import KEEP_NOTHING, VBUCKET, World, brief, of_type
from support.kv_harness import Client
from support.replication_world import (
    ACTIVE,
    REPLICA,
    Link,
    answers,
    change_log,
    documents,
    durable_set,
    plain,
    set_topology,
    statuses,
    tick,
    value_of,
    writer,
)

NAMED = json.dumps({"consumer_name": REPLICA}).encode()
SHORT = durability(DurabilityLevel.MAJORITY, timeout_ms=1000)


def link(world: World, replica: World) -> Link:
    return Link(world, replica, value=NAMED)


@pytest.fixture
def linked(world: World, replica: World) -> Link:
    """Two nodes, one with a copy of the other's vbucket."""
    set_topology(world, [ACTIVE, REPLICA])
    made = link(world, replica)
    made.add()
    return made


def promote(world: World) -> None:
    set_topology(world, [REPLICA, None])


def undecided(world: World) -> list[tuple[bytes, int]]:
    return [(prepare.key, prepare.seqno) for prepare in world.bucket.prepares.of(VBUCKET)]


# --- writes that go well ------------------------------------------------------------------------------------------


def test_a_write_is_acknowledged_and_committed_on_both(linked: Link) -> None:
    client = writer(linked.source)
    client.send(durable_set())
    linked.run()
    assert statuses(client) == ["SUCCESS"]
    linked.run()
    assert [line for line in brief(linked.passed) if "@" in line] == ["prepare k@1", "commit k@2 of 1"]
    assert change_log(linked.target.bucket) == change_log(linked.source.bucket)
    assert documents(linked.target.bucket) == documents(linked.source.bucket) != {}
    assert undecided(linked.target) == []


def test_a_removal_is_the_same_on_both_whatever_their_clocks_say(linked: Link) -> None:
    linked.source.write("k")
    linked.target.node.clock.advance(1000)
    client = writer(linked.source)
    client.send(plain(Delete, frame_infos=(SHORT,)))
    linked.run()
    linked.source.node.clock.advance(0.1)
    assert statuses(client) == ["SUCCESS"]
    linked.run()
    assert change_log(linked.target.bucket) == change_log(linked.source.bucket)


def test_an_abort_ends_the_prepare_on_the_copy(world: World, replica: World) -> None:
    set_topology(world, [ACTIVE, "elsewhere"])
    made = link(world, replica)
    made.add()
    client = writer(world)
    client.send(durable_set(info=SHORT))
    made.run()
    assert undecided(replica) == [(b"k", 1)]
    tick(world, 2)
    made.run()
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert undecided(replica) == []
    # An abort has no CAS on its way, so that a copy gives it one: for its age, which decides when it is purged.
    ours, theirs = ([replace(f, cas=0) for f in decode_frames(change_log(of.bucket))] for of in (replica, world))
    assert ours == theirs


def test_nothing_is_acknowledged_before_it_is_durable(linked: Link) -> None:
    writer(linked.source).send(durable_set())
    linked.source.commit()
    linked.step()
    assert linked.target.high_seqno() == 1
    assert of_type(linked.receiver.received(), dcp_changes.SeqnoAcknowledged) == []
    linked.target.commit()
    (acknowledged,) = of_type(linked.receiver.received(), dcp_changes.SeqnoAcknowledged)
    assert (acknowledged.vbucket, acknowledged.prepared_seqno) == (VBUCKET, 1)


def _marker(
    start: int, end: int, flags: dcp_changes.SnapshotFlags = dcp_changes.SnapshotFlags.MEMORY
) -> dcp_changes.SnapshotMarker:
    return dcp_changes.SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(end), flags=flags)


def _prepare(seqno: int) -> dcp_changes.Prepare:
    return dcp_changes.Prepare(seqno=Seqno(seqno), rev_seqno=1, durability=DurabilityLevel.MAJORITY,
                   collection_id=DEFAULT_COLLECTION, key=b"k", value=b"1")  # fmt: skip


def _change(seqno: int) -> dcp_changes.Mutation:
    return dcp_changes.Mutation(seqno=Seqno(seqno), rev_seqno=1, collection_id=DEFAULT_COLLECTION, key=b"x", value=b"1")


def _answered(linked: Link, *messages: Request) -> list[Message]:
    """The producer sends these on the stream. Returns what the copy sends once they are durable."""
    opaque = next(iter(linked.receiver.connection.streams.values())).opaque
    linked.receiver.send(*(replace(message, opaque=opaque) for message in messages))
    linked.target.commit()
    return linked.receiver.received()


def _received(linked: Link, *messages: Request) -> list[int]:
    """The same, and what the copy acknowledges."""
    return [message.prepared_seqno for message in of_type(_answered(linked, *messages), dcp_changes.SeqnoAcknowledged)]


def test_nothing_is_acknowledged_before_the_snapshot_is_complete(linked: Link) -> None:
    assert _received(linked, _marker(0, 2), _prepare(1)) == []
    assert _received(linked, _change(2)) == [1]


_KEY = {"prepared_seqno": Seqno(1), "collection_id": DEFAULT_COLLECTION, "key": b"k"}


@case_apart(dcp_changes.Commit(commit_seqno=Seqno(2), **_KEY), [Status.EINVAL], id="a commit without its prepare")
@case_apart(dcp_changes.Abort(abort_seqno=Seqno(2), **_KEY), [], id="an abort has nothing to do")
@case_apart(_prepare(3), [Status.ERANGE], id="a prepare outside its snapshot")
def test_what_does_not_fit_ends_the_stream(linked: Link, message: Request, statuses_: list[Status]) -> None:
    answered = _answered(linked, _marker(0, 2), message)
    assert [answer.status for answer in answered if isinstance(answer, Response)] == statuses_
    assert bool(linked.receiver.connection.streams) == (not statuses_)
    assert linked.target.high_seqno() == (0 if statuses_ else 2)
    assert undecided(linked.target) == []


def test_what_was_rolled_back_again_is_not_acknowledged(linked: Link) -> None:
    writer(linked.source).send(durable_set())
    linked.source.commit()
    linked.step()
    linked.target.commit()
    roll_back(linked.target.bucket, VBUCKET, Seqno(0))
    assert of_type(linked.receiver.received(), dcp_changes.SeqnoAcknowledged) == []


def test_nothing_is_acknowledged_twice_on_a_stream(linked: Link) -> None:
    """Also not where the copy is emptied and copied again: a 7.0.5 server closes the connection on that."""
    assert _received(linked, _marker(0, 4), _prepare(4)) == [4]
    for end in (3, 4):
        assert _received(linked, dcp_changes.DcpFlush()) == []
        assert _received(linked, _marker(0, end), _prepare(end)) == []
        assert linked.target.high_seqno() == end
    assert _received(linked, _marker(5, 6), _prepare(6)) == [6]


@pytest.mark.parametrize(("prepares", "acknowledged"), [((4,), 4), ((), 4)], ids=["pending", "completed"])
def test_a_disk_snapshot_is_acknowledged_by_its_high_prepared_seqno(
    linked: Link, prepares: tuple[int, ...], acknowledged: int
) -> None:
    """As recorded from an 8.0.2 consumer. Without one, as recorded from 7.0.5, it is the end of the snapshot."""
    marker = dcp_changes.SnapshotMarker(
        start_seqno=Seqno(0), end_seqno=Seqno(10),
        flags=dcp_changes.SnapshotFlags.DISK | dcp_changes.SnapshotFlags.CHECKPOINT,
        max_visible_seqno=Seqno(10), high_completed_seqno=Seqno(3), purge_seqno=Seqno(2), high_prepared_seqno=Seqno(4),
    )  # fmt: skip
    assert _received(linked, marker, *map(_prepare, prepares), _change(10)) == [acknowledged]
    facts = linked.target.bucket.vbuckets.facts[VBUCKET]
    assert facts.purge_seqno == 2


def test_the_end_of_a_snapshot_comes_though_its_collection_is_dropped(linked: Link) -> None:
    """A real replica takes no seqno-advanced."""
    manifest = linked.source.set_manifest(Manifest().with_collection("_default", "c"))
    collection = manifest.find("_default", "c")
    linked.run()
    linked.source.write("late", collection=collection.id)
    linked.source.bucket.set_manifest(manifest.without_collection("_default", "c"))
    while linked.step():
        pass
    assert linked.target.high_seqno() == 2
    linked.run()
    assert linked.target.high_seqno() == 3


# --- failures -----------------------------------------------------------------------------------------------------


def test_an_acknowledged_write_survives_the_loss_of_the_active_node(linked: Link) -> None:
    client = writer(linked.source)
    client.send(durable_set(value=b"precious"))
    linked.source.commit()
    linked.step()
    linked.target.commit()
    linked.step()
    assert statuses(client) == ["SUCCESS"]
    linked.cut()
    assert undecided(linked.target) == [(b"k", 1)], "the copy has not heard of the commit"
    promote(linked.target)
    assert value_of(linked.target) == b"precious"
    assert undecided(linked.target) == []


def test_a_takeover_completes_what_is_undecided(world: World, replica: World) -> None:
    set_topology(world, [ACTIVE, "elsewhere"])
    client = writer(world)
    client.send(durable_set())
    world.commit()
    replica.set_state(VBucketState.PENDING)
    made = link(world, replica)
    made.add_stream(VBUCKET, StreamFlags.TAKEOVER)
    made.run()
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert world.bucket.vbuckets.state(VBUCKET) == VBucketState.DEAD
    assert replica.bucket.vbuckets.state(VBUCKET) == VBucketState.ACTIVE
    assert value_of(replica) == b"1"


def test_after_a_restart_of_the_active_node_its_copy_acknowledges_again(linked: Link) -> None:
    client = writer(linked.source)
    set_topology(linked.source, [ACTIVE, "elsewhere"])
    client.send(durable_set())
    linked.run()
    linked.cut()
    linked.source.node.reopen(in_order=False)
    set_topology(linked.source, [ACTIVE, REPLICA])
    assert undecided(linked.source) == undecided(linked.target) == [(b"k", 1)]
    again = link(linked.source, linked.target)
    again.add()
    again.run()
    assert value_of(linked.source) == b"1"
    assert undecided(linked.source) == undecided(linked.target) == []


def test_a_copy_that_restarts_still_has_its_prepares(linked: Link) -> None:
    set_topology(linked.source, [ACTIVE, "elsewhere"])
    writer(linked.source).send(durable_set())
    linked.run()
    linked.target.node.reopen(in_order=False)
    assert undecided(linked.target) == [(b"k", 1)]
    promote(linked.target)
    assert value_of(linked.target) == b"1"


def test_a_prepare_that_the_new_active_node_never_got_is_rolled_back(linked: Link) -> None:
    linked.source.write("x")
    linked.run()
    linked.cut()
    writer(linked.source).send(durable_set())
    linked.source.commit()
    promote(linked.target)
    linked.target.write("y")
    set_topology(linked.source, state=VBucketState.REPLICA)
    back = Link(linked.target, linked.source, value=json.dumps({"consumer_name": ACTIVE}).encode())
    back.add()
    assert undecided(linked.source) == []
    assert documents(linked.source.bucket) == documents(linked.target.bucket)


def test_a_change_ends_the_prepare_where_compaction_has_dropped_that(linked: Link) -> None:
    set_topology(linked.source, [ACTIVE, "elsewhere"])
    writer(linked.source).send(durable_set())
    linked.run()
    linked.cut()
    set_topology(linked.source, [ACTIVE])
    tick(linked.source)
    linked.source.write("x")
    linked.source.compact(KEEP_NOTHING)
    again = link(linked.source, linked.target)
    again.add()
    assert of_type(again.passed, dcp_changes.Commit) == []
    assert undecided(linked.target) == []
    linked.target.node.reopen()
    assert undecided(linked.target) == []
    assert documents(linked.source.bucket) == documents(linked.target.bucket)


# --- any history --------------------------------------------------------------------------------------------------


@dataclass
class Promises:
    """What a writer was told, by key: what has to be found later."""

    clients: dict[bytes, Client] = field(default_factory=dict)
    asked: dict[bytes, bytes | None] = field(default_factory=dict)
    known: dict[bytes, set[bytes | None]] = field(default_factory=dict)
    """Key → the values that it may have. One where the last write was answered with success."""

    def hear(self) -> None:
        for key, client in list(self.clients.items()):
            for answer in answers(client):
                value = self.asked[key]
                if answer.status == Status.SUCCESS:
                    self.known[key] = {value}
                else:
                    self.known[key] = {*self.known.get(key, {None}), value}
                del self.clients[key]


def _write(world: World, dice: random.Random, promises: Promises, key: bytes) -> None:
    """A durable write of a key that has none under way. Plain ones promise nothing, so they have keys of their own."""
    if key in promises.clients:
        return
    client = writer(world)
    value = str(dice.randrange(10**6)).encode()
    exists = world.bucket.find(VBUCKET, DEFAULT_COLLECTION, key)
    if exists is not None and not exists.is_deleted and dice.random() < 0.2:
        promises.asked[key] = None
        client.send(plain(Delete, key.decode(), frame_infos=(SHORT,)))
    else:
        promises.asked[key] = value
        client.send(durable_set(key.decode(), value, info=SHORT))
    promises.clients[key] = client


@pytest.mark.parametrize("replica", ["8.0.2", "7.0.5"], indirect=True)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_whatever_happens_what_was_promised_is_there_after_a_failover(world: World, replica: World, seed: int) -> None:
    dice, promises = random.Random(seed), Promises()
    set_topology(world, [ACTIVE, REPLICA])
    made = link(world, replica)
    made.add()
    for _ in range(150):
        action = dice.random()
        if action < 0.35:
            _write(world, dice, promises, dice.choice([b"a", b"b", b"c"]))
        elif action < 0.5:
            writer(world).send(Set(vbucket=VBucketId(VBUCKET), collection_id=DEFAULT_COLLECTION,
                                   key=dice.choice([b"x", b"y"]), value=b"0"))  # fmt: skip
        elif action < 0.8:
            dice.choice([made.step, partial(made.step, 1), world.commit, replica.commit])()
        elif action < 0.85:
            tick(world, dice.random())
        elif action < 0.9:
            world.compact(KEEP_NOTHING)
        elif action < 0.93:
            replica.settle()
        elif action < 0.97:
            made.cut()
            made = link(world, replica)
            made.add_stream()
        else:
            replica.compact(KEEP_NOTHING)
        promises.hear()
    made.cut()
    replica.commit()
    promote(replica)
    replica.commit()
    for key, values in promises.known.items():
        under_way = {promises.asked[key]} if key in promises.clients else set()
        assert value_of(replica, key.decode()) in values | under_way, key
    set_topology(world, state=VBucketState.REPLICA)
    back = Link(replica, world, value=json.dumps({"consumer_name": ACTIVE}).encode())
    back.add()
    back.run()
    assert documents(world.bucket) == documents(replica.bucket)
    assert undecided(world) == undecided(replica) == []

"""Durable writes as their writers see them: prepared, acknowledged by replicas played by hand, committed, answered."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import StoreError
from headwater.node.kv import answers as kv_answers
from headwater.node.kv import session
from headwater.node.options import BucketSettings
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import DurabilityLevel, FrameInfo, RequestInfo, durability
from headwater.protocol.messages import documents
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.messages.session import Flush, Noop
from headwater.protocol.messages.subdocument import SubdocDictUpsert
from headwater.protocol.messages.vbuckets import DeleteVBucket, SetVBucket
from headwater.protocol.numbers import Seqno
from headwater.protocol.status import Status
from support.cases import case_apart
from support.dcp_world import NO_XERROR, VBUCKET, World, stream_request
from support.replication_world import (
    ACTIVE,
    MAJORITY,
    REPLICA,
    SECOND,
    PlayedReplica,
    answers,
    durable_set,
    plain,
    set_topology,
    statuses,
    tick,
    value_of,
    writer,
)


@pytest.fixture
def chained(world: World) -> World:
    """The vbucket has one replica."""
    set_topology(world, [ACTIVE, REPLICA])
    return world


# --- the way of a write -------------------------------------------------------------------------------------------


def test_a_write_is_answered_when_a_majority_has_acknowledged_it(chained: World) -> None:
    """And when the commit is durable."""
    replica, client = PlayedReplica(chained), writer(chained)
    assert replica.open() == []
    client.send(durable_set())
    assert replica.brief() == ["marker 0..1", "prepare k@1"]
    assert answers(client) == []
    assert value_of(chained) is None
    replica.acknowledge(1)
    assert client.received() == []
    (answer,) = answers(client)
    cas = int(chained.bucket.vbuckets.max_cas[VBUCKET])
    assert (answer.status, answer.cas, answer.seqno) == (Status.SUCCESS, cas, 2)
    assert value_of(chained) == b"1"
    assert replica.brief() == ["marker 2..2", "commit k@2 of 1"]


def test_the_bytes_of_an_answer_are_those_of_any_write(chained: World) -> None:
    """Status 0, the CAS of the prepare, and a mutation token with the seqno of the commit."""
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set(opaque=0xDECAF))
    replica.brief()
    replica.acknowledge(1)
    chained.commit()
    answer = client.session.data_to_send()
    prepared = chained.bucket.find(VBUCKET, 0, b"k")
    assert answer == (
        bytes.fromhex("81 01 0000 10 00 0000 00000010 000decaf")
        + prepared.cas.to_bytes(8)
        + chained.vbuuid().to_bytes(8)
        + (2).to_bytes(8)
    )


@case_apart(plain(documents.Append, value=b"2", frame_infos=(MAJORITY,)), b"12")
@case_apart(plain(documents.Increment, delta=1, initial=0, expiry=0, frame_infos=(MAJORITY,)), b"2")
@case_apart(plain(documents.Touch, expiry=10**6, frame_infos=(MAJORITY,)), b"1")
@case_apart(plain(documents.GetAndTouch, expiry=10**6, frame_infos=(MAJORITY,)), b"1")
@case_apart(plain(documents.Replace, value=b"2", frame_infos=(MAJORITY,)), b"2")
@case_apart(plain(documents.Delete, frame_infos=(MAJORITY,)), None)
@case_apart(plain(SubdocDictUpsert, path=b"a", new_value=b"5", frame_infos=(MAJORITY,)), b'{"a":5}')
def test_every_kind_of_write_can_be_durable(chained: World, request_: Request, value: bytes | None) -> None:
    before = b"{}" if isinstance(request_, SubdocDictUpsert) else b"1"
    chained.write("k", value=before)
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(request_)
    assert replica.brief() == ["marker 2..2", "prepare k@2"]
    assert answers(client) == []
    assert value_of(chained) == before
    replica.acknowledge(2)
    assert statuses(client) == ["SUCCESS"]
    assert replica.brief() == ["marker 3..3", "commit k@3 of 2"]
    assert value_of(chained) == value


@pytest.mark.parametrize("level", [level for level in DurabilityLevel if level.is_known])
def test_all_levels_wait_for_a_majority(chained: World, level: DurabilityLevel) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set(info=durability(level)))
    assert replica.brief() == ["marker 0..1", "prepare k@1"]
    assert answers(client) == []
    replica.acknowledge(1)
    assert statuses(client) == ["SUCCESS"]


def test_without_copies_one_durable_copy_is_enough(world: World) -> None:
    set_topology(world, [ACTIVE])
    assert writer(world).call(durable_set()).status == Status.SUCCESS
    assert world.high_seqno() == 1, "there is no prepare"


def test_a_quiet_write_is_silent_when_it_succeeds_and_not_when_it_fails(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    for key in ("a", "b"):
        client.send(
            plain(
                documents.SetQuiet, key, value=b"1", frame_infos=(durability(DurabilityLevel.MAJORITY, timeout_ms=100),)
            )
        )
    replica.brief()
    replica.acknowledge(1)
    tick(chained, 1)
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert value_of(chained, "a") == b"1"


def test_checks_come_before_the_prepare(chained: World) -> None:
    chained.write("k")
    client = writer(chained)
    assert client.refused(durable_set(cas=12345)) == Status.KEY_EEXISTS
    assert client.refused(plain(documents.Add, value=b"1", frame_infos=(MAJORITY,))) == Status.KEY_EEXISTS
    assert client.refused(plain(documents.Replace, "none", value=b"1", frame_infos=(MAJORITY,))) == Status.KEY_ENOENT
    assert chained.high_seqno() == 1


def test_a_lock_is_gone_with_the_prepare_of_its_holder(chained: World) -> None:
    chained.write("k")
    client = writer(chained)
    locked = client.succeed(plain(documents.GetLocked))
    client.send(durable_set(cas=locked.cas, info=durability(DurabilityLevel.MAJORITY, timeout_ms=100)))
    tick(chained, 1)
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert client.call(plain(documents.Set, value=b"2")).status == Status.SUCCESS


# --- majorities ---------------------------------------------------------------------------------------------------


def test_a_bucket_in_no_cluster_that_is_to_have_replicas(world: World) -> None:
    """Couchbase refuses, and so do buckets that are made over REST; those of `headwater serve` need one copy."""
    service = world.node.bucket_service
    assert writer(world).call(durable_set()).status == Status.SUCCESS
    service.settings = BucketSettings(replicas=1, durable_alone=False)
    assert writer(world).refused(durable_set()) == Status.DURABILITY_IMPOSSIBLE
    assert writer(world).call(plain(documents.Set, value=b"2")).status == Status.SUCCESS
    service.settings = BucketSettings(replicas=0, durable_alone=False)
    assert writer(world).call(durable_set()).status == Status.SUCCESS


def test_every_write_has_the_least_level_of_its_bucket(chained: World) -> None:
    """Sets included, which a kernel takes otherwise."""
    chained.node.bucket_service.settings = BucketSettings(durability_min_level=DurabilityLevel.PERSIST_TO_MAJORITY)
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(plain(documents.Set, value=b"1"))
    assert replica.brief() == ["marker 0..1", "prepare k@1"]
    assert answers(client) == []
    replica.acknowledge(1)
    assert statuses(client) == ["SUCCESS"]


def test_too_few_nodes_for_a_majority(world: World) -> None:
    set_topology(world, [ACTIVE, None, None])
    assert writer(world).refused(durable_set()) == Status.DURABILITY_IMPOSSIBLE
    assert world.high_seqno() == 0


def test_a_client_without_extended_errors_is_closed_on_instead(world: World) -> None:
    set_topology(world, [ACTIVE, None])
    consumer = world.connection(NO_XERROR)
    request = durable_set()
    consumer.send(documents.Set(vbucket=VBUCKET, key=b"k", value=b"1", frame_infos=request.frame_infos))
    assert consumer.is_closed


def test_an_outcome_that_a_client_without_extended_errors_could_not_read_ends_its_connection(chained: World) -> None:
    consumer = chained.connection(NO_XERROR)
    info = durability(DurabilityLevel.MAJORITY, timeout_ms=100)
    consumer.send(documents.Set(vbucket=VBUCKET, key=b"k", value=b"1", frame_infos=(info,)))
    tick(chained, 1)
    (answer,) = consumer.session.outgoing
    assert answer.may_be_sent
    assert answer.ends_connection


def test_two_of_three_copies_are_a_majority(world: World) -> None:
    set_topology(world, [ACTIVE, REPLICA, SECOND])
    first, second, client = PlayedReplica(world), PlayedReplica(world, SECOND), writer(world)
    first.open(), second.open()
    client.send(durable_set())
    world.commit()
    second.acknowledge(1)
    assert statuses(client) == ["SUCCESS"]


def test_during_a_rebalance_both_chains_need_a_majority(world: World) -> None:
    set_topology(world, [ACTIVE, REPLICA], [ACTIVE, SECOND])
    first, second, client = PlayedReplica(world), PlayedReplica(world, SECOND), writer(world)
    first.open(), second.open()
    client.send(durable_set())
    world.commit()
    first.acknowledge(1)
    assert answers(client) == []
    second.acknowledge(1)
    assert statuses(client) == ["SUCCESS"]


def test_strangers_do_not_count(chained: World) -> None:
    stranger, client = PlayedReplica(chained, "stranger"), writer(chained)
    stranger.open()
    client.send(durable_set())
    stranger.brief()
    stranger.acknowledge(1)
    assert answers(client) == []


def test_an_acknowledgement_of_what_is_not_durable_here_does_not_count(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set())
    replica.acknowledge(1)
    assert chained.high_seqno() == 1
    chained.commit()
    tick(chained)
    assert statuses(client) == ["SUCCESS"], "it counts once it is"


def test_a_replica_that_has_lost_what_it_acknowledged_is_not_believed(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set("a"), durable_set("b"))
    replica.brief()
    set_topology(chained, [ACTIVE, SECOND])
    replica.acknowledge(2)
    replica.consumer.close_stream()
    replica.open()
    set_topology(chained, [ACTIVE, REPLICA])
    assert answers(client) == []
    replica.acknowledge(1)
    assert statuses(client) == ["SUCCESS"]


def test_another_topology_is_looked_at_at_once(chained: World) -> None:
    client = writer(chained)
    client.send(durable_set())
    chained.commit()
    assert answers(client) == []
    set_topology(chained, [ACTIVE])
    assert statuses(client) == ["SUCCESS"]


def test_sync_writes_have_to_be_enabled_to_acknowledge(chained: World) -> None:
    chained.speak_as("7.0")  # 8.0 does not switch them off.
    replica = PlayedReplica(chained, enable_sync_writes="false")
    replica.open()
    replica.acknowledge(1)
    assert [message.status for message in replica.consumer.received()] == [Status.EINVAL]


def test_an_acknowledgement_for_a_vbucket_that_was_never_streamed_closes_the_connection(chained: World) -> None:
    """As recorded from a 7.0.5 server. One for a stream that has ended meanwhile does nothing."""
    replica = PlayedReplica(chained)
    replica.open()
    replica.consumer.close_stream()
    replica.acknowledge(1)
    assert replica.brief() == []
    replica.acknowledge(1, vbucket=1)
    assert replica.consumer.is_closed


def test_an_acknowledgement_of_what_was_never_written_closes_the_connection(chained: World) -> None:
    """As recorded from an 8.0.2 server. Where the stream has ended meanwhile, it does nothing, now or later."""
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    replica.consumer.close_stream()
    replica.acknowledge(99)
    assert replica.open() == []
    client.send(durable_set())
    replica.brief()
    assert answers(client) == []
    replica.acknowledge(2)
    assert replica.consumer.is_closed


def test_a_reader_can_not_acknowledge(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set())
    replica.brief()
    replica.consumer.session.user = "reader"
    replica.acknowledge(1)
    assert [message.status for message in replica.consumer.received()] == [Status.EACCESS]
    assert answers(client) == []


# --- while it is undecided ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
@case_apart(plain(documents.Set, value=b"2"))
@case_apart(durable_set(value=b"2"))
@case_apart(plain(documents.Add, value=b"2"))
@case_apart(plain(documents.Replace, value=b"2"))
@case_apart(plain(documents.Delete))
@case_apart(plain(documents.Append, value=b"2"))
@case_apart(plain(documents.Increment, delta=1, initial=0, expiry=0))
@case_apart(plain(documents.Touch, expiry=100))
@case_apart(plain(documents.GetAndTouch, expiry=100))
@case_apart(plain(documents.GetLocked))
@case_apart(plain(SubdocDictUpsert, path=b"a", new_value=b"5"))
def test_other_writers_are_told_that_a_write_is_in_progress(chained: World, exists: bool, request_: Request) -> None:
    if exists:
        chained.write("k")
    writer(chained).send(durable_set())
    chained.commit()
    high_seqno = chained.high_seqno()
    assert writer(chained).refused(request_) == Status.SYNC_WRITE_IN_PROGRESS
    assert chained.high_seqno() == high_seqno


def test_readers_get_the_committed_version(chained: World) -> None:
    chained.write("k", value=b"old")
    writer(chained).send(durable_set(value=b"new"))
    chained.commit()
    assert value_of(chained) == b"old"
    assert writer(chained).succeed(plain(documents.GetMeta)).rev_seqno == 1


def test_other_documents_are_written_at_full_speed_elsewhere_and_rightly_here(chained: World) -> None:
    writer(chained).send(durable_set())
    sets = [documents.Set(vbucket=vbucket, collection_id=0, key=key, value=b"2", opaque=at)
            for at, (vbucket, key) in enumerate([(0, b"x"), (0, b"k"), (1, b"k"), (0, b"y")])]  # fmt: skip
    got = [answer.status.name for answer in writer(chained).call_all(*sets)]
    assert got == ["SUCCESS", "SYNC_WRITE_IN_PROGRESS", "SUCCESS", "SUCCESS"]


def test_a_document_does_not_expire_under_a_durable_write(chained: World) -> None:
    chained.write("k", expiry=chained.node.clock.now_s() + 10)
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set(value=b"new"))
    chained.commit()
    chained.node.clock.advance(20)
    assert value_of(chained) is None
    assert chained.high_seqno() == 2, "no expiration was written"
    replica.acknowledge(2)
    assert statuses(client) == ["SUCCESS"]
    assert value_of(chained) == b"new"


# --- time ---------------------------------------------------------------------------------------------------------


def test_a_write_whose_time_is_over_is_aborted_and_ambiguous(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set(info=durability(DurabilityLevel.MAJORITY, timeout_ms=1500)))
    assert replica.brief() == ["marker 0..1", "prepare k@1"]
    tick(chained, 1.4)
    assert answers(client) == []
    tick(chained, 0.2)
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert replica.brief() == ["marker 2..2", "abort k@2 of 1"]
    assert value_of(chained) is None
    assert client.call(plain(documents.Set, value=b"2")).status == Status.SUCCESS


@pytest.mark.parametrize("info", [MAJORITY, durability(DurabilityLevel.MAJORITY, timeout_ms=0)])
def test_without_a_time_a_write_has_half_a_minute(chained: World, info: FrameInfo) -> None:
    client = writer(chained)
    client.send(durable_set(info=info))
    tick(chained, 29)
    assert answers(client) == []
    tick(chained, 2)
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]


def test_a_write_goes_on_without_its_writer(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set())
    client.session.disconnected()
    replica.brief()
    replica.acknowledge(1)
    assert value_of(chained) == b"1"


# --- the order of answers -----------------------------------------------------------------------------------------


def test_answers_stay_in_order(chained: World) -> None:
    chained.write("other")
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set(opaque=1), plain(documents.Get, "other", opaque=2), Noop(opaque=3))
    assert answers(client) == []
    replica.acknowledge(2)
    assert [answer.opaque for answer in answers(client)] == [1, 2, 3]


def test_a_request_about_the_same_document_waits_for_the_outcome(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set(value=b"1", opaque=1), plain(documents.Get, opaque=2), durable_set(value=b"3", opaque=3))
    chained.commit()
    assert client.session.waits_for is session.Waits.FOR_OUTCOME
    replica.acknowledge(1)
    first, read = answers(client)
    assert (first.opaque, read.opaque, read.value) == (1, 2, b"1")
    chained.commit()
    replica.acknowledge(3)
    assert [answer.opaque for answer in answers(client)] == [3]
    assert value_of(chained) == b"3"


def test_with_unordered_execution_others_overtake(chained: World) -> None:
    chained.write("other")
    replica, client = PlayedReplica(chained), writer(chained, Feature.UNORDERED_EXECUTION)
    replica.open()
    client.send(durable_set(opaque=1), plain(documents.Get, "other", opaque=2), Noop(opaque=3))
    assert [answer.opaque for answer in answers(client)] == [2, 3]
    replica.acknowledge(2)
    assert [answer.opaque for answer in answers(client)] == [1]


def test_a_barrier_waits_for_all_before_it(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained, Feature.UNORDERED_EXECUTION)
    replica.open()
    barrier = FrameInfo(RequestInfo.BARRIER)
    client.send(durable_set(opaque=1), plain(documents.Get, "other", opaque=2, frame_infos=(barrier,)))
    assert answers(client) == []
    replica.acknowledge(1)
    assert sorted(answer.opaque for answer in answers(client)) == [1, 2]


def test_a_connection_has_so_many_durable_writes_at_a_time(chained: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_answers, "DEFERRED_MAX", 2)
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(*(durable_set(key, opaque=at) for at, key in enumerate("abc")))
    chained.commit()
    assert chained.high_seqno() == 2
    assert client.session.waits_for is session.Waits.FOR_OUTCOME
    replica.acknowledge(2)
    assert [answer.opaque for answer in answers(client)] == [0, 1]
    chained.commit()
    replica.acknowledge(5)
    assert [answer.opaque for answer in answers(client)] == [2]


# --- the vbucket's fate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [VBucketState.REPLICA, VBucketState.DEAD, VBucketState.PENDING])
def test_when_the_vbucket_is_not_active_any_more_the_outcome_is_ambiguous(chained: World, state: VBucketState) -> None:
    client = writer(chained)
    client.send(durable_set())
    chained.commit()
    writer(chained).succeed(SetVBucket(vbucket=VBUCKET, state=state))
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert [found.key for found in chained.bucket.prepares.of(VBUCKET)] == [b"k"], "it is decided elsewhere"


@pytest.mark.parametrize("request_", [Flush(), DeleteVBucket(vbucket=VBUCKET)], ids=lambda r: type(r).__name__)
def test_what_is_taken_away_with_the_vbucket_is_ambiguous(chained: World, request_: Request) -> None:
    client = writer(chained)
    client.send(durable_set())
    chained.commit()
    writer(chained).succeed(request_)
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]


def test_a_takeover_leaves_the_prepare_to_the_new_node(chained: World) -> None:
    client, replica = writer(chained), PlayedReplica(chained)
    client.send(durable_set())
    chained.commit()
    replica.consumer.open(flags=StreamFlags.TAKEOVER)
    *_, state = replica.consumer.received()
    replica.consumer.answer(state, Opcode.DCP_SET_VBUCKET_STATE)
    assert statuses(client) == ["SYNC_WRITE_AMBIGUOUS"]
    assert replica.brief() == ["state ACTIVE"]
    assert chained.high_seqno() == 1, "neither committed nor aborted here"


def test_after_a_restart_prepares_wait_for_acknowledgements_again(chained: World) -> None:
    writer(chained).send(durable_set())
    chained.commit()
    chained.node.reopen(in_order=False)
    assert writer(chained).refused(plain(documents.Set, value=b"2")) == Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS
    tick(chained, 3600)
    assert value_of(chained) is None, "they have no time that could be over"
    replica = PlayedReplica(chained)
    assert replica.open() == ["marker 0..1", "prepare k@1"]
    replica.acknowledge(1)
    assert value_of(chained) == b"1"
    assert replica.brief() == ["marker 2..2", "commit k@2 of 1"]


@pytest.mark.parametrize("restarts", [True, False])
def test_without_other_copies_prepares_are_committed(chained: World, restarts: bool) -> None:
    """After a restart, and at once in a copy that is promoted, even if no other copy is left."""
    writer(chained).send(durable_set())
    chained.commit()
    if restarts:
        chained.node.reopen()
        set_topology(chained, [ACTIVE])
        tick(chained)
    else:
        set_topology(chained, state=VBucketState.REPLICA)
        set_topology(chained, [REPLICA, None])
    assert value_of(chained) == b"1"


# --- failing disks ------------------------------------------------------------------------------------------------


def _fail_next_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(changes: Any) -> None:
        raise StoreError("no room")

    from headwater.store.settling import abandon

    with monkeypatch.context() as patched:
        patched.setattr(world.bucket.engine, "write", fail)
        with pytest.raises(StoreError):
            world.commit()
    abandon(world.bucket)
    world.node.bucket_service.sync_writes.on_void()


def test_a_prepare_that_could_not_be_stored_has_not_happened(chained: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = writer(chained)
    client.send(durable_set())
    _fail_next_commit(chained, monkeypatch)
    assert statuses(client) == ["ETMPFAIL"]
    assert client.call(plain(documents.Set, value=b"2")).status == Status.SUCCESS


def test_a_commit_that_could_not_be_stored_is_made_again(chained: World, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    replica.open()
    client.send(durable_set())
    replica.brief()
    replica.acknowledge(1)
    _fail_next_commit(chained, monkeypatch)
    assert client.received() == []
    assert statuses(client) == ["SUCCESS"]
    assert value_of(chained) == b"1"


def test_a_stream_from_behind_the_prepare_is_told_of_the_commit(chained: World) -> None:
    replica, client = PlayedReplica(chained), writer(chained)
    client.send(durable_set())
    chained.commit()
    start = stream_request(start_seqno=Seqno(1), vbuuid=chained.vbuuid())
    replica.consumer.succeed(start)
    replica.acknowledge(1)
    assert replica.brief() == ["marker 1..2", "commit k@2 of 1"]

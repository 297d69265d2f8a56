"""The UPR draft's session: its packets around DCP's producer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from headwater.errors import FrameTooLarge, LengthMismatch, UnexpectedMessage
from headwater.node.membership import roll_back_vbucket
from headwater.node.service import BucketService
from headwater.node.upr_session import UprSession
from headwater.protocol import upr
from headwater.protocol.frames import DurabilityLevel, decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, SEQNO_MAX, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype, ValueParts, encode_xattrs
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import create_bucket
from headwater.store.settling import flush

VBUCKET = VBucketId(3)
START, END, OK = upr.UprSnapshotStart, upr.UprSnapshotEnd, upr.UprStreamEndReason.OK
CHANGED = upr.UprStreamEndReason.STATE_CHANGED


@dataclass
class World:
    """A bucket, and one UPR connection to it."""

    bucket: Bucket
    service: BucketService
    session: UprSession

    def put(self, key: bytes, value: bytes = b"1", *, collection: CollectionId = DEFAULT_COLLECTION) -> None:
        self.bucket.put_mutation(VBUCKET, collection_id=collection, key=key, value=value, datatype=Datatype.RAW)
        self.bucket.commit_now()

    def remove(self, key: bytes, *, expired: bool = False) -> None:
        self.bucket.put_removal(VBUCKET, collection_id=DEFAULT_COLLECTION, key=key, expired=expired)
        self.bucket.commit_now()

    def packets(self) -> list[upr.UprPacket]:
        """All that the session sends now."""
        data = self.session.data_to_send()
        while produced := self.session.produce(64):
            data += produced
        return [upr.decode_packet(frame) for frame in decode_frames(data)]

    def ask(self, packet: upr.UprPacket) -> list[upr.UprPacket]:
        self.session.receive_data(packet.encode())
        return self.packets()

    def stream(
        self, start: int = 0, end: int = SEQNO_MAX, *, branch: tuple[int, int] = (0, 0), vbucket: int = VBUCKET
    ) -> list[upr.UprPacket]:
        return self.ask(
            upr.UprStreamRequest(
                vbucket=VBucketId(vbucket),
                request_id=45,
                start_by_seqno=Seqno(start),
                end_by_seqno=Seqno(end),
                vbucket_uuid=Vbuuid(branch[0]),
                high_seqno=Seqno(branch[1]),
                group_id=b"replication_3",
            )
        )

    @property
    def branch(self) -> tuple[int, int]:
        facts = self.bucket.vbuckets.facts[VBUCKET]
        return facts.failover_log.newest.vbuuid, facts.failover_log.newest.seqno


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    vbuuids = count(1001)
    environment = StoreEnvironment(now_ns=lambda: 1_700_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(next(vbuuids)))
    facts = BucketFacts(name="default", uuid="ab", vbuckets=8)
    bucket = create_bucket(LmdbEngine(tmp_path / "data"), facts, environment=environment, secret=(1, 2))
    for vbucket in range(7):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    bucket.commit_now()
    service = BucketService(bucket=bucket)
    yield World(bucket, service, UprSession(service, name="upr:test", now_s=0.0))
    bucket.engine.close()


def kinds(packets: list[upr.UprPacket]) -> list[type[upr.UprPacket]]:
    return [type(packet) for packet in packets]


# --- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_from_its_beginning_to_its_end(world: World) -> None:
    world.put(b"a", b"one")
    world.put(b"b", b"two")
    world.remove(b"a")
    world.put(b"c")
    world.remove(b"c", expired=True)
    packets = world.stream(end=5)
    # A snapshot holds a key once, so that the first versions of a and c are not in it.
    changes = [upr.UprMutation, upr.UprDeletion, upr.UprExpiration]
    assert kinds(packets) == [upr.UprStreamOk, upr.UprStreamBegin, START, *changes, END, upr.UprStreamEnd]
    assert all((packet.vbucket, packet.request_id) == (VBUCKET, 45) for packet in packets)
    mutation, deletion, expiration = packets[3:6]
    assert isinstance(deletion, upr.UprDeletion)
    assert isinstance(expiration, upr.UprExpiration)
    assert (mutation.by_seqno, mutation.rev_seqno, mutation.key, mutation.value) == (2, 1, b"b", b"two")
    assert (deletion.by_seqno, deletion.rev_seqno, deletion.key) == (3, 2, b"a")
    # Revisions go on from the highest one of a deleted document.
    assert (expiration.by_seqno, expiration.rev_seqno, expiration.key) == (5, 4, b"c")
    assert all(packet.cas for packet in packets[3:6])
    assert packets[-1] == upr.UprStreamEnd(vbucket=VBUCKET, request_id=45, reason=OK)


def test_a_durable_write_is_seen_as_what_it_became(world: World) -> None:
    committed, aborted = (
        world.bucket.put_prepare(VBUCKET, collection_id=DEFAULT_COLLECTION, key=key, value=b"1", datatype=Datatype.RAW,
            level=DurabilityLevel.MAJORITY,
        )
        for key in (b"a", b"b")
    )  # fmt: skip
    world.bucket.commit_prepare(committed)
    world.bucket.abort_prepare(aborted)
    world.put(b"c")
    packets = world.stream(end=5)
    changes = [packet for packet in packets if isinstance(packet, upr.UprMutation)]
    assert [(change.by_seqno, change.key, change.request_id) for change in changes] == [(3, b"a", 45), (5, b"c", 45)]
    assert kinds(packets)[-2:] == [END, upr.UprStreamEnd]


def test_an_open_stream_goes_on_with_a_snapshot_for_each_commit(world: World) -> None:
    assert kinds(world.stream()) == [upr.UprStreamOk, upr.UprStreamBegin]
    world.put(b"a")
    assert kinds(world.packets()) == [START, upr.UprMutation, END]
    world.put(b"a")
    assert kinds(world.packets()) == [START, upr.UprMutation, END]
    assert world.packets() == []


def test_any_split_of_the_request_gives_the_same_answer(world: World) -> None:
    world.put(b"a")
    data = upr.UprStreamRequest(vbucket=VBUCKET, request_id=7, end_by_seqno=Seqno(1), group_id=b"g").encode()
    for at in range(len(data)):
        assert world.packets() == []
        world.session.receive_data(data[at : at + 1])
    assert kinds(world.packets()) == [
        upr.UprStreamOk, upr.UprStreamBegin, START, upr.UprMutation, END, upr.UprStreamEnd,
    ]  # fmt: skip


def test_other_collections_and_extended_attributes_are_left_out(world: World) -> None:
    manifest = Manifest().with_collection("_default", "other")
    (other,) = [collection.id for _, collection in manifest.collections() if collection.name == "other"]
    world.bucket.set_manifest(manifest)
    value = encode_xattrs(ValueParts({"_sync": b"{}"}, b"body"))
    world.bucket.put_mutation(
        VBUCKET, collection_id=DEFAULT_COLLECTION, key=b"a", value=value, datatype=Datatype.XATTR, flags=9, expiry=8
    )
    world.put(b"elsewhere", collection=other)
    packets = world.stream()
    assert kinds(packets) == [upr.UprStreamOk, upr.UprStreamBegin, START, upr.UprMutation, END]
    mutation = packets[3]
    assert (mutation.key, mutation.value, mutation.item_flags, mutation.item_exp) == (b"a", b"body", 9, 8)


# --- where to go on ------------------------------------------------------------------------------------------------


def test_a_consumer_that_knows_the_branch_goes_on(world: World) -> None:
    for key in (b"a", b"b", b"c"):
        world.put(key)
    packets = world.stream(2, 3, branch=world.branch)
    assert kinds(packets) == [upr.UprStreamOk, upr.UprStreamBegin, START, upr.UprMutation, END, upr.UprStreamEnd]


@pytest.mark.parametrize("known", [True, False])
def test_a_branch_is_a_vbuuid_and_where_it_began(world: World, known: bool) -> None:
    world.put(b"a")
    vbuuid, began = world.branch
    packets = world.stream(1, branch=(vbuuid, began if known else began + 1))
    expected: list[type[upr.UprPacket]] = [upr.UprStreamOk, upr.UprStreamBegin] if known else [upr.UprRollback]
    assert kinds(packets) == expected


def test_an_unknown_branch_rolls_back_to_the_start(world: World) -> None:
    world.put(b"a")
    assert world.stream(1, branch=(77, 0)) == [upr.UprRollback(vbucket=VBUCKET, request_id=45, rollback_seqno=Seqno(0))]
    assert kinds(world.stream(0, 1, branch=(77, 0)))[0] is upr.UprStreamOk


def test_a_consumer_that_is_ahead_rolls_back_to_where_the_histories_part(world: World) -> None:
    for key in (b"a", b"b", b"c"):
        world.put(key)
    branch = world.branch
    roll_back_vbucket(world.service, VBUCKET, Seqno(2))
    assert world.stream(3, branch=branch) == [upr.UprRollback(vbucket=VBUCKET, request_id=45, rollback_seqno=Seqno(2))]
    assert kinds(world.stream(2, branch=branch))[0] is upr.UprStreamOk


def test_the_failover_log(world: World) -> None:
    world.put(b"a")
    before = world.branch
    roll_back_vbucket(world.service, VBUCKET, Seqno(1))
    (answer,) = world.ask(upr.UprFailoverLogRequest(vbucket=VBUCKET, request_id=9))
    assert [(entry.vbuuid, entry.seqno) for entry in answer.failover_log] == [world.branch, before]
    assert answer.request_id == 9


@pytest.mark.parametrize("vbucket", [7, 8, 0xFFFF])
def test_a_vbucket_that_is_not_here(world: World, vbucket: int) -> None:
    expected = [upr.UprNotMyVBucket(vbucket=VBucketId(vbucket), request_id=45)]
    assert world.stream(vbucket=vbucket) == expected
    assert world.ask(upr.UprFailoverLogRequest(vbucket=VBucketId(vbucket), request_id=45)) == expected


# --- ends ----------------------------------------------------------------------------------------------------------


def test_a_state_change_ends_a_stream(world: World) -> None:
    world.stream()
    world.bucket.set_vbucket_state(VBUCKET, VBucketState.DEAD)
    world.bucket.commit_now()
    assert world.packets() == [upr.UprStreamEnd(vbucket=VBUCKET, request_id=45, reason=CHANGED)]
    assert not world.session.has_streams


def test_a_rollback_ends_a_stream_as_a_state_change(world: World) -> None:
    world.put(b"a")
    world.put(b"b")
    world.stream()
    roll_back_vbucket(world.service, VBUCKET, Seqno(1))
    assert world.packets() == [upr.UprStreamEnd(vbucket=VBUCKET, request_id=45, reason=CHANGED)]


def test_a_flush_is_told_before_the_stream_ends(world: World) -> None:
    world.put(b"a")
    world.stream()
    flush(world.bucket)
    assert kinds(world.packets()) == [upr.UprFlush, upr.UprStreamEnd]


def test_a_connection_that_is_gone_is_forgotten(world: World) -> None:
    world.stream()
    assert world.service.producer_connections() == [world.session.producer]
    world.session.disconnected()
    assert world.service.producer_connections() == []


# --- what has no answer --------------------------------------------------------------------------------------------


def test_requests_that_the_draft_can_not_refuse_end_the_connection(world: World) -> None:
    with pytest.raises(UnexpectedMessage, match="start seqno exceeds"):
        world.stream(5, 4)
    world.stream()
    with pytest.raises(UnexpectedMessage, match="already open"):
        world.stream()


def test_what_only_producers_send_ends_the_connection(world: World) -> None:
    with pytest.raises(UnexpectedMessage, match="StreamOk"):
        world.ask(upr.UprStreamOk())


def test_lengths_that_are_not_those_of_the_layout(world: World) -> None:
    drawn = bytearray(upr.UprStreamRequest(vbucket=VBUCKET, group_id=b"replication_12").encode())
    drawn[4] = 0x28  # as the draft prints it, 8 too long
    with pytest.raises(LengthMismatch):
        world.session.receive_data(bytes(drawn))


def test_a_long_body_is_refused_on_its_header(world: World) -> None:
    with pytest.raises(FrameTooLarge):
        world.session.receive_data(bytes.fromhex("8001000000010000 00100000 00000000 0000000000000000"))

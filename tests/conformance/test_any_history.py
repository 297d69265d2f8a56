"""Whatever happens to a vbucket, consumers at any pace end with what the store holds. A seed replays a failure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from headwater.protocol.manifest import CollectionDropped, Manifest, decode_event
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import (
    Deletion,
    Expiration,
    Mutation,
    SeqnoAdvanced,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.messages.dcp_streams import StreamEnd, StreamEndReason, StreamRequestResponse
from headwater.protocol.numbers import CollectionId, Seqno
from headwater.protocol.status import Status
from headwater.store.settling import roll_back
from support.dcp_world import COLLECTIONS, KEEP_NOTHING, PLAIN, PURGE_ALL, VBUCKET, Consumer, World

STEPS = 300
KEYS = 25
FRUIT = 8
ENDS = frozenset({StreamEndReason.TOO_SLOW, StreamEndReason.ROLLBACK, StreamEndReason.STATE_CHANGED})


@dataclass
class Follower:
    """A consumer that does what the seeds ask of one: it keeps its place, rolls back, and asks again."""

    consumer: Consumer
    value: bytes = b""
    state: dict[tuple[int, bytes], int] = field(default_factory=dict)
    history: list[tuple[int, tuple[int, bytes], int | None]] = field(default_factory=list)
    vbuuid: int = 0
    seqno: int = 0
    snapshot: tuple[int, int] = (0, 0)
    seen: set[tuple[int, bytes]] = field(default_factory=set)
    """The keys of the snapshot."""
    complete: list[int] = field(default_factory=lambda: [0])
    """Where snapshots were complete. Inside them versions are missing, so it can only go back to one of these."""

    def open(self) -> None:
        start, end = self.snapshot if self.seqno < self.snapshot[1] else (self.seqno, self.seqno)
        answer = self.consumer.request(
            start_seqno=Seqno(self.seqno),
            vbuuid=self.vbuuid,
            snapshot_start_seqno=min(start, self.seqno),
            snapshot_end_seqno=end,
            value=self.value,
        )
        assert isinstance(answer, StreamRequestResponse), answer
        if answer.status == Status.ROLLBACK:
            assert answer.rollback_seqno is not None
            self._roll_back(answer.rollback_seqno)
            self.open()
        else:
            self.vbuuid = answer.failover_log[0].vbuuid

    def _roll_back(self, to_seqno: int) -> None:
        self.complete = [seqno for seqno in self.complete if seqno <= to_seqno]
        to_seqno = self.complete[-1]
        self.history = [change for change in self.history if change[0] <= to_seqno]
        self.seqno, self.snapshot = to_seqno, (to_seqno, to_seqno)
        self.state = {}
        for _, key, seqno in self.history:
            self._apply(key, seqno)

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, SnapshotMarker):
                assert self.seqno == self.snapshot[1] or self.seqno >= message.start_seqno
                self.snapshot, self.seen = (message.start_seqno, message.end_seqno), set()
            elif isinstance(message, StreamEnd):
                assert message.reason in ENDS, message
                self.open()
            else:
                self._take_change(message)

    def _take_change(self, message: Message) -> None:
        assert isinstance(message, Mutation | Deletion | Expiration | SystemEvent | SeqnoAdvanced), message
        assert self.seqno < message.seqno <= self.snapshot[1]
        self.seqno = message.seqno
        if isinstance(message, SystemEvent):
            event = decode_event(message)
            if isinstance(event, CollectionDropped):
                for key in [key for key in self.state if key[0] == event.collection_id]:
                    self._change(key, None)
        elif not isinstance(message, SeqnoAdvanced):
            key = (message.collection_id or 0, message.key)
            assert key not in self.seen, "a key comes once in a snapshot"
            self.seen.add(key)
            self._change(key, message.seqno if isinstance(message, Mutation) else None)
        if self.seqno == self.snapshot[1]:
            self.complete.append(self.seqno)

    def _change(self, key: tuple[int, bytes], seqno: int | None) -> None:
        self.history.append((self.seqno, key, seqno))
        self._apply(key, seqno)

    def _apply(self, key: tuple[int, bytes], seqno: int | None) -> None:
        if seqno is None:
            self.state.pop(key, None)
        else:
            self.state[key] = seqno


def _stored(world: World, collections: set[int]) -> dict[tuple[int, bytes], int]:
    stored = {}
    for collection in collections & {pair[1].id for pair in world.bucket.manifest.collections()}:
        for number in range(KEYS):
            key = f"k{number}".encode()
            entry = world.bucket.find(VBUCKET, CollectionId(collection), key)
            if entry is not None and not entry.is_deleted:
                stored[collection, key] = int(entry.seqno)
    return stored


def _happen(world: World, dice: random.Random) -> None:
    """One thing that may happen to a vbucket."""
    key = f"k{dice.randrange(KEYS)}"
    living = [0, *({FRUIT} & {pair[1].id for pair in world.bucket.manifest.collections()})]
    what = dice.choices(
        ["put", "remove", "commit", "settle", "compact", "purge", "roll back", "drop"],
        weights=[50, 15, 15, 8, 3, 1, 0.7, 0.3],
    )[0]
    if what == "put":
        world.put(key, collection=dice.choice(living))
    elif what == "remove":
        world.remove(key, expired=dice.random() < 0.3, collection=dice.choice(living))
    elif what == "settle":
        world.settle()
    elif what in ("compact", "purge"):
        world.compact(KEEP_NOTHING if what == "compact" else PURGE_ALL)
    elif what == "roll back":
        world.commit()
        roll_back(world.bucket, VBUCKET, Seqno(dice.randint(0, world.high_seqno())), branch=True)
    elif what == "drop" and FRUIT in living:
        world.set_manifest(world.bucket.manifest.without_collection("_default", "fruit"))
    world.commit()
    world.node.clock.advance(dice.random())


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 12))])
def test_any_history_leads_to_what_is_stored(world: World, seed: int) -> None:
    dice = random.Random(seed)
    world.set_manifest(Manifest().with_collection("_default", "fruit"))
    followers = [
        (Follower(world.consumer(features=PLAIN)), {0}),
        (Follower(world.consumer(features=COLLECTIONS)), {0, FRUIT}),
        (Follower(world.consumer(features=COLLECTIONS), value=b'{"collections":["0"]}'), {0}),
        (Follower(world.consumer(features=PLAIN, connection_buffer_size="0")), {0}),
    ]
    for follower, _ in followers:
        follower.open()
    for _ in range(STEPS):
        _happen(world, dice)
        for follower, _ in followers:
            if dice.random() < 0.4:
                follower.take(follower.consumer.step(bytes_max=dice.choice([1, 60, 200, 5000])))
    for follower, collections in followers:
        for _ in range(3):
            follower.take(follower.consumer.received())
        assert follower.state == _stored(world, collections)

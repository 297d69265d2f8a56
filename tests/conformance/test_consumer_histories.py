"""Any history: whatever happens to two nodes and to the link between them, after quiet the copy is the active one's.

Everything comes from a seed: writes of all kinds, collections that come and go, cut links, crashes, rollbacks of the
active vbucket, and failovers after which the nodes have changed their roles.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.node.membership import roll_back_vbucket
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.protocol.values import Datatype, ValueParts, encode_xattrs
from support.dcp_world import KEEP_NOTHING, VBUCKET, World
from support.replication_world import Link, change_log, documents, make_replica

KEYS = 12
STEPS = 120
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 40))]


class History:
    """Two nodes and a link, under a random hand."""

    def __init__(self, folder: Path, seed: int, *, compacts: bool) -> None:
        self.random = random.Random(seed)
        self.active, self.copy = World(folder / "one"), World(folder / "two")
        make_replica(self.copy)
        self.link = Link(self.active, self.copy)
        self.links = 1
        self.manifest = Manifest()
        self.happenings: list[tuple[int, Callable[[], None]]] = [
            (30, self.write),
            (8, self.remove),
            (2, self.change_collections),
            (12, lambda: self.active.commit()),
            (12, lambda: self.copy.commit()),
            (30, self.pass_on),
            (3, self.cut),
            (2, self.crash_copy),
            (2, self.crash_active),
            (2, self.roll_back),
            (2, self.fail_over),
            (3, lambda: self.active.settle()),
            (3, lambda: self.copy.settle()),
            (3 if compacts else 0, lambda: self.random.choice((self.active, self.copy)).compact(KEEP_NOTHING)),
        ]

    def close(self) -> None:
        self.active.close()
        self.copy.close()

    def run(self) -> None:
        weights = [weight for weight, _ in self.happenings]
        for _ in range(STEPS):
            self.random.choices(self.happenings, weights)[0][1]()
            self._join()

    def come_to_rest(self) -> None:
        for _ in range(5):
            self.active.commit()
            self._join()
            self.link.run()
            if self.copy.high_seqno() == self.active.high_seqno() and self.link.receiver.connection.streams:
                return
        raise AssertionError("the copy does not catch up")

    # --- what may happen ------------------------------------------------------------------------------------------

    def _key(self) -> str:
        return f"key{self.random.randrange(KEYS)}"

    def _collection(self) -> int:
        return self.random.choice([collection.id for _, collection in self.active.bucket.manifest.collections()])

    def _value(self) -> tuple[bytes, Datatype]:
        return self.random.choice([
            (b'{"n":%d}' % self.random.randrange(1000), Datatype.JSON),
            (self.random.randbytes(self.random.randrange(200)), Datatype.RAW),
            (self._with_xattrs(b"{}"), Datatype.XATTR | Datatype.JSON),
            (self._with_xattrs(self.random.randbytes(9)), Datatype.XATTR),
        ])  # fmt: skip

    def _with_xattrs(self, body: bytes) -> bytes:
        return encode_xattrs(ValueParts(xattrs={"_sys": b"1", "user": b'"%d"' % self.random.randrange(99)}, body=body))

    def write(self) -> None:
        self.active.node.clock.advance(0.001)
        for _ in range(self.random.randrange(1, 6)):
            value, datatype = self._value()
            expiry = self.random.choice((0, 2_000_000_000))
            self.active.put(self._key(), value=value, datatype=datatype, collection=self._collection(), expiry=expiry)

    def remove(self) -> None:
        value, datatype = self.random.choice([(b"", Datatype.RAW), (self._with_xattrs(b""), Datatype.XATTR)])
        expired = self.random.random() < 0.4
        self.active.remove(
            self._key(), value=value, datatype=datatype, collection=self._collection(), expired=expired
        )  # fmt: skip

    def change_collections(self) -> None:
        manifest = self.active.bucket.manifest
        names = [c.name for _, c in manifest.collections() if c.name != "_default"]
        if names and self.random.random() < 0.4:
            self.active.bucket.set_manifest(manifest.without_collection("_default", self.random.choice(names)))
        else:
            history = self.random.random() < 0.5
            name = f"c{manifest.ids_used}"
            self.active.bucket.set_manifest(manifest.with_collection("_default", name, history=history))

    def pass_on(self) -> None:
        self.link.step(self.random.choice((100, 1000, 100_000)))

    def cut(self) -> None:
        self.link.cut()

    def crash_copy(self) -> None:
        self.link.cut()
        self.copy.node.reopen(in_order=self.random.random() < 0.3)

    def crash_active(self) -> None:
        self.link.cut()
        self.active.node.reopen(in_order=self.random.random() < 0.3)

    def roll_back(self) -> None:
        to_seqno = self.random.randint(0, self.active.high_seqno())
        roll_back_vbucket(self.active.node.bucket_service, VBUCKET, Seqno(to_seqno))
        # The drill answers when the collections that it announces again are durable.
        self.active.commit()

    def fail_over(self) -> None:
        """The copy is promoted as it is, and the one that was active comes back as its copy."""
        self.link.cut()
        self.copy.bucket.set_vbucket_state(VBUCKET, VBucketState.ACTIVE)
        self.active.bucket.set_vbucket_state(VBUCKET, VBucketState.REPLICA)
        # The cluster has one manifest, and sends it to all.
        newest = max((self.active.bucket.manifest, self.copy.bucket.manifest), key=lambda manifest: manifest.uid)
        if self.copy.bucket.manifest.uid < newest.uid:
            self.copy.bucket.set_manifest(newest)
        self.active, self.copy = self.copy, self.active
        self.active.commit()
        self.copy.commit()

    def _join(self) -> None:
        """A link that was cut, or a stream that has ended, is asked for again."""
        if self.link.receiver.is_closed or self.link.producer.is_closed or self.link.source is not self.active:
            self.link.cut()
            self.links += 1
            self.link = Link(self.active, self.copy, name=f"link-{self.links}")
        if VBUCKET not in self.link.receiver.connection.streams:
            self.link.add_stream()


def _live_log(world: World) -> list[bytes]:
    """The stored changes without those of collections that are gone, which are sent to no consumer any more."""
    live = {collection.id for _, collection in world.bucket.manifest.collections()}
    frames = decode_frames(change_log(world.bucket))
    messages = [decode_message(frame, WITH_COLLECTIONS) for frame in frames]
    return [m.encode() for m in messages if getattr(m, "collection_id", None) in {None, *live}]


def _live_documents(world: World) -> dict[tuple[int, bytes], object]:
    live = {collection.id for _, collection in world.bucket.manifest.collections()}
    return {key: document for key, document in documents(world.bucket).items() if key[0] in live}


@pytest.mark.parametrize("compacts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_equals_its_source_after_any_history(tmp_path: Path, seed: int, compacts: bool) -> None:
    """Its documents do; and all its changes where none were compacted."""
    history = History(tmp_path, seed, compacts=compacts)
    history.run()
    history.come_to_rest()
    assert _live_documents(history.copy) == _live_documents(history.active)
    if not compacts:
        assert _live_log(history.copy) == _live_log(history.active)
        assert history.copy.bucket.manifest == history.active.bucket.manifest
        history.copy.node.reopen(in_order=False)
        assert _live_documents(history.copy) == _live_documents(history.active)
    history.close()

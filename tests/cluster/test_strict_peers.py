"""Copies, takeovers and durable writes with nodes that are as strict as real servers, on either side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.errors import HeadwaterError
from headwater.node.replication.proxy import Proxy
from headwater.protocol.frames import DurabilityLevel, Frame, decode_frames, durability
from headwater.protocol.messages import dcp_changes
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import (
    Control,
    Open,
    OpenFlags,
    StreamEndReason,
    StreamFlags,
    StreamRequest,
    VBucketState,
)
from headwater.protocol.messages.documents import Delete, Get, Set
from headwater.protocol.messages.vbuckets import DeleteVBucket, SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.settling import settle_now
from support.clusters import LOGIN, InProcessNodes, in_process
from support.replication_world import documents
from support.strict_server import V7_0_5, V8_0_2, HungUp, Refused, ServerVersion, StrictConnection, StrictServer

VBUCKET = VBucketId(0)
PLACE: dict[str, Any] = {"vbucket": VBUCKET, "collection_id": DEFAULT_COLLECTION}
MAJORITY = (durability(DurabilityLevel.MAJORITY, timeout_ms=10_000),)
SOON = (durability(DurabilityLevel.MAJORITY, timeout_ms=100),)


@dataclass(slots=True)
class Pair:
    """A node with an active vbucket, one with a copy of it, and a strict server in front of each."""

    nodes: InProcessNodes
    source: StrictServer
    target: StrictServer
    writer: AsyncKvConnection
    reader: AsyncKvConnection

    async def proxy(self) -> Proxy:
        return await Proxy.open(
            self.source.address, self.target.address, source_login=LOGIN, target_login=LOGIN, name="strict"
        )

    async def set_topology(self, *names: str) -> None:
        value = json.dumps({"topology": [["here", *names]]}).encode()
        await self.writer.request(SetVBucket(vbucket=VBUCKET, state=VBucketState.ACTIVE, value=value))

    async def write(self, key: bytes, value: bytes = b"{}", infos: Any = ()) -> None:
        await self.writer.request(Set(key=key, value=value, frame_infos=infos, **PLACE))

    async def is_prepared(self) -> None:
        """The write that has just been sent is pending, and its prepare is durable."""
        async with asyncio.timeout(30):
            while not (pending := self.bucket(0).prepares.of(VBUCKET)) or (
                self.bucket(0).vbuckets.durable_seqno(VBUCKET) < pending[-1].seqno
            ):
                await asyncio.sleep(0.01)

    def bucket(self, number: int) -> Bucket:
        return self.nodes.bucket(number)

    async def has_followed(self) -> None:
        async with asyncio.timeout(30):
            while self.bucket(1).vbuckets.durable_seqno(VBUCKET) < self.bucket(0).vbuckets.durable_seqno(VBUCKET):
                await asyncio.sleep(0.01)


VERSIONS = pytest.mark.parametrize("version", [V7_0_5, V8_0_2], ids=lambda version: version.name)


@asynccontextmanager
async def strict_pair(folder: Path, version: ServerVersion) -> AsyncIterator[Pair]:
    async with in_process(folder, 1) as nodes, AsyncExitStack() as stack:
        await nodes.start_new(bare=True)
        source, target = [
            await stack.enter_async_context(StrictServer(nodes.address(number), version)) for number in (0, 1)
        ]
        writer, reader = [await AsyncKvConnection.open(nodes.address(number), LOGIN) for number in (0, 1)]
        await reader.request(SetVBucket(vbucket=VBUCKET, state=VBucketState.REPLICA))
        yield Pair(nodes, source, target, writer, reader)
        assert source.faults == []
        assert target.faults == []
        writer.close()
        reader.close()


@VERSIONS
@pytest.mark.parametrize("on_disk", [True, False])
async def test_copies_of_all_that_durable_writes_leave(tmp_path: Path, on_disk: bool, version: ServerVersion) -> None:
    """A copy that follows, and one that begins from nothing when a write is pending; it is committed by that."""
    async with strict_pair(tmp_path, version) as pair:
        await pair.set_topology(str(pair.target.address))
        proxy = await pair.proxy()
        await proxy.add_stream(VBUCKET, StreamFlags(0))
        await write_all_kinds(pair)
        await pair.has_followed()
        assert documents(pair.bucket(1)) == documents(pair.bucket(0))
        proxy.close()

        await pair.reader.request(DeleteVBucket(vbucket=VBUCKET))
        await pair.reader.request(SetVBucket(vbucket=VBUCKET, state=VBucketState.REPLICA))
        pending = asyncio.create_task(pair.write(b"d", b'{"late":1}', infos=MAJORITY))
        await pair.is_prepared()
        if on_disk:
            settle_now(pair.bucket(0))
        proxy = await pair.proxy()
        await proxy.add_stream(VBUCKET, StreamFlags(0))
        await pending
        await pair.has_followed()
        assert pair.bucket(1).prepares.of(VBUCKET) == []
        assert documents(pair.bucket(1)) == documents(pair.bucket(0))
        proxy.close()


@VERSIONS
async def test_a_takeover_with_a_write_that_is_pending(tmp_path: Path, version: ServerVersion) -> None:
    async with strict_pair(tmp_path, version) as pair:
        await pair.write(b"a")
        await pair.set_topology("no copy")
        pending = asyncio.create_task(pair.write(b"d", infos=MAJORITY))
        await pair.is_prepared()
        proxy = await pair.proxy()
        await proxy.add_stream(VBUCKET, StreamFlags.TAKEOVER)
        assert await proxy.wait_for_end(VBUCKET) == StreamEndReason.OK
        assert pair.nodes.copies(VBUCKET) == {0: "dead", 1: "active"}
        with pytest.raises(HeadwaterError, match="AMBIGUOUS"):
            await pending
        for key in (b"a", b"d"):
            await pair.reader.request(Get(key=key, **PLACE))
        proxy.close()


async def write_all_kinds(pair: Pair) -> None:
    for key in (b"a", b"b", b"a"):
        await pair.write(key, infos=MAJORITY)
    await pair.write(b"a", b'{"plain":1}')
    await pair.writer.request(Delete(key=b"b", frame_infos=MAJORITY, **PLACE))
    await pair.write(b"gone")
    await pair.writer.request(Delete(key=b"gone", **PLACE))
    pair.bucket(0).put_removal(VBUCKET, collection_id=DEFAULT_COLLECTION, key=b"expired", expired=True)
    await pair.write(b"last")
    await pair.set_topology("no copy")
    with pytest.raises(HeadwaterError, match="AMBIGUOUS"):
        await pair.write(b"c", infos=SOON)
    await pair.set_topology(str(pair.target.address))


# --- the checker itself -------------------------------------------------------------------------------------------

NAMED = b'{"consumer_name":"n"}'
FAULTS: dict[str, tuple[ServerVersion, list[Request], str]] = {
    "a value that is not JSON": (V7_0_5, [Open(key=b"s", flags=OpenFlags(0), value=NAMED)], "datatype 0"),
    "a name for a producer": (V7_0_5, [Open(key=b"s", value=NAMED, datatype=Datatype.JSON)], "to a producer"),
    "a control before the open": (V8_0_2, [Control(key=b"enable_noop", value=b"true")], "not for a producer"),
    "a fraction": (V7_0_5, [Open(key=b"s"), Control(key=b"set_noop_interval", value=b"0.5")], "0.5"),
    "an older marker": (V8_0_2, [Open(key=b"s"), Control(key=b"max_marker_version", value=b"2.0")], "2.0"),
    "a stream without noops": (V8_0_2, [Open(key=b"s"), StreamRequest(end_seqno=Seqno(1))], "before noops"),
    "an acknowledgement": (
        V7_0_5,
        [Open(key=b"s"), dcp_changes.SeqnoAcknowledged(prepared_seqno=Seqno(1))],
        "never streamed",
    ),
}


@pytest.mark.parametrize(("version", "requests", "fault"), FAULTS.values(), ids=FAULTS)
async def test_what_a_server_refuses_is_found(
    tmp_path: Path, version: ServerVersion, requests: list[Request], fault: str
) -> None:
    async with in_process(tmp_path, 1) as nodes, StrictServer(nodes.address(0), version) as strict:
        connection = await AsyncKvConnection.open(strict.address, LOGIN)
        *good, bad = requests
        for request in good:
            await connection.request(request)
        with pytest.raises(HeadwaterError):
            await connection.request(bad)
        assert len(strict.faults) == 1
        assert fault in strict.faults[0]
        connection.close()


def _frame(message: Request) -> Frame:
    return decode_frames(message.encode())[0]


def _set(seqno: int, key: bytes = b"\0k", **fields: Any) -> dcp_changes.Mutation:
    return dcp_changes.Mutation(seqno=Seqno(seqno), rev_seqno=1, key=key, **fields)


def _prepare(seqno: int) -> dcp_changes.Prepare:
    return dcp_changes.Prepare(seqno=Seqno(seqno), rev_seqno=1, durability=DurabilityLevel.MAJORITY, key=b"\0k")


def _commit(seqno: int) -> dcp_changes.Commit:
    return dcp_changes.Commit(prepared_seqno=Seqno(seqno - 1), commit_seqno=Seqno(seqno), key=b"\0k")


def _marker(flags: int, start: int = 1, end: int = 9, **fields: Any) -> dcp_changes.SnapshotMarker:
    return dcp_changes.SnapshotMarker(
        start_seqno=Seqno(start), end_seqno=Seqno(end), flags=dcp_changes.SnapshotFlags(flags), **fields
    )


def _v2(flags: int, start: int = 1, end: int = 9, **fields: Any) -> dcp_changes.SnapshotMarker:
    return _marker(flags, start, end, max_visible_seqno=Seqno(1), high_completed_seqno=Seqno(0), **fields)


def _v2_2(flags: int, high_prepared_seqno: int, start: int = 1) -> dcp_changes.SnapshotMarker:
    return _v2(flags, start, purge_seqno=Seqno(0), high_prepared_seqno=Seqno(high_prepared_seqno))


BOTH = (V7_0_5, V8_0_2)
BAD_STREAMS: dict[str, tuple[tuple[ServerVersion, ...], list[Request]]] = {
    "a disk marker of version 1": (BOTH, [_marker(0x06)]),
    "a marker with history": ((V7_0_5,), [_v2(0x31)]),
    "a marker with unknown flags": (BOTH, [_v2(0x41)]),
    "a marker of memory and disk": (BOTH, [_v2(0x07)]),
    "a marker 2.2": ((V7_0_5,), [_v2_2(0x06, 0)]),
    "a high prepared seqno in memory": (BOTH, [_v2_2(0x05, 3)]),
    "a high prepared seqno from before": (BOTH, [_v2_2(0x06, 3, start=4)]),
    "a short deletion": (BOTH, [_v2(0x05), dcp_changes.Deletion(seqno=Seqno(1), rev_seqno=1, key=b"\0k")]),
    "a deletion with a body": (
        BOTH,
        [_v2(0x05), dcp_changes.Deletion(seqno=Seqno(1), rev_seqno=1, delete_time=1, key=b"\0k", value=b"{}")],
    ),
    "snappy that was not agreed on": (BOTH, [_v2(0x05), _set(1, datatype=Datatype.SNAPPY, value=b"\1\0{")]),
    "an unknown datatype": (BOTH, [_v2(0x05), _set(1, datatype=Datatype(0x08))]),
    "a seqno behind the snapshot": (BOTH, [_v2(0x05), _set(10)]),
    "a seqno twice": (BOTH, [_v2(0x05), _set(1), _set(1, b"\0other")]),
    "a commit from disk": (BOTH, [_v2(0x06), _prepare(1), _commit(2)]),
    "an abort with its prepare": (
        BOTH,
        [_v2(0x05), _prepare(1), dcp_changes.Abort(prepared_seqno=Seqno(1), abort_seqno=Seqno(2), key=b"\0k")],
    ),
    "a second durable write in one checkpoint": (
        BOTH,
        [_v2(0x05, 1, 1), _prepare(1), _v2(0x01, 2, 2), _commit(2), _v2(0x01, 3, 3), _prepare(3)],
    ),
    "a change behind a commit in one checkpoint": (
        BOTH,
        [_v2(0x05, 1, 2), _prepare(1), _commit(2), _v2(0x01, 3, 3), _set(3)],
    ),
    "a seqno-advanced": (BOTH, [_v2(0x05), dcp_changes.SeqnoAdvanced(seqno=Seqno(2))]),
}


@pytest.mark.parametrize(("versions", "messages"), BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_what_a_consumer_does_not_take_is_found(versions: tuple[ServerVersion, ...], messages: list[Request]) -> None:
    *good, bad = map(_frame, messages)
    for version in BOTH:
        connection = StrictConnection(version, frozenset({0x06, 0x0B, 0x12}), is_open=True, is_consumer=True)
        connection.controls[b"enable_sync_writes"] = b"true"
        connection.check_from_node(_frame(StreamRequest(end_seqno=Seqno(100))))
        assert all(connection.check_from_peer(frame) for frame in good)
        if version in versions:
            with pytest.raises((Refused, HungUp)):
                connection.check_from_peer(bad)
        else:
            assert connection.check_from_peer(bad)


@pytest.mark.parametrize(
    ("acknowledged", "is_taken"), [((1, 2), True), ((2, 1), False), ((2, 2), False), ((3,), False)]
)
def test_acknowledgements_that_repeat_are_found(acknowledged: tuple[int, ...], is_taken: bool) -> None:
    connection = StrictConnection(V7_0_5, frozenset({0x12}), is_open=True)
    connection.controls |= {b"enable_noop": b"true", b"enable_sync_writes": b"true"}
    connection.check_from_peer(_frame(StreamRequest(end_seqno=Seqno(100))))
    connection.check_from_node(_frame(_prepare(2)))
    frames = [_frame(dcp_changes.SeqnoAcknowledged(prepared_seqno=Seqno(seqno))) for seqno in acknowledged]
    if is_taken:
        assert all(map(connection.check_from_peer, frames))
    else:
        with pytest.raises(HungUp):
            list(map(connection.check_from_peer, frames))

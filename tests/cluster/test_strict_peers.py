"""Copies, takeovers and durable writes with nodes that are as strict as a 7.0.5 server, on either side."""

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
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import (
    Abort,
    Commit,
    Deletion,
    Prepare,
    SeqnoAcknowledged,
    SnapshotFlags,
    SnapshotMarker,
)
from headwater.protocol.messages.dcp_streams import (
    Control,
    Open,
    OpenFlags,
    StreamEndReason,
    StreamFlags,
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
from support.strict_server import HungUp, Refused, StrictConnection, StrictServer

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
        return self.nodes.running[number].bucket_service("default").bucket

    async def has_followed(self) -> None:
        async with asyncio.timeout(30):
            while self.bucket(1).vbuckets.durable_seqno(VBUCKET) < self.bucket(0).vbuckets.durable_seqno(VBUCKET):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def strict_pair(folder: Path) -> AsyncIterator[Pair]:
    async with in_process(folder, 1) as nodes, AsyncExitStack() as stack:
        await nodes.start_new(bare=True)
        source, target = [await stack.enter_async_context(StrictServer(nodes.address(number))) for number in (0, 1)]
        writer, reader = [await AsyncKvConnection.open(nodes.address(number), LOGIN) for number in (0, 1)]
        await reader.request(SetVBucket(vbucket=VBUCKET, state=VBucketState.REPLICA))
        yield Pair(nodes, source, target, writer, reader)
        assert source.faults == []
        assert target.faults == []
        writer.close()
        reader.close()


@pytest.mark.parametrize("on_disk", [True, False])
def test_copies_of_all_that_durable_writes_leave(tmp_path: Path, on_disk: bool) -> None:
    """A copy that follows, and one that begins from nothing when a write is pending; it is committed by that."""

    async def run() -> None:
        async with strict_pair(tmp_path) as pair:
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

    asyncio.run(run())


def test_a_takeover_with_a_write_that_is_pending(tmp_path: Path) -> None:
    async def run() -> None:
        async with strict_pair(tmp_path) as pair:
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

    asyncio.run(run())


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
FAULTS: dict[str, tuple[list[Request], str]] = {
    "a value that is not JSON": ([Open(key=b"s", flags=OpenFlags(0), value=NAMED)], "datatype 0"),
    "a name for a producer": ([Open(key=b"s", value=NAMED, datatype=Datatype.JSON)], "to a producer"),
    "a fraction": ([Open(key=b"s"), Control(key=b"set_noop_interval", value=b"0.5")], "0.5"),
    "an acknowledgement": ([Open(key=b"s"), SeqnoAcknowledged(prepared_seqno=Seqno(1))], "never streamed"),
}


@pytest.mark.parametrize(("requests", "fault"), FAULTS.values(), ids=FAULTS)
def test_what_7_0_5_refuses_is_found(tmp_path: Path, requests: list[Request], fault: str) -> None:
    async def run() -> None:
        async with in_process(tmp_path, 1) as nodes, StrictServer(nodes.address(0)) as strict:
            connection = await AsyncKvConnection.open(strict.address, LOGIN)
            *good, bad = requests
            for request in good:
                await connection.request(request)
            with pytest.raises(HeadwaterError):
                await connection.request(bad)
            assert len(strict.faults) == 1
            assert fault in strict.faults[0]
            connection.close()

    asyncio.run(run())


def _frame(message: Request) -> Frame:
    return decode_frames(message.encode())[0]


def _prepare(seqno: int) -> Prepare:
    return Prepare(seqno=Seqno(seqno), rev_seqno=1, durability=DurabilityLevel.MAJORITY, key=b"\0k")


def _marker(flags: SnapshotFlags, **fields: Any) -> SnapshotMarker:
    return SnapshotMarker(start_seqno=Seqno(1), end_seqno=Seqno(9), flags=flags, **fields)


V2 = {"max_visible_seqno": Seqno(1), "high_completed_seqno": Seqno(0)}
BAD_STREAMS: dict[str, list[Request]] = {
    "a disk marker of version 1": [_marker(SnapshotFlags.DISK)],
    "a marker with history": [_marker(SnapshotFlags.MEMORY | SnapshotFlags.HISTORY, **V2)],
    "a marker 2.2": [
        _marker(SnapshotFlags.DISK, **V2, high_prepared_seqno=Seqno(0), purge_seqno=Seqno(0)),
    ],
    "a short deletion": [
        _marker(SnapshotFlags.MEMORY, **V2),
        Deletion(seqno=Seqno(1), rev_seqno=1, key=b"\0k"),
    ],
    "a commit from disk": [
        _marker(SnapshotFlags.DISK, **V2),
        _prepare(1),
        Commit(prepared_seqno=Seqno(1), commit_seqno=Seqno(2), key=b"\0k"),
    ],
    "an abort with its prepare": [
        _marker(SnapshotFlags.MEMORY, **V2),
        _prepare(1),
        Abort(prepared_seqno=Seqno(1), abort_seqno=Seqno(2), key=b"\0k"),
    ],
}


@pytest.mark.parametrize("messages", BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_what_a_7_0_5_consumer_does_not_take_is_found(messages: list[Request]) -> None:
    connection = StrictConnection(collections=True, is_consumer=True, sync_writes=True)
    *good, bad = map(_frame, messages)
    assert all(connection.check_from_peer(frame) for frame in good)
    with pytest.raises((Refused, HungUp)):
        connection.check_from_peer(bad)

"""Two real nodes in this process, joined over sockets by a proxy that passes bytes: takeover, and a rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from headwater.node.node import Node
from headwater.node.options import NodeOptions
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Opcode
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message, Request, Response
from headwater.protocol.messages.dcp_streams import AddStream, Open, OpenFlags, StreamFlags, VBucketState
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.session import Hello, SaslAuth, SelectBucket
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status
from support.replication_world import PRODUCER_FLAGS

VBUCKETS = 4
FEATURES = (Feature.XERROR, Feature.SELECT_BUCKET, Feature.XATTR, Feature.JSON, Feature.COLLECTIONS)
WAIT_S = 30.0


class Connection:
    """A key-value connection that has logged in."""

    opened: ClassVar[list[Connection]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = FrameBuffer()

    @classmethod
    async def open(cls, node: Node) -> Connection:
        port = node.address.kv_port
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        cls.opened.append(connection)
        for request in (
            Hello(key=b"test", features=FEATURES),
            SaslAuth(key=b"PLAIN", value=PlainLogin(user="admin", password="password").encode()),
            SelectBucket(key=b"default"),
        ):
            assert (await connection.call(request)).status == Status.SUCCESS
        return connection

    @classmethod
    async def close_all(cls) -> None:
        for connection in cls.opened:
            connection.writer.close()
            with suppress(ConnectionError):
                await connection.writer.wait_closed()
        cls.opened.clear()

    async def frame(self) -> Frame:
        while (frame := self._frames.next_frame()) is None:
            data = await self.reader.read(65536)
            if not data:
                raise ConnectionError("closed")
            self._frames.receive_data(data)
        return frame

    async def call(self, request: Request) -> Response:
        self.writer.write(request.encode())
        answer = decode_message(await self.frame(), WITH_COLLECTIONS)
        assert isinstance(answer, Response)
        return answer


class Proxy:
    def __init__(self, producer: Connection, consumer: Connection) -> None:
        self.answers: asyncio.Queue[Message] = asyncio.Queue()
        self.consumer = consumer
        self._producer = producer
        self._tasks = [
            asyncio.create_task(self._pass_on(producer, consumer)),
            asyncio.create_task(self._pass_on(consumer, producer)),
        ]

    @classmethod
    async def join(cls, source: Node, target: Node, name: str) -> Proxy:
        producer, consumer = await Connection.open(source), await Connection.open(target)
        assert (await producer.call(Open(key=name.encode(), flags=PRODUCER_FLAGS))).status == Status.SUCCESS
        assert (await consumer.call(Open(key=name.encode(), flags=OpenFlags(0)))).status == Status.SUCCESS
        return cls(producer, consumer)

    async def add_stream(self, vbucket: int, flags: StreamFlags = StreamFlags(0)) -> Response:  # noqa: B008
        self.consumer.writer.write(AddStream(vbucket=VBucketId(vbucket), flags=flags).encode())
        answer = await asyncio.wait_for(self.answers.get(), WAIT_S)
        assert isinstance(answer, Response)
        return answer

    async def _pass_on(self, source: Connection, target: Connection) -> None:
        try:
            while True:
                frame = await source.frame()
                if source is self.consumer and not frame.magic.is_request and frame.opcode == Opcode.DCP_ADD_STREAM:
                    self.answers.put_nowait(decode_message(frame, WITH_COLLECTIONS))
                else:
                    target.writer.write(frame.encode())
        except ConnectionError:
            target.writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for connection in (self.consumer, self._producer):
            connection.writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def _with_nodes(tmp_path: Path, scenario: Callable[[Node, Node], Awaitable[None]]) -> None:
    async def run() -> None:
        nodes = [
            Node(
                NodeOptions(
                    data=tmp_path / name, port=0, http_port=0, vbuckets=VBUCKETS, user="admin", password="password",
                    bare=name == "target",
                )
            )
            for name in ("source", "target")
        ]  # fmt: skip
        try:
            for node in nodes:
                await node.start()
            target = await Connection.open(nodes[1])
            for vbucket in range(VBUCKETS):
                request = SetVBucket(vbucket=VBucketId(vbucket), state=VBucketState.REPLICA)
                assert (await target.call(request)).status == Status.SUCCESS
            await scenario(*nodes)
        finally:
            await Connection.close_all()
            for node in nodes:
                await node.stop()

    asyncio.run(run())


def _bucket(node: Node):
    return node._services["default"].bucket


def _key(vbucket: int, number: int) -> bytes:
    return b"\x00%d-%d" % (vbucket, number)


def test_a_takeover_of_all_vbuckets_while_a_writer_writes(tmp_path: Path) -> None:
    async def scenario(source: Node, target: Node) -> None:
        writers = [await Connection.open(source), await Connection.open(target)]
        written: list[tuple[int, bytes]] = []
        owners = [0] * VBUCKETS
        is_over = asyncio.Event()

        async def write() -> None:
            number = 0
            while not is_over.is_set():
                vbucket, number = number % VBUCKETS, number + 1
                key = _key(vbucket, number)
                while True:
                    request = Set(vbucket=VBucketId(vbucket), key=key, value=b"%d" % number)
                    answer = await writers[owners[vbucket]].call(request)
                    if answer.status == Status.SUCCESS:
                        written.append((vbucket, key))
                        break
                    assert answer.status in (Status.NOT_MY_VBUCKET, Status.ETMPFAIL), answer
                    # The map would tell; here the writer tries the other one.
                    owners[vbucket] = 1 - owners[vbucket]
                    await asyncio.sleep(0.005)

        writer = asyncio.create_task(write())
        await asyncio.sleep(0.2)
        proxy = await Proxy.join(source, target, "takeover")
        for vbucket in range(VBUCKETS):
            answer = await proxy.add_stream(vbucket, StreamFlags.TAKEOVER)
            assert answer.status == Status.SUCCESS
            await _until(lambda v=vbucket: _bucket(target).vbuckets.state(v) == VBucketState.ACTIVE)
            assert _bucket(source).vbuckets.state(vbucket) == VBucketState.DEAD
        count = len(written)
        await _until(lambda: len(written) > count + 50)
        is_over.set()
        await writer
        assert owners == [1] * VBUCKETS
        assert len(written) == len(set(written))
        for vbucket, key in written:
            answer = await writers[1].call(Get(vbucket=VBucketId(vbucket), key=key))
            assert answer.status == Status.SUCCESS, (vbucket, key)
        await proxy.close()

    _with_nodes(tmp_path, scenario)


def test_a_copy_is_rolled_back_between_commits(tmp_path: Path) -> None:
    async def scenario(source: Node, target: Node) -> None:
        writer = await Connection.open(source)
        for number in range(20):
            await writer.call(Set(key=_key(0, number), value=b"1"))
        proxy = await Proxy.join(source, target, "first")
        assert (await proxy.add_stream(0)).status == Status.SUCCESS
        await _until(lambda: _bucket(target).vbuckets.durable_seqno(0) == 20)
        await proxy.close()
        await source.roll_back("default", VBucketId(0), Seqno(12))
        await writer.call(Set(key=b"\x00new", value=b"2"))
        proxy = await Proxy.join(source, target, "second")
        # Others write meanwhile, so that the bucket has to be brought to rest first.
        answers = await asyncio.gather(proxy.add_stream(0), writer.call(Set(key=b"\x00more", value=b"3")))
        assert answers[0].status == Status.SUCCESS
        await _until(lambda: _bucket(target).vbuckets.durable_seqno(0) == 14)
        logs = [b"".join(run.tobytes() for run in _bucket(node).runs(0)) for node in (source, target)]
        assert logs[0] == logs[1]
        await proxy.close()

    _with_nodes(tmp_path, scenario)


def test_a_copy_has_the_branches_of_its_source_and_lets_go_with_the_connection(tmp_path: Path) -> None:
    async def scenario(source: Node, target: Node) -> None:
        writer = await Connection.open(source)
        for vbucket in range(VBUCKETS):
            await writer.call(Set(vbucket=VBucketId(vbucket), key=_key(vbucket, 1), value=b"1"))
        proxy = await Proxy.join(source, target, "copy")
        for vbucket in range(VBUCKETS):
            assert (await proxy.add_stream(vbucket)).status == Status.SUCCESS
        await _until(lambda: all(_bucket(target).vbuckets.durable_seqno(v) == 1 for v in range(VBUCKETS)))
        assert [int(vbuuid) for vbuuid in _bucket(target).vbuckets.vbuuids] == [
            int(vbuuid) for vbuuid in _bucket(source).vbuckets.vbuuids
        ]
        await proxy.close()
        await _until(lambda: not target._services["default"].receivers)

    _with_nodes(tmp_path, scenario)

"""A read as its caller sees it, on a real node: places, interrupts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import headwater
from headwater.client.asyncio_client import Client
from headwater.client.checkpoints import FileCheckpoint
from headwater.client.groups import Assignment, StaticMember
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.offsets import Offsets
from headwater.errors import HeadwaterError, InvalidInput, LocalProtocolError
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import CollectionId, VBucketId
from support.node_process import PASSWORD, USER, NodeProcess

KEYS = {f"key{number}" for number in range(20)}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("reading") / "data", "--vbuckets", "4") as node:
        node.start()
        with node.connect() as connection:
            for key in sorted(KEYS):
                place = {"vbucket": VBucketId(1), "collection_id": CollectionId(0)}
                connection.request(Set(key=key.encode(), value=b"{}", **place))
        yield node


def client_of(node: NodeProcess) -> Client:
    return headwater.connect(f"{node.url}/default", user=USER, password=PASSWORD)


async def test_pieces_that_were_taken_and_not_built_are_given_again(node: NodeProcess) -> None:
    """A caller that was interrupted in between has not seen them: the place must not be behind them."""
    async with client_of(node) as client:
        reading = client.batches(end="now")
        pieces = await reading.take()
        assert pieces
        assert reading.offsets == reading.finished
        assert await reading.take() is pieces
        reading.build(pieces)
        assert reading.offsets != reading.finished


def test_the_server_is_asked_for_a_priority(node: NodeProcess) -> None:
    async def priorities(**options: str) -> set[str]:
        async with client_of(node) as client:
            await client.batches(name="ranked", **options).start()
            connection = await AsyncKvConnection.open(node.address, client.settings.login())
            statistics = await connection.statistics("dcp")
            connection.close()
            return {value for name, value in statistics.items() if ":ranked:" in name and name.endswith(":priority")}

    assert asyncio.run(priorities()) == {"medium"}
    assert asyncio.run(priorities(priority="high")) == {"high"}
    with pytest.raises(InvalidInput, match="'low', 'medium', 'high'"):
        client_of(node).batches(priority="urgent")


async def test_a_wait_that_is_cancelled_loses_nothing(node: NodeProcess) -> None:
    seen: set[str] = set()
    async with client_of(node) as client:
        changes = client.changes()
        async with asyncio.timeout(30):
            while seen != KEYS:
                try:
                    seen.add((await asyncio.wait_for(anext(changes), 0.002)).key)
                except TimeoutError:
                    continue


def test_a_read_that_waits_ends_when_its_client_is_closed(node: NodeProcess) -> None:
    async def read_all(client: Client) -> int:
        return len([change async for change in client.changes()])

    async def read() -> None:
        client = await client_of(node).__aenter__()
        reading = asyncio.create_task(read_all(client))
        await asyncio.sleep(0.5)
        await client.close()
        assert await asyncio.wait_for(reading, 10) in (0, len(KEYS))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(read())


@pytest.mark.parametrize("rounds", range(5))
async def test_a_read_that_is_closed_while_it_begins_leaves_nothing_behind(node: NodeProcess, rounds: int) -> None:
    client = await client_of(node).__aenter__()
    reading = asyncio.create_task(anext(client.batches(), None))
    await asyncio.sleep(rounds * 0.002)
    await client.close()
    await asyncio.wait_for(reading, 10)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_read_that_can_not_begin_leaves_its_checkpoint_to_others(node: NodeProcess, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    mine, other = FileCheckpoint(path), FileCheckpoint(path)
    await mine.save(Offsets("another bucket", {}))
    async with client_of(node) as client:
        with pytest.raises(HeadwaterError):
            await anext(client.batches(checkpoint=mine))
        assert await other.load() is not None
        await other.close()


async def test_a_member_that_could_not_begin_may_try_again(node: NodeProcess, tmp_path: Path) -> None:
    checkpoint = FileCheckpoint(tmp_path / "checkpoint")
    async with client_of(node) as client:
        reading = client.batches(checkpoint=checkpoint, group=StaticMember(1, of=1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(reading), 0.001)
        assert (await asyncio.wait_for(anext(reading), 30)).num_rows


class GrowingMember(StaticMember):
    """Has one vbucket at first and all of them later, and is slow to release the first time."""

    def __init__(self) -> None:
        super().__init__(1, of=1)
        self.releases = 0

    def current(self) -> Assignment:
        whole = super().current()
        vbuckets = whole.vbuckets if self.releases else frozenset({VBucketId(0)})
        number = 2 if self.releases else 1
        return replace(whole, number=number, vbuckets=vbuckets, generations=dict.fromkeys(sorted(vbuckets), 1))

    async def assignment_changed(self, known: Assignment) -> Assignment:
        self.releases = 1
        return self.current() if known.number == 1 else await super().assignment_changed(known)

    async def release(self, vbuckets: Iterable[VBucketId]) -> None:
        self.releases += 1
        if self.releases == 2:
            await asyncio.sleep(60)


async def test_an_interrupted_member_returns_to_its_new_assignment(node: NodeProcess, tmp_path: Path) -> None:
    async with client_of(node) as client:
        reading = client.batches(checkpoint=FileCheckpoint(tmp_path / "checkpoint"), group=GrowingMember())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(reading), 2)
        assert (await asyncio.wait_for(anext(reading), 30)).num_rows


async def test_a_closed_client_does_not_begin_another_read(node: NodeProcess) -> None:
    async with client_of(node) as client:
        pass
    with pytest.raises(LocalProtocolError):
        client.batches()


async def test_reads_that_are_over_are_forgotten(node: NodeProcess) -> None:
    async with client_of(node) as client:
        for _ in range(3):
            assert sum([batch.num_rows async for batch in client.batches(end="now")]) == len(KEYS)
        assert len(client._readings) == 1


def test_a_blocking_read_may_be_closed_after_its_client(node: NodeProcess) -> None:
    with headwater.blocking.connect(f"{node.url}/default", user=USER, password=PASSWORD) as client:
        reading = client.batches()
        next(reading)
    reading.close()
    assert list(reading) == []

"""When a read begins: with its first change, or with `start`, on a real node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

import headwater
from headwater.client.checkpoints import FileCheckpoint
from headwater.client.offsets import Offsets
from headwater.errors import CheckpointOfOtherBucket, HeadwaterError, LocalProtocolError
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import CollectionId, VBucketId
from support.node_process import PASSWORD, USER, NodeProcess

VBUCKETS = 4
LOGIN = {"user": USER, "password": PASSWORD}
_numbers = count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("starting") / "data", "--vbuckets", str(VBUCKETS)) as node:
        yield node.start()


def write(node: NodeProcess) -> set[str]:
    """A document in every vbucket. Returns their keys, which are new."""
    keys = set()
    with node.connect() as connection:
        for vbucket in map(VBucketId, range(VBUCKETS)):
            key = f"key{next(_numbers)}"
            connection.request(Set(key=key.encode(), value=b"{}", vbucket=vbucket, collection_id=CollectionId(0)))
            keys.add(key)
    return keys


async def test_all_that_is_written_after_start_is_seen(node: NodeProcess) -> None:
    before = write(node)
    async with headwater.connect(f"{node.url}/default", **LOGIN) as client:
        changes = client.changes(start="now")
        await changes.start()
        after = write(node)
        seen = {(await asyncio.wait_for(anext(changes), 30)).key for _ in after}
        assert seen == after
        assert not seen & before


def test_all_that_is_written_after_a_blocking_start_is_seen(node: NodeProcess) -> None:
    write(node)
    with headwater.blocking.connect(f"{node.url}/default", **LOGIN) as client:
        changes = client.changes(start="now")
        changes.start()
        assert len(changes.offsets.offsets) == VBUCKETS
        after = write(node)
        assert {next(changes).key for _ in after} == after


def test_a_read_from_now_on_begins_with_its_first_change_unless_it_is_started(node: NodeProcess) -> None:
    with headwater.blocking.connect(f"{node.url}/default", **LOGIN) as client:
        changes = client.changes(start="now", end="now")
        write(node)
        assert list(changes) == []


def test_a_read_may_be_started_again_and_again(node: NodeProcess) -> None:
    with headwater.blocking.connect(f"{node.url}/default", **LOGIN) as client:
        batches = client.batches(start="now")
        batches.start()
        place = batches.offsets
        write(node)
        batches.start()
        assert batches.offsets == place
        assert len(place.offsets) == VBUCKETS


async def test_what_keeps_a_read_from_its_start_is_raised(node: NodeProcess, tmp_path: Path) -> None:
    checkpoint = FileCheckpoint(tmp_path / "checkpoint")
    await checkpoint.save(Offsets("another bucket", {}))
    async with headwater.connect(f"{node.url}/default", **LOGIN) as client:
        with pytest.raises(CheckpointOfOtherBucket):
            await client.changes(checkpoint=checkpoint).start()


def test_a_node_that_is_gone_fails_a_start_from_now_on(tmp_path: Path) -> None:
    """The places can't be known, so the start must not look like one that has worked."""
    with NodeProcess(tmp_path / "data", "--vbuckets", str(VBUCKETS)) as node:
        url = node.start().url
        with headwater.blocking.connect(f"{url}/default", **LOGIN) as client:
            node.kill()
            with pytest.raises(HeadwaterError):
                client.changes(start="now", give_up_after_s=0.5).start()


def test_a_closed_read_can_not_be_started(node: NodeProcess) -> None:
    with headwater.blocking.connect(f"{node.url}/default", **LOGIN) as client:
        batches = client.batches()
        batches.close()
        with pytest.raises(LocalProtocolError, match="the read is closed"):
            batches.start()


def test_a_program_that_dies_before_its_first_change_keeps_its_now(node: NodeProcess, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with headwater.blocking.connect(f"{node.url}/default", **LOGIN) as client:
        client.changes(start="now", checkpoint=FileCheckpoint(path)).start()
        saved = Offsets.from_json(path.read_text())
        assert len(saved.offsets) == VBUCKETS
    after = write(node)
    with headwater.blocking.connect(f"{node.url}/default", **LOGIN) as client:
        changes = client.changes(start="now", end="now", checkpoint=FileCheckpoint(path))
        assert {change.key for change in changes} == after

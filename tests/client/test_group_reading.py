"""Members of a group that really read: together they get every change once, whoever comes and goes."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from headwater.client.asyncio_client import Client
from headwater.client.bucket_kv import BucketKv
from headwater.client.changes import Mutation
from headwater.client.checkpoints.xattrs import XattrCheckpoint
from headwater.client.cluster_map import vbucket_of
from headwater.client.groups import Membership, StaticMember
from headwater.client.groups.lease_group import LeaseGroup
from headwater.client.kv_connection import KvConnection
from headwater.errors import InvalidInput
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import CollectionId
from support.group_member_process import settings_of
from support.node_process import NodeProcess

VBUCKETS = 64
DOCUMENTS = 400
OUR_KEYS = "doc-"


def write(connection: KvConnection, test: str, numbers: range) -> None:
    for number in numbers:
        key = f"{OUR_KEYS}{test}-{number}".encode()
        vbucket = vbucket_of(key, VBUCKETS)
        connection.request(Set(vbucket=vbucket, key=key, collection_id=CollectionId(0), value=b"1"))


class Reader:
    """One member, reading in a task, that counts what it gets of one test."""

    def __init__(self, node: NodeProcess, test: str, group: Membership) -> None:
        self.seen: Counter[str] = Counter()
        self._settings = settings_of(f"{node.url}/default")
        self._test = test
        self._group = group
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with Client(self._settings) as client:
            checkpoint = XattrCheckpoint(BucketKv(self._settings), group=self._test)
            async for change in client.changes(group=self._group, checkpoint=checkpoint):
                if isinstance(change, Mutation) and change.key.startswith(f"{OUR_KEYS}{self._test}-"):
                    self.seen[change.key] += 1

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def wait_for(readers: list[Reader], count: int) -> Counter[str]:
    async with asyncio.timeout(60):
        while True:
            seen = sum((reader.seen for reader in readers), Counter[str]())
            if len(seen) >= count:
                return seen
            for reader in readers:
                if reader._task.done() and not reader._task.cancelled():
                    reader._task.result()
            await asyncio.sleep(0.05)


def lease(test: str, member: str) -> LeaseGroup:
    return LeaseGroup(test, member, lease_s=3.0, interval_s=0.3, margin_s=1.0)


@pytest.mark.parametrize("kind", ["static", "lease"])
async def test_two_members_share_the_changes(group_node: NodeProcess, kind: str) -> None:
    groups = {
        "static": [StaticMember(1, of=2), StaticMember(2, of=2)],
        "lease": [lease(kind, "ada"), lease(kind, "bea")],
    }
    with group_node.connect() as connection:
        write(connection, kind, range(DOCUMENTS))
    readers = [Reader(group_node, kind, group) for group in groups[kind]]
    seen = await wait_for(readers, DOCUMENTS)
    if kind == "static":
        assert set(seen.values()) == {1}
        assert all(reader.seen for reader in readers)
    for reader in readers:
        await reader.stop()


async def test_a_member_that_leaves_is_followed_by_another_without_a_gap(group_node: NodeProcess) -> None:
    """What the first has finished with is not read again, and nothing that came later is missed."""
    test = "relay"
    with group_node.connect() as connection:
        first = Reader(group_node, test, lease(test, "ada"))
        write(connection, test, range(DOCUMENTS))
        await wait_for([first], DOCUMENTS)
        second = Reader(group_node, test, lease(test, "bea"))
        await asyncio.sleep(1.5)
        await first.stop()
        write(connection, test, range(DOCUMENTS, 2 * DOCUMENTS))
        seen = await wait_for([first, second], 2 * DOCUMENTS)
        assert len(seen) == 2 * DOCUMENTS
        await second.stop()


async def test_a_member_needs_a_checkpoint_and_no_choice_of_its_own(group_node: NodeProcess) -> None:
    settings = settings_of(f"{group_node.url}/default")
    checkpoint = XattrCheckpoint(BucketKv(settings), group="choice")
    async with Client(settings) as client:
        with pytest.raises(InvalidInput, match="needs a checkpoint"):
            client.changes(group=StaticMember(1, of=2))
        with pytest.raises(InvalidInput, match="can't choose"):
            client.changes(group=StaticMember(1, of=2), checkpoint=checkpoint, start="now")

"""The group's document on a real node: what is there, what others have changed, and nodes that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from headwater import errors
from headwater.client.cluster_map import vbucket_of
from headwater.client.groups import Assignment, DocumentPort, GroupBucket
from headwater.client.groups.group_document import group_bucket
from headwater.client.groups.lease_group import LeaseGroup
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Get, GetResponse
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, Cas
from support.fault_proxy import free_port
from support.group_fakes import joined
from support.group_member_process import INTERVAL_S, LEASE_S, MARGIN_S, VBUCKETS, bucket_of, settings_of
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

T = TypeVar("T")


def bucket(node: NodeProcess, name: str = "default") -> GroupBucket:
    return bucket_of(f"{node.url}/{name}")


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


async def closed_after(port: DocumentPort, call: Coroutine[Any, Any, T]) -> T:
    try:
        return await call
    finally:
        await port.close()


def test_a_document_is_made_once_and_replaced_by_who_knows_it(group_node: NodeProcess) -> None:
    ours = bucket(group_node).open_document(b"made-once", None)
    theirs = bucket(group_node).open_document(b"made-once", None)

    async def scenario() -> None:
        assert await ours.read() is None
        assert await ours.replace(b"{}", Cas(1)) is None
        first = await ours.add(b'{"by":"us"}')
        assert first is not None
        assert await theirs.add(b'{"by":"them"}') is None
        seen = await theirs.read()
        assert (seen.value, seen.cas) == (b'{"by":"us"}', first)
        second = await theirs.replace(b'{"by":"them"}', first)
        assert second is not None
        assert await ours.replace(b'{"by":"us"}', first) is None
        assert await ours.read() == type(seen)(b'{"by":"them"}', second)
        await theirs.close()

    run(closed_after(ours, scenario()))
    with group_node.connect() as connection:
        answer = connection.request(
            Get(key=b"made-once", vbucket=vbucket_of(b"made-once", VBUCKETS), collection_id=DEFAULT_COLLECTION)
        )
    assert isinstance(answer, GetResponse)
    assert answer.value == b'{"by":"them"}'


def test_the_document_is_in_the_collection_that_was_named(group_node: NodeProcess) -> None:
    scopes = f"{group_node.http_url}/pools/default/buckets/default/scopes"
    for path, name in ((scopes, "ops"), (f"{scopes}/ops/collections", "groups")):
        httpx.post(path, data={"name": name}, auth=(USER, PASSWORD)).raise_for_status()

    async def scenario(port: DocumentPort, other: DocumentPort) -> None:
        assert await port.add(b"{}") is not None
        assert await other.read() is None
        await other.close()

    port = bucket(group_node).open_document(b"placed", "ops.groups")
    run(closed_after(port, scenario(port, bucket(group_node).open_document(b"placed", None))))


@pytest.mark.parametrize("collection", ["ops.nothing", "nothing.groups"])
def test_a_collection_that_is_not_there_is_an_error(group_node: NodeProcess, collection: str) -> None:
    port = bucket(group_node).open_document(b"lost", collection)
    with pytest.raises((errors.UnknownCollection, errors.UnknownScope), match=f"no collection '{collection}'"):
        run(closed_after(port, port.read()))


def test_a_vbucket_that_is_nowhere_is_an_error_that_passes(group_node: NodeProcess) -> None:
    key = b"wandering"
    port = bucket(group_node).open_document(key, None)

    def move(state: VBucketState) -> None:
        with group_node.connect() as connection:
            connection.request(SetVBucket(vbucket=vbucket_of(key, VBUCKETS), state=state))

    async def scenario() -> None:
        assert await port.add(b"{}") is not None
        move(VBucketState.DEAD)
        with pytest.raises(errors.NotMyVBucket) as caught:
            await port.read()
        assert caught.value.retriable
        move(VBucketState.ACTIVE)
        assert await port.read() is not None

    run(closed_after(port, scenario()))


def test_what_is_in_the_way_of_the_document_is_not_taken_for_its_absence(group_node: NodeProcess) -> None:
    unknown = group_bucket(settings_of(f"{group_node.url}/nothing"), vbuckets=VBUCKETS).open_document(b"k", None)
    with pytest.raises(errors.AccessDenied):
        run(closed_after(unknown, unknown.read()))
    wrong = settings_of(f"{group_node.url}/default", password="wrong")
    denied = group_bucket(wrong, vbuckets=VBUCKETS).open_document(b"k", None)
    with pytest.raises(errors.AuthenticationFailed):
        run(closed_after(denied, denied.read()))


# --- a node that goes and comes back ------------------------------------------------------------------------------


async def when(membership: LeaseGroup, known: Assignment, *, count: int) -> Assignment:
    """The first assignment with so many vbuckets."""
    while len(known.vbuckets) != count:
        known = await membership.assignment_changed(known)
    return known


async def test_a_group_goes_on_when_its_node_has_come_back(start_node: StartNode) -> None:
    node = start_node("--vbuckets", str(VBUCKETS), "--port", str(free_port()))
    membership = LeaseGroup("g", "ada", lease_s=LEASE_S, interval_s=INTERVAL_S, margin_s=MARGIN_S)
    async with joined(membership, bucket(node)):
        before = await when(membership, membership.current(), count=VBUCKETS)
        await asyncio.to_thread(node.kill)
        none = await when(membership, before, count=0)
        assert isinstance(membership.last_failure, errors.HostUnreachable)
        await asyncio.to_thread(node.start)
        again = await when(membership, none, count=VBUCKETS)
        assert again.generations == before.generations, "nobody else has had them"

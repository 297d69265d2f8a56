"""Key-value requests in a thread: what is tried again, for how long, and what is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from headwater.client.bucket_kv import BucketKv
from headwater.errors import (
    BucketReplaced,
    ConnectionFailed,
    HostUnreachable,
    KeyExists,
    KeyNotFound,
    NotMyVBucket,
    StatusError,
)
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Add, Get, GetResponse, Set, StoreResponse
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from support.checkpoint_samples import VBUCKETS, run, settings_for
from support.node_process import NodeProcess, StartNode

SHORT_S = 0.3
FAR_TOO_LONG_S = 30.0


def get(key: bytes, vbucket: int = 0) -> Get:
    return Get(vbucket=VBucketId(vbucket), collection_id=DEFAULT_COLLECTION, key=key)


def put(key: bytes, vbucket: int = 0, kind: type[Set] = Set) -> Set:
    return kind(vbucket=VBucketId(vbucket), collection_id=DEFAULT_COLLECTION, key=key, value=b"1")


def ask(kv: BucketKv, *requests: Request) -> list[Response | StatusError]:
    return run(kv.request(requests))


def set_state(node: NodeProcess, vbucket: int, state: VBucketState) -> None:
    with node.connect() as connection:
        connection.request(SetVBucket(vbucket=VBucketId(vbucket), state=state))


@pytest.fixture
def kv(checkpoint_node: NodeProcess) -> Iterator[BucketKv]:
    kv = BucketKv(settings_for(checkpoint_node), retry_s_max=30)
    yield kv
    run(kv.close())


def in_a_while(function: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(SHORT_S, function)
    timer.start()
    return timer


def test_answers_come_in_the_order_of_the_requests(kv: BucketKv) -> None:
    answers = ask(kv, put(b"order"), get(b"order"), get(b"nothing"), put(b"order", kind=Add), get(b"order"))
    assert [type(answer) for answer in answers[1:]] == [GetResponse, KeyNotFound, KeyExists, GetResponse]
    assert ask(kv) == []


def test_the_connection_is_used_again(kv: BucketKv) -> None:
    ask(kv, get(b"nothing"))
    (before,) = kv._connections.values()
    ask(kv, get(b"nothing"))
    assert [*kv._connections.values()] == [before]
    run(kv.close())
    assert before.is_closed
    assert ask(kv, put(b"again"))


def test_a_vbucket_that_moves_is_waited_for(kv: BucketKv, checkpoint_node: NodeProcess) -> None:
    set_state(checkpoint_node, 5, VBucketState.DEAD)
    timer = in_a_while(lambda: set_state(checkpoint_node, 5, VBucketState.ACTIVE))
    (answer,) = ask(kv, put(b"moved", vbucket=5))
    timer.join()
    assert isinstance(answer, Response)


def test_a_vbucket_that_never_comes_is_a_refusal_in_the_end(checkpoint_node: NodeProcess) -> None:
    kv = BucketKv(settings_for(checkpoint_node), retry_s_max=0)
    set_state(checkpoint_node, 6, VBucketState.DEAD)
    answers = ask(kv, put(b"lost", vbucket=6), put(b"found", vbucket=7))
    set_state(checkpoint_node, 6, VBucketState.ACTIVE)
    run(kv.close())
    assert isinstance(answers[0], NotMyVBucket)
    assert isinstance(answers[1], Response)


def test_closing_ends_the_waiting(checkpoint_node: NodeProcess) -> None:
    kv = BucketKv(settings_for(checkpoint_node), retry_s_max=2 * FAR_TOO_LONG_S)

    async def close_early() -> list[Response | StatusError]:
        async with asyncio.timeout(FAR_TOO_LONG_S):
            asking = asyncio.create_task(kv.request([put(b"lost", vbucket=8)]))
            await asyncio.sleep(SHORT_S)
            assert not asking.done()
            await kv.close()
            return await asking

    set_state(checkpoint_node, 8, VBucketState.DEAD)
    (answer,) = run(close_early())
    assert isinstance(answer, NotMyVBucket)
    # It can be used again, and waits again.
    timer = in_a_while(lambda: set_state(checkpoint_node, 8, VBucketState.ACTIVE))
    (answer,) = ask(kv, put(b"found", vbucket=8))
    timer.join()
    run(kv.close())
    assert isinstance(answer, Response)


def test_more_requests_than_are_under_way_at_once(kv: BucketKv) -> None:
    answers = ask(kv, *(put(b"many %d" % number, vbucket=number % VBUCKETS) for number in range(1000)), get(b"nothing"))
    assert len(answers) == 1001
    assert all(isinstance(answer, StoreResponse) for answer in answers[:-1])
    assert isinstance(answers[-1], KeyNotFound)


# --- nodes that come and go ---------------------------------------------------------------------------------------


def on_port(node: NodeProcess) -> tuple[str, ...]:
    """The options to start a node again where its clients look for it."""
    return "--vbuckets", str(VBUCKETS), "--port", str(node.address.port)


def test_a_node_that_was_killed_is_waited_for(start_node: StartNode) -> None:
    node = start_node("--vbuckets", str(VBUCKETS))
    kv = BucketKv(settings_for(node))
    ask(kv, put(b"lasting"))
    node.options = on_port(node)
    node.kill()
    timer = in_a_while(node.start)
    (answer,) = ask(kv, get(b"lasting"))
    timer.join()
    run(kv.close())
    assert isinstance(answer, GetResponse)


def test_a_node_that_does_not_come_back_is_an_error_in_the_end(start_node: StartNode) -> None:
    node = start_node("--vbuckets", str(VBUCKETS))
    kv = BucketKv(settings_for(node), retry_s_max=SHORT_S)
    ask(kv, put(b"lasting"))
    node.kill()
    with pytest.raises(ConnectionFailed) as raised:
        ask(kv, get(b"lasting"))
    assert raised.value.hint
    # Who only begins has most likely got the address wrong, and does not wait.
    with pytest.raises(HostUnreachable):
        run(BucketKv(settings_for(node)).cluster_map())


def test_another_bucket_of_the_same_name(start_node: StartNode) -> None:
    """That is told at once: waiting does not bring the old one back."""
    node = start_node("--vbuckets", str(VBUCKETS))
    kv = BucketKv(settings_for(node), retry_s_max=2 * FAR_TOO_LONG_S)
    ask(kv, put(b"lasting"))
    options = on_port(node)
    node.kill()
    start_node(*options)

    async def ask_in_time() -> None:
        async with asyncio.timeout(FAR_TOO_LONG_S):
            await kv.request([get(b"lasting")])

    with pytest.raises(BucketReplaced):
        run(ask_in_time())
    run(kv.close())


def test_a_node_that_lost_the_vbucket(kv: BucketKv, checkpoint_node: NodeProcess, start_node: StartNode) -> None:
    """It says so, and the newest map tells where the vbucket is now."""
    former = start_node("--vbuckets", str(VBUCKETS))
    set_state(former, 3, VBucketState.DEAD)
    newest = run(kv.cluster_map())
    kv._map = replace(newest, nodes=(former.address,), revision=newest.revision - 1)
    answers = ask(kv, put(b"at home", vbucket=3), get(b"at home", vbucket=3))
    assert [type(answer) for answer in answers] == [StoreResponse, GetResponse]
    assert run(kv.cluster_map()) == newest

"""A checkpoint in the bucket that is read, on a real node."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from headwater import errors
from headwater.client.bucket_kv import BucketKv
from headwater.client.checkpoints import CheckpointStore, xattrs
from headwater.client.cluster_map import ClusterMap
from headwater.client.kv_connection import FEATURES, KvConnection
from headwater.client.offsets import Offsets
from headwater.client.settings import ClientSettings
from headwater.protocol.features import Feature
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Add, Delete, Get, GetResponse, Set, StoreResponse
from headwater.protocol.messages.subdocument import PathFlags, SubdocDelete, SubdocDictUpsert, SubdocGet, SubdocResponse
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.cases import case_apart
from support.checkpoint_samples import VBUCKETS, offset_at, offsets_at, run, settings_for
from support.node_process import PASSWORD, USER, NodeProcess, StartNode


class Checkpoints:
    """Stores of one group on one node, each as a process of its own would have it."""

    def __init__(self, node: NodeProcess, group: str) -> None:
        self.node = node
        self.group = group
        self.uuid = run(BucketKv(settings_for(node)).cluster_map()).uuid

    def new(self, **options: Any) -> xattrs.XattrCheckpoint:
        return xattrs.XattrCheckpoint(BucketKv(settings_for(self.node)), group=self.group, **options)

    def at(self, seqno: int, vbuckets: Iterable[int] = range(VBUCKETS)) -> Offsets:
        return Offsets(self.uuid, {VBucketId(vbucket): offset_at(seqno) for vbucket in vbuckets})

    def saved(self) -> Offsets | None:
        """What any other reader would load."""
        return together(self.new(), lambda store: store.load())

    def key(self, vbucket: int) -> bytes:
        return xattrs.checkpoint_key(self.group, VBucketId(vbucket), VBUCKETS)

    def document(self, vbucket: int) -> dict[str, Any]:
        """What a request needs to be about a vbucket's document."""
        return {"vbucket": VBucketId(vbucket), "collection_id": DEFAULT_COLLECTION, "key": self.key(vbucket)}

    def set_xattr(self, vbucket: int, value: bytes) -> None:
        with self.node.connect() as connection:
            connection.request(
                SubdocDictUpsert(flags=PathFlags.XATTR, path=xattrs.XATTR, new_value=value, **self.document(vbucket))
            )


def together(
    store: xattrs.XattrCheckpoint, *calls: Callable[[xattrs.XattrCheckpoint], Coroutine[Any, Any, Any]]
) -> Any:
    """Call a store several times and close it. Gives what the last call has given."""

    async def call_all() -> Any:
        try:
            for call in calls:
                given = await call(store)
            return given
        finally:
            await store.close()

    return run(call_all())


@pytest.fixture
def checkpoints(checkpoint_node: NodeProcess, request: pytest.FixtureRequest) -> Checkpoints:
    return Checkpoints(checkpoint_node, request.node.name.replace(":", "_").replace(" ", "_")[: xattrs.GROUP_BYTES_MAX])


# --- saving and loading -------------------------------------------------------------------------------------------


def test_what_was_saved_last_is_loaded(checkpoints: Checkpoints) -> None:
    store: CheckpointStore = checkpoints.new()

    async def save_some() -> None:
        assert await store.load() is None
        for seqno in (5, 9, 3):
            await store.save(checkpoints.at(seqno))
        assert await store.load() == checkpoints.at(3)
        await store.close()
        assert await store.load() == checkpoints.at(3)
        await store.close()

    run(save_some())
    assert checkpoints.saved() == checkpoints.at(3)
    assert Checkpoints(checkpoints.node, checkpoints.group + "-2").saved() is None


def test_the_layout_of_a_document(checkpoints: Checkpoints) -> None:
    together(checkpoints.new(), lambda store: store.save(checkpoints.at(7)))
    with checkpoints.node.connect() as connection:
        body = connection.request(Get(**checkpoints.document(5)))
        xattr = connection.request(SubdocGet(flags=PathFlags.XATTR, path=xattrs.XATTR, **checkpoints.document(5)))
    assert isinstance(body, GetResponse)
    assert body.value == b"{}"
    assert isinstance(xattr, SubdocResponse)
    stored = json.loads(xattr.value)
    assert stored.keys() == {"writer", "checkpoint"}
    assert stored["checkpoint"] == json.loads(checkpoints.at(7, [5]).to_json())
    assert checkpoints.key(5).startswith(xattrs.KEY_PREFIX)


def test_members_of_a_group_save_their_own_vbuckets(checkpoints: Checkpoints) -> None:
    even, odd = range(0, VBUCKETS, 2), range(1, VBUCKETS, 2)
    first, second = checkpoints.new(), checkpoints.new()

    async def save_in_turns() -> None:
        for store in (first, second):
            assert await store.load() is None
        for seqno in range(1, 6):
            await first.save(checkpoints.at(seqno, even))
            await second.save(checkpoints.at(seqno * 10, odd))
        assert await first.load(map(VBucketId, odd)) == checkpoints.at(50, odd)
        for store in (first, second):
            await store.close()

    run(save_in_turns())
    assert checkpoints.saved() == checkpoints.at(5, even).updated(checkpoints.at(50, odd).offsets)


def test_some_vbuckets_can_be_loaded(checkpoints: Checkpoints) -> None:
    together(checkpoints.new(), lambda store: store.save(checkpoints.at(7, [1, 2, 3])))
    assert together(checkpoints.new(), lambda store: store.load([VBucketId(2), VBucketId(9)])) == checkpoints.at(7, [2])
    assert together(checkpoints.new(), lambda store: store.load([VBucketId(9)])) is None


@pytest.mark.parametrize("group", ["", "a b", "a:b", "a\0", "\ud800", "x" * (xattrs.GROUP_BYTES_MAX + 1)])
def test_groups_that_have_no_name(checkpoints: Checkpoints, group: str) -> None:
    checkpoints.group = group
    with pytest.raises(errors.InvalidInput) as raised:
        checkpoints.new()
    assert raised.value.hint


def test_a_vbucket_that_the_bucket_does_not_have(checkpoints: Checkpoints) -> None:
    with pytest.raises(errors.InvalidOffsets, match=f"there is no vbucket {VBUCKETS}"):
        together(checkpoints.new(), lambda store: store.save(checkpoints.at(7, [VBUCKETS])))
    with pytest.raises(errors.CheckpointOfOtherBucket):
        together(checkpoints.new(), lambda store: store.save(offsets_at(7)))
    assert checkpoints.saved() is None


# --- what is written, and what is not -----------------------------------------------------------------------------


class CountingKv(BucketKv):
    """Counts the writes, and loses the answers to some of them after the node has carried them out."""

    def __init__(self, settings: ClientSettings, *, lost: int = 0) -> None:
        super().__init__(settings)
        self.written: list[int] = []
        self.lost = lost

    async def request(self, requests: Sequence[Request]) -> list[Response | errors.StatusError]:
        answers = await super().request(requests)
        writes = [request.vbucket for request in requests if isinstance(request, SubdocDictUpsert)]
        self.written += writes
        if writes and self.lost:
            self.lost -= 1
            raise errors.ConnectionFailed("the answer is lost", hint="Try again")
        return answers


def test_only_what_has_moved_is_written(checkpoints: Checkpoints) -> None:
    kv = CountingKv(settings_for(checkpoints.node))
    store = xattrs.XattrCheckpoint(kv, group=checkpoints.group)
    moved = checkpoints.at(5).updated({VBucketId(3): offset_at(6)})
    unread = checkpoints.at(5, range(1, VBUCKETS)).updated({VBucketId(0): StreamOffset()})

    async def save_some() -> None:
        await store.save(unread)
        assert kv.written == list(range(1, VBUCKETS))
        await store.save(unread)
        assert len(kv.written) == VBUCKETS - 1
        kv.written.clear()
        await store.save(moved)
        assert kv.written == [0, 3]
        await store.load()
        await store.save(moved)
        assert kv.written == [0, 3]
        await store.close()

    run(save_some())
    assert checkpoints.saved() == moved


class Reader:
    """Reads a bucket as far as it goes, without looking at what it gets."""

    def __init__(self, node: NodeProcess, uuid: str) -> None:
        self.node = node
        self.uuid = uuid
        self.vbuuids: dict[VBucketId, Any] = {}

    def write(self, connection: KvConnection, vbucket: int) -> None:
        """A change by somebody else."""
        answer = connection.request(
            Set(vbucket=VBucketId(vbucket), collection_id=DEFAULT_COLLECTION, key=b"key", value=b"1")
        )
        self.vbuuids[VBucketId(vbucket)] = answer.vbuuid

    def offsets(self, connection: KvConnection) -> Offsets:
        answer = connection.request(GetAllVbSeqnos())
        return Offsets(
            self.uuid,
            {
                vbucket: offset_at(seqno, vbuuid=self.vbuuids[vbucket])
                for vbucket, seqno in ((entry.vbucket, entry.seqno) for entry in answer.seqnos)
                if vbucket in self.vbuuids
            },
        )


def test_a_bucket_that_nobody_writes_to_comes_to_rest(checkpoints: Checkpoints) -> None:
    """Every save is a change that the reader gets. If it were saved again, that would never end."""
    kv = CountingKv(settings_for(checkpoints.node))
    store = xattrs.XattrCheckpoint(kv, group=checkpoints.group)
    reader = Reader(checkpoints.node, checkpoints.uuid)
    login = settings_for(checkpoints.node, features=(*FEATURES, Feature.MUTATION_SEQNO)).login()

    async def save_and_rest() -> None:
        with KvConnection.open(checkpoints.node.address, login) as connection:
            for vbucket in range(VBUCKETS):
                reader.write(connection, vbucket)
            await store.save(reader.offsets(connection))
            assert len(kv.written) == VBUCKETS
            for _ in range(3):
                await store.save(reader.offsets(connection))
            assert len(kv.written) == VBUCKETS
            # Somebody else's change is saved, and so are two that came before our own was seen.
            reader.write(connection, 4)
            await store.save(reader.offsets(connection))
            reader.write(connection, 5)
            reader.write(connection, 5)
            await store.save(reader.offsets(connection))
            assert kv.written[VBUCKETS:] == [4, 5]
            last = reader.offsets(connection)
            await store.save(last)
            assert kv.written[VBUCKETS:] == [4, 5]
        await store.close()

    run(save_and_rest())


@pytest.mark.parametrize("is_save_seen", [False, True])
def test_a_change_between_the_offset_and_our_own_save_is_saved(checkpoints: Checkpoints, is_save_seen: bool) -> None:
    """Whether the reader comes to that change alone, or by now to the save as well."""
    kv = CountingKv(settings_for(checkpoints.node))
    store = xattrs.XattrCheckpoint(kv, group=checkpoints.group)
    reader = Reader(checkpoints.node, checkpoints.uuid)
    login = settings_for(checkpoints.node, features=(*FEATURES, Feature.MUTATION_SEQNO)).login()

    async def save_late() -> None:
        with KvConnection.open(checkpoints.node.address, login) as connection:
            reader.write(connection, 2)
            before = reader.offsets(connection)
            reader.write(connection, 2)
            between = reader.offsets(connection)
            await store.save(before)
            await store.save(reader.offsets(connection) if is_save_seen else between)
            assert kv.written == [2, 2]
        await store.close()

    run(save_late())


# --- two readers --------------------------------------------------------------------------------------------------


def test_the_second_to_save_is_refused(checkpoints: Checkpoints) -> None:
    first, second = checkpoints.new(), checkpoints.new()

    async def save_both() -> None:
        for store in (first, second):
            assert await store.load() is None
        await first.save(checkpoints.at(6))
        with pytest.raises(errors.CheckpointInUse) as raised:
            await second.save(checkpoints.at(7))
        assert raised.value.hint
        await second.load()  # and one that has looked before a save of its owner, too
        await first.save(checkpoints.at(8))
        with pytest.raises(errors.CheckpointInUse):
            await second.save(checkpoints.at(9))
        for store in (first, second):
            await store.close()

    run(save_both())
    assert checkpoints.saved() == checkpoints.at(8)


def test_a_reader_that_another_has_taken_over_from_is_refused(checkpoints: Checkpoints) -> None:
    old, new = checkpoints.new(), checkpoints.new()

    async def take_over() -> None:
        await old.save(checkpoints.at(5))
        assert await new.load() == checkpoints.at(5)
        await new.save(checkpoints.at(6, [3]))
        with pytest.raises(errors.CheckpointInUse, match="vbucket 3"):
            await old.save(checkpoints.at(7))
        assert await old.load([VBucketId(3)]) == checkpoints.at(6, [3])
        await old.save(checkpoints.at(8, [3]))
        for store in (old, new):
            await store.close()

    run(take_over())


# --- changes that are no other reader's ---------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, 5], ids=["the first save", "a later save"])
def test_a_save_whose_answer_was_lost(checkpoints: Checkpoints, before: int | None) -> None:
    kv = CountingKv(settings_for(checkpoints.node))
    store = xattrs.XattrCheckpoint(kv, group=checkpoints.group)

    async def lose_an_answer() -> None:
        if before is not None:
            await store.save(checkpoints.at(before))
        kv.lost = 1
        with pytest.raises(errors.CheckpointFailed, match="the answer is lost"):
            await store.save(checkpoints.at(6))
        await store.save(checkpoints.at(7))
        await store.close()

    run(lose_an_answer())
    assert checkpoints.saved() == checkpoints.at(7)


def test_a_document_that_was_deleted_or_changed_in_another_part(checkpoints: Checkpoints) -> None:
    store = checkpoints.new()
    touch = SubdocDictUpsert(path=b"note", new_value=b'"mine"', **checkpoints.document(3))

    async def meddle() -> None:
        with checkpoints.node.connect() as connection:
            for seqno, request in ((5, Delete(**checkpoints.document(3))), (6, touch)):
                await store.save(checkpoints.at(seqno))
                connection.request(request)
            await store.save(checkpoints.at(7))
            await store.close()
            # Also where it was another process that saved it.
            await store.load()
            connection.request(touch)
            await store.save(checkpoints.at(8))
        await store.close()

    run(meddle())
    assert checkpoints.saved() == checkpoints.at(8)


def test_a_document_that_never_stays_the_same(checkpoints: Checkpoints) -> None:
    """Each time it is looked at again it has changed once more. That ends, too."""

    class Meddling(CountingKv):
        async def request(self, requests: Sequence[Request]) -> list[Response | errors.StatusError]:
            if any(isinstance(request, SubdocDictUpsert) for request in requests):
                with checkpoints.node.connect() as connection:
                    connection.request(SubdocDictUpsert(path=b"note", new_value=b"1", **checkpoints.document(3)))
            return await super().request(requests)

    together(checkpoints.new(), lambda store: store.save(checkpoints.at(5)))
    kv = Meddling(settings_for(checkpoints.node))
    with pytest.raises(errors.CheckpointInUse, match="vbucket 3"):
        together(xattrs.XattrCheckpoint(kv, group=checkpoints.group), lambda store: store.save(checkpoints.at(6)))
    assert kv.written[VBUCKETS:] == [3] * (xattrs.ATTEMPTS_MAX - 1)
    assert checkpoints.saved() == checkpoints.at(6).updated({VBucketId(3): offset_at(5)})


# --- damage -------------------------------------------------------------------------------------------------------


@case_apart(b"1")
@case_apart(b"{}")
@case_apart(b'{"writer":"x"}')
@case_apart(b'{"writer":"x","checkpoint":{}}')
@case_apart(b'{"writer":"x","checkpoint":"\xc3\xa9"}')
@case_apart(b"[]")
def test_a_damaged_document_is_an_error(checkpoints: Checkpoints, value: bytes) -> None:
    together(checkpoints.new(), lambda store: store.save(checkpoints.at(5)))
    checkpoints.set_xattr(3, value)
    for call in (lambda store: store.load(), lambda store: store.save(checkpoints.at(6))):
        with pytest.raises(errors.CheckpointFailed) as raised:
            together(checkpoints.new(), call)
        assert f"the checkpoint in document {checkpoints.key(3).decode()!r} is damaged" in raised.value.reason
        assert "delete the document" in raised.value.hint


def test_a_document_without_the_attribute_is_an_error(checkpoints: Checkpoints) -> None:
    together(checkpoints.new(), lambda store: store.save(checkpoints.at(5)))
    with checkpoints.node.connect() as connection:
        connection.request(SubdocDelete(flags=PathFlags.XATTR, path=xattrs.XATTR, **checkpoints.document(3)))
    with pytest.raises(errors.CheckpointFailed, match="the attribute is missing"):
        checkpoints.saved()


def test_a_document_of_another_place_or_version_is_an_error(checkpoints: Checkpoints) -> None:
    together(checkpoints.new(), lambda store: store.save(checkpoints.at(5)))
    # By a backup, say, or by replication between clusters.
    other_bucket = Offsets("another", checkpoints.at(5, [3]).offsets)
    for text, kind, words in (
        (checkpoints.at(5, [4]).to_json(), errors.CheckpointFailed, "of another vbucket"),
        (other_bucket.to_json(), errors.CheckpointOfOtherBucket, "another"),
        ('{"version":2}', errors.CheckpointFailed, "version 2.*newer"),
    ):
        checkpoints.set_xattr(3, b'{"writer":"x","checkpoint":%s}' % text.encode())
        with pytest.raises(kind, match=words):
            checkpoints.saved()


# --- collections --------------------------------------------------------------------------------------------------


def test_a_collection_of_its_own(checkpoints: Checkpoints) -> None:
    url = f"{checkpoints.node.http_url}/pools/default/buckets/default/scopes/_default/collections"
    httpx.post(url, data={"name": "checkpoints"}, auth=(USER, PASSWORD)).raise_for_status()
    save, load = (lambda store: store.save(checkpoints.at(5))), (lambda store: store.load())
    together(checkpoints.new(collection="_default.checkpoints"), save)
    assert checkpoints.saved() is None
    assert together(checkpoints.new(collection="_default.checkpoints"), load) == checkpoints.at(5)
    with pytest.raises(errors.CheckpointFailed, match="can't be reached") as raised:
        together(checkpoints.new(collection="_default.nowhere"), load)
    assert raised.value.hint


def test_a_port_that_knows_no_collections(checkpoints: Checkpoints) -> None:
    old = tuple(feature for feature in FEATURES if feature is not Feature.COLLECTIONS)
    kv = BucketKv(settings_for(checkpoints.node, features=old))
    store = xattrs.XattrCheckpoint(kv, group=checkpoints.group)
    together(store, lambda store: store.save(checkpoints.at(5)))
    assert checkpoints.saved() == checkpoints.at(5)
    with pytest.raises(errors.CheckpointFailed, match="no collections"):
        together(xattrs.XattrCheckpoint(kv, group="g", collection="_default.some"), lambda store: store.load())


def test_the_default_collection_has_its_id(checkpoints: Checkpoints) -> None:
    kv = BucketKv(settings_for(checkpoints.node))

    async def ask() -> tuple[CollectionId | None, CollectionId | None, ClusterMap]:
        return await kv.collection_id(None), await kv.collection_id("_default._default"), await kv.cluster_map()

    unnamed, named, cluster_map = run(ask())
    run(kv.close())
    assert unnamed == named == DEFAULT_COLLECTION
    assert cluster_map.vbuckets == VBUCKETS


# --- key-value requests in a thread: what is tried again, for how long, and what is not -----------------------------


SHORT_S = 0.3
FAR_TOO_LONG_S = 30.0


def get(key: bytes, vbucket: int = 0) -> Get:
    return Get(vbucket=VBucketId(vbucket), collection_id=DEFAULT_COLLECTION, key=key)


def put(key: bytes, vbucket: int = 0, kind: type[Set] = Set) -> Set:
    return kind(vbucket=VBucketId(vbucket), collection_id=DEFAULT_COLLECTION, key=key, value=b"1")


def ask(kv: BucketKv, *requests: Request) -> list[Response | errors.StatusError]:
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
    assert [type(answer) for answer in answers[1:]] == [GetResponse, errors.KeyNotFound, errors.KeyExists, GetResponse]
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
    assert isinstance(answers[0], errors.NotMyVBucket)
    assert isinstance(answers[1], Response)


def test_closing_ends_the_waiting(checkpoint_node: NodeProcess) -> None:
    kv = BucketKv(settings_for(checkpoint_node), retry_s_max=2 * FAR_TOO_LONG_S)

    async def close_early() -> list[Response | errors.StatusError]:
        async with asyncio.timeout(FAR_TOO_LONG_S):
            asking = asyncio.create_task(kv.request([put(b"lost", vbucket=8)]))
            await asyncio.sleep(SHORT_S)
            assert not asking.done()
            await kv.close()
            return await asking

    set_state(checkpoint_node, 8, VBucketState.DEAD)
    (answer,) = run(close_early())
    assert isinstance(answer, errors.NotMyVBucket)
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
    assert isinstance(answers[-1], errors.KeyNotFound)


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
    with pytest.raises(errors.ConnectionFailed) as raised:
        ask(kv, get(b"lasting"))
    assert raised.value.hint
    # Who only begins has most likely got the address wrong, and does not wait.
    with pytest.raises(errors.HostUnreachable):
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

    with pytest.raises(errors.BucketReplaced):
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

"""The kernels for runs of requests answer as the handlers do, whatever is mixed, pending, locked, expired or deleted.

Two nodes with the same history under one clock get the same bytes. The sessions of one hand runs to the kernels
(`store.set_run`, `store.read_run`), those of the other handle message by message. Both must answer with the same bytes,
which wait for the same commit, and end with the same index.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.node.kv.answers import Outgoing
from headwater.node.kv.session import KvSession
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import (
    Append,
    Delete,
    Get,
    GetLocked,
    GetQuiet,
    GetResponse,
    GetWithKey,
    GetWithKeyQuiet,
    Set,
    SetQuiet,
    Touch,
)
from headwater.protocol.messages.subdocument import (
    DocFlags,
    LookupSpec,
    MultiLookup,
    MultiLookupResponse,
    PathFlags,
    SubdocDictUpsert,
    SubdocExists,
    SubdocGet,
    SubdocResponse,
)
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, compress
from headwater.store.settling import settle_now
from support.kv_harness import FEATURES, Client, Node

KEYS = [b"a", b"b", b"c", b"d" * 250]
FRUIT, UNKNOWN = CollectionId(8), CollectionId(9)
VALUES = [b"", b"{}", b'{"name": "pear", "n": [1, 2, {"deep": null}]}', b"not json", b"x" * 5000, b"[1,2]",
          b' { "n" : [ 1 , { "a b" : " c " } , { "deep" : [ ] } ] ,"twice":1,"twice":{"a":"\\"]}"} , "empty":[]}\t',
          b'{"n": {}, "esc\\/aped": 1, "\xc3\xa9": 2}', b"[" * 40 + b"]" * 40, b"[" * 31 + b"1" + b"]" * 31,
          b"7", b'"n"', b'[{"name":true},{"name":-1.5e3}, null ]']  # fmt: skip
GETS = [Get, Get, GetQuiet, GetWithKey, GetWithKeyQuiet]
LOOKUPS = [SubdocGet, SubdocExists, MultiLookup]
PATHS = [
    b"name", b"n", b"n[0]", b"n[-1]", b"n[2].deep", b"n[2]", b"n[3]", b"[1]", b"[-1]", b"name.x", b"n.x", b"",
    b"`name`", b"n[", b"n[]", b"n[1]x", b".n", b"n.", b"n..x", b"twice", b"twice.a", b"esc\\/aped", b"\xc3\xa9",
    b"a" * 1025, b"n]", b"a.b.c" * 12, b"n[99999999999]", b"n[01]", b'"', b"empty[0]", b"empty[-1]", b"none.a",
]  # fmt: skip
paths = st.one_of(st.sampled_from(PATHS), st.binary(max_size=8))
specs = st.builds(
    LookupSpec,
    opcode=st.sampled_from([Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT, Opcode.GET]),
    flags=st.sampled_from([PathFlags(0), PathFlags(0), PathFlags(0), PathFlags.XATTR]),
    path=paths,
)


class Pair:
    """Two nodes, of which the second answers message by message."""

    def __init__(self, folder: Path, features: tuple[Feature, ...], *, ack_when_durable: bool) -> None:
        self.nodes = [
            Node(folder / name, vbuckets=4, ack_when_durable=ack_when_durable) for name in ("kernels", "handlers")
        ]
        for node in self.nodes:
            node.set_manifest(Manifest().with_collection("_default", "fruit", max_ttl_s=30))
            node.bucket.set_vbucket_state(2, VBucketState.REPLICA)
            node.commit()
        plain = tuple(feature for feature in features if feature is not Feature.SNAPPY)
        self._clients = [[node.client(features=which) for node in self.nodes] for which in (features, plain)]
        for _, by_message in self._clients:
            by_message.session._handle_run = lambda: False

    def send(self, data: bytes, *, without_snappy: bool = False) -> None:
        clients = self._clients[without_snappy]
        for client in clients:
            client.send(data)
        ours, theirs = (_unsent(client) for client in clients)
        assert ours == theirs
        assert clients[0].session.requests == clients[1].session.requests

    def each(self, step: str) -> None:
        for node in self.nodes:
            bucket = node.bucket
            if step == "second":
                node.clock.advance(1)
            elif step == "seal":
                bucket.seal()
            elif step == "publish" and bucket.in_flight is not None:
                bucket.persist(bucket.in_flight)
                bucket.publish(bucket.in_flight)
            elif step == "commit":
                bucket.commit_now()
            elif step == "settle" and bucket.in_flight is None:
                bucket.commit_now()
                settle_now(bucket)

    def check_index(self) -> None:
        ours, theirs = (node.bucket for node in self.nodes)
        for vbucket in range(4):
            for collection in (DEFAULT_COLLECTION, FRUIT):
                for key in KEYS:
                    assert ours.find(vbucket, collection, key) == theirs.find(vbucket, collection, key)


def _unsent(client: Client) -> tuple[bytes, int]:
    pieces = list(client.session.outgoing)
    client.session.outgoing.clear()
    waits_for = [piece.commit for piece in pieces if isinstance(piece, Outgoing) and not piece.may_be_sent]
    return b"".join(piece.data for piece in pieces), max(waits_for, default=0)


@contextmanager
def pair(features: tuple[Feature, ...], *, ack_when_durable: bool = True) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(
            Path(stack.enter_context(tempfile.TemporaryDirectory())), features, ack_when_durable=ack_when_durable
        )
        for node in made.nodes:
            stack.callback(node.close)
        yield made


# --- requests -----------------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn, *, collections: bool) -> bytes:
    kind = draw(
        st.sampled_from(
            [*GETS, *LOOKUPS, *LOOKUPS, Set, Set, SetQuiet, Delete, GetLocked, Append, Touch, SubdocDictUpsert]
        )
    )
    fields: dict[str, object] = {
        "vbucket": VBucketId(draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3, 7]))),
        "opaque": draw(st.integers(0, 2**32 - 1)),
        "key": draw(st.sampled_from(KEYS)),
    }
    if collections:
        fields["collection_id"] = draw(st.sampled_from([DEFAULT_COLLECTION, DEFAULT_COLLECTION, FRUIT, UNKNOWN]))
    if kind in (Set, SetQuiet):
        datatype = draw(st.sampled_from([0, 0, 1, 2, 3]))
        value = draw(st.sampled_from(VALUES))
        if datatype & Datatype.SNAPPY:
            value = draw(st.sampled_from([compress(value), compress(value), value, compress(value)[:-1], b"\x80" * 9]))
        fields |= {"value": value, "datatype": Datatype(datatype), "flags": draw(st.integers(0, 2**32 - 1))}
        fields["expiry"] = draw(st.sampled_from([0, 0, 1, 2]))
    elif kind is Append:
        fields["value"] = draw(st.sampled_from([b"", b"more"]))
    elif kind is Touch:
        fields["expiry"] = draw(st.sampled_from([0, 1]))
    elif kind is SubdocDictUpsert:
        fields |= {"path": b"mark", "new_value": b"1", "flags": PathFlags.XATTR, "doc_flags": DocFlags.MKDOC}
    elif kind is MultiLookup:
        fields["specs"] = tuple(draw(st.lists(specs, min_size=1, max_size=4)))
    elif kind in LOOKUPS:
        fields |= {"path": draw(paths), "flags": draw(st.sampled_from([PathFlags(0), PathFlags(0), PathFlags.XATTR]))}
    if kind in (*GETS, *LOOKUPS) and draw(st.integers(0, 9)) == 0:
        fields |= draw(st.sampled_from([{"datatype": Datatype.JSON}, {"cas": 5}, {"datatype": Datatype(0x80)}]))
    request = kind(**fields)
    return request.encode()


STEPS = ["second", "seal", "publish", "commit", "settle"]


@st.composite
def stories(draw: st.DrawFn, *, collections: bool) -> list[bytes | str]:
    several = st.lists(requests(collections=collections), min_size=1, max_size=12).map(b"".join)
    return draw(st.lists(st.one_of(several, several, st.sampled_from(STEPS)), max_size=14))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), collections=st.booleans(), json=st.booleans(), ack_when_durable=st.booleans())
def test_runs_are_answered_alike(data: st.DataObject, collections: bool, json: bool, ack_when_durable: bool) -> None:
    features = tuple(feature for feature in FEATURES if json or feature is not Feature.JSON)
    if collections:
        features += (Feature.COLLECTIONS,)
    with pair(features, ack_when_durable=ack_when_durable) as both:
        for step in data.draw(stories(collections=collections)):
            if isinstance(step, str):
                both.each(step)
            else:
                both.send(step, without_snappy=data.draw(st.booleans()))
        both.each("commit")
        gets = b"".join(Get(vbucket=VBucketId(0), key=key, **_in_default(collections)).encode() for key in KEYS)
        both.send(gets)
        both.send(gets, without_snappy=True)
        both.check_index()


def _in_default(collections: bool) -> dict[str, CollectionId]:
    return {"collection_id": DEFAULT_COLLECTION} if collections else {}


# --- what is served by the kernel, and what it needs ----------------------------------------------------------------


@pytest.mark.parametrize("where", ["pending", "in flight", "young", "in a block"])
def test_a_get_needs_no_handler(where: str) -> None:
    """Wherever the document lies: a get that went to the handlers would be right as well, and slow."""
    with pair(FEATURES) as both:
        both.send(b"".join(Set(key=b"k%d" % number, value=b"v" * 900).encode() for number in range(30)))
        for step in {"pending": [], "in flight": ["seal"], "young": ["commit"], "in a block": ["settle"]}[where]:
            both.each(step)
        client = both.nodes[0].client()
        with patch.object(KvSession, "_handle", side_effect=AssertionError("a handler was called")):
            client.session.receive_data(b"".join(Get(key=b"k%d" % number).encode() for number in [*range(30), 99]))
        answers, _ = _unsent(client)
        assert len(answers) == 30 * (24 + 4 + 900) + 24


@pytest.mark.parametrize("datatype", [Datatype.RAW, Datatype.SNAPPY])
def test_a_look_up_needs_no_handler(datatype: Datatype) -> None:
    value = b'{"a": {"b": [1, "x y"]}}'
    with pair(FEATURES) as both:
        both.send(Set(key=b"k", value=compress(value) if datatype else value, datatype=datatype).encode())
        both.each("settle")
        client = both.nodes[0].client()
        specs = (LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"a"), LookupSpec(opcode=Opcode.SUBDOC_EXISTS, path=b"z"))
        requests = [
            SubdocGet(key=b"k", path=b"a.b[-1]"),
            SubdocExists(key=b"k", path=b"a.b[0]"),
            MultiLookup(key=b"k", specs=specs),
        ]
        with patch.object(KvSession, "_handle", side_effect=AssertionError("a handler was called")):
            client.session.receive_data(b"".join(request.encode() for request in requests))
        one, exists, many = client.received()
        assert isinstance(one, SubdocResponse)
        assert isinstance(many, MultiLookupResponse)
        assert (one.value, exists.status, many.status) == (b'"x y"', Status.SUCCESS, Status.SUBDOC_MULTI_PATH_FAILURE)
        assert [found.value for found in many.results] == [b'{"b":[1,"x y"]}', b""]


def test_what_was_set_compressed_is_stored_and_sent_compressed() -> None:
    value = b'{"name": "pear", "pad": "%s"}' % (b"x" * 400)
    packed = compress(value)
    with pair(FEATURES) as both:
        client, plain = both.nodes[0].client(), both.nodes[0].client(features=(Feature.XERROR, Feature.JSON))
        with patch.object(KvSession, "_handle", side_effect=AssertionError("a handler was called")):
            client.session.receive_data(Set(key=b"k", value=packed, datatype=Datatype.SNAPPY).encode())
            client.session.receive_data(Get(key=b"k").encode())
            plain.session.receive_data(Get(key=b"k").encode())
        both.nodes[0].commit()
        _, got = client.received()
        (inflated,) = plain.received()
        assert isinstance(got, GetResponse)
        assert isinstance(inflated, GetResponse)
        assert (got.value, got.datatype) == (packed, Datatype.JSON | Datatype.SNAPPY)
        assert (inflated.value, inflated.datatype) == (value, Datatype.JSON)


def test_answers_longer_than_the_kernel_keeps_room_for() -> None:
    with pair(FEATURES) as both:
        for request in (Set(key=b"small", value=b"1"), Set(key=b"large", value=b"z" * 3_000_000)):
            both.send(request.encode())
            both.each("settle")
        both.send((Get(key=b"small").encode() + Get(key=b"large").encode()) * 3)


def test_blocks_that_are_written_again_are_read_where_they_are_then() -> None:
    """Settling merges small blocks into larger ones, and the old pages are used for other rows."""
    with pair(FEATURES) as both:
        for turn in range(8):
            both.send(b"".join(Set(key=b"%d" % number, value=b"%d" % turn * 500).encode() for number in range(50)))
            both.each("settle")
            both.send(b"".join(Get(key=b"%d" % number).encode() for number in range(50)))

"""The set kernel does what the same sets do one by one: frames, index, numbers and answers, and it stops where it must.

The oracle decodes each request with the typed codec, stores it through `Bucket.put_mutation` and answers with a typed
`StoreResponse`. Both work on buckets that were made alike, under one clock that stands still.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.errors import HeadwaterError
from headwater.node.kv.documents import expiry_time
from headwater.node.kv.subdocument.json_text import is_json
from headwater.protocol import numbers
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Magic, Opcode
from headwater.protocol.frames import HEADER_BYTES, decode_frame, decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Add, Get, Set, SetQuiet, StoreResponse
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.compaction import is_expired
from headwater.store.set_run import SetRun, apply_set_run
from support.cases import each
from support.store_harness import Clock, new_bucket

NOW_NS = 1_800_000_000_123_456_789
KEYS = [b"a", b"b", b"key-3", b"x" * numbers.KEY_BYTES_MAX, b"locked", b"xattrs", b"deleted", b"tombstone", b"live"]
FRUIT, WIDE, UNKNOWN = numbers.CollectionId(8), numbers.CollectionId(300), numbers.CollectionId(9)
FRUIT_TTL_S = 100
_HEADER = struct.Struct(">BBHBBHIIQ")


def manifest(*, default: bool) -> Manifest:
    made = Manifest().with_collection("_default", "fruit", max_ttl_s=FRUIT_TTL_S)
    made = replace(made, ids_used=WIDE - 1).with_collection("_default", "wide")
    return made if default else made.without_collection("_default", "_default")


def made(now_ns: int, *, default: bool = True) -> Bucket:
    """Vbuckets 0 and 1 are active, 2 is a replica, 3 is not there. The others hold something under the last keys."""
    clock = Clock()
    clock.ns = now_ns
    bucket = new_bucket(clock=clock, state=None)
    bucket.set_manifest(manifest(default=default))
    for vbucket in (0, 1, 2):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
        for collection in (numbers.DEFAULT_COLLECTION, FRUIT):
            place = {"collection_id": collection}
            for key, datatype in ((b"locked", 0), (b"xattrs", Datatype.XATTR), (b"deleted", 0), (b"live", 0)):
                value = bytes(4) if datatype else b"old"
                bucket.put_mutation(vbucket, **place, key=key, value=value, datatype=Datatype(datatype))
            entry = bucket.find(vbucket, collection, b"locked")
            assert entry is not None
            bucket.set_locked(vbucket, collection, b"locked", entry, locked=True)
            bucket.put_removal(vbucket, **place, key=b"deleted")
            bucket.put_removal(vbucket, **place, key=b"tombstone", value=bytes(4), datatype=Datatype.XATTR)
    bucket.commit_now()
    bucket.set_vbucket_state(2, VBucketState.REPLICA)
    bucket.commit_now()
    return bucket


# --- the oracle ---------------------------------------------------------------------------------------------------


def is_for_the_kernel(bucket: Bucket, request: Request) -> bool:
    if not isinstance(request, Set) or request.opcode not in (Opcode.SET, Opcode.SETQ):
        return False
    collection_id = numbers.DEFAULT_COLLECTION if request.collection_id is None else request.collection_id
    if request.cas or request.datatype not in (Datatype.RAW, Datatype.JSON) or request.frame_infos:
        return False
    if bucket.vbuckets.state(request.vbucket) != VBucketState.ACTIVE:
        return False
    if len(request.key) > numbers.KEY_BYTES_MAX or bucket.manifest.collection_by_id(collection_id) is None:
        return False
    entry = bucket.find(request.vbucket, collection_id, request.key)
    if entry is None:
        return True
    return not (entry.is_locked or entry.has_xattrs or is_expired(entry, bucket.environment.now_s()))


def one_by_one(bucket: Bucket, data: bytes, *, collections: bool, mutation_tokens: bool, now_ns: int) -> SetRun:
    at = sets = 0
    responses = b""
    while True:
        try:
            decoded = decode_frame(data, at)
            if decoded is None:
                break
            request = decode_message(decoded[0], WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED)
        except HeadwaterError:
            break
        if not isinstance(request, Set) or not is_for_the_kernel(bucket, request):
            break
        if decoded[0].magic != Magic.REQUEST:
            break  # Flexible framing is the handlers', even where it says nothing.
        collection_id = numbers.DEFAULT_COLLECTION if request.collection_id is None else request.collection_id
        found = bucket.manifest.collection_by_id(collection_id)
        value, datatype = request.value, Datatype.JSON if is_json(request.value) else Datatype.RAW
        written = bucket.put_mutation(
            request.vbucket, collection_id=collection_id, key=request.key, value=value, datatype=datatype,
            flags=request.flags,
            expiry=expiry_time(request.expiry, now_s=now_ns // 10**9, max_ttl_s=found[1].max_ttl_s),
        )  # fmt: skip
        if request.opcode == Opcode.SET:
            token = {"vbuuid": numbers.Vbuuid(int(bucket.vbuckets.vbuuids[request.vbucket])), "seqno": written.seqno}
            responses += StoreResponse(
                opcode=Opcode.SET, opaque=request.opaque, cas=written.cas, **(token if mutation_tokens else {})
            ).encode()
        sets += 1
        at = decoded[1]
    return SetRun(consumed_bytes=at, sets=sets, responses=responses)


def check_equal(one: Bucket, other: Bucket) -> None:
    for name in ("high_seqnos", "max_cas", "deleted_revs", "superseded", "vbuuids", "durable_seqnos"):
        assert getattr(one.vbuckets, name).tolist() == getattr(other.vbuckets, name).tolist(), name
    for vbucket in range(4):
        assert one.index.tables[vbucket, 2] == other.index.tables[vbucket, 2]
        for collection in (numbers.DEFAULT_COLLECTION, FRUIT, WIDE, UNKNOWN):
            for key in KEYS:
                assert one.find(vbucket, collection, key) == other.find(vbucket, collection, key)
    sealed, expected = one.pending.seal(), other.pending.seal()
    assert sealed.group_starts.tolist() == expected.group_starts.tolist()
    assert sealed.data.tobytes() == expected.data.tobytes()


# --- requests -----------------------------------------------------------------------------------------------------

values = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([b"", b"{}", b'{"a": [1, 2.5, null]}', b'"text"', b"{", b"nul", b"\xff\xfe", b" 1 ", b"x" * 3000]),
)
expiries = st.one_of(
    st.sampled_from(
        [0, 1, FRUIT_TTL_S - 1, FRUIT_TTL_S, FRUIT_TTL_S + 1,
         numbers.RELATIVE_EXPIRY_S_MAX, numbers.RELATIVE_EXPIRY_S_MAX + 1,
         NOW_NS // 10**9 - 5, NOW_NS // 10**9 + 5, 2**31, 2**32 - 1]
    ),
    st.integers(0, 2**32 - 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Client:
    """What was negotiated."""

    collections: bool
    mutation_tokens: bool


clients = st.builds(Client, collections=st.booleans(), mutation_tokens=st.booleans())


@st.composite
def plain_sets(draw: st.DrawFn, *, collections: bool, odd: bool = False) -> bytes:
    kind = draw(st.sampled_from([Set, Set, SetQuiet]))
    request = kind(
        vbucket=numbers.VBucketId(draw(st.sampled_from([0, 0, 0, 1]))),
        opaque=draw(st.integers(0, 2**32 - 1)),
        flags=draw(st.integers(0, 2**32 - 1)),
        expiry=draw(expiries),
        datatype=draw(st.sampled_from([Datatype.RAW, Datatype.JSON])),
        key=draw(st.sampled_from([*KEYS[:4], b"deleted", b"live"])),
        value=draw(values),
        collection_id=draw(st.sampled_from([numbers.DEFAULT_COLLECTION, FRUIT, WIDE])) if collections else None,
    )
    return (draw(_made_odd(request)) if odd else request).encode()


@st.composite
def _made_odd(draw: st.DrawFn, request: Set) -> Request:
    """Something that the handlers have to look at."""
    fault = draw(st.sampled_from(["cas", "datatype", "key", "vbucket", "collection", "kind"]))
    if fault == "cas":
        return replace(request, cas=numbers.Cas(draw(st.integers(1, 2**64 - 1))))
    if fault == "datatype":
        return replace(request, datatype=Datatype(draw(st.integers(2, 255))))
    if fault == "key":
        return replace(request, key=draw(st.sampled_from([b"locked", b"xattrs", b"tombstone", b"y" * 246])))
    if fault == "vbucket":
        return replace(request, vbucket=numbers.VBucketId(draw(st.sampled_from([2, 3, 4, 1024, 0xFFFF]))))
    if fault == "collection" and request.collection_id is not None:
        return replace(request, collection_id=UNKNOWN)
    kinds = {"opaque": request.opaque, "vbucket": request.vbucket, "key": request.key}
    return draw(st.sampled_from([Get, Add]))(**kinds, collection_id=request.collection_id)


def raw_set(*, key: bytes, value: bytes = b"v", extras: bytes = bytes(8), magic: int = 0x80, body: int | None = None,
            opcode: int = 0x01) -> bytes:  # fmt: skip
    """A set whose header may lie."""
    length = len(extras) + len(key) + len(value) if body is None else body
    return _HEADER.pack(magic, opcode, len(key), len(extras), 0, 0, length, 7, 0) + extras + key + value


RAW = [
    raw_set(key=b""), raw_set(key=b"\x00"), raw_set(key=b"\x00k", extras=b""), raw_set(key=b"\x00k", extras=bytes(7)),
    raw_set(key=b"\x00k", extras=bytes(9)), raw_set(key=b"\x00k", magic=0x08), raw_set(key=b"\x00k", magic=0x81),
    raw_set(key=b"\x00k", magic=0x00), raw_set(key=b"\x00k", body=0), raw_set(key=b"\x00k", body=9),
    raw_set(key=b"\x00k", body=numbers.VALUE_BYTES_MAX + 11), raw_set(key=b"\x00k", body=2**32 - 1),
    raw_set(key=b"\x00k", opcode=0x12), raw_set(key=b"\x80\x00k"), raw_set(key=b"\x80"),
    raw_set(key=b"\xff\xff\xff\xff\x0fk"), raw_set(key=b"\xff\xff\xff\xff\x1fk"),
    raw_set(key=b"\x00" + b"z" * (numbers.KEY_BYTES_MAX + 1)), raw_set(key=b"z" * (numbers.KEY_BYTES_MAX + 1)),
    raw_set(key=b"z" * 0xFFFF), raw_set(key=b"\x00k", value=b"v" * 40)[:50], raw_set(key=b"\x00k")[:HEADER_BYTES],
    raw_set(key=b"\x00k")[: HEADER_BYTES - 1],
]  # fmt: skip


@st.composite
def buffers(draw: st.DrawFn, *, collections: bool) -> bytes:
    sets = draw(st.lists(plain_sets(collections=collections), max_size=12))
    end = draw(
        st.one_of(st.just(b""), plain_sets(collections=collections, odd=True), st.sampled_from(RAW), st.binary())
    )
    more = draw(st.lists(plain_sets(collections=collections), max_size=2))
    data = b"".join([*sets, end, *more])
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


requests = clients.flatmap(lambda client: st.tuples(st.just(client), buffers(collections=client.collections)))


def run_kernel(bucket: Bucket, data: bytes, client: Client, now_ns: int) -> SetRun:
    buffer = np.frombuffer(bytearray(data), dtype=np.uint8)
    return apply_set_run(
        bucket, buffer, collections=client.collections, mutation_tokens=client.mutation_tokens, now_ns=now_ns
    )


def check(data: bytes, client: Client, *, now_ns: int = NOW_NS, default: bool = True) -> SetRun:
    kernel, oracle = made(now_ns, default=default), made(now_ns, default=default)
    run = run_kernel(kernel, data, client, now_ns)
    expected = one_by_one(
        oracle, data, collections=client.collections, mutation_tokens=client.mutation_tokens, now_ns=now_ns
    )
    assert run == expected
    check_equal(kernel, oracle)
    return run


# --- properties ---------------------------------------------------------------------------------------------------


@given(sent=requests, default=st.sampled_from([True, True, True, False]))
def test_the_kernel_equals_one_by_one(sent: tuple[Client, bytes], default: bool) -> None:
    client, data = sent
    check(data, client, default=default)


@each("data", RAW)
@each("collections", [False, True])
def test_what_is_not_a_set_is_left_alone(data: bytes, collections: bool) -> None:
    client = Client(collections=collections, mutation_tokens=True)
    good = Set(key=b"a", value=b"{}", collection_id=numbers.DEFAULT_COLLECTION if collections else None).encode()
    check(data, client)
    run = check(good + data + good, client)
    assert run.sets >= 1


@given(sent=requests, data=st.data())
def test_bytes_may_come_in_any_pieces(sent: tuple[Client, bytes], data: st.DataObject) -> None:
    """As a session has it: what was not consumed comes again with what follows."""
    client, whole = sent
    at_once, in_pieces = made(NOW_NS), made(NOW_NS)
    expected = run_kernel(at_once, whole, client, NOW_NS)
    consumed = sets = 0
    responses = b""
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4))), len(whole)]:
        run = run_kernel(in_pieces, whole[consumed:end], client, NOW_NS)
        consumed, sets, responses = consumed + run.consumed_bytes, sets + run.sets, responses + run.responses
    assert (consumed, sets, responses) == (expected.consumed_bytes, expected.sets, expected.responses)
    check_equal(at_once, in_pieces)


@given(
    sent=requests, now_s=st.sampled_from([1, 2**31, 2**32 - 60, 2**32 - 1]), ttl=st.sampled_from([0, 1, 50, 99, 101])
)
@example(sent=(Client(True, True), b""), now_s=2**32 - 60, ttl=101)
def test_expiries_at_all_times(sent: tuple[Client, bytes], now_s: int, ttl: int) -> None:
    """Up to the last second that an expiry can name."""
    client, data = sent
    limited = Set(key=b"a", expiry=ttl, collection_id=FRUIT if client.collections else None).encode()
    check(limited + data, client, now_ns=now_s * 10**9 + 5)


@each("collections", [False, True])
@each("key_bytes", [1, 2, 3, 10])
@each("before_bytes", [0, 1000])
def test_the_smallest_requests_fit_into_what_is_reserved(collections: bool, key_bytes: int, before_bytes: int) -> None:
    """A stored frame is longer than its request, and the kernel checks no bounds: the room has to be right before."""
    client = Client(collections=collections, mutation_tokens=True)
    for count in (18_300, 18_400, 18_500, 18_650, 18_720, 18_800):
        bucket = made(NOW_NS)
        if before_bytes:
            bucket.pending.append(0, bytes(before_bytes))
        one = Set(key=b"k" * key_bytes, collection_id=numbers.DEFAULT_COLLECTION if collections else None).encode()
        run = run_kernel(bucket, one * count, client, NOW_NS)
        assert (run.sets, run.consumed_bytes) == (count, len(one) * count)
        assert bucket.pending.used_bytes <= len(bucket.pending.frames)
        assert bucket.pending.count <= min(len(bucket.pending.vbuckets), len(bucket.pending.starts))
        assert len(run.responses) == 40 * count


def test_new_documents_make_the_index_grow() -> None:
    """The kernel stops for more room and goes on, over and over, also where all vbuckets are written in turn."""
    kernel, oracle = made(NOW_NS), made(NOW_NS)
    data = b"".join(
        Set(key=b"%d" % number, vbucket=numbers.VBucketId(number % 2), value=b"%d" % number).encode()
        for number in range(5000)
    )
    client = Client(collections=False, mutation_tokens=False)
    expected = one_by_one(oracle, data, collections=False, mutation_tokens=False, now_ns=NOW_NS)
    consumed, responses = 0, b""
    while consumed < len(data):
        # A run that has made the index grow often enough is cut short, and the session goes on in its next turn.
        run = run_kernel(kernel, data[consumed:], client, NOW_NS)
        consumed, responses = consumed + run.consumed_bytes, responses + run.responses
        assert run.is_cut_short == (consumed < len(data))
    assert responses == expected.responses
    assert kernel.pending.seal().data.tobytes() == oracle.pending.seal().data.tobytes()
    for number in range(5000):
        place = (number % 2, numbers.DEFAULT_COLLECTION, b"%d" % number)
        assert kernel.find(*place) == oracle.find(*place)
    assert len(decode_frames(kernel.pending.seal().data.tobytes())) == 5000

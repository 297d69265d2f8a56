"""Range scans against a dictionary: any writes, any ranges, chunks of a few keys, and what changes meanwhile."""

from __future__ import annotations

from random import Random

import pytest

from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages.documents import RangeScanContinueResponse, ScannedDocument
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
from headwater.store.bucket import Bucket
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.range_scan import ABOVE_ALL_KEYS, RangeScan, Sample, ScanWanted
from headwater.store.settling import settle_now
from support.store_harness import NOTHING_KEPT, Clock, compact, new_bucket, put, remove

ALL = ScanWanted(collection=DEFAULT_COLLECTION)
KEYS = ScanWanted(collection=DEFAULT_COLLECTION, keys_only=True)
ANY_TYPE = Datatype.JSON | Datatype.SNAPPY


def decoded(part: bytes, *, keys_only: bool) -> RangeScanContinueResponse:
    """By the typed codec, which knows nothing of the kernels."""
    frame = Frame(
        magic=Magic.RESPONSE, opcode=Opcode.RANGE_SCAN_CONTINUE, specific=Status.SUCCESS,
        extras=(0 if keys_only else 1).to_bytes(4), value=part,
    )  # fmt: skip
    return RangeScanContinueResponse.from_frame(frame)


def keys_of(scan: RangeScan, *, items_max: int = 3, bytes_max: int = 100) -> list[bytes]:
    found: list[bytes] = []
    while not scan.is_complete:
        part = decoded(scan.take(items_max=items_max, bytes_max=bytes_max, datatypes=ANY_TYPE), keys_only=True)
        assert len(part.keys) <= items_max
        found += part.keys
    return found


def documents_of(
    scan: RangeScan, *, items_max: int = 100, bytes_max: int = 1000, datatypes: Datatype = ANY_TYPE
) -> list[ScannedDocument]:
    found: list[ScannedDocument] = []
    while not scan.is_complete:
        part = decoded(scan.take(items_max=items_max, bytes_max=bytes_max, datatypes=datatypes), keys_only=False)
        assert part.documents or scan.is_complete
        found += part.documents
    return found


def scan(bucket: Bucket, wanted: ScanWanted, *, chunk_keys: int = 2**16) -> RangeScan:
    return RangeScan(bucket, 1, bucket.young_of(1), wanted, now_s=bucket.environment.now_s(), chunk_keys=chunk_keys)


def random_key(random: Random) -> bytes:
    """Short, and with much in common, so that keys meet again and are prefixes of each other."""
    length = random.choice([1, 2, 3, 9, 17, 250])
    return bytes(random.choice(b"\x00a\xff") for _ in range(length))


@pytest.mark.parametrize("seed", range(25))
def test_a_scan_finds_what_a_dictionary_would(seed: int) -> None:
    """Also with chunks so small that a vbucket is walked many times, and while commits are young, settled or both."""
    random, bucket = Random(seed), new_bucket()
    model: dict[tuple[int, bytes], bytes] = {}
    for number in range(random.choice([0, 3, 40, 150])):
        collection, key = random.choice([0, 0, 9, 300]), random_key(random)
        if random.random() < 0.25 and (collection, key) in model:
            remove(bucket, 1, key, collection_id=collection)
            del model[collection, key]
        else:
            is_expired = random.random() < 0.1
            expiry = bucket.environment.now_s() - 1 if is_expired else random.choice([0, 2**32 - 1])
            put(bucket, 1, key, b"%d" % number, collection_id=collection, expiry=expiry)
            model.pop((collection, key), None)
            if not is_expired:
                model[collection, key] = b"%d" % number
        if random.random() < 0.1:
            bucket.commit_now()
            if random.random() < 0.3:
                settle_now(bucket)
    bucket.commit_now()
    for chunk_keys in (4, 16, 2**16):
        low, high = sorted([random_key(random), random_key(random)])
        for wanted in (
            ScanWanted(collection=CollectionId(0)),
            ScanWanted(collection=CollectionId(9), low=low, high=high),
            ScanWanted(collection=CollectionId(0), low=low, high=high + b"\0"),
        ):
            expected = {
                key: value
                for (collection, key), value in sorted(model.items())
                if collection == wanted.collection and wanted.low <= key < wanted.high
            }
            assert keys_of(scan(bucket, ScanWanted(**_fields(wanted), keys_only=True), chunk_keys=chunk_keys)) == list(
                expected
            )
            found = documents_of(scan(bucket, wanted, chunk_keys=chunk_keys))
            assert {document.key: document.value for document in found} == expected
            assert [document.key for document in found] == list(expected)


def _fields(wanted: ScanWanted) -> dict[str, object]:
    return {"collection": wanted.collection, "low": wanted.low, "high": wanted.high}


def test_a_document_has_its_metadata_and_no_attributes(bucket: Bucket) -> None:
    value = encode_xattrs(ValueParts({"_sync": b"1"}, b"[1]"))
    written = put(bucket, 1, b"k", value, expiry=2**31, flags=7, datatype=Datatype.JSON | Datatype.XATTR)
    bucket.commit_now()
    expected = ScannedDocument(
        flags=7, expiry=2**31, seqno=written.seqno, cas=written.cas, datatype=Datatype.JSON, key=b"k", value=b"[1]"
    )
    assert documents_of(scan(bucket, ALL)) == [expected]
    (raw,) = documents_of(scan(bucket, ALL), datatypes=Datatype.RAW)
    assert raw.datatype == Datatype.RAW


def test_what_is_stored_compressed_is_sent_so_to_those_who_understand_it(bucket: Bucket) -> None:
    put(bucket, 1, b"a", compress(b"[1]"), datatype=Datatype.JSON | Datatype.SNAPPY)
    put(bucket, 1, b"b", b"[2]")
    with_attributes = compress(encode_xattrs(ValueParts({"_sync": b"1"}, b"[3]")))
    put(bucket, 1, b"c", with_attributes, datatype=Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR)
    bucket.commit_now()
    plain = [(found.value, found.datatype) for found in documents_of(scan(bucket, ALL), datatypes=Datatype.JSON)]
    assert plain == [(b"[1]", Datatype.JSON), (b"[2]", Datatype.JSON), (b"[3]", Datatype.JSON)]
    packed = [(found.value, found.datatype) for found in documents_of(scan(bucket, ALL))]
    assert packed == [(compress(b"[1]"), Datatype.JSON | Datatype.SNAPPY), *plain[1:]]


@pytest.mark.parametrize("keys_only", [False, True])
def test_a_scan_is_of_one_moment(tmp_path: object, keys_only: bool) -> None:
    """What is written, settled and compacted meanwhile is not in it."""
    engine, clock = LmdbEngine(tmp_path), Clock()
    bucket = new_bucket(engine, clock)
    for number in range(50):
        put(bucket, 1, b"%02d" % number, b"old")
    bucket.commit_now()
    settle_now(bucket)
    put(bucket, 1, b"young", b"old")
    bucket.commit_now()
    put(bucket, 1, b"never durable", b"new")
    wanted = ScanWanted(collection=DEFAULT_COLLECTION, keys_only=keys_only)
    begun = scan(bucket, wanted, chunk_keys=16)
    for number in range(0, 50, 2):
        put(bucket, 1, b"%02d" % number, b"new")
        remove(bucket, 1, b"%02d" % (number + 1))
    put(bucket, 1, b"00a", b"new")
    bucket.commit_now()
    settle_now(bucket)
    clock.advance(10)
    compact(bucket, 1, NOTHING_KEPT)
    expected = [*(b"%02d" % number for number in range(50)), b"young"]
    if keys_only:
        assert keys_of(begun) == expected
    else:
        found = documents_of(begun)
        assert [(document.key, document.value) for document in found] == [(key, b"old") for key in expected]
    begun.close()
    engine.close()


@pytest.mark.parametrize("chunk_keys", [8, 2**16])
def test_samples(bucket: Bucket, chunk_keys: int) -> None:
    for number in range(200):
        put(bucket, 1, b"%03d" % number)
    bucket.commit_now()

    def sampled(documents: int, seed: int) -> list[bytes]:
        sample = Sample(documents=documents, seed=seed)
        wanted = ScanWanted(collection=DEFAULT_COLLECTION, keys_only=True, sample=sample)
        return keys_of(scan(bucket, wanted, chunk_keys=chunk_keys))

    few = sampled(20, 1)
    assert 0 < len(few) <= 20
    assert few == sorted(set(few)) == sampled(20, 1)
    assert few != sampled(20, 2)
    everything = [b"%03d" % number for number in range(200)]
    assert sampled(200, 1) == sampled(10_000, 1) == everything


def test_bounds_of_a_part(bucket: Bucket) -> None:
    for key in (b"a", b"b" * 250, b"c"):
        put(bucket, 1, key, b"x" * 300)
    bucket.commit_now()
    begun = scan(bucket, ALL)
    first = begun.take(items_max=10, bytes_max=1, datatypes=ANY_TYPE)
    assert [document.key for document in decoded(first, keys_only=False).documents] == [b"a"]
    assert len(decoded(begun.take(items_max=1, bytes_max=10**6, datatypes=ANY_TYPE), keys_only=False).documents) == 1
    assert not begun.is_complete
    begun.close()
    assert begun.is_complete
    assert ABOVE_ALL_KEYS > b"\xff" * 250

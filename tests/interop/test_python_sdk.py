"""The PyPI package `couchbase` with whole documents: what an application does all day."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import pytest
from couchbase import exceptions, options
from couchbase.collection import Collection
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.transcoder import RawBinaryTranscoder, RawStringTranscoder

from headwater.protocol.numbers import KEY_BYTES_MAX, VALUE_BYTES_MAX
from support.cases import case_apart

SOON = timedelta(seconds=2)  # 1 s ends with the current second, maybe before the next request
LATER = timedelta(hours=1)
GONE_S_MAX = 5.0
VALUE_TOO_LARGE = 104
"""The SDK's error code; it has no exception of its own for it."""
TIMEOUTS = (exceptions.UnAmbiguousTimeoutException, exceptions.AmbiguousTimeoutException)


def as_it_is(content: object) -> object:
    return content


def wait_until_gone(collection: Collection, key: str) -> None:
    deadline_s = time.monotonic() + GONE_S_MAX
    while collection.exists(key).exists:
        assert time.monotonic() < deadline_s, "the document outlives its expiry"
        time.sleep(0.1)


# --- storing and reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document", [{"name": "Ünïcode ☃", "list": [1, 2.5, None, True]}, [1, 2, 3], "text", 42, 2.5, True, None, {}, ""]
)
def test_upsert_and_get(collection: Collection, key: str, document: object) -> None:
    written = collection.upsert(key, document)
    read = collection.get(key)
    assert read.content_as[as_it_is] == document
    assert read.cas == written.cas != 0


def test_mutation_tokens_count_up(collection: Collection, key: str) -> None:
    first, second = (collection.upsert(key, {"version": version}).mutation_token().as_dict() for version in (1, 2))
    assert first["bucket_name"] == "default"
    assert first["partition_uuid"] == second["partition_uuid"] != 0
    assert second["sequence_number"] > first["sequence_number"]


def test_insert_replace_remove_and_exists(collection: Collection, key: str) -> None:
    assert not collection.exists(key).exists
    for missing in (lambda: collection.get(key), lambda: collection.remove(key), lambda: collection.replace(key, {})):
        with pytest.raises(exceptions.DocumentNotFoundException):
            missing()
    inserted = collection.insert(key, {"version": 1})
    assert collection.exists(key).cas == inserted.cas
    with pytest.raises(exceptions.DocumentExistsException):
        collection.insert(key, {"version": 2})
    assert collection.get(key).content_as[dict] == {"version": 1}
    collection.replace(key, {"version": 2})
    assert collection.get(key).content_as[dict] == {"version": 2}
    collection.remove(key)
    assert not collection.exists(key).exists
    with pytest.raises(exceptions.DocumentNotFoundException):
        collection.get(key)


def test_replica_reads_fall_back_to_the_active_copy(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    assert collection.get_any_replica(key).content_as[dict] == {"version": 1}
    assert [copy.is_replica for copy in collection.get_all_replicas(key)] == [False]


# --- CAS ----------------------------------------------------------------------------------------------------------


def test_cas_conflict(collection: Collection, key: str) -> None:
    old = collection.upsert(key, {"version": 1}).cas
    new = collection.upsert(key, {"version": 2}).cas
    with pytest.raises(exceptions.CasMismatchException):
        collection.replace(key, {"version": 3}, options.ReplaceOptions(cas=old))
    with pytest.raises(exceptions.CasMismatchException):
        collection.remove(key, options.RemoveOptions(cas=old))
    assert collection.get(key).content_as[dict] == {"version": 2}
    collection.replace(key, {"version": 3}, options.ReplaceOptions(cas=new))
    assert collection.get(key).content_as[dict] == {"version": 3}


# --- expiry -------------------------------------------------------------------------------------------------------


def test_expiry(collection: Collection, key: str) -> None:
    collection.upsert(key, {}, options.UpsertOptions(expiry=SOON))
    assert collection.exists(key).exists
    wait_until_gone(collection, key)
    with pytest.raises(exceptions.DocumentNotFoundException):
        collection.get(key)
    collection.insert(key, {"version": 2})


def test_get_with_expiry(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1}, options.UpsertOptions(expiry=LATER))
    read = collection.get(key, options.GetOptions(with_expiry=True))
    assert read.content_as[dict] == {"version": 1}
    # The SDK tells the local time.
    left = read.expiry_time - datetime.now()
    assert LATER - timedelta(minutes=1) < left <= LATER + timedelta(seconds=1)
    collection.upsert(key, {"version": 2}, options.UpsertOptions(preserve_expiry=True))
    collection.replace(key, {"version": 3}, options.ReplaceOptions(preserve_expiry=True))
    assert collection.get(key, options.GetOptions(with_expiry=True)).expiry_time == read.expiry_time
    collection.upsert(key, {"version": 2})
    assert collection.get(key, options.GetOptions(with_expiry=True)).expiry_time is None


def test_touch(collection: Collection, key: str) -> None:
    for name in (key, f"{key}-read"):
        collection.upsert(name, {"version": 1}, options.UpsertOptions(expiry=LATER))
    assert collection.touch(key, SOON).cas != 0
    assert collection.get_and_touch(f"{key}-read", SOON, options.GetAndTouchOptions()).content_as[dict] == {
        "version": 1
    }
    wait_until_gone(collection, key)
    wait_until_gone(collection, f"{key}-read")
    with pytest.raises(exceptions.DocumentNotFoundException):
        collection.touch(key, LATER)


# --- locks --------------------------------------------------------------------------------------------------------


def test_get_and_lock(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    assert locked.content_as[dict] == {"version": 1}
    # The SDK tries a locked document again until its time is up.
    short = timedelta(milliseconds=300)
    with pytest.raises((exceptions.DocumentLockedException, *TIMEOUTS)):
        collection.upsert(key, {"version": 2}, options.UpsertOptions(timeout=short))
    with pytest.raises((exceptions.DocumentLockedException, *TIMEOUTS)):
        collection.remove(key, options.RemoveOptions(timeout=short))
    with pytest.raises((exceptions.DocumentLockedException, *TIMEOUTS)):
        collection.get_and_lock(key, timedelta(seconds=15), timeout=short)
    assert collection.get(key).content_as[dict] == {"version": 1}
    collection.unlock(key, locked.cas)
    collection.upsert(key, {"version": 2})


# --- counters and binary documents --------------------------------------------------------------------------------


def test_counters(collection: Collection, key: str) -> None:
    binary = collection.binary()
    assert binary.increment(key, options.IncrementOptions(initial=options.SignedInt64(10))).content == 10
    assert binary.increment(key).content == 11
    assert binary.increment(key, options.IncrementOptions(delta=options.DeltaValue(100))).content == 111
    assert binary.decrement(key).content == 110
    assert binary.decrement(key, options.DecrementOptions(delta=options.DeltaValue(1000))).content == 0
    assert collection.get(key).content_as[int] == 0


def test_append_and_prepend(collection: Collection, key: str) -> None:
    transcoder = RawStringTranscoder()
    collection.upsert(key, "middle", options.UpsertOptions(transcoder=transcoder))
    collection.binary().append(key, " end")
    collection.binary().prepend(key, "start ")
    assert collection.get(key, options.GetOptions(transcoder=transcoder)).content_as[str] == "start middle end"


@pytest.mark.parametrize("document", [b"", b"\x00", bytes(range(256)), b'{"looks":"like JSON"}'])
def test_binary_documents(collection: Collection, key: str, document: bytes) -> None:
    transcoder = RawBinaryTranscoder()
    collection.upsert(key, document, options.UpsertOptions(transcoder=transcoder))
    assert collection.get(key, options.GetOptions(transcoder=transcoder)).content_as[bytes] == document


# --- many at once -------------------------------------------------------------------------------------------------


def test_multi(collection: Collection, key: str) -> None:
    documents = {f"{key}-{number}": {"number": number} for number in range(500)}
    assert collection.upsert_multi(documents).all_ok
    read = collection.get_multi(list(documents))
    assert read.all_ok
    assert {name: result.content_as[dict] for name, result in read.results.items()} == documents
    found = collection.exists_multi([*documents, f"{key}-missing"])
    assert sum(result.exists for result in found.results.values()) == 500
    assert collection.remove_multi(list(documents)).all_ok


# --- durability ---------------------------------------------------------------------------------------------------


@case_apart(DurabilityLevel.MAJORITY)
@case_apart(DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE)
@case_apart(DurabilityLevel.PERSIST_TO_MAJORITY)
def test_durability_levels(collection: Collection, key: str, level: DurabilityLevel) -> None:
    """One copy that is durable before it is answered is all of them."""
    durability = ServerDurability(level=level)
    collection.upsert(key, {"version": 1}, options.UpsertOptions(durability=durability))
    collection.replace(key, {"version": 2}, options.ReplaceOptions(durability=durability))
    collection.remove(key, options.RemoveOptions(durability=durability))
    assert not collection.exists(key).exists


# --- limits -------------------------------------------------------------------------------------------------------


def test_the_largest_document_and_one_byte_more(collection: Collection, key: str) -> None:
    transcoder = RawBinaryTranscoder()
    document = bytes(VALUE_BYTES_MAX)
    patient = timedelta(seconds=20)
    collection.upsert(key, document, options.UpsertOptions(transcoder=transcoder, timeout=patient))
    assert collection.get(key, options.GetOptions(transcoder=transcoder, timeout=patient)).content_as[bytes] == document
    with pytest.raises(exceptions.CouchbaseException) as refused:
        collection.upsert(key, document + b"x", options.UpsertOptions(transcoder=transcoder, timeout=patient))
    assert refused.value.error_code == VALUE_TOO_LARGE
    collection.remove(key)


def test_the_longest_key(collection: Collection, key: str) -> None:
    longest = key.ljust(KEY_BYTES_MAX, "x")
    collection.upsert(longest, {})
    assert collection.exists(longest).exists
    with pytest.raises(exceptions.InvalidArgumentException):
        collection.upsert(longest + "x", {})

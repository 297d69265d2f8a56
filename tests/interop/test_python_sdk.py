"""The PyPI package `couchbase` with whole documents: what an application does all day."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import pytest
from couchbase.collection import Collection
from couchbase.durability import DurabilityLevel, ServerDurability
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    CasMismatchException,
    CouchbaseException,
    DocumentExistsException,
    DocumentLockedException,
    DocumentNotFoundException,
    DocumentNotLockedException,
    InvalidArgumentException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import (
    DecrementOptions,
    DeltaValue,
    GetAndTouchOptions,
    GetOptions,
    IncrementOptions,
    RemoveOptions,
    ReplaceOptions,
    SignedInt64,
    UpsertOptions,
)
from couchbase.transcoder import RawBinaryTranscoder, RawStringTranscoder

from headwater.protocol.numbers import KEY_BYTES_MAX, VALUE_BYTES_MAX

SOON = timedelta(seconds=1)
LATER = timedelta(hours=1)
GONE_S_MAX = 5.0
VALUE_TOO_LARGE = 104
"""The SDK's error code; it has no exception of its own for it."""
TIMEOUTS = (UnAmbiguousTimeoutException, AmbiguousTimeoutException)


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


def test_upsert_replaces(collection: Collection, key: str) -> None:
    first = collection.upsert(key, {"version": 1})
    second = collection.upsert(key, {"version": 2})
    assert second.cas > first.cas
    assert collection.get(key).content_as[dict] == {"version": 2}


def test_mutation_tokens_count_up(collection: Collection, key: str) -> None:
    first, second = (collection.upsert(key, {"version": version}).mutation_token().as_dict() for version in (1, 2))
    assert first["bucket_name"] == "default"
    assert first["partition_uuid"] == second["partition_uuid"] != 0
    assert second["sequence_number"] > first["sequence_number"]


def test_insert(collection: Collection, key: str) -> None:
    collection.insert(key, {"version": 1})
    with pytest.raises(DocumentExistsException):
        collection.insert(key, {"version": 2})
    assert collection.get(key).content_as[dict] == {"version": 1}


def test_insert_after_remove(collection: Collection, key: str) -> None:
    collection.insert(key, {"version": 1})
    collection.remove(key)
    collection.insert(key, {"version": 2})
    assert collection.get(key).content_as[dict] == {"version": 2}


def test_replace(collection: Collection, key: str) -> None:
    with pytest.raises(DocumentNotFoundException):
        collection.replace(key, {"version": 1})
    collection.upsert(key, {"version": 1})
    collection.replace(key, {"version": 2})
    assert collection.get(key).content_as[dict] == {"version": 2}


def test_remove(collection: Collection, key: str) -> None:
    collection.upsert(key, {})
    collection.remove(key)
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)
    with pytest.raises(DocumentNotFoundException):
        collection.remove(key)


def test_exists(collection: Collection, key: str) -> None:
    assert not collection.exists(key).exists
    written = collection.upsert(key, {})
    found = collection.exists(key)
    assert found.exists
    assert found.cas == written.cas
    collection.remove(key)
    assert not collection.exists(key).exists


def test_a_document_that_was_never_there(collection: Collection, key: str) -> None:
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)


def test_replica_reads_fall_back_to_the_active_copy(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    assert collection.get_any_replica(key).content_as[dict] == {"version": 1}
    assert [copy.is_replica for copy in collection.get_all_replicas(key)] == [False]


# --- CAS ----------------------------------------------------------------------------------------------------------


def test_cas_conflict(collection: Collection, key: str) -> None:
    old = collection.upsert(key, {"version": 1}).cas
    new = collection.upsert(key, {"version": 2}).cas
    with pytest.raises(CasMismatchException):
        collection.replace(key, {"version": 3}, ReplaceOptions(cas=old))
    with pytest.raises(CasMismatchException):
        collection.remove(key, RemoveOptions(cas=old))
    assert collection.get(key).content_as[dict] == {"version": 2}
    collection.replace(key, {"version": 3}, ReplaceOptions(cas=new))
    assert collection.get(key).content_as[dict] == {"version": 3}


def test_cas_of_a_removed_document(collection: Collection, key: str) -> None:
    cas = collection.upsert(key, {}).cas
    collection.remove(key, RemoveOptions(cas=cas))
    with pytest.raises(DocumentNotFoundException):
        collection.replace(key, {}, ReplaceOptions(cas=cas))


# --- expiry -------------------------------------------------------------------------------------------------------


def test_expiry(collection: Collection, key: str) -> None:
    collection.upsert(key, {}, UpsertOptions(expiry=SOON))
    assert collection.exists(key).exists
    wait_until_gone(collection, key)
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)
    collection.insert(key, {"version": 2})


def test_get_with_expiry(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1}, UpsertOptions(expiry=LATER))
    read = collection.get(key, GetOptions(with_expiry=True))
    assert read.content_as[dict] == {"version": 1}
    # The SDK tells the local time.
    left = read.expiry_time - datetime.now()
    assert LATER - timedelta(minutes=1) < left <= LATER + timedelta(seconds=1)
    collection.upsert(key, {"version": 2})
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time is None


def test_preserve_expiry(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1}, UpsertOptions(expiry=LATER))
    before = collection.get(key, GetOptions(with_expiry=True)).expiry_time
    collection.upsert(key, {"version": 2}, UpsertOptions(preserve_expiry=True))
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time == before
    collection.replace(key, {"version": 3}, ReplaceOptions(preserve_expiry=True))
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time == before


def test_touch(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    touched = collection.touch(key, SOON)
    assert touched.cas != 0
    wait_until_gone(collection, key)
    with pytest.raises(DocumentNotFoundException):
        collection.touch(key, LATER)


def test_touch_takes_an_expiry_away(collection: Collection, key: str) -> None:
    collection.upsert(key, {}, UpsertOptions(expiry=LATER))
    collection.touch(key, timedelta(0))
    assert collection.get(key, GetOptions(with_expiry=True)).expiry_time is None


def test_get_and_touch(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1}, UpsertOptions(expiry=LATER))
    assert collection.get_and_touch(key, SOON, GetAndTouchOptions()).content_as[dict] == {"version": 1}
    wait_until_gone(collection, key)


# --- locks --------------------------------------------------------------------------------------------------------


def test_get_and_lock(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    assert locked.content_as[dict] == {"version": 1}
    # The SDK tries a locked document again until its time is up.
    short = timedelta(milliseconds=300)
    with pytest.raises((DocumentLockedException, *TIMEOUTS)):
        collection.upsert(key, {"version": 2}, UpsertOptions(timeout=short))
    with pytest.raises((DocumentLockedException, *TIMEOUTS)):
        collection.remove(key, RemoveOptions(timeout=short))
    with pytest.raises((DocumentLockedException, *TIMEOUTS)):
        collection.get_and_lock(key, timedelta(seconds=15), timeout=short)
    assert collection.get(key).content_as[dict] == {"version": 1}
    collection.unlock(key, locked.cas)
    collection.upsert(key, {"version": 2})


def test_a_lock_opens_by_its_cas_alone(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    with pytest.raises((CasMismatchException, DocumentLockedException)):
        collection.unlock(key, locked.cas + 1)
    collection.replace(key, {"version": 2}, ReplaceOptions(cas=locked.cas))
    with pytest.raises((DocumentNotLockedException, CasMismatchException)):
        collection.unlock(key, locked.cas)


def test_a_lock_opens_by_itself(collection: Collection, key: str) -> None:
    collection.upsert(key, {"version": 1})
    collection.get_and_lock(key, timedelta(seconds=1))
    collection.upsert(key, {"version": 2}, UpsertOptions(timeout=timedelta(seconds=10)))
    assert collection.get(key).content_as[dict] == {"version": 2}


# --- counters and binary documents --------------------------------------------------------------------------------


def test_counters(collection: Collection, key: str) -> None:
    binary = collection.binary()
    assert binary.increment(key, IncrementOptions(initial=SignedInt64(10))).content == 10
    assert binary.increment(key).content == 11
    assert binary.increment(key, IncrementOptions(delta=DeltaValue(100))).content == 111
    assert binary.decrement(key).content == 110
    assert binary.decrement(key, DecrementOptions(delta=DeltaValue(1000))).content == 0
    assert collection.get(key).content_as[int] == 0


def test_a_counter_that_must_exist(collection: Collection, key: str) -> None:
    with pytest.raises(DocumentNotFoundException):
        collection.binary().increment(key, IncrementOptions(initial=SignedInt64(-1)))
    with pytest.raises(DocumentNotFoundException):
        collection.binary().decrement(key, DecrementOptions(initial=SignedInt64(-1)))


def test_a_counter_expires(collection: Collection, key: str) -> None:
    collection.binary().increment(key, IncrementOptions(initial=SignedInt64(1), expiry=SOON))
    wait_until_gone(collection, key)


def test_append_and_prepend(collection: Collection, key: str) -> None:
    transcoder = RawStringTranscoder()
    collection.upsert(key, "middle", UpsertOptions(transcoder=transcoder))
    collection.binary().append(key, " end")
    collection.binary().prepend(key, "start ")
    assert collection.get(key, GetOptions(transcoder=transcoder)).content_as[str] == "start middle end"


def test_append_to_nothing(collection: Collection, key: str) -> None:
    with pytest.raises(DocumentNotFoundException):
        collection.binary().append(key, "end")
    with pytest.raises(DocumentNotFoundException):
        collection.binary().prepend(key, "start")


@pytest.mark.parametrize("document", [b"", b"\x00", bytes(range(256)), b'{"looks":"like JSON"}'])
def test_binary_documents(collection: Collection, key: str, document: bytes) -> None:
    transcoder = RawBinaryTranscoder()
    collection.upsert(key, document, UpsertOptions(transcoder=transcoder))
    assert collection.get(key, GetOptions(transcoder=transcoder)).content_as[bytes] == document


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


def test_multi_with_failures(collection: Collection, key: str) -> None:
    collection.insert(key, {})
    inserted = collection.insert_multi({key: {}, f"{key}-new": {}})
    assert not inserted.all_ok
    assert isinstance(inserted.exceptions[key], DocumentExistsException)
    assert inserted.results[f"{key}-new"].success


# --- durability ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level",
    [
        DurabilityLevel.MAJORITY,
        DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE,
        DurabilityLevel.PERSIST_TO_MAJORITY,
    ],
)
def test_durability_levels(collection: Collection, key: str, level: DurabilityLevel) -> None:
    """One copy that is durable before it is answered is all of them."""
    durability = ServerDurability(level=level)
    collection.upsert(key, {"version": 1}, UpsertOptions(durability=durability))
    collection.replace(key, {"version": 2}, ReplaceOptions(durability=durability))
    collection.remove(key, RemoveOptions(durability=durability))
    assert not collection.exists(key).exists


# --- limits -------------------------------------------------------------------------------------------------------


def test_the_largest_document(collection: Collection, key: str) -> None:
    transcoder = RawBinaryTranscoder()
    document = bytes(VALUE_BYTES_MAX)
    patient = timedelta(seconds=20)
    collection.upsert(key, document, UpsertOptions(transcoder=transcoder, timeout=patient))
    assert collection.get(key, GetOptions(transcoder=transcoder, timeout=patient)).content_as[bytes] == document
    collection.remove(key)


def test_a_document_too_large(collection: Collection, key: str) -> None:
    options = UpsertOptions(transcoder=RawBinaryTranscoder(), timeout=timedelta(seconds=20))
    with pytest.raises(CouchbaseException) as refused:
        collection.upsert(key, bytes(VALUE_BYTES_MAX + 1), options)
    assert refused.value.error_code == VALUE_TOO_LARGE
    collection.upsert(key, {"the connection": "lives on"})


def test_a_document_that_grows_too_large(collection: Collection, key: str) -> None:
    patient = timedelta(seconds=20)
    options = UpsertOptions(transcoder=RawBinaryTranscoder(), timeout=patient)
    collection.upsert(key, bytes(VALUE_BYTES_MAX - 1), options)
    with pytest.raises(CouchbaseException) as refused:
        collection.binary().append(key, b"ab", timeout=patient)
    assert refused.value.error_code == VALUE_TOO_LARGE
    collection.remove(key)


def test_the_longest_key(collection: Collection, key: str) -> None:
    longest = key.ljust(KEY_BYTES_MAX, "x")
    collection.upsert(longest, {})
    assert collection.exists(longest).exists
    with pytest.raises(InvalidArgumentException):
        collection.upsert(longest + "x", {})

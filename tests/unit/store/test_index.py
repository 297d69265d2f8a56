"""The index: entries by key, tables that grow in one arena, and what is forgotten again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headwater.errors import HeadwaterError
from headwater.store.data_format import Entry
from headwater.store.index import CAPACITY, COUNT, TABLE_SLOTS_MIN, Index
from headwater.store.runs import as_run
from support.cases import case_apart

SECRET = (7, 11)


def entry(seqno: int, **members: object) -> Entry:
    values = {"cas": 10 * seqno, "rev_seqno": 1, "expiry": 0, "commit": 5, "is_deleted": False, **members}
    return Entry(seqno=seqno, **values)


def key(name: object) -> np.ndarray:
    return as_run(b"\0" + str(name).encode())


@pytest.fixture
def index() -> Index:
    return Index(4, secret=SECRET)


# --- entries ------------------------------------------------------------------------------------------------------


@case_apart(entry(1))
@case_apart(entry(2**64 - 1, cas=2**64 - 1, rev_seqno=2**56 - 1, expiry=2**32 - 1, commit=2**32 - 1))
@case_apart(entry(3, is_deleted=True))
@case_apart(entry(3, is_locked=True))
@case_apart(entry(3, has_xattrs=True))
@case_apart(entry(3, is_deleted=True, is_locked=True, has_xattrs=True, expiry=9))
def test_an_entry_comes_back_as_it_was_put(index: Index, stored: Entry) -> None:
    index.put(1, key("k"), stored)
    assert index.find(1, key("k")) == stored


def test_an_empty_table_has_nothing(index: Index) -> None:
    assert index.find(0, key("k")) is None
    assert index.expired(0, now_s=2**31, entries_max=8) == []
    assert index.live_documents() == 0
    assert index.forget(0, np.array([1, 2], dtype=np.uint64)) == 0
    assert len(index.locked(0)) == 0


def test_the_collection_is_part_of_the_key(index: Index) -> None:
    index.put(0, as_run(b"\x08k"), entry(1))
    assert index.find(0, as_run(b"\x00k")) is None
    assert index.find(0, as_run(b"\x08k")) == entry(1)


# --- growth -------------------------------------------------------------------------------------------------------


def test_a_table_grows_and_loses_nothing() -> None:
    """Many vbuckets that grow in turn: their tables move about in the arena."""
    index = Index(64, secret=SECRET)
    source = random.Random(3)
    expected: dict[tuple[int, int], Entry] = {}
    for number in range(20_000):
        vbucket, name = source.randrange(64) if number % 2 else 5, source.randrange(4000)
        expected[vbucket, name] = entry(number + 1, rev_seqno=number)
        index.put(vbucket, key(name), expected[vbucket, name])
    for (vbucket, name), stored in expected.items():
        assert index.find(vbucket, key(name)) == stored
    for vbucket in range(64):
        count = sum(1 for place in expected if place[0] == vbucket)
        assert index.tables[vbucket, COUNT] == count
        assert count * 5 <= int(index.tables[vbucket, CAPACITY]) * 4
    assert index.find(5, key(4000)) is None


def test_room_is_made_once_for_many(index: Index) -> None:
    index.make_room(0, 1000)
    before = index.tables[0].tolist()
    for number in range(1000):
        index.put(0, key(number), entry(number + 1))
    assert index.tables[0, :2].tolist() == before[:2]
    assert int(before[CAPACITY]) >= 1250


def test_what_is_released_is_used_again(index: Index) -> None:
    for number in range(1000):
        index.put(0, key(number), entry(number + 1))
    end = sum(index.tables[0, :2].tolist())
    index.clear(0)
    assert index.find(0, key(1)) is None
    assert index.tables[0].tolist() == [0, 0, 0]
    for number in range(1000, 2000):
        index.put(1, key(number), entry(number + 1))
    assert sum(index.tables[1, :2].tolist()) <= end
    # What the tables held before must not be found in them.
    assert all(index.find(1, key(number)) is None for number in range(1000))
    assert index.live_documents() == 1000


def test_a_full_arena_is_an_error_that_says_what_to_do(index: Index) -> None:
    index.slots = index.slots[: 2 * TABLE_SLOTS_MIN]
    index.put(0, key("k"), entry(1))
    index.put(1, key("k"), entry(2))
    with pytest.raises(HeadwaterError, match="the index is full") as raised:
        index.put(2, key("k"), entry(3))
    assert raised.value.hint
    assert index.find(0, key("k")) == entry(1)
    assert index.find(1, key("k")) == entry(2)


# --- forgetting ---------------------------------------------------------------------------------------------------


def test_documents_are_forgotten_by_their_seqno(index: Index) -> None:
    for number in range(500):
        index.put(0, key(number), entry(number + 1, is_deleted=number % 2 == 0))
    gone = np.array([seqno for seqno in range(500, 0, -1) if seqno % 5 == 0], dtype=np.uint64)
    assert index.forget(0, gone) == 100
    for number in range(500):
        assert (index.find(0, key(number)) is None) == ((number + 1) % 5 == 0)
    assert index.tables[0, COUNT] == 400


def test_a_document_that_has_changed_is_not_forgotten(index: Index) -> None:
    index.put(0, key("k"), entry(1, is_deleted=True))
    index.put(0, key("k"), entry(2))
    assert index.forget(0, np.array([1], dtype=np.uint64)) == 0
    assert index.find(0, key("k")) == entry(2)


def test_locks_can_be_carried_over(index: Index) -> None:
    index.put(0, key("same"), entry(1, is_locked=True))
    index.put(0, key("changed"), entry(2, is_locked=True))
    index.put(0, key("gone"), entry(3, is_locked=True))
    index.put(0, key("free"), entry(4))
    locked = index.locked(0)
    assert sorted(locked[:, 2].tolist()) == [1, 2, 3]
    index.clear(0)
    index.lock_again(0, locked)
    index.put(0, key("same"), entry(1))
    index.put(0, key("changed"), entry(9))
    index.put(0, key("free"), entry(4))
    index.lock_again(0, locked)
    assert index.find(0, key("same")) == entry(1, is_locked=True)
    assert index.find(0, key("changed")) == entry(9)
    assert index.find(0, key("free")) == entry(4)


# --- expiry -------------------------------------------------------------------------------------------------------


def test_expired_documents_are_found(index: Index) -> None:
    index.put(0, key("never"), entry(1))
    index.put(0, key("past"), entry(2, expiry=99))
    index.put(0, key("now"), entry(3, expiry=100))
    index.put(0, key("later"), entry(4, expiry=101))
    index.put(0, key("deleted"), entry(5, expiry=99, is_deleted=True))
    index.put(1, key("elsewhere"), entry(6, expiry=99))
    assert sorted(found.seqno for found in index.expired(0, now_s=100, entries_max=8)) == [2, 3]
    assert [found.seqno for found in index.expired(1, now_s=100, entries_max=8)] == [6]

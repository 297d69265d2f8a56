"""Keys and values of the tables: round trips, and data that is newer than the program or damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import DataDamaged, DataTooNew
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.store.data_format import (
    FORMAT_VERSION,
    BucketFacts,
    VBucketFacts,
    block_key,
    block_last_seqno,
    blocks_of,
    commit_key,
    commit_number,
    vbucket_key,
    vbucket_of_key,
)
from support.cases import case, each

FACTS = BucketFacts(name="beer", uuid="ab" * 16, vbuckets=64)
VBUCKET = VBucketFacts(
    state=VBucketState.REPLICA,
    failover_log=FailoverLog(
        (FailoverEntry(vbuuid=Vbuuid(2**64 - 1), seqno=Seqno(9)), FailoverEntry(vbuuid=Vbuuid(1), seqno=Seqno(0)))
    ),
    purge_seqno=Seqno(3),
    history_start_seqno=Seqno(4),
    snapshot_start_seqno=Seqno(5),
    snapshot_end_seqno=Seqno(6),
    high_seqno_floor=Seqno(7),
    max_cas_floor=2**64 - 1,
    deleted_rev_floor=8,
    topology=(["one", None],),
)

u64 = st.integers(0, 2**64 - 1)


# --- keys ---------------------------------------------------------------------------------------------------------


@given(number=u64, vbucket=st.integers(0, 1023), seqno=u64)
def test_keys_come_back(number: int, vbucket: int, seqno: int) -> None:
    assert commit_number(commit_key(number)) == number
    assert block_last_seqno(block_key(vbucket, seqno)) == seqno
    assert vbucket_of_key(vbucket_key(vbucket)) == vbucket


@given(one=st.tuples(st.integers(0, 1023), u64), other=st.tuples(st.integers(0, 1023), u64))
def test_rows_lie_in_the_order_of_their_numbers(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (block_key(*one) < block_key(*other)) == (one < other)
    assert (commit_key(one[1]) < commit_key(other[1])) == (one[1] < other[1])


def test_the_blocks_of_a_vbucket() -> None:
    start, end = blocks_of(5, from_seqno=10)
    assert start == block_key(5, 10)
    assert block_key(5, 2**64 - 2) < end < block_key(6, 0)
    assert blocks_of(5)[0] == block_key(5, 0)


@pytest.mark.parametrize("decode", [commit_number, block_last_seqno, vbucket_of_key])
def test_a_key_of_another_length_is_damage(decode: Any) -> None:
    for length in (0, 1, 3, 9, 11):
        with pytest.raises(DataDamaged):
            decode(bytes(length))


# --- the bucket ---------------------------------------------------------------------------------------------------


def test_the_facts_of_a_bucket_come_back() -> None:
    assert BucketFacts.decode(memoryview(FACTS.encode())) == FACTS


def test_newer_data_is_refused_in_a_sentence() -> None:
    newer = json.dumps({"version": FORMAT_VERSION + 1, "anything": "else"}).encode()
    with pytest.raises(DataTooNew) as raised:
        BucketFacts.decode(newer)
    assert raised.value.reason == f"the data has format {FORMAT_VERSION + 1}, this program reads up to {FORMAT_VERSION}"
    assert raised.value.hint == "Use the version of Headwater that wrote it, or a newer one"


@case({"version": None})
@case({"version": "1"})
@case({"version": True})
@case({"version": 0})
@case({"version": -1})
@case({"version": 1.0})
@case({"name": None})
@case({"name": 5})
@case({"uuid": None})
@case({"vbuckets": None})
@case({"vbuckets": "64"})
@case({"vbuckets": 0})
@case({"vbuckets": -64})
@case({"vbuckets": 10**9})
def test_facts_of_a_bucket_that_are_not(changed: dict[str, Any]) -> None:
    members = {**json.loads(FACTS.encode()), **changed}
    for damaged in (members, {name: value for name, value in members.items() if value is not None}):
        with pytest.raises(DataDamaged):
            BucketFacts.decode(json.dumps(damaged).encode())


# --- vbuckets -----------------------------------------------------------------------------------------------------


def test_the_facts_of_a_vbucket_come_back() -> None:
    assert VBucketFacts.decode(memoryview(VBUCKET.encode())) == VBUCKET
    plain = VBucketFacts(state=VBucketState.ACTIVE, failover_log=FailoverLog.start(Vbuuid(1)))
    assert VBucketFacts.decode(plain.encode()) == plain


@each("name", sorted(json.loads(VBUCKET.encode())))
@each("value", [..., "x", -1, 2**64, 1.5, [], [1], {}, True])
def test_facts_of_a_vbucket_that_are_not(name: str, value: Any) -> None:
    members = json.loads(VBUCKET.encode())
    del members[name]
    if value is not ...:
        members[name] = value
    encoded = json.dumps(members).encode()
    if name == "topology" and value in ("x", [], [1], {}):
        return  # A topology is a peer's business: it is kept and given back, not looked into.
    with pytest.raises(DataDamaged):
        VBucketFacts.decode(encoded)


@pytest.mark.parametrize(
    ("name", "value"),
    [("failover_log", [[1, 2], [3]]), ("failover_log", [["x", 2]]), ("failover_log", [[1, -2]]), ("state", 9)],
)
def test_more_facts_of_a_vbucket_that_are_not(name: str, value: Any) -> None:
    members = {**json.loads(VBUCKET.encode()), name: value}
    with pytest.raises(DataDamaged):
        VBucketFacts.decode(json.dumps(members).encode())


@each("encoded", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version":', b"[" * 100_000, b"1" * 9999])
def test_what_is_not_json_is_damage(encoded: bytes) -> None:
    for decode in (BucketFacts.decode, VBucketFacts.decode):
        with pytest.raises(DataDamaged) as raised:
            decode(encoded)
        assert raised.value.hint

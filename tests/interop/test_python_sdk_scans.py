"""Range scans by the Python SDK, on one node and on three: what is found is what is there, in all forms of scans.

The SDK makes one scan a vbucket and puts the answers together by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
from couchbase.collection import Collection
from couchbase.kv_range_scan import PrefixScan, RangeScan, SamplingScan, ScanTerm
from couchbase.mutation_state import MutationState
from couchbase.options import ScanOptions

NUMBER = 300


def key(number: int) -> str:
    return f"scan-item-{number:03}"


@pytest.fixture(scope="module")
def written(documents: Collection) -> MutationState:
    state = MutationState()
    for number in range(NUMBER):
        state.add_mutation_token(documents.upsert(key(number), {"n": number}).mutation_token())
    documents.upsert("scan-gone", {})
    documents.remove("scan-gone")
    return state


def ids(results: Any) -> list[str]:
    return sorted(result.id for result in results)


ALL = [key(number) for number in range(NUMBER)]


def test_ranges(documents: Collection, written: MutationState) -> None:
    scan = RangeScan(ScanTerm(key(10)), ScanTerm(key(20)))
    found = list(documents.scan(scan, ScanOptions(consistent_with=written)))
    assert ids(found) == ALL[10:21]
    assert {result.id: result.content_as[dict]["n"] for result in found} == {key(n): n for n in range(10, 21)}
    assert all(result.cas for result in found)
    exclusive = RangeScan(ScanTerm(key(10), exclusive=True), ScanTerm(key(20), exclusive=True))
    assert ids(documents.scan(exclusive)) == ALL[11:20]


def test_prefixes(documents: Collection, written: MutationState) -> None:
    assert ids(documents.scan(PrefixScan("scan-item-"), ScanOptions(consistent_with=written))) == ALL
    assert ids(documents.scan(PrefixScan("scan-item-29"))) == ALL[290:]
    assert ids(documents.scan(PrefixScan("scan-none"))) == ids(documents.scan(PrefixScan("scan-gone"))) == []


def test_keys_alone_and_in_small_parts(documents: Collection, written: MutationState) -> None:
    options = ScanOptions(ids_only=True, batch_item_limit=1, batch_byte_limit=1, concurrency=8, consistent_with=written)
    found = list(documents.scan(PrefixScan("scan-item-"), options))
    assert ids(found) == ALL
    assert all(result.ids_only for result in found)


def test_samples(documents: Collection, written: MutationState) -> None:
    options = ScanOptions(ids_only=True, consistent_with=written)
    few = ids(documents.scan(SamplingScan(20, seed=7), options))
    assert len(few) == 20
    assert few == ids(documents.scan(SamplingScan(20, seed=7), options))
    assert set(ALL) <= set(ids(documents.scan(SamplingScan(1_000_000), options)))

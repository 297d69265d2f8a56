"""Reads from replicas, and durability that the client watches over itself: the Python SDK on one node and on three."""

from __future__ import annotations

import pytest
from couchbase import exceptions
from couchbase.collection import Collection
from couchbase.durability import ClientDurability, PersistTo, PersistToExtended, ReplicateTo
from couchbase.options import InsertOptions, MutateInOptions, RemoveOptions, ReplaceOptions, UpsertOptions
from couchbase.subdocument import count, exists, get, upsert

COPIES = {"cluster": 1, "three_nodes": 3}


@pytest.fixture
def copies(request: pytest.FixtureRequest) -> int:
    """How many nodes have each document."""
    return COPIES[request.node.callspec.params["any_cluster"]]


def everywhere(copies: int) -> ClientDurability:
    """A write that is on the disks of all copies when it returns."""
    return ClientDurability(
        replicate_to=ReplicateTo.TWO if copies == 3 else ReplicateTo.NONE,
        persist_to=PersistToExtended.TWO if copies == 3 else PersistToExtended.ONE,
    )


def test_whole_documents_of_replicas(documents: Collection, copies: int, key: str) -> None:
    documents.upsert(key, {"n": 1}, UpsertOptions(durability=everywhere(copies)))
    assert documents.get_any_replica(key).content_as[dict] == {"n": 1}
    found = list(documents.get_all_replicas(key))
    assert [result.content_as[dict] for result in found] == [{"n": 1}] * copies
    assert sorted(result.is_replica for result in found) == [False] + [True] * (copies - 1)
    with pytest.raises(exceptions.DocumentUnretrievableException):
        documents.get_any_replica(f"{key}-none")


def test_parts_of_documents_of_replicas(documents: Collection, copies: int, key: str) -> None:
    documents.upsert(key, {"n": 1, "l": [1, 2]})
    durable = MutateInOptions(durability=everywhere(copies))
    documents.mutate_in(key, [upsert("_meta.a", 7, xattr=True, create_parents=True), upsert("n", 2)], durable)
    specs = [get("_meta.a", xattr=True), get("n"), exists("none"), count("l")]
    found = [documents.lookup_in_any_replica(key, specs), *documents.lookup_in_all_replicas(key, specs)]
    for result in found:
        assert (result.content_as[int](0), result.content_as[int](1), result.content_as[int](3)) == (7, 2, 2)
        assert not result.exists(2)
    assert sorted(result.is_replica for result in found[1:]) == [False] + [True] * (copies - 1)
    with pytest.raises(exceptions.DocumentUnretrievableException):
        documents.lookup_in_any_replica(f"{key}-none", specs)


def test_durability_by_the_client(documents: Collection, copies: int, key: str) -> None:
    durability = everywhere(copies)
    documents.insert(key, {"n": 1}, InsertOptions(durability=durability))
    documents.replace(key, {"n": 2}, ReplaceOptions(durability=durability))
    documents.mutate_in(key, [upsert("n", 3)], MutateInOptions(durability=durability))
    assert documents.get(key).content_as[dict] == {"n": 3}
    documents.remove(key, RemoveOptions(durability=durability))
    with pytest.raises(exceptions.DocumentNotFoundException):
        documents.get(key)
    for persist_to in (PersistTo.ONE, PersistToExtended.ACTIVE):
        documents.upsert(key, {}, UpsertOptions(durability=ClientDurability(ReplicateTo.NONE, persist_to)))


def test_durability_beyond_the_copies(documents: Collection, copies: int, key: str) -> None:
    too_many = ClientDurability(replicate_to=ReplicateTo.THREE)
    with pytest.raises(exceptions.DurabilityImpossibleException):
        documents.upsert(key, {}, UpsertOptions(durability=too_many))

"""The PyPI package `couchbase` with parts of documents, and with the data structures it builds on them."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import couchbase.subdocument as subdoc
import pytest
from couchbase import exceptions
from couchbase.collection import Collection
from couchbase.options import GetOptions, LookupInOptions, MutateInOptions

DOCUMENT = {
    "name": "Ålesund",
    "address": {"city": "Oslo", "zip": None},
    "tags": ["a", "b", ["c"]],
    "visits": 7,
    "dotted.name": True,
}


@pytest.fixture
def stored(collection: Collection, key: str) -> str:
    """The key of a document."""
    collection.upsert(key, DOCUMENT)
    return key


# --- look-ups -----------------------------------------------------------------------------------------------------


def test_lookup_in(collection: Collection, stored: str) -> None:
    found = collection.lookup_in(
        stored,
        [
            subdoc.get("name"),
            subdoc.get("address.city"),
            subdoc.get("address.zip"),
            subdoc.get("tags[1]"),
            subdoc.get("tags[-1][0]"),
            subdoc.get("`dotted.name`"),
            subdoc.exists("visits"),
            subdoc.exists("nothing"),
            subdoc.count("tags"),
            subdoc.count("address"),
            subdoc.get("nothing"),
            subdoc.get("name.of"),
            subdoc.get_full(),
        ],
    )
    assert found.cas == collection.get(stored).cas
    assert found.content_as[str](0) == "Ålesund"
    assert found.content_as[str](1) == "Oslo"
    assert found.content_as[lambda content: content](2) is None
    assert found.content_as[str](3) == "b"
    assert found.content_as[str](4) == "c"
    assert found.content_as[bool](5) is True
    assert found.exists(6)
    assert not found.exists(7)
    assert found.content_as[int](8) == 3
    assert found.content_as[int](9) == 2
    with pytest.raises(exceptions.PathNotFoundException):
        found.content_as[str](10)
    with pytest.raises(exceptions.PathMismatchException):
        found.content_as[str](11)
    assert found.content_as[dict](12) == DOCUMENT


def test_lookup_in_virtual_attributes(collection: Collection, stored: str) -> None:
    macro = subdoc.LookupInMacro
    macros = (macro.cas(), macro.expiry_time(), macro.is_deleted(), macro.value_size_bytes(), macro.last_modified())
    found = collection.lookup_in(stored, [subdoc.get(path, xattr=True) for path in (*macros, macro.document())])
    assert int(found.content_as[str](0), 16) == collection.get(stored).cas
    assert found.content_as[int](1) == 0
    assert found.content_as[bool](2) is False
    assert found.content_as[int](3) > 0
    assert abs(int(found.content_as[str](4)) - time.time()) < 60
    assert found.content_as[dict](5)["datatype"] == ["json"]


def test_projections(collection: Collection, stored: str) -> None:
    assert collection.get(stored, GetOptions(project=["name"])).content_as[dict] == {"name": "Ålesund"}
    several = collection.get(stored, GetOptions(project=["address.city", "visits", "nothing"]))
    assert several.content_as[dict] == {"address": {"city": "Oslo"}, "visits": 7}


def test_more_projections_than_one_request_holds(collection: Collection, key: str) -> None:
    document = {f"field-{number}": number for number in range(40)}
    collection.upsert(key, document)
    assert collection.get(key, GetOptions(project=list(document))).content_as[dict] == document


# --- mutations ----------------------------------------------------------------------------------------------------


def test_mutate_in(collection: Collection, stored: str) -> None:
    before = collection.get(stored).cas
    mutated = collection.mutate_in(
        stored,
        [
            subdoc.upsert("name", "Bergen"),
            subdoc.insert("country", "NO"),
            subdoc.insert("deep.er.still", 1, create_parents=True),
            subdoc.replace("address.city", "Voss"),
            subdoc.remove("address.zip"),
        ],
    )
    assert mutated.cas > before
    read = collection.get(stored)
    assert read.cas == mutated.cas
    assert read.content_as[dict] == {
        **DOCUMENT,
        "name": "Bergen",
        "address": {"city": "Voss"},
        "country": "NO",
        "deep": {"er": {"still": 1}},
    }


def test_mutate_arrays(collection: Collection, key: str) -> None:
    collection.upsert(key, {"list": [2], "set": [1]})
    collection.mutate_in(
        key,
        [
            subdoc.array_append("list", 3, 4),
            subdoc.array_prepend("list", 0),
            subdoc.array_insert("list[1]", 1),
            subdoc.array_addunique("set", 2),
            subdoc.array_append("fresh.list", "first", create_parents=True),
        ],
    )
    expected = {"list": [0, 1, 2, 3, 4], "set": [1, 2], "fresh": {"list": ["first"]}}
    assert collection.get(key).content_as[dict] == expected
    with pytest.raises(exceptions.PathExistsException):
        collection.mutate_in(key, [subdoc.array_addunique("set", 2)])


def test_mutate_counters(collection: Collection, key: str) -> None:
    collection.upsert(key, {"visits": 1})
    counted = collection.mutate_in(
        key, [subdoc.counter("visits", 5), subdoc.decrement("visits", 2), subdoc.increment("new", 3)]
    )
    assert [counted.content_as[int](spec) for spec in range(3)] == [6, 4, 3]
    assert collection.get(key).content_as[dict] == {"visits": 4, "new": 3}


def test_a_mutation_is_whole_or_not_at_all(collection: Collection, stored: str) -> None:
    before = collection.get(stored)
    with pytest.raises(exceptions.PathNotFoundException):
        collection.mutate_in(stored, [subdoc.upsert("name", "Bergen"), subdoc.remove("nothing")])
    with pytest.raises(exceptions.PathExistsException):
        collection.mutate_in(stored, [subdoc.upsert("name", "Bergen"), subdoc.insert("visits", 8)])
    with pytest.raises(exceptions.PathMismatchException):
        collection.mutate_in(stored, [subdoc.upsert("name.of", "Bergen")])
    after = collection.get(stored)
    assert (after.cas, after.content_as[dict]) == (before.cas, before.content_as[dict])


def test_mutate_in_with_cas(collection: Collection, stored: str) -> None:
    old = collection.get(stored).cas
    new = collection.mutate_in(stored, [subdoc.upsert("visits", 8)], MutateInOptions(cas=old)).cas
    with pytest.raises(exceptions.CasMismatchException):
        collection.mutate_in(stored, [subdoc.upsert("visits", 9)], MutateInOptions(cas=old))
    collection.mutate_in(stored, [subdoc.upsert("visits", 9)], MutateInOptions(cas=new))


def test_mutate_in_expiry(collection: Collection, stored: str) -> None:
    collection.mutate_in(stored, [subdoc.upsert("visits", 8)], MutateInOptions(expiry=timedelta(hours=1)))
    expiry = collection.get(stored, GetOptions(with_expiry=True)).expiry_time
    assert expiry > datetime.now()
    collection.mutate_in(stored, [subdoc.upsert("visits", 9)], MutateInOptions(preserve_expiry=True))
    assert collection.get(stored, GetOptions(with_expiry=True)).expiry_time == expiry


def test_store_semantics(collection: Collection, key: str) -> None:
    insert = MutateInOptions(store_semantics=subdoc.StoreSemantics.INSERT)
    upsert = MutateInOptions(store_semantics=subdoc.StoreSemantics.UPSERT)
    collection.mutate_in(key, [subdoc.upsert("version", 1)], upsert)
    assert collection.get(key).content_as[dict] == {"version": 1}
    collection.mutate_in(key, [subdoc.upsert("version", 2)], upsert)
    with pytest.raises(exceptions.DocumentExistsException):
        collection.mutate_in(key, [subdoc.upsert("version", 3)], insert)
    assert collection.get(key).content_as[dict] == {"version": 2}
    collection.remove(key)
    collection.mutate_in(key, [subdoc.insert("version", 4)], insert)
    assert collection.get(key).content_as[dict] == {"version": 4}


def test_more_specs_than_one_request_holds(collection: Collection, stored: str) -> None:
    with pytest.raises(exceptions.InvalidArgumentException):
        collection.mutate_in(stored, [subdoc.upsert(f"field-{number}", 1) for number in range(17)])
    with pytest.raises(exceptions.InvalidArgumentException):
        collection.lookup_in(stored, [subdoc.get(f"field-{number}") for number in range(17)])


# --- extended attributes and macros -------------------------------------------------------------------------------


def test_extended_attributes(collection: Collection, stored: str) -> None:
    collection.mutate_in(
        stored,
        [
            subdoc.upsert("meta.author", "me", xattr=True, create_parents=True),
            subdoc.array_append("meta.log", "made", xattr=True, create_parents=True),
            subdoc.upsert("visits", 8),
        ],
    )
    found = collection.lookup_in(
        stored,
        [subdoc.get("meta", xattr=True), subdoc.exists("meta.author", xattr=True), subdoc.get("visits")],
        LookupInOptions(),
    )
    assert found.content_as[dict](0) == {"author": "me", "log": ["made"]}
    assert found.exists(1)
    assert found.content_as[int](2) == 8
    assert collection.get(stored).content_as[dict] == {**DOCUMENT, "visits": 8}
    collection.mutate_in(stored, [subdoc.remove("meta.log", xattr=True)])
    collection.upsert(stored, DOCUMENT)
    again = collection.lookup_in(stored, [subdoc.get("meta", xattr=True)])
    assert again.content_as[dict](0) == {"author": "me"}


def test_macros_of_a_mutation(collection: Collection, stored: str) -> None:
    macro = subdoc.MutationMacro
    mutated = collection.mutate_in(
        stored,
        [
            subdoc.upsert("meta.cas", macro.cas(), xattr=True, create_parents=True),
            subdoc.upsert("meta.seqno", macro.seq_no(), xattr=True, create_parents=True),
            subdoc.upsert("meta.crc", macro.value_crc32c(), xattr=True, create_parents=True),
        ],
    )
    found = collection.lookup_in(stored, [subdoc.get(f"meta.{name}", xattr=True) for name in ("cas", "seqno", "crc")])
    assert subdoc.convert_macro_cas_to_cas(found.content_as[str](0)) == mutated.cas
    assert int(found.content_as[str](1), 16) == mutated.mutation_token().as_dict()["sequence_number"]
    assert found.content_as[str](2).startswith("0x")


# --- data structures ----------------------------------------------------------------------------------------------


def test_list(collection: Collection, key: str) -> None:
    letters = collection.couchbase_list(key)
    letters.append("b")
    letters.prepend("a")
    letters.set_at(1, "c")
    assert list(letters) == ["a", "c"]
    assert letters.size() == 2
    letters.remove_at(0)
    assert letters.get_at(0) == "c"

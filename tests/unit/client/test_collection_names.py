"""Names by id and ids by name: what a manifest and events teach, and what is said about a name that is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.client.collection_names import NAMES_SHOWN_MAX, NO_CODE, CollectionFilter, CollectionNames
from headwater.errors import UnknownCollection, UnknownScope
from headwater.protocol.manifest import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    Manifest,
    ScopeCreated,
    ScopeDropped,
)
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId
from support.cases import case

GARDEN = (
    Manifest()
    .with_scope("garden")  # scope 8
    .with_collection("garden", "fruit")  # 9
    .with_collection("garden", "roots")  # a
    .with_collection("_default", "tools")  # b
)


def uid(number: int) -> ManifestUid:
    return ManifestUid(number)


def created(number: int, name: str, *, scope: int = 8, at: int = 5) -> CollectionCreated:
    return CollectionCreated(
        manifest_uid=uid(at), scope_id=ScopeId(scope), collection_id=CollectionId(number), name=name
    )


def dropped(number: int, *, scope: int = 8, at: int = 5) -> CollectionDropped:
    return CollectionDropped(manifest_uid=uid(at), scope_id=ScopeId(scope), collection_id=CollectionId(number))


def full_name(names: CollectionNames, number: int) -> tuple[str | None, str | None]:
    """As the bulk path finds it, by way of the table."""
    table = names.table
    entry = table.collection_ids.tolist().index(number)
    scope, collection = table.scope_codes[entry], table.collection_codes[entry]
    known_scope = None if scope == NO_CODE else table.scopes[scope].as_py()
    assert collection == names.collection_code(CollectionId(number))
    return known_scope, table.collections[collection].as_py()


# --- names by id --------------------------------------------------------------------------------------------------


def test_without_a_manifest_there_is_the_default_collection() -> None:
    names = CollectionNames()
    assert full_name(names, 0) == ("_default", "_default")
    assert names.find_collection("_default._default") == 0
    assert names.find_scope("_default") == 0


def test_names_come_from_the_manifest() -> None:
    names = CollectionNames(GARDEN)
    found = {number: full_name(names, number) for number in names.table.collection_ids.tolist()}
    assert found == {
        0x0: ("_default", "_default"),
        0x9: ("garden", "fruit"),
        0xA: ("garden", "roots"),
        0xB: ("_default", "tools"),
    }


def test_what_nobody_has_told_has_no_name() -> None:
    names = CollectionNames(GARDEN)
    assert names.scope_code(ScopeId(9)) == names.collection_code(CollectionId(8)) == NO_CODE
    names.learn(created(0xC, "lost", scope=0x77))
    assert full_name(names, 0xC) == (None, "lost")
    names.learn(ScopeCreated(manifest_uid=uid(5), scope_id=ScopeId(0x77), name="found"))
    assert full_name(names, 0xC) == ("found", "lost")


def test_a_name_is_in_the_table_once_and_keeps_its_place() -> None:
    names = CollectionNames(GARDEN)
    before = names.table
    assert names.table is before
    names.learn(created(0xC, "fruit", scope=0))
    names.learn(created(0xD, "herbs"))
    after = names.table
    assert after.scopes.to_pylist() == before.scopes.to_pylist() == ["_default", "garden"]
    assert after.collections.to_pylist() == [*before.collections.to_pylist(), "herbs"]
    assert full_name(names, 0xC) == ("_default", "fruit")
    names.learn(created(0xD, "herbs"))
    assert names.table is after


def test_names_of_what_was_dropped_stay() -> None:
    names = CollectionNames(GARDEN)
    names.learn(dropped(0x9))
    names.learn(ScopeDropped(manifest_uid=uid(5), scope_id=ScopeId(8)))
    names.update(GARDEN.without_scope("garden"))
    assert full_name(names, 0x9) == ("garden", "fruit")


# --- ids by name --------------------------------------------------------------------------------------------------


def test_collections_and_scopes_are_found_by_name_and_by_id() -> None:
    names = CollectionNames(GARDEN.with_scope("0x8"))
    assert [names.find_collection(given) for given in ("garden.fruit", "0x9", 9)] == [9, 9, 9]
    assert [names.find_scope(given) for given in ("garden", 8)] == [8, 8]
    assert CollectionNames(GARDEN).find_scope("0x8") == 8
    assert names.find_scope("0x8") == 0xC, "a name that looks like an id is a name"


@case("garden.fruits", 'collection "garden.fruits" is unknown', 'Did you mean "garden.fruit"?')
@case("fruit", 'collection "fruit" is unknown', 'Did you mean "garden.fruit"?')
@case("0x77", 'collection "0x77" is unknown', "Use one of these: _default._default, _default.tools, garden.fruit")
@case("0xzz", 'collection "0xzz" is unknown', "Use one of these: _default._default")
@case(0x77, "collection 0x77 is unknown", "Use one of these: _default._default")
@case(8, "collection 0x8 is unknown", "Use one of these: _default._default")  # it is a scope's
def test_an_unknown_collection_is_told_with_what_to_write(given: str | int, reason: str, hint: str) -> None:
    with pytest.raises(UnknownCollection) as raised:
        CollectionNames(GARDEN).find_collection(given)
    assert raised.value.reason == reason
    assert raised.value.hint.startswith(hint)


@case("gardens", 'scope "gardens" is unknown', 'Did you mean "garden"?')
@case("0x77", 'scope "0x77" is unknown', "Use one of these: _default, garden")
@case(9, "scope 0x9 is unknown", "Use one of these: _default, garden")
def test_an_unknown_scope_is_told_with_what_to_write(given: str | int, reason: str, hint: str) -> None:
    with pytest.raises(UnknownScope) as raised:
        CollectionNames(GARDEN).find_scope(given)
    assert (raised.value.reason, raised.value.hint) == (reason, hint)


def test_a_collection_of_an_unknown_scope_is_the_scopes_fault() -> None:
    with pytest.raises(UnknownScope, match=r'scope "gardn" is unknown\. Did you mean "garden"'):
        CollectionNames(GARDEN).find_collection("gardn.fruit")


def test_of_many_names_an_error_tells_some() -> None:
    manifest = Manifest()
    for number in range(2 * NAMES_SHOWN_MAX):
        manifest = manifest.with_scope(f"scope-{number:02}")
    with pytest.raises(UnknownScope) as raised:
        CollectionNames(manifest).find_scope("?")
    assert raised.value.hint.endswith(f"scope-08 and {NAMES_SHOWN_MAX + 1} more")


def test_a_bucket_with_no_collection_at_all() -> None:
    names = CollectionNames(Manifest().without_collection("_default", "_default"))
    with pytest.raises(UnknownCollection, match="there is none in the bucket"):
        names.find_collection("0x9")


# --- what was dropped is not found --------------------------------------------------------------------------------


def assert_dropped(names: CollectionNames, *given: str | int) -> None:
    for one in given:
        with pytest.raises(UnknownCollection, match="has been dropped"):
            names.find_collection(one)


def test_a_newer_manifest_shows_what_was_dropped() -> None:
    names = CollectionNames(GARDEN)
    names.update(GARDEN.without_collection("garden", "fruit"))
    assert_dropped(names, "garden.fruit", 9)
    assert names.find_collection("garden.roots") == 0xA
    names.update(GARDEN.without_scope("garden"))  # no newer than the last one
    assert names.find_scope("garden") == 8
    names.update(GARDEN.without_collection("garden", "fruit").without_scope("garden"))
    with pytest.raises(UnknownScope, match="has been dropped"):
        names.find_scope("garden")


def test_an_event_tells_what_was_dropped_and_what_has_its_name_now() -> None:
    names = CollectionNames(GARDEN)
    names.learn(dropped(9))
    assert_dropped(names, "garden.fruit")
    names.learn(created(0xC, "fruit"))
    assert names.find_collection("garden.fruit") == 0xC
    assert_dropped(names, 9)
    names.learn(created(9, "fruit"))  # another vbucket has the beginning of it
    assert names.find_collection("garden.fruit") == 0xC
    names.update(GARDEN.with_scope("yard"))  # newer than ours, and older than the events
    assert_dropped(names, 9)


def test_an_event_of_the_past_names_what_the_manifest_shows_to_be_dropped() -> None:
    newest = GARDEN.without_collection("garden", "fruit").with_collection("garden", "fruit")
    names = CollectionNames(newest)
    names.learn(created(9, "fruit", at=2))
    assert full_name(names, 9) == ("garden", "fruit")
    assert_dropped(names, 9)
    assert names.find_collection("garden.fruit") == 0xC
    names.learn(ScopeCreated(manifest_uid=uid(1), scope_id=ScopeId(0x77), name="garden"))
    assert names.find_scope("garden") == 8


def test_events_of_the_next_manifest_carry_the_uid_of_this_one() -> None:
    next_one = GARDEN.with_collection("garden", "herbs")
    events = GARDEN.events_to(replace(next_one.with_scope("yard"), uid=uid(GARDEN.uid + 1)))
    assert {event.manifest_uid for event in events} == {GARDEN.uid, GARDEN.uid + 1}
    names = CollectionNames(GARDEN)
    for event in events:
        names.learn(event)
    assert names.find_collection("garden.herbs") == 0xC
    assert names.find_scope("yard") == 0xD
    names.update(GARDEN)  # a node that lags behind
    assert names.find_collection("garden.herbs") == 0xC


def test_a_dropped_scope_does_not_come_back() -> None:
    names = CollectionNames(GARDEN)
    names.learn(ScopeDropped(manifest_uid=uid(5), scope_id=ScopeId(8)))
    names.learn(ScopeCreated(manifest_uid=uid(1), scope_id=ScopeId(8), name="garden"))
    with pytest.raises(UnknownScope, match="has been dropped"):
        names.find_scope("garden")


# --- filters ------------------------------------------------------------------------------------------------------


def test_a_filter_is_made_of_names_and_ids() -> None:
    only = CollectionNames(GARDEN).select(scopes=["garden"], collections=["_default.tools", 0])
    assert only == CollectionFilter(
        scopes=frozenset({ScopeId(8)}), collections=frozenset({CollectionId(0xB), CollectionId(0)})
    )
    with pytest.raises(UnknownCollection):
        CollectionNames(GARDEN).select(collections=["garden.none"])


def test_a_filter_lets_through_all_that_its_scopes_ever_had() -> None:
    names = CollectionNames(GARDEN)
    only = CollectionFilter(scopes=frozenset({ScopeId(8)}), collections=frozenset({CollectionId(0x99)}))
    names.learn(dropped(9))
    names.learn(created(0xC, "herbs"))
    assert names.ids_in(only).tolist() == [0x9, 0xA, 0xC, 0x99]


@case(created(9, "fruit"), True, True)
@case(dropped(9), True, True)
@case(created(0xA, "roots"), True, False)
@case(created(9, "fruit", scope=0), False, True)
@case(created(0xB, "tools", scope=0), False, False)
@case(
    CollectionModified(manifest_uid=uid(5), scope_id=ScopeId(8), collection_id=CollectionId(9), name="fruit"),
    True,
    True,
)
@case(ScopeCreated(manifest_uid=uid(5), scope_id=ScopeId(8), name="garden"), True, False)
@case(ScopeDropped(manifest_uid=uid(5), scope_id=ScopeId(8)), True, False)
@case(ScopeDropped(manifest_uid=uid(5), scope_id=ScopeId(9)), False, False)
def test_events_pass_a_filter_that_they_are_about(event: Event, by_scope: bool, by_collection: bool) -> None:
    assert CollectionFilter(scopes=frozenset({ScopeId(8)})).passes(event) == by_scope
    assert CollectionFilter(collections=frozenset({CollectionId(9)})).passes(event) == by_collection

"""The collections manifest: making a newer one, JSON in and out, and the system events between two of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LocalProtocolError, MalformedJson
from headwater.protocol import manifest as manifest_module
from headwater.protocol import manifest as manifests
from headwater.protocol.manifest import COLLECTIONS_MAX, ID_MAX, Collection, Manifest, Scope
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId
from support.cases import case, each

GARDEN = (
    Manifest()
    .with_scope("garden")
    .with_collection("garden", "fruit", max_ttl_s=60)
    .with_collection("garden", "roots", history=True)
    .with_collection("_default", "tools")
)


# --- looking up ---------------------------------------------------------------------------------------------------


def test_a_new_bucket_has_the_default_scope_and_collection() -> None:
    assert Manifest().uid == 0
    assert [(scope.name, scope.id) for scope in Manifest().scopes] == [("_default", 0)]
    assert Manifest().find("_default", "_default") == Collection(id=CollectionId(0), name="_default")


def test_finding() -> None:
    fruit = GARDEN.find("garden", "fruit")
    assert fruit == Collection(id=CollectionId(9), name="fruit", max_ttl_s=60)
    found = GARDEN.collection_by_id(CollectionId(9))
    assert found == (GARDEN.scope("garden"), fruit)
    assert GARDEN.find("_default", "fruit") is None
    assert GARDEN.find("nowhere", "fruit") is None
    assert GARDEN.scope("nowhere") is None
    assert GARDEN.collection_by_id(CollectionId(8)) is None
    assert [collection.name for _, collection in GARDEN.collections()] == ["_default", "tools", "fruit", "roots"]


# --- changing -----------------------------------------------------------------------------------------------------


def test_ids_start_at_8_and_are_of_one_row() -> None:
    assert [(scope.name, scope.id) for scope in GARDEN.scopes] == [("_default", 0), ("garden", 8)]
    assert {collection.name: collection.id for _, collection in GARDEN.collections()} == {
        "_default": 0, "fruit": 9, "roots": 10, "tools": 11,
    }  # fmt: skip
    assert (GARDEN.uid, GARDEN.ids_used) == (4, 11)


def test_every_change_has_a_higher_uid_and_leaves_the_old_manifest_alone() -> None:
    before = GARDEN.encode()
    for changed in (
        GARDEN.with_scope("shed"),
        GARDEN.with_collection("garden", "nuts"),
        GARDEN.without_collection("garden", "fruit"),
        GARDEN.without_scope("garden"),
    ):
        assert changed.uid == GARDEN.uid + 1
    assert GARDEN.encode() == before


def test_an_id_is_never_given_out_again() -> None:
    again = GARDEN.without_collection("_default", "tools").with_collection("_default", "tools")
    assert again.find("_default", "tools") == Collection(id=CollectionId(12), name="tools")
    emptied = GARDEN.without_scope("garden").without_collection("_default", "tools")
    assert emptied.with_scope("garden").scope("garden") == Scope(id=ScopeId(12), name="garden")


def test_a_scope_goes_with_its_collections() -> None:
    assert [collection.name for _, collection in GARDEN.without_scope("garden").collections()] == ["_default", "tools"]


def test_the_default_collection_can_be_dropped_and_does_not_come_back() -> None:
    without = Manifest().without_collection("_default", "_default")
    assert without.collection_by_id(CollectionId(0)) is None
    with pytest.raises(LocalProtocolError):
        without.with_collection("_default", "_default")


@case(lambda: GARDEN.with_scope("garden"))
@case(lambda: GARDEN.with_scope("_default"))
@case(lambda: GARDEN.with_collection("garden", "fruit"))
@case(lambda: GARDEN.with_collection("nowhere", "fruit"))
@case(lambda: GARDEN.without_scope("nowhere"))
@case(lambda: GARDEN.without_scope("_default"))
@case(lambda: GARDEN.without_collection("garden", "nuts"))
@case(lambda: GARDEN.without_collection("nowhere", "fruit"))
def test_changes_that_are_not_possible(change: Any) -> None:
    with pytest.raises(LocalProtocolError):
        change()


@each("name", ["a", "Z9", "with-dash", "with_underscore", "with%percent", "-a", "0", "x" * 251])
def test_good_names(name: str) -> None:
    assert Manifest().with_scope(name).with_collection(name, name).find(name, name) is not None


@each("name", ["", "_a", "%a", "a b", "a.b", "ä", "a/b", "a\0", "x" * 252, "a\n"])
def test_names_that_are_refused_with_a_hint(name: str) -> None:
    for change in (lambda: Manifest().with_scope(name), lambda: Manifest().with_collection("_default", name)):
        with pytest.raises(LocalProtocolError) as raised:
            change()
        assert "letters, digits" in raised.value.hint


def test_there_are_at_most_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COLLECTIONS_MAX == 1200
    monkeypatch.setattr(manifest_module, "COLLECTIONS_MAX", 5)
    monkeypatch.setattr(manifest_module, "SCOPES_MAX", 3)
    full = GARDEN.with_collection("garden", "nuts").with_scope("shed")
    with pytest.raises(LocalProtocolError, match="at most"):
        full.with_collection("shed", "nails")
    with pytest.raises(LocalProtocolError, match="at most"):
        full.with_scope("cellar")


def test_ids_run_out() -> None:
    last = replace(Manifest(), ids_used=ID_MAX - 1).with_scope("last")
    assert last.scope("last") == Scope(id=ScopeId(ID_MAX), name="last")
    for change in (lambda: last.with_scope("more"), lambda: last.with_collection("last", "more")):
        with pytest.raises(LocalProtocolError, match="ids"):
            change()


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_the_json_is_that_of_real_servers() -> None:
    assert json.loads(GARDEN.encode()) == {
        "uid": "4",
        "scopes": [
            {"name": "_default", "uid": "0", "collections": [
                {"name": "_default", "uid": "0"},
                {"name": "tools", "uid": "b"},
            ]},
            {"name": "garden", "uid": "8", "collections": [
                {"name": "fruit", "uid": "9", "maxTTL": 60},
                {"name": "roots", "uid": "a", "history": True},
            ]},
        ],
    }  # fmt: skip


def test_manifests_come_back() -> None:
    for manifest in (Manifest(), GARDEN, GARDEN.without_scope("garden")):
        assert Manifest.decode(manifest.encode(with_ids_used=True)) == manifest
        assert Manifest.decode(memoryview(manifest.encode())).to_json() == manifest.to_json()


def test_a_stored_manifest_remembers_the_ids_that_were_dropped() -> None:
    dropped = GARDEN.without_collection("_default", "tools")
    assert Manifest.decode(dropped.encode(with_ids_used=True)).ids_used == 11
    # Over the wire it is not said: the highest that is seen.
    assert Manifest.decode(dropped.encode()).ids_used == 10


@pytest.mark.parametrize("ttl", [0, 1, 2**31 - 1])
def test_both_names_of_the_longest_life(ttl: int) -> None:
    for name in ("maxTTL", "max_ttl"):
        decoded = Manifest.decode(encoded(fruit={name: ttl}))
        fruit = decoded.find("_default", "fruit")
        assert fruit.max_ttl_s == ttl


def encoded(fruit: dict[str, Any] | None = None, **members: Any) -> bytes:
    """A manifest with a collection `fruit`, and whatever is wrong with it."""
    collection = {"name": "fruit", "uid": "8", **(fruit or {})}
    default = {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}, collection]}
    return json.dumps({"uid": "1", "scopes": [default], **members}).encode()


DEFAULT_SCOPE = {"name": "_default", "uid": "0"}


def test_what_is_good_is_good() -> None:
    assert Manifest.decode(encoded()).find("_default", "fruit") is not None
    # Names that servers give and users may not.
    system = {"name": "_system", "uid": "8", "collections": [{"name": "_mobile", "uid": "8"}]}
    assert Manifest.decode(encoded(scopes=[DEFAULT_SCOPE, system])).find("_system", "_mobile") is not None


@each("data", [
    b"", b"{", b"null", b"[]", b'"text"', b"{}", b"\xff", b"[" * 100_000, encoded(uid=None), encoded(uid=1),
    encoded(uid="g"), encoded(uid=""), encoded(uid="-1"), encoded(uid="1" + "0" * 16), encoded(scopes=None),
    encoded(scopes=5), encoded(scopes={}), encoded(scopes=[]), encoded(scopes=[None]), encoded(scopes=["_default"]),
    encoded(scopes=[{"name": "_default"}]), encoded(scopes=[{"uid": "0"}]),
    encoded(scopes=[{"name": "garden", "uid": "8"}]), encoded(scopes=[{"name": "garden", "uid": "0"}]),
    encoded(scopes=[{"name": "_default", "uid": "8"}]),
    encoded(scopes=[DEFAULT_SCOPE, {"name": "_default", "uid": "8"}]),
    encoded(scopes=[DEFAULT_SCOPE, {"name": "a", "uid": "8"}, {"name": "b", "uid": "8"}]),
    encoded(scopes=[DEFAULT_SCOPE, {"name": "a", "uid": "8"}, {"name": "a", "uid": "9"}]),
    encoded(scopes=[DEFAULT_SCOPE, {"name": "a", "uid": "100000000"}]),
    encoded(scopes=[DEFAULT_SCOPE, {"name": "a", "uid": "8", "collections": 5}]),
    encoded(scopes=[DEFAULT_SCOPE, {"name": "a", "uid": "8", "collections": [{"name": "_default", "uid": "0"}]}]),
    encoded(fruit={"uid": "0"}), encoded(fruit={"uid": "0", "name": "_default"}), encoded(fruit={"name": "_default"}),
    encoded(fruit={"uid": "100000000"}), encoded(fruit={"uid": 8}), encoded(fruit={"name": None}),
    encoded(fruit={"name": 5}), encoded(fruit={"name": ""}), encoded(fruit={"name": "with space"}),
    encoded(fruit={"name": "x" * 252}), encoded(fruit={"maxTTL": -1}), encoded(fruit={"maxTTL": 2**31}),
    encoded(fruit={"maxTTL": "5"}), encoded(fruit={"maxTTL": 1.5}), encoded(fruit={"maxTTL": True}),
    encoded(ids_used="x"), encoded(ids_used=-1), encoded(ids_used=None), encoded(ids_used=True),
    encoded(ids_used=2**32), encoded(ids_used=float("inf")), encoded(ids_used=float("nan")),
])  # fmt: skip
def test_what_is_not_a_manifest(data: bytes) -> None:
    with pytest.raises(MalformedJson):
        Manifest.decode(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["uid", "scopes", "name", "collections", "maxTTL", "ids_used"]), inner)
    ),
    max_leaves=10,
)


@given(value=json_values)
def test_any_json_is_a_manifest_or_malformed(value: Any) -> None:
    try:
        manifest = Manifest.decode(json.dumps(value).encode())
    except MalformedJson:
        return
    assert Manifest.decode(manifest.encode(with_ids_used=True)) == manifest


# --- events -------------------------------------------------------------------------------------------------------


def test_nothing_changed_is_nothing_to_tell() -> None:
    assert GARDEN.events_to(GARDEN) == []
    assert GARDEN.events_to(replace(GARDEN, uid=ManifestUid(9))) == []


def test_what_came() -> None:
    """Collections by name, as recorded from 7.0.5; the last has the new uid."""
    assert Manifest().events_to(GARDEN) == [
        manifests.ScopeCreated(manifest_uid=ManifestUid(0), scope_id=ScopeId(8), name="garden"),
        created(9, "fruit", max_ttl_s=60),
        created(10, "roots", history=True),
        replace(created(11, "tools", scope=0), manifest_uid=GARDEN.uid),
    ]


def created(collection_id: int, name: str, *, scope: int = 8, **members: Any) -> manifests.CollectionCreated:
    return manifests.CollectionCreated(
        manifest_uid=ManifestUid(0), scope_id=ScopeId(scope), collection_id=CollectionId(collection_id), name=name,
        **members,
    )  # fmt: skip


def test_what_went() -> None:
    """Collections before their scope."""
    without = GARDEN.without_scope("garden")
    assert GARDEN.events_to(without) == [
        manifests.CollectionDropped(manifest_uid=GARDEN.uid, scope_id=ScopeId(8), collection_id=CollectionId(9)),
        manifests.CollectionDropped(manifest_uid=GARDEN.uid, scope_id=ScopeId(8), collection_id=CollectionId(10)),
        manifests.ScopeDropped(manifest_uid=without.uid, scope_id=ScopeId(8)),
    ]


def test_what_changed() -> None:
    fruit = GARDEN.find("garden", "fruit")
    assert fruit is not None
    garden = GARDEN.scope("garden")
    changed = replace(garden, collections=(replace(fruit, max_ttl_s=None, history=True), *garden.collections[1:]))
    newer = replace(GARDEN, uid=ManifestUid(9), scopes=(GARDEN.scopes[0], changed))
    assert GARDEN.events_to(newer) == [
        manifests.CollectionModified(
            manifest_uid=ManifestUid(9), scope_id=ScopeId(8), collection_id=CollectionId(9), name="fruit", history=True
        )
    ]


def test_a_name_that_went_and_came_again_is_another_collection() -> None:
    again = GARDEN.without_collection("_default", "tools").with_collection("_default", "tools")
    dropped, made = GARDEN.events_to(again)
    assert (dropped.collection_id, made.collection_id) == (11, 12)
    assert (dropped.manifest_uid, made.manifest_uid) == (GARDEN.uid, again.uid)


@given(data=st.data())
def test_events_lead_from_any_manifest_to_any_later_one(data: st.DataObject) -> None:
    older = changed_at_random(Manifest(), data)
    newer = changed_at_random(older, data)
    events = older.events_to(newer)
    assert applied(older, events) == {collection.id: scope.id for scope, collection in newer.collections()}
    assert [event.manifest_uid for event in events] == [older.uid] * (len(events) - 1) + [newer.uid] * bool(events)


def changed_at_random(manifest: Manifest, data: st.DataObject) -> Manifest:
    for _ in range(data.draw(st.integers(0, 8))):
        name, scope = data.draw(st.sampled_from("abc")), data.draw(st.sampled_from(["_default", "a", "b"]))
        change = data.draw(
            st.sampled_from(
                [
                    lambda m, name, scope: m.with_scope(name),
                    lambda m, name, scope: m.without_scope(name),
                    lambda m, name, scope: m.with_collection(scope, name),
                    lambda m, name, scope: m.without_collection(scope, name),
                ]
            )
        )
        try:
            manifest = change(manifest, name, scope)
        except LocalProtocolError:
            continue
    return manifest


def applied(manifest: Manifest, events: list[manifests.Event]) -> dict[int, int]:
    """What a consumer that follows the events holds; each must be possible where it stands."""
    scopes = {scope.id for scope in manifest.scopes}
    collections = {collection.id: scope.id for scope, collection in manifest.collections()}
    for event in events:
        if isinstance(event, manifests.CollectionDropped):
            assert collections.pop(event.collection_id) == event.scope_id
        elif isinstance(event, manifests.ScopeDropped):
            assert event.scope_id not in collections.values()
            scopes.remove(event.scope_id)
        elif isinstance(event, manifests.ScopeCreated):
            assert event.scope_id not in scopes
            scopes.add(event.scope_id)
        else:
            assert event.scope_id in scopes
            collections[event.collection_id] = event.scope_id
    return collections

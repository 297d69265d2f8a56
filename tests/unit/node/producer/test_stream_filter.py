"""What passes a stream's filter, before and after the system events that it follows."""

from __future__ import annotations

from headwater.node.producer.stream_filter import StreamFilter
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import CollectionId, ManifestUid
from headwater.protocol.system_events import CollectionCreated, CollectionDropped, ScopeDropped

MANIFEST = Manifest().with_scope("shop").with_collection("shop", "orders").with_collection("shop", "returns")
SHOP = next(scope for scope in MANIFEST.scopes if scope.name == "shop")
ORDERS, RETURNS = (collection.id for collection in SHOP.collections)
UID = ManifestUid(9)


def wanted(stream_filter: StreamFilter, manifest: Manifest = MANIFEST) -> list[int] | None:
    ids = stream_filter.wanted(manifest)
    return None if ids is None else ids.tolist()


def dropped(collection: CollectionId) -> CollectionDropped:
    return CollectionDropped(manifest_uid=UID, scope_id=SHOP.id, collection_id=collection)


def test_no_filter_lets_all_pass_until_a_collection_is_gone() -> None:
    passes_all = StreamFilter(MANIFEST)
    assert wanted(passes_all) is None
    after = MANIFEST.without_collection("shop", "orders")
    assert wanted(passes_all, after) == [0, RETURNS]
    assert wanted(passes_all) is None
    assert passes_all.concerns(dropped(ORDERS))
    assert not passes_all.is_empty


def test_without_collections_the_default_one_passes_and_no_event() -> None:
    knows_none = StreamFilter(MANIFEST, knows_collections=False)
    assert wanted(knows_none) == [0]
    assert not knows_none.concerns(dropped(ORDERS))


def test_a_filter_of_collections_follows_their_drops() -> None:
    of_two = StreamFilter(MANIFEST, collections=(RETURNS, ORDERS))
    assert wanted(of_two) == sorted((ORDERS, RETURNS))
    assert not of_two.concerns(dropped(CollectionId(99)))
    assert of_two.concerns(dropped(ORDERS))
    assert wanted(of_two) == [RETURNS]
    assert not of_two.is_empty
    assert of_two.concerns(dropped(RETURNS))
    assert of_two.is_empty


def test_a_filter_of_a_scope_follows_what_comes_and_goes() -> None:
    of_shop = StreamFilter(MANIFEST, scope=SHOP.id)
    assert wanted(of_shop) == sorted((ORDERS, RETURNS))
    new = CollectionCreated(manifest_uid=UID, scope_id=SHOP.id, collection_id=CollectionId(77), name="carts")
    assert of_shop.concerns(new)
    assert of_shop.concerns(dropped(ORDERS))
    assert wanted(of_shop) == [RETURNS, 77]
    assert not of_shop.is_empty
    assert of_shop.concerns(ScopeDropped(manifest_uid=UID, scope_id=SHOP.id))
    assert of_shop.is_empty

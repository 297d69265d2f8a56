"""What a batch reads when the collections that were asked for come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import ClusterMap
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions
from headwater.errors import UnknownCollection, UnknownScope
from headwater.landing.bucket_watch import Filtering, PlannedBucket, SeenCollection, SelectionWatch
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset

SHOP = Manifest().with_scope("shop")
ORDERS = SHOP.with_collection("shop", "orders")
BOTH = ORDERS.with_collection("shop", "items")
ORDERS_ID = 9
CLUSTER_MAP = object.__new__(ClusterMap)
"""Nobody looks into it here."""


def at(*seqnos: int) -> Offsets:
    """Where the vbuckets are."""
    return Offsets(
        "uuid",
        {
            VBucketId(vbucket): StreamOffset(seqno=Seqno(seqno), snapshot_start=Seqno(seqno), snapshot_end=Seqno(seqno))
            for vbucket, seqno in enumerate(seqnos)
        },
    )


def highs(*seqnos: int) -> dict[VBucketId, Seqno]:
    return {VBucketId(vbucket): Seqno(seqno) for vbucket, seqno in enumerate(seqnos)}


def plan(watch: SelectionWatch, manifest: Manifest, start: Offsets) -> PlannedBucket:
    return watch.plan(BucketView(cluster_map=CLUSTER_MAP, manifest=manifest, has_collections=True), start)


def watching(*collections: str, scopes: tuple[str, ...] = (), seen: tuple[str, ...] = ()) -> SelectionWatch:
    options = ReadOptions.make(collections=collections, scopes=scopes)
    return SelectionWatch(options, [SeenCollection.parse(text) for text in seen])


def test_everything_is_read_as_it_comes() -> None:
    planned = plan(watching(), BOTH, at(0, 0))
    assert planned.filtering is Filtering.BY_SERVER
    assert planned.read_options(ReadOptions()) == ReadOptions()


def test_the_server_filters_again_when_the_drop_has_been_read() -> None:
    watch = watching("shop.orders", "shop.items")
    watch.on_survey(highs(10, 10))
    assert plan(watch, BOTH, at(0, 0)).collections == ("shop.orders", "shop.items")

    dropped = BOTH.without_collection("shop", "orders")
    planned = plan(watch, dropped, at(10, 10))
    assert planned.filtering is Filtering.BY_TASK
    assert ORDERS_ID in planned.ids
    named = planned.view.manifest.find("shop", "orders")
    assert named is not None, "its last rows have their names"
    assert named.id == ORDERS_ID

    watch.on_survey(highs(15, 12))
    assert plan(watch, dropped, at(14, 12)).filtering is Filtering.BY_TASK, "vbucket 0 is not past it"
    planned = plan(watch, dropped, at(15, 12))
    assert (planned.filtering, planned.collections) == (Filtering.BY_SERVER, ("shop.items",))
    assert plan(watch, dropped, at(15, 11)).filtering is Filtering.BY_TASK, "after a rollback the drop is read again"


def test_nothing_is_left() -> None:
    watch = watching("shop.orders")
    plan(watch, ORDERS, at(0))
    dropped = ORDERS.without_collection("shop", "orders")
    plan(watch, dropped, at(5))
    watch.on_survey(highs(6))
    assert plan(watch, dropped, at(6)).filtering is Filtering.NOTHING_LEFT

    again = dropped.with_collection("shop", "orders")
    planned = plan(watch, again, at(7))
    assert (planned.filtering, planned.collections) == (Filtering.BY_SERVER, ("shop.orders",))


def test_a_scope_that_is_dropped_takes_its_collections_along() -> None:
    watch = watching(scopes=("shop",))
    plan(watch, BOTH, at(0))
    planned = plan(watch, BOTH.without_scope("shop"), at(5))
    assert planned.filtering is Filtering.BY_TASK
    assert planned.scopes == ("shop",)
    assert {name for scope in planned.view.manifest.scopes for name in [scope.name]} == {"_default", "shop"}


def test_what_was_there_before_the_query_was_started_is_known_by_its_id() -> None:
    watch = watching("shop.orders", seen=("shop.orders", f"shop.orders={ORDERS_ID}", "other.kind=77"))
    planned = plan(watch, SHOP, at(5))
    assert (planned.filtering, planned.ids) == (Filtering.BY_TASK, {ORDERS_ID})


@pytest.mark.parametrize(
    ("watch", "error"),
    [(watching("shop.ordres"), UnknownCollection), (watching(scopes=("shoop",)), UnknownScope)],
)
def test_what_was_never_there_is_refused(watch: SelectionWatch, error: type[Exception]) -> None:
    with pytest.raises(error):
        plan(watch, BOTH, at(0))


def test_tasks_that_filter_ask_for_everything() -> None:
    planned = PlannedBucket(view=BucketView(cluster_map=CLUSTER_MAP, manifest=BOTH, has_collections=True))
    asked = ReadOptions.make(collections=["shop.orders"], scopes=["shop"])
    by_task = replace(planned, collections=("shop.orders",)).filtered_by_task(asked)
    assert by_task.read_options(asked) == ReadOptions()
    assert by_task.scopes == ("shop",)

"""A landing of collections by name, while they are dropped and made again. Spark is simulated, the node is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.lake.verify import compare
from support.driven_source import SimulatedLanding
from support.lake_model import guide_feed, table_rows
from support.landings import SourceBucket

ORDERS, ITEMS, OTHER = "shop.orders", "shop.items", "shop.other"


@pytest.fixture
def shop(bucket: SourceBucket) -> SourceBucket:
    bucket.create_scope("shop")
    for path in (ORDERS, ITEMS, OTHER):
        bucket.create_collection(path)
        put(bucket, path, "a")
    return bucket


def put(bucket: SourceBucket, path: str, name: str) -> None:
    """Two documents in every vbucket."""
    for vbucket in range(4):
        bucket.put(bucket.keys(name, 2, vbucket=vbucket), b'{"in":"%s"}' % path.encode(), into=path)


def documents(landing: SimulatedLanding) -> dict[str, int]:
    """By table, how many rows it has."""
    return {path.name: len(table_rows(path)) for path in sorted((landing.folder / "documents").iterdir())}


def ops_of(landing: SimulatedLanding, collection: str) -> list[str]:
    rows = sorted(landing.changes(), key=lambda row: (row["vbucket"], row["seqno"]))
    path = collection.split(".")
    return [row["op"] for row in rows if [row["scope"], row["collection"]] == path and row["vbucket"] == 0]


def check_equal(landing: SimulatedLanding, *collections: str, scopes: tuple[str, ...] = ()) -> None:
    found = compare(landing.bucket.settings, str(landing.folder), collections=collections, scopes=scopes)
    assert found.is_equal, [one.sentence for one in found.findings]
    assert found.pending == 0


def test_one_of_two_is_dropped_and_made_again(shop: SourceBucket, tmp_path: Path) -> None:
    landing = SimulatedLanding(shop, tmp_path / "lake", options={"collections": f"{ORDERS},{ITEMS}"})
    landing.land()
    assert documents(landing) == {ITEMS: 8, ORDERS: 8}

    put(shop, ORDERS, "b")
    shop.drop_collection(ORDERS)
    put(shop, ITEMS, "b")
    put(shop, OTHER, "b")
    landing.land()
    assert documents(landing) == {ITEMS: 16, ORDERS: 0}, "the table is closed, and the other goes on"
    assert ops_of(landing, ORDERS)[-1] == "collection_dropped"
    assert ops_of(landing, OTHER) == [], "what nobody asked for"
    check_equal(landing, ORDERS, ITEMS)

    put(shop, ITEMS, "c")
    landing.land()
    assert documents(landing) == {ITEMS: 24, ORDERS: 0}

    shop.create_collection(ORDERS)
    put(shop, ORDERS, "d")
    landing.land()
    assert documents(landing) == {ITEMS: 24, ORDERS: 8}
    check_equal(landing, ORDERS, ITEMS)


def test_the_only_one_is_dropped(shop: SourceBucket, tmp_path: Path) -> None:
    """Then there is nothing to read but the rollback of a failover, and that has to come."""
    landing = SimulatedLanding(shop, tmp_path / "lake", options={"collections": ORDERS})
    landing.land()
    shop.drop_collection(ORDERS)
    for _ in range(2):
        put(shop, OTHER, "b")
        landing.land()
        assert documents(landing) == {ORDERS: 0}
        check_equal(landing, ORDERS)
    shop.fail_over(0, shop.high_seqnos()[0] - 1)
    put(shop, OTHER, "c")
    landing.land()
    assert [row["vbucket"] for row in landing.changes() if row["op"] == "rollback"] == [0]
    shop.create_collection(ORDERS)
    put(shop, ORDERS, "d")
    landing.land()
    assert documents(landing) == {ORDERS: 8}
    check_equal(landing, ORDERS)


@pytest.mark.parametrize("moment", ["plan", "plan tasks", "run task", "after the commit"])
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_one_is_dropped_while_the_query_goes_on(shop: SourceBucket, tmp_path: Path, moment: str, number: int) -> None:
    """At any moment of the first batch, or of one in the middle."""
    steps: list[str] = []
    names = f"{ORDERS},{ITEMS}"
    landing = SimulatedLanding(shop, tmp_path / "lake", options={"collections": names, "maxRowsPerTrigger": "12"})

    def drop(name: str) -> None:
        steps.append(name)
        if steps.count(moment) == number and ORDERS in shop.ids:
            shop.drop_collection(ORDERS)
            put(shop, ITEMS, "b")

    landing.step = drop
    landing.land()
    assert ORDERS not in shop.ids
    assert len(landing.batches) > 2
    landing.land()
    assert documents(landing).get(ORDERS, 0) == 0
    assert documents(landing)[ITEMS] == 16
    assert ops_of(landing, OTHER) == []
    check_equal(landing, ORDERS, ITEMS)


@pytest.mark.parametrize("moment", ["plan tasks", "run task", "commit changes"])
@pytest.mark.parametrize("names", [f"{ORDERS},{ITEMS}", ORDERS])
def test_one_is_dropped_and_made_again_while_a_batch_is_read(
    shop: SourceBucket, tmp_path: Path, moment: str, names: str
) -> None:
    """The batch reads to the end of its snapshot, which holds changes of the new one; its filter does not know it."""
    landing = SimulatedLanding(shop, tmp_path / "lake", options={"collections": names})
    landing.land()
    put(shop, ORDERS, "b")
    before = shop.ids[ORDERS]

    def make_again(name: str) -> None:
        if name == moment and shop.ids[ORDERS] == before:
            shop.drop_collection(ORDERS)
            shop.create_collection(ORDERS)
            put(shop, ORDERS, "c")

    landing.step = make_again
    landing.land()
    landing.step = lambda name: None
    landing.land()
    assert documents(landing)[ORDERS] == 8, "those of the new one"
    check_equal(landing, *names.split(","))


def test_a_scope_is_dropped_between_plan_and_read(shop: SourceBucket, tmp_path: Path) -> None:
    landing = SimulatedLanding(shop, tmp_path / "lake", options={"scopes": "shop"})

    def drop(name: str) -> None:
        if name == "run task" and ORDERS in shop.ids:
            shop.drop_scope("shop")

    landing.step = drop
    landing.land()
    landing.land()
    assert set(documents(landing).values()) <= {0}
    check_equal(landing, scopes=("shop",))


def test_a_scope_is_dropped(shop: SourceBucket, tmp_path: Path) -> None:
    landing = SimulatedLanding(shop, tmp_path / "lake", options={"scopes": "shop"})
    landing.land()
    assert documents(landing) == {ITEMS: 8, ORDERS: 8, OTHER: 8}
    shop.drop_scope("shop")
    for _ in range(2):
        shop.put(shop.keys("x", 2, vbucket=0), b"{}")
        landing.land()
        assert documents(landing) == {ITEMS: 0, ORDERS: 0, OTHER: 0}
        check_equal(landing, scopes=("shop",))


def test_the_feed_of_the_guide_has_what_a_drop_took(shop: SourceBucket, tmp_path: Path) -> None:
    """Also where the drop is read when no node knows the name any more."""
    landing = SimulatedLanding(shop, tmp_path / "lake")
    landing.land()
    gone = {row["key"] for row in table_rows(landing.folder / "documents" / ORDERS)}
    put(shop, ORDERS, "b")
    shop.drop_collection(ORDERS)
    put(shop, ITEMS, "b")
    landing.land()
    feed = guide_feed(landing.folder, ORDERS, after_batch=0)
    assert gone <= feed.keys()
    assert {*feed.values()} == {"delete"}
    assert {*guide_feed(landing.folder, ITEMS, after_batch=0).values()} == {"upsert"}

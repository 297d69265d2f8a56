"""Clients as cells of a notebook use them: with no block around them, into tables, and forgotten when a cell runs
again."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pandas
import polars
import pyarrow as pa
import pytest

import headwater
from headwater.client.read_options import ReadKeywords
from headwater.errors import InvalidInput, LocalProtocolError
from headwater.phrases import counted_changes
from headwater.testing.node import HeadwaterNode
from headwater.testing.nursery import Nursery

KEYS = {f"hotel::{number}": {"city": "Graz"} for number in range(50)}
WAIT_S_MAX = 20.0


@pytest.fixture(scope="module")
def node(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadwaterNode]:
    with HeadwaterNode(nursery, tmp_path_factory.mktemp("node"), vbuckets=16) as started:
        started.create_collection("shop.orders")
        started.write(KEYS)
        started.write({"order::1": 1}, collection="shop.orders")
        yield started


@pytest.fixture
def client(node: HeadwaterNode) -> Iterator[headwater.blocking.Client]:
    client = node.connect()
    yield client
    client.close()


def mutations(changes: object) -> set[str]:
    assert isinstance(changes, headwater.blocking.Changes)
    return {change.key for change in changes if isinstance(change, headwater.Mutation)}


# --- with no block ------------------------------------------------------------------------------------------------


def test_a_client_connects_when_it_is_first_used(client: headwater.blocking.Client) -> None:
    assert "not connected yet" in repr(client)
    assert mutations(client.changes(end="now")) == {*KEYS, "order::1"}
    assert "16 vbuckets on 1 node, 2 collections" in repr(client)
    assert client.cluster_map.vbuckets == 16
    client.close()
    assert "closed" in repr(client)
    with pytest.raises(LocalProtocolError, match="the client is closed"):
        client.changes()
    with client:
        assert client.bucket_uuid


def test_a_wrong_password_is_reported_by_the_first_use(node: HeadwaterNode) -> None:
    client = node.connect(user=node.user, password="wrong")
    for _ in range(2):
        with pytest.raises(headwater.errors.HeadwaterError, match="password"):
            client.changes()
    assert "not connected yet" in repr(client)


async def test_an_asyncio_client_may_be_awaited_or_just_read(node: HeadwaterNode) -> None:
    settings = node.connect().settings
    client = await headwater.Client(settings)
    assert client.cluster_map.vbuckets == 16
    await client.close()
    lazy = headwater.Client(settings)
    assert len([change async for change in lazy.changes(end="now", collections="shop.orders")]) >= 1
    assert "16 vbuckets" in repr(lazy)
    await lazy.close()


def test_a_client_that_is_forgotten_ends_and_one_that_is_read_does_not(node: HeadwaterNode) -> None:
    before = {*threading.enumerate()}
    changes = node.connect().changes(end="now")
    gc.collect()
    assert mutations(changes) == {*KEYS, "order::1"}, "its reads keep it"
    endless = node.connect().changes()
    next(endless)
    del changes, endless
    gc.collect()
    give_up_s = time.monotonic() + WAIT_S_MAX
    while left := [one for one in {*threading.enumerate()} - before if one.name == "headwater"]:
        assert time.monotonic() < give_up_s, left
        time.sleep(0.01)


def test_a_read_says_what_it_reads_and_how_far_it_is(client: headwater.blocking.Client) -> None:
    changes = client.changes(end="now", collections="shop.orders")
    assert repr(changes) == "<Changes of shop.orders, not started>"
    got = [*changes]
    documents = sum(isinstance(change, headwater.DocumentChange) for change in got)
    said = f"{counted_changes(documents, len(got) - documents)} read"
    assert 0 < documents < len(got)
    assert repr(changes) == f"<Changes of shop.orders, {said}, ended>"
    batches = client.batches()
    next(batches)
    assert repr(batches).startswith("<Batches of all collections, ")
    assert "seqnos behind" in repr(batches) or "lag unknown" in repr(batches)
    assert "reads all collections" in repr(client)


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_path_is_a_checkpoint(client: headwater.blocking.Client, tmp_path: Path) -> None:
    assert mutations(client.changes(end="now", checkpoint=tmp_path / "place.json"))
    assert not mutations(client.changes(end="now", checkpoint=str(tmp_path / "place.json")))
    with pytest.raises(InvalidInput, match="3 is not a checkpoint"):
        client.changes(checkpoint=3)


# --- into tables --------------------------------------------------------------------------------------------------


def test_libraries_take_batches_as_tables(client: headwater.blocking.Client) -> None:
    """A read without an end ends now, and the names of collections, which come in many small batches, stay right."""
    table = pa.table(client.batches(batch_bytes=512))
    assert table.schema == headwater.CHANGE_SCHEMA
    assert {*table.filter(pa.compute.equal(table["op"].cast(pa.string()), "mutation"))["key"].to_pylist()} == {
        *KEYS,
        "order::1",
    }
    count = "collection::VARCHAR AS name, count(*)"
    counted = duckdb.from_arrow(client.batches(batch_bytes=512)).filter("op = 'mutation'").aggregate(count).fetchall()
    assert sorted(counted) == [("_default", 50), ("orders", 1)]
    frame = polars.DataFrame(client.batches(batch_bytes=512)).filter(polars.col("op") == "mutation")
    assert frame.filter(polars.col("collection") == "orders")["key"].to_list() == ["order::1"]
    assert polars.DataFrame(client.batches(xattrs=True)).columns[-1] == "xattrs"
    assert pa.table(client.batches(collections=["shop.orders"])).to_pandas()["key"].dropna().to_list() == ["order::1"]


@pytest.mark.parametrize("options", [{}, {"end": "now"}])
def test_pandas_is_shown_the_way_to_a_frame(client: headwater.blocking.Client, options: ReadKeywords) -> None:
    """Its constructor iterates, and would do so for ever, or make a frame of batches."""
    batches = client.batches(**options)
    with pytest.raises(LocalProtocolError, match=r"pyarrow.table\(batches\).to_pandas\(\)"):
        pandas.DataFrame(batches)
    assert len(pa.table(batches).to_pandas()) >= 51, "nothing was taken"


def test_a_read_is_taken_once_and_has_an_end(client: headwater.blocking.Client) -> None:
    batches = client.batches(end="now")
    first = next(batches)
    assert first.num_rows + pa.table(batches).num_rows >= 51, "what is left of it"
    with pytest.raises(LocalProtocolError, match=r"Call batches\(\) again"):
        pa.table(batches)
    endless = client.batches()
    next(endless)
    with pytest.raises(LocalProtocolError, match="has no end"):
        pa.table(endless)
    member = client.batches(group=headwater.StaticMember(1, of=1), checkpoint="place.json")
    with pytest.raises(LocalProtocolError, match="reads indefinitely"):
        pa.table(member)


def test_a_group_needs_nothing_but_the_bucket(client: headwater.blocking.Client) -> None:
    """Its leases and its checkpoint are documents there."""
    checkpoint = headwater.XattrCheckpoint(client.settings, group="invoices")
    changes = client.changes(group=headwater.LeaseGroup("invoices"), checkpoint=checkpoint, collections="shop.orders")
    assert "order::1" in (getattr(change, "key", "") for change in changes)

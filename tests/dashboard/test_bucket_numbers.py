"""Where the dashboard's numbers come from: counts in turns, and totals that outlive connections."""

from __future__ import annotations

import os
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.client.cluster_map import vbucket_of
from headwater.node.http.dashboard.samples import LiveCounts
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.store.bucket import Bucket
from support.forked_program import HEADWATER, run_program
from support.node_process import PASSWORD, USER, NodeProcess, StartNode
from support.store_harness import new_bucket, put

VBUCKETS = 8


@pytest.fixture
def bucket() -> Bucket:
    return new_bucket(vbuckets=VBUCKETS)


def put_all(bucket: Bucket, vbucket: int, *keys: str) -> None:
    for key in keys:
        put(bucket, vbucket, key.encode())
    bucket.commit_now()


# --- counting -----------------------------------------------------------------------------------------------------


def test_documents_are_counted_without_the_deleted(bucket: Bucket) -> None:
    put_all(bucket, 1, "a", "b", "c")
    put_all(bucket, 2, "d")
    bucket.put_removal(1, collection_id=DEFAULT_COLLECTION, key=b"b")
    counts = LiveCounts(VBUCKETS)
    counts.refresh(bucket)
    assert counts.counts.tolist() == [0, 2, 1, 0, 0, 0, 0, 0]
    put_all(bucket, 1, "e")
    bucket.put_removal(2, collection_id=DEFAULT_COLLECTION, key=b"d")
    counts.refresh(bucket)
    assert counts.counts.tolist() == [0, 3, 0, 0, 0, 0, 0, 0]


def test_with_little_time_every_vbucket_has_its_turn(bucket: Bucket) -> None:
    for vbucket in range(VBUCKETS):
        put_all(bucket, vbucket, *(f"{vbucket}-{number}" for number in range(10 + vbucket)))
    counts = LiveCounts(VBUCKETS)
    for turn in range(1, VBUCKETS + 1):
        # The first is changed all the time, and must not keep the others from their turn.
        put_all(bucket, 0, f"more-{turn}")
        counts.refresh(bucket, slots_max=1)
    assert counts.counts[1:].tolist() == [10 + vbucket for vbucket in range(1, VBUCKETS)]
    counts.refresh(bucket)
    assert counts.counts.sum() == bucket.index.live_documents()


# --- totals -------------------------------------------------------------------------------------------------------


def metric(node: NodeProcess, name: str) -> float:
    text = httpx.get(f"{node.http_url}/metrics", auth=(USER, PASSWORD)).text
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_what_was_moved_is_counted_when_the_connection_is_gone(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "8")
    with node.connect() as connection:
        for number in range(300):
            key = f"key-{number}".encode()
            connection.request(Set(key=key, value=b"{}", vbucket=vbucket_of(key, 8), collection_id=0))
    environment = {**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
    arguments = ("tail", f"{node.url}/default", "--to", "now", "--format", "jsonl")
    read = run_program(*HEADWATER, *arguments, env=environment, timeout=60)
    assert read.returncode == 0, read.stderr
    assert len(read.stdout.splitlines()) == 300
    time.sleep(1.5)
    assert metric(node, "headwater_node_dcp_connections") == 0
    assert metric(node, "headwater_node_requests_total") >= 300
    assert metric(node, "headwater_node_dcp_messages_total") >= 300
    assert metric(node, "headwater_node_dcp_sent_bytes_total") > 300 * 50

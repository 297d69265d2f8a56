"""The numbers of readers as Prometheus sees them: names, labels, several readers, and what is left out."""

from __future__ import annotations

import gc
import urllib.request
import weakref

import pyarrow as pa
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest, start_http_server
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from headwater.client.connection_string import Address
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import RollbackPiece
from headwater.client.prometheus import ReaderCollector, register_metrics, unregister_metrics
from headwater.errors import ConnectionClosed, InvalidInput
from headwater.protocol.messages.dcp_streams import StreamEndReason
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid


class Reading:
    """All that is needed of a read."""

    def __init__(self, metrics: ReaderMetrics) -> None:
        self.metrics = metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def busy_metrics(reader: str = "nightly", bucket: str = "travel") -> ReaderMetrics:
    """Every number is another one."""
    metrics = ReaderMetrics(reader, bucket)
    metrics.on_received(1000)
    metrics.on_run(VBucketId(0), 5, 700, 12)
    rollback = RollbackPiece(
        vbucket=VBucketId(2), seqno=Seqno(0), from_seqno=Seqno(9), old_vbuuid=Vbuuid(1), new_vbuuid=Vbuuid(2)
    )
    for times, count in (
        (2, lambda: metrics.on_snapshot(VBucketId(1), Seqno(3))),
        (3, lambda: metrics.on_ack(100)),
        (4, metrics.on_noop),
        (6, metrics.on_config_update),
        (7, metrics.on_stream_request),
        (8, lambda: metrics.on_stream_end(StreamEndReason.STATE_CHANGED)),
        (9, lambda: metrics.on_disconnect(ConnectionClosed("gone"))),
        (10, lambda: metrics.on_reconnect(Address("db", 11210))),
        (11, lambda: metrics.on_rollback(rollback)),
    ):
        for _ in range(times):
            count()
    ops = pa.DictionaryArray.from_arrays(pa.array([1] * 13, pa.int8()), pa.array(["mutation", "deletion"]))
    metrics.on_batch(pa.record_batch({"op": ops}))
    metrics.set_buffered(ready_bytes=14, held_bytes=15)
    metrics.on_followed(VBucketId(0), Seqno(2))
    metrics.on_followed(VBucketId(1), Seqno(2))
    metrics.set_high_seqnos({VBucketId(0): Seqno(18), VBucketId(1): Seqno(102)})
    return metrics


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """What a scrape sees, as `name{own labels}`."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in ("reader", "bucket")}
            found[sample.name + (str(own) if own else "")] = sample.value
    return found


def test_every_number_is_told(registry: CollectorRegistry) -> None:
    metrics = busy_metrics()
    register_metrics(metrics, registry=registry)
    assert samples(registry) == {
        "headwater_client_changes_total{'op': 'deletion'}": 13,
        "headwater_client_handed_out_bytes_total": metrics.handed_out_bytes,
        "headwater_client_batches_total": 1,
        "headwater_client_received_changes_total": 5,
        "headwater_client_received_bytes_total": 1000,
        "headwater_client_received_change_bytes_total": 700,
        "headwater_client_snapshots_total": 2,
        "headwater_client_acks_total": 3,
        "headwater_client_acked_bytes_total": 300,
        "headwater_client_buffered_bytes{'state': 'ready'}": 14,
        "headwater_client_buffered_bytes{'state': 'held'}": 15,
        "headwater_client_stream_requests_total": 7,
        "headwater_client_stream_ends_total{'reason': 'state_changed'}": 8,
        "headwater_client_rollbacks_total": 11,
        "headwater_client_reconnects_total{'node': 'db:11210'}": 10,
        "headwater_client_disconnects_total{'error': 'ConnectionClosed'}": 9,
        "headwater_client_noops_total": 4,
        "headwater_client_config_updates_total": 6,
        "headwater_client_lag_seqnos": 116,
        "headwater_client_lag_max_seqnos": 100,
        "headwater_client_lag_unknown_vbuckets": 0,
    }


def test_a_lag_that_is_not_known_is_not_told(registry: CollectorRegistry) -> None:
    metrics = busy_metrics()
    metrics.on_followed(VBucketId(2), Seqno(0))
    register_metrics(metrics, registry=registry, per_vbucket=True)
    found = samples(registry)
    assert "headwater_client_lag_seqnos" not in found
    assert found["headwater_client_lag_max_seqnos"] == 100
    assert found["headwater_client_lag_unknown_vbuckets"] == 1
    assert {name: value for name, value in found.items() if "vbucket_lag" in name} == {
        "headwater_client_vbucket_lag_seqnos{'vbucket': '0'}": 16,
        "headwater_client_vbucket_lag_seqnos{'vbucket': '1'}": 100,
    }


def test_several_readers_are_told_apart_and_each_family_stands_once(registry: CollectorRegistry) -> None:
    first, second, third = busy_metrics(), busy_metrics(bucket="orders"), busy_metrics(reader="hourly")
    second.on_received(1)
    third.on_received(2)
    for metrics in (first, second, third):
        register_metrics(metrics, registry=registry)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE headwater_client_received_bytes_total ") == 1
    received = {
        (sample.labels["reader"], sample.labels["bucket"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "headwater_client_received_bytes_total"
    }
    assert received == {("nightly", "travel"): 1000, ("nightly", "orders"): 1001, ("hourly", "travel"): 1002}


def test_a_reader_is_told_until_it_is_unregistered(registry: CollectorRegistry) -> None:
    metrics, other = busy_metrics(), busy_metrics(reader="other")
    register_metrics(metrics, registry=registry)
    register_metrics(other, registry=registry)
    unregister_metrics(Reading(metrics), registry=registry)
    assert b'reader="nightly"' not in generate_latest(registry)
    assert b'reader="other"' in generate_latest(registry)
    unregister_metrics(other, registry=registry)
    assert generate_latest(registry) == b""
    register_metrics(metrics, registry=registry)
    assert b'reader="nightly"' in generate_latest(registry)


def test_readers_that_can_not_be_registered_or_unregistered(registry: CollectorRegistry) -> None:
    with pytest.raises(InvalidInput, match="is not registered"):
        unregister_metrics(busy_metrics(), registry=registry)
    register_metrics(Reading(busy_metrics()), registry=registry)
    with pytest.raises(InvalidInput, match="is not registered"):
        unregister_metrics(busy_metrics(), registry=registry)
    with pytest.raises(InvalidInput, match=r"'nightly' of bucket 'travel' is already registered\. Give each read"):
        register_metrics(busy_metrics(), registry=registry)
    assert b'reader="nightly"' in generate_latest(registry)


def test_a_name_that_somebody_else_has_taken_is_found_at_once_and_leaves_nothing_behind() -> None:
    registry = CollectorRegistry()
    taken = Counter("headwater_client_batches", "Somebody else's.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        register_metrics(busy_metrics(), registry=registry)
    registry.unregister(taken)
    register_metrics(busy_metrics(), registry=registry)
    assert b'reader="nightly"' in generate_latest(registry)


def test_a_registry_is_not_kept_alive() -> None:
    registry = CollectorRegistry()
    register_metrics(busy_metrics(), registry=registry)
    watched = weakref.ref(registry)
    del registry
    gc.collect()
    assert watched() is None


def test_the_registry_of_the_process_is_the_default() -> None:
    metrics = busy_metrics(reader="of the process")
    register_metrics(metrics)
    labels = {"reader": "of the process", "bucket": "travel"}
    assert REGISTRY.get_sample_value("headwater_client_rollbacks_total", labels) == 11
    unregister_metrics(metrics)


def test_openmetrics_takes_it_too(registry: CollectorRegistry) -> None:
    register_metrics(busy_metrics(), registry=registry, per_vbucket=True)
    families = list(parse_openmetrics(generate_openmetrics(registry).decode()))
    assert len(families) == len(list(ReaderCollector().describe()))


def test_it_can_be_scraped(registry: CollectorRegistry) -> None:
    register_metrics(busy_metrics(), registry=registry)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            assert b'headwater_client_rollbacks_total{bucket="travel",reader="nightly"} 11.0' in answer.read()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

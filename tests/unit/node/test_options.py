"""What `headwater serve` is given: its ports with and without TLS, what can't work; and the settings of a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.errors import DataDamaged, LocalProtocolError, MalformedJson
from headwater.node.options import (
    BUCKET_SETTINGS,
    BucketSettings,
    NodeOptions,
    ServerLimits,
    check_cluster_name,
    stored_settings,
)
from support.cases import case
from support.store_harness import new_bucket

TLS = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}
EVERYWHERE = {"host": "0.0.0.0", "advertise_host": "db.example.com"}


def options(**given: Any) -> NodeOptions:
    return NodeOptions(data=Path("data"), **given)


@case({}, {False: (None, 11210)})
@case(TLS, {False: (None, 11210), True: (None, 11207)})
@case({**TLS, "port": 1, "tls_port": 2}, {False: (1, 11210), True: (2, 11207)})
@case({**TLS, "tls_only": True, "port": 1}, {True: (1, 11207)})
# Beyond loopback data goes over the network in the clear only where that was asked for.
@case({**TLS, **EVERYWHERE}, {True: (None, 11207)})
@case({**TLS, **EVERYWHERE, "insecure": True}, {False: (None, 11210), True: (None, 11207)})
def test_the_ports_with_and_without_tls(given: dict[str, Any], ports: dict[bool, tuple[int | None, int]]) -> None:
    assert options(**given).kv_ports() == ports


def test_every_address_of_loopback_is_safe() -> None:
    """Several nodes on one machine may have an address each."""
    given = options(host="127.0.0.11", upr_port=0)
    assert given.serves_plain
    assert given.advertised({False: 1}, {False: 2}, uuid="ab").host == "127.0.0.11"
    with pytest.raises(LocalProtocolError, match="without TLS"):
        options(host="128.0.0.1")


def test_where_clients_reach_a_node_with_both_kinds_of_ports() -> None:
    given = options(**TLS, advertise_host="db.example.com", advertise_tls_port=30000)
    address = given.advertised({False: 1, True: 2}, {False: 3, True: 4}, uuid="ab")
    assert address.services() == {"kv": 1, "kvSSL": 30000, "mgmt": 3, "mgmtSSL": 4}
    only = options(**TLS, tls_only=True, advertise_port=30000).advertised({True: 2}, {True: 4}, uuid="ab")
    assert only.services() == {"kvSSL": 30000, "mgmtSSL": 4}


@pytest.mark.parametrize("given", [{"tls_only": True}, {"tls_port": 1}, {"buckets": (".hidden",)}])
def test_what_can_t_work(given: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        options(**given)


def test_names_of_clusters_are_short_and_can_be_printed() -> None:
    check_cluster_name("")
    check_cluster_name("Der See – 1")
    for name in ("a\nb", "x" * 257):
        with pytest.raises(LocalProtocolError):
            check_cluster_name(name)


# --- the settings of a bucket -------------------------------------------------------------------------------------

SETTINGS = BucketSettings(ram_quota_mb=128, replicas=2, max_ttl_s=60, flush_enabled=True)


def test_they_are_what_they_were() -> None:
    bucket = new_bucket()
    assert stored_settings(bucket) == BucketSettings()
    bucket.put_rows(SETTINGS.rows())
    bucket.commit_now()
    assert stored_settings(bucket) == SETTINGS
    assert BucketSettings.decode({**SETTINGS.encode(), "of a newer version": 1}) == SETTINGS


@case({"replicas": 4})
@case({"replicas": True})
@case({"max_ttl_s": -1})
@case({"flush_enabled": 1})
@case({"max_ttl_s": "1"})
@case({"durability_min_level": 4})
@case({"storage_backend": "rocks"})
def test_junk_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(MalformedJson):
        BucketSettings.decode(members)


@pytest.mark.parametrize("stored", [b"{", b"[1]", b'{"replicas": -1}'])
def test_damage_is_reported(stored: bytes) -> None:
    bucket = new_bucket()
    bucket.put_rows({BUCKET_SETTINGS: stored})
    bucket.commit_now()
    with pytest.raises(DataDamaged):
        stored_settings(bucket)


@pytest.mark.parametrize(
    ("files_max", "kv", "http"), [(100, 32, 16), (1_024, 470, 234), (4_096, 3_200, 576), (2**63 - 1, 10_000, 576)]
)
def test_connections_are_bounded_by_open_files(files_max: int, kv: int, http: int) -> None:
    limits = ServerLimits().within_open_files(files_max)
    assert (limits.connections_max, limits.http_connections_max) == (kv, http)

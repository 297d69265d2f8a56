"""What `headwater serve` is given: its ports with and without TLS, and what can't work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.errors import LocalProtocolError
from headwater.node.options import NodeOptions, check_cluster_name

TLS = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}
EVERYWHERE = {"host": "0.0.0.0", "advertise_host": "db.example.com"}


def options(**given: Any) -> NodeOptions:
    return NodeOptions(data=Path("data"), **given)


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        ({}, {False: (None, 11210)}),
        (TLS, {False: (None, 11210), True: (None, 11207)}),
        ({**TLS, "port": 1, "tls_port": 2}, {False: (1, 11210), True: (2, 11207)}),
        ({**TLS, "tls_only": True, "port": 1}, {True: (1, 11207)}),
        # Beyond loopback data goes over the network in the clear only where that was asked for.
        ({**TLS, **EVERYWHERE}, {True: (None, 11207)}),
        ({**TLS, **EVERYWHERE, "insecure": True}, {False: (None, 11210), True: (None, 11207)}),
    ],
)
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

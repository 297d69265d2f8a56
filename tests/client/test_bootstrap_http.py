"""Bootstrapping real nodes over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headwater.client.bootstrap import fetch_map_over_http
from headwater.client.cluster_map import ClusterMap, Network
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.errors import (
    AuthenticationFailed,
    ConnectionClosed,
    HeadwaterError,
    TlsFailed,
    UnknownBucket,
)
from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode


def settings(
    address: Address, bucket: str = "travel", *, tls: TlsSettings | None = None, query: str = "", **options: Any
) -> ClientSettings:
    scheme = "couchbase" if tls is None else "couchbases"
    options = {"user": USER, "password": PASSWORD, **options}
    return ClientSettings.make(f"{scheme}://{address}/{bucket}?bootstrap=http{query}", tls=tls, **options)


def fetch(address: Address, bucket: str = "travel", **options: Any) -> ClusterMap:
    return asyncio.run(fetch_map_over_http(address, settings(address, bucket, **options)))


def failure(address: Address, bucket: str = "travel", **options: Any) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as raised:
        fetch(address, bucket, **options)
    assert raised.value.hint
    assert PASSWORD not in str(raised.value)
    return raised.value


def http_address(node: NodeProcess) -> Address:
    host, _, port = node.http_url.partition("://")[2].rpartition(":")
    return Address(host, int(port))


def test_a_real_node_is_reached_through_the_map_it_gives(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--bucket", "50%", "--vbuckets", "8")
    found = fetch(http_address(node))
    assert found.nodes == (node.address,)
    assert (found.bucket, found.vbuckets, found.network) == ("travel", 8, Network.DEFAULT)
    with KvConnection.open(found.nodes[0], settings(node.address).login()) as connection:
        config = connection.outcome.cluster_config
    assert config is not None
    assert ClusterMap.decode(config, asked=node.address) == found
    assert fetch(http_address(node), "50%25").bucket == "50%"


def test_what_a_real_node_refuses(start_node: StartNode) -> None:
    node = start_node()
    address = http_address(node)
    unknown = failure(address, "nix")
    assert type(unknown) is UnknownBucket
    assert "there is no bucket 'nix'" in unknown.reason
    wrong = failure(address, "default", password="wrong")
    assert type(wrong) is AuthenticationFailed
    assert "the user or the password is wrong" in wrong.reason
    nobody = failure(address, "default", user=None, password=None)
    assert type(nobody) is AuthenticationFailed
    assert "wants a log-in" in nobody.reason
    key_value = failure(node.address, "default")
    assert type(key_value) is ConnectionClosed
    assert "8091" in key_value.hint


def test_a_real_node_with_tls(start_node: StartNode, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    node = start_node("--tls-cert", str(certificate), "--tls-key", str(key))
    address = http_address(node)
    assert fetch(address, "default", tls=TlsSettings(ca_file=certificate)).nodes == (node.address,)
    untrusted = failure(address, "default", tls=TlsSettings())
    assert type(untrusted) is TlsFailed
    assert "is not trusted" in untrusted.reason
    without = failure(address, "default")
    assert type(without) is TlsFailed
    assert "speaks TLS, and this connection does not" in without.reason


def test_tls_to_a_real_node_without_it(start_node: StartNode) -> None:
    error = failure(http_address(start_node()), "default", tls=TlsSettings())
    assert type(error) is TlsFailed
    assert "does not speak TLS" in error.reason

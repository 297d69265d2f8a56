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
from headwater.errors import AuthenticationFailed, ConnectionClosed, HeadwaterError, TlsFailed, UnknownBucket
from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode


def settings(address: Address, bucket: str = "default", **options: Any) -> ClientSettings:
    url = f"{'couchbases' if options.get('tls') else 'couchbase'}://{address}/{bucket}?bootstrap=http"
    return ClientSettings.make(url, **{"user": USER, "password": PASSWORD, **options})


def fetch(address: Address, bucket: str = "default", **options: Any) -> ClusterMap:
    return asyncio.run(fetch_map_over_http(address, settings(address, bucket, **options)))


def failure(address: Address, bucket: str = "default", **options: Any) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as raised:
        fetch(address, bucket, **options)
    assert raised.value.hint
    return raised.value


def http_address(node: NodeProcess) -> Address:
    host, _, port = node.http_url.partition("://")[2].rpartition(":")
    return Address(host, int(port))


def test_a_real_node_is_reached_through_the_map_it_gives(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--bucket", "50%", "--vbuckets", "8")
    address = http_address(node)
    found = fetch(address, "travel")
    assert found.nodes == (node.address,)
    assert (found.bucket, found.vbuckets, found.network) == ("travel", 8, Network.DEFAULT)
    with KvConnection.open(found.nodes[0], settings(node.address, "travel").login()) as connection:
        config = connection.outcome.cluster_config
    assert config is not None
    assert ClusterMap.decode(config, asked=node.address) == found
    assert fetch(address, "50%25").bucket == "50%"
    for error, kind, words in (
        (failure(address, "nix"), UnknownBucket, "there is no bucket 'nix'"),
        (failure(address, "travel", password="wrong"), AuthenticationFailed, "the user or the password is wrong"),
        (failure(address, "travel", user=None, password=None), AuthenticationFailed, "requires a log-in"),
        (failure(node.address, "travel"), ConnectionClosed, "closed the connection"),
        (failure(address, "travel", tls=TlsSettings()), TlsFailed, "does not speak TLS"),
    ):
        assert type(error) is kind
        assert words in error.reason


def test_a_real_node_with_tls(start_node: StartNode, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    node = start_node("--tls-cert", str(certificate), "--tls-key", str(key))
    address = http_address(node)
    assert fetch(address, tls=TlsSettings(ca_file=certificate)).nodes == (node.address,)
    for options, words in (({"tls": TlsSettings()}, "is not trusted"), ({}, "uses TLS, and this connection does not")):
        error = failure(address, **options)
        assert type(error) is TlsFailed
        assert words in error.reason

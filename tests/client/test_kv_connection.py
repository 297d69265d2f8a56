"""Blocking connections to real nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headwater.client.bootstrap import connect_any
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.errors import AccessDenied, AuthenticationFailed, HeadwaterError, InvalidArguments, KeyNotFound
from headwater.protocol.messages.documents import Get
from headwater.protocol.messages.session import GetClusterConfig, Noop
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.sasl import Mechanism
from support.machine import self_signed
from support.node_process import PASSWORD, USER, StartNode


def settings(address: Address, bucket: str = "default", **options: Any) -> ClientSettings:
    scheme = "couchbases" if options.get("tls") else "couchbase"
    return ClientSettings.make(f"{scheme}://{address}/{bucket}", **{"user": USER, "password": PASSWORD, **options})


def connect(address: Address, **options: Any) -> KvConnection:
    return KvConnection.open(address, settings(address, **options).login())


def failure(address: Address, bucket: str = "default", **options: Any) -> HeadwaterError:
    """What a blocking connection raises. One under asyncio raises the same."""
    with pytest.raises(HeadwaterError) as raised:
        KvConnection.open(address, settings(address, bucket, **options).login())
    with pytest.raises(type(raised.value)):
        asyncio.run(connect_any(settings(address, bucket, **options)))
    assert raised.value.hint
    return raised.value


def test_a_real_node(start_node: StartNode) -> None:
    address = start_node("--vbuckets", "1").address
    for mechanism in Mechanism:
        with connect(address, mechanism=mechanism) as connection:
            assert connection.outcome.mechanism is mechanism
            connection.request(Noop())
            assert b"vBucketServerMap" in connection.request(GetClusterConfig()).value
    assert type(failure(address, password="wrong")) is AuthenticationFailed
    assert type(failure(address, "other")) is AccessDenied
    assert "no user has logged in" in failure(address, user=None, password=None).reason
    place = {"vbucket": VBucketId(0), "collection_id": CollectionId(0)}
    with connect(address) as connection:
        with pytest.raises(KeyNotFound, match=r"the server refused Get of 'fox': KEY_ENOENT\. Check the key"):
            connection.request(Get(key=b"fox", **place))
        with pytest.raises(InvalidArguments, match=r"A key has at most 250 bytes, and this one has 251$"):
            connection.request(Get(key=b"k" * 251, **place))


def test_both_mistakes_with_real_nodes(start_node: StartNode, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    plain, encrypted = start_node(), start_node("--tls-cert", str(certificate), "--tls-key", str(key))
    trust = TlsSettings(ca_file=certificate)
    with connect(encrypted.address, tls=trust) as connection:
        assert connection.outcome.mechanism is Mechanism.SCRAM_SHA512
    assert "uses TLS, and this connection does not" in failure(encrypted.address).reason
    assert "does not speak TLS" in failure(plain.address, tls=trust).reason

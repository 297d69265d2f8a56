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
from headwater.errors import (
    AccessDenied,
    AuthenticationFailed,
    HeadwaterError,
    InvalidArguments,
    KeyNotFound,
)
from headwater.protocol.messages.documents import Get
from headwater.protocol.messages.session import GetClusterConfig, Noop
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.sasl import Mechanism
from support.fake_servers import PASSWORD, USER
from support.machine import self_signed
from support.node_process import PASSWORD as NODE_PASSWORD
from support.node_process import USER as NODE_USER
from support.node_process import StartNode


def settings(
    address: Address, bucket: str = "travel", *, tls: TlsSettings | None = None, **options: Any
) -> ClientSettings:
    scheme = "couchbase" if tls is None else "couchbases"
    options = {"user": USER, "password": PASSWORD, **options}
    return ClientSettings.make(f"{scheme}://{address}/{bucket}", tls=tls, **options)


def connect(address: Address, bucket: str = "travel", **options: Any) -> KvConnection:
    return KvConnection.open(address, settings(address, bucket, **options).login())


def failure(address: Address, bucket: str = "travel", *, is_by_chance: bool = False, **options: Any) -> HeadwaterError:
    """What a blocking connection raises. One under asyncio raises the same, unless it is by chance what is raised."""
    with pytest.raises(HeadwaterError) as raised:
        connect(address, bucket, **options)
    with pytest.raises(HeadwaterError) as raised_by_loop:
        asyncio.run(connect_any(settings(address, bucket, **options)))
    for error in (raised.value, raised_by_loop.value):
        assert error.hint
        assert PASSWORD not in str(error)
    assert is_by_chance or type(raised_by_loop.value) is type(raised.value)
    return raised.value


def test_a_real_node(start_node: StartNode) -> None:
    node = start_node()
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    for mechanism in Mechanism:
        with connect(node.address, "default", mechanism=mechanism, **login) as connection:
            assert connection.outcome.mechanism is mechanism
            connection.request(Noop())
            assert b"vBucketServerMap" in connection.request(GetClusterConfig()).value  # type: ignore[attr-defined]
    assert type(failure(node.address, "default", user=NODE_USER, password="wrong")) is AuthenticationFailed
    assert type(failure(node.address, "other", **login)) is AccessDenied
    unknown = failure(node.address, "default", user=None, password=None)
    assert type(unknown) is AccessDenied
    assert "no user has logged in" in unknown.reason


def test_what_a_real_node_refuses_is_told_with_its_key(start_node: StartNode) -> None:
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    place = {"vbucket": VBucketId(0), "collection_id": CollectionId(0)}
    with connect(start_node("--vbuckets", "1").address, "default", **login) as connection:
        with pytest.raises(KeyNotFound, match=r"the server refused Get of 'fox': KEY_ENOENT\. Check the key"):
            connection.request(Get(key=b"fox", **place))
        with pytest.raises(InvalidArguments, match=r"A key has at most 250 bytes, and this one has 251$"):
            connection.request(Get(key=b"k" * 251, **place))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path)


def test_both_mistakes_with_real_nodes(start_node: StartNode, certificate: tuple[Path, Path]) -> None:
    plain = start_node()
    encrypted = start_node("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    trust = TlsSettings(ca_file=certificate[0])
    with connect(encrypted.address, "default", tls=trust, **login) as connection:
        assert connection.outcome.mechanism is Mechanism.SCRAM_SHA512
    assert "speaks TLS, and this connection does not" in failure(encrypted.address, "default", **login).reason
    assert "does not speak TLS" in failure(plain.address, "default", tls=trust, **login).reason

"""Bootstrapping from real nodes."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headwater.client.blocking_bucket import KvCluster, bootstrap
from headwater.client.bootstrap import connect_any, map_of
from headwater.client.connection_string import Address, BootstrapBy
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.errors import InvalidInput
from headwater.protocol.numbers import DEFAULT_COLLECTION
from support.fake_servers import PASSWORD, USER, down
from support.forked_program import run_program
from support.machine import self_signed
from support.node_process import PASSWORD as NODE_PASSWORD
from support.node_process import USER as NODE_USER
from support.node_process import StartNode


def settings(addresses: list[Address], query: str = "", **options: Any) -> ClientSettings:
    options = {"user": USER, "password": PASSWORD, **options}
    where = ",".join(str(address) for address in addresses)
    return ClientSettings.make(f"couchbase://{where}/travel{query}", **options)


def test_a_real_node_by_both_ways(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--vbuckets", "4")
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    host, _, port = node.http_url.partition("://")[2].rpartition(":")
    by_kv = bootstrap(settings([down(), node.address], **login))
    by_http = bootstrap(settings([down(), Address(host, int(port))], "?bootstrap=http", **login))
    assert (by_kv.by, by_http.by) == (BootstrapBy.KV, BootstrapBy.HTTP)
    assert by_kv.cluster_map == by_http.cluster_map
    assert by_kv.cluster_map.vbuckets == 4
    assert by_kv.bucket_uuid == by_http.bucket_uuid != ""
    assert by_kv.asked == by_kv.cluster_map.nodes[0] == node.address
    assert pickle.loads(pickle.dumps(by_kv)) == by_kv


def cluster_settings(where: str, **options: Any) -> ClientSettings:
    return ClientSettings.make(f"couchbase://{where}", **{"user": USER, "password": PASSWORD, **options})


def any_node(settings: ClientSettings) -> AsyncKvConnection:
    """A connection to it that has been closed."""

    async def connect() -> AsyncKvConnection:
        connection = await connect_any(settings)
        connection.abort()
        return connection

    return asyncio.run(connect())


def test_a_cluster_of_one_real_node_by_both_ways(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--vbuckets", "4")
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    http_host = node.http_url.partition("://")[2]
    for where in (f"{node.address}/travel", f"{http_host}/travel?bootstrap=http"):
        settings = cluster_settings(where, **login)
        connection = any_node(settings)
        assert connection.address == node.address
        cluster = KvCluster(settings)
        assert map_of(connection, settings) == cluster.read_map()
        assert cluster.find(()) == (cluster.read_map(), (DEFAULT_COLLECTION,))
        cluster.open(node.address).close()


# --- TLS settings with the keys that openssl writes -------------------------------------------------------------------


def encrypted_key(folder: Path) -> tuple[Path, Path]:
    """A certificate, and its key under the password `sesame`."""
    certificate, key = self_signed(folder)
    encrypted = folder / "encrypted.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:sesame", "-out", str(encrypted)],
        check=True,
        capture_output=True,
    )
    return certificate, encrypted


def test_no_password_is_asked_for_on_the_terminal(tmp_path: Path) -> None:
    """A process that has one would wait there for ever."""
    certificate, encrypted = encrypted_key(tmp_path)
    code = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from headwater.client.settings import TlsSettings\n"
        f"TlsSettings(certificate_file={str(certificate)!r}, key_file={str(encrypted)!r}).context()"
    )
    ours, theirs = os.openpty()
    try:
        ended = run_program("-c", code, stdin=theirs, timeout=60, start_new_session=True)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "InvalidInput: the client certificate" in ended.stderr


def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    certificate, encrypted = encrypted_key(tmp_path)
    TlsSettings(certificate_file=certificate, key_file=encrypted, key_password="sesame").context()
    for password in (None, "abracadabra"):
        with pytest.raises(InvalidInput, match="can't be used"):
            TlsSettings(certificate_file=certificate, key_file=encrypted, key_password=password).context()

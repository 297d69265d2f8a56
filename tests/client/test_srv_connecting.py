"""Clients, commands and the cluster's own map, where the hosts are listed in DNS: real nodes and a real DNS server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import headwater
from headwater.cli import main
from headwater.client.blocking_bucket import Surveyor, bootstrap
from headwater.client.changes import Mutation
from headwater.client.connection_string import Address
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.errors import HostUnreachable, TlsFailed
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from support.fake_servers import down
from support.machine import DnsServer, Record, self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

NAME = "cb.example.com"
LOGIN: dict[str, str] = {"user": USER, "password": PASSWORD}
WAIT_S_MAX = 60.0


@pytest.fixture
def dns_server() -> Iterator[DnsServer]:
    with DnsServer() as server:
        yield server


def listed(node: NodeProcess, *, host: str = "localhost.") -> list[Record]:
    """A host that is down, and after it the node."""
    return [(0, 0, down().port, "localhost."), (1, 0, node.address.port, host)]


def string(server: DnsServer, scheme: str = "couchbase") -> str:
    return f"{scheme}://{NAME}/default?{server.options}"


def put(node: NodeProcess, *keys: bytes) -> None:
    with node.connect() as connection:
        for key in keys:
            connection.request(Set(vbucket=0, collection_id=DEFAULT_COLLECTION, key=key, value=b"{}"))


def command(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, env={"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD})
    assert result.exit_code == 0, result.output
    return result.output


def test_everybody_finds_the_host_that_is_up(start_node: StartNode, dns_server: DnsServer) -> None:
    node = start_node("--vbuckets", "1")
    put(node, b"a", b"b")
    dns_server.records[f"_couchbase._tcp.{NAME}"] = listed(node)
    url = string(dns_server)

    async def read() -> list[str | None]:
        async with headwater.connect(url, **LOGIN) as client:
            return [change.key async for change in client.changes(end="now") if isinstance(change, Mutation)]

    assert asyncio.run(read()) == ["a", "b"]
    with headwater.blocking.connect(url, **LOGIN) as client:
        assert [change.key for change in client.changes(end="now") if isinstance(change, Mutation)] == ["a", "b"]
    settings = ClientSettings.make(url, **LOGIN)
    assert bootstrap(settings).asked == Address("localhost", node.address.port)
    # The planner of the Spark source goes this way, and its tasks read with the client.
    surveyor = Surveyor(settings)
    assert surveyor.survey()[VBucketId(0)].high_seqno == 2
    surveyor.close()


def test_all_commands_find_the_host_that_is_up(start_node: StartNode, dns_server: DnsServer) -> None:
    node = start_node("--vbuckets", "1")
    put(node, b"a")
    dns_server.records[f"_couchbase._tcp.{NAME}"] = listed(node)
    url = string(dns_server)
    assert command("load", url, "--generate", "3").startswith("3 documents")
    lines = command("tail", url, "--to", "now", "--json").splitlines()
    assert len([line for line in map(json.loads, lines) if line.get("op") == "mutation"]) == 4
    assert "_default" in command("collections", "list", url)
    assert USER in command("users", "list", url)
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, node.address.port, "localhost.")]
    assert "cluster" in command("cluster", "init", url, "--replicas", "0")


def test_certificates_are_checked_by_the_dns_name(start_node: StartNode, dns_server: DnsServer, tmp_path: Path) -> None:
    """The certificate is for localhost, and knows nothing of the name in the connection string."""
    certificate, key = self_signed(tmp_path)
    node = start_node("--vbuckets", "1", "--tls-cert", str(certificate), "--tls-key", str(key))
    url = string(dns_server, "couchbases")
    dns_server.records[f"_couchbases._tcp.{NAME}"] = listed(node)

    async def read(**options: Any) -> str:
        async with headwater.connect(url, **LOGIN, **options) as client:
            async for _ in client.changes(end="now"):
                pass
            return client.cluster_map.nodes[0].host

    assert asyncio.run(read(tls=TlsSettings(ca_file=certificate)))
    with pytest.raises(TlsFailed, match="localhost"):
        asyncio.run(read())


def test_a_read_looks_hosts_up_again_when_all_are_unreachable(start_node: StartNode, dns_server: DnsServer) -> None:
    node = start_node("--vbuckets", "1")
    dns_server.records[f"_couchbase._tcp.{NAME}"] = listed(node)
    old = node.address
    put(node, b"before")

    async def read() -> list[str | None]:
        keys: list[str | None] = []
        async with headwater.connect(string(dns_server), **LOGIN) as client:
            async for change in client.changes(reconnect_delay_s_min=0.05, reconnect_delay_s_max=0.5):
                if not isinstance(change, Mutation):
                    continue
                keys.append(change.key)
                if change.key == "before":
                    asked = len(dns_server.questions)
                    await asyncio.to_thread(move)
                else:
                    assert len(dns_server.questions) > asked
                    return keys
        return keys

    def move() -> None:
        node.kill()
        node.start()
        assert node.address != old
        put(node, b"after")
        dns_server.records[f"_couchbase._tcp.{NAME}"] = listed(node)

    assert asyncio.run(asyncio.wait_for(read(), WAIT_S_MAX)) == ["before", "after"]


def test_without_records_the_name_has_to_be_a_host(dns_server: DnsServer) -> None:
    with pytest.raises(HostUnreachable, match=f"{NAME}:11210"):
        bootstrap(ClientSettings.make(string(dns_server), **LOGIN))


# --- SRV lookups in a new interpreter ---------------------------------------------------------------------------------


def test_the_library_is_imported_only_for_a_lookup() -> None:
    """It would cost every Spark worker its time."""
    program = (
        "import sys, headwater, headwater.client.bootstrap\n"
        "from headwater.client.connection_string import ConnectionString\n"
        "from headwater.client.connection_string import find_hosts\n"
        "find_hosts(ConnectionString.parse('couchbase://127.0.0.1/b'))\n"
        "sys.exit('dns' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

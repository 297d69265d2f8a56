"""The HTTP server on real sockets, and streams of configs that end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.http import serving as serving_module
from headwater.node.auth.login_checks import FREE_FAILURES
from headwater.node.http import buckets, call
from headwater.node.http.app import HttpServer
from headwater.node.options import ServerLimits
from headwater.protocol.cluster_config import ClusterNodes, NodeAddress
from support.http_node import ADMIN, UUID, Node
from support.machine import self_signed


@contextlib.asynccontextmanager
async def serving(node: Node) -> AsyncIterator[tuple[HttpServer, int]]:
    bound = socket.create_server(("127.0.0.1", 0))
    http_server = HttpServer(node)
    await http_server.listen(bound)
    try:
        yield http_server, bound.getsockname()[1]
    finally:
        await http_server.stop()


async def stream_of(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    credentials = base64.b64encode(b"rob:quill").decode()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {credentials}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding: chunked" in head.lower()
    return reader, writer


async def chunk_of(reader: asyncio.StreamReader) -> bytes:
    chunk_bytes = int(await asyncio.wait_for(reader.readline(), 5), 16)
    return (await reader.readexactly(chunk_bytes + 2))[:-2]


async def config_of(reader: asyncio.StreamReader) -> dict[str, Any]:
    chunk = await chunk_of(reader)
    assert chunk.endswith(b"}\n\n\n\n")
    config: dict[str, Any] = json.loads(chunk)
    return config


def change_config(node: Node) -> None:
    nodes = (*node.cluster.nodes, NodeAddress(host="127.0.0.1", kv_port=11310, http_port=9091))
    node.cluster = ClusterNodes(nodes=nodes, revision=node.cluster.revision + 1, uuid=UUID)
    node.config_changes.notify()


@pytest.mark.parametrize(
    "path", ["/pools/default/bs/beer", "/pools/default/bucketsStreaming/beer", "/poolsStreaming/default"]
)
async def test_a_stream_says_the_config_again_when_it_changes_and_ends_with_the_node(node: Node, path: str) -> None:
    async with serving(node) as (http_server, port):
        reader, writer = await stream_of(port, path)
        for nodes in (1, 2, 3):
            assert len((await config_of(reader))["nodes"]) == nodes
            change_config(node)
        await config_of(reader)
        await http_server.stop()
        assert await chunk_of(reader) == b""
        assert await reader.read() == b""
        writer.close()


async def test_a_stream_says_the_config_again_now_and_then(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "STREAM_REPEAT_S", 0.02)
    async with serving(node) as (_, port):
        reader, writer = await stream_of(port, "/pools/default/bs/beer")
        assert [(await config_of(reader))["rev"] for _ in range(3)] == [1, 1, 1]
        writer.close()


async def test_a_stream_ends_when_its_bucket_is_gone(node: Node) -> None:
    async with serving(node) as (_, port):
        reader, writer = await stream_of(port, "/pools/default/bs/beer")
        await config_of(reader)
        node.bucket = lambda name: None
        node.config_changes.notify()
        assert await chunk_of(reader) == b""
        writer.close()


@pytest.mark.parametrize("path", ["/pools/default/bs/beer", "/poolsStreaming/default"])
async def test_a_stream_ends_when_its_user_is_gone(node: Node, path: str) -> None:
    async with serving(node) as (_, port):
        reader, writer = await stream_of(port, path)
        await config_of(reader)
        await node.change_users(lambda users: users.remove("rob"))
        assert await chunk_of(reader) == b""
        writer.close()


async def test_only_so_many_streams(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "STREAMS_MAX", 1)

    async def status(port: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        headers = {"Authorization": "Basic " + base64.b64encode(b"rob:quill").decode()}
        await asyncio.to_thread(connection.request, "GET", "/pools/default/bs/beer", headers=headers)
        response = await asyncio.to_thread(connection.getresponse)
        response.close()
        connection.close()
        return response.status

    async with serving(node) as (_, port):
        reader, writer = await stream_of(port, "/pools/default/bs/beer")
        await config_of(reader)
        assert await status(port) == 503
        writer.close()
        await asyncio.sleep(0.1)
        assert await status(port) == 200


async def test_a_client_that_goes_leaves_nothing_behind(node: Node) -> None:
    async with serving(node) as (http_server, port):
        for _ in range(3):
            reader, writer = await stream_of(port, "/pools/default/bs/beer")
            await config_of(reader)
            writer.close()
        await asyncio.sleep(0.1)
        gc.collect()
        await asyncio.sleep(0)
        assert len(http_server.streams.open) == 0


async def test_silent_connections_are_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "REQUEST_S_MAX", 0.1)
    async with serving(node) as (_, port):
        for sent in (b"", b"GET / HT"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


async def test_a_trickling_second_request_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "REQUEST_S_MAX", 0.2)
    async with serving(node) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        await asyncio.sleep(0.3)
        for _ in range(3):
            writer.write(b"G")
            await asyncio.sleep(0.08)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@pytest.mark.parametrize("is_answered_first", [True, False])
async def test_a_malformed_body_ends_it(node: Node, caplog: pytest.LogCaptureFixture, is_answered_first: bool) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: faults.append(about))
    async with serving(node) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /pools HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        if is_answered_first:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        writer.write(b"no chunk\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert is_answered_first or answer.startswith(b"HTTP/1.1 400 ")
        writer.close()
    assert faults == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_s_own_word_for_its_address_is_not_taken(node: Node) -> None:
    async with serving(node) as (_, port):
        url = f"http://127.0.0.1:{port}/pools"
        async with httpx.AsyncClient() as client:
            for number in range(FREE_FAILURES):
                await client.get(url, auth=("ann", "x"), headers={"X-Forwarded-For": f"192.0.2.{number}"})
            assert (await client.get(url, auth=ADMIN)).status_code == 429


async def test_two_sockets_stop_together(node: Node) -> None:
    http_server = HttpServer(node)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        await http_server.listen(bound)
    async with httpx.AsyncClient() as client:
        for port in ports:
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
    await http_server.stop()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_a_server_that_can_t_start_says_so(node: Node) -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    closed.close()
    with pytest.raises(OSError, match="descriptor"):
        await HttpServer(node).listen(closed)


# --- more connections than there are places -----------------------------------------------------------------------


async def status_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> int:
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    await reader.read(1)
    return status


def with_places(node: Node, count: int) -> None:
    """One of them is reserved."""
    node.options = replace(node.options, limits=ServerLimits(http_connections_max=count + 1))


async def test_idle_connections_give_way(node: Node) -> None:
    with_places(node, 2)
    async with serving(node) as (_, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        late = await asyncio.open_connection("127.0.0.1", port)
        assert await status_of(*late, "/") == 200
        assert [await reader.read() for reader, _ in idle[:4]] == [b""] * 4
        assert await status_of(*idle[4], "/health") == 200
        for _, writer in (*idle, late):
            writer.close()


LOGIN_HEAD = b"POST /ui/api/login HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nX-Headwater-Dashboard: 1\r\n"
UNFINISHED = {
    "a body": LOGIN_HEAD + b"Content-Length: 50\r\n\r\n",
    "a head": b"GET /pools HTTP/1.1\r\n",
    "a manifest": (
        b"GET /pools/default/buckets/beer/scopes/@ensureManifest/ff HTTP/1.1\r\nHost: x\r\n"
        b"Authorization: Basic %s\r\n\r\n" % base64.b64encode(b"rob:quill")
    ),
}


@pytest.mark.parametrize("waits_for", UNFINISHED)
async def test_the_slowest_gives_way_first(node: Node, monkeypatch: pytest.MonkeyPatch, waits_for: str) -> None:
    monkeypatch.setattr(serving_module, "SLOW_S", 0.0)
    with_places(node, 3)
    async with serving(node) as (_, port):
        slow = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(UNFINISHED[waits_for])
            await asyncio.sleep(0.05)
            slow.append((reader, writer))
        assert [reader.at_eof() for reader, _ in slow] == [True, True, False, False, False]
        for _ in range(2):
            quick = await asyncio.open_connection("127.0.0.1", port)
            assert await status_of(*quick, "/pools") == 401
            slow.append(quick)
        for _, writer in slow:
            writer.close()


async def test_the_address_with_the_most_connections_gives_way(node: Node) -> None:
    with_places(node, 3)
    async with serving(node) as (_, port):
        few = await asyncio.open_connection("127.0.0.1", port)
        many = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(4)]
        assert await status_of(*few, "/") == 200
        assert [await reader.read() for reader, _ in many[:2]] == [b"", b""]
        for _, writer in (few, *many):
            writer.close()


async def test_where_none_gives_way_the_reserve_says_that_the_node_lives_to_whoever_comes_last(node: Node) -> None:
    with_places(node, 1)
    async with serving(node) as (_, port):
        reader, busy = await stream_of(port, "/pools/default/bs/beer")
        await config_of(reader)
        comers = []
        for path, status in (("/health", 200), ("/pools", 503), ("/metrics", 401), ("/health", 200)):
            comers.append(await asyncio.open_connection("127.0.0.1", port))
            assert await status_of(*comers[-1], path) == status
        assert not reader.at_eof()
        for writer in (busy, *(writer for _, writer in comers)):
            writer.close()


async def test_unfinished_handshakes_give_way(node: Node, tmp_path: Path) -> None:
    with_places(node, 2)
    certificate, key = self_signed(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    bound = socket.create_server(("127.0.0.1", 0))
    http_server = HttpServer(node)
    await http_server.listen(bound, tls=server)
    silent = [await asyncio.open_connection("127.0.0.1", bound.getsockname()[1]) for _ in range(5)]
    assert [await reader.read() for reader, _ in silent[:3]] == [b""] * 3
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(certificate))) as client:
        assert (await client.get(f"https://127.0.0.1:{bound.getsockname()[1]}/health")).status_code == 200
    for _, writer in silent:
        writer.close()
    await http_server.stop()


async def test_waits_for_a_manifest_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "ENSURE_WAITS_MAX", 2)
    async with serving(node) as (http_server, port):
        waiting = []
        for _ in range(3):
            waiting.append(await asyncio.open_connection("127.0.0.1", port))
            waiting[-1][1].write(UNFINISHED["a manifest"])
        assert (await waiting[2][0].readline()).split()[1] == b"503"
        assert http_server.streams.manifest_waits == {"rob": 2}
        for _, writer in waiting:
            writer.close()
        async with asyncio.timeout(5):
            while http_server.streams.manifest_waits["rob"]:
                await asyncio.sleep(0.01)

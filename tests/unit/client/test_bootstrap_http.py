"""The cluster map over HTTP: from a real node, and from servers of every other kind."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater import errors
from headwater.client import bootstrap
from headwater.client.bootstrap import fetch_map_over_http
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings, TlsSettings
from support.cases import case, case_apart, each
from support.fake_servers import answering_http, down, dripping, hanging_up, http_answer, saying, serving, silent
from support.machine import self_signed
from support.node_process import PASSWORD, USER

QUICK = Timeouts(connect_s=5.0, answer_s=0.3)
TERSE, STREAM = "/pools/default/b/travel", "/pools/default/bs/travel"
CONFIG = {
    "rev": 7,
    "name": "travel",
    "uuid": "abc",
    "nodesExt": [
        {
            "services": {"mgmt": 8091, "kv": 11210},
            "thisNode": True,
            "alternateAddresses": {"external": {"hostname": "public0", "ports": {"mgmt": 30091, "kv": 30210}}},
        },
        {
            "services": {"mgmt": 8091, "kv": 11210},
            "hostname": "inside1",
            "alternateAddresses": {"external": {"hostname": "public1", "ports": {"mgmt": 31091, "kv": 31210}}},
        },
    ],
    "vBucketServerMap": {"serverList": ["$HOST:11210", "inside1:11210"], "vBucketMap": [[0, 1], [1, 0]]},
}
BODY = json.dumps(CONFIG).encode()


def settings(
    address: Address, bucket: str = "travel", *, tls: TlsSettings | None = None, query: str = "", **options: Any
) -> ClientSettings:
    scheme = "couchbase" if tls is None else "couchbases"
    options = {"user": USER, "password": PASSWORD, **options}
    return ClientSettings.make(f"{scheme}://{address}/{bucket}?bootstrap=http{query}", tls=tls, **options)


def fetch(address: Address, bucket: str = "travel", **options: Any) -> ClusterMap:
    return asyncio.run(fetch_map_over_http(address, settings(address, bucket, **options)))


def failure(address: Address, bucket: str = "travel", **options: Any) -> errors.HeadwaterError:
    with pytest.raises(errors.HeadwaterError) as raised:
        fetch(address, bucket, **options)
    assert raised.value.hint
    assert PASSWORD not in str(raised.value)
    return raised.value


def test_the_terse_config_is_asked_for_first() -> None:
    requests: list[str] = []
    with serving(answering_http({TERSE: http_answer(BODY)}, requests)) as address:
        found = fetch(address, agent="a tool/1")
    assert found.nodes == (Address("127.0.0.1", 11210), Address("inside1", 11210))
    (request,) = requests
    lines = request.split("\r\n")
    assert lines[0] == f"GET {TERSE} HTTP/1.1"
    assert f"Host: {address}" in lines
    assert "User-Agent: a tool/1" in lines
    assert "Connection: close" in lines
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    assert f"Authorization: Basic {login}" in lines


def chunked(*parts: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


@case(chunked(BODY, b"\n\n\n\n"))
@case(chunked(BODY + b"\n\n", b"\n\n{}\n\n\n\n"))
@case(chunked(*(BODY[at : at + 7] for at in range(0, len(BODY), 7)), b"\n", b"\n", b"\n", b"\n"))
@case(b"HTTP/1.0 200 OK\r\n\r\n" + BODY + b"\n\n\n\n" + b"\n\n\n\n")
@case(http_answer(BODY + b"\n\n\n\n"))
@case(http_answer(BODY))
def test_the_first_config_of_a_stream_for_servers_that_have_nothing_else(stream: bytes) -> None:
    """The stream stays open: what is awaited is a config, and not the end."""
    requests: list[str] = []
    with serving(answering_http({STREAM: stream}, requests, hangs_up=False)) as address:
        assert fetch(address).version == (0, 7)
    assert [request.split(" ")[1] for request in requests] == [TERSE, STREAM]


def test_an_answer_that_ends_with_the_connection() -> None:
    with serving(answering_http({TERSE: b"HTTP/1.0 200 OK\r\n\r\n" + BODY}, [])) as address:
        assert fetch(address).version == (0, 7)


@case_apart(Address("127.0.0.1", 8091), "", Address("127.0.0.1", 11210))
@case_apart(Address("public1", 31091), "", Address("public0", 30210))
@case_apart(Address("public0", 8091), "", Address("public0", 11210))
@case_apart(Address("127.0.0.1", 8091), "&network=external", Address("public0", 30210))
@case_apart(Address("public1", 31091), "&network=default", Address("public1", 11210))
def test_the_managers_port_names_the_network(
    monkeypatch: pytest.MonkeyPatch, asked: Address, query: str, first: Address
) -> None:
    """The names lead nowhere, so a client that asks them is led to a server here."""
    with serving(answering_http({TERSE: http_answer(BODY)}, [])) as address:
        real = bootstrap.open_transport
        monkeypatch.setattr(bootstrap, "open_transport", lambda new, _, *rest: real(new, address, *rest))
        assert fetch(asked, query=query).nodes[0] == first


def test_a_network_that_is_not_there() -> None:
    body = json.dumps({**CONFIG, "nodesExt": [{"services": {"kv": 1}}] * 2}).encode()
    with serving(answering_http({TERSE: http_answer(body)}, [])) as address:
        assert type(failure(address, query="&network=external")) is errors.NoSuchNetwork


def test_a_password_is_not_sent_in_clear_where_others_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "is_loopback", lambda _: False)
    requests: list[str] = []
    with serving(answering_http({TERSE: http_answer(BODY)}, requests)) as address:
        error = failure(address)
        assert type(error) is errors.AuthenticationFailed
        assert "in clear" in error.reason
        assert "18091" in error.hint
        assert requests == []
        fetch(address, user=None, password=None)
        assert "Authorization" not in requests[0]
        fetch(address, mechanism="PLAIN")
        assert "Authorization" in requests[1]


def test_a_user_with_a_colon() -> None:
    with serving(answering_http({}, [])) as address:
        assert "colon" in failure(address, user="a:b").reason


def test_a_client_certificate_is_the_login(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    requests: list[str] = []
    anonymous = {"user": None, "password": None}
    with serving(answering_http({TERSE: http_answer(encrypted_body())}, requests), tls=context) as address:
        tls = TlsSettings(ca_file=certificate, certificate_file=certificate, key_file=key)
        assert fetch(address, tls=tls, **anonymous).nodes[1] == Address("inside1", 11207)
        for _ in range(20):
            refused = failure(address, tls=TlsSettings(ca_file=certificate), **anonymous)
            assert type(refused) is errors.TlsFailed
            assert "client certificate" in refused.hint
    assert len(requests) == 1
    assert "Authorization" not in requests[0]


def encrypted_body() -> bytes:
    nodes = [{**node, "services": {"kvSSL": 11207}} for node in CONFIG["nodesExt"]]
    return json.dumps({**CONFIG, "nodesExt": nodes}).encode()


@case(401, errors.AuthenticationFailed, "the user or the password is wrong")
@case(403, errors.AccessDenied, "may not use bucket 'travel'")
@case(404, errors.UnknownBucket, "no bucket 'travel'")
@case(429, errors.TemporaryFailure, "429")
@case(503, errors.TemporaryFailure, "503")
@case(400, errors.RemoteProtocolError, "HTTP status 400")
@case(301, errors.RemoteProtocolError, "HTTP status 301")
@case(204, errors.RemoteProtocolError, "HTTP status 204")
@case(500, errors.RemoteProtocolError, "HTTP status 500")
def test_refusals(status: int, kind: type[errors.HeadwaterError], words: str) -> None:
    with serving(answering_http({TERSE: http_answer(b"", status=status)}, [])) as address:
        error = failure(address)
    assert type(error) is kind
    assert words in error.reason
    assert str(address) in error.reason


@pytest.mark.parametrize("body", [b"", b"<html>Welcome</html>", b"[]", b"{}", b"\xff", b'{"vBucketServerMap": 5}'])
def test_what_is_no_config(body: bytes) -> None:
    with serving(answering_http({TERSE: http_answer(body)}, [])) as address:
        assert type(failure(address)) is errors.MalformedJson


def test_a_host_that_is_down() -> None:
    address = down()
    error = failure(address)
    assert type(error) is errors.HostUnreachable
    assert str(address) in error.reason


@case(silent, errors.NoAnswer)
@case(dripping(b"HTTP/1.1 200 OK\r\nX: ", every_s=0.02), errors.NoAnswer)
@case(hanging_up, errors.ConnectionClosed)
@case(saying(b""), errors.ConnectionClosed)
@case(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"), errors.ConnectionClosed)
@case(saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"), errors.ConnectionClosed)
@case(saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{"), errors.WrongProtocol)
@case(saying(b"\x81\x1f" + bytes(22)), errors.WrongProtocol)
@case(saying(b"SSH-2.0-OpenSSH_9.2\r\n"), errors.WrongProtocol)
@case(saying(b"HTTP/1.1 abc OK\r\n\r\n"), errors.WrongProtocol)
@case(saying(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000), errors.WrongProtocol)
@case(saying(b"HTTP/1.1 200 " + b"O" * 100_000), errors.WrongProtocol)
@case(saying(b"\x15\x03\x01\x00\x02\x02\x46"), errors.TlsFailed)
def test_servers_that_are_no_managers(talk: Callable[[socket.socket], None], kind: type[errors.HeadwaterError]) -> None:
    with serving(talk) as address:
        error = failure(address, timeouts=QUICK)
    assert type(error) is kind
    assert str(address) in error.reason


def test_a_server_that_hangs_up_is_asked_whether_it_has_tls(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*self_signed(tmp_path))

    def talk(sock: socket.socket) -> None:
        if sock.recv(1, socket.MSG_PEEK) == b"\x16":
            context.wrap_socket(sock, server_side=True).close()

    with serving(talk) as address:
        error = failure(address)
    assert type(error) is errors.TlsFailed
    assert f"{address} uses TLS, and this connection does not" in error.reason


def test_an_answer_that_drips_has_its_time_and_no_more() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"

    def talk(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(head)
        dripping(b" ", every_s=0.02)(sock)

    with serving(talk) as address:
        assert type(failure(address, timeouts=QUICK)) is errors.NoAnswer


def test_an_answer_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ANSWER_BYTES_MAX", len(BODY) - 1)
    with serving(answering_http({TERSE: http_answer(BODY)}, [])) as address:
        error = failure(address)
    assert type(error) is errors.RemoteProtocolError
    assert f"more than {len(BODY) - 1} bytes" in error.reason
    monkeypatch.setattr(bootstrap, "ANSWER_BYTES_MAX", len(BODY))
    with serving(answering_http({TERSE: http_answer(BODY)}, [])) as address:
        fetch(address)


@each("seed", range(30))
def test_random_bytes_in_the_place_of_an_answer(seed: int) -> None:
    """Whatever a server says, what comes out is an error of ours."""
    chance = random.Random(seed)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" if seed % 3 else b""
    junk = bytearray(head + chunked(BODY)[: chance.randrange(200)] + chance.randbytes(chance.randrange(2000)))
    with serving(saying(bytes(junk))) as address:
        failure(address, timeouts=QUICK)

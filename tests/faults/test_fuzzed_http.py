"""Fuzzed requests to every route of a node's HTTP side, by users of several roles: each gets an answer, and none a 500.

The routes are those of the application itself, so that a new one is fuzzed as soon as it exists.
"""

from __future__ import annotations

import base64
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from unittest.mock import MagicMock
from urllib.parse import quote, urlencode, urlsplit

import httpx
import pytest
from starlette.routing import Route

from headwater.node.http.app import http_app
from headwater.protocol.messages.documents import Get, GetResponse, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION
from support.node_process import PASSWORD, USER, StartNode

SEED = 29
THREADS = 4
ANSWER_S_MAX = 30.0
SERVED_STATUSES = {*range(200, 500), 501, 503, 505}
"""503 says why: the node waits for something, or has too many streams."""
BUCKETS = ("fuzzed", "good", "made-0", "made-1")
NO_BUCKET = ("none", "", ".", "..", "%00", "%ff", "a" * 300, "é")
ROLES = {
    "everything": "admin",
    "reader": "data_reader[fuzzed],data_dcp_reader[fuzzed]",
    "manager": "bucket_admin[fuzzed]",
}
WAITING = ("@ensureManifest", "treaming", "/bs/", "/live")
"""These answer late, or never end: the head of the answer is enough, and where there is none, so be it."""
WAITING_S = 0.2

TEXTS = ("", "0", "1", "-1", "8", "15", "16", "99999", "9" * 40, "1e3", "true", "false", "null", "a", "_default", "%41",
         "é", "\0", "a" * 300, "x" * 5000, "[1]", '{"a":1}', "\ud7ff", "0x10", " 1", "1 ", "+1", "١")  # fmt: skip
FIELDS = {
    "name": ("made-0", "made-1", "_default", "s", "c", "%", "_x", "a" * 260),
    "ramQuota": ("100", "0", "99999999"), "ramQuotaMB": ("100",), "numVBuckets": ("4", "16", "3", "100000"),
    "replicaNumber": ("0", "1", "4"), "maxTTL": ("0", "-1", "60", "99999999999"), "flushEnabled": ("0", "1", "2"),
    "bucketType": ("couchbase", "ephemeral"), "storageBackend": ("couchstore", "magma"), "history": ("true", "false"),
    "durabilityMinLevel": ("none", "majority", "x"), "compressionMode": ("off", "on"), "timeout": ("1", "50"),
    "historyRetentionSeconds": ("10", "x"), "clusterName": ("a", "b" * 300), "memoryQuota": ("256", "1"),
    "roles": ("data_reader[fuzzed]", "admin", "none[", "data_reader[a:b:c:d]"), "groups": ("g", "none"),
    "description": ("d",), "ldap_group_ref": ("l",), "conflictResolutionType": ("seqno", "lww", "custom"),
    "nodes": ("[]",), "to": ("0", "5"),
}  # fmt: skip
QUERIES = (
    "rows", "vbucket", "collection", "key", "op", "from", "to", "before", "after", "connection", "seqno", "rev",
)  # fmt: skip
HOSTS = (
    "localhost", "127.0.0.1", "[::1]", "example.com", "", "a" * 400, "localhost:x", "127.0.0.1:99999",
    "user@localhost", "[1.2.3]", "[",
)  # fmt: skip
HEADERS = (
    b"Origin: null", b"Origin: http://[", b"Origin: http://localhost", b"Cookie: headwater=; a=b;;=",
    b"Cookie: \xff\xfe=1", b"Accept: text/html", b"Content-Type: multipart/form-data; boundary=",
    b"Expect: 100-continue",
    b"Content-Type: application/json", b"Range: bytes=0-1", b"If-None-Match: *", b"If-Modified-Since: x",
    b"Accept-Encoding: gzip;q=x", b"X-A: " + b"a" * 15000, b"X-Headwater-Dashboard: 1", b"X-A:\tb\x0b",
    b"Upgrade: websocket\r\nConnection: upgrade", b"Connection: close", b"X-HTTP-Method-Override: DELETE",
    b"Forwarded: for=1.2.3.4", b"X-Forwarded-Host: evil",
)  # fmt: skip
AUTHORIZATIONS = (
    b"Basic", b"Basic !!!", b"Basic \xff", b"Basic Og==", b"Bearer x", b"basic " + b"A" * 3000, b"Digest a=b", b"",
)  # fmt: skip


def _routes() -> list[tuple[str, list[str]]]:
    app = http_app(cast(Any, MagicMock()))
    return [(route.path, sorted(route.methods or ())) for route in app.routes if isinstance(route, Route)]


class RequestMaker:
    """Makes requests, most of which have one thing wrong."""

    def __init__(self, seed: int, cookies: dict[str, str]) -> None:
        self._rng = random.Random(seed)
        self._routes = _routes()
        self._cookies = cookies

    def make(self) -> tuple[str, str, bytes]:
        """The path of the route, the method, and the bytes."""
        rng = self._rng
        route, methods = rng.choice(self._routes)
        method = rng.choice(methods) if rng.random() < 0.9 else rng.choice(("TRACE", "OPTIONS", "get", "PUT", "X" * 50))
        path = re.sub(r"{(\w+)(?::path)?}", lambda found: self._parameter(found[1], method), route)
        if rng.random() < 0.5:
            path += "?" + urlencode([(rng.choice(QUERIES), rng.choice(TEXTS)) for _ in range(rng.randrange(1, 4))])
        if rng.random() < 0.05:
            path += rng.choice(("%", "%zz", "//", "/../..", "?" + "&" * 2000, "#x", "\\", "%2e%2e"))
        body = self._body(route) if method in ("POST", "PUT", "PATCH", "DELETE") else b""
        version = rng.choice((b"1.1",) * 30 + (b"1.0", b"0.9", b"2.0", b"9.9"))
        head = [b"%s %s HTTP/%s" % (method.encode(), path.encode("latin-1", "replace"), version), *self._headers(body)]
        data = b"\r\n".join(head) + b"\r\n\r\n" + body
        if rng.random() < 0.05:
            at = rng.randrange(len(data) - len(body))
            data = data[:at] + bytes([rng.choice((0, 10, 13, 32, 58, 127, 128, 255))]) + data[at + 1 :]
        return route, method, data

    def _parameter(self, name: str, method: str) -> str:
        rng = self._rng
        if rng.random() < 0.1:
            return quote(rng.choice((*TEXTS, *NO_BUCKET)), safe="/%")
        if name == "bucket":
            return rng.choice(BUCKETS[2:] if method == "DELETE" else BUCKETS[:1] + BUCKETS[2:])
        known = {"scope": ("_default", "s", "made-0"), "collection": ("_default", "c"), "domain": ("local", "external")}
        known |= {
            "uid": ("0", "1", "ffff"),
            "vbucket": ("0", "3", "16"),
            "number": ("0", "1"),
            "name": ("made", "app.js"),
        }
        return rng.choice(known.get(name, TEXTS[:5]))

    def _body(self, route: str) -> bytes:
        rng = self._rng
        if route.endswith("changePassword"):
            return urlencode({"password": rng.choice((PASSWORD, PASSWORD, "", "x" * 2000))}).encode()
        match rng.randrange(8):
            case 0:
                return rng.randbytes(rng.choice((0, 1, 100, 70_000)))
            case 1:
                return rng.choice(
                    (b'{"user":"made","password":1}', b'{"user":', b"[" * 5000, b'"\\ud800"', b"=&=&", b"%")
                )
            case 2:
                return urlencode(
                    [(rng.choice(list(FIELDS)), rng.choice(TEXTS)) for _ in range(rng.randrange(1, 20))]
                ).encode()
        names = rng.sample(list(FIELDS), rng.randrange(1, 5))
        if rng.random() < 0.7:
            names = ["name", "ramQuota", "numVBuckets"] if route.endswith("buckets") else rng.sample(names, 1)
        form = {name: rng.choice(FIELDS[name]) for name in names}
        if "/users/" in route:
            form["password"] = rng.choice((PASSWORD, "", "short"))
        return urlencode(form).encode()

    def _headers(self, body: bytes) -> Iterator[bytes]:
        rng = self._rng
        if rng.random() < 0.97:
            yield b"Host: " + (b"localhost" if rng.random() < 0.9 else rng.choice(HOSTS).encode())
        user = rng.choice(list(ROLES))
        if rng.random() < 0.95:
            yield b"Authorization: Basic " + base64.b64encode(f"{user}:{PASSWORD}".encode())
        if rng.random() < 0.05:
            yield b"Authorization: " + rng.choice(AUTHORIZATIONS)
        if rng.random() < 0.8:
            yield b"Cookie: " + self._cookies[user].encode()
        while rng.random() < 0.3:
            yield rng.choice(HEADERS)
        if body and rng.random() < 0.95:
            yield b"Content-Length: %d" % len(body)
        elif body:
            yield rng.choice(
                (b"Content-Length: -1", b"Content-Length: 0", b"Transfer-Encoding: chunked", b"Content-Length: 9e9")
            )


class HttpFuzzing(threading.Thread):
    """Sends one request after the other, on connections that are kept where the node keeps them."""

    def __init__(self, url: str, maker: RequestMaker, requests: int) -> None:
        super().__init__(daemon=True)
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._maker = maker
        self._requests = requests
        self.answers: Counter[tuple[str, str, int]] = Counter()
        """By route, method and status; 0 where the connection was closed without an answer."""
        self.faults: list[tuple[int, bytes, bytes]] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        sock: socket.socket | None = None
        try:
            for _ in range(self._requests):
                sock = sock or socket.create_connection(self._address, timeout=ANSWER_S_MAX)
                if not self._ask(sock):
                    sock.close()
                    sock = None
        except BaseException as error:
            self.failure = error
        finally:
            if sock is not None:
                sock.close()

    def _ask(self, sock: socket.socket) -> bool:
        """Send one request and take its answer. Returns whether the connection can be used again."""
        route, method, data = self._maker.make()
        is_waiting = any(part in route for part in WAITING)
        sock.settimeout(WAITING_S if is_waiting else ANSWER_S_MAX)
        status, text, keeps = 0, b"", False
        try:
            sock.sendall(data)
            with closing(HTTPResponse(sock, method=method)) as answer:
                answer.begin()
                status = answer.status
                if not is_waiting:
                    text = answer.read()
                    keeps = not answer.will_close
        except TimeoutError:
            assert is_waiting, f"no answer to {data[:300]!r}"
        except (HTTPException, OSError):
            pass  # The node has closed a connection on which it can find no request.
        self.answers[route, method, status] += 1
        if (status and status not in SERVED_STATUSES) or (status == 503 and not text and not is_waiting):
            self.faults.append((status, data[:500], text[:500]))
        return keeps


@pytest.mark.parametrize("requests", [200, pytest.param(20_000, marks=pytest.mark.soak)])
def test_fuzzed_requests(start_node: StartNode, requests: int) -> None:
    node = start_node("--bucket", "fuzzed", "--bucket", "good", "--vbuckets", "16")
    with node.connect("good") as good, httpx.Client(base_url=node.http_url, timeout=60) as client:
        place = {"key": b"good", "collection_id": DEFAULT_COLLECTION}
        good.request(Set(value=b"1", **place))
        cookies = {}
        for name, roles in ROLES.items():
            form = {"password": PASSWORD, "roles": roles}
            client.put(f"/settings/rbac/users/local/{name}", data=form, auth=(USER, PASSWORD)).raise_for_status()
            login = {"user": name, "password": PASSWORD}
            answer = client.post(
                "/ui/api/login", json=login, headers={"X-Headwater-Dashboard": "1", "Origin": node.http_url}
            )
            answer.raise_for_status()
            cookies[name] = answer.headers["set-cookie"].partition(";")[0]
            client.cookies.clear()
        fuzzers = [
            HttpFuzzing(node.http_url, RequestMaker(SEED + number, cookies), requests // THREADS)
            for number in range(THREADS)
        ]
        for fuzzer in fuzzers:
            fuzzer.start()
        for fuzzer in fuzzers:
            fuzzer.join()
            if fuzzer.failure is not None:
                raise fuzzer.failure
        answers = sum((fuzzer.answers for fuzzer in fuzzers), Counter[tuple[str, str, int]]())
        by_status: Counter[int] = Counter()
        for (_, _, status), times in answers.items():
            by_status[status] += times
        print(f"{answers.total()} requests, by status {sorted(by_status.items())}")
        assert [fault for fuzzer in fuzzers for fault in fuzzer.faults] == []
        # Most get past the log-in and find their route.
        assert (
            sum(times for status, times in by_status.items() if status in (200, 202, 204, 400, 403, 404))
            > 0.5 * requests
        )
        assert client.get("/health").status_code == 200
        assert client.get("/pools/default", auth=(USER, PASSWORD)).status_code == 200
        found = good.request(Get(**place))
        assert isinstance(found, GetResponse)
        assert found.value == b"1"

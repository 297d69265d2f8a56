"""How long a good client waits while an attacker has a node do what takes long: measured, with `make soak`.

That no request of these is done on the event loop is counted in `tests/unit/node/kv/test_session.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from headwater.client.kv_connection import KvConnection
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import subdocument
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import Open, OpenFlags
from headwater.protocol.messages.documents import Append, Get, GetRandomKey, RangeScanCreate, Set, SetQuiet
from headwater.protocol.messages.session import Hello, Noop, SaslAuth
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetCollectionId, SetCollectionsManifest
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.values import Datatype, compress
from support.node_process import NodeProcess, StartNode, exchange
from support.noop_clock import NoopClock, at

ATTACK_S = 4.0
CONNECTIONS = 5
DOCUMENTS = 300_000
P99_MS, MAX_MS = 100, 250
LARGE_BYTES = 19_000_000
LARGE = {"key": b"large", "collection_id": DEFAULT_COLLECTION}
OWN = {"key": b"own", "collection_id": DEFAULT_COLLECTION}
EMPTY = CollectionId(8)


def features(count: int) -> bytes:
    """A HELLO of so many features, the same one."""
    value = int(Feature.XERROR).to_bytes(2) * count
    return Hello(features=()).encode()[:8] + len(value).to_bytes(4) + bytes(12) + value


def large(request: type[Request], path: bytes, new_value: bytes = b"") -> bytes:
    return request(path=path, new_value=new_value, **LARGE).encode()


def scan() -> bytes:
    return RangeScanCreate(datatype=Datatype.JSON, value=b'{"collection":"0","key_only":true}').encode()


ATTACKS: dict[str, Callable[[], bytes]] = {
    "nothing but noops": lambda: Noop().encode(),
    "HELLO with 7,900 features, by strangers": lambda: features(7_900) * 16,
    "HELLO with 9.9 M features": lambda: features(9_900_000),
    "sub-document EXISTS in 19 MB": lambda: large(subdocument.SubdocExists, b"a") * 64,
    "sub-document GET_COUNT of an array of 19 MB": lambda: large(subdocument.SubdocGetCount, b"a") * 64,
    "sub-document ARRAY_ADD_UNIQUE into 19 MB": lambda: large(subdocument.SubdocArrayAddUnique, b"a", b"2") * 4,
    "sub-document COUNTER at the end of 19 MB": lambda: large(subdocument.SubdocCounter, b"a[-1]", b"1") * 4,
    "16 look-ups in 19 MB by one request": lambda: (
        subdocument.MultiLookup(
            specs=(subdocument.LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"a[9000000]"),) * 16, **LARGE
        ).encode()
        * 16
    ),
    "GET of 19 MB": lambda: Get(**LARGE).encode() * 16,
    "SET of 19 MB of [": lambda: Set(value=b"[" * LARGE_BYTES, **OWN).encode(),
    "SET of 19 MB of numbers": lambda: Set(value=b"[%b1]" % (b"1," * (LARGE_BYTES // 2)), **OWN).encode(),
    "SET of 19 MB, compressed": lambda: (
        Set(value=compress(b"[%b1]" % (b"1," * (LARGE_BYTES // 2))), datatype=Datatype.SNAPPY, **OWN).encode() * 4
    ),
    "APPEND to 19 MB": lambda: Append(value=b" ", **LARGE).encode() * 4,
    "GetAllVbSeqnos of an empty collection": lambda: GetAllVbSeqnos(state=0, collection=EMPTY).encode() * 64,
    "GetRandomKey of an empty collection": lambda: GetRandomKey(collection=EMPTY).encode() * 64,
    "range scans": lambda: scan() * 64,
    "get-collection-id of a.a.a…, 19 MB": lambda: GetCollectionId(value=b"a." * (LARGE_BYTES // 2)).encode(),
    "SASL of 19 MB": lambda: SaslAuth(key=b"SCRAM-SHA1", value=b"n,,n=a,r=" + b"a" * LARGE_BYTES).encode(),
    "DCP open with 19 MB of JSON": lambda: Open(
        key=b"c", flags=OpenFlags.PRODUCER, datatype=Datatype.JSON, value=b"[%b1]" % (b"1," * (LARGE_BYTES // 2))
    ).encode(),
}


@contextmanager
def attack(node: NodeProcess, requests: bytes, *, is_stranger: bool) -> Iterator[None]:
    """Connections that send these requests again and again, and read what comes back."""
    over = threading.Event()

    def send(connection: KvConnection) -> None:
        with suppress(OSError):
            while not over.is_set():
                connection.sock.sendall(requests)

    def receive(connection: KvConnection) -> None:
        with suppress(OSError):
            while connection.sock.recv(1 << 20):
                pass

    with ExitStack() as stack:
        connections = [stack.enter_context(node.connect()) for _ in range(CONNECTIONS)]
        if is_stranger:
            for connection in connections:
                exchange(connection, SaslAuth(key=b"PLAIN", value=b"nobody").encode(), answers=1)
        threads = [threading.Thread(target=job, args=(one,)) for one in connections for job in (send, receive)]
        for thread in threads:
            thread.start()
        yield
        over.set()
        for connection in connections:
            connection.sock.shutdown(2)
        for thread in threads:
            thread.join()


def fill(connection: KvConnection) -> None:
    """Small documents for what walks over all of them, a large one for the rest, and a collection with none."""
    manifest = Manifest().with_collection("_default", "empty")
    exchange(connection, SetCollectionsManifest(value=manifest.encode()).encode(), answers=1)
    for start in range(0, DOCUMENTS, 10_000):
        sets = (
            SetQuiet(
                vbucket=VBucketId(number % 4), collection_id=DEFAULT_COLLECTION, key=b"key-%d" % number,
                value=b'{"n":%d,"pad":"%0300d"}' % (number, number),
            )
            for number in range(start, start + 10_000)
        )  # fmt: skip
        exchange(connection, b"".join(one.encode() for one in sets) + Noop().encode(), answers=1)
    connection.request(Set(value=b'{"a":[%b1]}' % (b"1," * (LARGE_BYTES // 2)), **LARGE))


@pytest.mark.soak
def test_no_request_keeps_a_good_client_waiting(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4")
    with node.connect() as connection:
        fill(connection)
    time.sleep(2)
    slow: list[str] = []
    for name, make_requests in ATTACKS.items():
        requests = make_requests()
        with NoopClock(node) as clock, attack(node, requests, is_stranger="strangers" in name):
            time.sleep(ATTACK_S)
        p99_ms, max_ms = at(0.99, clock.latencies_ms), clock.latencies_ms[-1]
        print(
            f"{name:48} {len(clock.latencies_ms):5} noops: median {at(0.5, clock.latencies_ms):5.1f} ms, "
            f"p99 {p99_ms:5.1f} ms, at most {max_ms:5.1f} ms; "
            f"of the loop p99 {at(0.99, clock.loops_ms):5.1f} ms, at most {clock.loops_ms[-1]:5.1f} ms"
        )
        if p99_ms >= P99_MS or max_ms >= MAX_MS:
            slow.append(name)
    assert slow == []

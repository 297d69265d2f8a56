"""UPR sessions over a real socket, from the first byte to the stream end, held against the draft's own packets.

The packets are those of `vectors/seeds/004-*.txt`. Numbers that a node gives itself (seqnos, CAS, vbuuids) are put in
at the offsets that the draft draws; every other byte must be the draft's.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headwater.client.kv_connection import KvConnection
from headwater.errors import LocalProtocolError
from headwater.node.options import NodeOptions
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import CollectionId, VBucketId
from support.cases import case_apart
from support.node_process import NodeProcess, StartNode, run_serve

SEEDS = Path(__file__).parents[1] / "vectors" / "seeds"
VBUCKET = VBucketId(12)  # the draft's
DEFAULT = CollectionId(0)

# Where the draft draws what a node decides.
END_BY_SEQNO, VBUCKET_UUID, REQUEST_HIGH_SEQNO = 32, 40, 48
CAS, BY_SEQNO, REV_SEQNO = 16, 24, 32


def draft(name: str, **fields: int) -> bytes:
    """A packet of the draft, with 64-bit fields replaced at their offsets."""
    (path,) = SEEDS.glob(f"004-*-{name}.txt")
    section = re.split(r"^(?:bytes|fields|corrections):\n", path.read_text(), flags=re.MULTILINE)[1]
    packet = bytearray(bytes.fromhex("".join(line.split(maxsplit=1)[1] for line in section.splitlines() if line)))
    for field, number in fields.items():
        at = globals()[field]
        packet[at : at + 8] = number.to_bytes(8)
    return bytes(packet)


class Consumer:
    """A raw consumer: bytes, and nothing of the codec."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def receive(self) -> bytes:
        """The next packet. Empty at the end of the connection."""
        header = self._exactly(HEADER_BYTES)
        return header + self._exactly(int.from_bytes(header[8:12])) if header else b""

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self._sock.recv(size - len(data))
            if not got:
                assert not data, "the connection ended inside a packet"
                return b""
            data += got
        return data


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node("--vbuckets", "16", "--upr-port", "0", "--expiry-interval", "0.1")


@pytest.fixture
def kv(node: NodeProcess) -> Iterator[KvConnection]:
    with closing(node.connect()) as connection:
        yield connection


@pytest.fixture
def consumer(node: NodeProcess) -> Iterator[Consumer]:
    host, _, port = node.ready["upr"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        yield Consumer(sock)


def put(kv: KvConnection, key: bytes, value: bytes = b"myvalue", *, expiry: int = 0) -> int:
    answer = kv.request(Set(vbucket=VBUCKET, collection_id=DEFAULT, key=key, value=value, expiry=expiry))
    return answer.cas


def test_the_drafts_own_request_streams_until_the_state_changes(kv: KvConnection, consumer: Consumer) -> None:
    consumer.send(draft("stream-request"))
    assert [consumer.receive(), consumer.receive()] == [draft("stream-ok"), draft("stream-begin")]
    cas = put(kv, b"mykey")
    assert consumer.receive() == draft("snapshot-start")
    assert consumer.receive() == draft("mutation", CAS=cas, BY_SEQNO=1, REV_SEQNO=1)
    assert consumer.receive() == draft("snapshot-end")
    cas = kv.request(Delete(vbucket=VBUCKET, collection_id=DEFAULT, key=b"mykey")).cas
    assert consumer.receive() == draft("snapshot-start")
    assert consumer.receive() == draft("deletion", CAS=cas, BY_SEQNO=2, REV_SEQNO=2)
    assert consumer.receive() == draft("snapshot-end")
    kv.request(SetVBucket(vbucket=VBUCKET, state=dcp_streams.VBucketState.DEAD))
    assert consumer.receive() == draft("stream-end-state-changed")


def test_the_failover_log_and_a_rollback(kv: KvConnection, consumer: Consumer) -> None:
    put(kv, b"mykey")
    kv.request(dcp_streams.Open(key=b"to see the log", flags=dcp_streams.OpenFlags.PRODUCER))
    known = kv.request(dcp_streams.GetFailoverLog(vbucket=VBUCKET))
    assert isinstance(known, dcp_streams.GetFailoverLogResponse)
    consumer.send(draft("failover-log-request"))
    answer = consumer.receive()
    # The draft's has two pairs, a new vbucket has one: body and length follow, the rest of the header does not.
    pairs = b"".join(entry.vbuuid.to_bytes(8) + entry.seqno.to_bytes(8) for entry in known.failover_log)
    drawn = draft("failover-log-response")
    assert answer == drawn[:8] + len(pairs).to_bytes(4) + drawn[12:HEADER_BYTES] + pairs
    # The draft's branch is not in that log, so a consumer that has something of it starts again.
    request = bytearray(draft("stream-request"))
    request[24:32] = (1).to_bytes(8)
    consumer.send(bytes(request))
    assert consumer.receive() == draft("rollback")[:HEADER_BYTES] + bytes(8)
    # With a pair of the log it goes on.
    entry = known.failover_log[0]
    going_on = bytearray(draft("stream-request", VBUCKET_UUID=entry.vbuuid, REQUEST_HIGH_SEQNO=entry.seqno))
    going_on[24:40] = (1).to_bytes(8) + (1).to_bytes(8)
    consumer.send(bytes(going_on))
    assert [consumer.receive() for _ in range(3)] == [draft("stream-ok"), draft("stream-begin"), draft("stream-end-ok")]


def test_many_documents_to_a_consumer_that_reads_late(kv: KvConnection, consumer: Consumer) -> None:
    value = bytes(1_000_000)
    for number in range(20):
        put(kv, b"key-%d" % number, value)
    consumer.send(draft("stream-request", END_BY_SEQNO=20))
    time.sleep(1)
    packets = [consumer.receive() for _ in range(25)]
    assert [packet[BY_SEQNO + 7] for packet in packets[3:23]] == list(range(1, 21))
    assert packets[24] == draft("stream-end-ok")


# --- where it listens ----------------------------------------------------------------------------------------------


def test_another_bucket_than_the_first(start_node: StartNode) -> None:
    node = start_node(
        "--vbuckets", "16", "--bucket", "one", "--bucket", "two", "--upr-port", "0", "--upr-bucket", "two"
    )
    with closing(node.connect("two")) as kv:
        put(kv, b"mykey")
    host, _, port = node.ready["upr"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        consumer = Consumer(sock)
        consumer.send(draft("stream-request", END_BY_SEQNO=1))
        assert [consumer.receive() for _ in range(6)][5] == draft("stream-end-ok")


@case_apart(("--upr-bucket", "default"), "needs a port")
@case_apart(("--upr-port", "0", "--upr-bucket", "nowhere"), "'nowhere', does not exist")
def test_options_that_do_not_fit(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    ended = run_serve("--data", str(tmp_path / "data"), "--vbuckets", "1", "--port", "0", "--http-port", "0", *options)
    assert ended.returncode == 1
    assert words in ended.stderr


def test_beyond_loopback_the_port_has_to_be_asked_for_twice(tmp_path: Path) -> None:
    """TLS does not make up for the log-in that the draft lacks."""
    with_tls: dict[str, Any] = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(LocalProtocolError, match="no authentication"):
        NodeOptions(data=tmp_path, host="192.0.2.1", upr_port=0, **with_tls)
    NodeOptions(data=tmp_path, host="192.0.2.1", upr_port=0, insecure=True)
    assert NodeOptions(data=tmp_path, host="192.0.2.1", **with_tls).upr_port is None

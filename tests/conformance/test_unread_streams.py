"""A consumer that does not read: what the node has for it in its hands stays as it is while others are served."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing
from pathlib import Path

import pytest

from headwater.client.kv_connection import KvConnection, Login
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import Control, Open, StreamEnd, StreamFlags, StreamRequest
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from headwater.protocol.sasl import Credentials
from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

VBUCKETS = 4
TOTAL_BYTES = 6_000_000
"""More than the system's buffers hold."""
OPAQUES = {"reads late": 0x1000, "reads": 0x2000, "reads, too": 0x3000}


def value_of(number: int, size_bytes: int) -> bytes:
    return (b"%d;" % number).ljust(size_bytes, b"%d" % (number % 10))


def opened(node: NodeProcess, name: str, tls: ssl.SSLContext | None) -> KvConnection:
    """A connection with a stream of each vbucket up to what is there, of which nothing is read yet."""
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default", tls=tls)
    connection = KvConnection.open(node.address, login)
    connection.request(Open(key=name.encode()))
    connection.request(Control(key=b"enable_noop", value=b"true"))
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
    for vbucket in range(VBUCKETS):
        request = StreamRequest(vbucket=VBucketId(vbucket), opaque=OPAQUES[name] + vbucket, flags=StreamFlags.LATEST)
        connection.sock.sendall(request.encode())
    return connection


def all_changes(connection: KvConnection, name: str) -> dict[bytes, bytes]:
    """What the streams bring up to their ends. Every message has to be of one of them."""
    frames, documents, ended = FrameBuffer(), dict[bytes, bytes](), 0
    while ended < VBUCKETS:
        received = connection.sock.recv(256 * 1024)
        assert received, "the node has closed the connection"
        frames.receive_data(received)
        for frame in frames.frames():
            message: Message = decode_message(frame, WITH_COLLECTIONS)
            assert message.opaque in range(OPAQUES[name], OPAQUES[name] + VBUCKETS)
            ended += isinstance(message, StreamEnd)
            if isinstance(message, Mutation):
                assert message.key not in documents
                documents[message.key] = message.value
    return documents


def check_that_all_get_everything(node: NodeProcess, value_bytes: int, tls: ssl.SSLContext | None = None) -> None:
    """Let one consumer wait with reading until two others have read everything."""
    documents = TOTAL_BYTES // value_bytes
    written = {b"key::%d" % number: value_of(number, value_bytes) for number in range(documents)}
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default", tls=tls)
    with KvConnection.open(node.address, login) as writer:
        for number, (key, value) in enumerate(written.items()):
            vbucket = VBucketId(number % VBUCKETS)
            writer.request(Set(vbucket=vbucket, collection_id=DEFAULT_COLLECTION, key=key, value=value))
    with closing(opened(node, "reads late", tls)) as late:
        for name in ("reads", "reads, too"):
            with closing(opened(node, name, tls)) as consumer:
                assert all_changes(consumer, name) == written
        assert all_changes(late, "reads late") == written


@pytest.mark.parametrize("value_bytes", [10_000, 3_000_000], ids="values of {} bytes".format)
def test_what_waits_for_a_slow_consumer_is_not_written_over(start_node: StartNode, value_bytes: int) -> None:
    check_that_all_get_everything(start_node("--vbuckets", str(VBUCKETS)), value_bytes)


def test_nor_is_what_waits_to_be_encrypted(start_node: StartNode, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    node = start_node("--vbuckets", str(VBUCKETS), "--tls-cert", str(certificate), "--tls-key", str(key))
    check_that_all_get_everything(node, 30_000, ssl.create_default_context(cafile=str(certificate)))

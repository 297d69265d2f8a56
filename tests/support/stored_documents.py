"""What a node holds, found out without the client: by plain streams with the typed codec, and key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwater.client.kv_connection import KvConnection
from headwater.errors import KeyNotFound
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import (
    Deletion,
    Expiration,
    Mutation,
    SeqnoAdvanced,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.messages.dcp_streams import (
    Control,
    DcpNoop,
    Open,
    StreamEnd,
    StreamEndReason,
    StreamFlags,
    StreamRequest,
)
from headwater.protocol.messages.documents import Get, GetResponse
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.system_events import CollectionDropped, decode_event
from support.consumer_state import Document, Key
from support.proxied_node import ProxiedBucket

RECEIVE_BYTES = 256 * 1024


def streamed_documents(bucket: ProxiedBucket) -> dict[Key, Document]:
    """What a consumer with no faults on its way ends with."""
    documents: dict[Key, Document] = {}
    with bucket.connect_directly() as connection:
        connection.request(Open(key=b"what-is-stored"))
        connection.request(Control(key=b"enable_noop", value=b"true"))
        requests = [
            StreamRequest(vbucket=VBucketId(vbucket), opaque=vbucket, flags=StreamFlags.LATEST)
            for vbucket in range(bucket.vbuckets)
        ]
        connection.sock.sendall(b"".join(request.encode() for request in requests))
        for message in _messages_until_end(connection, streams=bucket.vbuckets):
            _apply(documents, message)
    return documents


def _messages_until_end(connection: KvConnection, *, streams: int) -> Iterator[Message]:
    frames = FrameBuffer()
    while streams:
        data = connection.sock.recv(RECEIVE_BYTES)
        assert data, "the node has closed the connection"
        frames.receive_data(data)
        for frame in frames.frames():
            message = decode_message(frame, connection.outcome.negotiated)
            if isinstance(message, StreamEnd):
                assert message.reason == StreamEndReason.OK, message
                streams -= 1
            yield message


def _apply(documents: dict[Key, Document], message: Message) -> None:
    if isinstance(message, Mutation):
        assert message.collection_id is not None
        documents[message.collection_id, message.key] = Document(message.seqno, message.cas, message.value)
    elif isinstance(message, Deletion | Expiration):
        assert message.collection_id is not None
        documents.pop((message.collection_id, message.key), None)
    elif isinstance(message, SystemEvent):
        event = decode_event(message)
        if isinstance(event, CollectionDropped):
            # Every vbucket tells it, and ids are given once: the first to tell may speak for all.
            for key in [key for key in documents if key[0] == event.collection_id]:
                del documents[key]
    elif not isinstance(message, SnapshotMarker | SeqnoAdvanced | StreamEnd | DcpNoop):
        assert getattr(message, "status", None) == Status.SUCCESS, message


def read_documents(
    bucket: ProxiedBucket, connection: KvConnection, keys: Iterable[Key]
) -> dict[Key, tuple[int, bytes]]:
    """CAS and value of the documents that are there, asked for one by one. One that has expired is removed by this."""
    found: dict[Key, tuple[int, bytes]] = {}
    for collection, key in keys:
        place = {"collection_id": CollectionId(collection), "key": key, "vbucket": bucket.vbucket_of(key)}
        try:
            answer = connection.request(Get(**place))
        except KeyNotFound:
            continue
        assert isinstance(answer, GetResponse)
        found[collection, key] = (answer.cas, answer.value)
    return found

"""A cluster to load into, in threads: it speaks enough of the key-value protocol, using the typed codec."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from headwater.client.cluster_map import vbucket_of
from headwater.errors import AuthenticationFailed
from headwater.protocol.features import NOTHING_NEGOTIATED, Feature, Negotiated, Opcode
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import Request, Response, decode_message, session
from headwater.protocol.messages.documents import Set, StoreResponse
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionIdResponse
from headwater.protocol.sasl import Mechanism, ScramServer, derive_credentials, encode_nonce
from headwater.protocol.status import Status
from support.fake_servers import ok, refused

USER, PASSWORD, BUCKET = "ann", "pencil", "travel"
VBUCKETS = 16
ITERATIONS = 4000
SERVED = frozenset({Feature.XERROR, Feature.SELECT_BUCKET, Feature.COLLECTIONS, Feature.JSON})


@dataclass
class LoadingCluster:
    """Nodes that store what they receive in one dictionary."""

    ports: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=lambda: [0] * VBUCKETS)
    """The node of every vbucket."""
    told_owners: list[int] | None = None
    """What the next config says about it, if that is something else."""
    collections: dict[str, int] = field(default_factory=lambda: {"_default._default": 0})
    served: frozenset[Feature] = SERVED
    judge: Callable[[Set], Status | None] = lambda _: None
    """May refuse a document."""
    tls: ssl.SSLContext | None = None
    documents: dict[tuple[int | None, bytes], Set] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)
    by_node: list[int] = field(default_factory=list)
    connections: int = 0
    configs_given: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def url(self, path: str = f"/{BUCKET}") -> str:
        scheme = "couchbases" if self.tls else "couchbase"
        return f"{scheme}://127.0.0.1:{self.ports[0]}{path}"

    def config(self) -> bytes:
        with self.lock:
            self.configs_given += 1
            told, self.told_owners = self.told_owners or self.owners, None
        service = "kvSSL" if self.tls else "kv"
        root = {
            "rev": self.configs_given,
            "name": BUCKET,
            "uuid": "1",
            "nodesExt": [{"services": {service: port}, "hostname": "$HOST"} for port in self.ports],
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": 0,
                "serverList": [f"$HOST:{port}" for port in self.ports],
                "vBucketMap": [[owner] for owner in told],
            },
        }
        return json.dumps(root).encode()

    def values(self, collection: int | None = 0) -> dict[str, Any]:
        """Return the parsed documents of a collection."""
        return {
            key.decode(): json.loads(message.value)
            for (where, key), message in self.documents.items()
            if where == collection
        }

    @contextmanager
    def running(self, nodes: int = 1) -> Iterator[LoadingCluster]:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(nodes)]
        self.ports = [listener.getsockname()[1] for listener in listeners]
        self.by_node = [0] * nodes
        threads = [
            threading.Thread(target=self._accept, args=(listener, node)) for node, listener in enumerate(listeners)
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for listener in listeners:
                listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()

    def _accept(self, listener: socket.socket, node: int) -> None:
        threads = []
        with listener:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    break
                with self.lock:
                    self.connections += 1
                threads.append(threading.Thread(target=self._serve, args=(sock, node)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, sock: socket.socket, node: int) -> None:
        with suppress(OSError), sock:
            if self.tls is not None:
                with self.tls.wrap_socket(sock, server_side=True) as wrapped:
                    _Session(self, node).run(wrapped)
            else:
                _Session(self, node).run(sock)


class _Session:
    def __init__(self, cluster: LoadingCluster, node: int) -> None:
        self.cluster = cluster
        self.node = node
        self.negotiated: Negotiated = NOTHING_NEGOTIATED
        self.scram: ScramServer | None = None
        self.user: str | None = None

    def run(self, sock: socket.socket) -> None:
        frames = FrameBuffer()
        while data := sock.recv(1 << 16):
            frames.receive_data(data)
            answers = b""
            for frame in frames.frames():
                request = decode_message(frame, self.negotiated)
                assert isinstance(request, Request)
                answers += self.answer(request).encode()
            sock.sendall(answers)

    def answer(self, request: Request) -> Response:
        if isinstance(request, session.Hello):
            agreed = tuple(feature for feature in request.features if feature in self.cluster.served)
            self.negotiated = Negotiated(frozenset(agreed))
            return session.HelloResponse(opaque=request.opaque, features=agreed)
        if isinstance(request, session.SaslListMechanisms):
            return ok(request, b"SCRAM-SHA1 PLAIN")
        if isinstance(request, session.SaslStep):
            return self.prove(request)
        if isinstance(request, session.SaslAuth):
            return self.challenge(request)
        if self.user is None:
            return refused(request, Status.EACCESS)
        return self.answer_user(request)

    def answer_user(self, request: Request) -> Response:
        if isinstance(request, session.SelectBucket):
            return ok(request) if request.key == BUCKET.encode() else refused(request, Status.KEY_ENOENT)
        if isinstance(request, session.GetClusterConfig):
            return ok(request, self.cluster.config())
        if isinstance(request, GetCollectionId):
            return self.find_collection(request)
        assert isinstance(request, Set)
        return self.store(request)

    def challenge(self, request: session.SaslAuth) -> Response:
        self.scram = ScramServer(
            Mechanism.decode(request.key),
            lambda mechanism, _: derive_credentials(mechanism, PASSWORD, salt=bytes(16), iterations=ITERATIONS),
            encode_nonce(b"n" * 18),
        )
        return ok(request, self.scram.start(request.value), status=Status.AUTH_CONTINUE)

    def prove(self, request: session.SaslStep) -> Response:
        assert self.scram is not None
        try:
            signature = self.scram.finish(request.value)
        except AuthenticationFailed:
            return refused(request, Status.AUTH_ERROR)
        self.user = self.scram.user
        return ok(request, signature)

    def find_collection(self, request: GetCollectionId) -> Response:
        scopes = {name.partition(".")[0] for name in self.cluster.collections}
        name = request.value.decode()
        if name.partition(".")[0] not in scopes:
            return refused(request, Status.UNKNOWN_SCOPE)
        if name not in self.cluster.collections:
            return refused(request, Status.UNKNOWN_COLLECTION)
        return GetCollectionIdResponse(
            opcode=Opcode.COLLECTIONS_GET_ID, opaque=request.opaque, manifest_uid=1, id=self.cluster.collections[name]
        )

    def store(self, request: Set) -> Response:
        cluster = self.cluster
        assert request.vbucket == vbucket_of(request.key, VBUCKETS)
        with cluster.lock:
            if cluster.owners[request.vbucket] != self.node:
                return refused(request, Status.NOT_MY_VBUCKET, b'{"rev": 0}')
            status = cluster.judge(request)
            if status is not None:
                return refused(request, status)
            cluster.documents[request.collection_id, request.key] = request
            cluster.order.append(request.key)
            cluster.by_node[self.node] += 1
        return StoreResponse(opcode=Opcode.SET, opaque=request.opaque, cas=1)

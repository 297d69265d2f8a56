"""A real node with small buckets, and what a test does to them. It can be killed, and started again where it was."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.handshake import Credentials
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import ClientSettings
from headwater.errors import KeyNotFound
from headwater.node.auth.user_file import store_users
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.messages.documents import Delete, Get, GetResponse, Set
from headwater.protocol.messages.subdocument import PathFlags, SubdocDictUpsert
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN
from support.fault_proxy import HOST, free_port
from support.node_process import PASSWORD, USER, NodeProcess

MANAGEMENT_S_MAX = 30.0
EXPIRED_S_MAX = 30.0
POLL_S = 0.05
DEFAULT = "_default._default"
"""The collection that is always there."""


def log_in_quickly(data: Path) -> None:
    """Let passwords be hashed as little as is allowed: every task of Spark logs in."""
    data.mkdir(parents=True, exist_ok=True)
    users = data / "users.json"
    if not users.exists():
        store_users(users, Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN))


class SparkNode:
    """Lives while the `with` block lasts. A node that has met an error of its own fails the test."""

    def __init__(self, data: Path, *options: str, vbuckets: int = 4, buckets: Sequence[str] = ("default",)) -> None:
        self.vbuckets = vbuckets
        self.port = free_port()
        self._http_port = free_port()
        named = [part for name in buckets for part in ("--bucket", name)]
        self.process = NodeProcess(
            data, "--port", str(self.port), "--http-port", str(self._http_port), "--vbuckets", str(vbuckets),
            # What is told to have expired must not change while it is compared.
            "--expiry-interval", "3600", *named, *options,
        )  # fmt: skip
        self.http = httpx.Client(
            base_url=f"http://{HOST}:{self._http_port}", auth=(USER, PASSWORD), timeout=MANAGEMENT_S_MAX
        )

    def __enter__(self) -> Self:
        log_in_quickly(self.process.data)
        self.process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()
        self.process.__exit__(kind, error, traceback)
        assert "Traceback" not in self.process.log(), self.process.log()

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.start()


class SourceBucket:
    """A bucket of such a node. Documents are named by their collection ("scope.collection") and key."""

    def __init__(self, node: SparkNode, name: str = "default") -> None:
        self.node = node
        self.name = name
        self.ids: dict[str, CollectionId] = {DEFAULT: DEFAULT_COLLECTION}
        """Of the collections that are there."""
        self._connection: KvConnection | None = None

    # --- how to get at it -----------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"couchbase://{HOST}:{self.node.port}/{self.name}"

    @property
    def options(self) -> dict[str, str]:
        """For `format("dcp")`."""
        return {"url": self.url, "user": USER, "password": PASSWORD}

    @property
    def settings(self) -> ClientSettings:
        return ClientSettings.make(self.url, user=USER, password=PASSWORD)

    @property
    def connection(self) -> KvConnection:
        if self._connection is None:
            login = Login(credentials=Credentials(USER, PASSWORD), bucket=self.name)
            self._connection = KvConnection.open(Address(HOST, self.node.port), login)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- documents ------------------------------------------------------------------------------------------------

    def request(self, message: Request) -> Response:
        return self.connection.request(message)

    def vbucket_of(self, key: bytes) -> VBucketId:
        return vbucket_of(key, self.node.vbuckets)

    def keys(self, prefix: str, count: int, *, vbucket: int) -> list[bytes]:
        """Keys of one vbucket."""
        keys = (b"%s-%d" % (prefix.encode(), number) for number in itertools.count())
        return list(itertools.islice((key for key in keys if self.vbucket_of(key) == vbucket), count))

    def put(self, keys: Iterable[bytes], value: bytes, *, into: str = DEFAULT, flags: int = 0, expiry: int = 0) -> None:
        for key in keys:
            self.request(Set(value=value, flags=flags, expiry=expiry, **self._place(key, into)))

    def put_each(self, documents: Mapping[bytes, bytes], *, into: str = DEFAULT) -> None:
        for key, value in documents.items():
            self.put([key], value, into=into)

    def delete(self, keys: Iterable[bytes], *, of: str = DEFAULT) -> None:
        for key in keys:
            self.request(Delete(**self._place(key, of)))

    def set_xattr(self, key: bytes, name: bytes, value: bytes) -> None:
        """An extended attribute of a document of the default collection."""
        place = self._place(key, DEFAULT)
        self.request(SubdocDictUpsert(path=name, new_value=value, flags=PathFlags.XATTR, **place))

    def get(self, key: bytes, *, of: str = DEFAULT) -> bytes | None:
        try:
            answer = self.request(Get(**self._place(key, of)))
        except KeyNotFound:
            return None
        assert isinstance(answer, GetResponse)
        return answer.value

    def expire(self, keys: Sequence[bytes], *, into: str = DEFAULT) -> None:
        """Write documents that live for a second, and wait until they are no more."""
        self.put(keys, b'{"lives":"shortly"}', into=into, expiry=1)
        give_up_s = time.monotonic() + EXPIRED_S_MAX
        while any(self.get(key, of=into) is not None for key in keys):
            assert time.monotonic() < give_up_s, "documents do not expire"
            time.sleep(POLL_S)

    def _place(self, key: bytes, collection: str) -> dict[str, Any]:
        return {"collection_id": self.ids[collection], "key": key, "vbucket": self.vbucket_of(key)}

    def high_seqnos(self) -> dict[int, int]:
        answer = self.connection.request(GetAllVbSeqnos())
        assert isinstance(answer, GetAllVbSeqnosResponse)
        return {int(entry.vbucket): int(entry.seqno) for entry in answer.seqnos}

    # --- management -----------------------------------------------------------------------------------------------

    def create_scope(self, name: str) -> None:
        self._ask("POST", self._scopes, data={"name": name})

    def drop_scope(self, name: str) -> None:
        self._ask("DELETE", f"{self._scopes}/{name}")
        self.ids = {path: id_ for path, id_ in self.ids.items() if not path.startswith(f"{name}.")}

    def create_collection(self, path: str) -> int:
        """Returns its id."""
        scope, _, name = path.partition(".")
        self._ask("POST", f"{self._scopes}/{scope}/collections", data={"name": name})
        for held in self._ask("GET", self._scopes).json()["scopes"]:
            for collection in held["collections"]:
                self.ids[f"{held['name']}.{collection['name']}"] = CollectionId(int(collection["uid"], 16))
        return self.ids[path]

    def drop_collection(self, path: str) -> None:
        scope, _, name = path.partition(".")
        del self.ids[path]
        self._ask("DELETE", f"{self._scopes}/{scope}/collections/{name}")

    def fail_over(self, vbucket: int, to_seqno: int) -> int:
        """A copy that has only reached this seqno becomes active. Returns the vbuuid of the new branch."""
        path = f"/headwater/buckets/{self.name}/vbuckets/{vbucket}/rollback"
        told = self._ask("POST", path, data={"to": str(to_seqno)}).json()
        assert told["rolled_back_to"] == to_seqno
        return int(told["vbuuid"])

    @property
    def _scopes(self) -> str:
        return f"/pools/default/buckets/{self.name}/scopes"

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self.node.http.request(method, path, **request).raise_for_status()

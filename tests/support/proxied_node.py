"""A real node behind a proxy: clients are told the proxy's address, and tests have a way past it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.handshake import Credentials
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import TlsSettings
from headwater.node.auth.user_file import store_users
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN
from support.fault_proxy import HOST, FaultProxy, free_port
from support.node_process import PASSWORD, USER, NodeProcess

MANAGEMENT_S_MAX = 30.0


def _log_in_quickly(data: Path) -> None:
    """Let passwords be hashed as little as is allowed: tests log in a thousand times."""
    data.mkdir(parents=True, exist_ok=True)
    users = data / "users.json"
    if not users.exists():
        store_users(users, Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN))


class ProxiedNode:
    """Lives while the `with` block lasts. The node may be killed and started again meanwhile, on the same ports."""

    def __init__(
        self,
        data: Path,
        *options: str,
        vbuckets: int = 8,
        buckets: Sequence[str] = ("default",),
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """With a certificate and its key, everything goes by TLS."""
        self.vbuckets = vbuckets
        self.tls: TlsSettings | None = None
        if certificate is not None:
            self.tls = TlsSettings(ca_file=certificate[0])
            options = (*options, "--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
        self._port = free_port()
        self._http_port = free_port()
        self.proxy = FaultProxy(self._port)
        named = [part for name in buckets for part in ("--bucket", name)]
        self.node = NodeProcess(
            data, "--port", str(self._port), "--http-port", str(self._http_port),
            "--advertise-port", str(self.proxy.port), "--vbuckets", str(vbuckets), *named, *options,
        )  # fmt: skip
        self._tls_context = None if self.tls is None else self.tls.context()
        self.http = httpx.Client(
            base_url=f"http{'s' if self.tls else ''}://{HOST}:{self._http_port}",
            auth=(USER, PASSWORD),
            timeout=MANAGEMENT_S_MAX,
            verify=self._tls_context or False,
        )

    def __enter__(self) -> Self:
        _log_in_quickly(self.node.data)
        self.proxy.__enter__()
        try:
            self.node.start()
        except BaseException:
            self.proxy.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()
        self.node.__exit__(kind, error, traceback)
        self.proxy.__exit__(kind, error, traceback)
        assert "Traceback" not in self.node.log(), self.node.log()

    def connect_directly(self, bucket: str) -> KvConnection:
        """A connection past the proxy."""
        login = Login(credentials=Credentials(USER, PASSWORD), bucket=bucket, tls=self._tls_context)
        return KvConnection.open(Address(HOST, self._port), login)


class ProxiedBucket:
    """A bucket of such a node, and what a test does to it past the proxy."""

    def __init__(self, node: ProxiedNode, name: str = "default") -> None:
        self.node = node
        self.name = name
        self.collections: dict[str, int] = {}
        """The id by the name, of those in the default scope that were made here and are there still."""

    @property
    def proxy(self) -> FaultProxy:
        return self.node.proxy

    @property
    def vbuckets(self) -> int:
        return self.node.vbuckets

    @property
    def url(self) -> str:
        """The connection string of a client that is to meet the faults."""
        return f"couchbase{'s' if self.node.tls else ''}://{HOST}:{self.proxy.port}/{self.name}"

    def connect_directly(self) -> KvConnection:
        return self.node.connect_directly(self.name)

    def vbucket_of(self, key: bytes) -> VBucketId:
        return vbucket_of(key, self.vbuckets)

    def high_seqnos(self, connection: KvConnection) -> dict[int, int]:
        answer = connection.request(GetAllVbSeqnos())
        assert isinstance(answer, GetAllVbSeqnosResponse)
        return {entry.vbucket: entry.seqno for entry in answer.seqnos}

    # --- management -----------------------------------------------------------------------------------------------

    def create_collection(self, name: str) -> int:
        """Returns its id."""
        scopes = f"/pools/default/buckets/{self.name}/scopes"
        self._ask("POST", f"{scopes}/_default/collections", data={"name": name})
        manifest = self._ask("GET", scopes).json()
        made = [
            collection for scope in manifest["scopes"] for collection in scope["collections"]
            if (scope["name"], collection["name"]) == ("_default", name)
        ]  # fmt: skip
        self.collections[name] = int(made[0]["uid"], 16)
        return self.collections[name]

    def drop_collection(self, name: str) -> None:
        del self.collections[name]
        self._ask("DELETE", f"/pools/default/buckets/{self.name}/scopes/_default/collections/{name}")

    def roll_back(self, vbucket: int, to_seqno: int) -> dict[str, int]:
        """A failover drill. Returns what the node says of it."""
        path = f"/headwater/buckets/{self.name}/vbuckets/{vbucket}/rollback"
        told: dict[str, int] = self._ask("POST", path, data={"to": str(to_seqno)}).json()
        return told

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self.node.http.request(method, path, **request).raise_for_status()

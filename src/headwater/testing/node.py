"""A node for one test: its process across restarts, its documents, and the faults it can suffer.

The plug-in's fixtures and Headwater's own tests make `HeadwaterNode`s. A node listens only on loopback, and ends with
the test.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

from headwater.cli.management import Management
from headwater.client import blocking_client
from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import ConnectKeywords
from headwater.errors import InvalidInput
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.messages.vbuckets import GetCollectionId
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.sasl import Credentials
from headwater.testing.nursery import READY_S_MAX, STOP_S_MAX, NodeFailed, Nursery

_LOOK_EVERY_S = 0.002


class ServingProcess:
    """`headwater serve` on one data folder. Data and ports survive restarts; the process is a new one each time."""

    def __init__(self, nursery: Nursery, folder: Path, options: list[str]) -> None:
        self._nursery = nursery
        self._folder = folder
        self._options = options
        self._process: int | None = None
        """A file descriptor of the process, because its id may belong to another process by now."""
        self._starts = 0
        self.ports = ("0", "0")
        """The key-value and HTTP ports; 0 until the first start has found free ones."""
        self.ready: dict[str, Any] = {}
        """The line that the node printed when it was ready."""
        self.ready_s = 0.0
        """How long the last start took."""

    def start(self) -> None:
        if self._process is not None:
            raise NodeFailed("the node is running: stop or kill it first")
        self._starts += 1
        said = self._folder / f"ready-{self._starts}"
        port, http_port = self.ports
        arguments = ["--data", str(self._folder / "data"), "--port", port, "--http-port", http_port, "--json"]
        began_s = time.monotonic()
        pid = self._nursery.start([*arguments, *self._options], stdout=said, stderr=self._log)
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise NodeFailed(f"the node has ended before it was ready; its log says:\n{self.log()}") from None
        self.ready = self._read_ready(said, began_s + READY_S_MAX)
        self.ready_s = time.monotonic() - began_s
        self.ports = (_port(self.ready["ready"]), _port(self.ready["http"]))

    def _read_ready(self, said: Path, deadline_s: float) -> dict[str, Any]:
        while time.monotonic() < deadline_s:
            text = said.read_text() if said.exists() else ""
            if text.endswith("\n"):
                ready: dict[str, Any] = json.loads(text)
                return ready
            if self.has_ended:
                self._forget()
                raise NodeFailed(f"the node has ended before it was ready; its log says:\n{self.log()}")
            time.sleep(_LOOK_EVERY_S)
        self.end(signal.SIGKILL)
        raise NodeFailed(f"the node was not ready in {READY_S_MAX:.0f} s; its log says:\n{self.log()}")

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self.has_ended

    @property
    def has_ended(self) -> bool:
        assert self._process is not None
        return bool(select.select([self._process], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        if self._process is None:
            raise NodeFailed("the node is not running")
        signal.pidfd_send_signal(self._process, number)

    def end(self, number: signal.Signals) -> None:
        """End the process with a signal. Does nothing if there is no process."""
        if self._process is None:
            return
        if not self.has_ended:
            self.send(number)
            # A paused process gets the signal when it resumes; a killed one may already be gone.
            with suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
            if not select.select([self._process], [], [], STOP_S_MAX)[0]:
                self.send(signal.SIGKILL)
                self._forget()
                raise NodeFailed(f"the node did not stop in {STOP_S_MAX:.0f} s; its log says:\n{self.log()}")
        self._forget()

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.close(process)

    @property
    def _log(self) -> Path:
        return self._folder / "node.log"

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def _port(url: str) -> str:
    return url.rpartition(":")[2]


USER = "tester"
PASSWORD = "a secret for tests"
VBUCKETS = 16
"""Few, so that a stream for each of them is opened quickly."""

Key = str | bytes
"""Use bytes for keys that are not UTF-8, or text with surrogates as clients return it (`Change.key`)."""

DEFAULT_COLLECTION = "_default._default"
_FLAGS = {True: 0x02000000, False: 0x03000000}
"""The flags by which Couchbase's SDKs recognize JSON (True), and bytes (False)."""


def check_sequences(**given: Sequence[str]) -> None:
    """Raise `InvalidInput` for a string, which would be taken as its letters, and for no buckets."""
    for name, values in given.items():
        if isinstance(values, str) or (not values and name == "buckets"):
            raise InvalidInput(
                f"{name} is {values!r}, which is no tuple of strings", hint=f'Write {name}=("{values or "default"}",)'
            )


class HeadwaterNode:
    """A node on free ports. Methods use its first bucket by default."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        vbuckets: int = VBUCKETS,
        buckets: Sequence[str] = ("default",),
        options: Sequence[str] = (),
    ) -> None:
        check_sequences(buckets=buckets, options=options)
        self.user = USER
        self.password = PASSWORD
        self.vbuckets = vbuckets
        self.bucket = buckets[0]
        named = [part for bucket in buckets for part in ("--bucket", bucket)]
        login = ["--user", USER, "--password", PASSWORD]
        self.process = ServingProcess(nursery, folder, [*named, "--vbuckets", str(vbuckets), *login, *options])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # --- where it is ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The connection string, with the bucket."""
        return self.url_of(self.bucket)

    def url_of(self, bucket: str) -> str:
        return f"couchbase://{self.address}/{bucket}"

    @property
    def http_url(self) -> str:
        """The URL of the management API and of the dashboard."""
        return f"http://127.0.0.1:{self.process.ports[1]}"

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", int(self.process.ports[0]))

    @property
    def log(self) -> str:
        """The node's log, across all starts."""
        return self.process.log()

    def connect(self, bucket: str | None = None, **settings: Unpack[ConnectKeywords]) -> blocking_client.Client:
        """Make a client of the bucket, for `with`. It logs in as the node's user by default."""
        settings.setdefault("user", self.user)
        settings.setdefault("password", self.password)
        return blocking_client.connect(self.url_of(bucket or self.bucket), **settings)

    # --- documents ------------------------------------------------------------------------------------------------

    def vbucket_of(self, key: Key) -> int:
        return int(vbucket_of(_key_bytes(key), self.vbuckets))

    def write(self, documents: Mapping[Any, Any], *, collection: str = DEFAULT_COLLECTION, expiry: int = 0) -> None:
        """Write documents by key, which is text or bytes. Bytes are stored as they are, everything else as JSON."""
        with closing(self._kv()) as connection:
            where = self._collection_id(connection, collection)
            for key, value in documents.items():
                is_json = not isinstance(value, bytes | bytearray | memoryview)
                connection.request(
                    Set(
                        vbucket=VBucketId(self.vbucket_of(key)),
                        collection_id=where,
                        key=_key_bytes(key),
                        value=json.dumps(value).encode() if is_json else bytes(value),
                        flags=_FLAGS[is_json],
                        expiry=expiry,
                    )
                )

    def remove(self, *keys: Key, collection: str = DEFAULT_COLLECTION) -> None:
        """Delete documents."""
        with closing(self._kv()) as connection:
            where = self._collection_id(connection, collection)
            for key in keys:
                vbucket = VBucketId(self.vbucket_of(key))
                connection.request(Delete(vbucket=vbucket, collection_id=where, key=_key_bytes(key)))

    def high_seqnos(self) -> dict[int, int]:
        """Return the newest seqno of every vbucket."""
        with self.connect() as client:
            reading = client.batches(end="now", no_value=True)
            for _ in reading:
                pass
            seqnos = {int(vbucket): int(offset.seqno) for vbucket, offset in reading.offsets.offsets.items()}
        return {vbucket: seqnos.get(vbucket, 0) for vbucket in range(self.vbuckets)}

    # --- collections ----------------------------------------------------------------------------------------------

    def create_collection(self, name: str, *, maxTTL: int | None = None, history: bool | None = None) -> None:  # noqa: N803
        """Create `scope.collection`, and the scope if it is missing. The settings have Couchbase's names."""
        scope, _, collection = name.partition(".")
        scopes = self._manage("GET", "scopes")["scopes"]
        if scope not in [known["name"] for known in scopes]:
            self._manage("POST", "scopes", form={"name": scope})
        if collection:
            settings = {"maxTTL": maxTTL, "history": history}
            given = {setting: json.dumps(value) for setting, value in settings.items() if value is not None}
            form = {"name": collection, **given}
            self._manage("POST", "scopes", scope, "collections", form=form)

    def drop_collection(self, name: str) -> None:
        """Drop `scope.collection`, or a scope."""
        scope, _, collection = name.partition(".")
        self._manage("DELETE", "scopes", scope, *(("collections", collection) if collection else ()))

    # --- faults ---------------------------------------------------------------------------------------------------

    def rollback(self, vbucket: int, seqno: int) -> int:
        """Undo all changes of a vbucket above a seqno, as a failover to a copy that lags behind does.

        Returns the seqno that was reached: 0 if the requested one is before the history window.
        """
        done = self._drill("vbuckets", str(vbucket), "rollback", form={"to": str(seqno)})
        return int(done["rolled_back_to"])

    def hold_replicas(self) -> None:
        """Stop replication to this node until `release_replicas`, so that its replicas fall behind."""
        self._drill("replicas", "hold")

    def release_replicas(self) -> None:
        self._drill("replicas", "release")

    def cut_connections(self) -> int:
        """Break all connections to the node, as a network failure does. Returns how many there were."""
        return int(self._drill("connections", "cut")["connections"])

    def pause(self) -> None:
        """Pause the process: connections stay open, but it answers nothing."""
        self.process.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process (kill -9). Does nothing if it has ended."""
        self.process.end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the node cleanly."""
        self.process.end(signal.SIGTERM)

    def start(self) -> None:
        """Start the node again, with the same data and ports, after `stop` or `kill`."""
        self.process.start()

    def restart(self) -> None:
        self.stop()
        self.start()

    # --- connections to the node ----------------------------------------------------------------------------------

    def _kv(self) -> KvConnection:
        credentials = Credentials(self.user, self.password)
        return KvConnection.open(self.address, Login(credentials=credentials, bucket=self.bucket))

    @staticmethod
    def _collection_id(connection: KvConnection, name: str) -> CollectionId:
        if name == DEFAULT_COLLECTION:
            return CollectionId(0)
        answer: Any = connection.request(GetCollectionId(value=name.encode()))
        return CollectionId(answer.id)

    @cached_property
    def _management(self) -> Management:
        address = Address("127.0.0.1", int(self.process.ports[1]))
        return Management(address=address, credentials=Credentials(self.user, self.password))

    def _drill(self, *path: str, form: dict[str, str] | None = None) -> Any:
        return self._management.ask("POST", "headwater", "buckets", self.bucket, *path, form=form).accepted()

    def _manage(self, method: str, *path: str, form: dict[str, str] | None = None) -> Any:
        return self._management.ask(method, "pools", "default", "buckets", self.bucket, *path, form=form).accepted()


def _key_bytes(key: Key) -> bytes:
    return bytes(key) if isinstance(key, bytes | bytearray) else key.encode(errors="surrogateescape")

"""A real node with small buckets, and operations on them. It can be killed, and restarted at the same address."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import ClientSettings
from headwater.errors import KeyNotFound
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.location import Location
from headwater.lake.verify import Verification, compare
from headwater.landing.loop import LandedBatch
from headwater.landing.planning import Freshness
from headwater.landing.query import Landing, LandingQuery
from headwater.node.auth.accounts import store_users
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.messages.documents import Delete, Get, GetResponse, Set
from headwater.protocol.messages.subdocument import PathFlags, SubdocDictUpsert
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN, Credentials
from headwater.spark.executors import SparkRunner
from support.fault_proxy import HOST, free_port
from support.lake_model import check_no_duplicates, read_rows, table_rows
from support.node_process import PASSWORD, USER, NodeProcess

MANAGEMENT_S_MAX = 30.0
EXPIRED_S_MAX = 30.0
POLL_S = 0.05
DEFAULT = "_default._default"
"""The collection that always exists."""


WAIT_S_MAX = 60.0
COMMAND_S_MAX = 120.0
LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}


def wait_until(is_so: Callable[[], bool], query: LandingQuery | None = None) -> None:
    """Wait for a condition, and check that the given landing continues."""
    give_up_s = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert query is None or not query.awaitTermination(0), "the landing has ended"
        assert time.monotonic() < give_up_s, "it does not happen"
        time.sleep(POLL_S)


def run_headwater(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "headwater", *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
        env={**os.environ, **LOGIN, **environment},
    )


def log_in_quickly(data: Path) -> None:
    """Use the cheapest allowed password hashing: every Spark task logs in."""
    data.mkdir(parents=True, exist_ok=True)
    users = data / "users.json"
    if not users.exists():
        store_users(users, Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN))


class SparkNode:
    """Runs until the `with` block ends. A node that has met an internal error fails the test."""

    def __init__(self, data: Path, *options: str, vbuckets: int = 4, buckets: Sequence[str] = ("default",)) -> None:
        self.vbuckets = vbuckets
        self.port = free_port()
        self._http_port = free_port()
        named = [part for name in buckets for part in ("--bucket", name)]
        self.process = NodeProcess(
            data, "--port", str(self.port), "--http-port", str(self._http_port), "--vbuckets", str(vbuckets),
            # What counts as expired must not change during a comparison.
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
        """The ids of the existing collections."""
        self._connection: KvConnection | None = None

    # --- connections and settings ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"couchbase://{HOST}:{self.node.port}/{self.name}"

    @property
    def options(self) -> dict[str, str]:
        """Return the options for `format("dcp")`."""
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
        """Return keys of one vbucket."""
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
        """Set an extended attribute of a document of the default collection."""
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
        """Write documents that live for a second, and wait until they have expired."""
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
        """Create a collection. Returns its id."""
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
        """Make a copy active that has only reached this seqno. Returns the vbuuid of the new branch."""
        path = f"/headwater/buckets/{self.name}/vbuckets/{vbucket}/rollback"
        told = self._ask("POST", path, data={"to": str(to_seqno)}).json()
        assert told["rolled_back_to"] == to_seqno
        return int(told["vbuuid"])

    @property
    def _scopes(self) -> str:
        return f"/pools/default/buckets/{self.name}/scopes"

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self.node.http.request(method, path, **request).raise_for_status()


# A bucket with the tables that it is landed in, and the rules for both.


GROUPS = 2
"""Fewer Spark tasks than by default: here they hold a few rows each."""
ALWAYS_FRESH = Freshness(merge_share=1, write_ratio=1e9)
NEVER_FRESH = Freshness(merge_share=0, wait_s_max=1e9)
"""Merges happen only at the end of a landing, or when they are urgent."""

Document = tuple[bytes, bytes]
"""Key and value."""


@dataclass
class LandedBucket:
    """Lands with Spark, and reads the tables without it."""

    bucket: SourceBucket
    spark: SparkSession
    folder: Path
    rules: MergeRules = field(default_factory=MergeRules)
    fresh: Freshness = ALWAYS_FRESH
    options: dict[str, str] = field(default_factory=dict)
    consistent: bool = False
    batches: list[LandedBatch] = field(default_factory=list)
    """The batches of the last landing."""

    @property
    def landing(self) -> Landing:
        return Landing(
            source={**self.bucket.options, "minPartitions": "2", **self.options},
            into=str(self.folder),
            lake=LakeSettings(merging=self.rules),
            fresh=self.fresh,
            consistent=self.consistent,
            groups=GROUPS,
        )

    def land(self) -> None:
        """Land everything in the bucket."""
        self.batches.clear()
        self.landing.start(SparkRunner(self.spark), on_batch=self.batches.append).awaitTermination()

    @property
    def rolled_back(self) -> dict[int, int]:
        """The seqnos kept by the rollbacks of the last landing, by vbucket."""
        return {vbucket: kept for batch in self.batches for vbucket, kept in batch.rollbacks.items()}

    # --- the tables -----------------------------------------------------------------------------------------------

    def compare(self) -> Verification:
        return compare(self.bucket.settings, str(self.folder))

    def rows(self, kind: str, collection: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of a table as any reader gets them."""
        return table_rows(self.folder / kind if collection is None else self.folder / kind / collection)

    def documents(self, collection: str) -> dict[bytes, bytes]:
        found = [(key_of(row), value_of(row)) for row in self.rows("documents", collection)]
        assert len(dict(found)) == len(found), "a document is there twice"
        return dict(found)

    @property
    def tables(self) -> set[str]:
        return {path.name for path in (self.folder / "documents").iterdir()}

    def version(self) -> int:
        version = DeltaTable(self.folder / "changes").version()
        assert version is not None
        return version

    # --- the rules ------------------------------------------------------------------------------------------------

    def check_equal(self) -> None:
        check_tables(self.bucket, self.folder)


def key_of(row: dict[str, Any]) -> bytes:
    key: bytes = row["key"].encode() if row["key_bytes"] is None else row["key_bytes"]
    return key


def value_of(row: dict[str, Any]) -> bytes:
    value: bytes = row["content"] if row["document"] is None else row["document"].encode()
    return value


def check_tables(bucket: SourceBucket, lake: Path | Location) -> list[dict[str, Any]]:
    """Check that the tables equal the bucket, by the digests and by `changes`. Returns the rows of `changes`."""
    location = lake if isinstance(lake, Location) else Location.of(str(lake))
    found = compare(bucket.settings, location)
    assert found.is_equal, [one.sentence for one in found.findings]
    assert found.pending == 0
    changes = read_rows(DeltaTable(f"{location.uri}/changes", storage_options=location.delta_options))
    check_no_duplicates(changes)
    check_delivery(changes)
    return changes


def check_delivery(changes: list[dict[str, Any]]) -> None:
    """Check, also for void rows, that no change was landed twice in one batch, or is live after it was taken back."""
    counts = Counter((row["batch"], row["vbucket"], row["seqno"]) for row in changes if row["op"] != "rollback")
    assert [place for place, count in counts.items() if count > 1] == []
    for rollback in (row for row in changes if row["op"] == "rollback"):
        taken_back = [
            row
            for row in changes
            if row["vbucket"] == rollback["vbucket"]
            and row["batch"] < rollback["batch"]
            and row["seqno"] > rollback["seqno"]
            and row["op"] != "rollback"
        ]
        assert all(row["void"] for row in taken_back)


# `headwater land` in separate processes, to be killed: the driver with its Java machine, or its executors.


BATCH_S_MAX = 300.0
"""Far longer than a start of Spark and its first batch take, even if others use the machine."""
LAND_POLL_S = 0.1


class LandProcess:
    """Runs until the `with` block ends, with everything that it has started."""

    def __init__(self, bucket: SourceBucket, folder: Path, master: str, *options: str, every: str = "100ms") -> None:
        self.bucket = bucket
        self._options = options
        self.folder = folder
        self.batches: list[dict[str, Any]] = []
        """What it has printed for each batch since its start."""
        self._log_path = folder.with_name(f"{folder.name}.log")
        self._master = master
        self._every = every
        self._process: subprocess.Popen[str] | None = None
        self._reading: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def start(self, master: str | None = None) -> Self:
        assert self._process is None, "it is running"
        self._master = master or self._master
        self.batches = []
        command = [sys.executable, "-m", "headwater", "land", self.bucket.url, "--into", str(self.folder)]
        options = ["--every", self._every, "--master", self._master, "--memory", "1g", "--min-partitions", "2"]
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *options, "--json", *self._options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **LOGIN},
                # Its own process group, which can be killed as a whole.
                start_new_session=True,
            )
        self._reading = threading.Thread(target=self._read, args=(self._process, self.batches), daemon=True)
        self._reading.start()
        return self

    @staticmethod
    def _read(process: subprocess.Popen[str], batches: list[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            batches.append(json.loads(line))

    # --- looking at it --------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self._log_path.read_text()

    def wait_for_batches(self, count: int) -> None:
        """Wait until it has landed this many batches since its start."""
        self.wait_for(lambda: len(self.batches) >= count)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + BATCH_S_MAX
        while not condition():
            assert self.is_running, f"it has ended by itself; its log:\n{self.log()}"
            assert time.monotonic() < give_up_s, f"it does not get there; its log:\n{self.log()}"
            time.sleep(LAND_POLL_S)

    # --- its end --------------------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        """kill -9 of driver, Java machine and executors. Does nothing if they are not running."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._ended()

    def kill_python(self) -> None:
        """kill -9 of the driver's Python only. Its Java machine notices, and ends a little later."""
        self._process.kill()
        self._ended()

    def kill_java(self) -> None:
        """kill -9 of the driver's Java machine only. The command can't continue without it."""
        (java,) = _children(self._process.pid, "java")
        os.kill(java, signal.SIGKILL)
        code = self._process.wait(BATCH_S_MAX)
        assert code != 0
        self.kill_all()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def kill_worker(self) -> None:
        """kill -9 of a Python process that runs tasks. Its tasks fail, and so does the batch if Spark is local."""
        self.wait_for(lambda: bool(self._workers()))
        os.kill(self._workers()[-1], signal.SIGKILL)

    def _workers(self) -> list[int]:
        """Return the children of the daemons that Java has forked workers from."""
        javas = _children(self._process.pid, "java")
        daemons = [daemon for java in javas for daemon in _children(java, "pyspark")]
        return [worker for daemon in daemons for worker in _children(daemon, "pyspark")]

    def kill_executor(self, number: int) -> None:
        """kill -9 of an executor of a `local-cluster`. Spark starts another one."""
        (java,) = _children(self._process.pid, "java")
        # One that was just killed may not have been replaced yet.
        self.wait_for(lambda: bool(_children(java, "CoarseGrainedExecutorBackend")))
        executors = _children(java, "CoarseGrainedExecutorBackend")
        os.kill(executors[number % len(executors)], signal.SIGKILL)

    def _ended(self) -> None:
        self._process.wait()
        self._reading.join()
        self._process.stdout.close()
        self._process = None


def _children(parent: int, named: str) -> list[int]:
    """Return the children of a process whose command line contains a text."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                status = (path / "stat").read_text().rpartition(")")[2].split()
                command = (path / "cmdline").read_text()
            except OSError:
                continue
            if int(status[1]) == parent and named in command and status[0] != "Z":
                found.append(int(path.name))
    return sorted(found)

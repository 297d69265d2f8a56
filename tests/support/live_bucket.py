"""A bucket that is written to without a pause, and a checker that reads its tables in the meantime.

The writer keeps a diary: when every document had which version. Before a failover it forgets what it knows of that
vbucket, and reads it again afterwards. The checker reads the tables with deltalake and none of our code. A commit
says as of which time its table is. The diary knows which version every document had by then: the table must have
that one or a newer one, and exactly that one if the document has not been touched since.

A second collection is dropped and created again. The diary does not know to which of its generations a document
belongs: it is compared when the writer has stopped.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from obstore.store import from_url

from headwater.errors import ConnectionFailed, HeadwaterError, KeyNotFound
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.status import Status
from support.lake_model import read_rows
from support.landings import DEFAULT, SourceBucket
from support.node_process import exchange

AWAY_S = 0.1
CHAOS = "chaos.docs"
"""The collection that is dropped and created again."""
ENTRIES_MAX = 500
"""The limit for each document: enough for several minutes of a hot one."""


class Diary:
    """The acknowledged contents of the default collection. None stands for no document."""

    def __init__(self) -> None:
        self._entries: dict[bytes, list[tuple[float, int | None]]] = {}
        self._being_written: set[bytes] = set()
        self._lock = threading.Lock()

    def begin(self, key: bytes) -> None:
        with self._lock:
            self._being_written.add(key)

    def note(self, key: bytes, version: int | None) -> None:
        with self._lock:
            entries = self._entries.setdefault(key, [])
            entries.append((time.time(), version))
            del entries[:-ENTRIES_MAX]
            self._being_written.discard(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def expected(self, as_of_s: float) -> list[tuple[bytes, int | None, bool]]:
        """Return the version that every document had at a time, and whether it has not been touched since."""
        found = []
        with self._lock:
            for key, entries in self._entries.items():
                before = [version for at_s, version in entries if at_s <= as_of_s]
                if before:
                    is_untouched = len(before) == len(entries) and key not in self._being_written
                    found.append((key, before[-1], is_untouched))
        return found


class Working(threading.Thread):
    """Works until the `with` block ends, and then raises any error."""

    def __init__(self, name: str, bucket: SourceBucket, own: SourceBucket | None = None) -> None:
        """`own` is the same bucket with a separate connection."""
        super().__init__(name=name)
        self._bucket = own or SourceBucket(bucket.node, bucket.name)
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()
        self._bucket.close()
        if self._error is not None:
            raise AssertionError(f"the {self.name} has failed") from self._error

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def _work(self) -> None:
        raise AssertionError("each has work of its own")


class LiveWriter(Working):
    """Writes until the `with` block ends: hot documents over and over, others now and then, and deletes. With the
    chance `disaster`, a vbucket fails over, or a collection is dropped and created again. A killed node does not
    stop the writer. Any error is raised at the end."""

    def __init__(
        self,
        bucket: SourceBucket,
        seed: int = 0,
        *,
        hot: int = 20,
        cold: int = 200,
        disaster: float = 0,
        own: SourceBucket | None = None,
    ) -> None:
        super().__init__("live writer", bucket, own)
        self.diary = Diary()
        self.written = 0
        self.failovers = 0
        self.drops = 0
        self.hot = [b"hot-%d" % number for number in range(hot)]
        self.cold = [b"cold-%d" % number for number in range(cold)]
        self._dice = random.Random(seed)
        self._disaster = disaster
        if disaster:
            self._bucket.create_scope("chaos")
            self._bucket.create_collection(CHAOS)
        for key in [*self.hot, *self.cold]:
            self._put(key)

    @property
    def collections(self) -> dict[str, Any]:
        """The existing collections, with their ids."""
        return self._bucket.ids

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                self._write()
            except (ConnectionFailed, httpx.HTTPError):
                # The node is away, or was a moment ago: the outcome of the last write is unknown.
                self._bucket.close()
                time.sleep(AWAY_S)
                with contextlib.suppress(ConnectionFailed):
                    self._look_up([*self.hot, *self.cold])

    def _write(self) -> None:
        chance = self._dice.random()
        if chance < self._disaster:
            self._fail_over() if self._dice.random() < 0.7 else self._drop()
        elif chance < 0.1 and self.cold:
            self._remove(self._dice.choice(self.cold))
        elif chance < 0.25 and self.cold:
            self._put(self._dice.choice(self.cold))
        elif self._disaster and chance < 0.35:
            self._bucket.put([self._dice.choice(self.cold)], b'{"n":%d}' % self.written, into=CHAOS)
        else:
            self._put(self.hot[self.written % len(self.hot)])

    def _put(self, key: bytes) -> None:
        self.written += 1
        self.diary.begin(key)
        value = self.document(self.written)
        self._bucket.put([key], value)
        self.diary.note(key, self.version(value))

    def document(self, number: int) -> bytes:
        return b'{"n":%d}' % number

    def version(self, value: bytes | None) -> int | None:
        """Return the version of a document that has to be in the tables, or None."""
        return None if value is None else json.loads(value)["n"]

    def _remove(self, key: bytes) -> None:
        self.diary.begin(key)
        with contextlib.suppress(KeyNotFound):
            self._bucket.delete([key])
        self.diary.note(key, None)

    def _fail_over(self) -> None:
        high_seqnos = self._bucket.high_seqnos()
        vbucket = self._dice.randrange(len(high_seqnos))
        keys = [key for key in [*self.hot, *self.cold] if self._bucket.vbucket_of(key) == vbucket]
        self.diary.forget(keys)
        with contextlib.suppress(HeadwaterError):
            self._bucket.fail_over(vbucket, max(0, high_seqnos[vbucket] - self._dice.randrange(60)))
            self.failovers += 1
        self._look_up(keys)

    def _drop(self) -> None:
        self._bucket.drop_collection(CHAOS)
        self._bucket.create_collection(CHAOS)
        self.drops += 1

    def _look_up(self, keys: list[bytes]) -> None:
        self.diary.forget(keys)
        for key in keys:
            self.diary.note(key, self.version(self._bucket.get(key)))


class TurningWriter(LiveWriter):
    """Writes documents that a landing wants and documents that it does not want, at random."""

    WHERE = "kind.name = 'order' AND n > 100"

    def __init__(self, bucket: SourceBucket, seed: int = 0, *, failovers: float) -> None:
        self._chance = failovers
        super().__init__(bucket, seed, hot=0, cold=60)

    def _write(self) -> None:
        chance = self._dice.random()
        if chance < self._chance:
            self._fail_over()
        elif chance < 0.1:
            self._remove(self._dice.choice(self.cold))
        else:
            self._put(self._dice.choice(self.cold))

    def document(self, number: int) -> bytes:
        return json.dumps({"kind": {"name": self._dice.choice(["order", "user", None])}, "n": number}).encode()

    def version(self, value: bytes | None) -> int | None:
        found = {} if value is None else json.loads(value)
        return found["n"] if found and found["kind"]["name"] == "order" and found["n"] > 100 else None


@dataclass
class LiveChecker:
    """Checks the tables of a bucket, during writes and at the end. Every fault is raised immediately."""

    folder: Path | str
    """Or the URI of the lake in an object store."""
    writer: LiveWriter | HotLoad
    storage_options: dict[str, str] | None = None
    wants: Callable[[bytes, int], bool] = lambda key, version: True
    """Returns whether the tables have this version of this document."""
    looks: int = 0
    compared: int = 0
    """The number of documents compared."""
    ages_s: list[float] = field(default_factory=list)
    """The age of `documents` at each check."""

    behind_batches: int = 0
    """By how many batches `documents` was behind `changes` at the last check."""

    def look(self, *, changes: bool = True) -> None:
        """Check the tables during writes; without `changes`, only `documents`."""
        self.looks += 1
        newest, documents = self._open("changes"), self._open(f"documents/{DEFAULT}")
        if documents is not None and newest is not None:
            held = documents.transaction_version("headwater.merged.0")
            self.behind_batches = (newest.transaction_version("headwater.batch") or 0) - (held or 0)
        if documents is not None and (as_of_s := self._as_of_s(documents)) is not None:
            self.ages_s.append(time.time() - as_of_s)
            self._check("documents", as_of_s, _documents(documents))
        if changes and newest is not None and (as_of_s := self._as_of_s(newest)) is not None:
            self._check("changes", as_of_s, _folded(newest)[DEFAULT])

    def _check(self, table: str, as_of_s: float, found: dict[bytes, int]) -> None:
        wrong = []
        for key, written, is_untouched in self.writer.diary.expected(as_of_s):
            version = written if written is not None and self.wants(key, written) else None
            held = found.get(key)
            self.compared += 1
            is_too_old = version is not None and held is not None and held < version
            # A cold document may have been deleted since.
            is_missing = version is not None and held is None and key in self.writer.hot
            if is_too_old or is_missing or (is_untouched and held != version):
                wrong.append((key, held, version))
        assert not wrong, f"{table} as of {as_of_s}: {len(wrong)} wrong (key, held, expected), such as {wrong[:5]}"

    def check_end(self, bucket: SourceBucket) -> None:
        """Check the tables when the writer has stopped and everything is landed."""
        folded = _folded(self._table("changes"))
        for collection, keys in ((DEFAULT, [*self.writer.hot, *self.writer.cold]), (CHAOS, self.writer.cold)):
            if collection in bucket.ids:
                versions = {key: self.writer.version(bucket.get(key, of=collection)) for key in keys}
                expected = {
                    key: version
                    for key, version in versions.items()
                    if version is not None and self.wants(key, version)
                }
                assert _documents(self._table(f"documents/{collection}")) == expected
                assert folded[collection] == expected

    def _table(self, name: str) -> DeltaTable:
        return DeltaTable(f"{self.folder}/{name}", storage_options=self.storage_options)

    def _open(self, name: str) -> DeltaTable | None:
        try:
            return self._table(name)
        except TableNotFoundError:
            return None

    def _as_of_s(self, table: DeltaTable) -> float | None:
        """Return the time in our newest commit. (delta-rs' history begins with the newest commit of any writer.)"""
        options = dict(self.storage_options or {})
        allow_http = options.pop("aws_allow_http", None)
        log = from_url(table.table_uri, config=options, client_options={"allow_http": True} if allow_http else None)
        for version in range(table.version() or 0, -1, -1):
            entry = bytes(log.get(f"_delta_log/{version:020}.json").bytes()).decode()
            for line in entry.splitlines():
                if text := json.loads(line).get("commitInfo", {}).get("headwater.as_of"):
                    return datetime.fromisoformat(text).timestamp()
        return None


def _documents(table: DeltaTable) -> dict[bytes, int]:
    """Return versions by key. If documents are variants, the version is in the column `n`."""
    is_text = pa.types.is_string(pa.schema(table.schema().to_arrow()).field("document").type)
    rows = read_rows(table, ["key", "document" if is_text else "n"])
    assert len({row["key"] for row in rows}) == len(rows), "a document is there twice"
    return {row["key"].encode(): json.loads(row["document"])["n"] if is_text else row["n"] for row in rows}


def _folded(table: DeltaTable) -> dict[str, dict[bytes, int]]:
    """Return the documents that result from `changes`, by collection. No change may be live twice."""
    columns = ["vbucket", "seqno", "op", "scope", "collection", "collection_id", "key", "value", "void"]
    rows = [row for row in table.to_pyarrow_table(columns=columns).to_pylist() if not row["void"]]
    counts = Counter((row["vbucket"], row["seqno"]) for row in rows if row["op"] != "rollback")
    assert [place for place, count in counts.items() if count > 1] == []
    live: dict[tuple[int, int], dict[bytes, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["seqno"]):
        held = live.setdefault((row["vbucket"], row["collection_id"]), {})
        if row["op"] in ("collection_dropped", "collection_created"):
            held.clear()
        elif row["op"] == "mutation":
            held[row["key"].encode()] = row
        elif row["op"] in ("deletion", "expiration", "unmatched"):
            held.pop(row["key"].encode(), None)
    found: dict[str, dict[bytes, int]] = {DEFAULT: {}, CHAOS: {}}
    for held in live.values():
        for key, row in held.items():
            found[f"{row['scope']}.{row['collection']}"][key] = json.loads(row["value"])["n"]
    return found


class HotLoad(Working):
    """Rewrites some of many documents at a steady rate, with pipelined requests, until the `with` block ends."""

    TURN_S = 0.05

    def __init__(self, bucket: SourceBucket, *, documents: int, hot: int, per_s: int) -> None:
        super().__init__("hot load", bucket)
        self.diary = Diary()
        self.written = 0
        self.cold = [b"doc-%d" % number for number in range(hot, documents)]
        self.hot = [b"doc-%d" % number for number in range(hot)]
        self._per_turn = int(per_s * self.TURN_S)
        for start in range(0, documents, 5000):
            self._put([*self.hot, *self.cold][start : start + 5000])

    def _put(self, keys: list[bytes]) -> None:
        requests = []
        for key in keys:
            self.written += 1
            self.diary.begin(key)
            place = {"vbucket": self._bucket.vbucket_of(key), "key": key, "collection_id": DEFAULT_COLLECTION}
            requests.append(Set(value=b'{"n":%d}' % self.written, **place).encode())
        answers = exchange(self._bucket.connection, b"".join(requests), answers=len(keys))
        assert all(answer.specific == Status.SUCCESS for answer in answers)
        for key, version in zip(keys, range(self.written - len(keys) + 1, self.written + 1), strict=True):
            self.diary.note(key, version)

    def _work(self) -> None:
        at, due_s = 0, time.monotonic()
        while not self._is_over.wait(max(0.0, due_s - time.monotonic())):
            due_s += self.TURN_S
            self._put([self.hot[(at + number) % len(self.hot)] for number in range(self._per_turn)])
            at += self._per_turn

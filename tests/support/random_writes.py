"""A writer that does everything possible to a bucket, as a seed decides, bypassing the proxy.

It sets, deletes and expires documents, creates and drops collections, and sometimes fails a vbucket over to a copy
that is behind. At the end it writes a fence into every vbucket: a consumer with all fences has everything else.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from dataclasses import dataclass

from headwater.client.kv_connection import KvConnection
from headwater.errors import KeyNotFound, UnknownCollection
from headwater.protocol.messages.documents import Delete, Get, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from support.fault_proxy import ProxiedBucket
from support.oracle import ConsumerState, Key, read_documents

KEYS = 30
"""The number of keys in every collection."""
COLLECTIONS_MAX = 3
VALUE_BYTES_MAX = 500
PAUSE_S_MAX = 0.012
LONG_AGO_S = 3_000_000
"""An expiry of more than 30 days is a date, and this one has passed. Reading such a document removes it."""
ROLLED_BACK_MAX = 40
"""The maximum number of changes that a failover takes back."""

_WEIGHTS = {"set": 60, "delete": 15, "expire": 8, "create": 1, "drop": 1, "roll back": 4}


def written_keys(bucket: ProxiedBucket) -> list[Key]:
    """Return all keys that may exist, except the fences."""
    ids = [int(DEFAULT_COLLECTION), *bucket.collections.values()]
    return [(collection, b"key-%d" % number) for collection in ids for number in range(KEYS)]


def keys_in_every_vbucket(bucket: ProxiedBucket, prefix: bytes) -> tuple[bytes, ...]:
    """Return one key of every vbucket."""
    found: dict[int, bytes] = {}
    for number in itertools.count():
        key = b"%s-%d" % (prefix, number)
        found.setdefault(bucket.vbucket_of(key), key)
        if len(found) == bucket.vbuckets:
            break
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Fences:
    """The documents that mark the end of a writer's writes."""

    keys: tuple[bytes, ...]
    value: bytes

    def write(self, bucket: ProxiedBucket, connection: KvConnection) -> None:
        for key in self.keys:
            place = {"collection_id": DEFAULT_COLLECTION, "key": key, "vbucket": bucket.vbucket_of(key)}
            connection.request(Set(value=self.value, **place))

    def are_in(self, state: ConsumerState) -> bool:
        documents = state.documents()
        found = (documents.get((int(DEFAULT_COLLECTION), key)) for key in self.keys)
        return all(document is not None and document.value == self.value for document in found)


def write_fences(bucket: ProxiedBucket, value: bytes) -> Fences:
    """Write one document to every vbucket."""
    fences = Fences(keys_in_every_vbucket(bucket, b"fence"), value)
    with bucket.connect_directly() as connection:
        fences.write(bucket, connection)
    return fences


class RandomWrites(threading.Thread):
    """Writes during the `with` block, whose end waits until everything is written and raises any error."""

    def __init__(self, bucket: ProxiedBucket, seed: int, *, operations: int, with_rollbacks: bool = True) -> None:
        super().__init__(name=f"writer-{seed}")
        self.fences = Fences(keys_in_every_vbucket(bucket, b"fence"), b'{"fence":"%d/%d"}' % (seed, time.time_ns()))
        self.left: dict[Key, tuple[int, bytes]] = {}
        """CAS and value of everything that exists at the end, except the fences."""
        self._bucket = bucket
        self._dice = random.Random(seed)
        self._operations = operations
        self._with_rollbacks = with_rollbacks
        self._expired: list[Get] = []
        """Reads of expired documents, which remove them."""
        self._error: BaseException | None = None

    def __enter__(self) -> RandomWrites:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait until everything is written."""
        self.join()
        if self._error is not None:
            raise AssertionError("the writer has failed") from self._error

    def run(self) -> None:
        try:
            with self._bucket.connect_directly() as connection:
                for number in range(self._operations):
                    # Only after a consumer had the time to see what a failover takes back.
                    may_roll_back = self._with_rollbacks and number > self._operations // 2
                    weights = {**_WEIGHTS, "roll back": _WEIGHTS["roll back"] if may_roll_back else 0}
                    self._do(connection, self._dice.choices(list(weights), list(weights.values()))[0])
                    time.sleep(self._dice.choice([0, 0, self._dice.uniform(0, PAUSE_S_MAX)]))
                # A rollback may have restored expired documents: reading removes them.
                self.left = read_documents(self._bucket, connection, written_keys(self._bucket))
                self.fences.write(self._bucket, connection)
        except BaseException as error:
            self._error = error

    def _do(self, connection: KvConnection, what: str) -> None:
        if what == "create":
            if len(self._bucket.collections) < COLLECTIONS_MAX:
                # No name is used twice: the time is never the same.
                self._bucket.create_collection(f"made-{time.time_ns()}")
        elif what == "drop":
            if self._bucket.collections:
                self._bucket.drop_collection(self._dice.choice(list(self._bucket.collections)))
        elif what == "roll back":
            seqnos = self._bucket.high_seqnos(connection)
            vbucket = self._dice.choice(list(seqnos))
            lost = self._dice.randrange(ROLLED_BACK_MAX)
            self._bucket.roll_back(vbucket, max(0, seqnos[vbucket] - lost))
        else:
            self._change_document(connection, what)

    # --- documents ------------------------------------------------------------------------------------------------

    def _change_document(self, connection: KvConnection, what: str) -> None:
        collection, key = self._dice.choice(written_keys(self._bucket))
        place = {"collection_id": CollectionId(collection), "key": key, "vbucket": self._bucket.vbucket_of(key)}
        try:
            if what == "delete":
                connection.request(Delete(**place))
                return
            expiry = LONG_AGO_S if what == "expire" else 0
            connection.request(Set(value=self._value(), expiry=expiry, **place))
            if what == "expire":
                self._expired.append(Get(**place))
        except KeyNotFound:
            pass
        if self._dice.random() < 0.3:
            for get in self._expired:
                with contextlib.suppress(KeyNotFound, UnknownCollection):
                    connection.request(get)
            self._expired.clear()

    def _value(self) -> bytes:
        padding = b"x" * self._dice.randrange(VALUE_BYTES_MAX)
        return b'{"number":%d,"padding":"%s"}' % (self._dice.randrange(1 << 30), padding)

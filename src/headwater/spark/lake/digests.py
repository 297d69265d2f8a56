"""Digests of vbuckets: do a table and a bucket hold the same documents?

The digest of a document is a hash over all that it is: collection, key, value, whether that is JSON, flags, expiry,
CAS, revision and seqno. The digest of a vbucket is the sum of those of its documents, so their order does not matter,
and the number of them. Sums of 128 bits that are equal by chance are not to be expected.

Documents come from a table (`digest_documents`) or out of a stream of changes (`ChangeDigester`); the hash is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.protocol.datatype import Datatype
from headwater.protocol.kernels.memory import Bytes, Column, kernel, u64
from headwater.protocol.kernels.siphash import sip_bytes, sip_end, sip_start, sip_word
from headwater.spark.lake.schemas import raw_keys

_NUMBERS = ("collection_id", "flags", "expiry", "cas", "rev", "seqno")
_SECRET: Any = (np.uint64(0x6865616477617465), np.uint64(0x72206469676573))
"""Fixed, so that all processes agree; nobody gains by a collision."""
_EVENTS = ("collection_dropped", "collection_created")
_Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class VBucketDigests:
    """The digests of all vbuckets of a bucket, or of a part of it."""

    counts: NDArray[np.int64]
    sums: _Hashes
    """Two words a vbucket."""

    @classmethod
    def empty(cls, vbuckets: int) -> VBucketDigests:
        return cls(np.zeros(vbuckets, dtype=np.int64), np.zeros((vbuckets, 2), dtype=np.uint64))

    def add(self, vbuckets: Column, hashes: _Hashes) -> None:
        """Take documents in."""
        np.add.at(self.counts, vbuckets, 1)
        np.add.at(self.sums, vbuckets, hashes)

    def __add__(self, other: VBucketDigests) -> VBucketDigests:
        """Of two parts that have no document in common."""
        return VBucketDigests(self.counts + other.counts, self.sums + other.sums)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VBucketDigests) and not self.differences(other)

    __hash__ = None  # type: ignore[assignment]

    def differences(self, other: VBucketDigests) -> list[int]:
        """The vbuckets in which the two are not the same."""
        differ = (self.counts != other.counts) | (self.sums != other.sums).any(axis=1)
        return [int(vbucket) for vbucket in np.flatnonzero(differ)]

    def text(self, vbucket: int) -> str:
        """The digest of one vbucket, as it is shown."""
        high, low = self.sums[vbucket].tolist()
        return f"{high:016x}{low:016x}"


def digest_documents(rows: Iterable[pa.Table], *, vbuckets: int) -> VBucketDigests:
    """The digests of rows that tables of documents hold, of any number of collections."""
    digests = VBucketDigests.empty(vbuckets)
    for table in rows:
        if table.num_rows == 0:
            continue
        keys = raw_keys(table.column("key"), table.column("key_bytes"))
        values = pc.coalesce(table.column("content"), table.column("document").cast(pa.binary()))
        digests.add(_numbers(table, "vbucket"), _hashes(table, keys, values))
    return digests


class ChangeDigester:
    """The digests of what a stream of changes leaves.

    Takes batches as a reader gives them, in the order of the stream, or rows of `changes` in any order: there, what a
    rollback took back is marked. Of each change it keeps some sixty bytes and none of its content.
    """

    def __init__(self, vbuckets: int) -> None:
        self._vbuckets = vbuckets
        self._parts: list[dict[str, NDArray[Any]]] = []

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
        if "void" in table.schema.names:
            is_rollback = pc.equal(table.column("op").cast(pa.string()), "rollback")
            table = table.filter(pc.invert(pc.or_(table.column("void"), is_rollback)))
        if table.num_rows == 0:
            return
        keys = table.column("key").cast(pa.binary())
        if "key_bytes" in table.schema.names:
            keys = raw_keys(table.column("key"), table.column("key_bytes"))
        keys = pc.fill_null(keys, b"")
        values = pc.fill_null(table.column("value").cast(pa.binary()), b"")
        ops = table.column("op").cast(pa.string())
        is_alive = self._roll_back(table, ops)
        ids = _numbers(table, "collection_id")
        self._parts.append(
            {
                "vbucket": _numbers(table, "vbucket"),
                "id": ids,
                "seqno": _numbers(table, "seqno"),
                "key": _key_hashes(ids, *_parts_of(keys)),
                "hash": _hashes(table, keys, values),
                "is_mutation": np.asarray(pc.equal(ops, "mutation")),
                "is_change": np.asarray(pc.is_in(ops, pa.array(["mutation", "deletion", "expiration"]))),
                "is_event": np.asarray(pc.is_in(ops, pa.array(_EVENTS))),
                "is_alive": is_alive,
            }
        )

    def _roll_back(self, table: pa.Table, ops: pa.ChunkedArray) -> NDArray[np.bool_]:
        """Forget what a rollback among the rows took back of those before. Returns a mark on the rows that stay."""
        is_alive = np.ones(table.num_rows, dtype=np.bool_)
        rows = np.flatnonzero(np.asarray(pc.equal(ops, "rollback")))
        vbuckets, seqnos = _numbers(table, "vbucket"), _numbers(table, "seqno")
        for row in rows.tolist():
            for part in self._parts:
                part["is_alive"] &= ~((part["vbucket"] == vbuckets[row]) & (part["seqno"] > seqnos[row]))
            is_alive[:row] &= ~((vbuckets[:row] == vbuckets[row]) & (seqnos[:row] > seqnos[row]))
        return is_alive

    def finish(self) -> VBucketDigests:
        """The digests of the documents that are left."""
        digests = VBucketDigests.empty(self._vbuckets)
        if not self._parts:
            return digests
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        alive = {name: column[joined["is_alive"]] for name, column in joined.items()}
        newest = _newest(alive)
        live = newest & alive["is_mutation"] & ~_is_gone(alive)
        digests.add(alive["vbucket"][live], alive["hash"][live])
        return digests


def _newest(rows: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """By row: it is the newest change of its document."""
    order = np.lexsort((rows["seqno"], rows["key"][:, 1], rows["key"][:, 0], rows["vbucket"]))
    order = order[rows["is_change"][order]]
    is_last = np.ones(len(order), dtype=np.bool_)
    same = (rows["vbucket"][order[1:]] == rows["vbucket"][order[:-1]]) & (
        rows["key"][order[1:]] == rows["key"][order[:-1]]
    ).all(axis=1)
    is_last[:-1] = ~same
    newest = np.zeros(len(rows["seqno"]), dtype=np.bool_)
    newest[order[is_last]] = True
    return newest


def _is_gone(rows: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """By row: its collection has ended, or has been flushed, after it."""
    is_event = rows["is_event"]
    if not is_event.any():
        return np.zeros(len(is_event), dtype=np.bool_)
    places = np.stack([rows["vbucket"].astype(np.int64), rows["id"]])
    _, place = np.unique(places, axis=1, return_inverse=True)
    ends = np.zeros(int(place.max()) + 1, dtype=np.int64)
    np.maximum.at(ends, place[is_event], rows["seqno"][is_event])
    gone: NDArray[np.bool_] = rows["seqno"] < ends[place]
    return gone


# --- hashing rows -------------------------------------------------------------------------------------------------


def _numbers(table: pa.Table, name: str) -> NDArray[np.int64]:
    column = table.column(name)
    if pa.types.is_uint64(column.type):
        column = pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())
    return np.asarray(pc.fill_null(column, 0).to_numpy()).astype(np.int64)


def _hashes(table: pa.Table, keys: pa.ChunkedArray, values: pa.ChunkedArray) -> _Hashes:
    numbers = np.stack([_numbers(table, name) for name in _NUMBERS], axis=1)
    is_json = (_numbers(table, "datatype") & Datatype.JSON).astype(np.int64)
    hashes = np.empty((table.num_rows, 2), dtype=np.uint64)
    key_places, key_bytes = _parts_of(keys)
    value_places, value_bytes = _parts_of(pc.fill_null(values, b""))
    _hash_rows(
        numbers, is_json, key_places, key_bytes, value_places, value_bytes, _SECRET[0], _SECRET[1], hashes
    )  # fmt: skip
    return hashes


def _parts_of(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], Bytes]:
    array = column.cast(pa.large_binary()).combine_chunks()
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return places, np.frombuffer(b"" if data is None else data, dtype=np.uint8)


def _key_hashes(ids: NDArray[np.int64], places: NDArray[np.int64], data: Bytes) -> _Hashes:
    hashes = np.empty((len(ids), 2), dtype=np.uint64)
    _hash_keys(ids, places, data, _SECRET[0], _SECRET[1], hashes)
    return hashes


@kernel
def _hash_rows(
    numbers: Column, is_json: Column, key_places: Column, keys: Bytes, value_places: Column, values: Bytes,
    secret0: int, secret1: int, hashes: Column,
) -> None:  # fmt: skip
    for row in range(len(hashes)):
        state = sip_start(secret0, secret1)
        for i in range(numbers.shape[1]):
            state = sip_word(state, u64(numbers[row, i]))
        key_bytes = key_places[row + 1] - key_places[row]
        value_bytes = value_places[row + 1] - value_places[row]
        # The lengths keep a key's last bytes apart from a value's first.
        state = sip_word(state, u64(key_bytes))
        state = sip_word(state, u64(value_bytes << 1 | is_json[row]))
        state = sip_bytes(state, keys, key_places[row], key_bytes)
        state = sip_bytes(state, values, value_places[row], value_bytes)
        hashes[row, 0], hashes[row, 1] = sip_end(state)


@kernel
def _hash_keys(ids: Column, places: Column, data: Bytes, secret0: int, secret1: int, hashes: Column) -> None:
    for row in range(len(hashes)):
        state = sip_word(sip_start(secret0, secret1), u64(ids[row]))
        state = sip_bytes(state, data, places[row], places[row + 1] - places[row])
        hashes[row, 0], hashes[row, 1] = sip_end(state)

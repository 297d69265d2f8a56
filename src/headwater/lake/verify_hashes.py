"""Hashes of rows, by which `headwater verify` compares a table with a bucket.

A row is kept as two 128-bit hashes and a few numbers, some sixty bytes, whatever its document holds. The *key hash*
covers vbucket, collection and key: it identifies the document. The *row hash* extends it with seqno, CAS and the time
in it, revision, flags, expiry, datatype, operation, the extended attributes if the lake has them, and the value: it
identifies the version. Accidental collisions need not be expected. Hashes are never stored, so they may change with any
version.

The row hash of a removal covers only what a server always sends: the time of a removal, and what is left of its value,
are sent from disk, but not from memory.

Rows come from a stream of changes, from `changes`, or from a table of documents. The same version has the same hash in
all of them. A row with its value in the wrong column, such as JSON in `content`, has a different hash. If the documents
of a lake are variants, changes have a second hash, over the variant of their value.

`HashIndex` is a hash table over such rows: it finds the newest of each document, and one side's rows in the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.client.changes import split_keys
from headwater.kernels.memory import (
    Bools,
    Bytes,
    Int32s,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt32s,
    UInt64,
    UInt64Rows,
    i64,
    kernel,
    kernel_part,
    load_u64,
    read_only,
    u64,
)
from headwater.kernels.siphash import sip_end, sip_start, sip_word
from headwater.lake.change_rows import DELETION, EXPIRATION
from headwater.lake.layout import LANDED_OPS, DocumentForm, raw_keys, split_variants
from headwater.lake.variants import to_variants
from headwater.protocol.values import Datatype

Hashes = NDArray[np.uint64]
"""Two words per row."""
Marks = NDArray[np.bool_]
Wider = TypeVar("Wider", bound="HashedRows")
UNKNOWN_OP = -1
"""Stands for a value of `op` that another program has written."""
_NUMBERS = ("seqno", "cas", "rev", "flags", "expiry", "changed_at")
NO_TIME = np.iinfo(np.int64).min
_IS_NULL, _IS_MISPLACED = 1, 2
_NOTHING = pa.scalar(None, pa.binary())
_SECRET: Any = (np.uint64(0x6865616477617465), np.uint64(0x72206469676573))
"""Fixed, so that all processes agree; a collision gains nothing."""
_NO_BYTES = np.frombuffer(b"", dtype=np.uint8)
_NO_ENDS = np.frombuffer(bytes(4), dtype=np.int32)
"""Read-only, like arrays of Arrow's buffers: for writable arrays, numba would compile each kernel once more."""


def per_row(type_: type[np.generic], width: int | None = None) -> Any:
    """Return a field of `HashedRows` with a value, or `width` values, for each row. It is empty by default."""
    return field(default_factory=lambda: np.zeros(0 if width is None else (0, width), dtype=type_))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HashedRows:
    """Rows of a stream or of a table. Subclasses add columns, and fields without a default, which all rows share."""

    vbuckets: NDArray[np.int32] = per_row(np.int32)
    ids: NDArray[np.int64] = per_row(np.int64)
    """Of collections; -1 if a row belongs to none."""
    seqnos: NDArray[np.int64] = per_row(np.int64)
    ops: NDArray[np.int8] = per_row(np.int8)
    """Numbers in `LANDED_OPS`. A row of a table of documents is a mutation."""
    vbuuids: NDArray[np.int64] = per_row(np.int64)
    """Not part of the hashes: the bucket only returns its current branch."""
    times_us: NDArray[np.int64] = per_row(np.int64)
    """`changed_at`, or `NO_TIME`."""
    keys: Hashes = per_row(np.uint64, 2)
    hashes: Hashes = per_row(np.uint64, 2)
    variant_hashes: Hashes = per_row(np.uint64, 0)
    """The hashes in tables whose documents are variants; without words in lakes without variants."""

    def __len__(self) -> int:
        return len(self.seqnos)

    @classmethod
    def _columns(cls) -> list[str]:
        return [it.name for it in fields(cls) if it.default_factory is not MISSING]

    def of(self, chosen: Any) -> Self:
        """Return some of the rows, by marks or by numbers."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.all():
            return self
        return replace(self, **{name: getattr(self, name)[chosen] for name in self._columns()})

    @classmethod
    def joined(cls, parts: Sequence[Self], **shared: Any) -> Self:
        """Join the rows of all parts, which share the given fields."""
        nothing = cls(**shared)
        parts = [part for part in parts if len(part)] or [nothing]
        return replace(
            nothing, **{name: np.concatenate([getattr(it, name) for it in parts]) for name in cls._columns()}
        )

    def as_documents(self) -> Self:
        """Return changes with the hashes that they have in tables of documents."""
        return replace(self, hashes=self.variant_hashes) if self.variant_hashes.shape[1] else self

    def widened(self, wider: type[Wider], **others: Any) -> Wider:
        """Return the same rows with further columns."""
        return wider(**{name: getattr(self, name) for name in self._columns()}, **others)


def hash_changes(
    rows: pa.Table | pa.RecordBatch, *, xattrs: bool, form: DocumentForm = DocumentForm.STRING
) -> HashedRows:
    """Hash changes from a reader, or from `changes`, for tables with documents of this form."""
    if "key_bytes" in rows.schema.names:
        keys = raw_keys(_array(rows, "key"), _array(rows, "key_bytes"))
    else:
        keys = _array(rows, "key")
    values, ops = _array(rows, "value"), op_codes(rows)
    is_removal = (ops == DELETION) | (ops == EXPIRATION)
    if is_removal.any() and values.null_count < len(values):
        values = pc.if_else(pa.array(is_removal), _NOTHING, values)
    oddities = _nulls(values)
    if "key_bytes" in rows.schema.names:
        oddities |= _misplaced_keys(rows)
    hashed = _hashed(rows, keys, values, oddities, ops, xattrs=xattrs)
    if form is DocumentForm.STRING:
        return hashed
    variants, others = split_variants(values, int64s(rows, "datatype").astype(np.int16))
    values = pc.coalesce(_variant_bytes(variants), others)
    return replace(hashed, variant_hashes=_hashed(rows, keys, values, oddities, ops, xattrs=xattrs).hashes)


def hash_documents(rows: pa.Table, *, xattrs: bool) -> HashedRows:
    """Hash rows of `documents`, `history` or `rejects`."""
    texts, contents = _array(rows, "document"), _array(rows, "content")
    if pa.types.is_struct(texts.type):
        texts = _variant_bytes(texts)
    if contents.null_count == len(contents):
        values = texts.cast(pa.binary())
    else:
        values = pc.coalesce(contents, texts.cast(pa.binary()))
    oddities = _nulls(values) | _misplaced(rows, texts, contents)
    keys = raw_keys(_array(rows, "key"), _array(rows, "key_bytes"))
    return _hashed(rows, keys, values, oddities, np.zeros(rows.num_rows, dtype=np.int8), xattrs=xattrs)


def _variant_bytes(variants: pa.Array) -> pa.Array:
    """Return both parts of each variant as one binary; null if it is null."""
    dictionaries, values = variants.flatten()
    return pc.binary_join_element_wise(dictionaries, values, b"")


def hash_texts(column: pa.Array | pa.ChunkedArray) -> Hashes:
    """Hash each text. Null counts as empty."""
    array = column if isinstance(column, pa.Array) else column.combine_chunks()
    hashes = np.empty((len(array), 2), dtype=np.uint64)
    _hash_texts(*_parts_of(array), _SECRET[0], _SECRET[1], hashes)
    return hashes


def op_codes(rows: pa.Table | pa.RecordBatch) -> NDArray[np.int8]:
    """Return the operations as numbers in `LANDED_OPS`."""
    ops = _array(rows, "op")
    if not pa.types.is_dictionary(ops.type):
        ops = ops.dictionary_encode()
    known = {name: number for number, name in enumerate(LANDED_OPS)}
    codes = np.array([known.get(name, UNKNOWN_OP) for name in ops.dictionary.to_pylist()] or [UNKNOWN_OP], np.int8)
    found: NDArray[np.int8] = codes[pc.fill_null(ops.indices, 0).to_numpy()]
    return found


def int64s(rows: pa.Table | pa.RecordBatch, name: str, *, null: int = 0) -> NDArray[np.int64]:
    """Return a column of whole numbers or times. Unsigned 64-bit numbers keep their bits."""
    column = _array(rows, name)
    if pa.types.is_uint64(column.type) or pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    if column.null_count:
        column = pc.fill_null(column.cast(pa.int64()), null)
    return np.asarray(column.to_numpy()).astype(np.int64, copy=False)


# --- what is odd in a row ---------------------------------------------------------------------------------------------


def _nulls(values: pa.Array) -> NDArray[np.uint8]:
    """Mark null values: a null differs from an empty value."""
    if values.null_count == 0:
        return np.zeros(len(values), dtype=np.uint8)
    return np.where(np.asarray(values.is_null()), np.uint8(_IS_NULL), np.uint8(0))


def _misplaced(rows: pa.Table, texts: pa.Array, contents: pa.Array) -> NDArray[np.uint8]:
    """Mark rows whose `document`, `content` or keys differ from the results of `split_values` (or `split_variants`) and
    `split_keys`."""
    is_json = (int64s(rows, "datatype") & Datatype.JSON) != 0
    is_text = np.asarray(texts.is_valid())
    wrong = is_text != is_json
    if contents.null_count < len(contents):
        has_content = np.asarray(contents.is_valid())
        wrong |= is_text & has_content
        # JSON that is not UTF-8, or can't be a variant, belongs in `content`. There is little of it.
        unsure = np.flatnonzero(is_json & has_content & ~is_text)
        split = to_variants if pa.types.is_binary(texts.type) else split_keys
        wrong[unsure] = split(contents.take(pa.array(unsure)))[1].is_null().to_numpy(zero_copy_only=False)
    return np.where(wrong, np.uint8(_IS_MISPLACED), np.uint8(0)) | _misplaced_keys(rows)


def _misplaced_keys(rows: pa.Table | pa.RecordBatch) -> NDArray[np.uint8]:
    """Mark rows whose `key` and `key_bytes` differ from the result of `split_keys`."""
    found, key_bytes = np.zeros(rows.num_rows, dtype=np.uint8), _array(rows, "key_bytes")
    if key_bytes.null_count < len(key_bytes):
        odd = np.flatnonzero(np.asarray(key_bytes.is_valid()))
        shown, raw = split_keys(key_bytes.take(pa.array(odd)))
        wrong = pc.fill_null(pc.not_equal(_array(rows, "key").take(pa.array(odd)), shown), True)
        found[odd[np.asarray(pc.or_(wrong, raw.is_null()))]] = _IS_MISPLACED
    return found


# --- hashing ----------------------------------------------------------------------------------------------------------


def _array(rows: pa.Table | pa.RecordBatch, name: str) -> pa.Array:
    column = rows.column(name)
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _hashed(
    rows: pa.Table | pa.RecordBatch,
    keys: pa.Array,
    values: pa.Array,
    oddities: NDArray[np.uint8],
    ops: NDArray[np.int8],
    *,
    xattrs: bool,
) -> HashedRows:
    count = rows.num_rows
    vbuckets, ids = int64s(rows, "vbucket"), int64s(rows, "collection_id", null=-1)
    numbers = np.empty((len(_NUMBERS) + 1, count), dtype=np.int64)
    for at, name in enumerate(_NUMBERS):
        numbers[at] = int64s(rows, name, null=NO_TIME if name == "changed_at" else 0)
    times_us = numbers[-2].copy()
    datatypes = int64s(rows, "datatype")
    sums = _xattr_sums(rows) if xattrs else np.zeros((count, 2), dtype=np.uint64)
    if (is_removal := (ops == DELETION) | (ops == EXPIRATION)).any():
        for name in ("flags", "expiry"):
            numbers[_NUMBERS.index(name), is_removal] = 0
        datatypes = np.where(is_removal, 0, datatypes)
        sums[is_removal] = 0
    numbers[-1] = ops.astype(np.int64) << 32 | datatypes << 8 | oddities
    hashed = HashedRows(
        vbuckets=vbuckets.astype(np.int32),
        ids=ids,
        seqnos=numbers[0].copy(),
        ops=ops,
        vbuuids=int64s(rows, "vbuuid").copy(),
        times_us=times_us,
        keys=np.empty((count, 2), dtype=np.uint64),
        hashes=np.empty((count, 2), dtype=np.uint64),
        variant_hashes=np.empty((count, 0), dtype=np.uint64),
    )
    documents = ids << 16 | vbuckets
    _hash_rows(
        documents,
        numbers,
        sums,
        *_parts_of(keys),
        *_parts_of(values),
        _SECRET[0],
        _SECRET[1],
        hashed.keys,
        hashed.hashes,
    )
    return hashed


def _xattr_sums(rows: pa.Table | pa.RecordBatch) -> Hashes:
    """Return the sum of each row's attribute hashes, so that the order of the attributes does not matter."""
    column = _array(rows, "xattrs")
    sums = np.zeros((len(column), 2), dtype=np.uint64)
    ends = np.array(column.offsets.to_numpy(zero_copy_only=False), dtype=np.int64)
    _sum_pairs(ends, *_parts_of(column.keys), *_parts_of(column.items), _SECRET[0], _SECRET[1], sums)
    return sums


def _parts_of(array: pa.Array) -> tuple[NDArray[np.int32], Bytes]:
    """Return the offsets and the bytes of texts or binaries."""
    if array.null_count:
        # There may be bytes behind a null.
        array = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
    if len(array) == 0:
        return _NO_ENDS, _NO_BYTES
    _, offsets, data = array.buffers()
    ends = read_only(np.frombuffer(offsets, np.int32))[array.offset : array.offset + len(array) + 1]
    return ends, _NO_BYTES if data is None else read_only(np.frombuffer(data, np.uint8))


@kernel_part
def _take_bytes(state: Any, data: Bytes, at: int, length: int) -> Any:
    """Like `sip_bytes`, but with one load for eight bytes, in half of the time. No other program computes these hashes,
    so any byte order will do."""
    whole = i64(length) // 8
    for i in range(whole):
        state = sip_word(state, load_u64(data, at + 8 * i))
    last = u64(length & 0xFF) << u64(56)
    for i in range(length - 8 * whole):
        last |= u64(data[at + 8 * whole + i]) << u64(8 * i)
    return sip_word(state, last)


@kernel
def _hash_rows(
    documents: Int64s, numbers: Int64Rows, sums: UInt64Rows, key_ends: ReadOnlyInt32s, keys: ReadOnlyBytes,
    value_ends: ReadOnlyInt32s, values: ReadOnlyBytes, secret0: UInt64, secret1: UInt64, key_hashes: UInt64Rows,
    hashes: UInt64Rows,
) -> None:  # fmt: skip
    for row in range(len(hashes)):
        state = sip_word(sip_start(secret0, secret1), u64(documents[row]))
        key_at = i64(key_ends[row])
        state = _take_bytes(state, keys, key_at, i64(key_ends[row + 1]) - key_at)
        key_hashes[row, 0], key_hashes[row, 1] = sip_end(state)
        for i in range(numbers.shape[0]):
            state = sip_word(state, u64(numbers[i, row]))
        state = sip_word(sip_word(state, sums[row, 0]), sums[row, 1])
        value_at = i64(value_ends[row])
        value_bytes = i64(value_ends[row + 1]) - value_at
        # The length separates a key's last bytes from a value's first.
        state = sip_word(state, u64(value_bytes))
        state = _take_bytes(state, values, value_at, value_bytes)
        hashes[row, 0], hashes[row, 1] = sip_end(state)


@kernel
def _sum_pairs(
    ends: Int64s, name_ends: ReadOnlyInt32s, names: ReadOnlyBytes, value_ends: ReadOnlyInt32s,
    values: ReadOnlyBytes, secret0: UInt64, secret1: UInt64, sums: UInt64Rows,
) -> None:  # fmt: skip
    for row in range(len(sums)):
        for pair in range(ends[row], ends[row + 1]):
            name_at, value_at = i64(name_ends[pair]), i64(value_ends[pair])
            name_bytes = i64(name_ends[pair + 1]) - name_at
            state = sip_word(sip_start(secret0, secret1), u64(name_bytes))
            state = _take_bytes(state, names, name_at, name_bytes)
            state = _take_bytes(state, values, value_at, i64(value_ends[pair + 1]) - value_at)
            high, low = sip_end(state)
            sums[row, 0] += high
            sums[row, 1] += low


@kernel
def _hash_texts(
    ends: ReadOnlyInt32s, data: ReadOnlyBytes, secret0: UInt64, secret1: UInt64, hashes: UInt64Rows
) -> None:
    for row in range(len(hashes)):
        at = i64(ends[row])
        state = _take_bytes(sip_start(secret0, secret1), data, at, i64(ends[row + 1]) - at)
        hashes[row, 0], hashes[row, 1] = sip_end(state)


# --- rows by their hash -----------------------------------------------------------------------------------------------


class HashIndex:
    """Rows by one of their hashes."""

    def __init__(self, hashes: Hashes, seqnos: NDArray[np.int64]) -> None:
        self._hashes = hashes
        self._slots = np.full(1 << max(4, (2 * len(hashes)).bit_length()), -1, dtype=np.int32)
        self.newest: Marks = np.ones(len(hashes), dtype=np.bool_)
        """By row: whether it has the highest seqno among the rows with its hash. Among equal seqnos, the first row."""
        _insert(hashes, seqnos, self._slots, self.newest)

    @classmethod
    def of_all(cls, parts: Sequence[Hashes]) -> HashIndex:
        """Make an index only for checking whether a hash is among these."""
        hashes = np.concatenate([np.zeros((0, 2), dtype=np.uint64), *parts])
        return cls(hashes, np.zeros(len(hashes), dtype=np.int64))

    def __len__(self) -> int:
        """The number of distinct hashes."""
        return int(self.newest.sum())

    def find(self, wanted: Hashes) -> NDArray[np.int64]:
        """By hash: return the newest row that has it, or -1."""
        found = np.full(len(wanted), -1, dtype=np.int64)
        _find(self._hashes, self._slots, wanted, found)
        return found


@kernel
def _insert(hashes: UInt64Rows, seqnos: Int64s, slots: Int32s, newest: Bools) -> None:
    mask = u64(len(slots) - 1)
    for row in range(len(hashes)):
        slot = i64(hashes[row, 0] & mask)
        while slots[slot] >= 0:
            other = i64(slots[slot])
            if hashes[other, 0] == hashes[row, 0] and hashes[other, 1] == hashes[row, 1]:
                is_newer = seqnos[row] > seqnos[other]
                newest[other if is_newer else row] = False
                if is_newer:
                    slots[slot] = row
                break
            slot = i64(u64(slot + 1) & mask)
        if slots[slot] < 0:
            slots[slot] = row


@kernel
def _find(hashes: UInt64Rows, slots: Int32s, wanted: UInt64Rows, found: Int64s) -> None:
    mask = u64(len(slots) - 1)
    for row in range(len(wanted)):
        slot = i64(wanted[row, 0] & mask)
        while slots[slot] >= 0:
            other = i64(slots[slot])
            if hashes[other, 0] == wanted[row, 0] and hashes[other, 1] == wanted[row, 1]:
                found[row] = other
                break
            slot = i64(u64(slot + 1) & mask)

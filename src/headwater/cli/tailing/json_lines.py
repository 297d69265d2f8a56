"""Changes as lines of JSON: one object a line, with the members that `to_dict` of the typed changes gives."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from headwater.cli.tailing.json_kernel import (
    AS_BASE64,
    AS_TEXT,
    KEY,
    KEY_MORE_BYTES_MAX,
    KEY_SIGN_BYTES_MAX,
    NAME,
    NO_TIME,
    NUMBER,
    NUMBER_BYTES_MAX,
    TIME,
    TIME_BYTES_MAX,
    VALUE,
    judge_values,
    write_lines,
)
from headwater.client.changes import Deletion, Expiration, Mutation, changes_of
from headwater.protocol.kernels.memory import Bytes, Column

_KINDS = {
    "op": NAME,
    "vbucket": NUMBER,
    "vbuuid": NUMBER,
    "seqno": NUMBER,
    "rev": NUMBER,
    "scope": NAME,
    "collection": NAME,
    "collection_id": NUMBER,
    "key": KEY,
    "value": VALUE,
    "flags": NUMBER,
    "expiry": NUMBER,
    "cas": NUMBER,
    "changed_at": TIME,
    "snapshot_start": NUMBER,
    "snapshot_end": NUMBER,
}
"""The members of a change of a document, in their order."""

_DOCUMENT_OPS = frozenset({Mutation.op, Deletion.op, Expiration.op})


class JsonLines:
    """Makes lines of batches. Where values were not asked for, `value` is left out."""

    def __init__(self, *, no_value: bool) -> None:
        self._no_value = no_value
        self._plan = _Plan([name for name in _KINDS if not (no_value and name == "value")])
        self._room = np.empty(0, dtype=np.uint8)

    def encode(self, batch: pa.RecordBatch) -> memoryview:
        """The lines of a batch, good until the next call."""
        others = self._other_rows(batch)
        columns = _Columns(batch, self._plan)
        other_lines = [self._line(batch.slice(row, 1)) for row in others]
        self._make_room(columns.room_bytes + sum(map(len, other_lines)))
        at = first = 0
        for row, line in zip(others, other_lines, strict=True):
            at = columns.write(first, row, self._room, at)
            self._room[at : at + len(line)] = np.frombuffer(line, dtype=np.uint8)
            at += len(line)
            first = row + 1
        at = columns.write(first, batch.num_rows, self._room, at)
        return self._room.data[:at]

    def end(self) -> bytes:
        return b""

    def _other_rows(self, batch: pa.RecordBatch) -> list[int]:
        """Those that the kernel does not write: events, rollbacks, and documents with extended attributes."""
        ops = batch.column("op")
        are_other = np.array([op not in _DOCUMENT_OPS for op in ops.dictionary.to_pylist()])[ops.indices.to_numpy()]
        if "xattrs" in batch.schema.names:
            are_other |= batch.column("xattrs").is_valid().to_numpy(zero_copy_only=False)
        rows: list[int] = np.flatnonzero(are_other).tolist()
        return rows

    def _line(self, row: pa.RecordBatch) -> bytes:
        members = next(changes_of(row)).to_dict()
        if self._no_value:
            members.pop("value", None)
            members.pop("value_base64", None)
        return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def _make_room(self, room_bytes: int) -> None:
        if len(self._room) < room_bytes:
            self._room = np.empty(room_bytes, dtype=np.uint8)


class _Plan:
    """The form of a line, as the kernel wants it."""

    def __init__(self, members: list[str]) -> None:
        self.members = members
        self.numbers = [name for name in members if _KINDS[name] == NUMBER]
        self.names = [name for name in members if _KINDS[name] == NAME]
        self.fields = np.array(
            [(_KINDS[name], self._column(name)) for name in members],
            dtype=np.int64,
        )
        self.texts, self.text_ends = _joined([*self._texts(), b"}\n"])

    def _column(self, name: str) -> int:
        same_kind = self.names if _KINDS[name] == NAME else self.numbers
        return same_kind.index(name) if name in same_kind else 0

    def _texts(self) -> Iterator[bytes]:
        for name in self.members:
            # The kernel goes on with the names of keys and values itself.
            end = "" if _KINDS[name] in (KEY, VALUE) else '":'
            yield f'{"{" if name == self.members[0] else ","}"{name}{end}'.encode()


class _Columns:
    """A batch as the kernel wants it."""

    def __init__(self, batch: pa.RecordBatch, plan: _Plan) -> None:
        self._plan = plan
        rows = batch.num_rows
        self._numbers = np.empty((len(plan.numbers), rows), dtype=np.uint64)
        for number, name in enumerate(plan.numbers):
            self._numbers[number] = batch.column(name).fill_null(0).to_numpy(zero_copy_only=False)
        self._times = batch.column("changed_at").cast(pa.int64()).fill_null(NO_TIME).to_numpy(zero_copy_only=False)
        self._names, self._name_ends, self._name_rows = _names([batch.column(name) for name in plan.names])
        self._keys, self._key_offsets = _binary(batch.column("key"))
        self._values, self._value_offsets = _binary(batch.column("value"))
        self._key_forms = _key_forms(batch.column("key"))
        self._value_forms = np.empty(rows, dtype=np.uint8)
        has_value = batch.column("value").is_valid().to_numpy(zero_copy_only=False)
        value_bytes = judge_values(
            self._values, self._value_offsets, has_value, batch.column("datatype").to_numpy(), self._value_forms
        )
        key_bytes = KEY_SIGN_BYTES_MAX * int(self._key_offsets[-1] - self._key_offsets[0])
        line_bytes = len(plan.texts) + NUMBER_BYTES_MAX * len(plan.numbers) + TIME_BYTES_MAX + KEY_MORE_BYTES_MAX
        names_bytes = len(plan.names) * int(np.diff(self._name_ends, prepend=0).max())
        self.room_bytes = rows * (line_bytes + names_bytes) + key_bytes + value_bytes

    def write(self, first: int, last: int, out: Bytes, at: int) -> int:
        """Write rows to `out`; returns where they end."""
        return write_lines(
            first, last, self._plan.fields, self._plan.texts, self._plan.text_ends, self._numbers, self._times,
            self._names, self._name_ends, self._name_rows, self._keys, self._key_offsets, self._key_forms,
            self._values, self._value_offsets, self._value_forms, out, at,
        )  # fmt: skip


def _key_forms(keys: pa.Array) -> Bytes:
    try:
        keys.cast(pa.string())
    except pa.ArrowInvalid:  # some are not UTF-8
        forms = [AS_TEXT if key is None or _is_utf8(key) else AS_BASE64 for key in keys.to_pylist()]
        return np.array(forms, dtype=np.uint8)
    return np.full(len(keys), AS_TEXT, dtype=np.uint8)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _names(columns: list[pa.DictionaryArray]) -> tuple[Bytes, Column, Column]:
    """All names as JSON, where each of them ends, and for each column and row which of them it is."""
    names = [b"null"]
    rows = np.empty((len(columns), len(columns[0])), dtype=np.int64)
    for number, column in enumerate(columns):
        codes = column.indices.fill_null(-len(names)).to_numpy(zero_copy_only=False)
        np.add(codes, len(names), out=rows[number], casting="unsafe")
        names += [json.dumps(name, ensure_ascii=False).encode() for name in column.dictionary.to_pylist()]
    return (*_joined(names), rows)


def _joined(parts: list[bytes]) -> tuple[Bytes, Column]:
    return np.frombuffer(b"".join(parts), dtype=np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)


def _binary(column: pa.Array) -> tuple[Bytes, Column]:
    """The bytes of a column, and where each of its rows begins and ends."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data if data is not None else b"", dtype=np.uint8), ends

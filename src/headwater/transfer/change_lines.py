"""Changes as lines of JSON: one object per line, with the members of `to_dict` of the typed changes.

A kernel writes the changes of documents: it creates no Python object per change, and parses no value to print it. A
plan defines the line: a row of fields, each with the text before it, its kind, and its column number among the
fields of that kind. The text after the last field ends the line. For keys and values, the text is only the
beginning of the name, whose rest depends on the content: `key` or `key_base64`. Events, rollbacks and documents
with extended attributes are rare, and use the typed changes.

`headwater tail` writes its lines with this module; an export uses `judge_values`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from headwater.client.changes import Deletion, Expiration, Mutation, changes_of
from headwater.kernels.memory import (
    Bools,
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt32s,
    ReadOnlyInt64s,
    UInt64Rows,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    u8,
    u64,
)
from headwater.protocol.kernels.decode import binary_column
from headwater.protocol.kernels.json_check import is_json

NUMBER, NAME, TIME, KEY, VALUE = range(5)
"""Kinds of fields. A name is one of few texts, already encoded as JSON; a time is in microseconds since 1970."""
ABSENT, AS_JSON, AS_TEXT, AS_BASE64 = range(4)
"""How a key or a value is written: as null, as it is, as a string, or as a string in base64."""
NUMBER_BYTES_MAX = 20
TIME_BYTES_MAX = 34
KEY_SIGN_BYTES_MAX = 6
"""A character of a key may become an escape sequence of this length."""
KEY_MORE_BYTES_MAX = 14
"""The rest of the key's name, the quotes, and the padding of base64."""
NO_TIME = -(2**63)
_UTC = np.frombuffer(b'+00:00"', dtype=np.uint8)
_BASE64_NAME = np.frombuffer(b'_base64":', dtype=np.uint8)
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
"""The members of a document's change, in order."""
_DOCUMENT_OPS = frozenset({Mutation.op, Deletion.op, Expiration.op})


class ChangeLines:
    """Encodes batches as lines. If values were not requested, the lines have no `value`."""

    def __init__(self, *, no_value: bool) -> None:
        self._no_value = no_value
        self._plan = _LinePlan([name for name in _KINDS if not (no_value and name == "value")])
        self._room = np.empty(0, dtype=np.uint8)

    def encode(self, batch: pa.RecordBatch) -> memoryview:
        """Return the lines of a batch, which are valid until the next call."""
        others = self._other_rows(batch)
        columns = _LineColumns(batch, self._plan)
        other_lines = [self._line(batch.slice(row, 1)) for row in others]
        room_bytes = columns.room_bytes + sum(map(len, other_lines))
        if len(self._room) < room_bytes:
            self._room = np.empty(room_bytes, dtype=np.uint8)
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
        """Return the rows that the kernel does not write: events, rollbacks, and documents with extended attributes."""
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


class _LinePlan:
    """The format of a line, in the form that the kernel needs."""

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
            # The kernel writes the rest of the names of keys and values.
            end = "" if _KINDS[name] in (KEY, VALUE) else '":'
            yield f'{"{" if name == self.members[0] else ","}"{name}{end}'.encode()


class _LineColumns:
    """A batch, in the form that the kernel needs."""

    def __init__(self, batch: pa.RecordBatch, plan: _LinePlan) -> None:
        self._plan = plan
        rows = batch.num_rows
        self._numbers = np.empty((len(plan.numbers), rows), dtype=np.uint64)
        for number, name in enumerate(plan.numbers):
            self._numbers[number] = _filled(batch.column(name), 0)
        self._times = _filled(batch.column("changed_at").view(pa.int64()), NO_TIME)
        self._names, self._name_ends, self._name_rows = _names([batch.column(name) for name in plan.names])
        self._keys, self._key_offsets = binary_column(batch.column("key"))
        self._values, self._value_offsets = binary_column(batch.column("value"))
        self._key_forms = _key_forms(batch.column("key"))
        self._value_forms = np.empty(rows, dtype=np.uint8)
        has_value = _are_there(batch.column("value"))
        value_bytes = judge_values(
            self._values, self._value_offsets, has_value, batch.column("datatype").to_numpy(), self._value_forms
        )
        key_bytes = KEY_SIGN_BYTES_MAX * int(self._key_offsets[-1] - self._key_offsets[0])
        line_bytes = len(plan.texts) + NUMBER_BYTES_MAX * len(plan.numbers) + TIME_BYTES_MAX + KEY_MORE_BYTES_MAX
        names_bytes = len(plan.names) * int(np.diff(self._name_ends, prepend=0).max())
        self.room_bytes = rows * (line_bytes + names_bytes) + key_bytes + value_bytes

    def write(self, first: int, last: int, out: Bytes, at: int) -> int:
        """Write rows to `out`. Returns the position after them."""
        return write_lines(
            first, last, self._plan.fields, self._plan.texts, self._plan.text_ends, self._numbers, self._times,
            self._names, self._name_ends, self._name_rows, self._keys, self._key_offsets, self._key_forms,
            self._values, self._value_offsets, self._value_forms, out, at,
        )  # fmt: skip


# The functions of `pyarrow.compute`, which are also methods of arrays, take longer to import than the first lines
# take to write. So they are called only if a column has nulls.


def _filled(column: pa.Array, instead: int) -> Column:
    return (column.fill_null(instead) if column.null_count else column).to_numpy(zero_copy_only=False)


def _are_there(column: pa.Array) -> Column:
    if column.null_count:
        return column.is_valid().to_numpy(zero_copy_only=False)
    return np.ones(len(column), dtype=np.bool_)


def _key_forms(keys: pa.Array) -> Bytes:
    try:
        keys.view(pa.string()).validate(full=True)
    except pa.ArrowInvalid:  # Some are not UTF-8.
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
    """Return all names as JSON, the end of each of them, and for each column and row the index of its name."""
    names = [b"null"]
    rows = np.empty((len(columns), len(columns[0])), dtype=np.int64)
    for number, column in enumerate(columns):
        codes = _filled(column.indices, -len(names))
        np.add(codes, len(names), out=rows[number], casting="unsafe")
        names += [json.dumps(name, ensure_ascii=False).encode() for name in column.dictionary.to_pylist()]
    return (*_joined(names), rows)


def _joined(parts: list[bytes]) -> tuple[Bytes, Column]:
    return np.frombuffer(b"".join(parts), dtype=np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel
def judge_values(
    values: ReadOnlyBytes, offsets: ReadOnlyInt32s, is_there: Bools, datatypes: ReadOnlyBytes, forms: Bytes
) -> int:
    """Choose the form of each value, checking JSON because a server may err. Returns enough room for all values."""
    room = i64(0)
    for row in range(len(forms)):
        start = i64(offsets[row])
        end = i64(offsets[row + 1])
        if not is_there[row]:
            forms[row] = ABSENT
            room += 6
        elif datatypes[row] & 0x01 and is_json(values, start, end):
            forms[row] = AS_JSON
            room += 2 + end - start
        else:
            forms[row] = AS_BASE64
            room += 11 + 4 * ((end - start + 2) // 3)
    return room


@kernel
def write_lines(
    first: int, last: int, plan: Int64Rows, texts: ReadOnlyBytes, text_ends: Int64s, numbers: UInt64Rows,
    times: ReadOnlyInt64s, names: ReadOnlyBytes, name_ends: Int64s, name_rows: Int64Rows, keys: ReadOnlyBytes,
    key_offsets: ReadOnlyInt32s, key_forms: Bytes, values: ReadOnlyBytes, value_offsets: ReadOnlyInt32s,
    value_forms: Bytes, out: Bytes, at: int,
) -> int:  # fmt: skip
    """Write the rows from `first` to `last` to `out`, which must have room. Returns the position after them."""
    fields = len(plan)
    for row in range(first, last):
        for field in range(fields):
            at = _put_part(out, at, texts, text_ends, field)
            kind = plan[field, 0]
            column = plan[field, 1]
            if kind == NUMBER:
                at = _put_number(out, at, numbers[column, row])
            elif kind == NAME:
                at = _put_part(out, at, names, name_ends, name_rows[column, row])
            elif kind == TIME:
                at = _put_time(out, at, times[row])
            elif kind == KEY:
                at = _put_data(out, at, keys, key_offsets[row], key_offsets[row + 1], key_forms[row])
            else:
                at = _put_data(out, at, values, value_offsets[row], value_offsets[row + 1], value_forms[row])
        at = _put_part(out, at, texts, text_ends, fields)
    return at


@kernel_part
def _put_part(out: Bytes, at: int, parts: Bytes, ends: Column, number: int) -> int:
    start = i64(ends[number - 1]) if number > 0 else i64(0)
    length = i64(ends[number]) - start
    copy_bytes(out, at, parts, start, length)
    return at + length


@kernel_part
def _put_number(out: Bytes, at: int, number: int) -> int:
    digits = 1
    rest = u64(number) // u64(10)
    while rest > u64(0):
        digits += 1
        rest //= u64(10)
    rest = u64(number)
    for place in range(at + digits - 1, at - 1, -1):
        tenth = rest // u64(10)
        out[place] = u8(0x30) + u8(rest - tenth * u64(10))
        rest = tenth
    return at + digits


@kernel_part
def _put_padded(out: Bytes, at: int, number: int, digits: int) -> int:
    for place in range(at + digits - 1, at - 1, -1):
        out[place] = 0x30 + number % 10
        number //= 10
    return at + digits


@kernel_part
def _put_null(out: Bytes, at: int) -> int:
    out[at] = 0x6E
    out[at + 1] = 0x75
    out[at + 2] = 0x6C
    out[at + 3] = 0x6C
    return at + 4


@kernel_part
def _put_time(out: Bytes, at: int, time_us: int) -> int:
    """Write a time as ISO 8601, in UTC: `"2026-01-31T09:05:00.000120+00:00"`."""
    if time_us == NO_TIME:
        return _put_null(out, at)
    day = time_us // 86_400_000_000
    of_day_us = time_us - day * 86_400_000_000
    # Howard Hinnant's `civil_from_days`: years start in March, so that the leap day is the last day of its year.
    day += 719_468
    era = day // 146_097
    day_of_era = day - era * 146_097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    out[at] = 0x22
    at = _put_padded(out, at + 1, year, 4)
    out[at] = 0x2D
    at = _put_padded(out, at + 1, month, 2)
    out[at] = 0x2D
    at = _put_padded(out, at + 1, day_of_year - (153 * month_from_march + 2) // 5 + 1, 2)
    out[at] = 0x54
    at = _put_padded(out, at + 1, of_day_us // 3_600_000_000, 2)
    out[at] = 0x3A
    at = _put_padded(out, at + 1, of_day_us // 60_000_000 % 60, 2)
    out[at] = 0x3A
    at = _put_padded(out, at + 1, of_day_us // 1_000_000 % 60, 2)
    out[at] = 0x2E
    at = _put_padded(out, at + 1, of_day_us % 1_000_000, 6)
    copy_bytes(out, at, _UTC, 0, len(_UTC))
    return at + len(_UTC)


@kernel_part
def _put_data(out: Bytes, at: int, data: Bytes, start: int, end: int, form: int) -> int:
    if form == AS_BASE64:
        copy_bytes(out, at, _BASE64_NAME, 0, len(_BASE64_NAME))
        return _put_base64(out, at + len(_BASE64_NAME), data, i64(start), i64(end))
    out[at] = 0x22
    out[at + 1] = 0x3A
    at += 2
    if form == ABSENT:
        return _put_null(out, at)
    if form == AS_JSON:
        return _put_json(out, at, data, i64(start), i64(end))
    return _put_text(out, at, data, i64(start), i64(end))


@kernel_part
def _put_json(out: Bytes, at: int, data: Bytes, start: int, end: int) -> int:
    """Write valid JSON. Its line breaks are white space between tokens: as spaces, they keep the text on one line."""
    for index in range(end - start):
        byte = data[start + index]
        out[at + index] = u8(0x20) if byte == 0x0A or byte == 0x0D else byte
    return at + end - start


@kernel_part
def _put_text(out: Bytes, at: int, data: Bytes, start: int, end: int) -> int:
    out[at] = 0x22
    at += 1
    for index in range(start, end):
        byte = data[index]
        if byte == 0x22 or byte == 0x5C:
            out[at] = 0x5C
            out[at + 1] = byte
            at += 2
        elif byte >= 0x20:
            out[at] = byte
            at += 1
        else:
            out[at] = 0x5C
            out[at + 1] = 0x75
            out[at + 2] = 0x30
            out[at + 3] = 0x30
            out[at + 4] = 0x30 + (byte >> 4)
            low = byte & 0x0F
            out[at + 5] = 0x30 + low if low < 10 else 0x57 + low
            at += 6
    out[at] = 0x22
    return at + 1


@kernel_part
def _put_base64(out: Bytes, at: int, data: Bytes, start: int, end: int) -> int:
    out[at] = 0x22
    at += 1
    while start < end:
        left = end - start
        group = i64(data[start]) << 16
        if left > 1:
            group |= i64(data[start + 1]) << 8
        if left > 2:
            group |= i64(data[start + 2])
        out[at] = _base64_sign(group >> 18)
        out[at + 1] = _base64_sign(group >> 12 & 0x3F)
        out[at + 2] = _base64_sign(group >> 6 & 0x3F) if left > 1 else u8(0x3D)
        out[at + 3] = _base64_sign(group & 0x3F) if left > 2 else u8(0x3D)
        at += 4
        start += 3
    out[at] = 0x22
    return at + 1


@kernel_part
def _base64_sign(number: int) -> int:
    if number < 26:
        return u8(0x41 + number)
    if number < 52:
        return u8(0x61 + number - 26)
    if number < 62:
        return u8(0x30 + number - 52)
    return u8(0x2B) if number == 62 else u8(0x2F)

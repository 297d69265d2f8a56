"""Rows of Arrow columns as JSON objects: the texts are put together column by column, with no Python object per row.

| Arrow | JSON |
|---|---|
| null | `null` |
| booleans, whole numbers, decimals | as they are |
| floating point | as it is; `null` where it is infinite or not a number, which JSON has no word for |
| text | a string |
| dates, times | a string as ISO 8601 writes it; a time stamp with a zone is in UTC, with a Z behind it |
| bytes | a string in base64 |
| lists, structs, maps | arrays and objects; the keys of a map must be text |

`tables` makes documents of it; the exporter uses its texts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.errors import InvalidInput
from headwater.protocol.kernels.memory import ReadOnlyBytes, ReadOnlyInt64s

_NULL = "null"
_TEXT = pa.large_string()
JSON_TEXT = {b"headwater": b"json"}
"""Of a column in an exported file: its texts are JSON."""

_HINT = "Leave the column out, or change its type where the file is made"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
"""In this order: the first one would double what the others have put in."""


def objects_of(batch: pa.RecordBatch, *, keyed: bool = False) -> pa.Array:
    """A JSON object for every row, as text. A member is named as its column. `keyed` is as in `objects`."""
    texts = [
        column.cast(_TEXT) if keyed and JSON_TEXT.items() <= (field.metadata or {}).items() else json_of(column, name)
        for name, field, column in zip(batch.schema.names, batch.schema, batch.columns, strict=True)
    ]
    return objects(batch.schema.names, texts, batch.num_rows, keyed=keyed)


def objects(names: Sequence[str], texts: Sequence[pa.Array], rows: int, *, keyed: bool = False) -> pa.Array:
    """Objects whose members are JSON texts already, by column; a null becomes `null`.

    If they are `keyed`, the first column has no nulls, and those of the others are no members.
    """
    parts: list[Any] = ["{"]
    for number, (name, column) in enumerate(zip(names, texts, strict=True)):
        start = f"{',' if number else ''}{json.dumps(name, ensure_ascii=False)}:"
        text = column.cast(_TEXT)
        if keyed and number:
            parts.append(pc.coalesce(joined([start, text], rows), pa.scalar("", _TEXT)))
        else:
            parts += [start, _nulls_written(text)]
    return joined([*parts, "}"], rows)


def json_of(column: pa.Array, name: str) -> pa.Array:
    """The JSON text of every value of a column, null where that is. `name` is for the error where there is no form."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    for is_one, texts in _FORMS:
        if is_one(column.type):
            return texts(column, name)
    raise InvalidInput(f"column {name!r} is of type {column.type}, which JSON has no form for", hint=_HINT)


# --- single values ----------------------------------------------------------------------------------------------------


def _nulls(column: pa.Array, name: str) -> pa.Array:
    return pa.nulls(len(column), _TEXT)


def _as_written(column: pa.Array, name: str) -> pa.Array:
    return column.cast(_TEXT)


def _real(column: pa.Array, name: str) -> pa.Array:
    if column.type == pa.float16():
        column = column.cast(pa.float32())
    nothing = pa.scalar(None, column.type)
    return pc.if_else(pc.is_finite(column), column, nothing).cast(_TEXT)


def quoted(column: pa.Array, name: str = "") -> pa.Array:
    """Texts as strings of JSON."""
    text = column.cast(_TEXT)
    if pc.any(pc.match_substring_regex(text, r'["\\\x00-\x1f]')).as_py():
        for sign, escape in _ESCAPES:
            text = pc.replace_substring(text, sign, escape)
        text = _without_controls(text)
    return joined(['"', text, '"'], len(text))


def _without_controls(text: pa.Array) -> pa.Array:
    """What is left of control characters is rare."""
    marks = pc.fill_null(pc.match_substring_regex(text, r"[\x00-\x1f]"), False)
    if not pc.any(marks).as_py():
        return text
    controls = {number: f"\\u{number:04x}" for number in range(0x20)}
    plain = [value.translate(controls) for value in text.filter(marks).to_pylist()]
    return pc.replace_with_mask(text, marks, pa.array(plain, _TEXT))


def _base64(column: pa.Array, name: str) -> pa.Array:
    texts = [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
    return quoted(pa.array(texts, _TEXT))


def _time(column: pa.Array, name: str) -> pa.Array:
    return quoted(column.cast(_TEXT))


def _timestamp(column: pa.Array, name: str) -> pa.Array:
    if column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    return quoted(pc.replace_substring(column.cast(_TEXT), " ", "T"))


# --- values made of others --------------------------------------------------------------------------------------------


def _dictionary(column: pa.Array, name: str) -> pa.Array:
    return json_of(column.dictionary_decode(), name)


def _list(column: pa.Array, name: str) -> pa.Array:
    if not isinstance(column, pa.ListArray | pa.LargeListArray):
        column = column.cast(pa.large_list(column.type.value_field))
    return _bracketed(
        "[", _nulls_written(json_of(column.flatten(), name)), "]", lengths=_lengths(column), valid=column.is_valid()
    )


def _map(column: pa.Array, name: str) -> pa.Array:
    if not _is_text(column.type.key_type):
        raise InvalidInput(f"column {name!r} is a map whose keys are no texts", hint=_HINT)
    lists = column.cast(
        pa.list_(pa.struct([pa.field("k", column.type.key_type), pa.field("v", column.type.item_type)]))
    )
    entries = lists.flatten()
    members = joined([quoted(entries.field(0)), ":", _nulls_written(json_of(entries.field(1), name))], len(entries))
    return _bracketed("{", members, "}", lengths=_lengths(lists), valid=column.is_valid())


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).cast(pa.int64()).to_numpy()
    return lengths


def _bracketed(before: str, items: pa.Array, behind: str, *, lengths: NDArray[np.int64], valid: pa.Array) -> pa.Array:
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    members = pc.binary_join(pa.ListArray.from_arrays(offsets, items.cast(pa.string())), ",")
    texts = joined([before, members.cast(_TEXT), behind], len(lengths))
    return pc.if_else(valid, texts, pa.scalar(None, _TEXT))


def _struct(column: pa.Array, name: str) -> pa.Array:
    # `flatten` gives null in the members of a struct that is null itself.
    members = pa.RecordBatch.from_arrays(column.flatten(), names=[field.name for field in column.type])
    return pc.if_else(column.is_valid(), objects_of(members), pa.scalar(None, _TEXT))


def _nulls_written(texts: pa.Array) -> pa.Array:
    return pc.coalesce(texts, pa.scalar(_NULL, _TEXT))


def joined(parts: Sequence[Any], rows: int) -> pa.Array:
    """Texts by row, put together of columns of texts and of texts that are the same in all rows."""
    if all(isinstance(part, str) for part in parts):
        return pa.repeat(pa.scalar("".join(parts), _TEXT), rows)
    scalars = [pa.scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar("", _TEXT))


def _is_text(type_: pa.DataType) -> bool:
    return any(is_one(type_) for is_one in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_bytes(type_: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(is_one(type_) for is_one in kinds)


def _is_list(type_: pa.DataType) -> bool:
    return any(is_one(type_) for is_one in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def text_bytes(texts: pa.Array) -> tuple[ReadOnlyBytes, ReadOnlyInt64s]:
    """The bytes of large texts as they lie in memory, and where each of them begins; the last number is their end."""
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(b"" if data is None else data, dtype=np.uint8), edges


_FORMS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, str], pa.Array]], ...] = (
    (pa.types.is_null, _nulls),
    (pa.types.is_boolean, _as_written),
    (pa.types.is_integer, _as_written),
    (pa.types.is_decimal, _as_written),
    (pa.types.is_floating, _real),
    (_is_text, quoted),
    (_is_bytes, _base64),
    (pa.types.is_date, _time),
    (pa.types.is_time, _time),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_dictionary, _dictionary),
    (pa.types.is_map, _map),
    (_is_list, _list),
    (pa.types.is_struct, _struct),
)
"""The form of each type, the first that is right."""

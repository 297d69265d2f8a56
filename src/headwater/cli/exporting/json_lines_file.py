"""Documents as JSON lines, put together as columns of text.

An object gets the key as its first member, `_key`. Other JSON becomes `{"_key": …, "_value": …}`, and what is no JSON
`{"_key": …, "_value_base64": …}`. Without keys a line is the document itself, and what is no JSON can't be put.
"""

from __future__ import annotations

import base64
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.cli.exporting.left_out import LeftOut
from headwater.cli.exporting.spool import key_texts
from headwater.cli.tailing.json_kernel import AS_JSON, judge_values
from headwater.client.table_json import quoted

KEY_MEMBER = "_key"
_TEXT = pa.large_string()
_OBJECT = r"^\s*\{"
_EMPTY_OBJECT = r"^\s*\{\s*\}\s*$"


class JsonLinesFile:
    """Writes batches of live documents to a file."""

    def __init__(self, file: BinaryIO, left_out: LeftOut, *, with_key: bool) -> None:
        self._file = file
        self._left_out = left_out
        self._with_key = with_key

    def write(self, batch: pa.RecordBatch) -> int:
        """Returns how many documents were put in."""
        keys, are_texts = key_texts(batch.column("key"))
        is_json = are_json(batch)
        if self._with_key:
            batch, is_json, keys = self._without(batch, is_json, keys, are_texts, "the key is not UTF-8")
            lines = _with_keys(quoted(keys), batch.column("value"), is_json)
        else:
            marks = pa.array(is_json)
            batch, is_json, keys = self._without(batch, is_json, keys, marks, "it is not JSON")
            lines = _texts(batch.column("value"))
        self._file.write(_lines(lines))
        return len(lines)

    def end(self) -> None:
        """Nothing stands behind the last line."""

    def _without(
        self, batch: pa.RecordBatch, is_json: NDArray[np.bool_], keys: pa.Array, good: pa.Array, reason: str
    ) -> tuple[pa.RecordBatch, NDArray[np.bool_], pa.Array]:
        if pc.all(good).as_py():
            return batch, is_json, keys
        self._left_out.note(reason, batch.column("key").filter(pc.invert(good)))
        return batch.filter(good), is_json[np.asarray(good)], keys.filter(good)


def are_json(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Which values are JSON. A server that calls a value so may err."""
    values = batch.column("value")
    _, offsets, data = values.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    content = np.frombuffer(b"" if data is None else data, dtype=np.uint8)
    forms = np.empty(len(values), dtype=np.uint8)
    is_there = values.is_valid().to_numpy(zero_copy_only=False)
    judge_values(content, places, is_there, batch.column("datatype").to_numpy(), forms)
    marks: NDArray[np.bool_] = forms == AS_JSON
    return marks


def _with_keys(keys: pa.Array, values: pa.Array, is_json: NDArray[np.bool_]) -> pa.Array:
    if is_json.all():
        return _json_with_keys(keys, _texts(values))
    json_marks = pa.array(is_json)
    other_marks = pa.array(~is_json)
    texts = _json_with_keys(keys.filter(json_marks), _texts(values.filter(json_marks)))
    encoded = [base64.b64encode(value or b"").decode() for value in values.filter(other_marks).to_pylist()]
    others = _joined('{"_key":', keys.filter(other_marks), ',"_value_base64":"', pa.array(encoded, _TEXT), '"}')
    order = np.empty(len(keys), dtype=np.int64)
    order[np.concatenate((np.flatnonzero(is_json), np.flatnonzero(~is_json)))] = np.arange(len(keys))
    return pa.concat_arrays([texts, others]).take(pa.array(order))


def _json_with_keys(keys: pa.Array, texts: pa.Array) -> pa.Array:
    if not len(keys):
        return pa.array([], _TEXT)
    are_objects = pc.match_substring_regex(texts, _OBJECT)
    are_empty = pc.match_substring_regex(texts, _EMPTY_OBJECT)
    # Behind the key comes what is behind the brace of the object.
    rests = pc.replace_substring_regex(texts, _OBJECT, "", max_replacements=1)
    between = pc.if_else(are_empty, pa.scalar("", _TEXT), pa.scalar(",", _TEXT))
    as_members = _joined('{"_key":', keys, between, rests)
    if pc.all(are_objects).as_py():
        return as_members
    return pc.if_else(are_objects, as_members, _joined('{"_key":', keys, ',"_value":', texts, "}"))


def _texts(values: pa.Array) -> pa.Array:
    """Texts on one line each. A line end can't be inside a string of JSON, so it may become a space."""
    texts = values.cast(_TEXT)
    if pc.any(pc.match_substring_regex(texts, "[\r\n]")).as_py():
        texts = pc.replace_substring_regex(texts, "[\r\n]", " ")
    return texts


def _joined(*parts: Any) -> pa.Array:
    scalars = [pa.scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar("", _TEXT))


def _lines(texts: pa.Array) -> memoryview:
    """One behind the other, as they lie in memory."""
    lines = _joined(texts, "\n")
    _, offsets, data = lines.buffers()
    if not len(lines):
        return memoryview(b"")
    places = np.frombuffer(offsets, dtype=np.int64)[lines.offset : lines.offset + len(lines) + 1]
    return memoryview(data)[int(places[0]) : int(places[-1])]

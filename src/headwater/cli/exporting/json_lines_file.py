"""Documents as JSON lines, put together as columns of text.

A line has the form that `client.exported_form` tells, which `headwater load` reads. Without keys it is the document
itself, and what is no JSON can't be put.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.cli.exporting.left_out import LeftOut
from headwater.cli.exporting.spool import key_texts
from headwater.cli.tailing.json_kernel import AS_JSON, judge_values
from headwater.client.exported_form import (
    EXPIRY_MEMBER,
    FLAGS_MEMBER,
    IN_BASE64,
    KEY_MEMBER,
    MEMBERS,
    VALUE_MEMBER,
)
from headwater.client.set_frames import JSON_FLAGS
from headwater.client.table_json import quoted

_TEXT = pa.large_string()
_OBJECT = r"^\s*\{"
_EMPTY_OBJECT = r"^\s*\{\s*\}\s*$"
_OUR_NAMES = rf'"(?:{"|".join(map(re.escape, MEMBERS))})"\s*:'


class JsonLinesFile:
    """Writes batches of live documents to a file."""

    def __init__(self, file: BinaryIO, left_out: LeftOut, *, with_key: bool) -> None:
        self._file = file
        self._left_out = left_out
        self._with_key = with_key

    def write(self, batch: pa.RecordBatch) -> int:
        """Returns how many documents were put in."""
        is_json = are_json(batch)
        if self._with_key:
            lines = _with_heads(_heads(batch), batch.column("value"), is_json)
        else:
            lines = _texts(self._only_json(batch, is_json).column("value"))
        self._file.write(_lines(lines))
        return len(lines)

    def end(self) -> None:
        """Nothing stands behind the last line."""

    def _only_json(self, batch: pa.RecordBatch, is_json: NDArray[np.bool_]) -> pa.RecordBatch:
        if is_json.all():
            return batch
        self._left_out.note("it is not JSON", batch.column("key").filter(pa.array(~is_json)))
        return batch.filter(pa.array(is_json))


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


def _heads(batch: pa.RecordBatch) -> pa.Array:
    """What stands before the documents, up to where their members go on."""
    keys, are_texts = key_texts(batch.column("key"))
    starts = _joined(f'{{"{KEY_MEMBER}":', quoted(keys))
    if not pc.all(are_texts).as_py():
        in_base64 = pa.array([_base64(key) for key in batch.column("key").to_pylist()], _TEXT)
        starts = pc.if_else(are_texts, starts, _joined(f'{{"{KEY_MEMBER}{IN_BASE64}":"', in_base64, '"'))
    flags = _member(FLAGS_MEMBER, batch.column("flags"), default=JSON_FLAGS)
    return _joined(starts, flags, _member(EXPIRY_MEMBER, batch.column("expiry"), default=0))


def _member(name: str, numbers: pa.Array, *, default: int) -> pa.Array:
    """A member for every number but the default."""
    told = _joined(f',"{name}":', numbers.cast(_TEXT))
    return pc.if_else(pc.equal(numbers, default), pa.scalar("", _TEXT), told)


def _with_heads(heads: pa.Array, values: pa.Array, is_json: NDArray[np.bool_]) -> pa.Array:
    if is_json.all():
        return _json_with_heads(heads, _texts(values))
    json_marks = pa.array(is_json)
    other_marks = pa.array(~is_json)
    texts = _json_with_heads(heads.filter(json_marks), _texts(values.filter(json_marks)))
    encoded = pa.array([_base64(value or b"") for value in values.filter(other_marks).to_pylist()], _TEXT)
    others = _joined(heads.filter(other_marks), f',"{VALUE_MEMBER}{IN_BASE64}":"', encoded, '"}')
    order = np.empty(len(heads), dtype=np.int64)
    order[np.concatenate((np.flatnonzero(is_json), np.flatnonzero(~is_json)))] = np.arange(len(heads))
    return pa.concat_arrays([texts, others]).take(pa.array(order))


def _json_with_heads(heads: pa.Array, texts: pa.Array) -> pa.Array:
    if not len(heads):
        return pa.array([], _TEXT)
    are_members = pc.and_(pc.match_substring_regex(texts, _OBJECT), pc.invert(_have_our_names(texts)))
    are_empty = pc.match_substring_regex(texts, _EMPTY_OBJECT)
    # Behind the head comes what is behind the brace of the object.
    rests = pc.replace_substring_regex(texts, _OBJECT, "", max_replacements=1)
    between = pc.if_else(are_empty, pa.scalar("", _TEXT), pa.scalar(",", _TEXT))
    as_members = _joined(heads, between, rests)
    if pc.all(are_members).as_py():
        return as_members
    return pc.if_else(are_members, as_members, _joined(heads, f',"{VALUE_MEMBER}":', texts, "}"))


def _have_our_names(texts: pa.Array) -> pa.Array:
    """Which objects have a member that is called like one of ours."""
    marks = pc.match_substring_regex(texts, _OUR_NAMES)
    if not pc.any(marks).as_py():
        return marks
    # A look at all of it: the name may stand deep inside.
    return pa.array([mark and _has_our_name(text.as_py()) for mark, text in zip(marks.to_pylist(), texts, strict=True)])


def _has_our_name(text: str) -> bool:
    document = json.loads(text, parse_int=str)  # as Python reads no number of thousands of digits
    return isinstance(document, dict) and not document.keys().isdisjoint(MEMBERS)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


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

"""Rows of `changes` to rows of the tables of documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.protocol.datatype import Datatype
from headwater.spark.lake.data_files import numbers

_Array = Any
"""One of Arrow's, chunked or not."""


def document_columns(changes: pa.Table, schema: pa.Schema) -> dict[str, _Array]:
    """The columns of a table of documents that mutations give, by name; `schema` may have more."""
    documents, contents = split_values(changes.column("value"), numbers(changes, "datatype"))
    columns = {"document": documents, "content": contents}
    for name in schema.names:
        if name in changes.schema.names and name not in columns:
            columns[name] = changes.column(name)
    return columns


def split_values(values: pa.ChunkedArray, datatypes: NDArray[np.int16]) -> tuple[_Array, _Array]:
    """The texts of those values that are JSON, and the bytes of all others.

    A value that is called JSON and is no UTF-8 is none: it goes with the others.
    """
    is_json = (datatypes & Datatype.JSON) != 0
    try:
        return _split(values, is_json)
    except pa.ArrowInvalid:
        is_text = np.array([_is_text(value) for value in values.to_pylist()], dtype=np.bool_)
        return _split(values, is_json & is_text)


_NOTHING = pa.scalar(None, pa.binary())


def _split(values: pa.ChunkedArray, is_json: NDArray[np.bool_]) -> tuple[_Array, _Array]:
    if is_json.all():
        return values.cast(pa.string()), pa.nulls(len(values), pa.binary())
    marks = pa.array(is_json)
    return pc.if_else(marks, values, _NOTHING).cast(pa.string()), pc.if_else(marks, _NOTHING, values)


def _is_text(value: bytes | None) -> bool:
    try:
        return value is not None and value.decode() is not None
    except UnicodeDecodeError:
        return False

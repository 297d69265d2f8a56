"""Compile the kernels of this package before a task needs them: that takes seconds, and its result is kept on disk."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.lake.digests import HashIndex, hash_changes, hash_documents, hash_texts
from headwater.lake.key_index import KeyIndex
from headwater.lake.layout import changes_schema, documents_schema
from headwater.lake.typed_columns import TypedColumns


def warm_up() -> None:
    """Call everything that is compiled once, as it is called in earnest."""
    index = KeyIndex(pa.array([b"a", b"b", b"a"]), np.array([1, 2, 3]))
    index.find(pa.array([b"a", b"c"]))
    TypedColumns.from_ddl("n INT, s STRING").parse(pa.array(['{"n": 1, "s": "a"}', None]))
    for schema in (documents_schema(xattrs=True), changes_schema(xattrs=True)):
        row = {field.name: _value(field) for field in schema}
        table = pa.Table.from_pylist([row], schema)
        hashed = (hash_changes if "void" in schema.names else hash_documents)(table, xattrs=True)
        HashIndex(hashed.keys, hashed.seqnos).find(hashed.keys)
    hash_texts(pa.array(["a"]))


def _value(field: pa.Field) -> object:
    values = {"op": "mutation", "key": "a", "document": "{}", "value": b"{}", "void": False}
    return values.get(field.name, None if field.nullable else 0)

"""The sub-document engine: pure functions that look up and change parts of a JSON document by path.

`execute` runs whole requests; the command handler brings the document and writes what comes out. `lookup` and
`mutation` hold the operations, `path` their syntax, and `json_text` the text they work on.
"""

from headwater.node.kv.subdocument.execute import (
    LookedUp,
    Mutated,
    PathFailed,
    Refused,
    lookup_in,
    lookup_one,
    mutate_in,
    mutate_one,
)
from headwater.node.kv.subdocument.virtual_xattrs import Document, NewValue, WriteMacro

__all__ = [
    "Document",
    "LookedUp",
    "Mutated",
    "NewValue",
    "PathFailed",
    "Refused",
    "WriteMacro",
    "lookup_in",
    "lookup_one",
    "mutate_in",
    "mutate_one",
]

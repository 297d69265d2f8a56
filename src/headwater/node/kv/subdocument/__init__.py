"""The sub-document engine: pure functions that look up and change parts of a JSON document by path.

`execute` runs whole requests; the handlers bring the document and write what comes out. `requests` checks what was
asked, `json_text` has paths and lookups, `mutation` the changes, `virtual_xattrs` what is not stored in the document.
"""

from headwater.node.kv.subdocument.execute import (
    LookedUp,
    Mutated,
    PathFailed,
    SubdocRefused,
    lookup_in,
    lookup_one,
    mutate_in,
    mutate_one,
)
from headwater.node.kv.subdocument.virtual_xattrs import NewValue, SubdocDocument, WriteMacro

__all__ = [
    "LookedUp",
    "Mutated",
    "NewValue",
    "PathFailed",
    "SubdocDocument",
    "SubdocRefused",
    "WriteMacro",
    "lookup_in",
    "lookup_one",
    "mutate_in",
    "mutate_one",
]

"""What a consumer holds that does as it is told: a dict of documents, and all versions it has seen, to go back by.

This is the least that a sink of changes has to be. It knows nothing of the client but the rows of its batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""A row of a batch, by column."""

Key = tuple[int, bytes]
"""The id of the collection, and the key in it."""

_REMOVALS = frozenset({"deletion", "expiration"})
_OTHER_EVENTS = frozenset({"collection_created", "collection_modified", "scope_created", "scope_dropped"})


@dataclass(frozen=True, slots=True)
class Document:
    """A version of a document, with enough of it to tell it from any other."""

    seqno: int
    cas: int
    value: bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a row has done, to be done again after a rollback."""

    seqno: int
    key: Key | None = None
    document: Document | None = None
    """None where the key was removed."""
    dropped_collection: int | None = None


class _VBucketState:
    def __init__(self) -> None:
        self.documents: dict[Key, Document] = {}
        self._kept: list[_Kept] = []

    def take(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._apply(kept)

    def roll_back(self, to_seqno: int) -> None:
        self._kept = [kept for kept in self._kept if kept.seqno <= to_seqno]
        self.documents = {}
        for kept in self._kept:
            self._apply(kept)

    def _apply(self, kept: _Kept) -> None:
        if kept.dropped_collection is not None:
            gone = [key for key in self.documents if key[0] == kept.dropped_collection]
            for key in gone:
                del self.documents[key]
        elif kept.key is not None and kept.document is None:
            self.documents.pop(kept.key, None)
        elif kept.key is not None and kept.document is not None:
            self.documents[kept.key] = kept.document


class ConsumerState:
    """Documents by key, over all vbuckets."""

    def __init__(self) -> None:
        self._vbuckets: defaultdict[int, _VBucketState] = defaultdict(_VBucketState)
        self.rollbacks: list[Row] = []
        self.rows = 0

    def apply(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows += 1
            self._apply_row(row)

    def _apply_row(self, row: Row) -> None:
        vbucket = self._vbuckets[row["vbucket"]]
        op, seqno = row["op"], row["seqno"]
        key = (row["collection_id"], row["key"])
        if op == "rollback":
            self.rollbacks.append(row)
            vbucket.roll_back(seqno)
        elif op == "mutation":
            document = Document(seqno, row["cas"], row["value"])
            vbucket.take(_Kept(seqno, key, document))
        elif op in _REMOVALS:
            vbucket.take(_Kept(seqno, key))
        elif op == "collection_dropped":
            vbucket.take(_Kept(seqno, dropped_collection=row["collection_id"]))
        else:
            assert op in _OTHER_EVENTS, f"nobody knows what {op!r} is"

    def documents(self) -> dict[Key, Document]:
        return {key: found for vbucket in self._vbuckets.values() for key, found in vbucket.documents.items()}


def differences(held: Mapping[Key, Document], stored: Mapping[Key, Document]) -> list[str]:
    """What a consumer has wrong, a line a key."""
    keys = sorted(key for key in held.keys() | stored.keys() if held.get(key) != stored.get(key))
    return [f"{key}: held {held.get(key)}, stored {stored.get(key)}" for key in keys]

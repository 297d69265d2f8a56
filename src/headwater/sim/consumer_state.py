"""What a simulated consumer holds: the changes it has seen, vbucket by vbucket, from which its documents follow.

It does as the rows tell it and knows nothing of the client. A rollback takes back what lies above its seqno.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Key = tuple[int, bytes]
Document = tuple[int, int, bytes]
"""Seqno, CAS and value."""
Kept = tuple[int, Key | None, Document | int | None]
"""Seqno, key and what became of it: a document, None where it was removed; or, with no key, a dropped collection."""

_REMOVALS = frozenset({"deletion", "expiration"})
_OTHER_EVENTS = frozenset({"collection_created", "collection_modified", "scope_created", "scope_dropped"})


@dataclass(slots=True)
class ConsumerState:
    """Changes by vbucket, in order."""

    kept: dict[int, list[Kept]] = field(default_factory=dict)
    rollbacks: int = 0

    def copy(self) -> ConsumerState:
        return ConsumerState({vbucket: list(kept) for vbucket, kept in self.kept.items()}, self.rollbacks)

    def apply(self, rows: Iterable[Row], *, ignores_rollbacks: bool = False) -> None:
        for row in rows:
            kept = self.kept.setdefault(row["vbucket"], [])
            op, seqno = row["op"], row["seqno"]
            if op == "rollback":
                self.rollbacks += 1
                if not ignores_rollbacks:
                    while kept and kept[-1][0] > seqno:
                        kept.pop()
            elif op == "mutation":
                kept.append((seqno, (row["collection_id"], row["key"]), (seqno, row["cas"], row["value"])))
            elif op in _REMOVALS:
                kept.append((seqno, (row["collection_id"], row["key"]), None))
            elif op == "collection_dropped":
                kept.append((seqno, None, row["collection_id"]))
            else:
                assert op in _OTHER_EVENTS, f"nobody knows what {op!r} is"

    def documents(self, vbucket: int) -> dict[Key, Document]:
        return documents_of(self.kept.get(vbucket, ()))


def documents_of(changes: Iterable[Kept]) -> dict[Key, Document]:
    """What is there after changes, in their order."""
    documents: dict[Key, Document] = {}
    apply_changes(documents, changes)
    return documents


def apply_changes(documents: dict[Key, Document], changes: Iterable[Kept]) -> None:
    """Bring documents up to date by changes that came later, in their order."""
    for _, key, what in changes:
        if key is None:
            for gone in [other for other in documents if other[0] == what]:
                del documents[gone]
        elif what is None:
            documents.pop(key, None)
        else:
            assert isinstance(what, tuple)
            documents[key] = what

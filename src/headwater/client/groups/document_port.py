"""What a group needs of a key-value store: one document, which is changed only if nobody else has changed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headwater.protocol.numbers import Cas


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as it was read."""

    value: bytes
    cas: Cas


class DocumentPort(Protocol):
    """A way to one document. One call at a time.

    That somebody else was faster is a value, and no error. It may even have been an earlier attempt of our own whose
    answer was lost. An error of `add` or `replace` leaves open whether the write took place, or will yet.
    """

    async def read(self) -> StoredDocument | None:
        """The document, or None where there is none."""

    async def add(self, value: bytes) -> Cas | None:
        """The CAS of the new document, or None where there is one already."""

    async def replace(self, value: bytes, cas: Cas) -> Cas | None:
        """The new CAS, or None where the document has changed since the given one, or is gone."""

    async def close(self) -> None:
        """Let go of connections. The port is of no further use."""

"""Numbers with what they count: `1 document`, `2,000 documents`."""

from __future__ import annotations


def counted(count: int, noun: str, *, plural: str | None = None) -> str:
    """`plural` is for nouns that do not just get an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"

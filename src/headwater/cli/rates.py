"""How much was done in what time, and how fast, where that tells something."""

from __future__ import annotations

from headwater.counted import counted

COUNT_MIN = 1000
SECONDS_MIN = 1.0
"""Below these, a rate is about how a run begins and ends."""


def tells_rate(count: int, seconds: float) -> bool:
    return count >= COUNT_MIN and seconds >= SECONDS_MIN


def documents_in(documents: int, seconds: float, *, and_rate: str = "") -> str:
    """`and_rate` is told behind the rate of documents, or not at all."""
    sentence = f"{counted(documents, 'document')} in {seconds:.2f} s"
    if not tells_rate(documents, seconds):
        return sentence
    return f"{sentence}: {documents / seconds:,.0f} documents/s{and_rate}"

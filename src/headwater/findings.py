"""What is not as it should be, for people and for monitoring: findings, the worst first, and the verdict they make.

A node, a landing and `headwater health` say what they find in these words, and a script finds the same members in each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Level(StrEnum):
    """How bad it is, worst first."""

    BAD = "bad"
    """Something does not work, or data can be lost now."""
    WARN = "warn"
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be."""

    check: str
    level: Level
    text: str
    do: str
    """What ends it, as a sentence."""
    page: str = "overview"
    """The page of the dashboard that has more on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The worst finding, and all of them."""

    level: Level
    text: str
    do: str
    findings: tuple[Finding, ...]
    """Worst first; the first of them is the verdict."""

    @classmethod
    def of(cls, found: Iterable[Finding], *, well: str, **more: Any) -> Self:
        """The verdict on what was found; `well` is its text where nothing was. `more` are members of a subclass."""
        findings = worst_first(found)
        worst = findings[0] if findings else Finding(check="", level=Level.OK, text=well, do="")
        return cls(level=worst.level, text=worst.text, do=worst.do, findings=findings, **more)

    def show(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of one level stay in their order."""
    order = list(Level)
    return tuple(sorted(findings, key=lambda one: order.index(one.level)))

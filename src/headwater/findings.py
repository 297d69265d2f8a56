"""Problems that a node, a landing or `headwater health` reports: findings, worst first, and the verdict on them.

People and monitoring read them. All three use these types, so that a script finds the same members in each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Level(StrEnum):
    """How severe it is, worst first."""

    BAD = "bad"
    """Something does not work, or data can be lost now."""
    WARN = "warn"
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem."""

    check: str
    level: Level
    text: str
    do: str
    """What to do about it, as a sentence."""
    page: str = "overview"
    """The page of the dashboard with details."""


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
        """The verdict on the findings. `well` is its text if there are none; `more` are members of a subclass."""
        findings = worst_first(found)
        worst = findings[0] if findings else Finding(check="", level=Level.OK, text=well, do="")
        return cls(level=worst.level, text=worst.text, do=worst.do, findings=findings, **more)

    def show(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by level. Those of one level keep their order."""
    order = list(Level)
    return tuple(sorted(findings, key=lambda one: order.index(one.level)))

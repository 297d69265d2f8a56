"""Tables, and the page they are written to."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "performance.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One benchmark's outcome."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        lines = [f"## {self.title}", "", self.text, "", _row(self.columns), _row(["---"] * len(self.columns))]
        return "\n".join([*lines, *(_row(row) for row in self.rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """What the figures were measured on."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, "
        f"Python {platform.python_version()}, numba {version('numba')}, pyarrow {version('pyarrow')}"
    )


def _processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in _cpu_info() if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write_page(sections: Sequence[Section], command: str) -> None:
    head = [
        "# Performance",
        "",
        "Written by `make bench`; do not edit. Compare figures only with those beside them: the ratios were measured "
        "in one run, in turns.",
        "",
        f"- Command: `{command}`",
        f"- Date: {datetime.now(UTC):%Y-%m-%d}",
        f"- Machine: {machine()}",
        "",
    ]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(head) + "\n" + "\n\n".join(section.to_markdown() for section in sections) + "\n")

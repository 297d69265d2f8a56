"""Goals, tables, and the page that they are written to."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "performance.md"


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal for a figure, and its measured value, which is `None` if it could not be measured."""

    work: str
    wanted: float
    measured: float | None
    unit: str = ""
    at_most: bool = False

    def is_met_by(self, measured: float) -> bool:
        return measured <= self.wanted if self.at_most else measured >= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The result of one benchmark."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    goals: Sequence[Goal] = ()

    def to_markdown(self) -> str:
        lines = [f"## {self.title}", "", self.text, "", _row(self.columns), _row(["---"] * len(self.columns))]
        return "\n".join([*lines, *(_row(row) for row in self.rows)])


def goals_section(runs: Sequence[Sequence[Section]]) -> Section:
    """Return every goal with its median over all runs, and its spread if there are several."""
    goals = [goal for section in runs[0] for goal in section.goals]
    rows: list[list[str]] = []
    met = 0
    for at, goal in enumerate(goals):
        figures = [[found for section in run for found in section.goals][at].measured for run in runs]
        known = [figure for figure in figures if figure is not None]
        wanted = f"{'≤' if goal.at_most else '≥'} {_figure(goal.wanted)}{goal.unit}"
        if not known:
            rows.append([goal.work, wanted, "unknown", "", "not measured"])
            continue
        median = statistics.median(known)
        spread = f"{_figure(min(known))} to {_figure(max(known))}" if len(known) > 1 else ""
        met += goal.is_met_by(median)
        rows.append(
            [
                goal.work,
                wanted,
                f"{_figure(median)}{goal.unit}",
                spread,
                "met" if goal.is_met_by(median) else "**missed**",
            ]
        )
    return Section(
        title="Goals",
        text=(
            f"{met} of {len(goals)} goals are met. A figure is that of the section below that describes the work; "
            "ratios are of figures measured in turns. "
            + (f"Medians of {len(runs)} whole runs, with the least and the most." if len(runs) > 1 else "One run.")
        ),
        columns=["work", "goal", "measured", "spread", ""],
        rows=rows,
    )


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """Describe the machine that the figures were measured on."""
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

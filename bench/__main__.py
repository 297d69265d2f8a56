"""`python -m bench [--runs N] [NAME]…`: run the named benchmarks, or run all of them and write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from bench import (
    client,
    decoding,
    engines,
    growth,
    key_value,
    landing,
    large_values,
    merges,
    replication,
    startup,
    streaming,
    tables,
)
from bench.measure import SCALE
from bench.report import Section, goals_section, write_page

BENCHMARKS: dict[str, Callable[[], Section | Sequence[Section]]] = {
    "decoding": decoding.run,
    "sets": key_value.run_sets,
    "reads": key_value.run_reads,
    "mixed": key_value.run_mixed,
    "load": key_value.run_load,
    "small-sets": key_value.run_small_sets,
    "streaming": streaming.run_backfill,
    "filtered": streaming.run_filtered,
    "live": streaming.run_live,
    "idle": streaming.run_idle,
    "fan-out": streaming.run_fan_out,
    "large-values": large_values.run,
    "drain": client.run_drain,
    "replication": replication.run,
    "startup": startup.run,
    "landing": landing.run,
    "tables": tables.run,
    "merges": merges.run,
    "growth": growth.run,
}
DECISIONS: dict[str, Callable[[], Section | Sequence[Section]]] = {"engines": engines.run}
"""Benchmarks that back an earlier decision; they run only by name."""


def main() -> int:
    known = BENCHMARKS | DECISIONS
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all but the last by default"
    )
    parser.add_argument("--runs", type=int, default=1, help="how often everything runs, for the spread of each goal")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]}; there are: {', '.join(known)}")
    runs = [_run(arguments.names or list(BENCHMARKS)) for _ in range(arguments.runs)]
    goals = goals_section(runs)
    print(goals.to_markdown())
    if not arguments.names and SCALE == 1:
        write_page([goals, *runs[-1]], "make bench")
    return 0


def _run(names: Sequence[str]) -> list[Section]:
    sections: list[Section] = []
    for name in names:
        print(f"running {name} …", file=sys.stderr)
        made = (BENCHMARKS | DECISIONS)[name]()
        for section in [made] if isinstance(made, Section) else made:
            print(section.to_markdown(), end="\n\n", flush=True)
            sections.append(section)
    return sections


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench [NAME]…`: run the benchmarks; with no name run them all and write the page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench import client, decoding, engines, growth, key_value, landing, merges, replication, startup, streaming, tables
from bench.measure import SCALE
from bench.report import Section, write_page

BENCHMARKS: dict[str, Callable[[], Section | Sequence[Section]]] = {
    "decoding": decoding.run,
    "sets": key_value.run_sets,
    "reads": key_value.run_reads,
    "load": key_value.run_load,
    "small-sets": key_value.run_small_sets,
    "streaming": streaming.run_backfill,
    "filtered": streaming.run_filtered,
    "live": streaming.run_live,
    "idle": streaming.run_idle,
    "fan-out": streaming.run_fan_out,
    "drain": client.run_drain,
    "replication": replication.run,
    "startup": startup.run,
    "landing": landing.run,
    "tables": tables.run,
    "merges": merges.run,
    "growth": growth.run,
}
DECISIONS: dict[str, Callable[[], Section | Sequence[Section]]] = {"engines": engines.run}
"""Benchmarks that back a decision once made; run by name only."""


def main(names: list[str]) -> int:
    known = BENCHMARKS | DECISIONS
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown benchmark {unknown[0]}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    sections: list[Section] = []
    for name in names or BENCHMARKS:
        print(f"running {name} …", file=sys.stderr)
        made = known[name]()
        for section in [made] if isinstance(made, Section) else made:
            print(section.to_markdown(), end="\n\n", flush=True)
            sections.append(section)
    if not names and SCALE == 1:
        write_page(sections, "make bench")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m bench [NAME]…`: run the benchmarks; with no name run them all and write the page."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import decoding, engines, key_value, streaming
from bench.report import Section, write_page

BENCHMARKS: dict[str, Callable[[], Section]] = {
    "decoding": decoding.run,
    "sets": key_value.run_sets,
    "load": key_value.run_load,
    "streaming": streaming.run_backfill,
    "filtered": streaming.run_filtered,
    "live": streaming.run_live,
    "idle": streaming.run_idle,
}
DECISIONS: dict[str, Callable[[], Section]] = {"engines": engines.run}
"""Benchmarks that back a decision once made; run by name only."""


def main(names: list[str]) -> int:
    known = BENCHMARKS | DECISIONS
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown benchmark {unknown[0]}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    sections = []
    for name in names or BENCHMARKS:
        print(f"running {name} …", file=sys.stderr)
        section = known[name]()
        print(section.to_markdown(), end="\n\n", flush=True)
        sections.append(section)
    if not names:
        write_page(sections, "make bench")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

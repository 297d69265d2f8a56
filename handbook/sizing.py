"""A model of what a bucket of a given size needs. Its constants are the figures of the last measurement.

`make bench` has written `docs/internals/performance.md`. The figures are rounded to two digits, to the careful
side, so that the tables do not change with every run. Beyond the measured machine, everything is assumed to grow in
proportion: nodes share only the vbuckets that they hand to each other, and the tasks of a landing share nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from handbook.markdown import table

MEASURED = Path(__file__).parents[1] / "docs" / "internals" / "performance.md"

FRAME_BYTES = 55
"""The bytes of a change on disk, besides its key and its value."""
DISK_FACTOR = 1.5
"""Room for the history window and for compaction. An estimate."""
NODE_MEMORY_BYTES = 48 * 10**9
"""The part of a machine's 64 GB that its node may use."""
EXECUTOR_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one machine has achieved in measurements, rounded to the careful side."""

    node_bytes: int
    """Memory of a node's process per document, just after loading it."""
    node_writes_s: int
    """Durable sets of documents of 200 bytes that a node accepts per second."""
    node_opens_s: int
    """Documents that a node reads per second when it restarts."""
    core_lands_s: int
    """Documents that a core lands per second, including the share of the node and of Spark."""

    @classmethod
    def read(cls, page: str) -> Figures:
        cores = _figure(page, r"^- Machine: .*?(\d+) cores")
        return cls(
            node_bytes=_careful(_figure(page, r"^\| 4 M \| \d+ k/s \| \d+ MB \| (\d+) MB \|"), up=True),
            node_writes_s=_careful(_figure(page, r"^\| 4 M \| (\d+) k/s \|") * 1000),
            node_opens_s=_careful(4e6 / _figure(page, r"^\| 4 M, after kill -9 \| ready in ([\d.]+) s")),
            core_lands_s=_careful(_figure(page, r"^\| 4 M \| [\d.]+ s \| (\d+) k/s \|") * 1000 / cores),
        )


def _figure(page: str, pattern: str) -> float:
    found = re.search(pattern, page, re.M)
    if found is None:
        raise LookupError(f"{MEASURED} has no figure like {pattern}: fit the model to what `make bench` writes now")
    return float(found[1])


def _careful(figure: float, *, up: bool = False) -> int:
    """Round to two digits, never better than measured."""
    step = 10 ** max(0, math.floor(math.log10(figure)) - 1)
    return int((math.ceil if up else math.floor)(figure / step) * step)


def speed_sentence() -> str:
    """Return README's sentence about speed: that of a whole landing, into both tables."""
    page = MEASURED.read_text(encoding="utf-8")
    cores = _figure(page, r"^- Machine: .*?(\d+) cores")
    rate = _figure(page, r"^\| 4 M \| [\d.]+ s \| (\d+) k/s \|") * 1000
    return (
        f"A landing takes **{rate:,.0f} documents a second** from the bucket into the tables, on a machine with "
        f"{cores:.0f} cores that the bucket's node shares ([measured](docs/internals/performance.md#landing-a-bucket))."
    )


@cache
def figures() -> Figures:
    return Figures.read(MEASURED.read_text(encoding="utf-8"))


# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    documents: int
    key_bytes: int = 20
    value_bytes: int = 200
    copies: int = 2
    """The active copy and the replicas."""
    first_landing_s: int = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    nodes: int
    memory_bytes: int
    disk_bytes: int
    landing_cores: int
    executors: int
    load_s: float
    """The minimum time to load the documents."""
    restart_s: float
    """The time until a killed node is ready again."""


def size_of(load: Load, measured: Figures) -> Size:
    stored = load.documents * load.copies
    memory_bytes = stored * measured.node_bytes
    nodes = max(load.copies, math.ceil(memory_bytes / NODE_MEMORY_BYTES))
    cores = math.ceil(load.documents / measured.core_lands_s / load.first_landing_s)
    return Size(
        nodes=nodes,
        memory_bytes=memory_bytes,
        disk_bytes=int(stored * (load.key_bytes + load.value_bytes + FRAME_BYTES) * DISK_FACTOR),
        landing_cores=cores,
        executors=math.ceil(cores / EXECUTOR_CORES),
        load_s=load.documents * load.copies / nodes / measured.node_writes_s,
        restart_s=stored / nodes / measured.node_opens_s,
    )


def sizing_table() -> str:
    rows = []
    for name, documents in (("10 M", 10**7), ("1 G", 10**9), ("100 G", 10**11)):
        size = size_of(Load(documents=documents), figures())
        rows.append(
            (
                name,
                f"{size.nodes:,}",
                _bytes(size.memory_bytes),
                _bytes(size.disk_bytes),
                _time(size.load_s),
                _time(size.restart_s),
                f"{size.landing_cores:,}",
                f"{size.executors:,}",
            )
        )
    head = (
        "documents", "nodes", "memory of all", "disk of all", "to load it, at best", "a killed node is ready in",
        "cores that land", f"executors of {EXECUTOR_CORES} cores",
    )  # fmt: skip
    return table(head, rows)


def sizing_formulas() -> str:
    measured = figures()
    return f"""```text
memory of all nodes  = documents × copies × {measured.node_bytes} bytes
disk of all nodes    = documents × copies × (key + value + {FRAME_BYTES} bytes) × {DISK_FACTOR}
nodes                = max(copies, memory of all nodes / {NODE_MEMORY_BYTES // 10**9} GB)
writes a second      = nodes / copies × {measured.node_writes_s:,}
ready after          = documents × copies / nodes / {measured.node_opens_s:,} a second
cores that land      = documents / {measured.core_lands_s:,} a second / seconds that the first landing may take
```"""


# --- several nodes on one machine ---------------------------------------------------------------------------------

WORKS = ("load", "stream", "land")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCosts:
    """Processor time of a kind of work for a million documents: that of the nodes, and that of everything else."""

    node_s: float
    others_s: float

    def rate(self, *, nodes: int, cores: int) -> float:
        """Return the documents per second at best: a node uses one core, and all programs share the machine's cores."""
        return 1e6 * min(nodes / self.node_s, cores / (self.node_s + self.others_s))


def work_costs(page: str) -> dict[str, WorkCosts]:
    """Return costs fitted to the figures of two nodes on the measured machine, where they had no core to spare."""
    cores = _figure(page, r"^- Machine: .*?(\d+) cores")
    costs = {}
    for place, work in enumerate(WORKS):
        rate = _figure(page, rf"^\| 2 \|(?: \d+ k/s \|){{{place}}} (\d+) k/s \|") * 1e3
        node_s = _figure(page, rf"^\| 2 \|(?: \d+ k/s \|){{3}}(?: [\d.]+ s/M \|){{{place}}} ([\d.]+) s/M \|")
        costs[work] = WorkCosts(node_s=node_s, others_s=max(0.0, cores * 1e6 / rate - node_s))
    return costs


def nodes_table() -> str:
    costs = work_costs(MEASURED.read_text(encoding="utf-8"))
    rows = [
        (
            f"{nodes} on {cores} cores",
            *(f"{costs[work].rate(nodes=nodes, cores=cores) / 1e3:,.0f} k/s" for work in WORKS),
        )
        for nodes, cores in ((1, 2), (2, 2), (2, 8), (8, 16), (8, 32))
    ]
    return table(("nodes", *WORKS), rows)


def _bytes(amount: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.0f} EB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

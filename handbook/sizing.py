"""A model of what a bucket of some size needs, with constants from the measured figures.

The constants are those of `docs/internals/performance.md` and `docs/internals/lake.md`, rounded to the careful side. A
test holds them against the figures that were measured last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from handbook.markdown import table

NODE_BYTES_PER_DOCUMENT = 200
"""Memory of a node's process for a document, just after loading it: 194 MB a million were measured."""
FRAME_BYTES = 55
"""Of a change on disk, beside its key and its value."""
DISK_FACTOR = 1.5
"""Room for the history window and for compaction."""
WRITES_PER_NODE_S = 350_000
"""Durable sets of 200 bytes: 350,000 to 395,000 a second were measured."""
DRAIN_CPU_S_PER_MILLION = 0.46
"""Of a client, network to Arrow."""
CHANGES_CPU_S_PER_MILLION = 0.9
"""Arrow to files of `changes`."""
DOCUMENTS_CPU_S_PER_MILLION = 1.1
"""A first build of `documents`."""
SPARK_FACTOR = 2.0
"""What Spark adds: moving rows between its processes, and cores that wait at the end of a stage. Not measured apart."""

NODE_MEMORY_BYTES = 48 * 10**9
"""Of a machine with 64 GB, what its node's index may take."""
EXECUTOR_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    documents: int
    key_bytes: int = 20
    value_bytes: int = 200
    copies: int = 2
    """Active and replica."""
    first_landing_s: int = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    nodes: int
    memory_bytes: int
    disk_bytes: int
    landing_cores: int
    executors: int


def size_of(load: Load) -> Size:
    stored = load.documents * load.copies
    memory_bytes = stored * NODE_BYTES_PER_DOCUMENT
    by_memory = math.ceil(memory_bytes / NODE_MEMORY_BYTES)
    nodes = max(load.copies, by_memory)
    disk_bytes = int(stored * (load.key_bytes + load.value_bytes + FRAME_BYTES) * DISK_FACTOR)
    cores = max(1, math.ceil(landing_cpu_s(load.documents) / load.first_landing_s))
    return Size(
        nodes=nodes,
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        landing_cores=cores,
        executors=math.ceil(cores / EXECUTOR_CORES),
    )


def landing_cpu_s(documents: int) -> float:
    per_million = DRAIN_CPU_S_PER_MILLION + CHANGES_CPU_S_PER_MILLION + DOCUMENTS_CPU_S_PER_MILLION
    return documents / 1e6 * per_million * SPARK_FACTOR


def sizing_table() -> str:
    rows = []
    for name, documents in (("10 M", 10**7), ("1 G", 10**9), ("100 G", 10**11)):
        load = Load(documents=documents)
        size = size_of(load)
        rows.append(
            (
                name,
                f"{size.nodes:,}",
                _bytes(size.memory_bytes),
                _bytes(size.disk_bytes),
                f"{size.landing_cores:,}",
                f"{size.executors:,}",
                _time(documents / (WRITES_PER_NODE_S * max(1, size.nodes // load.copies))),
            )
        )
    head = (
        "documents", "nodes", "memory of all", "disk of all", "cores that land", f"executors of {EXECUTOR_CORES} cores",
        "to load it, at best",
    )  # fmt: skip
    return table(head, rows)


def sizing_formulas() -> str:
    cpu = DRAIN_CPU_S_PER_MILLION + CHANGES_CPU_S_PER_MILLION + DOCUMENTS_CPU_S_PER_MILLION
    return f"""```text
memory of all nodes  = documents × copies × {NODE_BYTES_PER_DOCUMENT} bytes
disk of all nodes    = documents × copies × (key + value + {FRAME_BYTES} bytes) × {DISK_FACTOR}
nodes                = max(copies, memory of all nodes / {NODE_MEMORY_BYTES // 10**9} GB)
cores that land      = documents / 1 M × ({cpu:.2f} s × {SPARK_FACTOR:.0f}) / seconds that the first landing may take
writes a second      = nodes / copies × {WRITES_PER_NODE_S:,}
```"""


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

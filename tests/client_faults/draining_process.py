"""Reads a bucket to its end in a process of its own, and prints how far its memory has grown meanwhile, as JSON.

    python draining_process.py SMALL_URL URL CLIENT SPEED

Before, it reads the small bucket: what is loaded and compiled for that is not counted. CLIENT is `asyncio` or
`blocking`; SPEED is `fast`, `slow` (it rests after every batch) or `stopped` (it rests for long after some).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import headwater
from node_process import PASSWORD, USER

REST_S = 0.02
LONG_REST_S = 1.0
LONG_RESTS = frozenset({1, 7})
"""After the batches with these numbers."""

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


def memory_bytes(field: str) -> int:
    """`VmRSS` is what is held now, `VmHWM` the peak of that."""
    found = re.search(rf"{field}:\s+(\d+) kB", (_PROCESS / "status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def rest_s(speed: str, batch: int) -> float:
    if speed == "stopped":
        return LONG_REST_S if batch in LONG_RESTS else 0.0
    return REST_S if speed == "slow" else 0.0


async def drain_with_asyncio(url: str, speed: str) -> tuple[int, int]:
    rows = batches = 0
    async with headwater.connect(url, user=USER, password=PASSWORD) as client:
        async for batch in client.batches(end="now"):
            rows += batch.num_rows
            batches += 1
            await asyncio.sleep(rest_s(speed, batches))
    return rows, batches


def drain(url: str, client_kind: str, speed: str) -> tuple[int, int]:
    """Returns the number of rows, and of batches."""
    if client_kind == "asyncio":
        return asyncio.run(drain_with_asyncio(url, speed))
    rows = batches = 0
    with headwater.blocking.connect(url, user=USER, password=PASSWORD) as client:
        for batch in client.batches(end="now"):
            rows += batch.num_rows
            batches += 1
            time.sleep(rest_s(speed, batches))
    return rows, batches


def main(small_url: str, url: str, client_kind: str, speed: str) -> None:
    drain(small_url, client_kind, "fast")
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    before_bytes = memory_bytes("VmRSS")
    began_s = time.monotonic()
    rows, batches = drain(url, client_kind, speed)
    took_s = time.monotonic() - began_s
    grown_bytes = memory_bytes("VmHWM") - before_bytes
    print(json.dumps({"rows": rows, "batches": batches, "grown_bytes": grown_bytes, "took_s": took_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Reads a bucket to its end in a separate process, and prints the cost as JSON.

    python draining_process.py memory SMALL_URL URL CLIENT SPEED

prints how much its memory has grown. It reads the small bucket first, so that loaded and compiled code is not
counted. CLIENT is `asyncio` or `blocking`; SPEED is `fast`, `slow` (it pauses after every batch) or `stopped` (it
pauses for long after some batches).

    python draining_process.py few-files URL FILES_MAX

may have at most FILES_MAX files open, and no memory for incomplete snapshots.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import headwater
from support.node_process import PASSWORD, USER

REST_S = 0.02
LONG_REST_S = 1.0
LONG_RESTS = frozenset({1, 7})
"""The numbers of the batches that a long pause follows."""

SMALL_WINDOW_BYTES = 20_000

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


def memory_bytes(field: str) -> int:
    """Return `VmRSS`, the memory held now, or `VmHWM`, its peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", (_PROCESS / "status").read_text())
    return int(found.group(1)) * 1024


def rest_s(speed: str, batch: int) -> float:
    if speed == "stopped":
        return LONG_REST_S if batch in LONG_RESTS else 0.0
    return REST_S if speed == "slow" else 0.0


async def drain_with_asyncio(url: str, speed: str, **options: Any) -> tuple[int, int]:
    rows = batches = 0
    async with headwater.connect(url, user=USER, password=PASSWORD) as client:
        async for batch in client.batches(end="now", **options):
            rows += batch.num_rows
            batches += 1
            await asyncio.sleep(rest_s(speed, batches))
    return rows, batches


def drain(url: str, client_kind: str, speed: str) -> tuple[int, int]:
    """Return the number of rows, and of batches."""
    if client_kind == "asyncio":
        return asyncio.run(drain_with_asyncio(url, speed))
    rows = batches = 0
    with headwater.blocking.connect(url, user=USER, password=PASSWORD) as client:
        for batch in client.batches(end="now"):
            rows += batch.num_rows
            batches += 1
            time.sleep(rest_s(speed, batches))
    return rows, batches


def tell_memory(small_url: str, url: str, client_kind: str, speed: str) -> None:
    drain(small_url, client_kind, "fast")
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    before_bytes = memory_bytes("VmRSS")
    began_s = time.monotonic()
    rows, batches = drain(url, client_kind, speed)
    took_s = time.monotonic() - began_s
    grown_bytes = memory_bytes("VmHWM") - before_bytes
    print(json.dumps({"rows": rows, "batches": batches, "grown_bytes": grown_bytes, "took_s": took_s}))


def tell_with_few_files(url: str, files_max: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files_max), int(files_max)))
    rows, batches = asyncio.run(drain_with_asyncio(url, "fast", held_bytes_max=0, buffer_bytes=SMALL_WINDOW_BYTES))
    print(json.dumps({"rows": rows, "batches": batches}))


if __name__ == "__main__":
    {"memory": tell_memory, "few-files": tell_with_few_files}[sys.argv[1]](*sys.argv[2:])

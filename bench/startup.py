"""From the shell to the first output: processor time of commands, and a small landing compared with a Spark job."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.measure import load_now, scaled
from bench.processes import HEADWATER, LOGIN, data_folder, load, node
from bench.report import Goal, Section

ROUNDS = 5
DOCUMENTS = scaled(1_000)
_VARIABLES = {
    "HEADWATER_USER": LOGIN.user,
    "HEADWATER_PASSWORD": LOGIN.password,
    "PYSPARK_PYTHON": sys.executable,
    "PYTHONDONTWRITEBYTECODE": "",  # Keep compiled modules, as an installation does
}

_TRIVIAL_JOB = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(4).mapInArrow(lambda batches: batches, "id BIGINT").collect()
spark.stop()
"""


def run() -> Sequence[Section]:
    with data_folder() as folder, node(folder / "node") as server:
        url = f"{server.url}/{LOGIN.bucket}"
        load(server.url, "--generate", str(DOCUMENTS))
        landing, trivial = _in_turns(
            lambda: _landing_s(url, folder / "lake"), lambda: _seconds([sys.executable, "-c", _TRIVIAL_JOB])
        )
        # The tables of the last landing still exist.
        commands = {
            "python -c 'import pyarrow'": [sys.executable, "-c", "import pyarrow"],
            "headwater --version": [*HEADWATER, "--version"],
            "headwater tail --limit 1": [*HEADWATER, "tail", url, "--limit", "1"],
            "headwater load --generate 1": [*HEADWATER, "load", url, "--generate", "1"],
            f"headwater verify, {DOCUMENTS:,} documents": [*HEADWATER, "verify", url, str(folder / "lake")],
        }
        cpu_s = _in_turns(*(lambda command=command: _cpu_s(command) for command in commands.values()))
    return [
        Section(
            title="Commands, from the shell to the prompt",
            text=f"Processor time of the command's own process, the median of {ROUNDS} turns; the bucket has 1,024 "
            f"vbuckets. Load of the machine: {load_now()}.",
            columns=("command", "processor time"),
            rows=[(f"`{name}`", f"{seconds:.2f} s") for name, seconds in zip(commands, cpu_s, strict=True)],
            goals=[
                Goal(f"`{name}` to the prompt, processor time", 0.4, seconds, " s", at_most=True)
                for name, seconds in list(zip(commands, cpu_s, strict=True))[2:]
            ],
        ),
        Section(
            title=f"A landing of {DOCUMENTS:,} documents, from the shell to the prompt",
            text="`headwater land --once` into a new lake, in turns with a program that starts a Spark session, runs "
            f"one job with a Python function and stops; medians of {ROUNDS} turns.",
            columns=("program", "seconds", "of the trivial job"),
            rows=[
                ("a trivial job of Spark", f"{trivial:.1f}", "1.0"),
                ("`headwater land --once`", f"{landing:.1f}", f"{landing / trivial:.2f}"),
            ],
            goals=[
                Goal("`land --once` of 1,000 documents, of a trivial Spark job", 1.2, landing / trivial, at_most=True)
            ],
        ),
    ]


def _in_turns(*tasks: Callable[[], float]) -> list[float]:
    """Return the median of what each task returns, after a turn that does not count."""
    figures = [[task() for task in tasks] for _ in range(ROUNDS + 1)]
    return [statistics.median(column) for column in zip(*figures[1:], strict=True)]


def _landing_s(url: str, lake: Path) -> float:
    shutil.rmtree(lake, ignore_errors=True)
    return _seconds([*HEADWATER, "land", url, "--into", str(lake), "--once"])


def _seconds(command: Sequence[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ | _VARIABLES)
    return time.perf_counter() - start_s


def _cpu_s(command: Sequence[str]) -> float:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | _VARIABLES
    )
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"{command} failed"
    return used.ru_utime + used.ru_stime

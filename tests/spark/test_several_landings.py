"""Several pipelines of a file in one process, with real nodes: what they share, and what they do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from headwater.errors import QueryFailed
from headwater.landing.tasks import LocalRunner, TaskSlots
from headwater.spark.executors import SparkRunner
from support.fault_proxy import free_port
from support.landings import LOGIN, SourceBucket, check_tables, run_headwater

WAIT_S_MAX = 60.0
STOPPED_S_MAX = 20.0
"""With Python's own start and end, on a machine that does other things as well."""


@pytest.fixture
def file(bucket: SourceBucket, other_bucket: SourceBucket, tmp_path: Path) -> Iterator[Path]:
    """Two pipelines of one bucket, one of another, and one whose bucket does not exist."""
    bucket.put(bucket.keys("a", 3, vbucket=1), b'{"n": 1}')
    other_bucket.put(other_bucket.keys("b", 2, vbucket=2), b'{"n": 2}')
    urls = {"shop": bucket.url, "twin": bucket.url, "a hotel": other_bucket.url, "bad": f"{bucket.url}-not"}
    file = tmp_path / "headwater.toml"
    file.write_text(
        "".join(
            f"[pipelines.'{name}']\nurl = '{url}'\ninto = '{tmp_path / name}'\nrunner = 'local'\ngroups = 2\n"
            for name, url in urls.items()
        )
    )
    yield file
    other_bucket.close()


def test_all_pipelines_land_once_and_are_verified(
    file: Path, bucket: SourceBucket, other_bucket: SourceBucket, tmp_path: Path
) -> None:
    landed = run_headwater("land", "--all", "--once", "--config", str(file))
    assert landed.returncode == 1, landed.stderr
    [error] = [line for line in landed.stderr.splitlines() if line.startswith("Error")]
    assert error.startswith("Error: bad: ")
    said = {line.partition(" landed")[0] for line in landed.stderr.splitlines() if " landed" in line}
    assert said == {"shop: 3 changes", "twin: 3 changes", "a hotel: 2 changes"}
    for name, of in (("shop", bucket), ("twin", bucket), ("a hotel", other_bucket)):
        check_tables(of, tmp_path / name)
    good = run_headwater("land", "shop", "a hotel", "--once", "--json", "--config", str(file))
    assert (good.returncode, good.stdout) == (0, "")
    verified = run_headwater("verify", "--all", "--json", "--config", str(file))
    assert verified.returncode == 1
    found = [json.loads(line) for line in verified.stdout.splitlines()]
    assert [(one["pipeline"], one["equal"]) for one in found] == [("shop", True), ("twin", True), ("a hotel", True)]


class Answers:
    """What a page answers, asked until it does."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def when(self, path: str, is_so: Callable[[Any], bool]) -> Any:
        give_up_s = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                answer = httpx.get(f"{self._url}{path}").raise_for_status()
                found = answer.json() if "json" in answer.headers["content-type"] else answer.text
                if is_so(found):
                    return found
            except httpx.TransportError:
                found = None
            assert time.monotonic() < give_up_s, found
            time.sleep(0.05)


def test_one_page_and_one_end_for_all(file: Path, bucket: SourceBucket) -> None:
    port = free_port()
    command = ["land", "--all", "--every", "100ms", "--ui", str(port), "--json", "--config", str(file)]
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **LOGIN},
    ) as process:  # fmt: skip
        page = Answers(port)
        try:
            rows = page.when(
                "/ui/api/pipelines", lambda rows: [row["state"] for row in rows] == ["running"] * 3 + ["failed"]
            )
            assert [row["name"] for row in rows] == ["shop", "twin", "a hotel", "bad"]
            assert rows[3]["failure"]
            assert page.when("/ui/api/state?pipeline=a%20hotel", lambda it: it["lake"] and it["lake"]["documents"] == 2)
            bucket.put(bucket.keys("more", 1, vbucket=3), b'{"n": 3}')
            of = f'{{bucket="{bucket.name}",pipeline='
            wanted = [f'headwater_land_rows_total{of}"{name}"}} 4.0' for name in ("shop", "twin")]
            text = page.when("/metrics", lambda text: all(line in text for line in wanted))
            assert f'headwater_land_active{{bucket="{bucket.name}-not",pipeline="bad"}} 0.0' in text
            assert f'url="http://127.0.0.1:{port}/ui/#/a%20hotel/overview"' in text
        finally:
            process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            out, err = process.communicate(timeout=WAIT_S_MAX)
    assert (process.returncode, time.monotonic() - began_s < STOPPED_S_MAX) == (143, True), err
    assert {json.loads(line)["pipeline"] for line in out.splitlines()} == {"shop", "twin", "a hotel"}
    assert err.splitlines()[-1] == "Stopped. The same command resumes from here."


# --- what runs the tasks ----------------------------------------------------------------------------------------------


def sleeping(seconds: float) -> Any:
    """A task that a worker can load."""
    return SimpleNamespace(run=partial(time.sleep, seconds))


def test_to_cancel_the_jobs_of_one_leaves_those_of_the_others(spark: SparkSession) -> None:
    one, other = SparkRunner(spark, "the one"), SparkRunner(spark, "the other")
    one([sleeping(0)])
    with ThreadPoolExecutor(2) as threads:
        long, short = threads.submit(one, [sleeping(60)]), threads.submit(other, [sleeping(2)])
        tracker = spark.sparkContext.statusTracker()
        while len(tracker.getActiveStageIds()) < 2:
            time.sleep(0.01)
        one.cancel()
        with pytest.raises(QueryFailed):
            long.result(WAIT_S_MAX)
        assert short.result(WAIT_S_MAX) == [None]
    pools = {str(spark._jsc.sc().getPoolForName(name).get().name()) for name in ("the one", "the other")}
    assert pools == {"the one", "the other"}


def test_a_job_whose_tasks_hang_holds_up_no_other() -> None:
    """A free slot goes to the job that has the fewest."""
    slots, order = TaskSlots(2), list[str]()
    begun, may_go_on = threading.Semaphore(0), threading.Event()

    class Notes:
        def __init__(self, name: str, *, hangs: bool = False) -> None:
            self.name, self.hangs = name, hangs

        def run(self) -> None:
            order.append(self.name)
            if self.hangs:
                begun.release()
                may_go_on.wait()

    with ThreadPoolExecutor(2) as threads:
        many = threads.submit(LocalRunner(slots=slots), [Notes("many", hangs=True)] * 20)
        for _ in range(2):
            begun.acquire()
        LocalRunner(slots=slots)([Notes("few")] * 3)
        assert order == ["many", "many", "few", "few", "few"]
        may_go_on.set()
        many.result()
    assert order.count("many") == 20

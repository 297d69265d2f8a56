"""The spans of a landing: that they are there, belong together and say what is true, and nothing of documents."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headwater import blocking
from headwater.errors import HeadwaterError
from headwater.landing.tasks import JobRunner, LocalRunner
from headwater.spark.executors import SparkRunner
from support.landings import LandedBucket, SourceBucket
from support.node_process import PASSWORD, USER

if TYPE_CHECKING:
    from support.traces import Traces


@pytest.fixture(params=["local", "spark"])
def runner(request: pytest.FixtureRequest) -> JobRunner:
    return LocalRunner(2) if request.param == "local" else SparkRunner(request.getfixturevalue("spark"))


def test_a_batch_has_its_tasks_its_commit_and_its_merge(
    runner: JobRunner, bucket: SourceBucket, tmp_path: Path, traces: Traces
) -> None:
    landed = LandedBucket(bucket, None, tmp_path / "lake")  # type: ignore[arg-type]
    landing = landed.landing
    bucket.put(bucket.keys("a-key", 4, vbucket=0), b'{"secret": "of a document"}')
    landing.start(runner).awaitTermination()
    bucket.put(bucket.keys("a-key", 3, vbucket=0), b'{"secret": "of another"}')
    landing.start(runner).awaitTermination()

    for batch, rows in zip(traces.spans("headwater.land.batch"), (4, 3), strict=True):
        of = [span for span in traces.spans() if span.parent and span.parent.span_id == batch.context.span_id]
        kinds = [span.attributes.get("headwater.task", span.name) for span in of]
        assert kinds[0] == "LandShare"
        assert {"headwater.land.commit", "headwater.land.merge"} <= {*kinds}
        assert all(batch.start_time <= span.start_time <= span.end_time <= batch.end_time for span in of)
        assert {**batch.attributes} == {
            "db.system.name": "couchbase",
            "db.namespace": bucket.name,
            "headwater.lake": str(tmp_path / "lake"),
            "headwater.batch": batch.attributes["headwater.batch"],
            "headwater.vbuckets": 1,
            "headwater.rows": rows,
            "headwater.rollbacks": 0,
        }
        assert of[0].attributes["headwater.host"] == socket.gethostname()
    merge = traces.spans("headwater.land.merge")[-1]
    assert merge.attributes["headwater.merges"] == 1
    assert "MergeTask" in [span.attributes.get("headwater.task") for span in traces.spans("headwater.task")]
    if isinstance(runner, LocalRunner):
        # The client of a task reads in the same process.
        tasks = {span.context.span_id for span in traces.spans("headwater.task")}
        assert {read.parent.span_id for read in traces.spans("headwater.read")} <= tasks
    landed.check_equal()
    everything = "".join(span.to_json() for span in traces.spans())
    for word in (PASSWORD, USER, "secret", "a-key"):
        assert word not in everything


def test_a_batch_that_is_read_is_a_span(bucket: SourceBucket, traces: Traces) -> None:
    bucket.put(bucket.keys("a", 5, vbucket=1), b"1")
    with blocking.connect(bucket.url, user=USER, password=PASSWORD) as client:
        batches = [batch.num_rows for batch in client.batches(end="now", name="nightly")]
    reads = traces.spans("headwater.read")
    assert [read.attributes["headwater.rows"] for read in reads] == batches
    assert (reads[0].attributes["db.namespace"], sum(batches)) == (bucket.name, 5)
    assert "nightly" in reads[0].attributes["headwater.reader"]
    with (
        pytest.raises(HeadwaterError),
        blocking.connect(bucket.url, user=USER, password=PASSWORD) as client,
    ):
        list(client.batches(end="now", collections=["no.such"]))
    [failed] = [read for read in traces.spans("headwater.read") if not read.status.is_ok]
    assert failed.attributes["error.type"] == "UnknownScope"

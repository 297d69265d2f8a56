"""What Spark has written into a checkpoint folder, read by a sink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.client.offsets import Offsets
from headwater.errors import InvalidOffsets, LakeOutOfStep
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.checkpoint_log import CheckpointLog


def offsets(seqno: int) -> Offsets:
    at = StreamOffset(vbuuid=Vbuuid(5), seqno=Seqno(seqno), snapshot_start=Seqno(0), snapshot_end=Seqno(seqno))
    return Offsets("uuid", {VBucketId(0): at})


class Checkpoint:
    """Written as Spark does it, with its checksums and temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = CheckpointLog(str(folder))
        (folder / "offsets").mkdir(parents=True)
        (folder / "commits").mkdir()
        (folder / "metadata").write_text('{"id":"the-query"}')

    def plan(self, batch: int, text: str | None = None) -> None:
        told = json.dumps(json.loads(offsets(batch * 10).to_json())) if text is None else text
        (self.folder / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0,"conf":{{}}}}\n{told}')
        (self.folder / "offsets" / f".{batch}.crc").write_text("crc")

    def commit(self, batch: int) -> None:
        (self.folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint-1")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    log = CheckpointLog(str(tmp_path / "nothing"))
    assert (log.last_planned, log.last_committed) == (None, None)


def test_a_query_that_has_planned_nothing(checkpoint: Checkpoint) -> None:
    assert (checkpoint.log.last_planned, checkpoint.log.last_committed) == (None, None)
    assert checkpoint.log.query_id() == "the-query"


def test_batches(checkpoint: Checkpoint) -> None:
    for batch in (8, 9, 10):
        checkpoint.plan(batch)
    for batch in (8, 9):
        checkpoint.commit(batch)
    assert (checkpoint.log.last_planned, checkpoint.log.last_committed) == (10, 9)
    assert checkpoint.log.offsets(10) == offsets(100)
    assert checkpoint.log.start_of(10) == offsets(90)


def test_the_first_batch_starts_where_the_source_says(checkpoint: Checkpoint) -> None:
    checkpoint.plan(0)
    assert checkpoint.log.start_of(0) is None


def test_a_uri(checkpoint: Checkpoint) -> None:
    checkpoint.plan(3)
    log = CheckpointLog(f"file://{checkpoint.folder}")
    assert (log.query_id(), log.last_planned, log.offsets(3)) == ("the-query", 3, offsets(30))


@pytest.mark.parametrize("text", ["", "v1", "v1\n{}", "v1\n{}\n{", b"\xff\xfe\n\n\xff"])
def test_a_file_that_is_cut_off(checkpoint: Checkpoint, text: str | bytes) -> None:
    path = checkpoint.folder / "offsets" / "0"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LakeOutOfStep, match=r"offsets/0 .* can't be read") as caught:
        checkpoint.log.offsets(0)
    assert f"Remove {checkpoint.folder}" in str(caught.value)


def test_a_file_that_is_gone(checkpoint: Checkpoint) -> None:
    with pytest.raises(LakeOutOfStep, match="offsets/4"):
        checkpoint.log.offsets(4)
    (checkpoint.folder / "metadata").unlink()
    with pytest.raises(LakeOutOfStep, match="metadata"):
        checkpoint.log.query_id()


@pytest.mark.parametrize("text", ["[]", "{}", '{"a":1}'])
def test_a_file_with_something_else_in_it(checkpoint: Checkpoint, text: str) -> None:
    (checkpoint.folder / "metadata").write_text(text)
    with pytest.raises(LakeOutOfStep, match="metadata"):
        checkpoint.log.query_id()
    checkpoint.plan(0, text)
    with pytest.raises(InvalidOffsets):
        checkpoint.log.offsets(0)

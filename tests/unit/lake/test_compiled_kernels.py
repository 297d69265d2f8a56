"""After compiling ahead nothing is compiled any more, whatever is landed."""

from __future__ import annotations

from pathlib import Path

from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.protocol.kernels.machine_code import compile_kernels
from support.lake_model import SmallLake, verify_model, with_columns
from support.machine import loaded_kernels


def test_all_kernels_are_compiled_before_they_are_needed(tmp_path: Path) -> None:
    compile_kernels("headwater.lake", "headwater.protocol")
    warm = loaded_kernels()
    settings = with_columns(
        LakeSettings(merging=MergeRules(history=True)), {"*": "n INT, s STRING, d DOUBLE, o STRUCT<a: INT>"}
    )
    small = SmallLake(tmp_path, settings=settings)
    small.write(0, "a", "", value=b'{"n": 1, "s": "x\\n", "d": 1.5, "o": {"a": 1}}')
    small.write(1, "b", value=b"\xff")
    small.land()
    small.write(0, "a", value=b"[]")
    small.bucket.change(1, "deletion", 0, b"b")
    small.bucket.event("collection_created", 0)
    small.land()
    small.bucket.fail_over(0, 1)
    small.land()
    assert not verify_model(small.reopen(), small.bucket).findings.counts
    assert loaded_kernels() == warm

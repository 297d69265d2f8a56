"""Which files a rollback has written again, and when a whole vbucket is given up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.lake.data_files import DataFile
from headwater.lake.layout import LakeFacts
from headwater.lake.location import Location
from headwater.lake.rollbacks import Voided, VoidedFiles, VoidTask, add_rollback, torn_vbuckets, void_rows

LOCATION = Location("/nowhere")
FACTS = LakeFacts(bucket_uuid="uuid", vbuckets=4, groups=2)


def file(path: str, *, vbucket: int, seqnos: tuple[int, int]) -> DataFile:
    return DataFile(path=path, size_bytes=1, rows=1, ranges={"vbucket": (vbucket, vbucket), "seqno": seqnos})


OLD = file("old", vbucket=1, seqnos=(1, 5))
DEAD = file("dead", vbucket=1, seqnos=(6, 9))
OTHER = file("other", vbucket=2, seqnos=(1, 99))
NEW = file("new", vbucket=1, seqnos=(6, 7))


class Runs:
    """Has every file of its tasks written again, and finds a vbucket torn in the first round."""

    def __init__(self, *torn: int) -> None:
        self.torn = frozenset(torn)
        self.rounds: list[list[tuple[str, dict[int, int]]]] = []

    def __call__(self, tasks: Sequence[VoidTask]) -> list[Voided]:
        self.rounds.append([(task.file.path, task.rollbacks) for task in tasks])
        torn = self.torn if len(self.rounds) == 1 else frozenset()
        return [
            Voided(file=task.file, replacement=file(f"{task.file.path}-void", vbucket=1, seqnos=(1, 9)), torn=torn)
            for task in tasks
        ]


def void(runs: Runs) -> tuple[list[str], list[str], frozenset[int]]:
    found: VoidedFiles = void_rows(
        LOCATION, FACTS, live=[OLD, DEAD, OTHER], added=[NEW], rollbacks={1: 5}, wiped=(), run=runs
    )
    return [it.path for it in found.add], [it.path for it in found.remove], found.wiped


def test_only_files_that_can_hold_dead_rows_are_written_again() -> None:
    runs = Runs()
    assert void(runs) == (["new", "dead-void"], ["dead"], frozenset())
    assert runs.rounds == [[("dead", {1: 5})]]


def test_a_torn_vbucket_is_void_as_a_whole_also_in_the_batch_itself() -> None:
    runs = Runs(1)
    assert void(runs) == (["new-void", "old-void", "dead-void"], ["old", "dead"], frozenset({1}))
    assert runs.rounds[1] == [("old", {1: 0}), ("dead", {1: 0}), ("new", {1: 0})]


def test_of_several_rollbacks_the_furthest_counts() -> None:
    rollbacks: dict[int, int] = {}
    for kept in (7, 3, 5):
        add_rollback(rollbacks, 1, kept)
    assert rollbacks == {1: 3}


def test_a_snapshot_that_began_before_what_is_kept_is_torn() -> None:
    kept = np.array([100, 5, 5, 100])
    assert torn_vbuckets(np.array([1, 2]), np.array([4, 5]), kept) == {1}

"""The walks of the architecture page are those of a real run."""

from __future__ import annotations

import pytest
from handbook.walks import files_on_page, traced


@pytest.mark.parametrize(("walk", "most"), [("set", 120), ("rollback", 20)])
def test_a_walk_lists_the_files_that_a_run_enters(walk: str, most: int) -> None:
    found, listed = {*traced()[walk]}, {*files_on_page(f"walk of a {walk}")}
    assert (found - listed, listed - found) == (set(), set()), "run `make docs`"
    assert len(listed) <= most, "the walk has become longer: take a shorter way, or say here why not"


def test_a_walk_begins_at_the_listener_and_ends_with_the_merge() -> None:
    files = traced()["set"]
    assert files[:2] == ["node/kv_listener.py", "node/kv/session.py"]
    merge = files.index("lake/change_rows.py")
    assert files.index("store/set_run.py") < files.index("landing/tasks.py") < merge
    assert "node/history.py" in traced()["rollback"]

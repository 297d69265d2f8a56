"""Every code block of the README and the docs runs and prints what the page says, or says why it does not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.testing.node import HeadwaterNode
from headwater.testing.nursery import Nursery
from support.cases import each
from support.doc_blocks import (
    LANGUAGES,
    PAGES,
    PASSWORD,
    ROOT,
    USER,
    blocks_of,
    check_printed,
    run_bash,
    run_python,
    with_node,
)

RUNNING = [page for page in PAGES if any(block.runs_with_node for block in blocks_of(page))]


@pytest.fixture
def node(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadwaterNode]:
    """As the pages have it: the user me, the password secret, the buckets travel and default."""
    folder = tmp_path_factory.mktemp("node")
    login = ("--user", USER, "--password", PASSWORD)
    with HeadwaterNode(nursery, folder, buckets=("travel", "default"), vbuckets=64, options=login) as started:
        yield started
        assert "Traceback" not in started.log


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_their_order(
    page: Path, node: HeadwaterNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tests", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks_of(page):
        if not block.runs_with_node:
            continue
        code = with_node(block.code, node)
        printed = run_python(block, code) if block.language == "python" else run_bash(block, code, tmp_path)
        check_printed(block, printed)


@each("page", PAGES)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block.place} is of no known language"
        known = block.need in ("", "node", "spark", "lake") or (block.reason_not_to_run or "")
        assert known, f"{block.place}: {block.need!r} says neither what it needs nor why it does not run"

"""Fixtures: a browser that is there, or a reason why it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import CHROMIUM, DRIVER, Browser, running_browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver here: apt install chromium chromium-driver")
    with running_browser(tmp_path / "profile") as running:
        yield running

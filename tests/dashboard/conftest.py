"""Fixtures: a browser that is there, or a reason why it is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.browser import CHROMIUM, DRIVER, Browser, running_browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver here: apt install chromium chromium-driver")
    with running_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    yield chromium
    chromium.forget()

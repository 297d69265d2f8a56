"""The dashboard where much is wrong at once: three nodes of which one is dead, and two buckets, of which one has a
landing that was stopped. All tests look at the same cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from selenium.webdriver.support.ui import Select

from support.browser import Browser, log_in
from support.dashboard_world import BUCKET, answering, make_cluster, metrics_text, write
from support.node_process import NodeProcess

VBUCKETS, OTHER = 32, "wine"
DOCUMENTS = 120


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NodeProcess]]:
    """The last of them is dead."""
    folder = tmp_path_factory.mktemp("cluster")
    options = ("--vbuckets", str(VBUCKETS), "--bucket", BUCKET, "--bucket", OTHER)
    with ExitStack() as stack:
        with answering(200, metrics_text(BUCKET)) as url:
            watching = (*options, "--landing-metrics", url)
            started = [
                stack.enter_context(NodeProcess(folder / f"node-{at}", *(options if at else watching))).start()
                for at in range(3)
            ]
            make_cluster(started)
            write(started, VBUCKETS, *(f"key-{number}" for number in range(DOCUMENTS)))
        started[-1].kill()
        yield started


@pytest.fixture
def page(browser: Browser, nodes: list[NodeProcess]) -> Browser:
    """The page of the first node, which knows by then that the last one is dead."""
    log_in(browser, nodes[0])
    browser.find(".health[data-level=bad]")
    return browser


def go(browser: Browser, page: str) -> None:
    browser.run(f"location.hash = '#/{page}'")
    browser.find(f"nav a[href='#/{page}'][aria-current=page]")


def choose(browser: Browser, bucket: str) -> None:
    """A log-in ends with one of the buckets."""
    Select(browser.find("#bucket")).select_by_visible_text(bucket)
    browser.find(".status.live")


def test_a_landing_that_was_stopped_says_when_and_of_which_bucket(page: Browser) -> None:
    choose(page, BUCKET)
    go(page, "landing")
    said = page.find("[data-test=landing-gone]").text
    assert re.match(r"The landing was stopped at \d\d:\d\d:\d\d: nothing listens", said)
    assert "Errno" not in page.find("body").text
    choose(page, OTHER)
    advice = page.find("[aria-labelledby=landing-title] .empty").text
    assert f"No landing of {OTHER} is being watched" in advice
    assert re.search(rf"headwater land couchbase://127.0.0.1:\d+/{OTHER} --into DIR --ui 8081", advice)
    assert "headwater serve … --landing-metrics http://127.0.0.1:8081/metrics" in advice

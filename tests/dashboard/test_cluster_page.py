"""The dashboard where much is wrong at once: three nodes of which one is dead, and two buckets, of which one has a
landing that was stopped. All tests look at the same cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from selenium.webdriver.support.ui import Select

from support.browser import DESKTOP, PHONE, Browser, axe_findings, log_in, show_map
from support.dashboard_world import BUCKET, answering, make_cluster, metrics_text, write
from support.forked_program import start_program
from support.node_process import PASSWORD, USER, NodeProcess, environment

VBUCKETS, OTHER = 32, "wine"
DOCUMENTS = 120
CONSUMER = "trips-to-search"
UNSERVED = "No node that can be reached"
PAGES = ("overview", "streams", "changes", "documents", "history", "landing")
SHOTS = os.environ.get("HEADWATER_SCREENSHOTS")
"""A folder to keep screenshots in, for people to look at."""


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
            how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment()}
            login = ("--user", USER, "--password", PASSWORD)
            url = f"couchbase://{started[0].address}/{BUCKET}"
            tail = stack.enter_context(start_program("-m", "headwater", "tail", url, "--name", CONSUMER, *login, **how))
            stack.callback(tail.kill)
        started[-1].kill()
        yield started


@pytest.fixture
def page(browser: Browser, nodes: list[NodeProcess]) -> Browser:
    """The page of the first node, which knows by then that the last one is dead."""
    log_in(browser, nodes[0])
    choose(browser, BUCKET)
    browser.until(lambda: UNSERVED in browser.find(".health").text, "the dead node is not noticed")
    return browser


def go(browser: Browser, page: str) -> None:
    browser.run(f"location.hash = '#/{page}'")
    browser.find(f"nav a[href='#/{page}'][aria-current=page]")


def choose(browser: Browser, bucket: str) -> None:
    """A log-in ends with one of the buckets."""
    Select(browser.find("#bucket")).select_by_visible_text(bucket)
    browser.find(".status.live")


def tiles(browser: Browser) -> dict[str, list[str]]:
    """The numbers and notes of the overview, by their labels."""
    shown = [tile.text.split("\n") for tile in browser.all(".tile")]
    return {label: rest for label, *rest in shown}


def test_with_a_dead_node_nothing_contradicts(page: Browser, nodes: list[NodeProcess]) -> None:
    told = re.search(rf"{UNSERVED} has the active copy of (\d+) of (\d+) vbuckets", page.find(".health").text)
    assert told is not None
    unserved, all_ = map(int, told.groups())
    page.find(f"[data-standing=lost][data-count='{unserved}']")
    shown = tiles(page)
    assert shown["Vbuckets served"] == [f"{all_ - unserved} of {all_}", f"{unserved} can’t be reached"]
    assert shown["Nodes that answer"] == ["2 of 3"]
    assert shown["Documents, all nodes"][1] == "without those of 1 unreachable node"
    replicas = re.fullmatch(r"(\d+) of (\d+)", shown["Replicas on nodes that answer"][0])
    unknown = re.fullmatch(r"(\d+) unknown", shown["Replicas on nodes that answer"][1])
    assert replicas is not None
    assert unknown is not None
    assert int(replicas[1]) + int(unknown[1]) == int(replicas[2]) == all_
    # The copies on the dead node, and those of its active vbuckets.
    page.find(f"[data-standing=unknown][data-count='{int(unknown[1]) + unserved}']")
    dead = page.find(f"[aria-label^='Vbuckets of {nodes[-1].address}:']").get_attribute("aria-label")
    assert f"{unserved} active, can’t be reached" in str(dead)
    heads = " ".join(head.text for head in page.all(".map-head"))
    assert heads.count("can’t be read or written") == 1
    show_map(page)
    page.find(f"[data-legend=active][data-count='{all_ - unserved}']")
    assert page.console() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_all_pages_fit_and_have_no_serious_faults(
    page: Browser, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    page.resize(size)
    page.prefer(scheme)
    for name in PAGES:
        go(page, name)
        page.find(".section")
        assert page.run("return document.documentElement.scrollWidth") <= size[0], name
        assert axe_findings(page) == [], name
        page.screenshot(Path(SHOTS or tmp_path) / f"cluster-{name}-{size[0]}-{scheme}.png")


def test_consumers_are_shown_with_what_all_nodes_have_for_them(page: Browser, nodes: list[NodeProcess]) -> None:
    go(page, "streams")
    row = page.find(f"tr[data-consumer-name='{CONSUMER}']")
    living = [str(node.address) for node in nodes[:-1]]
    page.until(lambda: all(name in row.text for name in living), f"not both nodes are shown: {row.text}")
    assert str(nodes[-1].address) not in row.text
    assert str(nodes[-1].address) in page.find("[aria-labelledby=consumers-title] .problem").text


def test_documents_are_counted_by_collection_and_listed_with_it(page: Browser) -> None:
    go(page, "documents")
    row = page.find("tr[data-collection='_default._default']")
    here = page.until(lambda: re.search(r"\d+$", row.text), "the documents are not counted")
    assert 0 < int(here[0]) < DOCUMENTS, "other nodes have the rest"
    assert page.find(".document-collection").text == "_default._default"


def test_a_landing_that_was_stopped_says_when_and_of_which_bucket(page: Browser) -> None:
    go(page, "landing")
    said = page.find("[data-test=landing-gone]").text
    assert re.match(r"The landing was stopped at \d\d:\d\d:\d\d: nothing listens", said)
    assert "Errno" not in page.find("body").text
    choose(page, OTHER)
    advice = page.find("[aria-labelledby=landing-title] .empty").text
    assert f"No landing of {OTHER} is being watched" in advice
    assert re.search(rf"headwater land couchbase://127.0.0.1:\d+/{OTHER} --into DIR --ui 8081", advice)
    assert "headwater serve … --landing-metrics http://127.0.0.1:8081/metrics" in advice

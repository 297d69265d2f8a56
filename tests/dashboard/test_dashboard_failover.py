"""The dashboard of a cluster in a real browser: what other nodes have is seen, and what happens when one dies."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from selenium.webdriver.support.ui import Select

from support.browser import Browser, axe_findings, log_in, show_map
from support.dashboard_world import fail_over, hold_replicas, keys_of, make_cluster, write
from support.forked_program import HEADWATER, run_program
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

VBUCKETS = 32
HERE, THERE = ".map-node[data-this=true]", ".map-node[data-this=false]"


@pytest.fixture
def nodes(start_node: StartNode) -> list[NodeProcess]:
    started = [start_node("--vbuckets", str(VBUCKETS)) for _ in range(2)]
    make_cluster(started)
    return started


def cells(browser: Browser, node: str, state: str) -> int:
    """How many vbuckets of a node have a state."""
    return len(browser.all(f"{node} .cell[data-state={state}]"))


def a_vbucket(browser: Browser, node: str, state: str) -> int:
    return int(browser.find(f"{node} .cell[data-state={state}]").get_attribute("data-vbucket") or "")


def words(browser: Browser, node: str, vbucket: int) -> str:
    """What a cell says of its vbucket."""
    return browser.find(f"{node} .cell[data-vbucket='{vbucket}']").get_attribute("aria-label") or ""


def says(browser: Browser, node: str, vbucket: int, part: str) -> None:
    browser.until(lambda: part in words(browser, node, vbucket), f"vbucket {vbucket} does not say {part!r}")


def is_halved(browser: Browser) -> None:
    half = VBUCKETS // 2
    browser.until(
        lambda: (cells(browser, HERE, "active"), cells(browser, HERE, "replica")) == (half, half), "no half is active"
    )


def test_the_numbers_of_another_node_are_seen(browser: Browser, nodes: list[NodeProcess]) -> None:
    here, there = write(nodes, VBUCKETS, *(f"key-{number}" for number in range(400)))
    assert there > 0
    log_in(browser, nodes[0])
    show_map(browser)
    is_halved(browser)
    browser.until(
        lambda: f"{there} documents active" in browser.find(f"{THERE} .map-head").text, "they are not counted"
    )
    browser.until(lambda: "copies up to date" in browser.find(f"{THERE} .map-head").text, "the copies lag")
    assert browser.find(".tile dd").text.startswith(str(here + there))
    vbucket = a_vbucket(browser, THERE, "active")
    browser.find(f"{HERE} .cell[data-vbucket='{vbucket}']").click()
    copies = browser.all(".copies tbody tr")
    assert [row.get_attribute("data-copy") for row in copies] == [str(nodes[1].address), str(nodes[0].address)]
    seqnos = {row.find_elements("css selector", "td")[0].text for row in copies}
    assert len(seqnos) == 1, "the copies have not the same seqno"
    browser.run("location.hash = '#/streams'")
    received = browser.find(f"tr[data-consumer='{nodes[1].address}']")
    assert received.find_elements("css selector", "td")[0].text == str(VBUCKETS // 2)
    assert browser.console() == []


def test_copies_that_fall_behind_are_seen_on_both_nodes(browser: Browser, nodes: list[NodeProcess]) -> None:
    log_in(browser, nodes[0])
    show_map(browser)
    is_halved(browser)
    for node in nodes:
        hold_replicas(node)
    mine, theirs = a_vbucket(browser, HERE, "active"), a_vbucket(browser, HERE, "replica")
    write(nodes, VBUCKETS, *keys_of(mine, VBUCKETS, 3), *keys_of(theirs, VBUCKETS, 5))
    says(browser, THERE, mine, "replica, held back, 0 documents, seqno 0, lag 3")
    says(browser, HERE, theirs, "replica, held back, 0 documents, seqno 0, lag 5")
    browser.find(f"[data-legend=held][data-count='{VBUCKETS}']")
    assert "up to 3 behind" in browser.find(f"{THERE} .map-head").text
    Select(browser.find("#shade")).select_by_visible_text("lag")
    browser.find(f"{HERE} .cell[data-vbucket='{theirs}'][data-shade='4']")
    browser.find(f"{THERE} .cell[data-vbucket='{theirs}'][data-shade='0']")
    if shots := os.environ.get("HEADWATER_SCREENSHOTS"):
        browser.screenshot(Path(shots) / "cluster-held.png")
    assert axe_findings(browser) == []
    assert browser.console() == []


def test_a_silent_node_is_reported_until_it_is_failed_over(browser: Browser, nodes: list[NodeProcess]) -> None:
    write(nodes, VBUCKETS, *(f"key-{number}" for number in range(200)))
    log_in(browser, nodes[0])
    show_map(browser)
    is_halved(browser)
    vbucket = a_vbucket(browser, HERE, "replica")
    Select(browser.find("#shade")).select_by_visible_text("lag")
    says(browser, HERE, vbucket, "lag 0")
    browser.until(lambda: " 0 documents" not in words(browser, THERE, vbucket), "the writes are not shown")
    lost, told = str(nodes[1].address), words(browser, THERE, vbucket)
    nodes[1].kill()
    gone = browser.find(f"{THERE} .badge.gone")
    assert re.fullmatch(r"unreachable since \d\d:\d\d:\d\d", gone.text)
    browser.until(
        lambda: any(f"{lost} does not answer" in one.text for one in browser.all(".events li[data-kind=node]")),
        "that it is gone is no event",
    )
    assert words(browser, THERE, vbucket) == told, "what it told last is kept"
    browser.find(f"{HERE} .cell[data-vbucket='{vbucket}'][data-unknown=true]")
    says(browser, HERE, vbucket, "lag not known")
    assert axe_findings(browser) == []
    if shots := os.environ.get("HEADWATER_SCREENSHOTS"):
        browser.screenshot(Path(shots) / "cluster-gone.png")
    fail_over(nodes[0], lost)
    browser.until(lambda: browser.all(THERE) == [], "the node that was failed over is still there")
    assert browser.console() == []


def test_the_map_changes_when_a_node_fails_over(browser: Browser, nodes: list[NodeProcess]) -> None:
    log_in(browser, nodes[0])
    show_map(browser)
    is_halved(browser)
    assert len(browser.all(".map-node")) == 2
    # What the other one has is asked for apart, and may come later.
    browser.until(lambda: cells(browser, THERE, "active") == VBUCKETS // 2, "the other half is not seen")
    lost = str(nodes[1].address)
    nodes[1].kill()
    fail_over(nodes[0], lost)
    browser.until(lambda: cells(browser, ".map", "active") == VBUCKETS, "the copies did not become active")
    browser.until(lambda: len(browser.all(".map")) == 1, "the node that was failed over is still there")
    browser.until(
        lambda: any(f"failover of {lost}" in event.text for event in browser.all(".events li[data-kind=failover]")),
        "the failover is no event",
    )
    assert browser.console() == []


def test_metrics_name_the_node_whose_copies_lag(nodes: list[NodeProcess]) -> None:
    wanted = f'headwater_node_replication_lag_seqnos{{bucket="default",replica="{nodes[1].address}"}} 0.0'
    deadline_s = time.monotonic() + 20
    while wanted not in (text := httpx.get(f"{nodes[0].http_url}/metrics", auth=(USER, PASSWORD)).text):
        assert time.monotonic() < deadline_s, text
        time.sleep(0.2)


# --- what a failover has lost -------------------------------------------------------------------------------------


def metrics(node: NodeProcess) -> dict[str, float]:
    text = httpx.get(f"{node.http_url}/metrics", auth=(USER, PASSWORD)).text
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def lag_here(browser: Browser) -> int | None:
    """How far all copies of this node are behind, as the map says it; None where it is not known of all."""
    cells = f"{HERE} .cell[data-state=replica]"
    labels: list[str] = browser.run(f"return [...document.querySelectorAll({cells!r})].map((one) => one.ariaLabel)")
    lags = [label.rpartition("lag ")[2] for label in labels]
    return sum(map(int, lags)) if all(lag.isdecimal() for lag in lags) else None


def says_health(browser: Browser, words: str) -> None:
    browser.until(lambda: words in browser.find(".health").text, f"the line on top does not say: {words}")


def test_what_a_failover_lost_is_said_and_kept_over_a_restart(browser: Browser, nodes: list[NodeProcess]) -> None:
    left, lost = nodes
    write(nodes, VBUCKETS, *(f"key-{number}" for number in range(100)))
    log_in(browser, left)
    show_map(browser)
    browser.until(lambda: "up to date" in browser.find(f"{HERE} .map-head").text, "the copies are behind")
    hold_replicas(left)
    _, gone = write(nodes, VBUCKETS, *(f"key-{number}" for number in range(100, 200)))
    browser.until(lambda: lag_here(browser) == gone, "the node has not heard of what the other one has")
    says_health(browser, "drill holds the copies back")
    lost.kill()
    says_health(browser, f"headwater cluster failover {left.url}/default {lost.address}")
    environment = {**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
    command = ("cluster", "failover", f"{left.url}/default", str(lost.address))
    done = run_program(*HEADWATER, *command, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    sentence = rf"{lost.address} failed over: 16 vbuckets promoted, at least {gone} changes of \d+ vbuckets lost\n"
    assert re.fullmatch(sentence, done.stdout), done.stdout
    browser.until(
        lambda: f"at least {gone} changes" in browser.find(".events li[data-kind=failover]").text, "the event lacks it"
    )
    says_health(browser, "replicas missing")
    assert axe_findings(browser) == []
    if shots := os.environ.get("HEADWATER_SCREENSHOTS"):
        browser.run("scrollTo(0, 0)")
        browser.screenshot(Path(shots) / "cluster-lost.png")
    before = metrics(left)
    assert before["headwater_node_lost_changes_total"] == gone
    assert left.stop() == 0
    after = metrics(left.start())
    for name in ("lost_changes_total", "rollbacks_total"):
        assert after[f"headwater_node_{name}"] == before[f"headwater_node_{name}"] > 0, name

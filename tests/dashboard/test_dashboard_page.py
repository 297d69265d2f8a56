"""The dashboard in a real browser, on a real node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from headwater.client.cluster_map import vbucket_of
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Delete, Set
from headwater.protocol.messages.vbuckets import SetVBucket
from support.browser import DESKTOP, PHONE, Browser, axe_findings, log_in, show_map
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

VBUCKETS = 64
PAGES = ("overview", "streams", "changes", "documents", "history", "landing")
SHOTS = os.environ.get("HEADWATER_SCREENSHOTS")
"""A folder to keep screenshots in, for people to look at."""


@pytest.fixture
def node(start_node: StartNode, request: pytest.FixtureRequest) -> NodeProcess:
    return start_node("--vbuckets", str(getattr(request, "param", VBUCKETS)))


@pytest.fixture(autouse=True)
def _nothing_leaves_the_host(browser: Browser, node: NodeProcess) -> Iterator[None]:
    """Whatever a test does: no request to another host."""
    yield
    assert browser.hosts_asked() <= {httpx.URL(node.http_url).netloc.decode()}


def go(browser: Browser, page: str) -> None:
    shown = f"nav a[href='#/{page.partition('?')[0]}'][aria-current=page]"

    def is_shown() -> bool:
        # More than once: the page sets it as well, when a log-in has just ended.
        browser.run(f"location.hash = '#/{page}'")
        return bool(browser.all(shown))

    browser.until(is_shown, f"{page} is not shown")


def write(node: NodeProcess, *keys: str, value: bytes = b'{"kind":"test"}') -> None:
    with node.connect() as connection:
        for key in keys:
            vbucket = vbucket_of(key.encode(), VBUCKETS)
            connection.request(Set(key=key.encode(), value=value, vbucket=vbucket, collection_id=0))


def counts(browser: Browser, documents: int) -> None:
    """Wait until the node has looked at its documents: what comes and goes between two looks is not seen."""
    browser.until(
        lambda: browser.find(".tile dd").text.startswith(str(documents)), f"{documents} documents are not counted"
    )


def roll_back(node: NodeProcess, vbucket: int) -> None:
    url = f"{node.http_url}/headwater/buckets/default/vbuckets/{vbucket}/rollback"
    answer = httpx.post(url, data={"to": "1"}, auth=(USER, PASSWORD))
    assert answer.status_code == 200, answer.text


def is_live(browser: Browser) -> None:
    browser.find(".status.live")


# --- logging in ---------------------------------------------------------------------------------------------------


def test_a_wrong_password_is_told_and_the_right_one_gets_in(browser: Browser, node: NodeProcess) -> None:
    log_in(browser, node, "wrong")
    assert "wrong" in browser.find("[role=alert]").text
    # The browser itself notes the refusal; nothing else may be there.
    assert [line for line in browser.console() if "401" not in line] == []
    browser.find("#password").send_keys(PASSWORD)
    browser.find("button[type=submit]").click()
    is_live(browser)
    assert browser.run("return document.cookie") == ""
    browser.open(f"{node.http_url}/ui/")
    is_live(browser)
    browser.find(".top-tools button").click()
    browser.find("#user")
    browser.open(f"{node.http_url}/ui/")
    browser.find("#user")
    assert browser.console() == []


def test_everything_can_be_reached_with_the_keyboard(browser: Browser, node: NodeProcess) -> None:
    write(node, "apple")
    browser.open(f"{node.http_url}/ui/")
    browser.find("#user")
    browser.press(USER, Keys.TAB, PASSWORD, Keys.ENTER)
    is_live(browser)
    browser.until(lambda: browser.driver.switch_to.active_element.get_attribute("id") == "main", "the focus is lost")
    browser.driver.refresh()
    is_live(browser)
    browser.press(Keys.TAB)
    assert browser.driver.switch_to.active_element.get_attribute("class") == "skip"
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.driver.switch_to.active_element.get_attribute("id") == "main", "nothing is skipped")
    browser.press(Keys.TAB)
    assert browser.driver.switch_to.active_element.get_attribute("id") == "show-map"
    browser.press(Keys.ENTER)
    browser.find(".full-map")
    for _ in range(40):
        browser.press(Keys.TAB)
        if browser.driver.switch_to.active_element.get_attribute("role") == "listbox":
            break
    else:
        pytest.fail("the map is not reached with the Tab key")
    browser.press(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    browser.until(lambda: browser.find("[data-test=vbucket]").text == "33", "the cursor does not move")
    browser.press(Keys.ENTER)
    browser.find(".failover-log li")
    link = browser.find("nav a[href='#/changes']")
    browser.run("arguments[0].focus()", link)
    browser.press(Keys.ENTER)
    browser.find("tr[data-key=apple]")
    assert browser.console() == []


# --- what changes while one looks ---------------------------------------------------------------------------------


def test_the_map_changes_when_a_vbucket_changes_its_state(browser: Browser, node: NodeProcess) -> None:
    log_in(browser, node)
    show_map(browser)
    assert browser.find(".cell[data-vbucket='5']").get_attribute("data-state") == "active"
    with node.connect() as connection:
        connection.request(SetVBucket(vbucket=5, state=VBucketState.REPLICA))
        connection.request(SetVBucket(vbucket=6, state=VBucketState.DEAD))
    browser.find(".cell[data-vbucket='5'][data-state=replica]")
    browser.find(".cell[data-vbucket='6'][data-state=dead]")
    browser.find("[data-legend=replica][data-count='1']")
    browser.find("[data-legend=active][data-count='62']")
    browser.find(".events li[data-kind=state]")
    assert browser.console() == []


def test_a_click_on_the_map_shows_the_failover_log_of_that_vbucket(browser: Browser, node: NodeProcess) -> None:
    log_in(browser, node)
    show_map(browser)
    browser.find(".cell[data-vbucket='17'][data-state=active]").click()
    assert browser.find("[data-test=vbucket]").text == "17"
    assert "from seqno 0" in browser.find(".failover-log li").text
    assert browser.console() == []


@pytest.mark.parametrize("node", [1024], indirect=True)
def test_a_newcomer_with_three_documents_sees_three(browser: Browser, node: NodeProcess) -> None:
    url = f"{node.http_url}/pools/default/buckets/default/scopes/_default/collections"
    assert httpx.post(url, data={"name": "first"}, auth=(USER, PASSWORD)).status_code == 200
    with node.connect() as connection:
        for key in (b"a", b"b", b"c"):
            connection.request(Set(key=key, value=b"{}", vbucket=vbucket_of(key, 1024), collection_id=0))
    log_in(browser, node)
    counts(browser, 3)
    tiles = {tile.text.splitlines()[0]: tile.text.splitlines()[1] for tile in browser.all(".tile")}
    assert (tiles["Changes written here"], tiles["System events"]) == ("3", "1,024")
    assert tiles["Lost changes"] == "none known"
    show_map(browser)
    assert "everywhere" not in browser.find(".legend").text
    assert "1 documents" in browser.find(".legend-scale").text


def test_documents_are_counted_while_they_are_written(browser: Browser, node: NodeProcess) -> None:
    log_in(browser, node)
    is_live(browser)
    write(node, *(f"key-{number}" for number in range(500)))
    counts(browser, 500)
    assert len(browser.all(".chart canvas")) == 3


def test_the_change_browser_finds_what_is_written_meanwhile(browser: Browser, node: NodeProcess) -> None:
    log_in(browser, node)
    go(browser, "changes")
    browser.find("#change-key").send_keys("needle")
    browser.find(".empty")
    write(node, "hay-1", "a-needle-in-it", "hay-2")
    browser.find("tr[data-key='a-needle-in-it'] .badge.mutation")
    browser.until(
        lambda: browser.all("tr[data-key^=hay]") == [], "the search does not leave out what was not asked for"
    )
    with node.connect() as connection:
        key = b"a-needle-in-it"
        connection.request(Delete(key=key, vbucket=vbucket_of(key, VBUCKETS), collection_id=0))
    browser.find("tr[data-key='a-needle-in-it'] .badge.deletion")
    assert browser.console() == []


def test_changes_come_in_pages_and_by_what_they_are(browser: Browser, node: NodeProcess) -> None:
    write(node, *(f"key-{number:03d}" for number in range(70)))
    with node.connect() as connection:
        connection.request(Delete(key=b"key-003", vbucket=vbucket_of(b"key-003", VBUCKETS), collection_id=0))
    log_in(browser, node)
    go(browser, "changes")
    browser.until(lambda: len(browser.all("tr[data-key]")) == 50, "the first page is not full")
    first = {row.get_attribute("data-key") for row in browser.all("tr[data-key]")}
    browser.find("#older").click()
    browser.until(lambda: len(browser.all("tr[data-key]")) == 21, "the second page has not the rest")
    second = {row.get_attribute("data-key") for row in browser.all("tr[data-key]")}
    assert len(first | second) == 70
    assert not browser.find("#older").is_enabled()
    Select(browser.find("#change-op")).select_by_value("deletion")
    browser.until(lambda: len(browser.all("tr[data-key]")) == 1, "mutations are not left out")
    assert re.search(r"\b20\d\d\b", browser.find("tr[data-key=key-003] td").text), "a change has no date"
    # In one step: the page may be drawn again between two.
    chosen = (
        "arguments[0].value = '2001-01-01T00:00:00'; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
    )
    browser.run(chosen, browser.find("#change-to"))
    browser.until(lambda: browser.all("tr[data-key]") == [], "a change is shown that is newer than what was asked for")
    assert browser.console() == []


def test_a_document_is_opened_by_its_key(browser: Browser, node: NodeProcess) -> None:
    write(node, "ale", value=b'{"name":"<img src=x onerror=alert(1)>"}')
    log_in(browser, node)
    go(browser, "documents")
    browser.find("#document-key").send_keys("ale", Keys.ENTER)
    assert "<img src=x" in browser.find("pre.value").text
    assert browser.find(".document-title").text == "ale"
    write(node, "ale", value=b'{"name":"stout"}')
    browser.until(lambda: len(browser.all(".versions tbody tr")) == 2, "the older version is not shown")
    assert "stout" in browser.find(".versions tbody tr").text
    assert browser.console() == []


def test_a_rollback_is_an_event_and_in_the_failover_logs(browser: Browser, node: NodeProcess) -> None:
    write(node, *(f"key-{number}" for number in range(640)))
    log_in(browser, node)
    is_live(browser)
    counts(browser, 640)
    roll_back(node, 9)
    event = browser.find(".events li[data-kind=drill]")
    assert re.search(r"drill: 1 vbucket rolled back, \d+ changes of 1 vbucket lost vbucket 9", event.text)
    go(browser, "history")
    assert browser.all(".event-details code") == [], "vbuuids are shown before they are asked for"
    browser.find("[data-kind=drill] button.disclose").click()
    assert browser.find(".event-details tbody th").text == "9"
    assert "timeline of its page" in browser.find(".event-details").text
    browser.find("#show-logs").click()
    assert browser.find("table.logs tbody th").text == "9"
    assert len(browser.all(".branches li")) == 2
    browser.find(".event-details tbody th a").click()
    browser.find("#change-vbucket")
    browser.until(
        lambda: (
            {row.find_elements("css selector", "[data-label=Vbucket]")[0].text for row in browser.all("tr[data-key]")}
            <= {"9"}
        ),
        "changes of other vbuckets are shown",
    )
    assert browser.console() == []


def test_the_page_says_when_the_node_is_gone(browser: Browser, node: NodeProcess) -> None:
    log_in(browser, node)
    is_live(browser)
    browser.find(".health[data-level]")
    node.kill()
    browser.find(".status.lost")
    assert "has not answered since" in browser.find(".health[data-level=bad]").text


# --- for everybody ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_there_are_no_serious_faults_of_accessibility(browser: Browser, node: NodeProcess, scheme: str) -> None:
    write(node, *(f"key-{number}" for number in range(200)))
    browser.prefer(scheme)
    browser.open(f"{node.http_url}/ui/")
    browser.find("#user")
    assert axe_findings(browser) == []
    log_in(browser, node)
    is_live(browser)
    counts(browser, 200)
    roll_back(node, 9)
    browser.find(".events li[data-kind=drill]")
    for page in (*PAGES, "documents?key=key-7"):
        go(browser, page)
        browser.find(".section")
        if page == "overview":
            assert axe_findings(browser) == [], "overview without the map"
            show_map(browser)
        if page == "changes":
            browser.find("tr[data-key]")
        if page == "history":
            browser.find("[data-kind=drill] button.disclose").click()
            browser.find("#show-logs").click()
        assert axe_findings(browser) == [], page


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_no_page_is_too_wide(browser: Browser, node: NodeProcess, tmp_path: Path, size: tuple[int, int]) -> None:
    write(node, *(f"a-rather-long-key-of-a-document::{'x' * 80}::{number}" for number in range(60)))
    browser.resize(size)
    log_in(browser, node)
    is_live(browser)
    for page in PAGES:
        go(browser, page)
        browser.find(".section")
        if page == "changes":
            browser.find("tr[data-key]")
        width = browser.run("return document.documentElement.scrollWidth")
        assert width <= size[0], page
        # The way to the other pages is seen without a search for it.
        for link in browser.all("nav a"):
            assert 0 <= link.rect["x"] <= size[0] - link.rect["width"], link.text
        browser.screenshot(Path(SHOTS or tmp_path) / f"{page}-{size[0]}.png")
    assert browser.console() == []


def test_colours_can_be_chosen(browser: Browser, node: NodeProcess) -> None:
    browser.prefer("light")
    log_in(browser, node)
    is_live(browser)
    assert [label.text.split()[0] for label in browser.all(".tool-label")] == ["Bucket", "Theme"]

    def background() -> str:
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    light = background()
    Select(browser.find("#theme")).select_by_value("dark")
    assert background() != light
    browser.driver.refresh()
    is_live(browser)
    assert background() != light
    Select(browser.find("#theme")).select_by_value("auto")
    assert background() == light
    browser.prefer("dark")
    assert background() != light

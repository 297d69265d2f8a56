"""The page of a lake in a real browser: no node, no Spark, only tables and the notes beside them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.support.ui import Select

from headwater.lake.lake import LakeSettings
from headwater.lake.lake_look import LakeWatch, LandingNote, keep_landing, keep_verdict
from headwater.lake.location import Location
from headwater.lake.verify import CollectionVerdict, Verification
from headwater.lake.verify_scan import Finding, FindingKind
from headwater.lake_page.app import LakeState, PageAddress, serving_page
from support.browser import DESKTOP, PHONE, Browser, axe_findings
from support.lake_model import HOTEL, SmallLake, with_columns

PAGES = ("overview", "timeline", "tables")
DEFAULT = "_default._default"
SHOTS = os.environ.get("HEADWATER_SCREENSHOTS")
"""A folder to keep screenshots in, for people to look at."""
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with a rollback, rejects and something pending."""
    directory = tmp_path_factory.mktemp("page") / "lake"
    small = SmallLake(directory, settings=with_columns(LakeSettings(), {DEFAULT: "n INT, name STRING"}))
    small.write(0, "kept", value=b'{"n": 1, "name": "<img src=x onerror=alert(1)>"}')
    small.write(1, "lost", *(f"a-rather-long-key::{'x' * 80}::{number}" for number in range(5)), value=b'{"n": 2}')
    small.write(2, "bad", value=b'{"n": "a word"}')
    small.land()
    small.write(1, "lost", value=b'{"n": 3}')
    small.write(3, "room", collection=HOTEL, value=b'{"beds": 2}')
    small.land()
    small.bucket.fail_over(1, 6)
    small.land()
    small.write(0, "new")
    small.land(merges=False)
    return directory


def note(**others: Any) -> LandingNote:
    status = {"doing": "waiting", "lag_s": 0.4, "documents_age_s": 2.5, "lag_seqnos": 17, "failures": 0}
    facts: dict[str, Any] = {"time_s": time.time(), "started_s": time.time() - 60, "is_running": True, "every_s": 5.0}
    facts |= {"source": "couchbase://127.0.0.1:11210/shop", "bucket": "shop", "host": "here", "status": status}
    return LandingNote(**{**facts, **others})


@pytest.fixture
def page(directory: Path, browser: Browser) -> Iterator[str]:
    keep_landing(Location.of(str(directory)), note())
    state = LakeState(LakeWatch(Location.of(str(directory))))
    state.every_s, state.share_max = 0.0, float("inf")
    with serving_page(state, PageAddress.make("0", None)) as url:
        yield url
        browser.open("about:blank")
    # Whatever a test does: no request to another host.
    assert browser.hosts_asked() <= {httpx.URL(url).netloc.decode(), ""}


def go(browser: Browser, page: str, name: str) -> None:
    browser.open(f"{page}#/{name}")
    browser.find(f"nav a[href='#/{name}'][aria-current=page]")
    browser.find(".section")


def test_the_overview_says_how_the_landing_stands(browser: Browser, page: str, directory: Path) -> None:
    go(browser, page, "overview")
    assert "was written more than" in browser.find("[data-landing=running]").text
    tiles = {tile.text.split("\n")[0]: tile.text for tile in browser.all(".tile")}
    assert "17 seqnos" in tiles["Lag"]
    assert "1 change pending, 17 seqnos to land" in tiles["Documents are behind"]
    assert browser.find(".status.live").text == "live"
    assert "1\nof vbuckets" in tiles["Rollbacks undone"]
    assert "1\n" in tiles["Rejects"]
    assert "No verify" in browser.find("[aria-labelledby=verify-title]").text
    location = Location.of(str(directory))
    # What another process notes is seen without a restart.
    aside = {"name": "shop.orders", "reason": "its log can't be read", "hint": "Bring it back"}
    wrong = {"tables_set_aside": 3, "set_aside": [aside], "catalog_failure": "it fails. Wait"}
    keep_landing(location, note(status={**note().status, **wrong}))
    browser.find(".health.bad")
    told = [line.text for line in browser.all(".health.bad")]
    assert "The table of shop.orders is set aside" in told[0]
    assert "its log can't be read. Bring it back." in told[0]
    assert told[1] == "2 more tables are set aside: the log names them."
    assert "It fails. Wait." in [line.text for line in browser.all(".health.warn")]
    keep_landing(location, note(is_running=False, failure="the bucket 'shop' is gone"))
    assert "the bucket 'shop' is gone" in browser.find("[data-landing=failed]").text
    assert "at most" in browser.find(".tile").text
    assert browser.find(".status.lost").text.startswith("failed at")
    keep_landing(location, note(time_s=time.time() - 3600))
    browser.find("[data-landing=silent] .bad")
    assert browser.find(".status.lost").text.startswith("no news since")
    keep_landing(location, note(is_running=False))
    assert "was stopped at" in browser.find("[data-landing=stopped] .warn").text
    assert browser.find(".status").text.startswith("stopped at")
    assert browser.all(".status.live") == []
    finding = Finding(kind=FindingKind.MISSING, table="documents/x", what="key-7", says="is missing")
    found = Verification(
        collections=(CollectionVerdict(name="x", landed=1, pending=0, differing=1),),
        findings=(finding,),
        counts={(FindingKind.MISSING, "documents/x"): 1},
    )
    assert keep_verdict(location, found, compared="all collections") is None
    assert "key-7 is missing" in browser.find("[data-equal=false] .findings").text
    assert browser.console() == []


DRAWN_SHARE = """
const canvas = document.querySelector("[aria-label^='Rows of each batch'] canvas");
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const columns = new Set();
for (let at = 0; at < data.length; at += 4) {
  if (data[at + 3] > 20 && data[at + 2] - data[at + 1] > 60) columns.add((at / 4) % canvas.width);
}
return columns.size / canvas.width;
"""


def test_batches_are_bars_with_nothing_between_them(browser: Browser, page: str) -> None:
    go(browser, page, "overview")
    share = browser.until(lambda: browser.run(DRAWN_SHARE), "no batch is drawn")
    assert share < 0.3


def test_a_page_whose_server_is_gone_says_since_when(browser: Browser, directory: Path) -> None:
    with serving_page(LakeState(Location.of(str(directory)), landing=note), PageAddress.make("0", None)) as url:
        go(browser, url, "overview")
    lost = browser.find(".status.lost").text
    assert re.fullmatch(r"no answer since \d\d:\d\d:\d\d", lost)
    assert lost.removeprefix("no answer ") in browser.find(".health.bad").text
    assert browser.find("#now-title").text.startswith("As of")
    browser.open("about:blank")


def test_a_rollback_says_what_was_undone_and_why(browser: Browser, page: str) -> None:
    go(browser, page, "timeline")
    Select(browser.find("#kind")).select_by_value("rollback")
    event = browser.find(".events li[data-kind=rollback]")
    assert "1 change of 1 vbucket undone in batch 2" in event.text
    assert "A failover, a crash or a restore: 1 vbucket" in event.text
    event.find_element("css selector", "button.disclose").click()
    assert "vbucket 1: from seqno 7 back to 6, then read on to 6" in browser.find(".undone-parts").text
    assert "1 change, of 1 document\n" in browser.find(".undone .sample").text
    assert "lost" in browser.find(".undone .sample tbody").text
    assert browser.console() == []


def test_tables_have_their_columns_samples_and_rejects(browser: Browser, page: str) -> None:
    go(browser, page, "tables")
    row = browser.find(f"tr[data-table='documents/{DEFAULT}']")
    assert "fixed" in row.text
    row.find_element("css selector", "button.disclose").click()
    sample = browser.find(".table-details .sample").text
    assert "<img src=x onerror" in sample
    assert "name STRING" in browser.find(".columns").text
    rejected = browser.find(f"[data-rejects='{DEFAULT}'] .sample").text
    assert "bad" in rejected
    assert "a word" in rejected
    assert browser.console() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_view_fits_and_has_no_serious_faults(
    browser: Browser, page: str, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    browser.resize(size)
    browser.prefer(scheme)
    for name in PAGES:
        go(browser, page, name)
        for button in browser.all("button.disclose")[:2]:
            button.click()
            browser.find(".sample")
        assert browser.run("return document.documentElement.scrollWidth") <= size[0], name
        assert axe_findings(browser) == [], name
        browser.screenshot(Path(SHOTS or tmp_path) / f"lake-{name}-{size[0]}-{scheme}.png")
    assert browser.console() == []


def test_elsewhere_the_page_needs_its_token(browser: Browser, directory: Path) -> None:
    state = LakeState(LakeWatch(Location.of(str(directory))))
    with serving_page(state, PageAddress.make("0", TOKEN)) as url:
        browser.open(url)
        browser.find("#token").send_keys("another-token-altogether")
        browser.find("button[type=submit]").click()
        assert "wrong" in browser.find("[role=alert]").text
        assert axe_findings(browser) == []
        browser.find("#token").send_keys(TOKEN)
        browser.find("button[type=submit]").click()
        browser.find("[data-test=health]")
        assert browser.run("return document.cookie") == ""
        browser.find(".top-tools button").click()
        browser.find("#token")
        # The browser itself notes the refusal; nothing else may be there.
        assert [line for line in browser.console() if "401" not in line] == []
        browser.open("about:blank")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_several_pipelines_are_listed_and_lead_to_their_lakes(
    browser: Browser, directory: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    location, away = Location.of(str(directory)), note(is_running=False, failure="the bucket 'shop' is gone")
    states = {"a shop": LakeState(location, landing=note), "bad": LakeState(location.join("no"), landing=lambda: away)}
    browser.resize(size)
    with serving_page(states, PageAddress.make("0", TOKEN)) as url:
        browser.open(url)
        browser.find("#token").send_keys(TOKEN)
        browser.find("button[type=submit]").click()
        assert "1 of 2 run as they should" in browser.find("[aria-labelledby=pipelines-title]").text
        bad = browser.find("tr[data-pipeline=bad][data-state=failed]")
        assert "the bucket 'shop' is gone" in bad.text
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
        assert axe_findings(browser) == []
        browser.screenshot(Path(SHOTS or tmp_path) / f"pipelines-{size[0]}.png")
        browser.find("tr[data-pipeline='a shop'] a").click()
        assert "was written more than" in browser.find("[data-landing=running]").text
        # Links and samples are of this lake.
        browser.find("nav a[href='#/a%20shop/tables']").click()
        row = browser.find(f"tr[data-table='documents/{DEFAULT}']")
        row.find_element("css selector", "button.disclose").click()
        assert "<img src=x onerror" in browser.find(".table-details .sample").text
        browser.find("nav a[href='#/']").click()
        browser.find("tr[data-pipeline=bad] a").click()
        assert "the bucket 'shop' is gone" in browser.find("[data-landing=failed]").text
        assert "can’t be read" in browser.find(".empty").text
        assert [line for line in browser.console() if "401" not in line] == []
        browser.open("about:blank")

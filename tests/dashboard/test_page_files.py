"""The built page: served with its headers, from this host alone, and built from the sources of today."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from support.dashboard_world import serving

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headwater"
DASHBOARD, LAKE_PAGE = PACKAGE / "node" / "http" / "dashboard" / "assets", PACKAGE / "lake_page" / "assets"
SOURCES = {DASHBOARD: ("src",), LAKE_PAGE: ("src", "lake")}
WEB = ROOT / "web"
BUNDLE_BYTES_MAX = 160_000

both_pages = pytest.mark.parametrize("assets", SOURCES, ids=["dashboard", "lake"])


@both_pages
def test_the_page_was_built_from_the_sources_that_are_here(assets: Path) -> None:
    digest = hashlib.sha256()
    for folder in SOURCES[assets]:
        for path in sorted((WEB / folder).iterdir(), key=lambda path: path.name):
            digest.update(path.name.encode() + path.read_bytes())
    digest.update((WEB / "package-lock.json").read_bytes())
    built = re.search(r'name="sources" content="(\w+)"', (assets / "index.html").read_text())
    assert built[1] == digest.hexdigest(), "run `npm ci && npm run build` in web/"


@both_pages
def test_the_page_is_small_and_names_no_other_host(assets: Path) -> None:
    text = "".join(path.read_text() for path in assets.iterdir())
    assert len(text) < BUNDLE_BYTES_MAX
    foreign = {host for host in re.findall(r"https?://([\w.-]+)", text) if host not in ("www.w3.org", "127.0.0.1")}
    assert foreign == set()


def test_the_lock_file_names_no_address() -> None:
    assert "resolved" not in (WEB / "package-lock.json").read_text()


async def test_the_page_and_its_headers(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        page = await world.client.get("/ui/")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-store"
        named = re.findall(r'(?:src|href)="(/ui/assets/[^"]+)"', page.text)
        assert len(named) == 3
        for path in named:
            answer = await world.client.get(path)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
        for path in ("/ui/assets/no.js", "/ui/assets/..%2f__init__.py", "/ui/assets/../dashboard.py"):
            assert (await world.client.get(path)).status_code == 404


async def test_a_browser_is_sent_from_the_root_to_the_page_and_others_are_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        sent = await world.client.get("/", headers={"Accept": "text/html,*/*"})
        assert (sent.status_code, sent.headers["location"]) == (303, "/ui/")
        assert (await world.client.get("/")).json()["name"] == "headwater"

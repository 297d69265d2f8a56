"""The site is made of the pages as they are written for GitHub: links, code blocks, the menu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from handbook import site
from handbook.pages import ROOT


def test_links_lead_to_pages_of_the_site() -> None:
    text = "[a](../start.md#set-up) [b](../../examples/README.md) [c](../../deploy/compose.yaml) [d](https://x.org/y)"
    assert site.relinked("docs/guides/landing.md", text) == (
        "[a](../start.md#set-up) [b](../examples/index.md) [c](../deploy/compose.yaml.md) [d](https://x.org/y)"
    )
    assert site.relinked("examples/README.md", "[e](search_index.py) [f](../docs/start.md)") == (
        "[e](search_index.py.md) [f](../start.md)"
    )
    assert site.relinked("docs/start.md", "[g](nothing.md)") == "[g](nothing.md)", "MkDocs is to report it"


def test_code_blocks_keep_their_language_only() -> None:
    text = "```bash not run: a reason\n[a](../README.md)\n```\n\n```python\nx\n```\n"
    assert site.relinked("docs/start.md", text) == "```bash\n[a](../README.md)\n```\n\n```python\nx\n```\n"


def test_the_menu_has_every_page_once() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, dict):
            entry = [one for below in entry.values() for one in below]
        return [entry] if isinstance(entry, str) else [page for one in entry for page in pages(one)]

    menu = pages(site.menu((ROOT / "docs" / "index.md").read_text()))
    written = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    made = [site.site_path(path) for path in site.pages_beside_docs()]
    assert sorted(menu) == sorted([*written, *made])


def test_examples_are_pages() -> None:
    page = site.pages_beside_docs()["examples/search_index.py"]
    assert page.startswith("# search_index.py\n")
    assert (ROOT / "examples" / "search_index.py").read_text().rstrip() in page


@pytest.mark.soak
def test_the_site_is_built_and_a_bad_link_fails_it(tmp_path: Path) -> None:
    pytest.importorskip("material")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bucket" in (tmp_path / "site" / "search" / "search_index.json").read_text()
    bad = tmp_path / "docs"
    bad.mkdir()
    (bad / "index.md").write_text("# Index\n\n[nothing](nothing.md)\n")
    config = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {bad}\nhooks: []\n"
    (tmp_path / "mkdocs.yml").write_text(config)
    done = subprocess.run([*build, "-f", str(tmp_path / "mkdocs.yml")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "contains a link 'nothing.md'" in done.stderr

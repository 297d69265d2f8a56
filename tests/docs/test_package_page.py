"""The page of the package on an index: README, with no link that leads nowhere there."""

from __future__ import annotations

import re
from pathlib import Path

from handbook.package_page import absolute

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.com/headwater"


def test_every_link_of_readme_leads_to_a_file_of_the_repository() -> None:
    page = absolute((ROOT / "README.md").read_text(), REPOSITORY, "v1")
    targets = [match[1] for match in re.finditer(r"\]\(([^)#]+)[^)]*\)", page)]
    ours = [target for target in targets if target.startswith(REPOSITORY)]
    assert all(target.startswith("https://") for target in targets)
    assert any(target.startswith(f"{REPOSITORY}/raw/v1/docs/images/") for target in ours)
    assert all((ROOT / re.sub(rf"{REPOSITORY}/\w+/v1/", "", target)).exists() for target in ours)


def test_code_and_links_to_elsewhere_stay() -> None:
    page = "[a](b.md#c) ![p](d.png) [![p](d.png)](b.md) [e](#f) [g](https://h.example)\n\n```\n[a](b.md)\n```\n"
    at = f"{REPOSITORY}/blob/v1"
    raw = f"{REPOSITORY}/raw/v1"
    assert absolute(page, REPOSITORY, "v1") == (
        f"[a]({at}/b.md#c) ![p]({raw}/d.png) [![p]({raw}/d.png)]({at}/b.md) [e](#f) [g](https://h.example)\n\n"
        "```\n[a](b.md)\n```\n"
    )

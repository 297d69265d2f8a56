"""README as the package's page on an index: a build hook, which `pyproject.toml` names.

README is written for the repository: it links to files and shows pictures next to it. The page of a package has no
such files, so its links are changed to lead to the repository, at the tag of this version. This module imports only
the standard library and the builder: the build has its own environment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURES = (".gif", ".jpg", ".png", ".svg")

_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_OUTSIDE = re.compile(r"[a-z]+:|#|/")
_FENCED = re.compile(r"^```.*?^```[ \t]*$", re.M | re.S)


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page with links to files of a repository. Code blocks stay as they are."""

    def replaced(link: re.Match[str]) -> str:
        if _OUTSIDE.match(link["target"]):
            return link[0]
        kind = "raw" if link["target"].endswith(PICTURES) else "blob"
        return f"]({repository}/{kind}/{tag}/{link['target']})"

    parts: list[str] = []
    at = 0
    for block in _FENCED.finditer(text):
        parts += [_LINK.sub(replaced, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, _LINK.sub(replaced, text[at:])])


class PackagePage(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        source = (root / "src" / "headwater" / "_version.py").read_text(encoding="utf-8")
        version = re.search(r'__version__ = "([^"]+)"', source)
        assert version is not None, "_version.py names the version"
        text = (root / "README.md").read_text(encoding="utf-8")
        page = absolute(text, metadata["urls"]["Repository"], f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": page}

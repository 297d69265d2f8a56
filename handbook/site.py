"""The documentation as a site: a hook for MkDocs, which `mkdocs.yml` names.

The pages are written for GitHub: they link to files of the repository outside `docs`, and note after the language of a
code block whether a test runs it. This hook turns such files into pages, changes links to lead to these, and reduces
code blocks to their language. The menu is the list in `docs/index.md`, so that there is no second list to maintain.
"""

from __future__ import annotations

import json
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = "docs"
NAMED_PAGES = {"examples/README.md": "examples/index.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository outside `docs`, and their paths on the site."""
EXAMPLES = "Examples"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".service": "ini", ".jsonl": "json"}
FILE_BYTES_MAX = 256 * 1024
SCRIPTS = "build/site"
"""Where `scripts/make-site` puts the script that draws diagrams."""

_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_OUTSIDE = re.compile(r"[a-z]+:|/|#")
_FENCED = re.compile(r"^```.*?^```[ \t]*$", re.M | re.S)
_FENCE = re.compile(r"^(?P<fence>```\w+)[ \t]+\S.*$", re.M)
_SECTION = re.compile(r"^\*\*(?P<title>[^*\n]+)\*\*$", re.M)


# --- the paths of the repository's files on the site --------------------------------------------------------------


def site_path(path: str) -> str:
    """Return the page for a file or a folder of the repository; other files of `docs` keep their paths."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return NAMED_PAGES.get(path, f"{path}.md")


def targets(path: str, text: str) -> list[str]:
    """Return the files of the repository that a page links to, by their paths in the repository."""
    found = [match["target"] for match in _LINK.finditer(_FENCED.sub("", text))]
    folder = posixpath.dirname(path)
    return [posixpath.normpath(posixpath.join(folder, one)) for one in found if not _OUTSIDE.match(one)]


def relinked(path: str, text: str) -> str:
    """Return a page with links to pages of the site. A broken link stays, and MkDocs reports it."""
    here = posixpath.dirname(site_path(path))

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if _OUTSIDE.match(target) or not (ROOT / there).exists():
            return match[0]
        return f"{match['before']}{posixpath.relpath(site_path(there), here or '.')}{match['anchor'] or ''})"

    parts: list[str] = []
    at = 0
    for block in _FENCED.finditer(text):
        parts += [_LINK.sub(replaced, text[at : block.start()]), _FENCE.sub(r"\g<fence>", block[0])]
        at = block.end()
    return "".join([*parts, _LINK.sub(replaced, text[at:])])


# --- pages for files that are not pages ---------------------------------------------------------------------------


def shown(path: str) -> str:
    """Return a file of the repository as a page, or a folder with all its files."""
    there = ROOT / path
    if there.suffix == ".ipynb":
        return notebook_page(there)
    files = sorted(one for one in there.iterdir() if one.is_file()) if there.is_dir() else [there]
    parts = [f"# {there.name}", f"`{path}` of the repository."]
    for file in files:
        assert file.stat().st_size <= FILE_BYTES_MAX, f"{file} is too large to be shown as a page"
        language = "dockerfile" if file.name == "Dockerfile" else LANGUAGES.get(file.suffix, "text")
        title = [f"## {file.name}"] if there.is_dir() else []
        parts += [*title, f"````{language}\n{file.read_text(encoding='utf-8').rstrip()}\n````"]
    return "\n\n".join(parts) + "\n"


def notebook_page(file: Path) -> str:
    """Return the cells of a notebook, without their output."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    sources = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{source}\n```" if is_code else source for source, is_code in sources) + "\n"


@cache
def pages_beside_docs() -> dict[str, str]:
    """Return the pages for files outside `docs` that other pages link to, by their paths in the repository."""
    texts = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in sorted((ROOT / DOCS).rglob("*.md"))
    }
    found: dict[str, str] = {}
    waiting = [*NAMED_PAGES, *(target for path, text in texts.items() for target in targets(path, text))]
    while waiting:
        path = waiting.pop(0)
        if path in found or path.startswith((f"{DOCS}/", "..")) or not (ROOT / path).exists():
            continue
        found[path] = (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else shown(path)
        if path.endswith(".md"):
            waiting += targets(path, found[path])
    return found


def menu(index: str) -> list[Any]:
    """Return the sections of the index, with the pages that each lists."""
    parts = _SECTION.split(index)
    sections: list[Any] = ["index.md"]
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        pages = [site_path(target) for target in targets(f"{DOCS}/index.md", text)]
        # Examples have their own section.
        sections.append({title: [page for page in pages if not page.startswith("examples/")]})
    examples = [site_path(path) for path in targets("examples/README.md", (ROOT / "examples/README.md").read_text())]
    own = [NAMED_PAGES["examples/README.md"], *(page for page in examples if page.startswith("examples/"))]
    others = [page for page in map(site_path, pages_beside_docs()) if page not in own]
    return [*sections, {EXAMPLES: own}, {"Files": others}]


# --- what MkDocs calls ----------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    config["nav"] = menu((ROOT / DOCS / "index.md").read_text(encoding="utf-8"))
    config["extra_javascript"] = [f"assets/{script.name}" for script in _scripts()]
    return config


def _scripts() -> list[Path]:
    return sorted((ROOT / SCRIPTS).glob("*.js"))


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages_beside_docs().items():
        files.append(File.generated(config, site_path(path), content=text))
    for script in _scripts():
        files.append(File.generated(config, f"assets/{script.name}", abs_src_path=str(script)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    on_site = page.file.src_uri
    beside = {site_path(path): path for path in pages_beside_docs()}
    return relinked(beside.get(on_site, f"{DOCS}/{on_site}"), markdown)

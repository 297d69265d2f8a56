"""The code blocks of the documentation, and how to run them.

The word after the language says what a block needs:

* `python`, `bash`: runs with a node available (`python node` means the same);
* `python spark`: runs with a Spark session, in the tests of Spark;
* `python lake`: runs like `python spark`, after what the page has loaded was landed in the directory `lake`;
* `python not run: reason`, `bash not run: reason`: does not run in a test, for this reason.

A block of `text` directly after one that runs is its output, with the lines in any order; … in it matches anything.
All other languages (`console` for usage lines and transcripts, `mermaid`, `text`) are not code.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headwater.testing.node import HeadwaterNode
from support.forked_program import shell_commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "text", "console", "mermaid", "json", "promql", "yaml", "toml", "sql"}
BASH_S_MAX = 60.0
USER, PASSWORD = "me", "secret"

_BLOCK = re.compile(
    r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$(?P<printed>\n\n```text\n.*?^```[ \t]*$)?", re.M | re.S
)
_PRINTED = re.compile(r"```text\n(?P<text>.*?)```", re.S)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    need: str
    code: str
    printed: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason_not_to_run(self) -> str | None:
        return self.need.removeprefix("not run:").strip() if self.need.startswith("not run") else None

    @property
    def runs_with_node(self) -> bool:
        return self.language in ("python", "bash") and self.need in ("", "node")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        language, _, need = match["info"].strip().partition(" ")
        printed = _PRINTED.search(match["printed"] or "")
        line = text[: match.start()].count("\n") + 1
        found.append(Block(page, line, language, need, match["code"], printed["text"] if printed else None))
    return found


# --- running ------------------------------------------------------------------------------------------------------


def with_node(code: str, node: HeadwaterNode) -> str:
    """Return the code with the addresses of a node instead of the default ones."""
    code = re.sub(r"couchbase://(?:127\.0\.0\.1|localhost)(?=/)", f"couchbase://{node.address}", code)
    return re.sub(r"http://(?:127\.0\.0\.1|localhost):8091", node.http_url, code)


def run_python(block: Block, code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, block.place, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def run_bash(block: Block, code: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "PATH": f"{shell_commands()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HEADWATER_USER": USER,
        "HEADWATER_PASSWORD": PASSWORD,
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BASH_S_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{block.place}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_printed(block: Block, printed: str) -> None:
    if block.printed is None:
        return
    wanted = sorted(block.printed.splitlines())
    found = sorted(printed.splitlines())
    fits = len(wanted) == len(found) and all(
        re.fullmatch(".*".join(map(re.escape, line.split("…"))), other)
        for line, other in zip(wanted, found, strict=True)
    )
    assert fits, f"{block.place} prints:\n{printed}\nand not:\n{block.printed}"

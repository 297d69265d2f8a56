"""The story of one order: its status in three places at three moments. README opens with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PLACES = ("the bucket", "Headwater's table", "a connector without rollbacks")
WRITTEN = "1. an application writes it"
PAID = "2. it is paid, on one node only"
LOST = "3. that node dies, its replica takes over"

README = Path(__file__).parents[1] / "README.md"
_PLACE = re.compile(r"(?P<open><!-- written by: scripts/demo --readme -->\n).*?(?P<close><!-- /written -->)", re.DOTALL)


@dataclass(slots=True)
class Story:
    """Rows are only what was seen."""

    key: str
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def to_text(self) -> str:
        lines = [(self.key, *PLACES), *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(PLACES) + 1)]
        aligned = ("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in aligned)


def written_into(page: str, story: Story) -> str:
    """The page with the story in its place."""
    return _PLACE.sub(lambda match: f"{match['open']}\n```text\n{story.to_text()}\n```\n\n{match['close']}", page)

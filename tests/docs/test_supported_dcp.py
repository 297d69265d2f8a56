"""The page on what is supported names every DCP message, and calls it what the code calls it."""

from __future__ import annotations

import re

from headwater.protocol.features import Opcode
from support.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "supported-dcp.md").read_text(encoding="utf-8")
MESSAGES = PAGE.partition("## Messages")[2].partition("\n##")[0]


def test_every_dcp_message_has_its_row() -> None:
    rows = re.findall(r"^\| 0x([0-9a-f]{2}) \| ([a-z-]+) \|", MESSAGES, re.M)
    named = {int(number, 16): name for number, name in rows}
    wanted = {int(one): one.name.removeprefix("DCP_").lower().replace("_", "-") for one in Opcode if "DCP_" in one.name}
    assert named == wanted
    assert len(rows) == len(named), "one is there twice"


def test_every_row_of_the_messages_is_whole() -> None:
    widths = {line.count("|") for line in MESSAGES.splitlines() if line.startswith("|")}
    assert len(widths) == 1

"""The contract for sans-IO code names every module that calls itself so."""

from __future__ import annotations

import ast
import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
CLAIM = re.compile(r"\b[Ss]ans-IO\b|\bPure\b")


def claims_to_be_sans_io(path: Path) -> bool:
    """Whether the docstring says so, in its first line or as the first word of a sentence."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return (
        CLAIM.search(docstring.partition("\n")[0]) is not None
        or re.search(r"\b(Sans-IO|Pure)\b", docstring) is not None
    )


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_module_that_calls_itself_sans_io_is_held_to_it() -> None:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter")
    named = contracts["importlinter:contract:sansio"]["source_modules"].split()
    claiming = {module_of(path) for path in (SOURCE / "headwater").rglob("*.py") if claims_to_be_sans_io(path)}
    assert len(claiming) > 10
    unnamed = {module for module in claiming if not any(f"{module}.".startswith(f"{name}.") for name in named)}
    assert unnamed == set()

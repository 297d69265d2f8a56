"""What the README and the docs name is there: modules, files, options of commands, variables and errors."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import click
import pytest
from handbook.command_sections import all_commands

from headwater import errors
from support.doc_blocks import PAGES, ROOT

SOURCE = ROOT / "src" / "headwater"
_FENCED = re.compile(r"^```.*?^```[ \t]*$", re.M | re.S)
_SPAN = re.compile(r"`([^`\n]+)`")
_FOLDERS = ("bench", "deploy", "docs", "examples", "handbook", "scripts", "src", "tests", "web")
_ELSEWHERE = {
    "--completion",
    "--help",
    "--version",
    "--jars",
    "--master",
    "--conf",
    "--py-files",
    "--archives",
    "--properties",
    "--index-url",
    "--build-arg",
}
"""Of all commands at once, of pytest, Spark, pip and Docker."""


def spans(page: Path) -> set[str]:
    """What stands between single backticks."""
    return set(_SPAN.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))))


def is_module(dotted: str) -> bool:
    """Whether a module, or something in one, has this name."""
    name, attributes = dotted, []
    while name:
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            name, _, last = name.rpartition(".")
            attributes.insert(0, last)
            continue
        for attribute in attributes:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@cache
def options() -> set[str]:
    return {
        name
        for _, command in all_commands()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    } | _ELSEWHERE


@cache
def source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py")))


@cache
def variables() -> set[str]:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    return set(re.findall(r"\bHEADWATER_[A-Z_]+\b", source() + tests))


def is_property(dotted: str) -> bool:
    """Whether it is a name that tables have in their properties: the source has it, or how it begins, as a text."""
    return bool(re.search(rf"""["']{re.escape(dotted.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))}""", source()))


def fault(span: str) -> str | None:
    """What is wrong with a name, or None where it is there or is no name that could be looked up."""
    if re.fullmatch(r"headwater(?:\.\w+)+", span):
        return None if is_module(span) or is_property(span) else "no such module, or nothing of that name in it"
    if re.fullmatch(rf"(?:{'|'.join(_FOLDERS)})/[\w./-]+", span):
        return None if (ROOT / span).exists() else "no such file"
    if re.fullmatch(r"[a-z_]+(?:/[a-z_]+)+\.py", span):
        return None if any(SOURCE.rglob(span)) else "no such file in src/headwater"
    if option := re.match(r"--[a-z][a-z-]+", span):
        return None if option[0] in options() else "no command has this option"
    if re.fullmatch(r"HEADWATER_[A-Z_]+", span):
        return None if span in variables() else "nobody reads this variable"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert {span: told for span in spans(page) if (told := fault(span))} == {}


def test_errors_that_are_named_in_tables_exist() -> None:
    """The page on connecting tells what goes wrong by the names of errors."""
    text = (ROOT / "docs" / "reference" / "connecting.md").read_text(encoding="utf-8")
    table = text.partition("## Errors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", table))
    assert len(named) > 5
    assert named - vars(errors).keys() == set()


@pytest.mark.parametrize(
    "span",
    ["headwater.nothing", "headwater.client.metrics.Nothing", "tests/nothing.py", "node/nothing.py", "--nothing"],
)
def test_what_is_not_there_is_missed(span: str) -> None:
    assert fault(span)


@pytest.mark.parametrize("span", ["headwater.client.metrics.ReaderMetrics", "tests/docs", "--data", "op = 'rollback'"])
def test_what_is_there_is_found(span: str) -> None:
    assert fault(span) is None

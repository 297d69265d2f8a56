"""What all parts say alike: numbers with their nouns, how an extra is installed, and the fields of the log."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater import phrases
from support.cases import case, case_apart


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 documents"), (1, "1 document"), (2, "2 documents"), (12_345, "12,345 documents")]
)
def test_numbers_with_their_nouns(count: int, words: str) -> None:
    assert phrases.counted(count, "document") == words


def test_nouns_of_their_own_kind() -> None:
    assert [phrases.counted(count, "batch", plural="batches") for count in (1, 2)] == ["1 batch", "2 batches"]


def test_a_process_reports_once_that_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the report is registered a second time, as a command with a log does."""
    monkeypatch.setattr(phrases._FirstCompile, "report", None)
    monkeypatch.setattr(phrases._FirstCompile, "is_reported", False)
    phrases.report_compile()
    reported: list[str] = []
    phrases.report_first_compile(lambda: reported.append("plain"))
    phrases.report_compile()
    phrases.report_first_compile(lambda: reported.append("in the log"))
    phrases.report_compile()
    assert reported == ["plain"]


class Installed:
    """What `importlib.metadata` finds."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


@case_apart(None, ["headwater[spark]"])
@case_apart({"url": "file:///a%20b/clone", "dir_info": {"editable": True}}, ["-e", "/a b/clone[spark]"])
@case_apart({"url": "file:///clone", "dir_info": {}}, ["/clone[spark]"])
@case_apart({"url": "file:///w/headwater.whl", "archive_info": {}}, ["/w/headwater.whl[spark]"])
@case_apart(
    {"url": "https://host/headwater", "vcs_info": {"vcs": "git", "commit_id": "1"}},
    ["headwater[spark] @ git+https://host/headwater"],
)
def test_an_extra_comes_from_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, words: list[str]
) -> None:
    monkeypatch.setattr(Distribution, "from_name", lambda name: Installed(origin))
    assert shlex.split(phrases.install_command("spark")) == [sys.executable, "-m", "pip", "install", *words]


def test_sources_that_were_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(Distribution, "from_name", missing)
    *_, option, what = shlex.split(phrases.install_command("node"))
    clone = Path(headwater.__file__).parents[2]
    assert (option, what) == ("-e", f"{clone}[node]")
    assert (clone / "pyproject.toml").exists()


# What is not to be printed is escaped, once, and nothing else is.


@case(b"fox", "fox")
@case("füchse 🦊".encode(), "füchse 🦊")
@case(b"\xff\xfe\x00bin", r"\xff\xfe\x00bin")
@case(b"a\nb\x1b[2J\x7f", r"a\nb\x1b[2J\x7f")
@case(b"\xc3\xa4\xc3", r"ä\xc3")
@case("\u2028\u202e".encode(), r"\u2028\u202e")
@case(rb"C:\new", r"C:\new")
@case(b"", "")
def test_bytes(data: bytes, shown: str) -> None:
    assert phrases.escaped_bytes(data) == shown
    assert shown.isprintable()


def test_text_that_no_bytes_make() -> None:
    assert phrases.escaped("a\ud800b") == r"a\ud800b"

"""The examples do what they say, on a real node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.cache_invalidator import Cache, changes_from_now, follow
from examples.search_index import SearchIndex
from handbook.error_tree import statuses_of

from headwater import errors
from headwater.protocol.features import Opcode
from headwater.testing.node import HeadwaterNode
from headwater.testing.nursery import Nursery
from support.forked_program import start_program

ROOT = Path(__file__).parents[2]
PROGRAM_S_MAX = 120.0


@pytest.fixture
def node(nursery: Nursery, tmp_path: Path) -> Iterator[HeadwaterNode]:
    with HeadwaterNode(nursery, tmp_path) as started:
        yield started


# --- the cache ----------------------------------------------------------------------------------------------------


def test_the_cache_forgets_what_changes(node: HeadwaterNode) -> None:
    node.write({"fox": 1, "owl": 1})
    loaded: list[str] = []

    def load(key: str) -> str:
        loaded.append(key)
        return key

    with node.connect() as client:
        cache = Cache(load, node.vbuckets)
        cache.get("fox")
        cache.get("owl")
        changes = changes_from_now(client)
        node.write({"fox": 2})
        follow(changes, cache, limit=1)
    assert [cache.get("fox"), cache.get("owl")] == ["fox", "owl"]
    assert loaded == ["fox", "owl", "fox"]


def test_the_cache_forgets_a_vbucket() -> None:
    loaded: list[str] = []
    cache = Cache(loaded.append, vbuckets=1)
    cache.get("fox")
    cache.forget_vbucket(0)
    cache.get("fox")
    assert loaded == ["fox", "fox"]


# --- the index ----------------------------------------------------------------------------------------------------


def test_the_index_follows_the_bucket(node: HeadwaterNode, tmp_path: Path) -> None:
    path = str(tmp_path / "index.db")

    def found(words: str) -> set[str]:
        index = SearchIndex(path, "travel")
        with node.connect() as client:
            index.catch_up(client)
        return {key for _, key in index.search(words)}

    node.write({"h1": {"city": "Graz"}, "h2": {"city": "Lyon"}})
    assert found("graz OR lyon") == {"h1", "h2"}
    node.write({"h1": {"city": "Oslo"}})
    assert found("graz OR lyon OR oslo") == {"h1", "h2"}
    assert found("graz") == set()
    node.rollback(node.vbucket_of("h1"), 1)
    assert found("graz") == {"h1"}, "the version before is back"
    assert found("oslo") == set()
    node.remove("h2")
    assert found("lyon") == set()
    node.create_collection("shop.hotels")
    node.write({"h3": {"city": "Riga"}}, collection="shop.hotels")
    assert found("riga") == {"h3"}
    node.drop_collection("shop.hotels")
    assert found("riga") == set()
    with node.connect() as client:
        assert SearchIndex(path, "travel").catch_up(client) == 0, "nothing is indexed twice"


# --- all of them, as they are run ---------------------------------------------------------------------------------


def start(node: HeadwaterNode, example: str, *arguments: str, password: str | None = None) -> subprocess.Popen[str]:
    login = {"HEADWATER_USER": node.user, "HEADWATER_PASSWORD": password or node.password}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return start_program(str(ROOT / "examples" / example), *arguments, **pipes, env={**os.environ, **login})


def run(node: HeadwaterNode, example: str, *arguments: str, password: str | None = None) -> tuple[int, str, str]:
    """The exit code, and what it has said."""
    process = start(node, example, *arguments, password=password)
    stdout, stderr = process.communicate(timeout=PROGRAM_S_MAX)
    return process.returncode, stdout, stderr


def test_the_index_as_a_program(node: HeadwaterNode, tmp_path: Path) -> None:
    node.write({"h1": {"city": "Graz"}})
    path = str(tmp_path / "index.db")
    code, printed, _ = run(node, "search_index.py", node.url, path, "--search", "graz")
    assert (code, printed.splitlines()) == (0, ["1 changes indexed", "_default._default h1"])
    code, printed, error = run(node, "search_index.py", node.url, path, "--search", '"')
    assert (code, printed) == (1, "0 changes indexed\n")
    assert error == "Error: \" can't be searched for: unterminated string\n"


def test_the_cache_as_a_program(node: HeadwaterNode) -> None:
    """What is written after it has said that it follows is not missed, and Ctrl-C is its usual end."""
    with start(node, "cache_invalidator.py", node.url) as process:
        assert process.stdout.readline() == f"following {node.url}\n"
        node.write({"fox": 1})
        assert process.stdout.readline() == "forgotten: fox\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PROGRAM_S_MAX) == ("", "")
        assert process.returncode == 130


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_wrong_command_line(node: HeadwaterNode, example: str) -> None:
    code, _, error = run(node, example)
    assert code == 2
    assert error.startswith("usage: ")


@pytest.mark.parametrize(("example", "arguments"), [("cache_invalidator.py", []), ("search_index.py", ["index.db"])])
def test_a_wrong_password(
    node: HeadwaterNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run(node, example, node.url, *arguments, password="wrong")
    assert code == 1
    assert error.startswith("Error: ")
    assert error.count("\n") == 1


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == set(EXAMPLES)


# --- readme -----------------------------------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#]+)(?:#[^)]*)?\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [m["target"] for m in LINK.finditer(page.read_text()) if not (page.parent / m["target"]).exists()]
    # `make bench` and the tests in a browser write these, and a fresh clone may not have them.
    assert [target for target in broken if not target.endswith(("performance.md", "dashboard.png"))] == []


def test_supported_dcp_lists_every_opcode() -> None:
    text = (ROOT / "docs" / "supported-dcp.md").read_text()
    listed = {int(number, 16) for number in re.findall(r"^\| 0x([0-9a-f]{2}) ", text, re.M)}
    assert {opcode for opcode in Opcode if opcode.name.startswith("DCP_")} <= listed


def family(root: type[Exception]) -> set[type[Exception]]:
    below = (family(cls) for cls in root.__subclasses__() if cls.__module__.startswith("headwater."))
    return {root}.union(*below)


def test_the_error_reference_lists_every_error_with_its_status() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", text, re.M))
    assert {cls.__name__ for cls in family(errors.HeadwaterError)} == rows.keys()
    for cls in errors.STATUS_ERRORS.values():
        assert rows[cls.__name__] == statuses_of(cls)

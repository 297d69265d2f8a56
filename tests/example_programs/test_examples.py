"""The examples do what they say, on a real node."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.cache_invalidator import Cache, follow
from examples.search_index import SearchIndex

from headwater.testing.node import HeadwaterNode
from headwater.testing.nursery import Nursery

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


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
        following = threading.Thread(target=follow, args=(client, cache), kwargs={"limit": 1})
        following.start()
        # "Now" is when the read begins, and nothing tells when that was.
        while following.is_alive():
            node.write({"fox": 2})
            following.join(0.1)
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


def test_the_index_as_a_program(node: HeadwaterNode, tmp_path: Path) -> None:
    node.write({"h1": {"city": "Graz"}})
    command = [sys.executable, str(ROOT / "examples" / "search_index.py"), node.url, str(tmp_path / "index.db")]
    login = {"HEADWATER_USER": node.user, "HEADWATER_PASSWORD": node.password}
    done = subprocess.run([*command, "--search", "graz"], capture_output=True, text=True, env=login, check=True)
    assert done.stdout.splitlines() == ["1 changes indexed", "_default._default h1"]


# --- all of them --------------------------------------------------------------------------------------------------


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py"}

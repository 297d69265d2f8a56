"""The consumer that the guide writes keeps a copy of the bucket, whatever happens. tests/docs runs its other code."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from headwater.cli import main
from support.node_process import PASSWORD, USER, NodeProcess

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "consumer.md"
EXAMPLE = re.compile(r"^```python node\n(?P<code>.*?)^```\n\n```text\n(?P<printed>.*?)^```\n", re.M | re.S)
EXAMPLES = [*EXAMPLE.finditer(GUIDE.read_text())]
URL = "couchbase://127.0.0.1/travel"
LOAD = re.compile(r"printf '%s\\n' (?P<lines>.*?) \|\n  headwater load (?P<arguments>.*?) --user", re.S)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    data = tmp_path_factory.mktemp("guide") / "data"
    with NodeProcess(data, "--vbuckets", "64", "--bucket", "travel").start() as started:
        loaded = LOAD.search(GUIDE.read_text())
        lines = "\n".join(re.findall(r"'(.*?)'", loaded["lines"]))
        run(started, "load", f"{started.url}/travel", "-", "--key", "hotel::{id}", stdin=lines)
        yield started
        assert "Traceback" not in started.log()


def run(node: NodeProcess, *arguments: str, stdin: str = "") -> str:
    result = CliRunner().invoke(main, [*arguments, "--user", USER, "--password", PASSWORD], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def printed_by(example: re.Match[str], node: NodeProcess) -> str:
    code = example["code"]
    assert f'"{URL}", user="me", password="secret"' in code
    code = code.replace(
        f'"{URL}", user="me", password="secret"', f"{node.url + '/travel'!r}, user={USER!r}, password={PASSWORD!r}"
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(GUIDE), "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_sqlite_follows_the_bucket(node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through changes, drops of collections and rollbacks, over several runs."""
    monkeypatch.chdir(tmp_path)
    [copy] = (example for example in EXAMPLES if "SqliteCheckpoint" in example["code"])
    url = f"{node.url}/travel"
    before = printed_by(copy, node)
    assert printed_by(copy, node) == before

    def load(city: str, *options: str) -> None:
        run(node, "load", url, "-", "--key", "hotel::{id}", *options, stdin=f'{{"id":1,"city":"{city}"}}')

    def places(key: str) -> tuple[int, int]:
        lines = [
            line for line in run(node, "tail", url, "--to", "now", "--key", key).splitlines() if "ROLLBACK" not in line
        ]
        vbucket, _, seqno = lines[-1].split()[2].partition(":")
        return int(vbucket), int(seqno)

    load("Riga")
    assert 'hotel::1 {"id":1,"city":"Riga"}' in printed_by(copy, node)
    vbucket, seqno = places("hotel::1")
    run(node, "drill", "rollback", url, "--vbucket", str(vbucket), "--to", str(seqno - 1))
    assert printed_by(copy, node) == before, "the version before is back"
    load("Oslo")
    assert 'hotel::1 {"id":1,"city":"Oslo"}' in printed_by(copy, node)

    run(node, "collections", "create", url, "shop")
    run(node, "collections", "create", url, "shop.hotels")
    load("Wien", "--collection", "shop.hotels")
    assert "Wien" in printed_by(copy, node)
    run(node, "collections", "drop", url, "shop.hotels")
    assert "Wien" not in printed_by(copy, node)
    assert printed_by(copy, node).count("hotel::1") == 1

"""`headwater drill` without a node: what it makes of answers, and of a wrong command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.cli.management import Answer
from support.cases import case_apart
from support.commands import answering

DONE = {"vbucket": 12, "rolled_back_to": 100, "vbuuid": 77, "high_seqno_before": 120}
ARGUMENTS = ["drill", "rollback", "http://127.0.0.1:1/default", "--user", "ann", "--password", "pencil"]


@case_apart(Answer(200, DONE), "vbucket 12 rolled back from 120 to 100: 20 changes lost (new vbuuid 77)\n")
@case_apart(
    Answer(200, {**DONE, "rolled_back_to": 0}),
    ("vbucket 12 rolled back from 120 to 0, as 100 lies before the history window: 120 changes lost (new vbuuid 77)\n"),
)
@case_apart(Answer(200, "hello"), "Error: the answer has no numbers of a rollback. Check that it is a Headwater node")
@case_apart(Answer(200, {}), "Error: the answer has no numbers of a rollback. Check that it is a Headwater node")
@case_apart(Answer(404, "Not found."), "Error: the node has no drills. Check that it is a Headwater node")
@case_apart(Answer(404, {"errors": {"_": 'Bucket with name "default" not found'}}), "Error: Bucket with name")
@case_apart(
    Answer(403, {"message": "Forbidden. User needs the following permissions", "permissions": ["x"]}),
    "Error: Forbidden. User needs the following permissions. Give the user the role admin on the bucket\n",
)
@case_apart(Answer(400, {"errors": {"_": "there is no vbucket 12"}}), "Error: there is no vbucket 12\n")
def test_what_is_said(monkeypatch: pytest.MonkeyPatch, answer: Answer, words: str) -> None:
    asked = answering(monkeypatch, lambda *_: answer)
    result = CliRunner().invoke(main, [*ARGUMENTS, "--vbucket", "12", "--to", "100"])
    assert asked == [("POST", "/headwater/buckets/default/vbuckets/12/rollback", {"to": "100"})]
    assert result.output.startswith(words)
    assert len(result.output.splitlines()) == 1
    assert result.exit_code == (1 if words.startswith("Error") else 0)


@case_apart("hold", Answer(200, {"held": True, "replicas": 1024}), "1,024 replicas held back\n")
@case_apart("hold", Answer(200, {"held": True, "replicas": 1}), "1 replica held back\n")
@case_apart("release", Answer(200, {"held": False, "replicas": 0}), "0 replicas released\n")
@case_apart(
    "release", Answer(200, {}), "Error: the answer has no numbers of replicas. Check that it is a Headwater node"
)
@case_apart("hold", Answer(404, "Not found."), "Error: the node has no drills. Check that it is a Headwater node")
def test_replicas(monkeypatch: pytest.MonkeyPatch, command: str, answer: Answer, words: str) -> None:
    asked = answering(monkeypatch, lambda *_: answer)
    arguments = ["drill", f"{command}-replicas", *ARGUMENTS[2:]]
    result = CliRunner().invoke(main, arguments)
    assert asked == [("POST", f"/headwater/buckets/default/replicas/{command}", None)]
    assert result.output.startswith(words)
    assert result.exit_code == (1 if words.startswith("Error") else 0)
    if result.exit_code == 0:
        assert json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output) == answer.content


def test_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, lambda *_: Answer(200, {"connections": 2}))
    assert CliRunner().invoke(main, ["drill", "cut-connections", *ARGUMENTS[2:]]).output == "2 connections cut\n"
    assert asked == [("POST", "/headwater/buckets/default/connections/cut", None)]


@pytest.mark.parametrize(
    "options", [[], ["--vbucket", "1"], ["--vbucket", "-1", "--to", "0"], ["--vbucket", "1", "--to", "x"]]
)
def test_a_wrong_command_line(options: list[str]) -> None:
    assert CliRunner().invoke(main, [*ARGUMENTS, *options]).exit_code == 2

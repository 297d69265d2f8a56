"""`headwater users` without a node: whom it asks, what it makes of answers, and where it gets passwords from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.cli import users as users_module
from headwater.cli.management import Answer, Management
from support.cases import case_apart
from support.commands import Asked, answering, printed, sentence

URL = "http://127.0.0.1:1"
LOGIN = ("--user", "ann", "--password", "pencil")
FORBIDDEN = Answer(403, {"message": "Forbidden. User needs the following permissions", "permissions": ["x"]})
KIM = {
    "id": "kim",
    "domain": "local",
    "name": "Kim",
    "roles": [
        {"role": "data_reader", "bucket_name": "beer", "scope_name": "*", "collection_name": "*"},
        {"role": "query_select", "bucket_name": "beer", "scope_name": "s", "collection_name": "c"},
        {"role": "admin", "origins": [{"type": "user"}]},
    ],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What a Couchbase cluster of two nodes has been asked for. It has one user, kim."""
    answers = {
        ("GET", "/pools"): Answer(200, {"implementationVersion": "7.6.0-2176-enterprise"}),
        ("GET", "/settings/rbac/users/local"): Answer(200, [KIM]),
        ("GET", "/settings/rbac/users/local/kim"): Answer(200, KIM),
        ("DELETE", "/settings/rbac/users/local/kim"): Answer(200, ""),
        ("PUT", "/settings/rbac/users/local/kim"): Answer(200, ""),
        ("PUT", "/settings/rbac/users/local/new"): Answer(200, ""),
    }
    return answering(monkeypatch, lambda _, *asked: answers.get(asked, Answer(404, "Unknown user.")))


def run(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> Result:
    clean = {"HEADWATER_USER": None, "HEADWATER_PASSWORD": None, "HEADWATER_NEW_PASSWORD": None}
    return CliRunner().invoke(main, ["users", *arguments, *LOGIN], env={**clean, **(env or {})}, input=stdin)


def done(*arguments: str, **parts: Any) -> str:
    return printed(run(*arguments, **parts))


def failed(*arguments: str, **parts: Any) -> str:
    return sentence(run(*arguments, **parts))


def test_the_list_of_a_couchbase_cluster_is_that_of_one_node(asked: Asked) -> None:
    assert done("list", URL) == (
        "USER  DISPLAY NAME  ROLES\nkim   Kim           admin data_reader[beer] query_select[beer:s:c]\n"
    )
    assert [path for _, path, _ in asked] == ["/pools", "/settings/rbac/users/local"]
    assert json.loads(done("list", URL, "--json")) == {
        "users": [
            {
                "user": "kim",
                "display_name": "Kim",
                "roles": ["admin", "data_reader[beer]", "query_select[beer:s:c]"],
                "groups": [],
                "nodes": ["127.0.0.1:1"],
            }
        ],
        "failed": {},
    }


def test_add(asked: Asked) -> None:
    arguments = ("add", URL, "new", "--role", "data_reader[beer]", "--role", "data_writer[beer]")
    assert done(*arguments, "--new-password", "violets") == "added new\n"
    form = {"roles": "data_reader[beer],data_writer[beer]", "password": "violets", "name": ""}
    assert asked[-1] == ("PUT", "/settings/rbac/users/local/new", form)
    assert json.loads(done(*arguments, "--new-password", "violets", "--json")) == {"user": "new", "not_on": {}}
    assert done("add", URL, "new", "--group", "lake", "--new-password", "violets") == "added new\n"
    assert asked[-1][2] == {"roles": "", "groups": "lake", "password": "violets", "name": ""}
    assert run("add", URL, "new", "--new-password", "violets").exit_code == 2
    sentence = failed("add", URL, "kim", "--role", "admin", "--new-password", "violets")
    assert sentence == "user 'kim' already exists. Change it with `headwater users change`"


def test_change_leaves_what_is_not_given(asked: Asked) -> None:
    assert done("change", URL, "kim", "--role", "data_reader[*]") == "changed kim\n"
    assert asked[-1][2] == {"roles": "data_reader[*]", "name": "Kim"}
    done("change", URL, "kim", "--new-password", "violets")
    assert asked[-1][2] == {
        "roles": "admin,data_reader[beer],query_select[beer:s:c]",
        "name": "Kim",
        "password": "violets",
    }
    done("change", URL, "kim", "--display-name", "")
    assert asked[-1][2]["name"] == ""
    assert failed("change", URL, "new", "--role", "admin") == "there is no user 'new'. See `headwater users list`"


def test_a_user_in_a_group_keeps_its_own_roles_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    by_group = {"role": "data_writer", "bucket_name": "beer", "origins": [{"type": "group", "name": "lake"}]}
    kim = {**KIM, "roles": [*KIM["roles"], by_group], "groups": ["lake"]}
    asked = answering(
        monkeypatch,
        lambda _, method, path: Answer(200, [kim] if path.endswith("local") else kim if method == "GET" else ""),
    )
    assert done("list", URL, "--this-node-only").splitlines()[1].endswith("query_select[beer:s:c]  lake")
    done("change", URL, "kim", "--display-name", "K")
    assert asked[-1][2] == {"roles": "admin,data_reader[beer],query_select[beer:s:c]", "name": "K", "groups": "lake"}
    done("change", URL, "kim", "--no-groups")
    assert asked[-1][2]["groups"] == ""


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = {"id": "lake", "description": "Who reads", "roles": [{"role": "data_reader", "bucket_name": "*"}]}
    none, found, stored = Answer(404, "Unknown group."), Answer(200, [lake]), Answer(200, "")
    asked = answering(
        monkeypatch, lambda _, method, path: none if path.endswith("none") else found if method == "GET" else stored
    )
    assert done("list-groups", URL) == "GROUP  DESCRIPTION  ROLES\nlake   Who reads    data_reader[*]\n"
    assert done("put-group", URL, "lake", "--role", "data_reader[*]", "--description", "Who reads") == "stored lake\n"
    form = {"roles": "data_reader[*]", "description": "Who reads"}
    assert asked[-1] == ("PUT", "/settings/rbac/groups/lake", form)
    assert json.loads(done("remove-group", URL, "lake", "--json")) == {"group": "lake", "not_on": {}}
    assert failed("remove-group", URL, "none") == "there is no group 'none'. See `headwater users list-groups`"


def test_remove(asked: Asked) -> None:
    assert done("remove", URL, "kim") == "removed kim\n"
    assert asked[-1][:2] == ("DELETE", "/settings/rbac/users/local/kim")
    assert failed("remove", URL, "new") == "there is no user 'new'. See `headwater users list`"


@pytest.mark.parametrize("command", [("add", URL, "new", "--role", "admin"), ("change", URL, "kim")])
def test_where_a_password_comes_from(asked: Asked, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    assert done(*command, env={"HEADWATER_NEW_PASSWORD": "from the air"})
    assert asked[-1][2]["password"] == "from the air"
    assert "Set HEADWATER_NEW_PASSWORD" in failed(*command)

    monkeypatch.setattr(users_module, "is_terminal", lambda: True)
    result = run(*command, stdin="typed in\ntyped in\n")
    assert result.exit_code == 0, result.output
    assert asked[-1][2]["password"] == "typed in"
    assert "typed in" not in result.output


@case_apart(FORBIDDEN, "the user may not manage users. Log in as a user with the role admin")
@case_apart(Answer(401, ""), "the user name or the password is wrong. Check --user and --password")
@case_apart(Answer(200, "fine"), "the answer is not a list of users")
@case_apart(Answer(200, [{"id": "kim"}]), "the answer is not a list of users")
@case_apart(Answer(400, {"errors": {"_": "no \x1b[31m", "roles": "bad"}}), "no ?[31m; roles: bad")
def test_answers_that_are_none(monkeypatch: pytest.MonkeyPatch, answer: Answer, words: str) -> None:
    monkeypatch.setattr(Management, "ask", lambda *_, **__: answer)
    assert failed("list", URL, "--this-node-only").startswith(words)


NODES = {"nodesExt": [{"thisNode": True}, {"hostname": "h", "services": {"mgmt": 8092}}]}


@case_apart(NODES, ["127.0.0.1:1", "h:8092"])
@case_apart({"nodesExt": [{"thisNode": True}, {"services": {"mgmt": 8092}}]}, ["127.0.0.1:1", "127.0.0.1:8092"])
@case_apart({"nodesExt": [{"hostname": "h", "services": {"mgmt": 8092}}]}, ["127.0.0.1:1"])
@case_apart({"nodesExt": [{"thisNode": True}]}, ["127.0.0.1:1"])
def test_the_list_asks_all_nodes(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], addresses: list[str]) -> None:
    asked = _cluster(monkeypatch, config, lambda address: Answer(200, [KIM]))
    for url in (URL, f"{URL}/beer"):
        asked.clear()
        assert json.loads(done("list", url, "--json"))["users"][0]["nodes"] == addresses
        assert asked == addresses
    asked.clear()
    done("list", URL, "--this-node-only")
    assert asked == ["127.0.0.1:1"]


def test_nodes_that_can_not_be_asked_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _cluster(monkeypatch, NODES, lambda address: Answer(200, [KIM]) if address == "h:8092" else FORBIDDEN)
    result = run("list", URL)
    assert (result.exit_code, result.stdout.splitlines()[1].split()[-3:]) == (1, ["1", "of", "2"])
    assert result.stderr == (
        "Error: can't be asked: 127.0.0.1:1: the user may not manage users. Log in as a user with the role admin\n"
    )


def test_a_change_goes_to_one_node_which_says_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _cluster(monkeypatch, NODES, lambda address: Answer(200, {"not_on": {"h:11210": "it is away"}}))
    result = run("remove", URL, "kim")
    assert (result.exit_code, result.stdout, asked) == (1, "removed kim\n", ["127.0.0.1:1"])
    assert result.stderr == "Error: not on h:11210: it is away. A node gets the change when it can be reached again\n"
    assert json.loads(run("remove", URL, "kim", "--json").stdout) == {
        "user": "kim",
        "not_on": {"h:11210": "it is away"},
    }


def test_a_config_that_tells_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    _cluster(monkeypatch, {"nodesExt": [{"thisNode": True}, {}]}, lambda address: Answer(200, []))
    assert "Give --this-node-only" in failed("list", URL)


def _cluster(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], answer: Callable[[str], Answer]) -> list[str]:
    """Nodes of ours with this config. Returns which of them will have been asked about users."""
    asked: list[str] = []

    def say(management: Management, method: str, path: str) -> Answer:
        if path == "/pools":
            return Answer(200, {"implementationVersion": "7.6.0-0000-headwater-0.1.0"})
        if path in ("/pools/default/nodeServices", "/pools/default/b/beer"):
            return Answer(200, config)
        asked.append(str(management.address))
        return answer(asked[-1])

    answering(monkeypatch, say)
    return asked

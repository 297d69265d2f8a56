"""Users over HTTP, as Couchbase's REST interface has them: they come, change and go, and what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from headwater.errors import StoreFull
from headwater.node.auth.accounts import load_users
from headwater.node.auth.users import Action, Users
from headwater.node.node_folder import NodeFolder
from headwater.protocol.sasl import Credentials
from support.cases import case_apart
from support.http_node import ADMIN, READER, WRITER, Client, Node

USERS = "/settings/rbac/users"
KIM = f"{USERS}/local/kim"
FORM = {"password": "violets", "roles": "data_reader[beer]", "name": "Kim Possible"}
ALL = {"scope_name": "*", "collection_name": "*"}


def stored(node: Node) -> Users:
    users = load_users(node.data / "users.json")
    assert users is not None
    return users


def errors(ask: Client, method: str, path: str, **parts: Any) -> dict[str, str]:
    """What was wrong with a request, by field."""
    answer = ask(method, path, **parts)
    assert answer.status_code == 400, answer.text
    found: dict[str, str] = answer.json()["errors"]
    return found


# --- looking ------------------------------------------------------------------------------------------------------


@case_apart(ADMIN, {"id": "ann", "domain": "admin", "roles": [{"role": "admin"}]})
@case_apart(
    READER,
    {
        "id": "rob",
        "domain": "local",
        "roles": [
            {"role": "data_dcp_reader", "bucket_name": "beer", **ALL},
            {"role": "data_reader", "bucket_name": "beer", **ALL},
        ],
    },
)
def test_who_am_i(ask: Client, auth: tuple[str, str], told: dict[str, Any]) -> None:
    assert ask("GET", "/whoami", auth=auth).json() == told
    roles = ask("GET", "/whoami", auth=WRITER).json()["roles"]
    assert {role["role"] for role in roles} == {"data_reader", "data_dcp_reader", "data_writer"}


def test_the_list(ask: Client) -> None:
    listed = ask("GET", USERS).json()
    assert [user["id"] for user in listed] == ["ann", "rob", "sid", "wim"]
    assert listed == ask("GET", f"{USERS}/local").json()
    assert listed[0] == ask("GET", f"{USERS}/local/ann").json()
    assert listed[0] == {
        "id": "ann", "domain": "local", "roles": [{"role": "admin", "origins": [{"type": "user"}]}], "groups": [],
        "external_groups": [], "name": "",
    }  # fmt: skip


def test_there_are_no_other_domains(ask: Client) -> None:
    assert ask("GET", f"{USERS}/external").json() == []
    for method, path in (("GET", f"{USERS}/galactic"), ("PUT", f"{USERS}/galactic/kim")):
        answer = ask(method, path)
        assert (answer.status_code, answer.json()) == (404, "Unknown user domain.")
    refused = errors(ask, "PUT", f"{USERS}/external/kim")
    assert refused == {"_": "This http API endpoint requires enterprise edition"}
    assert ask("DELETE", f"{USERS}/external/rob").status_code == 404


def test_the_roles(ask: Client) -> None:
    roles = ask("GET", "/settings/rbac/roles").json()
    assert all(role["name"] and role["desc"] for role in roles)
    of_node = [role["role"] for role in roles if "bucket_name" not in role]
    assert of_node == ["admin", "ro_admin", "query_system_catalog", "analytics_reader"]
    readers = [role for role in roles if role["role"] == "data_reader"]
    assert [role["bucket_name"] for role in readers] == ["*", "beer"]


def test_roles_on_collections_that_are_there(node: Node, ask: Client) -> None:
    roles = "ro_admin,data_reader[beer:_default],data_writer[beer:_default:_default],query_select[beer]"
    assert ask("PUT", KIM, data={**FORM, "roles": roles}).status_code == 200
    shown = {
        role["role"]: (role.get("scope_name"), role.get("collection_name")) for role in ask("GET", KIM).json()["roles"]
    }
    assert shown == {
        "data_reader": ("_default", "*"),
        "data_writer": ("_default", "_default"),
        "query_select": ("*", "*"),
        "ro_admin": (None, None),
    }
    assert stored(node).by_name["kim"].grants == node.users.by_name["kim"].grants
    assert "roles" in errors(ask, "PUT", KIM, data={**FORM, "roles": "data_reader[beer:_default:carts]"})
    kim = ("kim", FORM["password"])
    assert ask("GET", "/pools", auth=kim).json()["isROAdminCreds"] is True
    assert ask("GET", USERS, auth=kim).status_code == 403


# --- they come, change and go -------------------------------------------------------------------------------------


def test_a_user_comes_and_goes(node: Node, ask: Client) -> None:
    assert ask("GET", KIM).json() == "Unknown user."
    answer = ask("PUT", KIM, data=FORM)
    assert (answer.status_code, answer.json()) == (200, "")
    told = ask("GET", KIM).json()
    assert (told["id"], told["name"]) == ("kim", "Kim Possible")
    assert datetime.fromisoformat(told["password_change_date"]).tzinfo is not None
    assert told["roles"] == [{"role": "data_reader", "bucket_name": "beer", **ALL, "origins": [{"type": "user"}]}]
    assert ask("GET", "/whoami", auth=("kim", "violets")).status_code == 200
    assert stored(node).by_name == node.users.by_name

    assert ask("DELETE", KIM).status_code == 200
    assert ask("GET", "/whoami", auth=("kim", "violets")).status_code == 401
    assert "kim" not in stored(node).by_name
    answer = ask("DELETE", KIM)
    assert (answer.status_code, answer.json()) == (404, "Unknown user.")


def test_a_password_that_is_not_given_stays(node: Node, ask: Client) -> None:
    ask("PUT", KIM, data=FORM)
    assert ask("PUT", KIM, data={"roles": "data_writer[*]"}).status_code == 200
    assert ask("GET", "/whoami", auth=("kim", "violets")).json()["roles"][0]["role"] == "data_writer"
    assert not node.users.may("kim", Action.READ, "beer")
    assert ask("PUT", KIM, data={"password": "daisies"}).status_code == 200
    assert ask("GET", "/whoami", auth=("kim", "violets")).status_code == 401
    assert ask("GET", "/whoami", auth=("kim", "daisies")).json()["roles"] == []


def test_every_user_may_change_its_own_password(node: Node, ask: Client) -> None:
    before = READER[1]
    for password in ("daisies", "a:b:ü & c=d+e", "x" * 1024):
        auth = ("rob", before.encode())
        assert ask("POST", "/controller/changePassword", auth=auth, data={"password": password}).status_code == 200
        assert ask("GET", "/whoami", auth=auth).status_code == 401
        assert ask("GET", "/whoami", auth=("rob", password.encode())).json()["id"] == "rob"
        assert stored(node).check_password("rob", password)
        before = password


def test_no_password_is_logged_or_stored(node: Node, ask: Client) -> None:
    ask("PUT", KIM, data=FORM)
    ask("POST", "/controller/changePassword", auth=("kim", "violets"), data={"password": "daisies"})
    ask("DELETE", KIM)
    assert node.logged == [
        "'ann' stored user 'kim' with the roles data_reader[beer], with a new password",
        "'kim' changed its password",
        "'ann' removed user 'kim'",
    ]
    assert "violets" not in (node.data / "users.json").read_text()


def test_what_was_made_at_the_start_may_have_any_name(node: Node, ask: Client) -> None:
    node.accounts.load("a b/c@d", "pencil")
    node.users = node.accounts.in_force
    path = f"{USERS}/local/a%20b%2Fc%40d"
    assert ask("GET", path).json()["id"] == "a b/c@d"
    assert ask("PUT", path, data={"roles": "data_reader[*]"}).status_code == 200
    assert ask("DELETE", path).status_code == 200


def test_a_role_on_a_bucket_that_is_gone_may_be_kept(node: Node, ask: Client) -> None:
    assert node.bucket("wine") is None
    assert ask("PUT", f"{USERS}/local/sid", data={"roles": "data_reader[wine]"}).status_code == 200
    assert "roles" in errors(ask, "PUT", f"{USERS}/local/rob", data={"roles": "data_reader[wine]"})


def test_one_who_is_removed_while_it_logs_in(node: Node, ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(users: Users, name: str, password: str) -> bool:
        node.users = users.remove(name)
        return True

    monkeypatch.setattr(Users, "check_password", check)
    assert ask("GET", "/whoami", auth=READER).status_code == 401


# --- what is refused ----------------------------------------------------------------------------------------------


def test_unknown_roles_are_refused_with_those_that_are_known(node: Node, ask: Client) -> None:
    told = errors(ask, "PUT", KIM, data={**FORM, "roles": "root,data_reader[beer],query_select[wine]"})
    assert told.keys() == {"roles"}
    assert "root, query_select[wine]" in told["roles"]
    assert "admin, bucket_admin[BUCKET], bucket_full_access[BUCKET], data_reader[BUCKET]" in told["roles"]
    assert "kim" not in node.users.by_name


@pytest.mark.parametrize(
    "name", ["@kim", "a b", "a:b", "a/b", "a\tb", "a,b", "u" * 129, "a(b", "\x7f", ""], ids=lambda name: repr(name)[:9]
)
def test_impossible_names(node: Node, ask: Client, name: str) -> None:
    path = f"{USERS}/local/" + "".join(f"%{byte:02X}" for byte in name.encode())
    assert "Username" in errors(ask, "PUT", path, data=FORM)["_"]
    assert node.users.by_name.keys() == {"ann", "rob", "sid", "wim"}


@case_apart("short", "at least 6")
@case_apart("", "at least 6")
@case_apart("tab\tbed", "control")
@case_apart("nul\0nul", "control")
@case_apart("ü" * 513, "1024")
def test_impossible_passwords(node: Node, ask: Client, password: str, message: str) -> None:
    told = errors(ask, "PUT", KIM, data={**FORM, "password": password})
    assert told.keys() == {"password"}
    assert message in told["password"]
    told = errors(ask, "POST", "/controller/changePassword", auth=READER, data={"password": password})
    assert message in told["password"]
    assert node.users.check_password("rob", "quill")


def test_what_else_is_wrong_with_a_form(ask: Client) -> None:
    assert errors(ask, "PUT", KIM, data={"roles": "admin"}).keys() == {"password"}
    assert errors(ask, "PUT", KIM, data={**FORM, "groups": "staff"}).keys() == {"groups"}
    assert errors(ask, "PUT", KIM, data={**FORM, "colour": "red"}).keys() == {"colour"}
    assert "full name" in errors(ask, "PUT", KIM, data={**FORM, "name": "x" * 129})["_"]
    assert errors(ask, "POST", "/controller/changePassword").keys() == {"password"}


def test_the_last_admin_stays_one(node: Node, ask: Client) -> None:
    ann = f"{USERS}/local/ann"
    for method, form in (("DELETE", None), ("PUT", {"roles": "data_reader[*]"}), ("PUT", {"roles": "bucket_admin[*]"})):
        assert "no admin left" in errors(ask, method, ann, data=form)["_"]
    assert node.users.is_admin("ann")
    assert stored(node).is_admin("ann")
    ask("PUT", KIM, data={**FORM, "roles": "admin"})
    assert ask("DELETE", ann).status_code == 200
    assert errors(ask, "DELETE", KIM, auth=("kim", "violets")).keys() == {"_"}


def test_a_full_disk_changes_nothing(node: Node, ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: NodeFolder, users: Users) -> None:
        raise StoreFull("no room is left", hint="Free disk space")

    monkeypatch.setattr(NodeFolder, "store_users", full)
    before = node.users
    for method in ("PUT", "DELETE"):
        answer = ask(method, f"{USERS}/local/rob", data={"roles": ""})
        assert (answer.status_code, answer.json()) == (503, {"errors": {"_": "no room is left. Free disk space"}})
    assert node.users is before


# --- groups -------------------------------------------------------------------------------------------------------

GROUPS = "/settings/rbac/groups"
LAKE = f"{GROUPS}/lake"


def test_a_group_comes_and_goes_with_what_its_users_could_do_by_it(node: Node, ask: Client) -> None:
    lake = {"description": "Who reads", "roles": "data_dcp_reader[beer]"}
    assert ask("PUT", LAKE, data=lake).status_code == 200
    assert ask("PUT", KIM, data={**FORM, "groups": "lake"}).status_code == 200
    described = {"id": "lake", "description": "Who reads", "ldap_group_ref": ""}
    roles = [{"role": "data_dcp_reader", "bucket_name": "beer", **ALL}]
    assert ask("GET", LAKE).json() == {**described, "roles": roles}
    assert ask("GET", GROUPS).json() == [{**described, "roles": roles}]
    kim = ask("GET", KIM).json()
    assert kim["groups"] == ["lake"]
    assert {role["role"]: role["origins"] for role in kim["roles"]} == {
        "data_reader": [{"type": "user"}],
        "data_dcp_reader": [{"type": "group", "name": "lake"}],
    }
    assert node.users.may("kim", Action.STREAM, "beer")
    assert ask("DELETE", LAKE).json() == ""
    assert not node.users.may("kim", Action.STREAM, "beer")
    assert ask("GET", KIM).json()["groups"] == []
    assert [ask(method, LAKE).json() for method in ("GET", "DELETE")] == ["Unknown group."] * 2


def test_groups_that_can_not_be(ask: Client) -> None:
    assert errors(ask, "PUT", KIM, data={**FORM, "groups": "none,nor"}) == {"groups": "Groups do not exist: none, nor"}
    assert errors(ask, "PUT", LAKE, data={"roles": "data_reader[wine]"}).keys() == {"roles"}
    assert errors(ask, "PUT", LAKE, data={"ldap_group_ref": "cn=lake"}).keys() == {"ldap_group_ref"}
    assert errors(ask, "PUT", f"{GROUPS}/a b").keys() == {"_"}
    assert ask("PUT", LAKE, auth=READER, data={}).status_code == 403


# --- other nodes --------------------------------------------------------------------------------------------------


def test_a_change_says_which_nodes_do_not_have_it(node: Node, ask: Client) -> None:
    node.not_reached["10.0.0.2:11210"] = "it can't be reached"
    answer = ask("PUT", KIM, data=FORM)
    assert (answer.status_code, answer.json()) == (200, {"not_on": {"10.0.0.2:11210": "it can't be reached"}})
    assert node.logged[-1].endswith("with a new password; not on 10.0.0.2:11210 yet")


def test_whom_other_nodes_log_in_as_is_nobody_s_to_see_or_change(node: Node, ask: Client) -> None:
    node.accounts.let_nodes_in("beer", Credentials("@cluster-beer", "secret"))
    path, login = f"{USERS}/local/@cluster-beer", ("@cluster-beer", "secret")
    assert "@cluster" not in json.dumps(ask("GET", USERS).json())
    assert (ask("GET", path).status_code, ask("DELETE", path).status_code) == (404, 404)
    assert errors(ask, "PUT", path, data=FORM) == {"_": "Username cannot start with '@'"}
    assert ask("POST", "/controller/changePassword", auth=login, data={"password": "daisies"}).status_code == 404
    assert ask("PUT", KIM, data=FORM).status_code == 200
    assert ask("GET", "/whoami", auth=login).status_code == 200
    assert "@cluster-beer" not in stored(node).by_name

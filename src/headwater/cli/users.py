"""`headwater users`: list, add, change and remove the users and groups of a node, or of all nodes of a cluster."""

from __future__ import annotations

import http
import json
from dataclasses import asdict, dataclass
from typing import Any

from headwater.cli.management import Answer, ManagedNode, managed, no_list, nodes_of_cluster
from headwater.cli.options import fail, is_terminal
from headwater.cli.output import click, print_table
from headwater.errors import HeadwaterError, InvalidInput
from headwater.phrases import printable

NEW_PASSWORD_VARIABLE = "HEADWATER_NEW_PASSWORD"
_RBAC = ("settings", "rbac")
_USERS, _GROUPS = (*_RBAC, "users", "local"), (*_RBAC, "groups")
_ALL = "*"


@click.group()
def users() -> None:
    """List, add, change and remove users and groups.

    URL is couchbase://host[:port], or couchbases:// for TLS, of a Couchbase or a Headwater node; the command asks the
    node for its management port. http://host:port gives that port directly. The URL may name a bucket, which matters
    only if a node has buckets in several clusters.

    The nodes of a cluster share their users: a change on one node reaches the others. If some nodes do not have it yet,
    the command names them and exits with 1; they get the change when they can be reached. The user must be an admin.

    \b
    Examples:
      export HEADWATER_USER=admin HEADWATER_PASSWORD=…
      headwater users list couchbase://127.0.0.1
      headwater users add couchbase://127.0.0.1 lake --role 'data_dcp_reader[*]'
      headwater users change couchbase://127.0.0.1 lake
      headwater users remove couchbase://127.0.0.1 lake
      headwater users put-group couchbase://127.0.0.1 readers \\
        --role 'data_reader[*]'
      headwater users add couchbase://127.0.0.1 kim --group readers
    """


# --- arguments ----------------------------------------------------------------------------------------------------

_name_argument = click.argument("name", metavar="NAME")
_display_name_option = click.option("--display-name", metavar="TEXT", help="The user's full name.")
_group_option = click.option(
    "--group", "groups", multiple=True, metavar="GROUP", help="A group of the user. Repeat for more."
)
_new_password_option = click.option(
    "--new-password",
    metavar="PASSWORD",
    envvar=NEW_PASSWORD_VARIABLE,
    show_envvar=True,
    help="The user's password. By default, the command prompts for it. Others on the machine can see an option.",
)
_role_option = click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE",
    help="A role of the user or the group: admin, or bucket_admin, bucket_full_access, data_reader, "
    "data_writer or data_dcp_reader with a bucket, such as data_reader[travel], or [*] for all. data_reader and "
    "data_writer may name a scope or a collection, such as data_reader[travel:inventory:hotels]. Repeat for more.",
)


def _ask_for_password(name: str) -> str:
    if not is_terminal():
        raise InvalidInput(
            f"there is no password for {printable(name)}", hint=f"Set {NEW_PASSWORD_VARIABLE}, or give --new-password"
        )
    password: str = click.prompt(
        f"New password of {printable(name)}", hide_input=True, confirmation_prompt="The same again", err=True
    )
    return password


# --- users --------------------------------------------------------------------------------------------------------


@users.command("list")
@click.option("--this-node-only", is_flag=True, help="Do not ask the other nodes of the cluster.")
@managed()
def list_users(node: ManagedNode, this_node_only: bool) -> None:
    """List the users, their own roles and their groups.

    With several nodes, NODES shows how many of them have the user in this form. A user that differs between nodes is
    listed more than once: some node has not received a change yet.

    \b
    Example:
      headwater users list couchbase://127.0.0.1
    """
    first = node.management
    nodes = [first] if this_node_only else nodes_of_cluster(first, bucket=node.where.bucket)
    by_user: dict[_User, list[str]] = {}
    failed: dict[str, str] = {}
    for one in nodes:
        try:
            found = _accepted(one.ask("GET", *_USERS))
            for user in found if isinstance(found, list) else [None]:
                by_user.setdefault(_User.read(user), []).append(str(one.address))
        except HeadwaterError as error:
            if len(nodes) == 1:
                raise
            failed[str(one.address)] = str(error)
    ordered = dict(sorted(by_user.items(), key=lambda item: (item[0].name, item[1])))
    if node.as_json:
        members = [{**user.members(), "nodes": on} for user, on in ordered.items()]
        click.echo(json.dumps({"users": members, "failed": failed}))
    elif ordered:
        has_groups = any(user.groups for user in ordered)
        headings = ["USER", "DISPLAY NAME", "ROLES", *["GROUPS"] * has_groups, *["NODES"] * (len(nodes) > 1)]
        rows = []
        for user, on in ordered.items():
            cells = [user.name, user.display_name, " ".join(user.roles), *[" ".join(user.groups)] * has_groups]
            rows.append([*cells, f"{len(on)} of {len(nodes)}"])
        print_table(headings, rows)
    if failed:
        fail(f"can't be asked: {'; '.join(f'{address}: {reason}' for address, reason in failed.items())}")


@users.command("add")
@managed()
@_name_argument
@_role_option
@_group_option
@_new_password_option
@_display_name_option
def add_user(
    node: ManagedNode,
    name: str,
    roles: tuple[str, ...],
    groups: tuple[str, ...],
    new_password: str | None,
    display_name: str | None,
) -> None:
    """Add a user with roles, groups, or both.

    A name has up to 128 characters, no spaces and none of ()<>,;:\\"/[]?={}, and no @ in front. A password has at least
    6 characters.

    \b
    Examples:
      headwater users add couchbase://127.0.0.1 lake --role 'data_dcp_reader[*]'
      headwater users add couchbase://127.0.0.1 shop \\
        --role 'data_reader[travel]' --role 'data_writer[travel]'
      headwater users add couchbase://127.0.0.1 kim --group readers
      HEADWATER_NEW_PASSWORD=$(cat password.txt) \\
        headwater users add http://127.0.0.1:8091 root --role admin
    """
    if not roles and not groups:
        raise click.UsageError("give --role or --group: a user with neither may do nothing")
    if _user_on(node, name) is not None:
        raise InvalidInput(f"user {name!r} already exists", hint="Change it with `headwater users change`")
    form = {"roles": ",".join(roles), "name": display_name or ""}
    if groups:
        form["groups"] = ",".join(groups)
    form["password"] = _ask_for_password(name) if new_password is None else new_password
    _report(node, "added", "user", name, _accepted(node.ask("PUT", *_USERS, name, form=form)))


@users.command("change")
@managed()
@_name_argument
@_role_option
@_group_option
@click.option("--no-groups", is_flag=True, help="Remove the user from all groups.")
@_new_password_option
@_display_name_option
def change_user(
    node: ManagedNode,
    name: str,
    roles: tuple[str, ...],
    groups: tuple[str, ...],
    no_groups: bool,
    new_password: str | None,
    display_name: str | None,
) -> None:
    """Change a user's password, roles, groups or display name.

    Settings that are not given stay the same; if nothing is given, the command prompts for a new password. Roles
    replace all own roles of the user, and groups replace all groups. Privileges are checked on every request, so a
    change takes effect immediately. Connections that were opened with the old password stay open; to close them, remove
    the user and add it again.

    \b
    Examples:
      headwater users change couchbase://127.0.0.1 lake
      headwater users change couchbase://127.0.0.1 lake --role 'data_reader[*]'
    """
    if groups and no_groups:
        raise click.UsageError("--group and --no-groups say different things")
    if new_password is None and not roles and not groups and not no_groups and display_name is None:
        new_password = _ask_for_password(name)
    known = _user_on(node, name)
    if known is None:
        raise _no_such("user", name)
    form = {
        "roles": ",".join(roles or known.roles),
        "name": known.display_name if display_name is None else display_name,
    }
    kept = () if no_groups else groups or known.groups
    if kept or known.groups:
        form["groups"] = ",".join(kept)
    if new_password is not None:
        form["password"] = new_password
    _report(node, "changed", "user", name, _accepted(node.ask("PUT", *_USERS, name, form=form)))


@users.command("remove")
@managed()
@_name_argument
def remove_user(node: ManagedNode, name: str) -> None:
    """Remove a user. The user's open connections lose their privileges immediately, and the user's streams end.

    The last admin can't be removed.

    \b
    Example:
      headwater users remove couchbase://127.0.0.1 lake
    """
    _remove(node, "user", name, _USERS)


# --- groups -------------------------------------------------------------------------------------------------------


@users.command("list-groups")
@managed()
def list_groups(node: ManagedNode) -> None:
    """List the groups and their roles.

    \b
    Example:
      headwater users list-groups couchbase://127.0.0.1
    """
    found = _accepted(node.ask("GET", *_GROUPS))
    try:
        groups = [
            {"group": str(group["id"]), "description": str(group.get("description") or ""), "roles": _roles(group)}
            for group in found
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise no_list("groups") from error
    if node.as_json:
        click.echo(json.dumps({"groups": groups}))
    elif groups:
        rows = [[str(group["group"]), str(group["description"]), " ".join(group["roles"])] for group in groups]
        print_table(["GROUP", "DESCRIPTION", "ROLES"], rows)


@users.command("put-group")
@managed()
@_name_argument
@_role_option
@click.option("--description", metavar="TEXT", default="", help="What the group is for.")
def put_group(node: ManagedNode, name: str, roles: tuple[str, ...], description: str) -> None:
    """Create a group, or replace its roles. The change takes effect immediately.

    \b
    Example:
      headwater users put-group couchbase://127.0.0.1 readers \\
        --role 'data_reader[*]' --role 'data_dcp_reader[*]'
    """
    form = {"roles": ",".join(roles), "description": description}
    _report(node, "stored", "group", name, _accepted(node.ask("PUT", *_GROUPS, name, form=form)))


@users.command("remove-group")
@managed()
@_name_argument
def remove_group(node: ManagedNode, name: str) -> None:
    """Remove a group. Its users stay, and lose the roles of the group.

    \b
    Example:
      headwater users remove-group couchbase://127.0.0.1 readers
    """
    _remove(node, "group", name, _GROUPS)


# --- answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _User:
    name: str
    display_name: str
    roles: tuple[str, ...]
    """The user's own roles, without those of its groups."""
    groups: tuple[str, ...]

    @classmethod
    def read(cls, user: Any) -> _User:
        try:
            return cls(
                name=str(user["id"]),
                display_name=str(user.get("name") or ""),
                roles=_roles(user),
                groups=tuple(sorted(str(group) for group in user.get("groups") or ())),
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise no_list("users") from error

    def members(self) -> dict[str, Any]:
        members = asdict(self)
        return {"user": members.pop("name"), **members}


def _user_on(node: ManagedNode, name: str) -> _User | None:
    answer = node.ask("GET", *_USERS, name)
    return None if answer.status == http.HTTPStatus.NOT_FOUND else _User.read(_accepted(answer))


def _roles(members: dict[str, Any]) -> tuple[str, ...]:
    """Return the roles of a group, or a user's own roles. Servers before 6.5 have no groups, and report no origins."""
    return tuple(
        sorted(
            _read_role(role)
            for role in members["roles"]
            if any(origin["type"] == "user" for origin in role.get("origins") or ({"type": "user"},))
        )
    )


def _read_role(role: dict[str, str]) -> str:
    """Return a role in the form of `--role`: trailing `*` in the brackets are omitted."""
    parameters = [role[name] for name in ("bucket_name", "scope_name", "collection_name") if name in role]
    while len(parameters) > 1 and parameters[-1] == _ALL:
        parameters.pop()
    return f"{role['role']}[{':'.join(parameters)}]" if parameters else role["role"]


def _report(node: ManagedNode, what: str, kind: str, name: str, answer: Any) -> None:
    """Print what was done, and exit with code 1 if a node of the cluster does not have the change yet."""
    missing = answer.get("not_on", {}) if isinstance(answer, dict) else {}
    node.print(f"{what} {name}", {kind: name, "not_on": missing})
    if missing:
        nodes = "; not on ".join(f"{address}: {reason}" for address, reason in missing.items())
        fail(f"not on {nodes}. A node gets the change when it can be reached again")


def _remove(node: ManagedNode, kind: str, name: str, path: tuple[str, ...]) -> None:
    answer = node.ask("DELETE", *path, name)
    if answer.status == http.HTTPStatus.NOT_FOUND:
        raise _no_such(kind, name)
    _report(node, "removed", kind, name, _accepted(answer))


def _accepted(answer: Answer) -> Any:
    if answer.status == http.HTTPStatus.FORBIDDEN:
        raise HeadwaterError("the user may not manage users", hint="Log in as a user with the role admin")
    return answer.accepted()


def _no_such(kind: str, name: str) -> HeadwaterError:
    listed = "list" if kind == "user" else "list-groups"
    return InvalidInput(f"there is no {kind} {name!r}", hint=f"See `headwater users {listed}`")

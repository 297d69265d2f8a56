"""`headwater users`: list, add, change and remove the users and groups of a node, or of all nodes of a cluster."""

from __future__ import annotations

import functools
import http
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import rich_click as click

from headwater.cli.management import Access, Answer, Management, ManagementUrl, management_options, nodes_of_cluster
from headwater.cli.options import errors_reported, fail, is_terminal
from headwater.errors import HeadwaterError, InvalidInput
from headwater.phrases import printable

NEW_PASSWORD_VARIABLE = "HEADWATER_NEW_PASSWORD"
_RBAC = ("settings", "rbac")
_USERS, _GROUPS = (*_RBAC, "users", "local"), (*_RBAC, "groups")
_ALL = "*"

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def users() -> None:
    """List, add, change and remove users and groups.

    URL is couchbase://host[:port], or couchbases:// for TLS, of a Couchbase or a Headwater node; the node is asked for
    its management port. http://host:port names that port itself. A bucket may follow, and is of no matter unless a
    node has buckets in several clusters.

    The nodes of a cluster have their users in common: a change is made on one of them, and reaches the others. Those
    that do not have it yet are named, and the exit code is 1; they get it when they can be reached. The user who logs
    in must be an admin.

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


# --- nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """The node of a URL. It is looked for when it is first needed."""

    find: Callable[[], Management]
    bucket: str
    as_json: bool

    def report(self, what: str, kind: str, name: str, answer: Any) -> None:
        """Say what was done, and leave with exit code 1 where a node does not have it yet."""
        missing = answer.get("not_on", {}) if isinstance(answer, dict) else {}
        if self.as_json:
            click.echo(json.dumps({kind: name, "not_on": missing}))
        else:
            click.echo(printable(f"{what} {name}"))
        if missing:
            nodes = "; not on ".join(f"{node}: {reason}" for node, reason in missing.items())
            fail(printable(f"not on {nodes}. A node gets the change when it can be reached again"))


def _on_node(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the node of its URL, and all options that it takes to get there."""

    @click.argument("url", metavar="URL")
    @management_options
    @errors_reported
    @functools.wraps(command)
    def wrapped(url: str, access: Access, as_json: bool, **rest: Any) -> None:
        where = ManagementUrl.parse(url, needs_bucket=False)
        find = functools.cache(lambda: access.open(where))
        command(_Where(find=find, bucket=where.bucket, as_json=as_json), **rest)

    return wrapped


# --- arguments ----------------------------------------------------------------------------------------------------

_name_argument = click.argument("name", metavar="NAME")
_display_name_option = click.option("--display-name", metavar="TEXT", help="What people call the user.")
_group_option = click.option(
    "--group", "groups", multiple=True, metavar="GROUP", help="A group that the user is in. Repeat for more."
)
_new_password_option = click.option(
    "--new-password",
    metavar="PASSWORD",
    envvar=NEW_PASSWORD_VARIABLE,
    show_envvar=True,
    help="The user's password; asked for on a terminal. As an option, others on the machine can see it.",
)
_role_option = click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE",
    help="What the user, or each of the group, may do: admin, or bucket_admin, bucket_full_access, data_reader, "
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
@click.option("--this-node-only", is_flag=True, help="Do not ask the other nodes of its cluster.")
@_on_node
def list_users(where: _Where, this_node_only: bool) -> None:
    """List the users, their own roles and their groups.

    With several nodes, NODES says on how many of them the user is like this. One that is not the same everywhere is
    there several times: a node has not heard of a change yet.

    \b
    Example:
      headwater users list couchbase://127.0.0.1
    """
    first = where.find()
    nodes = [first] if this_node_only else nodes_of_cluster(first, bucket=where.bucket)
    by_user: dict[_User, list[str]] = {}
    failed: dict[str, str] = {}
    for node in nodes:
        try:
            found = _accepted(node.ask("GET", *_USERS))
            for user in found if isinstance(found, list) else [None]:
                by_user.setdefault(_User.read(user), []).append(str(node.address))
        except HeadwaterError as error:
            if len(nodes) == 1:
                raise
            failed[str(node.address)] = str(error)
    ordered = dict(sorted(by_user.items(), key=lambda item: (item[0].name, item[1])))
    if where.as_json:
        members = [{**user.members(), "nodes": on} for user, on in ordered.items()]
        click.echo(json.dumps({"users": members, "failed": failed}))
    elif ordered:
        has_groups = any(user.groups for user in ordered)
        headings = ["USER", "DISPLAY NAME", "ROLES", *["GROUPS"] * has_groups, *["NODES"] * (len(nodes) > 1)]
        rows = []
        for user, on in ordered.items():
            cells = [user.name, user.display_name, " ".join(user.roles), *[" ".join(user.groups)] * has_groups]
            rows.append([*cells, f"{len(on)} of {len(nodes)}"])
        _print_table(headings, rows)
    if failed:
        fail(f"can't be asked: {'; '.join(f'{node}: {reason}' for node, reason in failed.items())}")


@users.command("add")
@_on_node
@_name_argument
@_role_option
@_group_option
@_new_password_option
@_display_name_option
def add_user(
    where: _Where,
    name: str,
    roles: tuple[str, ...],
    groups: tuple[str, ...],
    new_password: str | None,
    display_name: str | None,
) -> None:
    """Add a user, with roles of its own, groups, or both.

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
    node = where.find()
    if _user_on(node, name) is not None:
        raise InvalidInput(f"user {name!r} exists already", hint="Change it with `headwater users change`")
    form = {"roles": ",".join(roles), "name": display_name or ""}
    if groups:
        form["groups"] = ",".join(groups)
    form["password"] = _ask_for_password(name) if new_password is None else new_password
    where.report("added", "user", name, _accepted(node.ask("PUT", *_USERS, name, form=form)))


@users.command("change")
@_on_node
@_name_argument
@_role_option
@_group_option
@click.option("--no-groups", is_flag=True, help="Take the user out of all groups.")
@_new_password_option
@_display_name_option
def change_user(
    where: _Where,
    name: str,
    roles: tuple[str, ...],
    groups: tuple[str, ...],
    no_groups: bool,
    new_password: str | None,
    display_name: str | None,
) -> None:
    """Change a user's password, roles, groups or display name.

    What is not given stays as it is; where nothing is given, the new password is asked for. Roles replace all that the
    user has had of its own, and groups all that it was in. Rights are checked with every request, so a change is in
    force at once. Connections that were opened with the old password stay open; remove the user and add it again to end
    them.

    \b
    Examples:
      headwater users change couchbase://127.0.0.1 lake
      headwater users change couchbase://127.0.0.1 lake --role 'data_reader[*]'
    """
    if groups and no_groups:
        raise click.UsageError("--group and --no-groups say different things")
    if new_password is None and not roles and not groups and not no_groups and display_name is None:
        new_password = _ask_for_password(name)
    node = where.find()
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
    where.report("changed", "user", name, _accepted(node.ask("PUT", *_USERS, name, form=form)))


@users.command("remove")
@_on_node
@_name_argument
def remove_user(where: _Where, name: str) -> None:
    """Remove a user. What it has open loses its rights at once, and its streams end.

    The last admin can't be removed.

    \b
    Example:
      headwater users remove couchbase://127.0.0.1 lake
    """
    answer = where.find().ask("DELETE", *_USERS, name)
    if answer.status == http.HTTPStatus.NOT_FOUND:
        raise _no_such("user", name)
    where.report("removed", "user", name, _accepted(answer))


# --- groups -------------------------------------------------------------------------------------------------------


@users.command("list-groups")
@_on_node
def list_groups(where: _Where) -> None:
    """List the groups and what their users may do by them.

    \b
    Example:
      headwater users list-groups couchbase://127.0.0.1
    """
    found = _accepted(where.find().ask("GET", *_GROUPS))
    try:
        groups = [
            {"group": str(group["id"]), "description": str(group.get("description") or ""), "roles": _roles(group)}
            for group in found
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise HeadwaterError("the answer is no list of groups", hint=_OTHER_SERVER) from error
    if where.as_json:
        click.echo(json.dumps({"groups": groups}))
    elif groups:
        rows = [[str(group["group"]), str(group["description"]), " ".join(group["roles"])] for group in groups]
        _print_table(["GROUP", "DESCRIPTION", "ROLES"], rows)


@users.command("put-group")
@_on_node
@_name_argument
@_role_option
@click.option("--description", metavar="TEXT", default="", help="What the group is for.")
def put_group(where: _Where, name: str, roles: tuple[str, ...], description: str) -> None:
    """Make a group, or give one other roles. Its users may do at once what the roles say.

    \b
    Example:
      headwater users put-group couchbase://127.0.0.1 readers \\
        --role 'data_reader[*]' --role 'data_dcp_reader[*]'
    """
    form = {"roles": ",".join(roles), "description": description}
    where.report("stored", "group", name, _accepted(where.find().ask("PUT", *_GROUPS, name, form=form)))


@users.command("remove-group")
@_on_node
@_name_argument
def remove_group(where: _Where, name: str) -> None:
    """Remove a group. Its users stay, without what they could do by it.

    \b
    Example:
      headwater users remove-group couchbase://127.0.0.1 readers
    """
    answer = where.find().ask("DELETE", *_GROUPS, name)
    if answer.status == http.HTTPStatus.NOT_FOUND:
        raise _no_such("group", name)
    where.report("removed", "group", name, _accepted(answer))


# --- answers ------------------------------------------------------------------------------------------------------

_OTHER_SERVER = "Check that it is a Couchbase or Headwater node"


@dataclass(frozen=True, slots=True, kw_only=True)
class _User:
    name: str
    display_name: str
    roles: tuple[str, ...]
    """Its own, without those of its groups."""
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
            raise HeadwaterError("the answer is no list of users", hint=_OTHER_SERVER) from error

    def members(self) -> dict[str, Any]:
        return {
            "user": self.name,
            "display_name": self.display_name,
            "roles": list(self.roles),
            "groups": list(self.groups),
        }


def _user_on(node: Management, name: str) -> _User | None:
    answer = node.ask("GET", *_USERS, name)
    return None if answer.status == http.HTTPStatus.NOT_FOUND else _User.read(_accepted(answer))


def _roles(members: dict[str, Any]) -> tuple[str, ...]:
    """The roles of a group, or a user's own. Servers before 6.5 have no groups, and say of no role where it is from."""
    return tuple(
        sorted(
            _read_role(role)
            for role in members["roles"]
            if any(origin["type"] == "user" for origin in role.get("origins") or ({"type": "user"},))
        )
    )


def _read_role(role: dict[str, str]) -> str:
    """As `--role` takes it: what is in brackets ends where all that follows is `*`."""
    parameters = [role[name] for name in ("bucket_name", "scope_name", "collection_name") if name in role]
    while len(parameters) > 1 and parameters[-1] == _ALL:
        parameters.pop()
    return f"{role['role']}[{':'.join(parameters)}]" if parameters else role["role"]


def _accepted(answer: Answer) -> Any:
    if answer.status == http.HTTPStatus.FORBIDDEN:
        raise HeadwaterError("the user may not manage users", hint="Log in as one with the role admin")
    return answer.accepted()


def _no_such(kind: str, name: str) -> HeadwaterError:
    listed = "list" if kind == "user" else "list-groups"
    return InvalidInput(f"there is no {kind} {name!r}", hint=f"Look at `headwater users {listed}`")


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As many columns as there are headings."""
    shown = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(headings))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())

"""`headwater users`: list, add, change and remove the users of a node, or of all nodes of a cluster."""

from __future__ import annotations

import functools
import http
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import rich_click as click

from headwater.cli.management import Access, Answer, Management, ManagementUrl, management_options, nodes_of_cluster
from headwater.cli.options import errors_reported, fail, is_terminal
from headwater.errors import HeadwaterError, InvalidInput
from headwater.phrases import printable

NEW_PASSWORD_VARIABLE = "HEADWATER_NEW_PASSWORD"
_USERS = ("settings", "rbac", "users", "local")
_ALL = "*"

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def users() -> None:
    """List, add, change and remove users.

    URL is couchbase://host[:port], or couchbases:// for TLS, of a Couchbase or a Headwater node; the node is asked for
    its management port. http://host:port names that port itself. A bucket may follow, and is of no matter unless a
    node has buckets in several clusters.

    The nodes of a Headwater cluster have users of their own, so each command goes to all of them, one after the other,
    and says where it failed; then run it again. The user who logs in must be an admin, with one password on all nodes.

    \b
    Examples:
      export HEADWATER_USER=admin HEADWATER_PASSWORD=…
      headwater users list couchbase://127.0.0.1
      headwater users add couchbase://127.0.0.1 lake --role 'data_dcp_reader[*]'
      headwater users change couchbase://127.0.0.1 lake
      headwater users remove couchbase://127.0.0.1 lake
    """


# --- nodes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    """What has come of a change, by the address of a node."""

    done: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    """Where it was so already."""
    failed: dict[str, str] = field(default_factory=dict)


class _Nodes:
    """The nodes that a command is for."""

    def __init__(self, nodes: list[Management], *, as_json: bool) -> None:
        self._nodes = nodes
        self.as_json = as_json

    def __len__(self) -> int:
        return len(self._nodes)

    def ask(self, work: Callable[[Management], T], failed: dict[str, str]) -> Iterator[tuple[str, T]]:
        """What each node answers. One of several that fails is reported later, and the others go on."""
        for node in self._nodes:
            try:
                yield str(node.address), work(node)
            except HeadwaterError as error:
                if len(self._nodes) == 1:
                    raise
                failed[str(node.address)] = str(error)

    def change(self, work: Callable[[Management], bool]) -> _Outcome:
        """Do it on every node. `work` says whether there was something to do."""
        outcome = _Outcome()
        for address, is_done in self.ask(work, outcome.failed):
            (outcome.done if is_done else outcome.unchanged).append(address)
        return outcome

    def report(self, what: str, name: str, outcome: _Outcome, *, unchanged: str) -> None:
        """Say what has come of it, and leave with exit code 1 where a node has failed."""
        if self.as_json:
            members = {"nodes": outcome.done, "unchanged": outcome.unchanged, "failed": outcome.failed}
            click.echo(json.dumps({"user": name, **members}))
        elif outcome.done:
            where = "" if len(self) == 1 else f" on {len(outcome.done)} of {len(self)} nodes"
            others = f"; {', '.join(outcome.unchanged)} {unchanged}" if outcome.unchanged else ""
            click.echo(printable(f"{what} {name}{where}{others}"))
        self.report_failures(outcome.failed)

    @staticmethod
    def report_failures(failed: dict[str, str]) -> None:
        if failed:
            fail(f"not done on {'; not on '.join(f'{node}: {reason}' for node, reason in failed.items())}")


def _on_nodes(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the nodes of its URL, and all options that it takes to get there."""

    @click.argument("url", metavar="URL")
    @click.option("--this-node-only", is_flag=True, help="Leave the other nodes of its cluster as they are.")
    @management_options
    @errors_reported
    @functools.wraps(command)
    def wrapped(url: str, access: Access, this_node_only: bool, as_json: bool, **rest: Any) -> None:
        where = ManagementUrl.parse(url, needs_bucket=False)

        def find() -> _Nodes:
            first = access.open(where)
            nodes = [first] if this_node_only else nodes_of_cluster(first, bucket=where.bucket)
            return _Nodes(nodes, as_json=as_json)

        command(find, **rest)

    return wrapped


# --- arguments ----------------------------------------------------------------------------------------------------

_name_argument = click.argument("name", metavar="NAME")
_display_name_option = click.option("--display-name", metavar="TEXT", help="What people call the user.")
_new_password_option = click.option(
    "--new-password",
    metavar="PASSWORD",
    envvar=NEW_PASSWORD_VARIABLE,
    show_envvar=True,
    help="The user's password; asked for on a terminal. As an option, others on the machine can see it.",
)


def _role_option(**settings: Any) -> Callable[[F], F]:
    return click.option(
        "--role",
        "roles",
        multiple=True,
        metavar="ROLE",
        help="What the user may do: admin, or bucket_admin, bucket_full_access, data_reader, data_writer or "
        "data_dcp_reader with a bucket, such as data_reader[travel], or [*] for all. Repeat for more.",
        **settings,
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


# --- commands -----------------------------------------------------------------------------------------------------


@users.command("list")
@_on_nodes
def list_users(find: Callable[[], _Nodes]) -> None:
    """List the users and their roles.

    With several nodes, NODES says on how many of them the user is like this. One that is not the same everywhere is
    there several times.

    \b
    Example:
      headwater users list couchbase://127.0.0.1
    """
    nodes, failed = find(), dict[str, str]()
    by_user: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for address, found in nodes.ask(_users_on, failed):
        for user in found:
            by_user.setdefault(user, []).append(address)
    _show(nodes, dict(sorted(by_user.items())), failed)


@users.command("add")
@_on_nodes
@_name_argument
@_role_option(required=True)
@_new_password_option
@_display_name_option
def add_user(
    find: Callable[[], _Nodes], name: str, roles: tuple[str, ...], new_password: str | None, display_name: str | None
) -> None:
    """Add a user.

    A name has up to 128 characters, no spaces and none of ()<>,;:\\"/[]?={}, and no @ in front. A password has at least
    6 characters. Nodes of a cluster that have the user already are left as they are.

    \b
    Examples:
      headwater users add couchbase://127.0.0.1 lake --role 'data_dcp_reader[*]'
      headwater users add couchbase://127.0.0.1 shop \\
        --role 'data_reader[travel]' --role 'data_writer[travel]'
      HEADWATER_NEW_PASSWORD=$(cat password.txt) \\
        headwater users add http://127.0.0.1:8091 root --role admin
    """
    nodes = find()
    form = {"roles": ",".join(roles), "name": display_name or ""}
    form["password"] = _ask_for_password(name) if new_password is None else new_password

    def add(node: Management) -> bool:
        if _user_on(node, name) is not None:
            return False
        _accepted(node.ask("PUT", *_USERS, name, form=form))
        return True

    outcome = nodes.change(add)
    if not outcome.done and not outcome.failed:
        raise InvalidInput(f"user {name!r} exists already", hint="Change it with `headwater users change`")
    nodes.report("added", name, outcome, unchanged="had it already")


@users.command("change")
@_on_nodes
@_name_argument
@_role_option()
@_new_password_option
@_display_name_option
def change_user(
    find: Callable[[], _Nodes], name: str, roles: tuple[str, ...], new_password: str | None, display_name: str | None
) -> None:
    """Change a user's password, roles or display name.

    What is not given stays as it is; where nothing is given, the new password is asked for. Roles replace all that the
    user has had. Rights are checked with every request, so a change is in force at once. Connections that were opened
    with the old password stay open; remove the user and add it again to end them.

    \b
    Examples:
      headwater users change couchbase://127.0.0.1 lake
      headwater users change couchbase://127.0.0.1 lake --role 'data_reader[*]'
    """
    nodes = find()
    if new_password is None and not roles and display_name is None:
        new_password = _ask_for_password(name)

    def change(node: Management) -> bool:
        known = _user_on(node, name)
        if known is None:
            raise _no_user(name)
        _, its_name, its_roles = known
        form = {"roles": ",".join(roles or its_roles), "name": its_name if display_name is None else display_name}
        if new_password is not None:
            form["password"] = new_password
        _accepted(node.ask("PUT", *_USERS, name, form=form))
        return True

    nodes.report("changed", name, nodes.change(change), unchanged="")


@users.command("remove")
@_on_nodes
@_name_argument
def remove_user(find: Callable[[], _Nodes], name: str) -> None:
    """Remove a user. What it has open loses its rights at once, and its streams end.

    The last admin of a node can't be removed.

    \b
    Example:
      headwater users remove couchbase://127.0.0.1 lake
    """

    def remove(node: Management) -> bool:
        answer = node.ask("DELETE", *_USERS, name)
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return False
        _accepted(answer)
        return True

    nodes = find()
    outcome = nodes.change(remove)
    if not outcome.done and not outcome.failed:
        raise _no_user(name)
    nodes.report("removed", name, outcome, unchanged="did not have it")


# --- requests -----------------------------------------------------------------------------------------------------


def _user_on(node: Management, name: str) -> tuple[str, str, tuple[str, ...]] | None:
    answer = node.ask("GET", *_USERS, name)
    return None if answer.status == http.HTTPStatus.NOT_FOUND else _read_user(_accepted(answer))


def _users_on(node: Management) -> list[tuple[str, str, tuple[str, ...]]]:
    found = _accepted(node.ask("GET", *_USERS))
    return [_read_user(user) for user in (found if isinstance(found, list) else [None])]


def _read_user(user: Any) -> tuple[str, str, tuple[str, ...]]:
    """Name, display name and roles."""
    try:
        return str(user["id"]), str(user.get("name") or ""), tuple(sorted(_read_role(role) for role in user["roles"]))
    except (LookupError, TypeError, AttributeError) as error:
        raise HeadwaterError(
            "the answer is no list of users", hint="Check that it is a Couchbase or Headwater node"
        ) from error


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


def _no_user(name: str) -> HeadwaterError:
    return InvalidInput(f"there is no user {name!r}", hint="Look at `headwater users list`")


# --- output -------------------------------------------------------------------------------------------------------


def _show(nodes: _Nodes, by_user: dict[tuple[str, str, tuple[str, ...]], list[str]], failed: dict[str, str]) -> None:
    if nodes.as_json:
        members = [
            {"user": name, "display_name": display_name, "roles": list(roles), "nodes": on}
            for (name, display_name, roles), on in by_user.items()
        ]
        click.echo(json.dumps({"users": members, "failed": failed}))
    elif by_user:
        rows: list[tuple[str, ...]] = [("USER", "DISPLAY NAME", "ROLES", "NODES")]
        for (name, display_name, roles), on in by_user.items():
            cells = (printable(cell) for cell in (name, display_name, " ".join(roles)))
            rows.append((*cells, f"{len(on)} of {len(nodes)}"))
        columns = 3 if len(nodes) == 1 else 4
        widths = [max(len(row[column]) for row in rows) for column in range(columns)]
        for row in rows:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    nodes.report_failures(failed)

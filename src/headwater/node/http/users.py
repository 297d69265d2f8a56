"""Handlers that show and change users, groups and their roles, in the forms of Couchbase.

Every user of the node is a local one. The users as which the nodes of a cluster log in are hidden, and can't be
changed. Only the thread that hashes a password gets it. The nodes of a cluster share their users: the answer to a
change names the nodes that do not have it yet.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from headwater.errors import LocalProtocolError
from headwater.log_fields import Fields, LogEvent
from headwater.node.auth.accounts import Change
from headwater.node.auth.users import (
    ALL,
    ALL_BUCKETS,
    KNOWN_ROLES,
    PASSWORD_BYTES_MAX,
    SALTS_BYTES,
    Grant,
    Group,
    User,
    Users,
    describe_role,
    hash_password,
    parse_roles,
    roles_of,
)
from headwater.node.http.call import Call, Json, Refusal
from headwater.protocol.sasl import USER_CHARS_MAX

PASSWORD_CHARS_MIN = 6
"""Couchbase's default minimum."""
NOT_ON = "not_on"
"""The member of an answer with the nodes that do not have a change yet, by key-value address, and the reasons."""
_LOCAL, _EXTERNAL = "local", "external"
_NAMES_CHARS_SHOWN = 256
_NOT_IN_NAMES = frozenset('()<>,;:\\"/[]?={} ')
"""Couchbase's rule. Users that were created at the node's start may have other names, and can still be changed."""


# --- looking ------------------------------------------------------------------------------------------------------


async def show_users(call: Call) -> Response:
    """All users, or those of a domain."""
    domain = call.request.path_params.get("domain", _LOCAL)
    if domain not in (_LOCAL, _EXTERNAL):
        raise Refusal(404, "Unknown user domain.")
    shown = sorted(_own_users(call).items()) if domain == _LOCAL else []
    return Json([_described(call.node.users, user) for _, user in shown])


async def show_user(call: Call) -> Response:
    user = _own_users(call).get(_local_name(call))
    if user is None:
        raise _unknown_user()
    return Json(_described(call.node.users, user))


async def show_roles(call: Call) -> Response:
    buckets = (ALL_BUCKETS, *sorted(call.node.bucket_names()))
    return Json(
        [
            {**describe_role(known, bucket), "name": known.title, "desc": known.description}
            for known in KNOWN_ROLES
            for bucket in (buckets if known.parameters else (ALL_BUCKETS,))
        ]
    )


async def who_am_i(call: Call) -> Response:
    users = call.node.users
    is_admin = users.is_admin(call.user)
    roles = [{"role": "admin"}] if is_admin else roles_of(users.grants_of(call.user))
    return Json({"id": call.user, "domain": "admin" if is_admin else _LOCAL, "roles": roles})


async def show_groups(call: Call) -> Response:
    return Json([_described_group(group) for _, group in sorted(call.node.users.groups.items())])


async def show_group(call: Call) -> Response:
    group = call.node.users.groups.get(call.path("name"))
    if group is None:
        raise _unknown_group()
    return Json(_described_group(group))


def _described_group(group: Group) -> dict[str, Any]:
    # The node uses no external directory, so no group belongs to one.
    return {
        "id": group.name,
        "description": group.description,
        "ldap_group_ref": "",
        "roles": roles_of(group.grants),
    }


def _described(users: Users, user: User) -> dict[str, Any]:
    """The roles are all that the user has, each with its origins: clients write back those of the user itself."""
    groups = sorted(name for name in user.groups if name in users.groups)
    sources: list[tuple[dict[str, str], frozenset[Grant]]] = [({"type": "user"}, user.grants)]
    sources += [({"type": "group", "name": name}, users.groups[name].grants) for name in groups]
    roles: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for origin, grants in sources:
        for role in roles_of(grants):
            roles.setdefault(tuple(role.items()), {**role, "origins": []})["origins"].append(origin)
    described = {
        "id": user.name,
        "domain": _LOCAL,
        "roles": list(roles.values()),
        "groups": groups,
        "external_groups": [],
        "name": user.display_name,
    }
    if user.password_changed_ms:
        changed = datetime.fromtimestamp(user.password_changed_ms / 1000, UTC)
        described["password_change_date"] = f"{changed:%Y-%m-%dT%H:%M:%S}.000Z"
    return described


# --- changes ------------------------------------------------------------------------------------------------------


async def put_user(call: Call) -> Response:
    """Create a user, or replace a user's roles, groups and display name, and the password if the form has one."""
    name, known = _local_name(call), _own_users(call)
    form = await call.form("name", "password", "roles", "groups")
    if name not in known:
        _check_new_name(name)
    groups = frozenset(group.strip() for group in form.get("groups", "").split(",") if group.strip())
    grants = _grants(call, form.get("roles", ""), known[name].grants if name in known else frozenset())
    password = _checked_password(form)

    def change(users: Users) -> Users:
        before = users.by_name.get(name)
        if before is None and password is None:
            raise Refusal.errors(400, "Password is required for new user.", field="password")
        if unknown := sorted(groups - users.groups.keys()):
            raise Refusal.errors(400, f"Groups do not exist: {', '.join(unknown)[:_NAMES_CHARS_SHOWN]}", field="groups")
        user = _with_password(users, name, password) if password is not None else before
        assert user is not None
        return users.put(replace(user, grants=grants, groups=groups, display_name=form.get("name", "")))

    in_groups = f", in the groups {', '.join(sorted(groups))}" if groups else ""
    with_password = "" if password is None else ", with a new password"
    what = f"stored user {name!r} with the roles {_listed(grants)}{in_groups}{with_password}"
    return await _change(call, change, what, name)


async def remove_user(call: Call) -> Response:
    name = _local_name(call)

    def change(users: Users) -> Users:
        if name not in users.by_name:
            raise _unknown_user()
        return users.remove(name)

    return await _change(call, change, f"removed user {name!r}", name)


async def put_group(call: Call) -> Response:
    """Create a group, or replace its roles and its description."""
    name, form = call.path("name"), await call.form("description", "ldap_group_ref", "roles")
    known = call.node.users.groups.get(name)
    if known is None:
        _check_new_name(name, "Group name")
    if form.get("ldap_group_ref"):
        raise Refusal.errors(400, "The node asks no LDAP server", field="ldap_group_ref")
    grants = _grants(call, form.get("roles", ""), frozenset() if known is None else known.grants)
    group = Group(name=name, grants=grants, description=form.get("description", ""))
    what = f"stored group {name!r} with the roles {_listed(grants)}"
    return await _change(call, lambda users: users.put_group(group), what)


async def remove_group(call: Call) -> Response:
    """Remove a group. Its users stay, but lose what it allowed them to do."""
    name = call.path("name")

    def change(users: Users) -> Users:
        if name not in users.groups:
            raise _unknown_group()
        return users.remove_group(name)

    return await _change(call, change, f"removed group {name!r}")


async def change_password(call: Call) -> Response:
    """Change the password of the user who asks."""
    name, password = call.user, _checked_password(await call.form("password"))
    if password is None:
        raise Refusal.errors(400, "The value must be supplied", field="password")
    new_password = password

    def change(users: Users) -> Users:
        if name not in users.by_name:
            raise Refusal(404, "Changing of password is not allowed for this user.")
        return users.put(_with_password(users, name, new_password))

    return await _change(call, change, "changed its password", name)


async def _change(call: Call, change: Change, what: str, name: str | None = None) -> Response:
    """Change the users. The answer is empty, as Couchbase's is, or names the nodes that do not have the change yet."""
    missing = await call.node.change_users(change)
    about = Fields(event=LogEvent.USERS_CHANGED, user=call.user)
    if name is not None:
        about["changed_user"] = name
    not_yet = f"; not on {', '.join(missing)} yet" if missing else ""
    call.node.log(f"{call.user!r} {what}{not_yet}", **about)
    return Json({NOT_ON: missing} if missing else "")


def _listed(grants: frozenset[Grant]) -> str:
    return ", ".join(sorted(str(grant) for grant in grants)) or "none"


# --- what requests are made of ------------------------------------------------------------------------------------


def _own_users(call: Call) -> dict[str, User]:
    """All users except those that other nodes log in as."""
    return {name: user for name, user in call.node.users.by_name.items() if not call.node.is_node_user(name)}


def _local_name(call: Call) -> str:
    domain = call.path("domain")
    if domain == _EXTERNAL and call.request.method == "PUT":
        # This is the answer of Couchbase's community edition, which also has local users only. Its answer is a string,
        # but the C++ client ends the whole process if the content of a 400 is not an object.
        raise Refusal.errors(400, "This http API endpoint requires enterprise edition")
    if domain not in (_LOCAL, _EXTERNAL):
        raise Refusal(404, "Unknown user domain.")
    # There are no external users, and no user has an empty name.
    return call.path("name") if domain == _LOCAL else ""


def _unknown_user() -> Refusal:
    # The Python SDK recognises these words, although Couchbase's own differ.
    return Refusal(404, "Unknown user.")


def _unknown_group() -> Refusal:
    return Refusal(404, "Unknown group.")


def _check_new_name(name: str, what: str = "Username") -> None:
    if not 0 < len(name) <= USER_CHARS_MAX:
        raise Refusal.errors(400, f"{what} has 1 to {USER_CHARS_MAX} characters")
    if name.startswith("@"):
        raise Refusal.errors(400, f"{what} cannot start with '@'")
    if not name.isprintable() or not _NOT_IN_NAMES.isdisjoint(name):
        raise Refusal.errors(400, f'{what} must not contain spaces, control or any of ()<>,;:\\"/[]?={{}} characters')


def _grants(call: Call, roles: str, known: frozenset[Grant]) -> frozenset[Grant]:
    """The grants that the roles stand for. A role on a dropped bucket or collection may be kept, but not given."""
    kept = {(grant.bucket, grant.scope, grant.collection) for grant in known}

    def is_there(grant: Grant) -> bool:
        bucket = call.node.bucket(grant.bucket)
        if bucket is None or grant.scope == ALL:
            found: object = bucket
        elif grant.collection == ALL:
            found = bucket.manifest.scope(grant.scope)
        else:
            found = bucket.manifest.find(grant.scope, grant.collection)
        return found is not None or (grant.bucket, grant.scope, grant.collection) in kept

    try:
        return parse_roles(roles, is_there=is_there)
    except LocalProtocolError as error:
        raise Refusal.errors(400, str(error), field="roles") from error


def _checked_password(form: dict[str, str]) -> str | None:
    password = form.get("password")
    if password is None:
        return None
    if len(password) < PASSWORD_CHARS_MIN:
        raise Refusal.errors(
            400, f"The password must be at least {PASSWORD_CHARS_MIN} characters long.", field="password"
        )
    if len(password.encode()) > PASSWORD_BYTES_MAX:
        raise Refusal.errors(400, f"The password must have at most {PASSWORD_BYTES_MAX} bytes", field="password")
    if any(character < " " or character == "\x7f" for character in password):
        raise Refusal.errors(400, "The password must not contain control characters", field="password")
    return password


def _with_password(users: Users, name: str, password: str) -> User:
    """The user with a new password. A user that is new has no roles yet."""
    credentials = hash_password(password, salts=secrets.token_bytes(SALTS_BYTES), iterations=users.iterations)
    known = users.by_name.get(name)
    if known is None:
        return User(name=name, grants=frozenset(), credentials=credentials)
    return replace(known, credentials=credentials)

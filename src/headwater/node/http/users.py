"""Handlers for users: which exist, what they may do, and changes of both, in the forms that Couchbase gives them.

Every user of the node is a local one. The users that the nodes of a cluster log in as are not shown, and can't be
changed. A password comes in here and goes no further than the thread that hashes it.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from headwater.errors import LocalProtocolError
from headwater.log_fields import LogEvent
from headwater.node.auth.users import (
    ALL_BUCKETS,
    KNOWN_ROLES,
    PASSWORD_BYTES_MAX,
    SALTS_BYTES,
    Grant,
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
"""What Couchbase asks for by default."""
_LOCAL, _EXTERNAL = "local", "external"
_NOT_IN_NAMES = frozenset('()<>,;:\\"/[]?={} ')
"""Couchbase's rule. Users that were made at the node's start may have other names, and can be changed all the same."""


# --- looking ------------------------------------------------------------------------------------------------------


async def show_users(call: Call) -> Response:
    """All users, or those of a domain."""
    domain = call.request.path_params.get("domain", _LOCAL)
    if domain not in (_LOCAL, _EXTERNAL):
        raise Refusal(404, "Unknown user domain.")
    shown = sorted(_own_users(call).items()) if domain == _LOCAL else []
    return Json([_described(user) for _, user in shown])


async def show_user(call: Call) -> Response:
    user = _own_users(call).get(_local_name(call))
    if user is None:
        raise _unknown_user()
    return Json(_described(user))


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
    user = call.node.users.by_name[call.user]
    domain, roles = ("admin", [{"role": "admin"}]) if user.is_admin else (_LOCAL, roles_of(user.grants))
    return Json({"id": user.name, "domain": domain, "roles": roles})


def _described(user: User) -> dict[str, Any]:
    return {
        "id": user.name,
        "domain": _LOCAL,
        "roles": [{**role, "origins": [{"type": "user"}]} for role in roles_of(user.grants)],
        "groups": [],
        "external_groups": [],
        "name": user.display_name,
    }


# --- changes ------------------------------------------------------------------------------------------------------


async def put_user(call: Call) -> Response:
    """Make a user, or give one other roles and another name, and another password where there is one in the form."""
    name, known = _local_name(call), _own_users(call)
    form = await call.form("name", "password", "roles", "groups")
    if name not in known:
        _check_new_name(name)
    if form.get("groups"):
        raise Refusal.errors(400, "The node has no groups of users", field="groups")
    grants = _grants(call, form.get("roles", ""), known.get(name))
    password = _checked_password(form)

    def change(users: Users) -> Users:
        before = users.by_name.get(name)
        if before is None and password is None:
            raise Refusal.errors(400, "Password is required for new user.", field="password")
        user = _with_password(users, name, password) if password is not None else before
        assert user is not None
        return users.put(replace(user, grants=grants, display_name=form.get("name", "")))

    await call.node.change_users(change)
    granted = ", ".join(f"{grant.role}[{grant.bucket}]" for grant in sorted(grants, key=lambda grant: grant.role))
    with_password = "" if password is None else " and a new password"
    _log(call, f"{call.user!r} stored user {name!r} with the roles {granted or 'none'}{with_password}", name)
    return Json("")


async def remove_user(call: Call) -> Response:
    name = _local_name(call)

    def change(users: Users) -> Users:
        if name not in users.by_name:
            raise _unknown_user()
        return users.remove(name)

    await call.node.change_users(change)
    _log(call, f"{call.user!r} removed user {name!r}", name)
    return Json("")


async def change_password(call: Call) -> Response:
    """Every user may change its own."""
    name, password = call.user, _checked_password(await call.form("password"))
    if password is None:
        raise Refusal.errors(400, "The value must be supplied", field="password")
    new_password = password

    def change(users: Users) -> Users:
        if name not in users.by_name:
            raise Refusal(404, "Changing of password is not allowed for this user.")
        return users.put(_with_password(users, name, new_password))

    await call.node.change_users(change)
    _log(call, f"{name!r} changed its password", name)
    return Response()


def _log(call: Call, message: str, name: str) -> None:
    call.node.log(message, event=LogEvent.USERS_CHANGED, user=call.user, changed_user=name)


# --- what requests are made of ------------------------------------------------------------------------------------


def _own_users(call: Call) -> dict[str, User]:
    """All but those that other nodes log in as."""
    return {name: user for name, user in call.node.users.by_name.items() if not call.node.is_node_user(name)}


def _local_name(call: Call) -> str:
    domain = call.path("domain")
    if domain == _EXTERNAL and call.request.method == "PUT":
        raise Refusal.errors(400, "The node has local users only")
    if domain not in (_LOCAL, _EXTERNAL):
        raise Refusal(404, "Unknown user domain.")
    # No user is external, and none has an empty name.
    return call.path("name") if domain == _LOCAL else ""


def _unknown_user() -> Refusal:
    # The Python SDK recognises these words, also where Couchbase's own are others.
    return Refusal(404, "Unknown user.")


def _check_new_name(name: str) -> None:
    if not 0 < len(name) <= USER_CHARS_MAX:
        raise Refusal.errors(400, f"Username has 1 to {USER_CHARS_MAX} characters")
    if name.startswith("@"):
        raise Refusal.errors(400, "Username cannot start with '@'")
    if not name.isprintable() or not _NOT_IN_NAMES.isdisjoint(name):
        raise Refusal.errors(400, 'Username must not contain spaces, control or any of ()<>,;:\\"/[]?={} characters')


def _grants(call: Call, roles: str, known: User | None) -> frozenset[Grant]:
    """What the roles stand for. A role on a bucket that is gone may be kept, and not given."""
    kept = () if known is None else (grant.bucket for grant in known.grants)
    try:
        return parse_roles(roles, buckets={*call.node.bucket_names(), *kept})
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
    """The user with another password; a new one has no roles yet."""
    credentials = hash_password(password, salts=secrets.token_bytes(SALTS_BYTES), iterations=users.iterations)
    known = users.by_name.get(name)
    if known is None:
        return User(name=name, grants=frozenset(), credentials=credentials)
    return replace(known, credentials=credentials)

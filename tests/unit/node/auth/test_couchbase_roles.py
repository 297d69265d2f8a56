"""Couchbase's roles: what each is worth on the node, how they are written, and those that are none."""

from __future__ import annotations

import pytest

from headwater.errors import LocalProtocolError
from headwater.node.auth.users import KNOWN_ROLES, ROLE_ACTIONS, Action, Grant, Role, parse_roles, roles_of

BUCKETS = ("beer", "a.b%c-d")
DATA = {"scope_name": "*", "collection_name": "*"}


@pytest.mark.parametrize(
    ("text", "grants"),
    [
        ("", set()),
        (" , ", set()),
        ("admin", {Grant(Role.ADMIN)}),
        ("Admin", {Grant(Role.ADMIN)}),
        ("data_reader[*]", {Grant(Role.DATA_READER)}),
        (
            "data_reader[beer], data_writer[a.b%c-d]",
            {Grant(Role.DATA_READER, "beer"), Grant(Role.DATA_WRITER, "a.b%c-d")},
        ),
        ("data_dcp_reader[beer:*:*],data_dcp_reader[beer:*]", {Grant(Role.DATA_DCP_READER, "beer")}),
        (
            "bucket_admin[beer],bucket_full_access[*]",
            {Grant(Role.BUCKET_ADMIN, "beer"), Grant(Role.BUCKET_FULL_ACCESS)},
        ),
    ],
)
def test_roles_are_read(text: str, grants: set[Grant]) -> None:
    assert parse_roles(text, buckets=BUCKETS) == grants


@pytest.mark.parametrize(
    "role",
    [
        *("ro_admin", "reader", "writer[beer]", "admin[*]", "admin[]", "[beer]", "data reader"),
        *(
            "data_reader",
            "data_reader[]",
            "data_reader[wine]",
            "data_reader[beer",
            "data_reader]",
            "data_reader[beer]x",
        ),
        *("data_reader[beer:inventory]", "data_reader[beer:*:hotels]", "data_reader[beer:*:*:*]", "data_reader[:*]"),
        *("bucket_admin[beer:*]", "bucket_full_access"),
    ],
)
def test_what_is_no_role(role: str) -> None:
    with pytest.raises(LocalProtocolError) as refused:
        parse_roles(f"admin,{role}", buckets=BUCKETS)
    assert refused.value.reason.endswith(f": {role}")
    assert all(str(known) in refused.value.hint for known in KNOWN_ROLES)


@pytest.mark.parametrize(
    ("grants", "told"),
    [
        ([], []),
        ([Grant(Role.ADMIN)], [{"role": "admin"}]),
        (
            [Grant(Role.READER, "beer"), Grant(Role.DATA_READER, "beer")],
            [
                {"role": "data_dcp_reader", "bucket_name": "beer", **DATA},
                {"role": "data_reader", "bucket_name": "beer", **DATA},
            ],
        ),
        ([Grant(Role.BUCKET_ADMIN, "beer")], [{"role": "bucket_admin", "bucket_name": "beer"}]),
    ],
)
def test_roles_are_written(grants: list[Grant], told: list[dict[str, str]]) -> None:
    assert roles_of(grants) == told


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("bucket", ["*", "beer"])
def test_what_is_written_is_worth_what_was_granted(role: Role, bucket: str) -> None:
    """Whoever reads a user, changes its name and stores it again must not give it other rights by that."""
    told = roles_of([Grant(role, bucket)])
    text = ",".join(one["role"] + (f"[{one['bucket_name']}]" if "bucket_name" in one else "") for one in told)
    read = parse_roles(text, buckets=BUCKETS)
    for action in Action:
        for asked in ("beer", None):
            # On one bucket, the node's admin has no more rights than Couchbase has names for.
            expected = Grant(role, bucket).allows(action, asked) and not (action is Action.SECURITY and asked)
            assert any(grant.allows(action, asked) for grant in read) >= expected, (action, asked)
            if action is not Action.SECURITY or role is not Role.ADMIN:
                assert any(grant.allows(action, asked) for grant in read) == Grant(role, bucket).allows(action, asked)


def test_only_admins_manage_users() -> None:
    assert [role for role in Role if Action.SECURITY in ROLE_ACTIONS[role]] == [Role.ADMIN]

"""Users: what each role may do, log-ins over every mechanism, and that nothing shows who exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headwater.errors import AuthenticationFailed, LocalProtocolError
from headwater.node.auth import users as users_module
from headwater.node.auth.users import (
    ALL_BUCKETS,
    GRANTS_PER_USER_MAX,
    KNOWN_ROLES,
    PASSWORD_BYTES_MAX,
    ROLE_ACTIONS,
    SALTS_BYTES,
    Action,
    Grant,
    Group,
    Role,
    User,
    Users,
    hash_password,
    parse_roles,
    roles_of,
)
from headwater.protocol import sasl
from headwater.protocol.manifest import Manifest
from support.cases import case, each

SALTS = bytes(range(SALTS_BYTES))
EMPTY = Users(decoy_secret=bytes(32), iterations=4096)


def with_user(name: str = "ann", password: str = "pencil", *grants: Grant) -> Users:
    return EMPTY.add(EMPTY.new_user(name, password, grants, salts=SALTS))


# --- what they may do ---------------------------------------------------------------------------------------------

MAY = {
    Role.READER: {Action.USE, Action.READ, Action.STREAM},
    Role.WRITER: {Action.USE, Action.READ, Action.STREAM, Action.WRITE},
    Role.ADMIN: set(Action),
    Role.BUCKET_ADMIN: {Action.USE, Action.ADMIN},
    Role.BUCKET_FULL_ACCESS: {Action.USE, Action.READ, Action.STREAM, Action.WRITE},
    Role.DATA_READER: {Action.USE, Action.READ},
    Role.DATA_WRITER: {Action.USE, Action.WRITE},
    Role.DATA_DCP_READER: {Action.USE, Action.READ, Action.STREAM},
    Role.RO_ADMIN: {Action.USE},
}
"""Those of services that the node does not have may do nothing."""

NODE_WIDE = {Action.SECURITY, Action.NODE}


@each("role", Role)
def test_a_role_may_do_what_the_table_says(role: Role) -> None:
    """On its bucket, or on each and on the node where it is granted on all."""
    users, of_all = with_user("ann", "pencil", Grant(role, "beer")), with_user("ann", "pencil", Grant(role))
    for action in Action:
        allowed = action in MAY.get(role, ())
        on_bucket = allowed and action is not Action.SECURITY  # Which is a right on the whole node.
        may = [users.may("ann", action, bucket) for bucket in ("beer", "wine", None)]
        assert may == [on_bucket, False, False], action
        assert not users.may("bob", action, "beer")
        assert of_all.may("ann", action, "beer") == of_all.may("ann", action, None) == allowed, action


def test_grants_add_up() -> None:
    users = with_user("ann", "pencil", Grant(Role.READER), Grant(Role.WRITER, "beer"))
    assert users.may("ann", Action.WRITE, "beer")
    assert users.may("ann", Action.READ, "wine")
    assert not users.may("ann", Action.WRITE, "wine")
    nothing = with_user()
    assert not any(nothing.may("ann", action, bucket) for action in Action for bucket in ("beer", ALL_BUCKETS, None))
    for grant in (Grant(Role.ADMIN, "beer"), Grant(Role.BUCKET_ADMIN), Grant(Role.BUCKET_FULL_ACCESS)):
        assert not with_user("ann", "pencil", grant).is_admin("ann"), "one of a bucket is no admin of the node"


def test_every_role_has_its_row_and_only_admins_manage_users() -> None:
    assert ROLE_ACTIONS.keys() == set(Role)
    assert [role for role in Role if NODE_WIDE & ROLE_ACTIONS[role]] == [Role.ADMIN]


# --- groups -------------------------------------------------------------------------------------------------------


def test_users_have_what_their_groups_have_for_as_long_as_they_are_in_them() -> None:
    users = with_user("ann", "pencil", Grant(Role.READER, "beer"))
    users = users.put_group(Group(name="writers", grants=frozenset({Grant(Role.WRITER, "wine")})))
    assert not users.may("ann", Action.WRITE, "wine")
    users = users.put(replace(users.by_name["ann"], groups=frozenset({"writers", "unknown"})))
    assert users.may("ann", Action.WRITE, "wine")
    assert users.may("ann", Action.READ, "beer")
    users = users.put_group(Group(name="writers", grants=frozenset({Grant(Role.ADMIN)})))
    assert users.has_admin
    users = users.remove_group("writers")
    assert users.by_name["ann"].groups == {"unknown"}
    assert not users.has_admin
    assert users.grants_of("ann") == {Grant(Role.READER, "beer")}


# --- how they prove who they are ----------------------------------------------------------------------------------


@each("mechanism", sasl.SCRAM_MECHANISMS)
@each("name", ["ann", "bob"])
@each("password", ["pencil", "crayon"])
def test_scram_against_the_users(mechanism: sasl.Mechanism, name: str, password: str) -> None:
    server = sasl.ScramServer(mechanism, with_user().credentials, b"server")
    client = sasl.ScramClient(mechanism, name, password, b"client")
    final = client.final(server.start(client.first()))
    if (name, password) == ("ann", "pencil"):
        client.verify(server.finish(final))
    else:
        with pytest.raises(AuthenticationFailed, match="the user name or the password is wrong"):
            server.finish(final)


def test_plain_is_checked_against_what_scram_keeps() -> None:
    users, tries = with_user(), (("ann", "pencil"), ("ann", "Pencil"), ("ann", ""), ("bob", "pencil"))
    assert [users.check_password(*login) for login in tries] == [True, False, False, False]


@pytest.mark.parametrize("mechanism", sasl.SCRAM_MECHANISMS)
def test_nothing_shows_that_a_user_does_not_exist(mechanism: sasl.Mechanism) -> None:
    users = with_user()
    real, decoy = users.credentials(mechanism, "ann"), users.credentials(mechanism, "bob")
    assert decoy == users.credentials(mechanism, "bob")
    assert decoy.iterations == real.iterations
    assert [len(decoy.salt), len(decoy.stored_key), len(decoy.server_key)] == [
        len(real.salt),
        len(real.stored_key),
        len(real.server_key),
    ]
    assert decoy == users.add(users.new_user("cid", "pencil", (), salts=SALTS)).credentials(mechanism, "bob")


def test_every_mechanism_has_a_salt_of_its_own() -> None:
    salts = [credentials.salt for credentials in hash_password("pencil", salts=SALTS, iterations=4096).values()]
    assert b"".join(salts) == SALTS
    assert {len(salt) for salt in salts} == {sasl.SCRAM_SALT_BYTES}


def test_no_password_and_no_key_is_in_a_repr() -> None:
    text = repr(with_user())
    assert [word in text for word in ("ann", "pencil", "key", "secret")] == [True, False, False, False]


# --- the collection -----------------------------------------------------------------------------------------------


def test_add_put_and_remove_give_new_collections() -> None:
    users = with_user("ann", "pencil", Grant(Role.ADMIN))
    assert not EMPTY.by_name
    assert users.remove("ann") == EMPTY
    assert set(users.by_name) == {"ann"}
    with pytest.raises(LocalProtocolError, match="'ann' already exists"):
        users.add(users.by_name["ann"])
    with pytest.raises(LocalProtocolError, match="there is no user 'Ann'"):
        users.remove("Ann")
    other = users.put(users.new_user("ann", "crayon", (), salts=SALTS))
    assert set(other.by_name) == {"ann"}
    assert other.check_password("ann", "crayon")
    assert (users.has_admin, other.has_admin) == (True, False)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "a\0b", "\udcff", "u" * (sasl.USER_CHARS_MAX + 1)])
def test_impossible_names(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be a user name"):
        with_user(name)


@pytest.mark.parametrize("name", ["@admin", "a,b=c", "Zoë 漢", "u" * sasl.USER_CHARS_MAX])
def test_possible_names(name: str) -> None:
    assert with_user(name).check_password(name, "pencil")


@pytest.mark.parametrize("password", ["", "a\0b", "x" * (PASSWORD_BYTES_MAX + 1), "\udcff"])
def test_impossible_passwords(password: str) -> None:
    with pytest.raises(LocalProtocolError, match="password") as error:
        with_user("ann", password)
    assert not password or password not in str(error.value)


def test_other_impossible_values(monkeypatch: pytest.MonkeyPatch) -> None:
    ann = with_user().by_name["ann"]
    many = [Grant(Role.READER, str(number)) for number in range(GRANTS_PER_USER_MAX + 1)]
    cases: dict[str, Callable[[], object]] = {
        "random bytes as salts": lambda: hash_password("pencil", salts=b"", iterations=4096),
        "needs the name of a bucket": lambda: with_user("ann", "pencil", Grant(Role.READER, "")),
        "at most 1000 grants": lambda: with_user("ann", "pencil", *many),
        "needs credentials for": lambda: User(name="ann", grants=frozenset(), credentials={}),
        "full name": lambda: replace(ann, display_name="two\nlines"),
        "decoy secret": lambda: Users(decoy_secret=b""),
        "not hashed with 5000 iterations": lambda: Users(decoy_secret=bytes(32), iterations=5000).add(ann),
        "at most 1 users": lambda: with_user().put(replace(ann, name="bob")),
    }
    monkeypatch.setattr(users_module, "USERS_MAX", 1)
    for message, make in cases.items():
        with pytest.raises(LocalProtocolError, match=message):
            make()


@pytest.mark.parametrize("iterations", [0, 1, sasl.SCRAM_ITERATIONS_MAX + 1])
def test_iterations_that_clients_refuse(iterations: int) -> None:
    with pytest.raises(LocalProtocolError, match="iterations"):
        Users(decoy_secret=bytes(32), iterations=iterations)


# Couchbase's roles: what each is worth on the node, how they are written, and those that are none.


PLACES = {("beer", "*", "*"), ("a.b%c-d", "*", "*"), ("beer", "inventory", "*"), ("beer", "inventory", "hotels")}
DATA = {"scope_name": "*", "collection_name": "*"}


def is_there(grant: Grant) -> bool:
    return (grant.bucket, grant.scope, grant.collection) in PLACES


@case("", set())
@case(" , ", set())
@case("admin", {Grant(Role.ADMIN)})
@case("Admin", {Grant(Role.ADMIN)})
@case("data_reader[*]", {Grant(Role.DATA_READER)})
@case("data_reader[beer], data_writer[a.b%c-d]", {Grant(Role.DATA_READER, "beer"), Grant(Role.DATA_WRITER, "a.b%c-d")})
@case("data_dcp_reader[beer:*:*],data_dcp_reader[beer:*]", {Grant(Role.DATA_DCP_READER, "beer")})
@case("data_reader[beer:inventory]", {Grant(Role.DATA_READER, "beer", "inventory")})
@case("data_writer[beer:inventory:hotels]", {Grant(Role.DATA_WRITER, "beer", "inventory", "hotels")})
@case(
    "ro_admin,query_select[beer],fts_searcher[*]",
    {Grant(Role.RO_ADMIN), Grant(Role.QUERY_SELECT, "beer"), Grant(Role.FTS_SEARCHER)},
)
@case("bucket_admin[beer],bucket_full_access[*]", {Grant(Role.BUCKET_ADMIN, "beer"), Grant(Role.BUCKET_FULL_ACCESS)})
def test_roles_are_read(text: str, grants: set[Grant]) -> None:
    assert parse_roles(text, is_there=is_there) == grants


@each(
    "role",
    [
        *("ro_admin[beer]", "reader", "writer[beer]", "admin[*]", "admin[]", "[beer]", "data reader"),
        *(
            "data_reader",
            "data_reader[]",
            "data_reader[wine]",
            "data_reader[beer",
            "data_reader]",
            "data_reader[beer]x",
        ),
        *("data_reader[beer:nowhere]", "data_reader[beer:inventory:nowhere]", "data_dcp_reader[beer:inventory]"),
        *(
            "data_reader[beer::hotels]",
            "data_reader[*:inventory]",
            "data_reader[beer:*:hotels]",
            "data_reader[beer:*:*:*]",
            "data_reader[:*]",
        ),
        *("bucket_admin[beer:*]", "bucket_full_access"),
    ],
)
def test_what_is_no_role(role: str) -> None:
    with pytest.raises(LocalProtocolError) as refused:
        parse_roles(f"admin,{role}", is_there=is_there)
    assert refused.value.reason.endswith(f": {role}")
    assert all(str(known) in refused.value.hint for known in KNOWN_ROLES)


@case([], [])
@case([Grant(Role.ADMIN)], [{"role": "admin"}])
@case(
    [Grant(Role.READER, "beer"), Grant(Role.DATA_READER, "beer")],
    [
        {"role": "data_dcp_reader", "bucket_name": "beer", **DATA},
        {"role": "data_reader", "bucket_name": "beer", **DATA},
    ],
)
@case([Grant(Role.BUCKET_ADMIN, "beer")], [{"role": "bucket_admin", "bucket_name": "beer"}])
def test_roles_are_written(grants: list[Grant], written: list[dict[str, str]]) -> None:
    assert roles_of(grants) == written


@each("role", Role)
@each("bucket", ["*", "beer"])
def test_what_is_written_is_worth_what_was_granted(role: Role, bucket: str) -> None:
    """Whoever reads a user, changes its name and stores it again must not give it other rights by that."""
    if role is Role.RO_ADMIN:
        bucket = "*"  # It is one of the whole node.
    written = roles_of([Grant(role, bucket)])
    text = ",".join(one["role"] + (f"[{one['bucket_name']}]" if "bucket_name" in one else "") for one in written)
    read = parse_roles(text, is_there=is_there)
    for action in Action:
        for asked in ("beer", None):
            # On one bucket, the node's admin has no more rights than Couchbase has names for.
            expected = Grant(role, bucket).allows(action, asked) and not (action in NODE_WIDE and asked)
            assert any(grant.allows(action, asked) for grant in read) >= expected, (action, asked)
            if action not in NODE_WIDE or role is not Role.ADMIN:
                assert any(grant.allows(action, asked) for grant in read) == Grant(role, bucket).allows(action, asked)


def test_grants_on_less_than_a_bucket() -> None:
    grants = Grant(Role.DATA_READER, "beer", "inventory", "hotels"), Grant(Role.DATA_WRITER, "wine", "s")
    users = with_user("rob", "pencil", *grants)
    hotels = {"scope": "inventory", "collection": "hotels"}
    assert users.may("rob", Action.READ, "beer", **hotels)
    assert users.may("rob", Action.USE, "beer")
    assert users.may("rob", Action.WRITE, "wine", scope="s", collection="any")
    for action, bucket, names in (
        (Action.WRITE, "beer", hotels),
        (Action.READ, "beer", {"scope": "inventory", "collection": "bars"}),
        (Action.READ, "beer", {"scope": "other", "collection": "hotels"}),
        (Action.READ, "beer", {}),
        (Action.READ, "wine", hotels),
        (Action.USE, None, {}),
    ):
        assert not users.may("rob", action, bucket, **names), (action, bucket, names)
    manifest = Manifest().with_scope("inventory").with_collection("inventory", "hotels")
    seen = users.visible("rob", "beer", manifest.with_collection("inventory", "bars"))
    assert [(scope.name, one.name) for scope, one in seen.collections()] == [("inventory", "hotels")]
    assert with_user("ann", "pencil", Grant(Role.DATA_WRITER, "beer")).visible("ann", "beer", manifest) == manifest


def test_when_a_password_was_changed() -> None:
    before = with_user("rob").stamped(EMPTY, now_ms=1000)
    assert before.by_name["rob"].password_changed_ms == 1000
    renamed = before.put(replace(before.by_name["rob"], display_name="Rob")).stamped(before, now_ms=2000)
    assert (renamed.by_name["rob"].changed_ms, renamed.by_name["rob"].password_changed_ms) == (2000, 1000)

"""The PyPI package `couchbase` as a manager of the node's users, and those users at work."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from couchbase import exceptions
from couchbase.cluster import Cluster
from couchbase.management.options import UpsertUserOptions
from couchbase.management.users import Group, Role, User, UserManager
from couchbase.options import GetOptions, UpsertOptions

from support.node_process import NodeProcess
from support.sdk import connected

SHORT = timedelta(seconds=2)
PASSWORD = "violets and daisies"
"""No &, which the SDK would send as it is, as the end of the field."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def manager(cluster: Cluster) -> UserManager:
    return cluster.users()


@pytest.fixture
def name(manager: UserManager) -> Iterator[str]:
    """A name for a user, who is gone after the test."""
    name = f"user-{next(_numbers)}"
    yield name
    if any(found.user.username == name for found in manager.get_all_users()):
        manager.drop_user(name)


def test_a_user_comes_and_goes(manager: UserManager, name: str) -> None:
    roles = {Role(name="data_reader", bucket="default"), Role(name="data_writer", bucket="*")}
    manager.upsert_user(User(username=name, display_name="A User", password=PASSWORD, roles=roles))
    found = manager.get_user(name)
    assert (found.user.username, found.user.display_name, found.domain.name) == (name, "A User", "Local")
    assert {(role.name, role.bucket) for role in found.user.roles} == {("data_reader", "default"), ("data_writer", "*")}
    assert {one.role for one in found.effective_roles} == found.user.roles
    assert name in {other.user.username for other in manager.get_all_users()}
    user = found.user
    user.display_name = "Another Name"
    manager.upsert_user(user)
    again = manager.get_user(name).user
    assert (again.display_name, again.roles) == ("Another Name", user.roles)
    with pytest.raises(exceptions.InvalidArgumentException):  # as in the Community Edition
        manager.upsert_user(user, UpsertUserOptions(domain_name="external"))
    manager.drop_user(name)
    for missing in (manager.get_user, manager.drop_user):
        with pytest.raises(exceptions.UserNotFoundException):
            missing(name)


def test_a_group_comes_and_goes(manager: UserManager, name: str) -> None:
    own, by_group = Role(name="data_reader", bucket="default"), Role(name="data_writer", bucket="*")
    manager.upsert_group(Group(name="writers", description="Who writes", roles={by_group}))
    group = manager.get_group("writers")
    assert (group.name, group.description, named(group.roles)) == ("writers", "Who writes", {"data_writer[*]"})
    manager.upsert_user(User(username=name, password=PASSWORD, roles={own}, groups={"writers"}))
    found = manager.get_user(name)
    assert (named(found.user.roles), found.user.groups) == ({"data_reader[default]"}, {"writers"})
    origins = {one.role.name: [(origin.type, origin.name) for origin in one.origins] for one in found.effective_roles}
    assert origins == {"data_reader": [("user", None)], "data_writer": [("group", "writers")]}
    manager.upsert_group(Group(name="writers", roles={own}))
    assert [one.name for one in manager.get_all_groups()] == ["writers"]
    assert named(one.role for one in manager.get_user(name).effective_roles) == {"data_reader[default]"}
    manager.drop_group("writers")
    assert not manager.get_user(name).user.groups
    for missing in (manager.get_group, manager.drop_group):
        with pytest.raises(exceptions.GroupNotFoundException):
            missing("writers")
    with pytest.raises(exceptions.InvalidArgumentException):
        manager.upsert_user(User(username=name, roles={own}, groups={"writers"}))


def named(roles: Iterable[Role]) -> set[str]:
    return {f"{role.name}[{role.bucket}]" for role in roles}


def test_the_roles(manager: UserManager) -> None:
    roles = manager.get_roles()
    assert {(one.role.name, one.role.bucket) for one in roles} >= {
        ("admin", None),
        ("bucket_full_access", "*"),
        ("data_reader", "default"),
        ("data_writer", "other"),
        ("data_dcp_reader", "*"),
    }
    assert all(one.display_name and one.description for one in roles)


@pytest.mark.parametrize("role", [Role(name="root"), Role(name="data_reader", bucket="none")])
def test_roles_that_the_node_does_not_have(manager: UserManager, name: str, role: Role) -> None:
    with pytest.raises(exceptions.InvalidArgumentException):
        manager.upsert_user(User(username=name, password=PASSWORD, roles={role}))
    with pytest.raises(exceptions.InvalidArgumentException):
        manager.upsert_user(User(username=name, password="short", roles={Role(name="admin")}))
    with pytest.raises(exceptions.UserNotFoundException):
        manager.get_user(name)


def test_a_user_may_do_what_its_roles_say_from_one_moment_to_the_next(
    sdk_node: NodeProcess, manager: UserManager, cluster: Cluster, name: str, key: str
) -> None:
    cluster.bucket("default").default_collection().upsert(key, {"n": 1})
    manager.upsert_user(User(username=name, password=PASSWORD, roles={Role(name="data_reader", bucket="default")}))
    with connected(sdk_node.url, name, PASSWORD) as its_cluster:
        collection = its_cluster.bucket("default").default_collection()
        assert collection.get(key).content_as[dict] == {"n": 1}
        with pytest.raises(exceptions.AuthenticationException):
            collection.upsert(key, {"n": 2}, UpsertOptions(timeout=SHORT))
        manager.upsert_user(User(username=name, roles={Role(name="bucket_full_access", bucket="default")}))
        collection.upsert(key, {"n": 3})
        assert collection.get(key).content_as[dict] == {"n": 3}
        manager.upsert_user(User(username=name, roles={Role(name="data_writer", bucket="default")}))
        collection.upsert(key, {"n": 4})
        with pytest.raises(exceptions.AuthenticationException):
            collection.get(key, GetOptions(timeout=SHORT))
        manager.drop_user(name)
        with pytest.raises(exceptions.AuthenticationException):
            collection.upsert(key, {}, UpsertOptions(timeout=SHORT))


def test_only_a_user_may_change_its_password(sdk_node: NodeProcess, manager: UserManager, name: str) -> None:
    manager.upsert_user(User(username=name, password=PASSWORD, roles={Role(name="data_reader", bucket="*")}))
    with connected(sdk_node.url, name, PASSWORD) as its_cluster:
        with pytest.raises((exceptions.AuthenticationException, exceptions.CouchbaseException)):
            its_cluster.users().upsert_user(User(username=name, roles={Role(name="admin")}))
        its_cluster.users().change_password("daisies & violets")
    with connected(sdk_node.url, name, "daisies & violets") as its_cluster:
        its_cluster.bucket("default").default_collection().exists("nothing")
    assert {role.name for role in manager.get_user(name).user.roles} == {"data_reader"}


def test_what_a_password_and_roles_of_other_services_show(manager: UserManager, name: str) -> None:
    roles = {Role(name="ro_admin"), Role(name="query_select", bucket="default"), Role(name="fts_searcher", bucket="*")}
    manager.upsert_user(User(username=name, password=PASSWORD, roles=roles))
    read = manager.get_user(name)
    assert {role.name for role in read.user.roles} == {role.name for role in roles}
    assert abs(datetime.now(UTC) - read.password_changed.replace(tzinfo=UTC)) < timedelta(minutes=10)
    # Every user of the list can be read, the first admin included.
    assert all(one.password_changed is not None for one in manager.get_all_users())
    manager.drop_user(name)


def test_roles_on_scopes_and_collections(
    sdk_node: NodeProcess, cluster: Cluster, manager: UserManager, name: str, key: str
) -> None:
    collections = cluster.bucket("default").collections()
    collections.create_scope(name)
    for collection in ("read", "written"):
        collections.create_collection(name, collection)
    roles = {
        Role(name="data_reader", bucket="default", scope=name),
        Role(name="data_writer", bucket="default", scope=name, collection="written"),
    }
    unknown = Role(name="data_reader", bucket="default", scope=name, collection="nowhere")
    with pytest.raises(exceptions.InvalidArgumentException):
        manager.upsert_user(User(username=name, password=PASSWORD, roles={unknown}))
    manager.upsert_user(User(username=name, password=PASSWORD, roles=roles))
    shown = {(role.name, role.scope, role.collection) for role in manager.get_user(name).user.roles}
    assert shown == {("data_reader", name, "*"), ("data_writer", name, "written")}
    cluster.bucket("default").default_collection().upsert(key, {})
    with connected(sdk_node.url, name, PASSWORD) as user:
        scope = user.bucket("default").scope(name)
        scope.collection("written").upsert(key, {"n": 1})
        assert scope.collection("written").get(key).content_as[dict] == {"n": 1}
        with pytest.raises(exceptions.DocumentNotFoundException):
            scope.collection("read").get(key)
        for refused in (
            lambda: scope.collection("read").upsert(key, {}),
            lambda: user.bucket("default").default_collection().get(key),
        ):
            with pytest.raises(exceptions.AuthenticationException):
                refused()
    manager.drop_user(name)
    collections.drop_scope(name)

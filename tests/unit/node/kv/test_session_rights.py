"""Rights on a key-value connection, beyond those of roles on commands (`test_rights`): names, log-outs, collections."""

from __future__ import annotations

import pytest

from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.protocol.features import Feature
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import Open, OpenFlags
from headwater.protocol.messages.documents import Get, Increment, Set, SetQuiet
from headwater.protocol.messages.session import GetClusterConfig, Hello, SaslAuth, SelectBucket, Stat
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionsManifest
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status
from support.kv_harness import FEATURES, PASSWORD, Client, Node

PLAIN = SaslAuth(key=b"PLAIN", value=PlainLogin(user="admin", password=PASSWORD).encode())


@pytest.fixture
def stranger(node: Node) -> Client:
    """A client that has said HELLO and nothing else."""
    client = Client(node)
    client.succeed(Hello(key=b"test", features=FEATURES))
    return client


@pytest.mark.parametrize("name", [b"replication:a:11210->b:11210:default", b"takeover:a:11210->b:11210"])
def test_names_of_connections_between_nodes_are_for_nodes(node: Node, name: bytes) -> None:
    """A connection of the same name ends: a reader could cut replication, and majority writes would hang."""
    replication = node.client(user="admin")
    replication.succeed(Open(key=name, flags=OpenFlags.PRODUCER))
    for user in ("reader", "bucket_full_access"):
        assert node.client(user=user).refused(Open(key=name, flags=OpenFlags.PRODUCER)) == Status.EACCESS
    assert node.bucket_service.dcp_sessions[name.decode()] is replication.session
    node.client(user="admin").succeed(Open(key=name, flags=OpenFlags.PRODUCER))
    assert node.bucket_service.dcp_sessions[name.decode()] is not replication.session


def test_a_name_is_taken_over_by_its_own_user_and_no_other(node: Node) -> None:
    request = Open(key=b"landing", flags=OpenFlags.PRODUCER)
    node.client(user="reader").succeed(request)
    assert node.client(user="writer").refused(request) == Status.EACCESS
    node.client(user="reader").succeed(request)
    node.bucket_service.dcp_sessions["landing"].log_out()  # type: ignore[attr-defined]
    node.client(user="writer").succeed(request)


def test_one_who_is_logged_out_has_no_rights(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    client.session.log_out()
    assert client.refused(Get(key=b"k")) == Status.EACCESS
    assert client.refused(GetClusterConfig()) == Status.EACCESS


def test_runs_of_sets_need_the_right_to_write(node: Node) -> None:
    client = node.client(user="reader")
    answers = client.call_all(*[SetQuiet(key=b"k", value=b"v")] * 3)
    assert [answer.status for answer in answers] == [Status.EACCESS] * 3
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT


def test_a_bucket_must_be_selected(stranger: Client) -> None:
    stranger.succeed(PLAIN)
    assert stranger.refused(Get(key=b"k")) == Status.NO_BUCKET
    assert stranger.refused(SelectBucket(key=b"none")) == Status.EACCESS
    stranger.succeed(SelectBucket(key=b"default"))
    assert stranger.refused(Get(key=b"k")) == Status.KEY_ENOENT
    stranger.succeed(SelectBucket())
    assert stranger.refused(Get(key=b"k")) == Status.NO_BUCKET


def test_a_right_on_a_collection_is_one_on_its_documents(node: Node) -> None:
    carts = Manifest().with_scope("shop").with_collection("shop", "carts").with_collection("shop", "bills")
    node.set_manifest(carts)
    ids = {name: found.id for name in ("carts", "bills") if (found := carts.find("shop", name)) is not None}
    grants = [Grant(Role.DATA_READER, "default", "shop"), Grant(Role.DATA_WRITER, "default", "shop", "carts")]
    users = node.service.users
    node.service.users = users.add(users.new_user("sue", PASSWORD, grants, salts=bytes(SALTS_BYTES)))
    client = node.client(user="sue", features=(*FEATURES, Feature.COLLECTIONS))
    client.succeed(Set(collection_id=ids["carts"], key=b"k", value=b"1"))
    assert client.succeed(Get(collection_id=ids["carts"], key=b"k")).value == b"1"
    client.succeed(Increment(collection_id=ids["carts"], key=b"n", delta=1, initial=1, expiry=0))
    assert client.refused(Get(collection_id=ids["bills"], key=b"k")) == Status.KEY_ENOENT
    for request in (
        Set(collection_id=ids["bills"], key=b"k", value=b"1"),
        Get(collection_id=DEFAULT_COLLECTION, key=b"k"),
        Get(collection_id=CollectionId(99), key=b"k"),
        Stat(),
        Open(key=b"consumer", flags=OpenFlags.PRODUCER),
    ):
        assert client.refused(request) == Status.EACCESS, request
    assert client.refused(GetCollectionId(value=b"_default._default")) == Status.UNKNOWN_COLLECTION
    shown = Manifest.decode(client.succeed(GetCollectionsManifest()).value)
    assert [one.name for _, one in shown.collections()] == ["carts", "bills"]
    # Requests that know of no collections are about the default one.
    plain = node.client(user="sue", features=(Feature.XERROR,))
    assert plain.refused(Get(key=b"k")) == Status.EACCESS

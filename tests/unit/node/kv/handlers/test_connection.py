"""The cluster config on a key-value connection: given by the node, or set by the admin."""

from __future__ import annotations

import pytest

from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.node.service import ConfigVersion
from headwater.protocol.messages.session import GetClusterConfig, SetClusterConfig
from headwater.protocol.status import Status
from support.kv_harness import PASSWORD


@pytest.fixture
def given(node):
    """Stands for the node: keeps what the admin sets."""
    configs: dict[str | None, tuple[ConfigVersion, bytes]] = {}

    def set_config(bucket, version, config):
        if bucket in configs and version <= configs[bucket][0]:
            return False
        configs[bucket] = (version, config)
        return True

    node.service.set_cluster_config = set_config
    return configs


def test_the_admin_sets_the_config_of_a_bucket(client, given):
    response = client.call(SetClusterConfig(epoch=1, revision=7, key=b"default", value=b"{}"))
    assert response.status == Status.SUCCESS
    assert given == {"default": ((1, 7), b"{}")}


def test_an_older_config_is_refused(client, given):
    client.call(SetClusterConfig(epoch=1, revision=7, key=b"default", value=b"{}"))
    assert client.call(SetClusterConfig(epoch=1, revision=7, key=b"default", value=b"{}")).status == Status.KEY_EEXISTS


def test_a_config_of_an_unknown_bucket_is_refused(client, given):
    assert client.call(SetClusterConfig(epoch=1, revision=7, key=b"nobody", value=b"{}")).status == Status.KEY_ENOENT


def test_the_config_is_given_to_whoever_is_logged_in(client):
    assert b"default" in client.call(GetClusterConfig()).value


@pytest.mark.parametrize("role", [Role.ADMIN, Role.BUCKET_ADMIN])
def test_a_config_is_set_by_full_admins_only(node, given, role):
    """It says which addresses are nodes and how they log in: an admin of one bucket could let itself in as a node."""
    known = node.service.users
    ann = known.new_user("ann", PASSWORD, [Grant(role, "default")], salts=bytes(SALTS_BYTES))
    node.service.users = known.add(ann)
    client = node.client(user="ann")
    for bucket in (b"", b"default"):
        assert client.refused(SetClusterConfig(epoch=1, revision=7, key=bucket, value=b"{}")) == Status.EACCESS
    assert not given

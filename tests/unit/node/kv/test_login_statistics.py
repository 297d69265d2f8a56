"""Who gets to know how the nodes of a cluster log in to each other."""

from __future__ import annotations

import pytest
from kv_harness import Node
from test_statistics import statistics

from headwater.client.handshake import Credentials
from headwater.node.auth.users import Role
from headwater.protocol.messages.session import Stat
from headwater.protocol.status import Status

GROUP = b"headwater-login"


@pytest.fixture
def member(node: Node) -> Node:
    node.bucket_service.nodes_login = lambda: Credentials("@cluster-default", "drawn once")
    return node


def test_an_admin_may_ask(member: Node) -> None:
    assert statistics(member.client(), GROUP) == {"user": "@cluster-default", "password": "drawn once"}


@pytest.mark.parametrize("role", [role for role in Role if role != Role.ADMIN])
def test_nobody_else_may(member: Node, role: Role) -> None:
    assert member.client(user=role.value).refused(Stat(key=GROUP)) == Status.EACCESS


def test_a_node_in_no_cluster_has_none(node: Node) -> None:
    assert statistics(node.client(), GROUP) == {}

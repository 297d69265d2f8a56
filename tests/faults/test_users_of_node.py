"""Users of a real node: they survive kill -9, and what they have open ends with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import headwater
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import AccessDenied, AuthenticationFailed
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from headwater.protocol.sasl import Credentials
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

KIM = "/settings/rbac/users/local/kim"
FORM = {"password": "violets", "roles": "bucket_full_access[default]"}
READ = Get(key=b"k", collection_id=DEFAULT_COLLECTION, vbucket=VBucketId(0))
WRITE = Set(key=b"k", value=b"v", collection_id=DEFAULT_COLLECTION, vbucket=VBucketId(0))


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node("--vbuckets", "4")


@pytest.fixture
def admin(node: NodeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD), timeout=30) as client:
        yield client


def connect(node: NodeProcess, password: str = "violets") -> KvConnection:
    return KvConnection.open(node.address, Login(credentials=Credentials("kim", password), bucket="default"))


def test_changes_survive_kill_nine(node: NodeProcess, admin: httpx.Client) -> None:
    admin.put(KIM, data=FORM).raise_for_status()
    node.kill()
    node.start()
    connect(node).close()
    with httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD), timeout=30) as again:
        again.put(KIM, data={**FORM, "password": "daisies"}).raise_for_status()
        node.kill()
        node.start()
    connect(node, "daisies").close()
    with pytest.raises(AuthenticationFailed):
        connect(node)
    with httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD), timeout=30) as again:
        again.delete(KIM).raise_for_status()
        node.kill()
        node.start()
    with pytest.raises(AuthenticationFailed):
        connect(node, "daisies")
    assert "violets" not in node.log()
    assert "daisies" not in node.log()


def test_one_who_is_removed_loses_its_rights_for_good(node: NodeProcess, admin: httpx.Client) -> None:
    admin.put(KIM, data=FORM).raise_for_status()
    with connect(node) as connection:
        connection.request(WRITE)
        admin.put(KIM, data={"roles": "data_writer[default]"}).raise_for_status()
        with pytest.raises(AccessDenied):
            connection.request(READ)
        admin.put(KIM, data=FORM).raise_for_status()
        connection.request(READ)
        admin.delete(KIM).raise_for_status()
        for request in (READ, GetClusterConfig()):
            with pytest.raises(AccessDenied):
                connection.request(request)
        # A namesake who comes later has nothing to do with this connection.
        admin.put(KIM, data=FORM).raise_for_status()
        with pytest.raises(AccessDenied):
            connection.request(READ)


def test_streams_end_with_their_user(node: NodeProcess, admin: httpx.Client) -> None:
    admin.put(KIM, data=FORM).raise_for_status()
    with connect(node) as connection:
        connection.request(WRITE)
    with headwater.blocking.connect(f"{node.url}/default", user="kim", password="violets") as client:
        changes = iter(client.changes())
        next(changes)
        admin.delete(KIM).raise_for_status()
        with pytest.raises((AccessDenied, AuthenticationFailed)):
            next(changes)


def test_variables_that_are_meant_for_clients_change_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.node_process.environment", lambda: {**os.environ, "PYTHONUNBUFFERED": "1"})
    monkeypatch.setenv("HEADWATER_USER", USER)
    monkeypatch.setenv("HEADWATER_PASSWORD", PASSWORD)
    with NodeProcess(tmp_path / "data", "--vbuckets", "4", user=None, fresh=True) as node:
        node.start()
        assert node.ready["user"] == USER
        with httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD), timeout=30) as admin:
            admin.put(KIM, data={"password": "violets", "roles": "data_dcp_reader[default]"}).raise_for_status()
            before = admin.get("/settings/rbac/users").json()
        assert node.stop() == 0
        monkeypatch.setenv("HEADWATER_USER", "kim")
        monkeypatch.setenv("HEADWATER_PASSWORD", "daisies")
        node.start()
        with httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD), timeout=30) as admin:
            assert admin.get("/settings/rbac/users").json() == before
        connect(node).close()
        with pytest.raises(AuthenticationFailed):
            connect(node, "daisies")
        assert "kim, who has another password on this node: nothing is changed" in node.log()

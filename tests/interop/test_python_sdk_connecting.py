"""The PyPI package `couchbase` on its way in: how fast it is ready, who is let in, and TLS."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.diagnostics import ClusterState, ServiceType
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import (
    AuthenticationException,
    BucketNotFoundException,
    CouchbaseException,
    ServiceUnavailableException,
)
from couchbase.management.buckets import CreateBucketSettings
from couchbase.observability.tracing import RequestSpan, RequestTracer
from couchbase.options import ClusterOptions, ClusterTimeoutOptions, GetOptions, UpsertOptions, WaitUntilReadyOptions

from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode, serve_command

READY_S_MAX = 2.0
REFUSED_S_MAX = 5.0
TIMEOUT = timedelta(seconds=30)
REFUSED_TIMEOUT = timedelta(seconds=2)


@contextmanager
def connected(
    url: str,
    *,
    user: str = USER,
    password: str = PASSWORD,
    trusted: Path | None = None,
    bootstrap_timeout: timedelta = TIMEOUT,
    tracer: RequestTracer | None = None,
) -> Iterator[Cluster]:
    authenticator = PasswordAuthenticator(user, password, cert_path=str(trusted) if trusted else None)
    timeouts = ClusterTimeoutOptions(bootstrap_timeout=bootstrap_timeout)
    tracing = {} if tracer is None else {"tracer": tracer}
    cluster = Cluster(url, ClusterOptions(authenticator, timeout_options=timeouts, **tracing))
    try:
        yield cluster
    finally:
        cluster.close()


# --- ready --------------------------------------------------------------------------------------------------------


def test_ready_in_time(sdk_node: NodeProcess) -> None:
    began_s = time.monotonic()
    with connected(sdk_node.url) as cluster:
        bucket = cluster.bucket("default")
        kv_alone = WaitUntilReadyOptions(service_types=[ServiceType.KeyValue])
        cluster.wait_until_ready(TIMEOUT, kv_alone)
        cluster.wait_until_ready(TIMEOUT)
        bucket.default_collection().upsert("ready", {})
        took_s = time.monotonic() - began_s
    print(f"connected, ready and written in {took_s:.3f} s")
    assert took_s < READY_S_MAX


class Spans(RequestTracer):
    """Keeps the attributes of all spans."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def request_span(self, name: str, parent_span: Any = None, start_time: int | None = None) -> RequestSpan:
        return Span(name, self.attributes)


class Span(RequestSpan):
    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self._name = name
        self._attributes = attributes

    @property
    def name(self) -> str:
        return self._name

    def set_attribute(self, key: str, value: Any) -> None:
        self._attributes[key] = value

    def set_attributes(self, attributes: Any) -> None:
        self._attributes.update(attributes)

    def add_event(self, name: str, value: Any = None) -> None: ...

    def set_status(self, status: Any) -> None: ...

    def end(self, end_time: int | None = None) -> None: ...


def test_spans_have_the_time_that_the_node_took(sdk_node: NodeProcess, key: str) -> None:
    spans = Spans()
    with connected(sdk_node.url, tracer=spans) as cluster:
        cluster.bucket("default").default_collection().upsert(key, {"n": 1})
    # Of the write: what it waited for the disk is in it.
    assert 10 < spans.attributes["couchbase.server_duration"] < 30_000_000


def test_ping_and_diagnostics(sdk_node: NodeProcess) -> None:
    # Not by the connection of all tests: it has opened buckets that have been dropped since.
    with connected(sdk_node.url) as cluster:
        for report in (cluster.bucket("default").ping(), cluster.ping()):
            assert {endpoint.state.name for endpoint in report.endpoints[ServiceType.KeyValue]} == {"OK"}
        diagnosed = cluster.diagnostics()
        assert diagnosed.state == ClusterState.Online
        assert {endpoint.remote for endpoint in diagnosed.endpoints[ServiceType.KeyValue]} == {str(sdk_node.address)}


def test_it_comes_back_after_a_restart(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "16")
    port = str(node.address.port)
    with connected(node.url) as cluster:
        collection = cluster.bucket("default").default_collection()
        collection.upsert("lasting", {"version": 1})
        node.kill()
        node.options = (*node.options, "--port", port)
        node.start()
        assert collection.get("lasting", GetOptions(timeout=TIMEOUT)).content_as[dict] == {"version": 1}
        collection.upsert("lasting", {"version": 2})


# --- who is let in ------------------------------------------------------------------------------------------------


def test_a_wrong_password(sdk_node: NodeProcess) -> None:
    began_s = time.monotonic()
    with pytest.raises(AuthenticationException), connected(sdk_node.url, user="nobody", password="wrong"):
        pass
    assert time.monotonic() - began_s < REFUSED_S_MAX


def test_an_unknown_bucket(sdk_node: NodeProcess) -> None:
    with connected(sdk_node.url, bootstrap_timeout=REFUSED_TIMEOUT) as cluster, pytest.raises(BucketNotFoundException):
        cluster.bucket("nowhere")


# --- what is not served -------------------------------------------------------------------------------------------


def test_what_is_not_served_is_said_so_at_once(cluster: Cluster) -> None:
    began_s = time.monotonic()
    with pytest.raises(ServiceUnavailableException):
        cluster.query("SELECT 1").execute()
    assert time.monotonic() - began_s < REFUSED_S_MAX


# --- TLS ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_tls(start_node: StartNode, certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    node = start_node("--vbuckets", "16", "--tls-cert", str(path), "--tls-key", str(key), "--tls-only")
    assert node.url.startswith("couchbases://")
    assert node.http_url.startswith("https://")
    assert "plain" not in node.ready
    began_s = time.monotonic()
    with connected(node.url, trusted=path) as cluster:
        collection = cluster.bucket("default").default_collection()
        cluster.wait_until_ready(TIMEOUT)
        collection.upsert("secret", {"version": 1})
        assert time.monotonic() - began_s < READY_S_MAX
        assert collection.get("secret").content_as[dict] == {"version": 1}
        manager = cluster.bucket("default").collections()
        manager.create_collection("_default", "over-tls")
        scope = cluster.bucket("default").default_scope()
        scope.collection("over-tls").upsert("secret", {"version": 2})


def _write_and_read_in_turns(ready: dict[str, str], trusted: Path) -> None:
    """Clients with TLS and without it at the same time, over the ports that one config gives."""
    assert (ready["ready"].partition("://")[0], ready["plain"].partition("://")[0]) == ("couchbases", "couchbase")
    with connected(ready["ready"], trusted=trusted) as with_tls, connected(ready["plain"]) as without:
        for cluster in (with_tls, without):
            cluster.wait_until_ready(TIMEOUT)
        for turn, (writer, reader) in enumerate([(with_tls, without), (without, with_tls)]):
            durable = UpsertOptions(durability=ServerDurability(Durability.MAJORITY))
            writer.bucket("default").default_collection().upsert(f"document-{turn}", {"turn": turn}, durable)
            found = reader.bucket("default").default_collection().get(f"document-{turn}")
            assert found.content_as[dict] == {"turn": turn}
            writer.buckets().create_bucket(CreateBucketSettings(name=f"bucket-{turn}", num_vbuckets=8))
            reader.buckets().drop_bucket(f"bucket-{turn}")


def test_ports_with_and_without_tls_of_one_node(start_node: StartNode, certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    node = start_node("--vbuckets", "16", "--tls-cert", str(path), "--tls-key", str(key), "--tls-port", "0")
    _write_and_read_in_turns(node.ready, path)
    services = httpx.get(f"{node.ready['plain_http']}/pools/default/nodeServices", auth=(USER, PASSWORD)).json()
    ports = [node.ready[name].rpartition(":")[2] for name in ("plain", "plain_http", "ready", "http")]
    found = services["nodesExt"][0]["services"]
    assert [str(found[name]) for name in ("kv", "mgmt", "kvSSL", "mgmtSSL")] == ports


def test_ports_with_and_without_tls_of_three(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    options = ("--nodes", "3", "--vbuckets", "16", "--user", USER, "--password", PASSWORD, "--json")
    command = serve_command("--data", str(tmp_path), *options, "--tls-cert", str(path), "--tls-key", str(key))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as nodes:
        try:
            _write_and_read_in_turns(json.loads(nodes.stdout.readline()), path)
        finally:
            nodes.send_signal(signal.SIGINT)
            assert nodes.wait(30) == 0


def test_tls_with_a_certificate_nobody_trusts(start_node: StartNode, certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    node = start_node("--vbuckets", "16", "--tls-cert", str(path), "--tls-key", str(key))
    with pytest.raises(CouchbaseException), connected(node.url, bootstrap_timeout=REFUSED_TIMEOUT) as cluster:
        cluster.wait_until_ready(REFUSED_TIMEOUT)

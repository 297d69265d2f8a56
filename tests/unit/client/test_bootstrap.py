"""Bootstrapping from any of several hosts, and what is said if none will do."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headwater import errors
from headwater.client.blocking_bucket import KvCluster, bootstrap
from headwater.client.bootstrap import connect_any
from headwater.client.cluster_map import Network
from headwater.client.connection_string import Address, BootstrapBy
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.protocol.messages.session import GetClusterConfig, Noop, SelectBucket
from headwater.protocol.status import Status
from support.cases import case_apart
from support.fake_servers import (
    PASSWORD,
    USER,
    Peer,
    Talk,
    answering,
    answering_http,
    down,
    hanging_up,
    http_answer,
    refused,
    saying,
    serving,
    silent,
)

TERSE = "/pools/default/b/travel"


def config(*, rows: list[list[int]] | None = None, port: int = 11210) -> bytes:
    nodes = [
        {
            "services": {"kv": port + at, "mgmt": 8091 + at},
            "hostname": f"inside{at}",
            "alternateAddresses": {"external": {"hostname": "127.0.0.1", "ports": {"kv": port + at}}},
        }
        for at in range(3)
    ]
    servers = [f"inside{at}:{port + at}" for at in range(3)]
    rows = [[0, 1], [1, 2], [2, 0]] if rows is None else rows
    return json.dumps(
        {
            "rev": 5,
            "name": "travel",
            "uuid": "u-1",
            "nodesExt": nodes,
            "vBucketServerMap": {"serverList": servers, "vBucketMap": rows},
        }
    ).encode()


CONFIG = config()


def good() -> Peer:
    return Peer(config=CONFIG)


def without_bucket() -> Peer:
    return Peer(config=CONFIG, bucket="other")


def refusing(status: Status) -> Talk:
    def new_peer() -> Peer:
        peer = Peer(config=CONFIG)
        peer.replace[SelectBucket] = lambda request: refused(request, status)
        return peer

    return answering(new_peer)


@pytest.fixture
def hosts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(hosts: ExitStack, *talks: Talk | None) -> list[Address]:
    """Hosts that talk, and hosts that are down where it says None."""
    return [down() if talk is None else hosts.enter_context(serving(talk)) for talk in talks]


def settings(addresses: list[Address], query: str = "", **options: Any) -> ClientSettings:
    options = {"user": USER, "password": PASSWORD, **options}
    where = ",".join(str(address) for address in addresses)
    return ClientSettings.make(f"couchbase://{where}/travel{query}", **options)


def failure(addresses: list[Address], query: str = "", **options: Any) -> errors.HeadwaterError:
    with pytest.raises(errors.HeadwaterError) as raised:
        bootstrap(settings(addresses, query, **options))
    assert raised.value.hint
    return raised.value


def test_the_first_host_that_answers_is_taken(hosts: ExitStack) -> None:
    other = answering(lambda: Peer(config=config(rows=[[0]])))
    first, second = serve(hosts, answering(good), other)
    assert bootstrap(settings([first, second])).asked == first
    assert bootstrap(settings([second, first])).asked == second


@case_apart(None, id="down")
@case_apart(hanging_up, id="hangs up")
@case_apart(saying(b"nonsense"), id="nonsense")
@case_apart(saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), id="http")
@case_apart(answering(without_bucket), id="no bucket")
@case_apart(refusing(Status.ETMPFAIL), id="busy")
@case_apart(refusing(Status.EACCESS), id="no access")
@case_apart(answering(lambda: Peer(config=b"{}")), id="no config")
@case_apart(answering(lambda: Peer(config=config(rows=[]))), id="being made")
def test_a_host_that_will_not_do_is_skipped(hosts: ExitStack, bad: Talk | None) -> None:
    addresses = serve(hosts, bad, answering(good), bad)
    found = bootstrap(settings(addresses))
    assert found.asked == addresses[1]
    assert found.bucket_uuid == "u-1"
    assert [found.cluster_map.active_node(vbucket) for vbucket in range(3)] == [0, 1, 2]


def test_hosts_of_both_kinds(hosts: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the hosts has the port of a cluster manager, as far as the connection string goes."""
    by_http, by_kv = serve(hosts, answering_http({TERSE: http_answer(CONFIG)}, []), answering(good))
    monkeypatch.setattr("headwater.client.connection_string.HTTP_PORT", by_http.port)
    assert bootstrap(settings([by_http, by_kv])).by is BootstrapBy.HTTP
    assert bootstrap(settings([by_kv, by_http])).by is BootstrapBy.KV
    assert bootstrap(settings([down(), by_http])).by is BootstrapBy.HTTP


def test_the_network_over_the_key_value_protocol(hosts: ExitStack) -> None:
    told = [CONFIG]
    (address,) = serve(hosts, answering(lambda: Peer(config=told[0])))

    def nodes(query: str, config: bytes) -> tuple[list[str], Network]:
        told[0] = config
        found = bootstrap(settings([address], query)).cluster_map
        return [node.host for node in found.nodes], found.network

    inside, outside = [f"inside{at}" for at in range(3)], ["127.0.0.1"] * 3
    knows_us = config(port=address.port)
    assert nodes("", CONFIG) == (inside, Network.DEFAULT)
    assert nodes("", knows_us) == (outside, Network.EXTERNAL)
    assert nodes("?network=auto", knows_us) == (outside, Network.EXTERNAL)
    assert nodes("?network=default", knows_us) == (inside, Network.DEFAULT)
    assert nodes("?network=external", CONFIG) == (outside, Network.EXTERNAL)


@pytest.mark.parametrize("place", [0, 1, 2])
@case_apart(answering(without_bucket), errors.UnknownBucket, "there is no bucket 'travel'", id="no bucket")
@case_apart(refusing(Status.EACCESS), errors.AccessDenied, "may not use it", id="no access")
@case_apart(refusing(Status.ETMPFAIL), errors.TemporaryFailure, "ETMPFAIL", id="busy")
@case_apart(saying(b"nonsense"), errors.BadMagic, "not a magic byte", id="nonsense")
@case_apart(saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), errors.WrongProtocol, "answers with HTTP", id="http")
@case_apart(answering(lambda: Peer(config=b"[]")), errors.MalformedJson, "not an object", id="no config")
def test_what_one_host_says_is_not_hidden_by_others_that_are_down(
    hosts: ExitStack, place: int, talk: Talk, kind: type[errors.HeadwaterError], words: str
) -> None:
    talks: list[Talk | None] = [None, None]
    talks.insert(place, talk)
    addresses = serve(hosts, *talks)
    error = failure(addresses)
    assert type(error) is kind
    assert error.reason.startswith("no host can be used: ")
    assert words in error.reason
    assert error.reason.count("can't be reached: Connection refused") == 2
    assert all(str(address) in error.reason for address in addresses)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_password_is_told_and_not_tried_again(hosts: ExitStack, place: int) -> None:
    asked: list[Peer] = []

    def new_peer() -> Peer:
        asked.append(good())
        return asked[-1]

    talks: list[Talk | None] = [None, answering(new_peer)]
    talks.insert(place, answering(new_peer))
    error = failure(serve(hosts, *talks), password="wrong")
    assert type(error) is errors.AuthenticationFailed
    assert "the user or the password is wrong" in error.reason
    assert "127.0.0.1:" in error.reason
    assert len(asked) == 1


def test_all_hosts_are_down() -> None:
    addresses = [down(), down()]
    error = failure(addresses)
    assert type(error) is errors.HostUnreachable
    assert error.reason.startswith("no host can be reached: ")
    assert all(f"{address} can't be reached: Connection refused" in error.reason for address in addresses)


def test_a_silent_host_is_skipped_and_reported_if_there_is_no_other(hosts: ExitStack) -> None:
    addresses = serve(hosts, silent, answering(good))
    assert bootstrap(settings(addresses, timeouts=Timeouts(connect_s=5.0, answer_s=1.0))).asked == addresses[1]
    error = failure(addresses[:1], timeouts=Timeouts(answer_s=0.2))
    assert type(error) is errors.NoAnswer
    assert error.reason == f"{addresses[0]} has not answered for 0.2 seconds"


def test_a_server_outside_a_cluster(hosts: ExitStack) -> None:
    def new_peer() -> Peer:
        peer = Peer()
        peer.replace[GetClusterConfig] = lambda request: refused(request, Status.KEY_ENOENT)
        return peer

    (address,) = serve(hosts, answering(new_peer))
    error = failure([address])
    assert type(error) is errors.NotSupported
    assert "has no cluster config" in error.reason


def cluster_settings(where: str, **options: Any) -> ClientSettings:
    return ClientSettings.make(f"couchbase://{where}", **{"user": USER, "password": PASSWORD, **options})


def any_node(settings: ClientSettings) -> AsyncKvConnection:
    """A connection to it that has been closed."""

    async def connect() -> AsyncKvConnection:
        connection = await connect_any(settings)
        connection.abort()
        return connection

    return asyncio.run(connect())


def cluster_config(*ports: int) -> bytes:
    nodes = [{"services": {"kv": port}, "hostname": "127.0.0.1"} for port in ports]
    servers = [f"127.0.0.1:{port}" for port in ports]
    rows = [[at] for at in range(len(ports))]
    server_map = {"serverList": servers, "vBucketMap": rows}
    return json.dumps({"rev": 1, "name": "travel", "nodesExt": nodes, "vBucketServerMap": server_map}).encode()


def test_over_http_any_node_of_the_map_will_do() -> None:
    with serving(answering(Peer)) as node:
        answer = http_answer(cluster_config(down().port, node.port))
        with serving(answering_http({TERSE: answer}, [])) as manager:
            assert any_node(cluster_settings(f"{down()},{manager}/travel?bootstrap=http")).address == node


def test_over_http_all_nodes_of_the_map_may_be_down() -> None:
    nodes = (down(), down())
    answer = http_answer(cluster_config(*(node.port for node in nodes)))
    with serving(answering_http({TERSE: answer}, [])) as manager, pytest.raises(errors.HostUnreachable) as raised:
        any_node(cluster_settings(f"{manager}/travel?bootstrap=http"))
    assert all(str(address) in raised.value.reason for address in (manager, *nodes))


def test_a_socket_of_its_own_has_nothing_left_in_it() -> None:
    """Who gets the socket alone would never see what has been received already."""
    trailing = [b""]

    def talk(sock: socket.socket) -> None:
        peer = Peer()
        while data := sock.recv(1 << 16):
            answers = peer.receive_data(data)
            if isinstance(peer.seen[-1], GetClusterConfig):
                answers += trailing[0]
            sock.sendall(answers)

    with serving(talk) as address:
        cluster = KvCluster(cluster_settings(f"{address}/travel"))
        cluster.open(address).close()
        trailing[0] = Noop().encode()
        with pytest.raises(errors.UnexpectedMessage, match="more than the answers"):
            cluster.open(address)

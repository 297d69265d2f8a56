"""SRV records: which strings are looked up, what takes the place of the host, and that nothing there stops a client."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.resolver
import pytest

from headwater.client import connection_string
from headwater.client.connection_string import HOSTS_MAX, Address, ConnectionString, find_hosts
from support.machine import DnsServer, Manner

NAME = "cb.example.com"
ITSELF = (Address(NAME, 11210),)


@pytest.fixture
def dns_server() -> Iterator[DnsServer]:
    with DnsServer() as server:
        yield server


def hosts(server: DnsServer, string: str = f"couchbase://{NAME}/b") -> tuple[Address, ...]:
    return find_hosts(ConnectionString.parse(f"{string}{'&' if '?' in string else '?'}{server.options}"))


def test_the_hosts_of_the_records_take_the_place_of_the_name(dns_server: DnsServer) -> None:
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [
        (20, 0, 11210, "third.example.com."),
        (0, 0, 21210, "first.example.com."),
        (10, 5, 11210, "second.example.com."),
    ]
    found = hosts(dns_server)
    assert [str(address) for address in found] == [
        "first.example.com:21210",
        "second.example.com:11210",
        "third.example.com:11210",
    ]
    assert dns_server.questions == [f"_couchbase._tcp.{NAME}"]


def test_with_tls_the_records_are_others(dns_server: DnsServer) -> None:
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, 11210, "plain.example.com.")]
    dns_server.records[f"_couchbases._tcp.{NAME}"] = [(0, 0, 11207, "tls.example.com.")]
    assert hosts(dns_server, f"couchbases://{NAME}/b") == (Address("tls.example.com", 11207),)
    assert hosts(dns_server, f"COUCHBASE://{NAME}/b") == (Address("plain.example.com", 11210),)


def test_hosts_of_one_priority_are_all_there_in_any_order(dns_server: DnsServer) -> None:
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, 11210, f"n{at}.example.com.") for at in range(8)]
    orders = {hosts(dns_server) for _ in range(20)}
    assert len(orders) > 1, "all clients would ask the same host"
    assert {frozenset(order) for order in orders} == {
        frozenset(Address(f"n{at}.example.com", 11210) for at in range(8))
    }


def test_every_lookup_asks_anew(dns_server: DnsServer) -> None:
    for port in (1, 2):
        dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, port, "a.example.com.")]
        assert hosts(dns_server) == (Address("a.example.com", port),)


def test_targets_that_are_no_hosts_are_left_out(dns_server: DnsServer) -> None:
    unusable = [(0, 0, 11210, "."), (0, 0, 0, "a.example.com."), (0, 0, 11210, r"a\032b.com."), (0, 0, 1, "a:5.com.")]
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [*unusable, (1, 0, 11210, "good.example.com.")]
    assert hosts(dns_server) == (Address("good.example.com", 11210),)
    dns_server.records[f"_couchbase._tcp.{NAME}"] = list(unusable)
    assert hosts(dns_server) == ITSELF


def test_there_is_a_limit_to_the_hosts(dns_server: DnsServer) -> None:
    records = [(at, 0, 11210, f"n{at}.example.com.") for at in range(HOSTS_MAX + 10)]
    dns_server.records[f"_couchbase._tcp.{NAME}"] = list(records)
    assert hosts(dns_server) == tuple(Address(f"n{at}.example.com", 11210) for at in range(HOSTS_MAX))


def test_search_domains_make_short_names_whole(
    dns_server: DnsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Kubernetes, where the file of the system names them."""
    system = tmp_path / "resolv.conf"
    system.write_text("nameserver 127.0.0.1\nsearch default.svc.cluster.local svc.cluster.local\noptions ndots:5\n")
    monkeypatch.setattr(dns.resolver.Resolver.__init__, "__defaults__", (str(system), True))
    dns_server.records["_couchbase._tcp.cb-srv.prod.svc.cluster.local"] = [(0, 0, 11210, "cb-0000.cb-srv.prod.svc.")]
    string = f"couchbase://cb-srv.prod/b?dns_port={dns_server.port}"
    assert find_hosts(ConnectionString.parse(string)) == (Address("cb-0000.cb-srv.prod.svc", 11210),)
    whole = ConnectionString.parse(string.replace("prod/", "prod./"))
    assert find_hosts(whole) == (Address("cb-srv.prod.", 11210),)
    assert dns_server.questions[-1] == "_couchbase._tcp.cb-srv.prod"


def refusing(question: bytes) -> bytes:
    response = dns.message.make_response(dns.message.from_wire(question))
    response.set_rcode(dns.rcode.REFUSED)
    return response.to_wire()


def truncating(question: bytes) -> bytes:
    """The answer is to be had over TCP, where nobody listens."""
    response = dns.message.make_response(dns.message.from_wire(question))
    response.flags |= dns.flags.TC
    return response.to_wire()


@pytest.mark.parametrize(
    "manner",
    [
        lambda question: None,
        lambda question: b"",
        lambda question: b"nonsense",
        lambda question: question[:2] + b"\xff" * 40,
        lambda question: question,
        refusing,
        truncating,
    ],
    ids=["silent", "empty", "nonsense", "junk", "echo", "refused", "truncated"],
)
def test_a_server_that_does_not_help_is_no_obstacle(
    dns_server: DnsServer, manner: Manner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_string, "LOOKUP_S_MAX", 0.4)
    dns_server.manner = manner
    with caplog.at_level(logging.DEBUG, logger=connection_string.__name__):
        assert hosts(dns_server) == ITSELF
    assert dns_server.questions
    [line] = caplog.records
    assert line.levelno == logging.DEBUG
    assert f"no SRV records at _couchbase._tcp.{NAME}, so the host is used as it is" in line.getMessage()


@pytest.mark.parametrize("records", [{}, {f"_couchbase._tcp.{NAME}": []}], ids=["no name", "no records"])
def test_without_records_the_name_is_a_host(
    records: dict[str, list[tuple[int, int, int, str]]], caplog: pytest.LogCaptureFixture
) -> None:
    with DnsServer(records) as server, caplog.at_level(logging.DEBUG, logger=connection_string.__name__):
        assert hosts(server) == ITSELF
        assert len(server.questions) == len(caplog.records) == 1


def test_no_dns_server_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns.resolver.Resolver.__init__, "__defaults__", (str(tmp_path / "missing"), True))
    assert find_hosts(ConnectionString.parse(f"couchbase://{NAME}/b")) == ITSELF


def test_a_name_too_long_for_records_is_a_host(dns_server: DnsServer) -> None:
    name = ".".join(["a" * 60] * 4) + ".com"
    assert hosts(dns_server, f"couchbase://{name}/b") == (Address(name, 11210),)


@pytest.mark.parametrize(
    "string",
    [
        "couchbase://a.example.com,b.example.com/b",
        "couchbase://cb.example.com:11210/b",
        "couchbases://cb.example.com:11207/b",
        "couchbase://10.1.2.3/b",
        "couchbase://[::1]/b",
        "couchbase://localhost/b",
        "couchbase://LocalHost./b",
        "couchbase://db.localhost/b",
        "couchbase://cb.example.com:8091/b",
        "couchbase://cb.example.com/b?bootstrap=http",
        "couchbase://cb.example.com/b?enable_dns_srv=false",
        "couchbase://cb.example.com/b?enable_dns_srv=off",
        "couchbase://cb.example.com/b?enable_dns_srv=no",
    ],
)
def test_what_is_not_looked_up(dns_server: DnsServer, string: str) -> None:
    assert hosts(dns_server, string) == ConnectionString.parse(string).addresses
    assert dns_server.questions == []


@pytest.mark.parametrize("switch", ["", "true", "on", "yes"])
def test_the_switch_may_be_on(dns_server: DnsServer, switch: str) -> None:
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, 1, "a.example.com.")]
    assert hosts(dns_server, f"couchbase://{NAME}/b?bootstrap=kv&enable_dns_srv={switch}")[0].port == 1

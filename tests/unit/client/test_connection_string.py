"""Connection strings: what is read out of them, and what is said about those that are wrong."""

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
from headwater.client.connection_string import (
    HOSTS_MAX,
    Address,
    BootstrapBy,
    ConnectionString,
    find_hosts,
    parse_address,
)
from headwater.errors import InvalidConnectionString
from support.cases import case, case_apart, each
from support.machine import DnsServer, Manner


def parse(text: str) -> ConnectionString:
    return ConnectionString.parse(text)


def test_the_shortest_form_has_the_default_port() -> None:
    parsed = parse("couchbase://localhost")
    assert parsed == ConnectionString(addresses=(Address("localhost", 11210),))
    assert (parsed.tls, parsed.user, parsed.bucket) == (False, None, None)


def test_all_parts_at_once() -> None:
    parsed = parse("couchbases://ada%40home@db1.example.com,db2:21207,[::1]:999/my%20bucket?network=external&x=%26")
    assert parsed == ConnectionString(
        addresses=(Address("db1.example.com", 11207), Address("db2", 21207), Address("::1", 999)),
        tls=True,
        user="ada@home",
        bucket="my bucket",
        options=(("network", "external"), ("x", "&")),
    )
    assert parsed.option("network") == "external"
    assert parsed.option("missing", "otherwise") == "otherwise"


@case("couchbase://127.0.0.1", Address("127.0.0.1", 11210))
@case("couchbase://127.0.0.1:1", Address("127.0.0.1", 1))
@case("COUCHBASE://Host", Address("Host", 11210))
@case("couchbases://host", Address("host", 11207))
@case("couchbase://[::1]", Address("::1", 11210))
@case("couchbases://[FE80:0::1]:65535/b", Address("fe80::1", 65535))
@case("couchbase://my_node-1.svc.", Address("my_node-1.svc.", 11210))
@case("couchbase://user@host/", Address("host", 11210))
def test_hosts_and_ports(text: str, address: Address) -> None:
    assert parse(text).addresses == (address,)


@case("couchbase://localhost:11210")
@case("couchbases://a:1,b:2,[::1]:3/bucket")
@case("couchbase://ada%40home@host:11210/a%2Fb?network=default&empty=")
@case("couchbase://host:8091/b?bootstrap=http")
@case("couchbases://ada@cb.example.com/b?network=auto")
@case("couchbase://host.:11210/b?enable_dns_srv=false")
def test_the_text_form_reads_back_as_the_same(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@case("couchbase://a/b", [11210], ["kv"])
@case("couchbase://a:8091/b", [8091], ["http"])
@case("couchbases://a:18091/b", [18091], ["http"])
@case("couchbase://a:8091,b:9000,c/b", [8091, 9000, 11210], ["http", "kv", "kv"])
@case("couchbase://a:9000,b/b?bootstrap=http", [9000, 8091], ["http", "http"])
@case("couchbases://a:9000,b:8091,c/b?bootstrap=http", [9000, 8091, 18091], ["http", "http", "http"])
@case("couchbase://a:8091,b:18091,c/b?bootstrap=kv", [8091, 18091, 11210], ["kv", "kv", "kv"])
@case("couchbase://a:8091/b?bootstrap=", [8091], ["http"])
def test_how_each_host_is_asked_for_the_cluster_map(text: str, ports: list[int], by: list[str]) -> None:
    parsed = parse(text)
    assert [address.port for address in parsed.addresses] == ports
    assert [parsed.bootstrap_by(address) for address in parsed.addresses] == [BootstrapBy(name) for name in by]


@each(
    ("text", "name"),
    [
        ("couchbase://cb.example.com/b", "_couchbase._tcp.cb.example.com"),
        ("couchbases://ada@cb.example.com./b", "_couchbases._tcp.cb.example.com."),
        ("COUCHBASES://db?network=external", "_couchbases._tcp.db"),
        ("couchbase://a,b", None),
        ("couchbase://a:11210", None),
        ("couchbase://10.1.2.3", None),
        ("couchbase://[::1]", None),
        ("couchbase://localhost", None),
        ("couchbase://LocalHost.", None),
        ("couchbase://db.localhost", None),
        ("couchbase://a:8091", None),
        ("couchbase://a?bootstrap=http", None),
        *((f"couchbase://a?enable_dns_srv={switch}", None) for switch in ("false", "off", "no")),
        *((f"couchbase://a?bootstrap=kv&enable_dns_srv={on}", "_couchbase._tcp.a") for on in ("", "true", "on", "yes")),
    ],
)
def test_where_dns_may_list_the_hosts(text: str, name: str | None) -> None:
    assert parse(text).srv_name == name


def test_which_dns_server_is_asked() -> None:
    assert (parse("couchbase://a").nameserver, parse("couchbase://a").dns_port) == (None, 53)
    asked = parse("couchbase://a?dns_nameserver=fd00::53&dns_port=5353")
    assert (asked.nameserver, asked.dns_port) == ("fd00::53", 5353)


@case("localhost/bucket", "does not start with couchbase://", "couchbase://host")
@case("http://localhost:8091", "does not start with couchbase://", "couchbases:// for TLS")
@case("", "does not start with", "couchbase://host")
@case("couchbase://", "names no host", "couchbase://host")
@case("couchbase:///bucket", "names no host", "such as couchbase://127.0.0.1/travel")
@case("couchbase://:11210/bucket", "no host stands before ':11210'", "couchbase://host")
@case("couchbase://a,,b", "a host is empty", "couchbase://host")
@case("couchbase://a:b", "'b' is not a port", "1 to 65535")
@case("couchbase://a:", "'' is not a port", "1 to 65535")
@case("couchbase://a:0", "'0' is not a port", "1 to 65535")
@case("couchbase://a:65536", "'65536' is not a port", "1 to 65535")
@case("couchbase://a:٣", "'٣' is not a port", "1 to 65535")
@case("couchbases://a:8091", "cluster manager's without TLS", "18091")
@case("couchbase://b,a:18091", "cluster manager's with TLS", "couchbases://")
@case("couchbase://a?bootstrap=https", "no bootstrap by 'https'", "kv, http")
@case("couchbase://a?enable_dns_srv=maybe", "enable_dns_srv is 'maybe'", "true or false")
@case("couchbase://a?dns_nameserver=b", "DNS server 'b' is not an IP address", "dns_nameserver=10.0.0.2")
@case("couchbase://a?dns_port=x", "'x' is not a port", "1 to 65535")
@case("couchbase://a..b", "is not a host name", "couchbase://host")
@case(f"couchbase://{'a' * 64}.com", "is not a host name", "couchbase://host")
@case("couchbase://::1", "is not a host", "in brackets: [::1]")
@case("couchbase://[::1", "is not a host and a port", "couchbase://host")
@case("couchbase://[1.2.3.4]", "is not an IPv6 address", "couchbase://host")
@case("couchbase://a%2fb", "is not a host name", "couchbase://host")
@case("couchbase://-a", "is not a host name", "couchbase://host")
@case("couchbase://@host", "no user before the @", "couchbase://host")
@case("couchbase://host/a/b", "more than a bucket", "options of their own")
@case("couchbase://host/%ff", "not UTF-8", "couchbase://host")
@case("couchbase://host?flag", "not a list of options", "?name=value")
@case("couchbase://host?a=1&a=2", "given twice", "Give it once")
@case("couchbase://my host", "spaces", "%20")
@case("couchbase://host\n", "spaces or control", "%20")
@case("couchbase://" + "h" * 5000, "more than 4096 characters", "couchbase://host")
@case("couchbase://" + ",".join("h" for _ in range(HOSTS_MAX + 1)), "more than 64 hosts", "A few are enough")
def test_what_is_wrong_is_said(text: str, reason: str, hint: str) -> None:
    with pytest.raises(InvalidConnectionString) as raised:
        parse(text)
    assert reason in raised.value.reason
    assert hint in raised.value.hint


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidConnectionString) as raised:
        parse("couchbase://ada:secret@host/bucket")
    assert "HEADWATER_PASSWORD" in raised.value.hint
    assert "secret" not in str(raised.value)


def test_an_address_alone() -> None:
    assert parse_address("[::1]", default_port=7) == Address("::1", 7)
    assert str(Address("::1", 7)) == "[::1]:7"
    assert str(Address("host", 7)) == "host:7"


# --- connection string srv --------------------------------------------------------------------------------------------

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


def test_with_tls_the_records_are_others_and_every_lookup_asks_again(dns_server: DnsServer) -> None:
    for port in (1, 2):
        dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, port, "plain.example.com.")]
        dns_server.records[f"_couchbases._tcp.{NAME}"] = [(0, 0, port + 10, "tls.example.com.")]
        assert hosts(dns_server, f"couchbases://{NAME}/b") == (Address("tls.example.com", port + 10),)
        assert hosts(dns_server, f"COUCHBASE://{NAME}/b") == (Address("plain.example.com", port),)


def test_hosts_of_one_priority_are_all_there_in_any_order(dns_server: DnsServer) -> None:
    dns_server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, 11210, f"n{at}.example.com.") for at in range(8)]
    orders = {hosts(dns_server) for _ in range(20)}
    assert len(orders) > 1, "all clients would ask the same host"
    assert {frozenset(order) for order in orders} == {
        frozenset(Address(f"n{at}.example.com", 11210) for at in range(8))
    }


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


def test_search_domains_complete_names(dns_server: DnsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@case_apart(lambda question: None, id="silent")
@case_apart(lambda question: b"", id="empty")
@case_apart(lambda question: b"nonsense", id="nonsense")
@case_apart(lambda question: question[:2] + b"\xff" * 40, id="junk")
@case_apart(lambda question: question, id="echo")
@case_apart(refusing, id="refused")
@case_apart(truncating, id="truncated")
def test_a_server_that_does_not_help_is_no_obstacle(
    dns_server: DnsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, manner: Manner
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


@pytest.mark.parametrize("string", ["couchbase://cb.example.com:11210/b", "couchbase://a/b?enable_dns_srv=no"])
def test_what_is_not_looked_up(dns_server: DnsServer, string: str) -> None:
    assert hosts(dns_server, string) == ConnectionString.parse(string).addresses
    assert dns_server.questions == []

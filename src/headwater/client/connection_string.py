"""Connection strings: `couchbase://[user@]host[:port][,host[:port]…][/bucket][?option=value…]`.

`couchbases://` is the same with TLS. The form is Couchbase's own, so that strings for its SDKs work here. Passwords
are not accepted on purpose: in the string they would end up in shell histories, process lists and logs.

The client requests the cluster map over the key-value protocol, or over HTTP at the ports of the cluster manager, 8091
and 18091. `?bootstrap=http` means that other ports speak HTTP, too, and `?bootstrap=kv` that none does.

A single name without a port may stand for a list of hosts in DNS SRV records: `srv_name` is the name to look up.
`find_hosts` queries DNS, and is the only blocking function here.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import AddressValueError, IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

from headwater.errors import InvalidConnectionString

if TYPE_CHECKING:
    from dns.resolver import Resolver

KV_PORT = 11210
KV_TLS_PORT = 11207
HTTP_PORT = 8091
HTTP_TLS_PORT = 18091
DNS_PORT = 53

CONNECTION_STRING_CHARS_MAX = 4096
HOSTS_MAX = 64

FORM = "couchbase://host[:port][,host2…]/bucket"
_SCHEMES = {"couchbase": False, "couchbases": True}
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_THIS_MACHINE = "localhost"

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_LABEL_CHARS_MAX = 63
_ADDRESS = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, without brackets if it is IPv6, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class BootstrapBy(StrEnum):
    """How the client requests the cluster map."""

    KV = "kv"
    HTTP = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionString:
    """A parsed connection string."""

    addresses: tuple[Address, ...]
    """At least one. The others are used when the first is down."""
    tls: bool = False
    user: str | None = None
    bucket: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    """As given. Options of other clients are not an error."""
    srv_name: str | None = None
    """The DNS name that may list the hosts instead; None if there is nothing to look up."""

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)

    def bootstrap_by(self, address: Address) -> BootstrapBy:
        """How to request the cluster map from one of the addresses."""
        by = self.option("bootstrap")
        if by:
            return BootstrapBy(by)
        return BootstrapBy.HTTP if address.port in (HTTP_PORT, HTTP_TLS_PORT) else BootstrapBy.KV

    @property
    def nameserver(self) -> str | None:
        """The DNS server to query, as an IP address; None uses those of this machine."""
        return self.option("dns_nameserver") or None

    @property
    def dns_port(self) -> int:
        return int(self.option("dns_port") or DNS_PORT)

    @classmethod
    def parse(cls, text: str) -> ConnectionString:
        """Parse a connection string, or raise `InvalidConnectionString`."""
        if len(text) > CONNECTION_STRING_CHARS_MAX:
            raise _invalid(f"it has more than {CONNECTION_STRING_CHARS_MAX} characters")
        if not text.isprintable() or " " in text:
            raise _invalid("it contains spaces or control characters", hint="Write them as %20 and the like")
        scheme, separator, rest = text.partition("://")
        if not separator or scheme.lower() not in _SCHEMES:
            raise _invalid(
                f"{text!r} does not start with couchbase:// or couchbases://",
                hint=f"Write {FORM}, and couchbases:// for TLS",
            )
        tls = _SCHEMES[scheme.lower()]
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        user, hosts = _split_user(authority)
        options = _parse_options(query)
        bootstrap_by = _parse_bootstrap(options)
        may_be_listed = _parse_dns_options(options) and bootstrap_by is not BootstrapBy.HTTP
        return cls(
            addresses=_parse_addresses(hosts, tls=tls, bootstrap_by=bootstrap_by),
            tls=tls,
            user=user,
            bucket=_parse_bucket(path),
            options=options,
            srv_name=_srv_name(scheme.lower(), hosts) if may_be_listed else None,
        )

    def __str__(self) -> str:
        scheme = "couchbases" if self.tls else "couchbase"
        user = "" if self.user is None else f"{quote(self.user, safe='')}@"
        # With a port, the name would mean the host itself.
        hosts = ",".join(str(address) if self.srv_name is None else address.host for address in self.addresses)
        bucket = "" if self.bucket is None else f"/{quote(self.bucket, safe='')}"
        options = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in self.options)
        return f"{scheme}://{user}{hosts}{bucket}{'?' if options else ''}{options}"


def parse_address(text: str, *, default_port: int) -> Address:
    """Parse `host`, `host:port`, `[ipv6]` or `[ipv6]:port`."""
    if text.count(":") > 1 and not text.startswith("["):
        raise _invalid(f"{text!r} is not a host", hint=f"Put an IPv6 address in brackets: [{text}]")
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise _invalid(f"{text!r} is not a host and a port")
    host, port = match["host"], match["port"]
    if text and not host:
        raise _invalid(f"no host stands before {text!r}")
    return Address(_parse_host(host), default_port if port is None else _parse_port(port))


def _invalid(reason: str, *, hint: str = f"Write {FORM}") -> InvalidConnectionString:
    return InvalidConnectionString(f"the connection string is not valid: {reason}", hint=hint)


def _split_user(authority: str) -> tuple[str | None, str]:
    user, at, hosts = authority.rpartition("@")
    if not at:
        return None, authority
    if ":" in user:
        # Don't repeat the string: it contains a password.
        raise _invalid(
            "it contains a password, which others could read",
            hint="Give the password with --password or HEADWATER_PASSWORD (password= in Python)",
        )
    if not user:
        raise _invalid("there is no user before the @")
    return _unquote(user, "user"), hosts


def _parse_addresses(hosts: str, *, tls: bool, bootstrap_by: BootstrapBy | None) -> tuple[Address, ...]:
    if not hosts:
        raise _invalid("it names no host", hint=f"Write {FORM}, such as couchbase://127.0.0.1/travel")
    if bootstrap_by is BootstrapBy.HTTP:
        default_port = HTTP_TLS_PORT if tls else HTTP_PORT
    else:
        default_port = KV_TLS_PORT if tls else KV_PORT
    addresses = tuple(parse_address(host, default_port=default_port) for host in hosts.split(","))
    if len(addresses) > HOSTS_MAX:
        raise _invalid(f"it names more than {HOSTS_MAX} hosts", hint="A few are enough: they name the others")
    if bootstrap_by is None:
        _check_manager_ports(addresses, tls=tls)
    return addresses


def _check_manager_ports(addresses: tuple[Address, ...], *, tls: bool) -> None:
    ports = {address.port for address in addresses}
    if tls and HTTP_PORT in ports:
        raise _invalid(
            f"port {HTTP_PORT} is the cluster manager's without TLS",
            hint=f"Omit the port, or write {HTTP_TLS_PORT}",
        )
    if not tls and HTTP_TLS_PORT in ports:
        raise _invalid(
            f"port {HTTP_TLS_PORT} is the cluster manager's with TLS",
            hint=f"Omit the port, or write couchbases:// or {HTTP_PORT}",
        )


def _parse_host(host: str) -> str:
    if host.startswith("["):
        try:
            return str(IPv6Address(host[1:-1]))
        except AddressValueError as error:
            raise _invalid(f"{host} is not an IPv6 address") from error
    if not host:
        raise _invalid("a host is empty")
    if not is_host_name(host):
        raise _invalid(f"{host!r} is not a host name")
    return host


def is_host_name(text: str) -> bool:
    """Whether it can be a host's name, or an IPv4 address."""
    labels = text.removesuffix(".").split(".")
    return bool(_HOST_NAME.fullmatch(text)) and all(0 < len(label) <= _LABEL_CHARS_MAX for label in labels)


def _parse_port(port: str) -> int:
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 0xFFFF):
        raise _invalid(f"{port!r} is not a port", hint="A port is a number from 1 to 65535; 11210 if left out")
    return int(port)


def _parse_bucket(path: str) -> str | None:
    bucket = path.rstrip("/")
    if "/" in bucket:
        raise _invalid(
            f"{path!r} is more than a bucket", hint="Scopes and collections have options of their own, not a place here"
        )
    return _unquote(bucket, "bucket") if bucket else None


def _parse_options(query: str) -> tuple[tuple[str, str], ...]:
    if not query:
        return ()
    try:
        options = tuple(parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict"))
    except (ValueError, UnicodeDecodeError) as error:
        raise _invalid(f"{query!r} is not a list of options", hint="Write ?name=value&name=value") from error
    if len(dict(options)) != len(options):
        raise _invalid("an option is given twice", hint="Give it once")
    return options


def _parse_bootstrap(options: tuple[tuple[str, str], ...]) -> BootstrapBy | None:
    by = dict(options).get("bootstrap", "")
    if by and by not in tuple(BootstrapBy):
        raise _invalid(f"there is no bootstrap by {by!r}", hint=f"Use one of {', '.join(BootstrapBy)}")
    return BootstrapBy(by) if by else None


def _parse_dns_options(options: tuple[tuple[str, str], ...]) -> bool:
    """Check the DNS options. Returns whether DNS may be queried for the hosts."""
    given = dict(options)
    switch = given.get("enable_dns_srv") or "true"
    if switch not in _SWITCHES:
        raise _invalid(f"enable_dns_srv is {switch!r}", hint="Write true or false")
    nameserver = given.get("dns_nameserver")
    if nameserver and not _is_ip_address(nameserver):
        raise _invalid(f"the DNS server {nameserver!r} is not an IP address", hint="Write dns_nameserver=10.0.0.2")
    if given.get("dns_port"):
        _parse_port(given["dns_port"])
    return _SWITCHES[switch]


def _srv_name(scheme: str, hosts: str) -> str | None:
    """Return the name to look up. Couchbase's rule: a single host, by name, without a port."""
    host = hosts.lower().removesuffix(".")
    is_one_name = not set(hosts) & set(",:[") and not _is_ip_address(host)
    is_this_machine = host == _THIS_MACHINE or host.endswith(f".{_THIS_MACHINE}")
    # Keep a final dot: it marks the name as complete, so that no search domain applies.
    return f"_{scheme}._tcp.{hosts}" if is_one_name and not is_this_machine else None


def _is_ip_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _unquote(text: str, what: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise _invalid(f"the {what} {text!r} is not UTF-8") from error


# --- hosts that DNS lists -------------------------------------------------------------------------------------------
#
# SRV records, as for Couchbase Capella and on Kubernetes, by the rule of Couchbase's SDKs. The records of
# `_couchbase._tcp.NAME`, or `_couchbases._tcp.NAME` with TLS, list hosts and ports, which replace NAME. If there are
# none, or DNS does not answer in time, NAME is used as a host. TLS then verifies certificates against the names from
# DNS, for which clusters have theirs.
#
# The records are looked up each time the hosts are needed, without a cache. The lookup blocks, so event loops run it
# in a thread. The DNS library is imported with the first lookup, because most processes never need it.

logger = logging.getLogger(__name__)

LOOKUP_S_MAX = 2.5
"""For all queries together, to all servers and with all search domains."""
SERVER_S_MAX = 1.0
"""For one server to answer one query, so that there is time for another server."""


def find_hosts(where: ConnectionString) -> tuple[Address, ...]:
    """Return the hosts to ask for the cluster map, in order: those that DNS lists, or those of the string."""
    if where.srv_name is None:
        return where.addresses
    return _listed(where.srv_name, where) or where.addresses


def _listed(name: str, where: ConnectionString) -> tuple[Address, ...]:
    """Return the hosts that DNS lists under a name; empty if there are none."""
    import dns.exception
    import dns.rdtypes.IN.SRV

    try:
        # Names on Kubernetes are short, and complete only with a search domain.
        answer = _resolver(where).resolve(name, "SRV", search=where.nameserver is None, lifetime=LOOKUP_S_MAX)
    except (dns.exception.DNSException, OSError) as error:
        logger.debug("no SRV records at %s, so the host is used as it is: %s", name, error)
        return ()
    found: dict[Address, None] = {}
    # Couchbase requires priorities and weights of 0, for which any order is right; otherwise follow them.
    for record in answer.rrset.processing_order() if answer.rrset is not None else ():
        assert isinstance(record, dns.rdtypes.IN.SRV.SRV)
        host = record.target.to_text(omit_final_dot=True)
        if is_host_name(host) and record.port:
            found[Address(host, record.port)] = None
    logger.debug("hosts at %s: %s", name, ", ".join(map(str, found)) or "none that can be used")
    return tuple(found)[:HOSTS_MAX]


def _resolver(where: ConnectionString) -> Resolver:
    from dns.resolver import Resolver

    resolver = Resolver(configure=where.nameserver is None)
    if where.nameserver is not None:
        resolver.nameservers = [where.nameserver]
    resolver.port = where.dns_port
    resolver.timeout = SERVER_S_MAX
    return resolver

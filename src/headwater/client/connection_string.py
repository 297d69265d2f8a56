"""Connection strings: `couchbase://[user@]host[:port][,host[:port]…][/bucket][?option=value…]`.

`couchbases://` is the same with TLS. The form is Couchbase's own, so that what works with its SDKs works here. One
thing is left out on purpose: a password in the string would end up in shell histories, process lists and logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import parse_qsl, quote, unquote

from headwater.errors import InvalidConnectionString

KV_PORT = 11210
KV_TLS_PORT = 11207

CONNECTION_STRING_CHARS_MAX = 4096
HOSTS_MAX = 64

FORM = "couchbase://host[:port][,host2…]/bucket"
_SCHEMES = {"couchbase": False, "couchbases": True}
_NOT_KV_PORTS = {8091: KV_PORT, 18091: KV_TLS_PORT}
"""Ports of the cluster manager, which speaks HTTP."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_ADDRESS = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, without brackets if it is IPv6, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionString:
    """Where to connect, in parts."""

    addresses: tuple[Address, ...]
    """At least one. Those after the first are for when it is down."""
    tls: bool = False
    user: str | None = None
    bucket: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    """As they were given. Options that only other clients know are no error."""

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)

    @classmethod
    def parse(cls, text: str) -> ConnectionString:
        """Read a connection string, or raise `InvalidConnectionString`."""
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
        return cls(
            addresses=_parse_addresses(hosts, tls=tls),
            tls=tls,
            user=user,
            bucket=_parse_bucket(path),
            options=_parse_options(query),
        )

    def __str__(self) -> str:
        scheme = "couchbases" if self.tls else "couchbase"
        user = "" if self.user is None else f"{quote(self.user, safe='')}@"
        hosts = ",".join(str(address) for address in self.addresses)
        bucket = "" if self.bucket is None else f"/{quote(self.bucket, safe='')}"
        options = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in self.options)
        return f"{scheme}://{user}{hosts}{bucket}{'?' if options else ''}{options}"


def parse_address(text: str, *, default_port: int) -> Address:
    """`host`, `host:port`, `[ipv6]` or `[ipv6]:port`."""
    if text.count(":") > 1 and not text.startswith("["):
        raise _invalid(f"{text!r} is not a host", hint=f"Put an IPv6 address in brackets: [{text}]")
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise _invalid(f"{text!r} is not a host and a port")
    host, port = match["host"], match["port"]
    return Address(_parse_host(host), default_port if port is None else _parse_port(port))


def _invalid(reason: str, *, hint: str = f"Write {FORM}") -> InvalidConnectionString:
    return InvalidConnectionString(f"the connection string is not valid: {reason}", hint=hint)


def _split_user(authority: str) -> tuple[str | None, str]:
    user, at, hosts = authority.rpartition("@")
    if not at:
        return None, authority
    if ":" in user:
        # The string itself is not repeated: it has a password in it.
        raise _invalid(
            "it has a password in it, which others could read",
            hint="Give the password by --password or HEADWATER_PASSWORD",
        )
    if not user:
        raise _invalid("there is no user before the @")
    return _unquote(user, "user"), hosts


def _parse_addresses(hosts: str, *, tls: bool) -> tuple[Address, ...]:
    if not hosts:
        raise _invalid("it names no host")
    default_port = KV_TLS_PORT if tls else KV_PORT
    addresses = tuple(parse_address(host, default_port=default_port) for host in hosts.split(","))
    if len(addresses) > HOSTS_MAX:
        raise _invalid(f"it names more than {HOSTS_MAX} hosts", hint="A few are enough: they tell of the others")
    for address in addresses:
        if address.port in _NOT_KV_PORTS:
            raise _invalid(
                f"port {address.port} is the cluster manager's, which speaks HTTP",
                hint=f"Leave the port out, or write {_NOT_KV_PORTS[address.port]}",
            )
    return addresses


def _parse_host(host: str) -> str:
    if host.startswith("["):
        try:
            return str(IPv6Address(host[1:-1]))
        except AddressValueError as error:
            raise _invalid(f"{host} is not an IPv6 address") from error
    if not host:
        raise _invalid("a host is empty")
    if not _HOST_NAME.fullmatch(host):
        raise _invalid(f"{host!r} is not a host name")
    return host


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


def _unquote(text: str, what: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise _invalid(f"the {what} {text!r} is not UTF-8") from error

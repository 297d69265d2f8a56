"""The options of a node, the limits of its ports, and its TLS: what `headwater serve` is given.

`NodeOptions` refuses what can't work or is not safe, with the option to give instead. It opens nothing but the files of
TLS.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headwater.errors import HeadwaterError, LocalProtocolError
from headwater.protocol.cluster_config import NodeAddress
from headwater.protocol.dialects import NEWEST, Dialect
from headwater.protocol.sasl import is_loopback_address
from headwater.store.compaction import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of the key-value side, each of them an option of `headwater serve`."""

    connections_max: int = 10_000
    auth_s: float = 30.0
    """How long a connection may take to log in."""
    idle_s: float = 3600.0
    """How long a connection may go without a whole request."""
    unsent_bytes_max: int = 16 * 1024 * 1024
    """Answers that wait, for a commit or for the peer to read them, before no more requests are taken."""
    stalled_s: float = 120.0
    """How long a peer may leave its answers unread."""
    pending_bytes_max: int = 64 * 1024 * 1024
    """What one connection may have written that is not durable yet, before its next writes wait."""
    node_pending_bytes_max: int = 256 * 1024 * 1024
    """The same for all connections together. The most memory that writes take is a few times this."""
    node_buffer_bytes_max: int = 512 * 1024 * 1024
    """What the node holds for all peers: requests that have not come to their end, and answers that are not read.
    Beyond that the peer that has moved nothing for longest is dropped."""


KV_PORT = 11210
KV_TLS_PORT = 11207
HTTP_PORT = 8091
HTTP_TLS_PORT = 18091
VBUCKETS = 1024
SCRUB_BYTES_PER_S = 8 * 1024 * 1024
WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})
BUCKET_NAME_CHARS_MAX = 100
_BUCKET_NAME = re.compile(rf"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{{0,{BUCKET_NAME_CHARS_MAX - 1}}}")
"""Couchbase's rule; such a name is also that of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Every option of `headwater serve`. A port that is None is the usual one."""

    data: Path
    host: str = "127.0.0.1"
    advertise_host: str | None = None
    """The name that clients know the node by; the host it listens on where that is one."""
    advertise_port: int | None = None
    """The key-value port that clients reach the node by; the one it listens on unless something lies in between."""
    advertise_http_port: int | None = None
    advertise_tls_port: int | None = None
    """The same for the ports with TLS."""
    advertise_http_tls_port: int | None = None
    port: int | None = None
    http_port: int | None = None
    tls_port: int | None = None
    http_tls_port: int | None = None
    upr_port: int | None = None
    """Where the UPR draft is served; None for nowhere."""
    upr_bucket: str | None = None
    """The bucket that the UPR draft streams; the first one where none is named."""
    buckets: tuple[str, ...] = ("default",)
    vbuckets: int = VBUCKETS
    bare: bool = False
    """No vbuckets: they come by set-vbucket, as on a bare kv_engine."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    first_user_only: bool = False
    """The user is made where there is none yet, and changed in nothing where there is."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_only: bool = False
    """No ports without TLS."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    dialect: Dialect = NEWEST
    """The version of Couchbase that the node speaks as, where versions judge differently."""
    cluster_name: str | None = None
    """What the cluster is called from now on; None leaves it as it is."""
    ack_when_durable: bool = True
    retention: Retention = field(default_factory=Retention)
    expiry_every_s: float = 60.0
    compact_every_s: float = 10.0
    durable_alone: bool = False
    """Whether buckets that are made over REST take durable writes though no node has their replicas, as those of
    `buckets` do (`BucketSettings.durable_alone`)."""
    scrub_bytes_per_s: int = SCRUB_BYTES_PER_S
    """How fast stored data is read in search of damage; 0 for not at all."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    open_metrics: bool = False
    """Whether `/metrics` needs no log-in."""
    http_hosts: tuple[str, ...] = ()
    """Names that HTTP requests may be for, beside the node's own."""
    landing_urls: tuple[str, ...] = ()
    """Where landings show their metrics, for the dashboard to fetch."""

    def __post_init__(self) -> None:
        if self.vbuckets < 1 or self.vbuckets > 1024 or self.vbuckets & (self.vbuckets - 1):
            raise LocalProtocolError(f"{self.vbuckets} vbuckets: take a power of two, from 1 to 1024")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise LocalProtocolError("TLS needs both the certificate and its key")
        if not self.is_on_loopback and self.tls_cert is None and not self.insecure:
            raise LocalProtocolError(
                f"listening on {self.host} without TLS would send passwords and data in the clear",
                hint="Give --tls-cert and --tls-key, or --insecure where the network is your own",
            )
        if self.tls_cert is None and (self.tls_only or self.tls_port is not None or self.http_tls_port is not None):
            raise LocalProtocolError("ports with TLS need a certificate", hint="Give --tls-cert and --tls-key")
        self._check_upr()
        if self.host in WILDCARD_HOSTS and self.advertise_host is None:
            raise LocalProtocolError(
                f"clients can't reach a node by the host {self.host}",
                hint="Give the name that they know it by as --advertise-host",
            )
        for name in self.buckets:
            check_bucket_name(name)
        if self.cluster_name is not None:
            check_cluster_name(self.cluster_name)
        if (self.user is None) != (self.password is None):
            raise LocalProtocolError("a user comes with a password, and a password with a user")

    # --- ports ----------------------------------------------------------------------------------------------------

    @property
    def is_on_loopback(self) -> bool:
        """Whether no other machine reaches the node: any address of 127.0.0.0/8 will do, for several nodes on one."""
        return self.host == "localhost" or is_loopback_address(self.host)

    @property
    def serves_plain(self) -> bool:
        """Whether there are ports without TLS. As in Couchbase there are, but on a network only where that was asked
        for: what goes over them can be read on the way."""
        is_safe = self.is_on_loopback or self.insecure
        return self.tls_cert is None or (is_safe and not self.tls_only)

    def kv_ports(self) -> dict[bool, tuple[int | None, int]]:
        """The ports to listen on, by whether they have TLS: the one asked for, and the usual one."""
        return self._ports((self.port, KV_PORT), (self.tls_port, KV_TLS_PORT))

    def http_ports(self) -> dict[bool, tuple[int | None, int]]:
        return self._ports((self.http_port, HTTP_PORT), (self.http_tls_port, HTTP_TLS_PORT))

    def _ports(self, plain: tuple[int | None, int], tls: tuple[int | None, int]) -> dict[bool, tuple[int | None, int]]:
        if self.tls_cert is None:
            return {False: plain}
        if self.serves_plain:
            return {False: plain, True: tls}
        # Where there is one port only, either option names it.
        return {True: (plain[0] if tls[0] is None else tls[0], tls[1])}

    def advertised(self, kv_ports: Mapping[bool, int], http_ports: Mapping[bool, int], *, uuid: str) -> NodeAddress:
        """Where clients reach a node that listens on these ports."""
        kv_port, http_port = self.advertise_port, self.advertise_http_port
        kv_tls_port, http_tls_port = self.advertise_tls_port, self.advertise_http_tls_port
        if not self.serves_plain:
            kv_tls_port, http_tls_port = kv_tls_port or kv_port, http_tls_port or http_port
        return NodeAddress(
            host=self.advertise_host or ("127.0.0.1" if self.host in ("localhost", "::1") else self.host),
            kv_port=kv_port or kv_ports[False] if False in kv_ports else None,
            kv_tls_port=kv_tls_port or kv_ports[True] if True in kv_ports else None,
            http_port=http_port or http_ports.get(False) if False in kv_ports else None,
            http_tls_port=http_tls_port or http_ports.get(True) if True in kv_ports else None,
            uuid=uuid,
        )

    @property
    def own_names(self) -> frozenset[str]:
        """The names that HTTP requests may be for. Addresses, and this machine's own name, always do."""
        return frozenset(name for name in (self.host, self.advertise_host, *self.http_hosts) if name)

    # --- what can't work ------------------------------------------------------------------------------------------

    def _check_upr(self) -> None:
        if self.upr_port is None:
            if self.upr_bucket is not None:
                raise LocalProtocolError("a bucket for UPR needs a port for it", hint="Give --upr-port, too")
            return
        if not self.is_on_loopback and not self.insecure:
            # TLS does not help: it would hide the data from others on the way, and still give it to any client.
            raise LocalProtocolError(
                f"the UPR port has no log-in, so that on {self.host} anyone could read the bucket",
                hint="Listen on 127.0.0.1, or give --insecure where the network is your own",
            )


# --- names --------------------------------------------------------------------------------------------------------

CLUSTER_NAME_CHARS_MAX = 256


def check_bucket_name(name: str) -> None:
    if not _BUCKET_NAME.fullmatch(name):
        raise LocalProtocolError(
            f"{name!r} is not the name of a bucket",
            hint=f"Take up to {BUCKET_NAME_CHARS_MAX} letters, digits and _.-%, but no dot at the start",
        )


def check_cluster_name(name: str) -> None:
    if len(name) > CLUSTER_NAME_CHARS_MAX or not name.isprintable():
        raise LocalProtocolError(
            "the name of a cluster has characters that can be printed, "
            f"{CLUSTER_NAME_CHARS_MAX} at most; this one has {len(name)}"
        )


# --- TLS ----------------------------------------------------------------------------------------------------------


def server_context(options: NodeOptions) -> ssl.SSLContext | None:
    """For clients of the node; None where it speaks no TLS."""
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _files_that_can_be_used():
        context.load_cert_chain(options.tls_cert, options.tls_key)
    return context


def peer_context(options: NodeOptions) -> ssl.SSLContext | None:
    """For connections to the other nodes of a cluster.

    They speak TLS if one does, and may all have the same certificate: it is trusted, too.
    """
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context()
    with _files_that_can_be_used():
        context.load_verify_locations(options.tls_cert)
    return context


@contextmanager
def _files_that_can_be_used() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # those of TLS are some
        raise HeadwaterError(
            f"the TLS certificate or key can't be used: {error}", hint="Give PEM files that belong together"
        ) from error

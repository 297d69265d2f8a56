"""The options of `headwater serve`, the limits of a node's ports, its TLS contexts, and the settings of a bucket.

`NodeOptions` refuses options that can't work or are not safe, and says what to give instead. The only files that are
opened here are those of TLS.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headwater.errors import DataDamaged, HeadwaterError, LocalProtocolError, MalformedJson
from headwater.options import MIB, option
from headwater.protocol.cluster_config import NodeAddress
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.sasl import is_loopback_address
from headwater.protocol.stream_requests import DIALECTS, NEWEST, Dialect
from headwater.store.bucket import Bucket
from headwater.store.vbuckets import Retention

_FILES_OF_NODE = 320
"""Open files besides connections: data, other nodes, and connections that are accepted only to be closed."""
_FILES_SPARE_MIN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of the key-value side, each of them an option of `headwater serve`."""

    connections_max: int = option(
        "Maximum number of connections. A further one replaces one that has not logged in, or is closed; one that logs"
        " in may replace one of an address that has more.",
        10_000,
    )
    http_connections_max: int = option(
        "Maximum number of HTTP connections. A further one replaces the slowest of the address that has the most.",
        576,
        least=16,
    )
    auth_s: float = option("How long a connection may take to log in.", 30.0, cli_name="--auth-seconds")
    idle_s: float = option(
        "How long a connection may stay open without a complete request.", 3600.0, cli_name="--idle-seconds"
    )
    unsent_bytes_max: int = option(
        "Stop reading from a peer once this much of its answers is waiting for a commit, or for the peer to read it.",
        16 * MIB,
    )
    stalled_s: float = option("How long a peer may leave its answers unread.", 120.0, cli_name="--stalled-seconds")
    pending_bytes_max: int = option(
        "How much one connection may have written that is not on disk yet. Further writes wait.", 64 * MIB
    )
    node_pending_bytes_max: int = option(
        "The same for all connections together. Writes take at most a few times this much memory.", 256 * MIB
    )
    node_buffer_bytes_max: int = option(
        "How much the node buffers for all peers: unfinished requests and unread answers. Beyond that, it drops the"
        " peers that make it hold the most.",
        512 * MIB,
    )

    def within_open_files(self, files_max: int) -> ServerLimits:
        """The same limits, but with no more connections than open files are left besides those of the node itself."""
        spare = max(_FILES_SPARE_MIN, files_max - _FILES_OF_NODE)
        http_max = min(self.http_connections_max, spare // 3)
        return replace(self, http_connections_max=http_max, connections_max=min(self.connections_max, spare - http_max))


KV_PORT = 11210
KV_TLS_PORT = 11207
HTTP_PORT = 8091
HTTP_TLS_PORT = 18091
VBUCKETS = 1024
_PORT: dict[str, Any] = {"least": 1, "most": 65535, "metavar": "PORT"}
_ANY_PORT: dict[str, Any] = {**_PORT, "least": 0}
WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})
BUCKET_NAME_CHARS_MAX = 100
_BUCKET_NAME = re.compile(rf"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{{0,{BUCKET_NAME_CHARS_MAX - 1}}}")
"""Couchbase's rule. The name is also used as the name of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Every option of `headwater serve`. `None` as a port means the usual one."""

    data: Path
    host: str = option("The address to listen on.", "127.0.0.1", metavar="ADDRESS")
    advertise_host: str | None = option(
        "The name that clients use to reach the node, if it is not --host.", metavar="NAME"
    )
    advertise_port: int | None = option("The key-value port that clients use, if it is not --port.", **_PORT)
    advertise_http_port: int | None = option("The same for --http-port.", **_PORT)
    advertise_tls_port: int | None = option("The same for --tls-port.", **_PORT)
    advertise_http_tls_port: int | None = option("The same for --http-tls-port.", **_PORT)
    port: int | None = option("Key-value port; 0 for a free one.", default_words=f"{KV_PORT}", **_ANY_PORT)
    http_port: int | None = option("HTTP port; 0 for a free one.", default_words=f"{HTTP_PORT}", **_ANY_PORT)
    tls_port: int | None = option("Key-value port with TLS.", default_words=f"{KV_TLS_PORT}", **_ANY_PORT)
    http_tls_port: int | None = option("HTTP port with TLS.", default_words=f"{HTTP_TLS_PORT}", **_ANY_PORT)
    upr_port: int | None = option("Serve the UPR draft on this port; 0 for a free one.", **_ANY_PORT)
    upr_bucket: str | None = option(
        "The bucket that the UPR draft streams.", default_words="the first one", metavar="NAME"
    )
    buckets: tuple[str, ...] = option(
        "A bucket to serve. Repeat for more.", ("default",), cli_name="--bucket", metavar="NAME"
    )
    vbuckets: int = option("Vbuckets of a new bucket, a power of two.", VBUCKETS)
    bare: bool = option("Start without vbuckets, like a bare kv_engine: set-vbucket creates them.", False)
    user: str | None = option(
        "An admin. The node creates this user, or changes its password. If set by environment variable, only the "
        "first user is created.",
        metavar="NAME",
        variable="HEADWATER_USER",
    )
    password: str | None = option("Its password.", secret=True, metavar="PASSWORD", variable="HEADWATER_PASSWORD")
    first_user_only: bool = False
    """Create `user` only if no user exists, and change no existing one."""
    supervised_in: Path | None = None
    """The common data folder, if one process runs this node and others."""
    tls_cert: Path | None = option("Certificate, PEM.")
    tls_key: Path | None = option("Its key, PEM.")
    tls_only: bool = option("With TLS, open no plain ports.", False)
    insecure: bool = option(
        "Listen beyond loopback without TLS; with a certificate, on plain ports in addition to those with TLS.",
        False,
    )
    dialect: Dialect = option(
        "The version of Couchbase that the node imitates where versions differ.",
        NEWEST,
        choices=DIALECTS,
        cli_name="--speaks-as",
    )
    cluster_name: str | None = option(
        "The name of the cluster, as clients see it.", default_words="as it is, or headwater", metavar="NAME"
    )
    ack_when_durable: bool = option(
        "When to acknowledge a write: once it is on disk, or immediately.",
        True,
        choices={"disk": True, "memory": False},
        cli_name="--durability",
    )
    durable_alone: bool = option(
        "Accept durable writes to buckets that were created over REST and whose replicas no node has. By default, the "
        "node rejects them.",
        False,
    )
    retention: Retention = field(default_factory=Retention)
    expiry_every_s: float = option(
        "Seconds between searches for expired documents.", 60.0, cli_name="--expiry-interval"
    )
    compact_every_s: float = option(
        "Seconds between searches for data to compact.", 10.0, cli_name="--compact-interval"
    )
    scrub_bytes_per_s: int = option(
        "How fast to scrub stored data for damage; 0 disables it.",
        8 * MIB,
        least=0,
        cli_name="--scrub-bytes-per-second",
    )
    limits: ServerLimits = field(default_factory=ServerLimits)
    open_metrics: bool = option("Serve /metrics without authentication.", False)
    http_hosts: tuple[str, ...] = option(
        "A host name to accept in HTTP requests, in addition to the node's own. Repeat for more.",
        (),
        cli_name="--http-host",
        metavar="NAME",
    )
    landing_urls: tuple[str, ...] = option(
        "Show this landing's lag on the dashboard.", (), cli_name="--landing-metrics", metavar="URL"
    )

    def __post_init__(self) -> None:
        if self.vbuckets < 1 or self.vbuckets > 1024 or self.vbuckets & (self.vbuckets - 1):
            raise LocalProtocolError(f"{self.vbuckets} vbuckets: take a power of two, from 1 to 1024")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise LocalProtocolError("TLS needs both the certificate and its key")
        if not self.is_on_loopback and self.tls_cert is None and not self.insecure:
            raise LocalProtocolError(
                f"listening on {self.host} without TLS would send passwords and data in clear text",
                hint="Give --tls-cert and --tls-key, or --insecure if you trust the network",
            )
        if self.tls_cert is None and (self.tls_only or self.tls_port is not None or self.http_tls_port is not None):
            raise LocalProtocolError("ports with TLS need a certificate", hint="Give --tls-cert and --tls-key")
        self._check_upr()
        if self.host in WILDCARD_HOSTS and self.advertise_host is None:
            raise LocalProtocolError(
                f"clients can't reach a node by the host {self.host}",
                hint="Give the name that they use with --advertise-host",
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
        """Whether no other machine can reach the node. Any address of 127.0.0.0/8 counts, for several nodes on one."""
        return self.host == "localhost" or is_loopback_address(self.host)

    @property
    def serves_plain(self) -> bool:
        """Whether there are ports without TLS. As in Couchbase there are, but beyond loopback only with `insecure`:
        others on the network can read what is sent over them."""
        is_safe = self.is_on_loopback or self.insecure
        return self.tls_cert is None or (is_safe and not self.tls_only)

    def kv_ports(self) -> dict[bool, tuple[int | None, int]]:
        """The ports to listen on, by whether they have TLS: the one in the options, and the usual one."""
        return self._ports((self.port, KV_PORT), (self.tls_port, KV_TLS_PORT))

    def http_ports(self) -> dict[bool, tuple[int | None, int]]:
        return self._ports((self.http_port, HTTP_PORT), (self.http_tls_port, HTTP_TLS_PORT))

    def _ports(self, plain: tuple[int | None, int], tls: tuple[int | None, int]) -> dict[bool, tuple[int | None, int]]:
        if self.tls_cert is None:
            return {False: plain}
        if self.serves_plain:
            return {False: plain, True: tls}
        # With TLS ports only, either option names the port.
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
        """The host names that HTTP requests may use, besides addresses and this machine's own name."""
        return frozenset(name for name in (self.host, self.advertise_host, *self.http_hosts) if name)

    # --- what can't work ------------------------------------------------------------------------------------------

    def _check_upr(self) -> None:
        if self.upr_port is None:
            if self.upr_bucket is not None:
                raise LocalProtocolError("a bucket for UPR needs a port for it", hint="Give --upr-port, too")
            return
        if not self.is_on_loopback and not self.insecure:
            # TLS does not help: it would hide the data from others on the network, and still give it to any client.
            raise LocalProtocolError(
                f"the UPR port has no authentication: on {self.host} anyone could read the bucket",
                hint="Listen on 127.0.0.1, or give --insecure where the network is your own",
            )


# --- names --------------------------------------------------------------------------------------------------------

CLUSTER_NAME_CHARS_MAX = 256


def check_bucket_name(name: str) -> None:
    if not _BUCKET_NAME.fullmatch(name):
        raise LocalProtocolError(
            f"{name!r} is not the name of a bucket",
            hint=f"Use up to {BUCKET_NAME_CHARS_MAX} letters, digits and _.-%, but no dot at the start",
        )


def check_cluster_name(name: str) -> None:
    if len(name) > CLUSTER_NAME_CHARS_MAX or not name.isprintable():
        raise LocalProtocolError(
            "the name of a cluster has printable characters, "
            f"{CLUSTER_NAME_CHARS_MAX} at most; this one has {len(name)}"
        )


# --- TLS ----------------------------------------------------------------------------------------------------------


def server_context(options: NodeOptions) -> ssl.SSLContext | None:
    """The TLS context for clients of the node; None if it has no certificate."""
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _files_that_can_be_used():
        context.load_cert_chain(options.tls_cert, options.tls_key)
    return context


def peer_context(options: NodeOptions) -> ssl.SSLContext | None:
    """The TLS context for connections to the other nodes of a cluster; None if this node has no certificate.

    If one node of a cluster uses TLS, all do. They may share one certificate, so this node's own is trusted, too.
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
    except OSError as error:  # including `ssl.SSLError`
        raise HeadwaterError(
            f"the TLS certificate or key can't be used: {error}", hint="Give PEM files that belong together"
        ) from error


# --- the settings of a bucket --------------------------------------------------------------------------------------
# They are a row of the bucket's own table, beside its facts, so that one write creates a bucket with its settings. In a
# cluster the published config carries them (`PublishedConfig.settings`), and every node stores those it adopts.
# `http.bucket_management` has REST's names for them, and refuses settings that are not allowed.


BUCKET_SETTINGS = b"settings"
"""The key in the bucket's own table."""
REPLICAS_MAX = 3
MAX_TTL_S_MAX = 2**31 - 1
RAM_QUOTA_MB_MIN = 100
"""Couchbase's minimum."""
RAM_QUOTA_MB_MAX = 2**31 - 1
HISTORY_S_MAX = 2**53
HISTORY_BYTES_MIN = 2**31
"""Couchbase's minimum for a bucket that sets one."""
HISTORY_BYTES_MAX = 2**53
_BOUNDS = {
    "replicas": REPLICAS_MAX,
    "max_ttl_s": MAX_TTL_S_MAX,
    "ram_quota_mb": RAM_QUOTA_MB_MAX,
    "durability_min_level": max(DurabilityLevel),
    "history_s": HISTORY_S_MAX,
    "history_bytes": HISTORY_BYTES_MAX,
}
_CHOICES = {
    "storage_backend": ("couchstore", "magma"),
    "conflict_resolution": ("seqno", "lww"),
    "compression_mode": ("off", "passive", "active"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """The settings of a bucket. The defaults are for a bucket that `headwater serve --bucket` creates."""

    ram_quota_mb: int | None = None
    """Stored and shown, for clients that compare what they set, but not enforced. None shows the machine's memory."""
    replicas: int = 1
    """For a bucket that is not in a cluster; in a cluster the published config has the number. The default is 1, as in
    Couchbase: with 0, clients that observe durability themselves refuse to, even for the active copy alone.
    """
    max_ttl_s: int = 0
    """The longest time that documents live, unless their collection sets another; 0 for no limit."""
    flush_enabled: bool = False
    durable_alone: bool = True
    """Whether the active copy is enough for a durable write of a bucket in no cluster, where no node has the replicas.
    Couchbase refuses such writes (DURABILITY_IMPOSSIBLE), and so do buckets that are created over REST."""
    durability_min_level: int = 0
    """The minimum `DurabilityLevel` of every write of a client; 0 for none."""
    storage_backend: str = "couchstore"
    """Stored and shown: there is only one kind of storage. It keeps histories, which Couchbase does in Magma only."""
    conflict_resolution: str = "seqno"
    """Which of two versions a write with metadata keeps: the one with the higher revision, or with `lww` the one that
    was written last."""
    compression_mode: str = "passive"
    """Stored and shown: values are stored as clients send them."""
    history_s: int = 0
    history_bytes: int = 0
    """How much history of superseded versions the whole bucket keeps. If one of the two is set, both replace the node's
    options, and 0 means no limit."""
    history_default: bool = False
    """Whether to keep the history of a new collection that does not set this itself."""
    is_forming: bool = False
    """Whether the bucket was created for several nodes and has no config yet. The next start removes such a bucket."""

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, members: Mapping[str, Any]) -> BucketSettings:
        """Decode settings from another node or an earlier version. Missing ones get their defaults."""
        known = {name: members[name] for name in cls.__dataclass_fields__ if name in members}
        for name, value in known.items():
            if name in _CHOICES:
                is_valid = value in _CHOICES[name]
            elif name in _BOUNDS:
                is_valid = type(value) is int and 0 <= value <= _BOUNDS[name]
            else:
                is_valid = isinstance(value, bool)
            if not is_valid and not (name == "ram_quota_mb" and value is None):
                raise MalformedJson(f"{value!r} is not a value of the bucket's setting {name}")
        return cls(**known)

    def retention(self, of_node: Retention, *, vbuckets: int) -> Retention:
        """The retention of each vbucket of a bucket with this many."""
        if not self.history_s and not self.history_bytes:
            return of_node
        return replace(
            of_node,
            history_s=self.history_s or HISTORY_S_MAX,
            history_bytes=-(-self.history_bytes // vbuckets) or HISTORY_BYTES_MAX,
        )

    def rows(self) -> dict[bytes, bytes]:
        """The row that stores them (`Bucket.put_rows`)."""
        return {BUCKET_SETTINGS: json.dumps(self.encode()).encode()}


def stored_settings(bucket: Bucket) -> BucketSettings:
    """The settings of a bucket. Raises `DataDamaged` if the stored row can't be decoded."""
    stored = bucket.stored_row(BUCKET_SETTINGS)
    if stored is None:
        return BucketSettings()
    try:
        members = json.loads(stored)
        if not isinstance(members, dict):
            raise MalformedJson("they are no object")
        return BucketSettings.decode(members)
    except (ValueError, TypeError, AttributeError, MalformedJson) as error:
        raise DataDamaged(
            f"the settings of a bucket are damaged: {error!r}", hint="Restore the data from a backup or a replica"
        ) from error

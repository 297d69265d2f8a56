"""The checked settings to connect to a bucket: where it is, who logs in, which certificates to trust.

Settings, including the password, can be pickled and sent to other processes, as Spark does. So they contain no TLS
context: each process creates its own when it first needs one, from the files that the settings name.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from headwater._version import __version__
from headwater.client.cluster_map import ClusterMap, Network
from headwater.client.connection_string import Address, BootstrapBy, ConnectionString
from headwater.client.kv_connection import FEATURES, Login, Timeouts
from headwater.errors import InvalidConnectionString, InvalidInput, NotSupported
from headwater.options import check_keywords, option, options_of, suggest_keywords
from headwater.protocol.features import Feature
from headwater.protocol.sasl import USER_CHARS_MAX, Credentials, Mechanism
from headwater.protocol.status import Status


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Which certificates to trust, and which to present."""

    ca_file: Path | str | None = None
    """Certificates to trust instead of the system's."""
    skip_verify: bool = False
    """Accept any certificate: the connection is encrypted, but the identity of the server is not verified."""
    certificate_file: Path | str | None = None
    """A client certificate with its chain, in PEM. The server takes the user from it: see `handshake`."""
    key_file: Path | str | None = None
    """The key of the client certificate, if it is not in the same file."""
    key_password: str | None = field(default=None, repr=False)
    """The password of the key, if it is encrypted."""

    def __post_init__(self) -> None:
        if self.certificate_file is None and (self.key_file is not None or self.key_password is not None):
            raise InvalidInput(
                "a key was given without a client certificate",
                hint="Give --tls-cert (TlsSettings.certificate_file in Python)",
            )

    def context(self) -> ssl.SSLContext:
        """Create a TLS context. Raises `InvalidInput` if a file can't be used."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(
                f"the CA file {self.ca_file} can't be used: {error}", hint="Give certificates in PEM form"
            ) from error
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_file is not None:
            self._load_certificate(context, str(self.certificate_file))
        return context

    def _load_certificate(self, context: ssl.SSLContext, certificate_file: str) -> None:
        key_file = None if self.key_file is None else str(self.key_file)
        try:
            # With no password, OpenSSL would prompt for one on the terminal, and block.
            context.load_cert_chain(certificate_file, key_file, self.key_password or "")
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(
                f"the client certificate {certificate_file} can't be used: {error}",
                hint="Give a certificate and its key in PEM form, and key_password if the key is encrypted",
            ) from error


USER_VARIABLE = "HEADWATER_USER"
PASSWORD_VARIABLE = "HEADWATER_PASSWORD"
KEY_PASSWORD_VARIABLE = "HEADWATER_TLS_KEY_PASSWORD"

AGENT = f"headwater/{__version__}"
AGENT_CHARS_MAX = 200
"""Servers keep fewer characters of it."""


class ConnectKeywords(TypedDict, total=False):
    """The keywords of `connect` besides the URL. `ConnectOptions` describes them."""

    user: str | None
    password: str | None
    tls: TlsSettings | None
    mechanism: Mechanism | str | None
    network: Network | str | None
    agent: str
    features: tuple[Feature, ...]
    timeouts: Timeouts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """The options to connect. In Python, TLS is one object; Spark and the command line have an option per part."""

    user: str | None = option(
        "The user to log in as.",
        default_words="that of the URL; in Spark and on the command line also `HEADWATER_USER`",
        spark=True,
        spark_also=("username",),
        commands=("*",),
        metavar="NAME",
        variable=USER_VARIABLE,
    )
    password: str | None = option(
        "The password of the user.",
        secret=True,
        default_words="none; in Spark and on the command line `HEADWATER_PASSWORD`",
        spark=True,
        spark_note="Spark hides it.",
        commands=("*",),
        cli_note="By default, the command prompts for it. Others on the machine can see an option.",
        metavar="PASSWORD",
        variable=PASSWORD_VARIABLE,
    )
    password_file: Path | None = option(
        "A file with the password, on the machine that plans the query.", python=False, spark=True
    )
    tls: TlsSettings | None = option(
        "The certificates to trust and to present. Elsewhere, the options `tls_…` set them.",
        default_words="trusts the system's, with a URL that has TLS",
    )
    tls_ca: Path | None = option(
        "A PEM file with the certificates to trust.",
        default_words="the system's",
        python=False,
        spark=True,
        spark_note="The executors need all TLS files, too.",
        commands=("*",),
    )
    tls_cert: Path | None = option(
        "A PEM file with a client certificate for the log-in.", python=False, spark=True, commands=("*",)
    )
    tls_key: Path | None = option(
        "A PEM file with the key of the client certificate.",
        default_words="that in the certificate's file",
        python=False,
        spark=True,
        commands=("*",),
    )
    tls_key_password: str | None = option(
        "The password of the key, if it is encrypted.",
        secret=True,
        python=False,
        spark=True,
        spark_note="Spark hides it.",
        commands=("*",),
        metavar="PASSWORD",
        variable=KEY_PASSWORD_VARIABLE,
    )
    tls_skip_verify: bool = option(
        "Accept any server certificate. For tests only: it does not protect against man-in-the-middle attacks.",
        False,
        python=False,
        spark=True,
        commands=("*",),
    )
    mechanism: Mechanism | str | None = option(
        "How to log in: `SCRAM-SHA512`, `SCRAM-SHA256`, `SCRAM-SHA1`, or `PLAIN`, which may send the password in "
        "clear text.",
        default_words="the strongest that the server offers",
        spark=True,
    )
    network: Network | str | None = option(
        "Which addresses of the nodes to use: `auto`, `default` or `external`.",
        default_words="that of the URL, or `auto`",
        spark=True,
    )
    agent: str = option(
        "The name of this client in the server's log.", AGENT, default_words="`headwater/` and the version"
    )
    features: tuple[Feature, ...] = option(
        "The features to offer in HELLO.", FEATURES, default_words="all that the client uses"
    )
    timeouts: Timeouts | None = option(
        "How long to wait for a connection and for an answer.",
        default_words="`Timeouts(connect_s=5.0, answer_s=30.0)`",
    )

    @property
    def tls_settings(self) -> TlsSettings | None:
        """The TLS settings of these options, or None if they set none."""
        settings = TlsSettings(
            ca_file=self.tls_ca,
            skip_verify=self.tls_skip_verify,
            certificate_file=self.tls_cert,
            key_file=self.tls_key,
            # The environment variable may be meant for other commands.
            key_password=None if self.tls_cert is None else self.tls_key_password,
        )
        return None if settings == TlsSettings() else settings


CONNECT_OPTIONS = options_of(ConnectOptions)
CONNECT_KEYWORDS = tuple(one for one in CONNECT_OPTIONS.values() if one.python)


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Where a bucket is and how to log in. Made by `make`, or by `of` from parts that are already parsed."""

    where: ConnectionString
    """The hosts, from the connection string."""
    bucket: str
    """From the connection string."""
    credentials: Credentials | None = field(default=None, repr=False)
    """None if a client certificate is the log-in, or if there is no log-in."""
    tls: TlsSettings | None = None
    """None for a connection without TLS."""
    mechanism: Mechanism | None = None
    network: Network = Network.AUTO
    features: tuple[Feature, ...] = FEATURES
    agent: str = AGENT
    timeouts: Timeouts = Timeouts()
    bucket_was_seen: bool = False
    """The bucket existed before: a server without it has just started, and is retried (`BucketNotReady`)."""

    @classmethod
    def make(cls, url: str, **given: Unpack[ConnectKeywords]) -> Self:
        """Make settings from a user's arguments. Raises `InvalidInput` if they are invalid or contradict each other.

        `user` overrides the user in the URL, and `network` the option of that name in it. `mechanism` is one of
        SCRAM-SHA512, SCRAM-SHA256, SCRAM-SHA1 and PLAIN. PLAIN allows the client to send the password in clear text,
        even without TLS: over the key-value protocol and over HTTP.
        """
        check_keywords("connect", given, ConnectKeywords.__annotations__)
        where = ConnectionString.parse(url)
        user = given.get("user")
        return cls.of(
            where,
            _credentials(where.user if user is None else user, given.get("password")),
            tls=given.get("tls"),
            mechanism=given.get("mechanism"),
            network=given.get("network"),
            agent=given.get("agent", AGENT),
            features=given.get("features", FEATURES),
            timeouts=given.get("timeouts"),
        )

    @classmethod
    def of(
        cls,
        where: ConnectionString,
        credentials: Credentials | None,
        *,
        tls: TlsSettings | None = None,
        mechanism: Mechanism | str | None = None,
        network: Network | str | None = None,
        agent: str = AGENT,
        features: tuple[Feature, ...] = FEATURES,
        timeouts: Timeouts | None = None,
    ) -> Self:
        """As `make`, from a parsed connection string."""
        if where.bucket is None:
            raise InvalidConnectionString("the connection string names no bucket", hint="Write couchbase://host/bucket")
        if tls is not None and not where.tls:
            raise InvalidInput(
                "TLS options were given, but the connection does not use TLS",
                hint="Write couchbases:// for a connection with TLS",
            )
        if not 0 < len(agent) <= AGENT_CHARS_MAX or not agent.isprintable() or not agent.isascii():
            raise InvalidInput(
                f"{agent!r} can't be the agent's name", hint=f"Use 1 to {AGENT_CHARS_MAX} printable ASCII characters"
            )
        timeouts = timeouts or Timeouts()
        if min(timeouts.connect_s, timeouts.answer_s) <= 0:
            raise InvalidInput("a timeout must be above 0", hint="Give it in seconds")
        return cls(
            where=where,
            bucket=where.bucket,
            credentials=credentials,
            tls=(tls or TlsSettings()) if where.tls else None,
            mechanism=_mechanism(mechanism, credentials),
            network=_network(network, where),
            features=features,
            agent=agent,
            timeouts=timeouts,
        )

    @property
    def bucket_label(self) -> str:
        """The bucket and the first host, for messages."""
        return f"{self.bucket} at {self.addresses[0]}"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The hosts of the connection string, in order. `where.bootstrap_by` says how to request the map from each.

        DNS may list other hosts in place of a single name: see `connection_string.find_hosts`.
        """
        return self.where.addresses

    @property
    def kv_addresses(self) -> tuple[Address, ...]:
        """Those of the `addresses` that speak the key-value protocol, possibly none."""
        return tuple(address for address in self.addresses if self.where.bootstrap_by(address) is BootstrapBy.KV)

    @property
    def is_tls(self) -> bool:
        return self.where.tls

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, if any. The first call reads the files; raises `InvalidInput` if it can't."""
        return self._tls_context

    @cached_property
    def _tls_context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.context()

    def login(self) -> Login:
        """Return the settings that every connection to a node shares."""
        return Login(
            credentials=self.credentials,
            bucket=self.bucket,
            tls=self.tls_context(),
            mechanism=self.mechanism,
            bucket_was_seen=self.bucket_was_seen,
            features=self.features,
            agent=self.agent,
            timeouts=self.timeouts,
        )

    def decode_map(self, config: bytes | None, *, asked: Address, network: Network | None = None) -> ClusterMap:
        """Decode the cluster map in the config that `asked` returned.

        `network` is that of an earlier map, so that all maps use the same one.
        """
        if config is None:
            raise NotSupported(
                Status.NOT_SUPPORTED,
                f"{asked} has no cluster config",
                hint="Check that the server is a Couchbase or Headwater node with this bucket",
            )
        return ClusterMap.decode(config, asked=asked, tls=self.is_tls, network=network or self.network)

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}


def _credentials(user: str | None, password: str | None) -> Credentials | None:
    if user is None:
        if password is not None:
            raise InvalidInput(
                "a password was given without a user", hint="Give the user, too, or a client certificate"
            )
        return None
    if not user or not password:
        raise InvalidInput(
            "the user or the password is missing",
            hint="Give both, or neither if a client certificate is the log-in",
        )
    if len(user) > USER_CHARS_MAX or "\0" in user + password or not _is_utf8(user + password):
        # Show neither in the error: they may have been swapped.
        raise InvalidInput(
            "the user or the password is invalid",
            hint=f"A user has up to {USER_CHARS_MAX} characters, and both are valid UTF-8 without NUL",
        )
    return Credentials(user, password)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _mechanism(name: str | None, credentials: Credentials | None) -> Mechanism | None:
    if name is None:
        return None
    if name not in tuple(Mechanism):
        raise InvalidInput(f"there is no mechanism {name!r}", hint=f"Use one of {', '.join(Mechanism)}")
    if credentials is None:
        raise InvalidInput(f"there is no user to log in by {name}", hint="Give a user and a password")
    return Mechanism(name)


def _network(name: str | None, where: ConnectionString) -> Network:
    name = name if name is not None else where.option("network", Network.AUTO)
    if name not in tuple(Network):
        raise InvalidConnectionString(f"there is no network {name!r}", hint=f"Use one of {', '.join(Network)}")
    return Network(name)

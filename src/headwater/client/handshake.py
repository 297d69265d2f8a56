"""The client's handshake on a key-value connection, sans-IO: HELLO, log-in, bucket, cluster config.

The requests, and what each one waits for:

    HELLO, SASL_LIST_MECHS              together: neither depends on the other
    SASL_AUTH                           when the mechanisms are known
    SASL_STEP                           when the server has sent its challenge (SCRAM only)
    SELECT_BUCKET, GET_CLUSTER_CONFIG   together with the last message of the log-in, or after HELLO if there is none

A server answers the requests of a connection in order, and the exchange enforces that, so the oldest request is the
state. Without credentials the handshake skips the log-in; without a bucket, or if HELLO did not grant it, the
selection. The first refusal ends the handshake, whatever else is under way.

A client with its own certificate is logged in by that, before the first byte of the handshake: Couchbase takes the
user from the certificate and then answers SASL with NOT_SUPPORTED. Such a client gives no credentials.

If HELLO negotiated it, the server may also send requests of its own, such as a new cluster map, between any two
answers. The handshake ignores them. Bytes after the last answer stay in the exchange, for the user of the connection.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headwater import errors
from headwater.protocol.exchange import ANSWER_TIMEOUT_S, Exchange, Pushed
from headwater.protocol.features import Feature, Negotiated, Opcode
from headwater.protocol.messages import ErrorResponse, Response, session
from headwater.protocol.sasl import Credentials as Credentials
from headwater.protocol.sasl import Mechanism, PlainLogin, ScramClient, best_mechanism
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, decompress

_NO_CONFIG = frozenset({Status.KEY_ENOENT, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED, Status.NO_BUCKET})
"""The statuses of servers outside a cluster when asked for the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeOutcome:
    """The properties of a connection that is ready."""

    negotiated: Negotiated
    mechanism: Mechanism | None
    """The mechanism of the log-in; None without a log-in."""
    cluster_config: bytes | None
    """As JSON; None if the server is not in a cluster."""


# --- the handshake ------------------------------------------------------------------------------------------------


class ClientHandshake:
    """One handshake: send `data_to_send()` and pass in what is received, until there is an `outcome` or an error.

    `nonce` is for SCRAM, from `sasl.encode_nonce`, and must be new every time. `plain_allowed` means that no third
    party can listen: the connection is encrypted, or does not leave the machine. `mechanism` replaces the choice of
    the best one that the server offers; PLAIN is then used even if others can listen. With `bucket_was_seen`, a server
    that does not have the bucket has just started: `BucketNotReady`, which is retried.
    """

    def __init__(
        self,
        *,
        credentials: Credentials | None,
        bucket: str | None,
        nonce: bytes,
        features: tuple[Feature, ...] = (),
        agent: str = "headwater",
        plain_allowed: bool = False,
        mechanism: Mechanism | None = None,
        bucket_was_seen: bool = False,
        peer: str = "the server",
        answer_s_max: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.outcome: HandshakeOutcome | None = None
        self.exchange = Exchange(peer=peer, answer_s_max=answer_s_max)
        """Carries all further requests of the connection, once there is an outcome."""
        self.has_failed = False
        self._credentials = credentials
        self._bucket = bucket
        self._nonce = nonce
        self._plain_allowed = plain_allowed
        self._wanted_mechanism = mechanism
        self._bucket_was_seen = bucket_was_seen
        self._mechanism: Mechanism | None = None
        self._scram: ScramClient | None = None
        self._asks_to_select = Feature.SELECT_BUCKET in features
        self._is_chosen_by_login = False
        self.exchange.send(session.Hello(key=agent.encode(), features=features))
        if credentials is not None:
            self.exchange.send(session.SaslListMechanisms())

    def _send_last(self) -> None:
        """Select the bucket and request its config. HELLO has been answered by then.

        A server before 5.0 does not grant select-bucket, and closes the connection of a user who tries it: the log-in
        has chosen the bucket with the user's name (recorded from 4.6.5). The config shows whether that is the right
        one.
        """
        is_granted = Feature.SELECT_BUCKET in self.exchange.negotiated.features
        self._is_chosen_by_login = self._bucket is not None and self._asks_to_select and not is_granted
        if self._bucket is not None and not self._is_chosen_by_login:
            self.exchange.send(session.SelectBucket(key=self._bucket.encode()))
        self.exchange.send(session.GetClusterConfig())

    def data_to_send(self) -> bytes:
        return self.exchange.data_to_send()

    @property
    def trailing_data(self) -> bytes:
        """Bytes received after the last answer, for a receiver that does not use the exchange."""
        return self.exchange.rest

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Process bytes that the server has sent.

        Raises a `StatusError` for a refusal, `RemoteProtocolError` for invalid data, and `TlsFailed` if it is TLS.
        """
        self._check_under_way()
        self.exchange.receive_data(data)
        try:
            while self.outcome is None and (event := self.exchange.next_event()) is not None:
                if not isinstance(event, Pushed):
                    _ANSWERED[Opcode(event.request.opcode)](self, event.response())
                elif isinstance(self.exchange.oldest, session.Hello):
                    raise errors.UnexpectedMessage(f"{event.frame.opcode_name}, where the answer to Hello was due")
        except errors.HeadwaterError as error:
            self.has_failed = True
            if isinstance(error, errors.BadMagic) and error.offset == 0:
                _raise_known_protocol(bytes(data[:_SIGNATURE_BYTES]), error)
            raise

    def receive_end(self) -> None:
        """The server has closed the connection before the handshake was complete. Raises `ConnectionClosed`."""
        self._check_under_way()
        due = type(self.exchange.oldest).__name__
        self.has_failed = True
        raise errors.ConnectionClosed(
            f"the server closed the connection when {due} was to be answered",
            hint="Check that the port speaks the Couchbase key-value protocol, and TLS on both ends or on neither",
        )

    def _check_under_way(self) -> None:
        if self.has_failed or self.outcome is not None:
            raise errors.LocalProtocolError("the handshake is over", hint="Use the connection instead of the handshake")

    def _on_hello(self, answer: Response) -> None:
        if not isinstance(answer, session.HelloResponse):
            raise _refused(answer, "the server refused HELLO")
        self.exchange.negotiated = Negotiated(frozenset(answer.features))
        if self._credentials is None:
            self._send_last()

    def _on_mechanisms(self, answer: Response) -> None:
        if answer.status == Status.NOT_SUPPORTED:
            raise errors.NotSupported(
                answer.status,
                "the server accepts no user and password on this connection",
                hint="The client certificate is the log-in: omit the user and the password",
            )
        offered = _value(answer, "the server does not say how to log in")
        assert self._credentials is not None
        self._mechanism = self._choose_mechanism(offered)
        user, password = self._credentials.user, self._credentials.password
        if self._mechanism is Mechanism.PLAIN:
            self.exchange.send(
                session.SaslAuth(key=self._mechanism.encode(), value=PlainLogin(user, password).encode())
            )
            self._send_last()
        else:
            self._scram = ScramClient(self._mechanism, user, password, self._nonce)
            self.exchange.send(session.SaslAuth(key=self._mechanism.encode(), value=self._scram.first()))

    def _choose_mechanism(self, offered: bytes) -> Mechanism:
        wanted = self._wanted_mechanism
        if wanted is None:
            return best_mechanism(offered, plain_allowed=self._plain_allowed)
        if wanted.encode() not in offered.split(b" "):
            raise errors.AuthenticationFailed(
                Status.AUTH_ERROR,
                f"the server does not offer {wanted}, but only {offered.decode(errors='replace')}",
                hint="Take one of these, or none, for the best of them",
            )
        return wanted

    def _on_login(self, answer: Response) -> None:
        value = _login_value(answer)
        if self._scram is None:
            if answer.status != Status.SUCCESS:
                raise errors.UnexpectedMessage(f"{answer.status.name} as the answer to SASL PLAIN")
            return
        # A server that accepts us without a proof does not know the password, and may be an impostor.
        if answer.status != Status.AUTH_CONTINUE:
            raise errors.UnexpectedMessage(f"{answer.status.name} as the answer to the first SCRAM message")
        assert self._mechanism is not None
        self.exchange.send(session.SaslStep(key=self._mechanism.encode(), value=self._scram.final(value)))
        self._send_last()

    def _on_proof(self, answer: Response) -> None:
        value = _login_value(answer)
        assert self._scram is not None
        if answer.status != Status.SUCCESS:
            raise errors.UnexpectedMessage(f"{answer.status.name} as the answer to the last SCRAM message")
        self._scram.verify(value)

    def _on_bucket(self, answer: Response) -> None:
        if answer.status == Status.KEY_ENOENT and self._bucket_was_seen:
            # As seen with 7.0.5 and 8.0.2: a restarted server listens before it has opened its buckets.
            raise errors.BucketNotReady(answer.status, f"bucket {self._bucket!r} is not there at the moment")
        if answer.status == Status.KEY_ENOENT:
            raise errors.UnknownBucket(
                answer.status, f"there is no bucket {self._bucket!r}", hint="Check the name in the connection string"
            )
        if answer.status == Status.EACCESS:
            raise self._no_access(answer)
        _value(answer, f"bucket {self._bucket!r} can't be used")

    def _no_access(self, answer: Response) -> errors.AccessDenied:
        if self._credentials is None:
            return errors.AccessDenied(
                answer.status,
                f"the user may not use bucket {self._bucket!r}: no user has logged in",
                hint="Give a user and a password, or a client certificate that the server maps to a user",
            )
        # Servers answer both cases alike, so that a stranger does not learn which buckets exist.
        return errors.AccessDenied(
            answer.status,
            f"there is no bucket {self._bucket!r}, or the user may not use it",
            hint="Check the bucket's name, and give the user a role on it",
        )

    def _on_config(self, answer: Response) -> None:
        config: bytes | None = None
        if answer.status not in _NO_CONFIG:
            config = _value(answer, "the server does not give the cluster config") or None
            if config and Datatype.SNAPPY in answer.datatype:
                config = decompress(config)
        if self._is_chosen_by_login:
            self._check_chosen_bucket(config)
        self.outcome = HandshakeOutcome(
            negotiated=self.exchange.negotiated, mechanism=self._mechanism, cluster_config=config
        )

    def _check_chosen_bucket(self, config: bytes | None) -> None:
        try:
            chosen = None if config is None else json.loads(config).get("name")
        except (ValueError, AttributeError, RecursionError):
            chosen = None
        if chosen is not None and chosen != self._bucket:
            user = None if self._credentials is None else self._credentials.user
            raise errors.AccessDenied(
                Status.EACCESS,
                f"the server can't select bucket {self._bucket!r}: the log-in of {user!r} has chosen {chosen!r}",
                hint="On servers before 5.0, log in as the user with the bucket's name",
            )


_ANSWERED = {
    Opcode.HELLO: ClientHandshake._on_hello,
    Opcode.SASL_LIST_MECHS: ClientHandshake._on_mechanisms,
    Opcode.SASL_AUTH: ClientHandshake._on_login,
    Opcode.SASL_STEP: ClientHandshake._on_proof,
    Opcode.SELECT_BUCKET: ClientHandshake._on_bucket,
    Opcode.GET_CLUSTER_CONFIG: ClientHandshake._on_config,
}


_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""The first bytes of a TLS alert and of a TLS handshake message."""
_HTTP_ANSWER = b"HTTP/"
_SIGNATURE_BYTES = len(_HTTP_ANSWER)


def _raise_known_protocol(data: bytes, error: errors.BadMagic) -> None:
    """If the first bytes are those of TLS or HTTP, raise the error that says so."""
    if any(record.startswith(data[:2]) for record in _TLS_RECORDS):
        raise errors.TlsFailed(
            "the server uses TLS here, and this connection does not",
            hint="Write couchbases://, or use the port without TLS (11210)",
        ) from error
    if _HTTP_ANSWER.startswith(data):
        raise errors.WrongProtocol(
            f"the server answers with HTTP: 0x{data[0]:02x} is not a magic byte",
            hint="Check that the port speaks the Couchbase key-value protocol (11210, or 11207 with TLS); "
            "if it is a cluster manager's, add ?bootstrap=http",
        ) from error


def _refused(answer: Response, what: str) -> errors.StatusError:
    context = answer.context if isinstance(answer, ErrorResponse) else ""
    return errors.status_error(answer.status, f"{what}: {answer.status.name}{f' ({context})' if context else ''}")


def _value(answer: Response, what: str) -> bytes:
    """Return the value of a success; raise the error for any other answer."""
    if isinstance(answer, ErrorResponse):
        raise _refused(answer, what)
    value: bytes = getattr(answer, "value", b"")
    return value


def _login_value(answer: Response) -> bytes:
    if answer.status == Status.AUTH_ERROR:
        raise errors.AuthenticationFailed(
            answer.status, "the server refused the log-in: the user or the password is wrong"
        )
    return _value(answer, "the server refused the log-in")

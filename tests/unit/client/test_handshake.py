"""The client's handshake, against a peer that is made of the protocol package and knows no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.client.handshake import (
    HANDSHAKE,
    ClientHandshake,
    Credentials,
    HandshakeFailed,
    HandshakeState,
    HelloAnswered,
)
from headwater.errors import (
    AccessDenied,
    AuthenticationFailed,
    BadMagic,
    FrameTooLarge,
    KeyNotFound,
    LocalProtocolError,
    MalformedMessage,
    RemoteProtocolError,
    StatusError,
    UnexpectedMessage,
)
from headwater.protocol.compression import compress
from headwater.protocol.datatype import Datatype
from headwater.protocol.features import Feature
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, decode_message
from headwater.protocol.messages.session import (
    ClustermapChangeNotification,
    GetClusterConfig,
    Hello,
    HelloResponse,
    Noop,
    SaslAuth,
    SaslListMechanisms,
    SaslStep,
    SelectBucket,
)
from headwater.protocol.opcodes import Opcode
from headwater.protocol.sasl import Mechanism, PlainLogin, ScramServer, derive_credentials, encode_nonce
from headwater.protocol.state_machine import all_events, transition
from headwater.protocol.status import Status

USER, PASSWORD = "ada", "pässword, with = and ,"
CONFIG = b'{"rev": 1}'
ASKED = (Feature.XERROR, Feature.COLLECTIONS, Feature.SNAPPY)


class Peer:
    """A server's side of the handshake. `replace` answers one kind of request in another way."""

    def __init__(
        self, *, mechanisms: str = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN", bucket: str = "travel"
    ) -> None:
        self.mechanisms = mechanisms
        self.bucket = bucket
        self.seen: list[Request] = []
        self.writes: list[int] = []
        """How many requests came in each write."""
        self.replace: dict[type[Request], Callable[[Any], Response | Request]] = {}
        self._frames = FrameBuffer()
        self._scram: ScramServer | None = None

    def receive_data(self, data: bytes) -> bytes:
        self._frames.receive_data(data)
        answers = []
        for frame in self._frames.frames():
            request = decode_message(frame)
            assert isinstance(request, Request)
            self.seen.append(request)
            answers.append(self.replace.get(type(request), self._answer)(request))
        self.writes.append(len(answers))
        return b"".join(answer.encode() for answer in answers)

    def _answer(self, request: Request) -> Response:
        if isinstance(request, Hello):
            agreed = tuple(feature for feature in request.features if feature is not Feature.SNAPPY)
            return HelloResponse(opaque=request.opaque, features=agreed)
        if isinstance(request, SaslListMechanisms):
            return ok(request, self.mechanisms.encode())
        if isinstance(request, SaslStep):
            return self._step(request)
        if isinstance(request, SaslAuth):
            return self._auth(request)
        if isinstance(request, SelectBucket):
            return ok(request) if request.key == self.bucket.encode() else refused(request, Status.KEY_ENOENT)
        assert isinstance(request, GetClusterConfig)
        return ok(request, CONFIG)

    def _auth(self, request: SaslAuth) -> Response:
        mechanism = Mechanism.decode(request.key)
        if mechanism is Mechanism.PLAIN:
            matches = PlainLogin.decode(request.value) == PlainLogin(USER, PASSWORD)
            return ok(request) if matches else refused(request, Status.AUTH_ERROR)
        self._scram = ScramServer(
            mechanism,
            lambda mechanism, _: derive_credentials(mechanism, PASSWORD, salt=b"s" * 16, iterations=4000),
            encode_nonce(b"server" * 3),
        )
        return ok(request, self._scram.start(request.value), status=Status.AUTH_CONTINUE)

    def _step(self, request: SaslStep) -> Response:
        assert self._scram is not None
        try:
            return ok(request, self._scram.finish(request.value))
        except AuthenticationFailed:
            return refused(request, Status.AUTH_ERROR)


def ok(request: Request, value: bytes = b"", *, status: Status = Status.SUCCESS, **parts: Any) -> PlainResponse:
    return PlainResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=status, value=value, **parts)


def refused(request: Request, status: Status, value: bytes = b"") -> ErrorResponse:
    return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=status, value=value)


def handshake(*, password: str = PASSWORD, bucket: str | None = "travel", **options: Any) -> ClientHandshake:
    options.setdefault("credentials", Credentials(USER, password))
    return ClientHandshake(bucket=bucket, nonce=encode_nonce(b"client" * 3), features=ASKED, **options)


def run(client: ClientHandshake, peer: Peer, *, chunk_bytes: int = 1 << 20) -> ClientHandshake:
    """Pass the bytes to and fro until there is nothing more to pass."""
    while data := client.data_to_send():
        answer = peer.receive_data(data)
        for at in range(0, len(answer), chunk_bytes):
            client.receive_data(answer[at : at + chunk_bytes])
    return client


def opcodes(peer: Peer) -> list[str]:
    return [Opcode(request.opcode).name for request in peer.seen]


# --- it works -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1])
def test_every_mechanism_leads_to_a_ready_connection(mechanism: Mechanism, chunk_bytes: int) -> None:
    client = run(handshake(plain_allowed=True), Peer(mechanisms=mechanism), chunk_bytes=chunk_bytes)
    assert client.state is HandshakeState.READY
    assert client.outcome is not None
    assert client.outcome.mechanism is mechanism
    assert client.outcome.negotiated.features == {Feature.XERROR, Feature.COLLECTIONS}
    assert client.outcome.negotiated.collections
    assert client.outcome.cluster_config == CONFIG


def test_requests_go_out_together_where_they_can() -> None:
    peer = Peer()
    run(handshake(), peer)
    assert opcodes(peer) == [
        "HELLO", "SASL_LIST_MECHS", "SASL_AUTH", "SASL_STEP", "SELECT_BUCKET", "GET_CLUSTER_CONFIG",
    ]  # fmt: skip
    assert peer.writes == [2, 1, 3]
    plain = Peer(mechanisms="PLAIN")
    run(handshake(plain_allowed=True), plain)
    assert plain.writes == [2, 3]


def test_the_best_mechanism_is_taken_and_the_agent_is_told() -> None:
    peer = Peer(mechanisms="PLAIN SCRAM-SHA1 CRAM-MD5 SCRAM-SHA256")
    client = run(handshake(agent="a tool", plain_allowed=True), peer)
    assert client.outcome is not None
    assert client.outcome.mechanism is Mechanism.SCRAM_SHA256
    assert isinstance(peer.seen[0], Hello)
    assert peer.seen[0].key == b"a tool"


def test_without_credentials_there_is_no_login() -> None:
    peer = Peer()
    client = run(handshake(credentials=None), peer)
    assert opcodes(peer) == ["HELLO", "SELECT_BUCKET", "GET_CLUSTER_CONFIG"]
    assert peer.writes == [3]
    assert client.outcome is not None
    assert client.outcome.mechanism is None


@pytest.mark.parametrize("credentials", [None, Credentials(USER, PASSWORD)])
def test_without_a_bucket_none_is_selected(credentials: Credentials | None) -> None:
    peer = Peer()
    client = run(handshake(bucket=None, credentials=credentials), peer)
    assert client.outcome is not None
    assert "SELECT_BUCKET" not in opcodes(peer)


@pytest.mark.parametrize("status", [Status.KEY_ENOENT, Status.UNKNOWN_COMMAND])
def test_a_server_outside_a_cluster_has_no_config(status: Status) -> None:
    peer = Peer()
    peer.replace[GetClusterConfig] = lambda request: refused(request, status)
    client = run(handshake(), peer)
    assert client.outcome is not None
    assert client.outcome.cluster_config is None


def test_a_compressed_config_is_inflated() -> None:
    peer = Peer()
    peer.replace[GetClusterConfig] = lambda request: ok(request, compress(CONFIG), datatype=Datatype.SNAPPY)
    client = run(handshake(), peer)
    assert client.outcome is not None
    assert client.outcome.cluster_config == CONFIG


def test_the_password_is_in_no_repr() -> None:
    assert PASSWORD not in repr(Credentials(USER, PASSWORD))


# --- it is refused ------------------------------------------------------------------------------------------------


def failure(client: ClientHandshake, peer: Peer) -> Exception:
    with pytest.raises((StatusError, RemoteProtocolError)) as raised:
        run(client, peer)
    assert client.state is HandshakeState.FAILED
    assert client.outcome is None
    assert raised.value.hint
    return raised.value


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_a_wrong_password(mechanism: Mechanism) -> None:
    error = failure(handshake(password="hunter2", plain_allowed=True), Peer(mechanisms=mechanism))
    assert isinstance(error, AuthenticationFailed)
    assert "the user or the password is wrong" in str(error)
    assert "hunter2" not in str(error)


def test_a_password_is_not_sent_in_clear_where_others_can_listen() -> None:
    peer = Peer(mechanisms="PLAIN")
    error = failure(handshake(), peer)
    assert isinstance(error, AuthenticationFailed)
    assert "Use TLS" in str(error)
    assert "SASL_AUTH" not in opcodes(peer)


def test_an_unknown_bucket() -> None:
    error = failure(handshake(bucket="travle"), Peer())
    assert isinstance(error, KeyNotFound)
    assert "there is no bucket 'travle'" in str(error)


def test_a_bucket_that_the_user_may_not_use() -> None:
    peer = Peer()
    peer.replace[SelectBucket] = lambda request: refused(request, Status.EACCESS)
    error = failure(handshake(), peer)
    assert isinstance(error, AccessDenied)
    assert "give the user a role" in str(error)


@pytest.mark.parametrize("kind", [Hello, SaslListMechanisms, SaslAuth, SaslStep, SelectBucket, GetClusterConfig])
def test_any_refusal_is_told_with_the_servers_words(kind: type[Request]) -> None:
    peer = Peer()
    peer.replace[kind] = lambda request: refused(request, Status.EBUSY, b'{"error":{"context":"come back later"}}')
    error = failure(handshake(), peer)
    assert isinstance(error, StatusError)
    assert error.status == Status.EBUSY
    assert "EBUSY (come back later)" in str(error)


def test_a_false_server_cannot_skip_the_proof() -> None:
    peer = Peer()
    peer.replace[SaslAuth] = ok
    assert isinstance(failure(handshake(), peer), UnexpectedMessage)


def test_a_false_server_cannot_make_up_the_signature() -> None:
    peer = Peer()
    peer.replace[SaslStep] = lambda request: ok(request, b"v=" + b"A" * 86 + b"==")
    error = failure(handshake(), peer)
    assert isinstance(error, AuthenticationFailed)
    assert "could not show that it knows the password" in str(error)


# --- nonsense -----------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_frames() -> None:
    client = handshake()
    with pytest.raises(BadMagic):
        client.receive_data(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert client.state is HandshakeState.FAILED
    with pytest.raises(LocalProtocolError, match="over"):
        client.receive_data(b"")


def test_an_answer_that_is_too_large() -> None:
    client = handshake()
    with pytest.raises(FrameTooLarge):
        client.receive_data(b"\x81\x1f" + bytes(6) + b"\x7f\xff\xff\xff" + bytes(12))


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: ok(Noop(opaque=request.opaque)),
        lambda request: HelloResponse(opaque=request.opaque + 1),
        lambda request: Noop(opaque=request.opaque),
        lambda request: ClustermapChangeNotification(epoch=1, revision=1),
    ],
    ids=["another opcode", "another opaque", "a request", "a notification"],
)
def test_an_answer_to_something_else(answer: Callable[[Request], Response | Request]) -> None:
    peer = Peer()
    peer.replace[Hello] = answer
    assert isinstance(failure(handshake(), peer), UnexpectedMessage)


def test_features_that_cannot_be_read() -> None:
    peer = Peer()
    peer.replace[Hello] = lambda request: ok(request, b"\0")
    assert isinstance(failure(handshake(), peer), MalformedMessage)


@pytest.mark.parametrize(
    ("kind", "status"), [(SaslAuth, Status.AUTH_CONTINUE), (SaslStep, Status.AUTH_CONTINUE)], ids=["plain", "scram"]
)
def test_a_login_that_never_ends(kind: type[Request], status: Status) -> None:
    peer = Peer(mechanisms="PLAIN" if kind is SaslAuth else "SCRAM-SHA1")
    peer.replace[kind] = lambda request: ok(request, status=status)
    assert isinstance(failure(handshake(plain_allowed=True), peer), UnexpectedMessage)


def test_a_frame_after_the_last_answer() -> None:
    peer = Peer()
    client = handshake(credentials=None)
    answers = peer.receive_data(client.data_to_send())
    with pytest.raises(UnexpectedMessage, match="every request was answered"):
        client.receive_data(answers + HelloResponse().encode())
    assert client.state is HandshakeState.FAILED
    assert client.outcome is None


def test_the_server_closes_too_soon() -> None:
    client = handshake()
    with pytest.raises(RemoteProtocolError, match="closed the connection when Hello was to be answered"):
        client.receive_end()
    with pytest.raises(LocalProtocolError):
        client.receive_end()


# --- the table ----------------------------------------------------------------------------------------------------

PAIRS = [
    pytest.param(state, event, id=f"{state.name} + {event.__name__}")
    for state in HANDSHAKE
    for event in sorted(all_events(HANDSHAKE), key=lambda kind: kind.__name__)
]


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_moves_as_the_table_says_or_raises(state: HandshakeState, event: type[Any]) -> None:
    if event in HANDSHAKE[state]:
        assert transition(HANDSHAKE, state, event) is HANDSHAKE[state][event]
    else:
        with pytest.raises(UnexpectedMessage):
            transition(HANDSHAKE, state, event)


def test_every_state_can_fail_but_the_one_that_has() -> None:
    assert set(HANDSHAKE) == set(HandshakeState)
    assert [state for state in HANDSHAKE if HandshakeFailed not in HANDSHAKE[state]] == [HandshakeState.FAILED]
    assert [state for state in HANDSHAKE if HelloAnswered in HANDSHAKE[state]] == [HandshakeState.HELLO]

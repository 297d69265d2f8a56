"""The client's handshake, against a peer that is made of the protocol package and knows no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater import errors
from headwater.client.handshake import ClientHandshake, Credentials, HandshakeOutcome
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.messages import Request, Response
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
from headwater.protocol.sasl import Mechanism, encode_nonce
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, compress
from support.cases import case, case_apart, each
from support.fake_servers import ASKED, CONFIG, PASSWORD, USER, Peer, ok, refused


def handshake(*, password: str = PASSWORD, bucket: str | None = "travel", **options: Any) -> ClientHandshake:
    options.setdefault("credentials", Credentials(USER, password))
    options.setdefault("features", ASKED)
    return ClientHandshake(bucket=bucket, nonce=encode_nonce(b"client" * 3), **options)


def run(client: ClientHandshake, peer: Peer, *, chunk_bytes: int = 1 << 20) -> ClientHandshake:
    """Pass the bytes to and fro until there is nothing more to pass."""
    while data := client.data_to_send():
        answer = peer.receive_data(data)
        for at in range(0, len(answer), chunk_bytes):
            client.receive_data(answer[at : at + chunk_bytes])
    return client


def outcome(client: ClientHandshake, peer: Peer, **options: Any) -> HandshakeOutcome:
    run(client, peer, **options)
    assert client.outcome is not None
    return client.outcome


def opcodes(peer: Peer) -> list[str]:
    return [Opcode(request.opcode).name for request in peer.seen]


# --- it works -----------------------------------------------------------------------------------------------------


@each("mechanism", list(Mechanism))
@each("chunk_bytes", [1 << 20, 1])
def test_every_mechanism_leads_to_a_ready_connection(mechanism: Mechanism, chunk_bytes: int) -> None:
    found = outcome(handshake(plain_allowed=True), Peer(mechanisms=mechanism), chunk_bytes=chunk_bytes)
    assert found.mechanism is mechanism
    assert found.negotiated.features == {Feature.XERROR, Feature.COLLECTIONS}
    assert found.cluster_config == CONFIG


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


def test_the_best_mechanism_is_taken_and_the_agent_is_named() -> None:
    peer = Peer(mechanisms="PLAIN SCRAM-SHA1 CRAM-MD5 SCRAM-SHA256")
    assert outcome(handshake(agent="a tool", plain_allowed=True), peer).mechanism is Mechanism.SCRAM_SHA256
    assert isinstance(peer.seen[0], Hello)
    assert peer.seen[0].key == b"a tool"


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_the_mechanism_can_be_named(mechanism: Mechanism) -> None:
    """PLAIN, too, and then also where others can listen: a caller that names it wants it."""
    assert outcome(handshake(mechanism=mechanism, plain_allowed=False), Peer()).mechanism is mechanism


def test_a_mechanism_that_the_server_does_not_offer() -> None:
    peer = Peer(mechanisms="SCRAM-SHA1 PLAIN")
    error = failure(handshake(mechanism=Mechanism.SCRAM_SHA512), peer)
    assert isinstance(error, errors.AuthenticationFailed)
    assert "does not offer SCRAM-SHA512, but only SCRAM-SHA1 PLAIN" in str(error)
    assert "SASL_AUTH" not in opcodes(peer)


@each("is_known_by_certificate", [True, False])
def test_without_credentials_there_is_no_login(is_known_by_certificate: bool) -> None:
    """A server that knows the user from the certificate takes no SASL, and needs none."""
    peer = Peer(is_known_by_certificate=is_known_by_certificate)
    assert outcome(handshake(credentials=None), peer).mechanism is None
    assert opcodes(peer) == ["HELLO", "SELECT_BUCKET", "GET_CLUSTER_CONFIG"]
    assert peer.writes == [1, 2]


def test_a_login_besides_a_certificate() -> None:
    error = failure(handshake(), Peer(is_known_by_certificate=True))
    assert isinstance(error, errors.NotSupported)
    assert "omit the user and the password" in str(error)


@pytest.mark.parametrize("credentials", [None, Credentials(USER, PASSWORD)])
def test_without_a_bucket_none_is_selected(credentials: Credentials | None) -> None:
    peer = Peer()
    outcome(handshake(bucket=None, credentials=credentials), peer)
    assert "SELECT_BUCKET" not in opcodes(peer)


@pytest.mark.parametrize("config", [b'{"name":"travel"}', b"{}", b"not json", b"[]"])
@pytest.mark.parametrize("credentials", [None, Credentials(USER, PASSWORD)])
def test_a_bucket_is_selected_only_if_hello_has_granted_it(credentials: Credentials | None, config: bytes) -> None:
    """A 4.6.5 server closes the connection of a user who tries: the log-in has chosen the bucket."""
    peer = Peer(config=config)
    peer.replace[Hello] = lambda request: HelloResponse(opaque=request.opaque, features=())
    found = outcome(handshake(credentials=credentials, features=(*ASKED, Feature.SELECT_BUCKET)), peer)
    assert "SELECT_BUCKET" not in opcodes(peer)
    assert found.cluster_config == config


def test_a_login_that_has_chosen_another_bucket() -> None:
    peer = Peer(config=b'{"name":"beer"}')
    peer.replace[Hello] = lambda request: HelloResponse(opaque=request.opaque, features=())
    error = failure(handshake(features=(*ASKED, Feature.SELECT_BUCKET)), peer)
    assert isinstance(error, errors.AccessDenied)
    assert "the log-in of 'ada' has chosen 'beer'" in str(error)


@pytest.mark.parametrize("status", [Status.KEY_ENOENT, Status.UNKNOWN_COMMAND])
def test_a_server_outside_a_cluster_has_no_config(status: Status) -> None:
    peer = Peer()
    peer.replace[GetClusterConfig] = lambda request: refused(request, status)
    assert outcome(handshake(), peer).cluster_config is None


def test_a_compressed_config_is_inflated() -> None:
    peer = Peer()
    peer.replace[GetClusterConfig] = lambda request: ok(request, compress(CONFIG), datatype=Datatype.SNAPPY)
    assert outcome(handshake(), peer).cluster_config == CONFIG


# --- what the server sends of its own accord ----------------------------------------------------------------------

PUSHED = ClustermapChangeNotification(epoch=1, revision=7, key=b"travel", value=b"{}")


@each("before", [SaslListMechanisms, SaslAuth, SaslStep, SelectBucket, GetClusterConfig])
@each("chunk_bytes", [1 << 20, 1])
def test_what_the_server_pushes_between_answers_is_passed_over(before: type[Request], chunk_bytes: int) -> None:
    peer = Peer()
    peer.pushed_before[before] = PUSHED
    client = run(handshake(), peer, chunk_bytes=chunk_bytes)
    assert client.outcome is not None
    assert client.trailing_data == b""


def test_nothing_is_pushed_before_it_was_agreed_on() -> None:
    peer = Peer()
    peer.pushed_before[Hello] = PUSHED
    assert isinstance(failure(handshake(), peer), errors.UnexpectedMessage)


@each("chunk_bytes", [1 << 20, 1])
@each("trailing", [b"", b"\x80", PUSHED.encode(), PUSHED.encode() + b"\x81\x0a", b"no frame"])
def test_what_comes_behind_the_last_answer_is_for_others(trailing: bytes, chunk_bytes: int) -> None:
    client, peer = handshake(credentials=None), Peer()
    client.receive_data(peer.receive_data(client.data_to_send()))
    data = peer.receive_data(client.data_to_send()) + trailing
    at = 0
    while client.outcome is None:
        client.receive_data(data[at : at + chunk_bytes])
        at += chunk_bytes
    assert client.trailing_data + data[at:] == trailing
    with pytest.raises(errors.LocalProtocolError, match="over"):
        client.receive_data(b"")


def test_the_password_is_in_no_repr() -> None:
    assert PASSWORD not in repr(Credentials(USER, PASSWORD))


# --- it is refused ------------------------------------------------------------------------------------------------


def failure(client: ClientHandshake, peer: Peer) -> Exception:
    with pytest.raises((errors.StatusError, errors.RemoteProtocolError)) as raised:
        run(client, peer)
    assert client.has_failed
    assert client.outcome is None
    assert raised.value.hint
    return raised.value


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_a_wrong_password(mechanism: Mechanism) -> None:
    error = failure(handshake(password="hunter2", plain_allowed=True), Peer(mechanisms=mechanism))
    assert isinstance(error, errors.AuthenticationFailed)
    assert "the user or the password is wrong" in str(error)
    assert "hunter2" not in str(error)


def test_a_password_is_not_sent_in_clear_where_others_can_listen() -> None:
    peer = Peer(mechanisms="PLAIN")
    error = failure(handshake(), peer)
    assert isinstance(error, errors.AuthenticationFailed)
    assert "Use TLS" in str(error)
    assert "SASL_AUTH" not in opcodes(peer)


@case({"bucket": "travle"}, None, errors.UnknownBucket, "there is no bucket 'travle'")
@case({}, Status.EACCESS, errors.AccessDenied, "give the user a role")
@case({"credentials": None}, Status.EACCESS, errors.AccessDenied, "no user has logged in")
@case({"bucket_was_seen": True}, Status.KEY_ENOENT, errors.BucketNotReady, "is not there at the moment")
def test_a_bucket_that_is_refused(
    options: dict[str, Any], status: Status | None, kind: type[errors.StatusError], words: str
) -> None:
    peer = Peer()
    if status is not None:
        peer.replace[SelectBucket] = lambda request: refused(request, status)
    error = failure(handshake(**options), peer)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize("kind", [Hello, SaslListMechanisms, SaslAuth, SaslStep, SelectBucket, GetClusterConfig])
def test_any_refusal_is_told_with_the_servers_words(kind: type[Request]) -> None:
    peer = Peer()
    peer.replace[kind] = lambda request: refused(request, Status.EBUSY, b'{"error":{"context":"come back later"}}')
    error = failure(handshake(), peer)
    assert isinstance(error, errors.StatusError)
    assert error.status == Status.EBUSY
    assert "EBUSY (come back later)" in str(error)


def test_a_false_server_cannot_skip_the_proof() -> None:
    peer = Peer()
    peer.replace[SaslAuth] = ok
    assert isinstance(failure(handshake(), peer), errors.UnexpectedMessage)


def test_a_false_server_cannot_make_up_the_signature() -> None:
    peer = Peer()
    peer.replace[SaslStep] = lambda request: ok(request, b"v=" + b"A" * 86 + b"==")
    error = failure(handshake(), peer)
    assert isinstance(error, errors.AuthenticationFailed)
    assert "could not show that it knows the password" in str(error)


# --- nonsense -----------------------------------------------------------------------------------------------------


@case(b"HTTP/1.1 400 Bad Request\r\n\r\n", errors.WrongProtocol, "bootstrap=http")
@case(b"H", errors.WrongProtocol, "bootstrap=http")
@case(b"\x15\x03\x01\x00\x02\x02\x46", errors.TlsFailed, "couchbases://")
@case(b"\x15", errors.TlsFailed, "couchbases://")
@case(b"\x16\x03\x03", errors.TlsFailed, "couchbases://")
@case(b"\x15\x04", errors.BadMagic, "key-value protocol")
@case(b"HELO", errors.BadMagic, "key-value protocol")
@case(b"SSH-2.0-OpenSSH_9.2\r\n", errors.BadMagic, "key-value protocol")
@case(b"\x00", errors.BadMagic, "key-value protocol")
def test_bytes_that_are_no_frames(data: bytes, kind: type[errors.HeadwaterError], hint: str) -> None:
    client = handshake()
    with pytest.raises(errors.HeadwaterError) as raised:
        client.receive_data(data)
    assert type(raised.value) is kind
    assert hint in raised.value.hint
    assert client.has_failed
    with pytest.raises(errors.LocalProtocolError, match="over"):
        client.receive_data(b"")


def test_bytes_that_are_no_frame_any_more() -> None:
    """Only the first bytes of a connection say what the server speaks."""
    client = handshake()
    client.receive_data(Peer().receive_data(client.data_to_send()))
    with pytest.raises(errors.HeadwaterError) as raised:
        client.receive_data(b"HTTP/1.1 400")
    assert type(raised.value) is errors.BadMagic


def test_an_answer_that_is_too_large() -> None:
    client = handshake()
    with pytest.raises(errors.FrameTooLarge):
        client.receive_data(b"\x81\x1f" + bytes(6) + b"\x7f\xff\xff\xff" + bytes(12))


@case_apart(lambda request: ok(Noop(opaque=request.opaque)), id="another opcode")
@case_apart(lambda request: HelloResponse(opaque=request.opaque + 1), id="another opaque")
@case_apart(lambda request: Noop(opaque=request.opaque), id="a request")
@case_apart(lambda request: ClustermapChangeNotification(epoch=1, revision=1), id="a notification")
def test_an_answer_to_something_else(answer: Callable[[Request], Response | Request]) -> None:
    peer = Peer()
    peer.replace[Hello] = answer
    assert isinstance(failure(handshake(), peer), errors.UnexpectedMessage)


def test_features_that_cannot_be_read() -> None:
    peer = Peer()
    peer.replace[Hello] = lambda request: ok(request, b"\0")
    assert isinstance(failure(handshake(), peer), errors.MalformedMessage)


@pytest.mark.parametrize(
    ("kind", "status"), [(SaslAuth, Status.AUTH_CONTINUE), (SaslStep, Status.AUTH_CONTINUE)], ids=["plain", "scram"]
)
def test_a_login_that_never_ends(kind: type[Request], status: Status) -> None:
    peer = Peer(mechanisms="PLAIN" if kind is SaslAuth else "SCRAM-SHA1")
    peer.replace[kind] = lambda request: ok(request, status=status)
    assert isinstance(failure(handshake(plain_allowed=True), peer), errors.UnexpectedMessage)


def test_the_server_closes_too_soon() -> None:
    client = handshake()
    with pytest.raises(errors.ConnectionClosed, match="closed the connection when Hello was to be answered"):
        client.receive_end()
    with pytest.raises(errors.LocalProtocolError):
        client.receive_end()

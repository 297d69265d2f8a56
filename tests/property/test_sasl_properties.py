"""SASL: any name, password and nonce can log in, and junk raises only the documented errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.client.handshake import ClientHandshake
from headwater.errors import AuthenticationFailed, MalformedMessage, RemoteProtocolError, StatusError, TlsFailed
from headwater.protocol.features import Opcode
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.session import ClustermapChangeNotification, HelloResponse
from headwater.protocol.sasl import (
    SCRAM_ITERATIONS_MIN,
    SCRAM_MECHANISMS,
    Credentials,
    Mechanism,
    PlainLogin,
    ScramClient,
    ScramCredentials,
    ScramServer,
    best_mechanism,
    derive_credentials,
    encode_nonce,
)
from support.message_strategies import only

SALT = b"sixteen bytes ok"
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
users = texts | st.text(",=2C3D", min_size=1, max_size=20)
nonces = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters=","), min_size=1, max_size=30)
nonce_bytes = nonces.map(str.encode)
mechanisms = st.sampled_from(SCRAM_MECHANISMS)
# Junk that looks like a message gets further than junk that does not.
junk = st.binary(max_size=80) | st.text("nyapcrsiv=,2C3D biws0149+/A\0é", max_size=80).map(str.encode)


@contextlib.contextmanager
def documented(message: bytes) -> Iterator[None]:
    """The two errors that a peer's message may lead to; any other goes through."""
    with only(MalformedMessage, within_bytes=len(message)), contextlib.suppress(AuthenticationFailed):
        yield


def lookup(mechanism: Mechanism, user: str) -> ScramCredentials:
    return derive_credentials(mechanism, "pencil", salt=SALT, iterations=SCRAM_ITERATIONS_MIN)


def started_server(mechanism: Mechanism) -> ScramServer:
    server = ScramServer(mechanism, lookup, b"server")
    server.start(b"n,,n=user,r=client")
    return server


def started_client(mechanism: Mechanism) -> ScramClient:
    client = ScramClient(mechanism, "user", "pencil", b"client")
    client.first()
    return client


@given(
    mechanism=mechanisms, user=users, password=texts | st.just(""), client_nonce=nonce_bytes, server_nonce=nonce_bytes
)
def test_any_user_can_log_in(
    mechanism: Mechanism, user: str, password: str, client_nonce: bytes, server_nonce: bytes
) -> None:
    def lookup_user(asked: Mechanism, name: str) -> ScramCredentials:
        assert (asked, name) == (mechanism, user)
        return derive_credentials(asked, password, salt=SALT, iterations=SCRAM_ITERATIONS_MIN)

    client = ScramClient(mechanism, user, password, client_nonce)
    server = ScramServer(mechanism, lookup_user, server_nonce)
    client.verify(server.finish(client.final(server.start(client.first()))))


@given(mechanism=mechanisms, right=texts, wrong=texts)
def test_no_other_password_logs_in(mechanism: Mechanism, right: str, wrong: str) -> None:
    def lookup_user(asked: Mechanism, name: str) -> ScramCredentials:
        return derive_credentials(asked, right, salt=SALT, iterations=SCRAM_ITERATIONS_MIN)

    client = ScramClient(mechanism, "user", wrong, b"client")
    server = ScramServer(mechanism, lookup_user, b"server")
    final = client.final(server.start(client.first()))
    if right == wrong:
        server.finish(final)
    else:
        with pytest.raises(AuthenticationFailed):
            server.finish(final)


@given(mechanism=mechanisms, message=junk)
@example(Mechanism.SCRAM_SHA1, b"n,,n=" + b"=" * 4000 + b",r=abc")
def test_junk_first_messages(mechanism: Mechanism, message: bytes) -> None:
    with documented(message):
        ScramServer(mechanism, lookup, b"server").start(message)


@given(mechanism=mechanisms, message=junk | junk.map(lambda rest: b"c=biws,r=clientserver," + rest))
@example(Mechanism.SCRAM_SHA1, b"c=biws,r=clientserver" + b"," * 4000)
def test_junk_final_messages(mechanism: Mechanism, message: bytes) -> None:
    server = started_server(mechanism)
    # A peer that guesses gets in with no junk: `documented` would let a success through.
    with documented(message):
        assert not server.finish(message)


@given(mechanism=mechanisms, message=junk | junk.map(lambda rest: b"r=clientserver," + rest))
@example(Mechanism.SCRAM_SHA1, b"r=clientserver,s=QUJD,i=" + b"9" * 4000)
def test_junk_first_messages_of_a_server(mechanism: Mechanism, message: bytes) -> None:
    client = started_client(mechanism)
    with documented(message):
        client.final(message)


@given(mechanism=mechanisms, message=junk | junk.map(lambda rest: b"v=" + rest))
def test_junk_final_messages_of_a_server(mechanism: Mechanism, message: bytes) -> None:
    client = started_client(mechanism)
    client.final(b"r=clientserver,s=QUJD,i=4096")
    with documented(message):
        client.verify(message)
        pytest.fail("junk was taken for a signature")


@given(mechanism=mechanisms, data=st.data())
def test_one_changed_byte_of_a_proof_never_logs_in(mechanism: Mechanism, data: st.DataObject) -> None:
    server = ScramServer(mechanism, lookup, b"server")
    client = ScramClient(mechanism, "user", "pencil", b"client")
    final = bytearray(client.final(server.start(client.first())))
    # The last characters of base64 have bits that carry nothing, so another character may say the same.
    final[data.draw(st.integers(0, len(final) - 4))] ^= data.draw(st.integers(1, 255))
    with documented(bytes(final)):
        server.finish(bytes(final))
        pytest.fail("a changed message logged in")


@given(user=users, password=texts | st.just(""))
def test_plain_round_trip(user: str, password: str) -> None:
    login = PlainLogin(user, password)
    assert PlainLogin.decode(login.encode()) == login


@given(st.binary(max_size=60) | st.text("\0aé", max_size=20).map(str.encode))
def test_junk_plain_messages(message: bytes) -> None:
    with documented(message):
        login = PlainLogin.decode(message)
        assert PlainLogin.decode(login.encode()) == login


@given(st.binary(max_size=60) | st.lists(st.sampled_from([*Mechanism, "", "CRAM-MD5"])).map(" ".join).map(str.encode))
def test_any_list_of_mechanisms_gives_an_offered_one_or_none(offered: bytes) -> None:
    with contextlib.suppress(AuthenticationFailed):
        assert best_mechanism(offered, plain_allowed=True).encode() in offered


# --- the client's handshake: cut anywhere, its outcome is the same; and junk raises only what is documented -----------

NONCE = encode_nonce(b"client" * 3)
CONFIG = b'{"rev": 1}'
HELLO = HelloResponse(opaque=0).encode()
SELECTED = PlainResponse(opcode=Opcode.SELECT_BUCKET, opaque=1).encode()
CONFIGURED = PlainResponse(opcode=Opcode.GET_CLUSTER_CONFIG, opaque=2, value=CONFIG).encode()
PUSHED = ClustermapChangeNotification(epoch=1, revision=7, value=b"{}").encode()


def handshake(credentials: Credentials | None = None) -> ClientHandshake:
    return ClientHandshake(credentials=credentials, bucket="travel", nonce=NONCE)


@given(
    pushes=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    trailing=st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_cut_anywhere_the_outcome_is_the_same(pushes: tuple[int, int], trailing: bytes, cuts: list[int]) -> None:
    data = HELLO + PUSHED * pushes[0] + SELECTED + PUSHED * pushes[1] + CONFIGURED + trailing
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    client, at = handshake(), 0
    for end in ends:
        if client.outcome is not None:
            break
        client.receive_data(data[at:end])
        at = end
    assert client.outcome.cluster_config == CONFIG
    assert client.trailing_data + data[at:] == trailing


@given(st.lists(st.binary(max_size=80), max_size=5), st.booleans(), st.sampled_from([b"", HELLO, HELLO + SELECTED]))
def test_junk_raises_documented_errors(junk: list[bytes], logs_in: bool, good: bytes) -> None:
    client = handshake(Credentials("ann", "pencil") if logs_in else None)
    with suppress(RemoteProtocolError, StatusError, TlsFailed):
        for data in (good, *junk):
            client.receive_data(data)
            if client.outcome is not None:
                break
        return
    assert client.has_failed

"""SASL: the published SCRAM exchanges byte for byte, every way to fail, and PLAIN."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass

import pytest

from headwater.errors import AuthenticationFailed, LocalProtocolError, MalformedMessage
from headwater.protocol.sasl import (
    SASL_MESSAGE_BYTES_MAX,
    SCRAM_ITERATIONS_MAX,
    SCRAM_ITERATIONS_MIN,
    SCRAM_MECHANISMS,
    SCRAM_SALT_BYTES,
    USER_CHARS_MAX,
    Mechanism,
    PlainLogin,
    ScramClient,
    ScramCredentials,
    ScramServer,
    best_mechanism,
    decoy_credentials,
    derive_credentials,
    digest_bytes,
    encode_nonce,
    password_matches,
)
from headwater.protocol.status import Status
from support.cases import case, each

ITERATIONS = 4096
SALT = b"sixteen bytes ok"
SECRET = b"the secret of a node"
PASSWORD = "pencil"


def lookup(mechanism: Mechanism, user: str) -> ScramCredentials:
    """One user, `user` with the password `pencil`."""
    if user == "user":
        return derive_credentials(mechanism, PASSWORD, salt=SALT, iterations=ITERATIONS)
    return decoy_credentials(mechanism, user, secret=SECRET, iterations=ITERATIONS)


def new_server(mechanism: Mechanism = Mechanism.SCRAM_SHA256) -> ScramServer:
    return ScramServer(mechanism, lookup, b"server-nonce")


def new_client(
    mechanism: Mechanism = Mechanism.SCRAM_SHA256, *, user: str = "user", password: str = PASSWORD
) -> ScramClient:
    return ScramClient(mechanism, user, password, b"client nonce")


# --- the published exchanges --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    mechanism: Mechanism
    client_first: bytes
    server_first: bytes
    client_final: bytes
    server_final: bytes

    @property
    def client_nonce(self) -> bytes:
        return self.client_first.partition(b",r=")[2]

    @property
    def server_nonce(self) -> bytes:
        return self.server_first.partition(b",")[0].removeprefix(b"r=" + self.client_nonce)

    def lookup(self, mechanism: Mechanism, user: str) -> ScramCredentials:
        assert (mechanism, user) == (self.mechanism, "user")
        salt = base64.b64decode(self.server_first.partition(b",s=")[2].partition(b",")[0])
        return derive_credentials(mechanism, PASSWORD, salt=salt, iterations=4096)


PUBLISHED = {
    "RFC 5802, section 5": Published(
        Mechanism.SCRAM_SHA1,
        b"n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
        b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    "RFC 7677, section 3": Published(
        Mechanism.SCRAM_SHA256,
        b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
}


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_the_client_sends_the_published_messages(published: Published) -> None:
    client = ScramClient(published.mechanism, "user", PASSWORD, published.client_nonce)
    assert client.first() == published.client_first
    assert client.final(published.server_first) == published.client_final
    client.verify(published.server_final)


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_the_server_sends_the_published_messages(published: Published) -> None:
    server = ScramServer(published.mechanism, published.lookup, published.server_nonce)
    assert server.start(published.client_first) == published.server_first
    assert server.finish(published.client_final) == published.server_final
    assert server.user == "user"


def test_sha512_keys_come_from_the_published_salted_password() -> None:
    """No RFC has an exchange with SHA-512; the salted password is from ns_server's own test of `scram_sha`."""
    salt = "31uxbpP++gOzRdXBY3iOdIeTm/3dutkz/58VFKfZzffcYrNAm8D1YNDLjjf1AfUGckWFB63nQjUQHyo2fXZC/g=="
    salted = "GB1lsONsRtKXyL59L84/2sYQTTVL6d7dplmhNN2dpys+wJr5UY3hfAj4zK3ZatjQkUZHjnlAtrZzvjpzQboNcg=="
    credentials = derive_credentials(
        Mechanism.SCRAM_SHA512, "4149a7598deb1a04e2ea7ac8d915f6c3", salt=base64.b64decode(salt), iterations=4000
    )
    salted_password = base64.b64decode(salted)
    client_key = hmac.new(salted_password, b"Client Key", hashlib.sha512).digest()
    assert credentials.stored_key == hashlib.sha512(client_key).digest()
    assert credentials.server_key == hmac.new(salted_password, b"Server Key", hashlib.sha512).digest()


# --- log-ins ------------------------------------------------------------------------------------------------------


def test_an_unknown_user_fails_as_a_wrong_password_does() -> None:
    failures = []
    for user in ("user", "stranger"):
        client, server = new_client(user=user, password="crayon"), new_server()
        server_first = server.start(client.first())
        assert server_first.endswith(b",i=4096")
        with pytest.raises(AuthenticationFailed) as failure:
            server.finish(client.final(server_first))
        assert failure.value.status == Status.AUTH_ERROR
        failures.append(str(failure.value))
    assert failures[0] == failures[1]


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_decoys_look_like_credentials_and_stay_the_same(mechanism: Mechanism) -> None:
    def decoys(user: str, secret: bytes = SECRET) -> ScramCredentials:
        return decoy_credentials(mechanism, user, secret=secret, iterations=ITERATIONS)

    decoy = decoys("stranger")
    assert decoy == decoys("stranger")
    assert decoy.iterations == ITERATIONS
    assert len(decoy.salt) == SCRAM_SALT_BYTES
    assert len(decoy.stored_key) == len(decoy.server_key) == digest_bytes(mechanism)
    assert len({decoy.salt, decoys("another").salt, decoys("stranger", b"another secret").salt}) == 3


@pytest.mark.parametrize(
    ("user", "on_the_wire"),
    [("a,b", b"a=2Cb"), ("a=b", b"a=3Db"), ("=2C", b"=3D2C"), ("=,=", b"=3D=2C=3D"), ("Zoë 漢", "Zoë 漢".encode())],
)
def test_user_names_are_escaped(user: str, on_the_wire: bytes) -> None:
    first = new_client(user=user).first()
    assert first == b"n,,n=" + on_the_wire + b",r=client nonce"
    server = new_server()
    server.start(first)
    assert server.user == user


def prove(first_bare: bytes, server_first: bytes, without_proof: bytes) -> bytes:
    """A final message by one who knows the password, whatever else the message says; straight from RFC 5802."""
    salted = hashlib.pbkdf2_hmac("sha256", PASSWORD.encode(), SALT, ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    auth_message = first_bare + b"," + server_first + b"," + without_proof
    signature = hmac.digest(hashlib.sha256(client_key).digest(), auth_message, "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return without_proof + b",p=" + base64.b64encode(proof)


@case(b"n,,", b"n=user,r=abc", b"c=biws,r=abcserver-nonce")
# RFC 5802, section 6: "y" is right where the server does not advertise channel binding.
@case(b"y,,", b"n=user,r=abc", b"c=eSws,r=abcserver-nonce")
@case(b"n,a=user,", b"n=user,r=abc", b"c=bixhPXVzZXIs,r=abcserver-nonce")
# Unknown extensions are ignored, but they are proven as all the rest is.
@case(b"n,,", b"n=user,r=abc,x=later", b"c=biws,r=abcserver-nonce,y=later,z=still")
def test_other_forms_of_a_log_in(header: bytes, first_bare: bytes, without_proof: bytes) -> None:
    server = new_server()
    server_first = server.start(header + first_bare)
    assert server.finish(prove(first_bare, server_first, without_proof)).startswith(b"v=")


@pytest.mark.parametrize(
    "without_proof",
    [b"c=biws,r=abcanother-nonce", b"c=biws,r=abc", b"c=eSws,r=abcserver-nonce", b"c=,r=abcserver-nonce"],
)
def test_the_password_does_not_make_up_for_another_nonce_or_header(without_proof: bytes) -> None:
    server = new_server()
    server_first = server.start(b"n,,n=user,r=abc")
    with pytest.raises(AuthenticationFailed):
        server.finish(prove(b"n=user,r=abc", server_first, without_proof))


# --- tampered with on the way -------------------------------------------------------------------------------------


# The client said "n", another made it "y": the final message shows it.
@case("client first", b"n,,", b"y,,")
@case("server first", b",i=4096", b",i=4097")
@case("server first", b",s=", b",s=AAAA")
@case("client final", b"server-nonce", b"server-nonsense")
@case("client final", b"c=biws", b"c=eSws")
@case("client final", b",p=", b",x=y,p=")
def test_a_message_that_was_changed_on_its_way_fails(step: str, old: bytes, new: bytes) -> None:
    client, server = new_client(), new_server()

    def sent(which: str, message: bytes) -> bytes:
        assert which != step or old in message
        return message.replace(old, new, 1) if which == step else message

    final = client.final(sent("server first", server.start(sent("client first", client.first()))))
    with pytest.raises(AuthenticationFailed):
        server.finish(sent("client final", final))


def test_a_proof_serves_one_challenge_only() -> None:
    client, server = new_client(), new_server()
    final = client.final(server.start(client.first()))
    server.finish(final)
    other = ScramServer(Mechanism.SCRAM_SHA256, lookup, b"another-nonce")
    other.start(new_client().first())
    with pytest.raises(AuthenticationFailed):
        other.finish(final)


@case(b"v=" + base64.b64encode(bytes(32)), "could not show that it knows")
@case(b"e=invalid-proof", "'invalid-proof'")
def test_a_client_takes_no_other_last_message(server_final: bytes, reason: str) -> None:
    client, server = new_client(), new_server()
    client.final(server.start(client.first()))
    with pytest.raises(AuthenticationFailed, match=reason):
        client.verify(server_final)


@pytest.mark.parametrize("nonce", [b"client nonce", b"another nonce and more", b"client"])
def test_a_server_nonce_that_does_not_continue_ours_fails(nonce: bytes) -> None:
    client = new_client()
    client.first()
    with pytest.raises(AuthenticationFailed, match="does not continue ours"):
        client.final(b"r=" + nonce + b",s=QSXCR+Q6sek8bf92,i=4096")


@pytest.mark.parametrize("iterations", [1, SCRAM_ITERATIONS_MIN - 1, SCRAM_ITERATIONS_MAX + 1, 9_999_999_999])
def test_a_client_refuses_iteration_counts_out_of_bounds(iterations: int) -> None:
    client = new_client()
    client.first()
    with pytest.raises(AuthenticationFailed, match=f"asks for {iterations} iterations"):
        client.final(b"r=client nonce and more,s=QSXCR+Q6sek8bf92,i=%d" % iterations)


def test_the_least_iteration_count_can_be_lowered() -> None:
    client = ScramClient(Mechanism.SCRAM_SHA1, "user", PASSWORD, b"abc", iterations_min=10)
    client.first()
    assert client.final(b"r=abcdef,s=QSXCR+Q6sek8bf92,i=10").startswith(b"c=biws,r=abcdef,p=")


# --- malformed ----------------------------------------------------------------------------------------------------

TOO_LONG = b"n,,n=user,r=" + b"r" * SASL_MESSAGE_BYTES_MAX


@each("client_first", [
    b"", b"n", b"n,", b"n,,", b"p=tls-unique,,n=user,r=abc", b"x,,n=user,r=abc", b"n,user,n=user,r=abc",
    b"n,,r=abc,n=user", b"n,,m=must,n=user,r=abc", b"n,,n=user", b"n,,n=user,r=", b"n,,n=,r=abc", b"n,,n=a=b,r=abc",
    b"n,,n=a=2c,r=abc", b"n,,n=a=,r=abc", b"n,,n=a\0b,r=abc", b"n,,n=\xff,r=abc", b"n,,n=user,r=tab\t",
    b"n,,n=user,r=\x7f", b"n,,n=user,r=\xc3\xab", b"n,,n=" + b"u" * (USER_CHARS_MAX + 1) + b",r=abc", TOO_LONG,
])  # fmt: skip
def test_a_malformed_first_message_is_refused(client_first: bytes) -> None:
    with pytest.raises(MalformedMessage) as error:
        new_server().start(client_first)
    assert "EINVAL" in error.value.hint


def test_to_act_for_another_user_is_refused() -> None:
    new_server().start(b"n,a=user,n=user,r=abc")
    with pytest.raises(AuthenticationFailed, match="act for another user"):
        new_server().start(b"n,a=admin,n=user,r=abc")


@each("client_final", [
    b"", b"c=biws", b"c=biws,r=abcserver-nonce", b"r=abcserver-nonce,c=biws,p=" + base64.b64encode(bytes(32)),
    b"c=biws,r=abcserver-nonce,p=", b"c=biws,r=abcserver-nonce,p=!!!!",
    b"c=biws,r=abcserver-nonce,p=" + base64.b64encode(bytes(31)),
    b"c=biws,r=abcserver-nonce,p=" + base64.b64encode(bytes(32)) + b",x=y", b"c=biws,r=abcserver-nonce,x=y", TOO_LONG,
])  # fmt: skip
def test_a_malformed_final_message_is_refused(client_final: bytes) -> None:
    server = new_server()
    server.start(b"n,,n=user,r=abc")
    with pytest.raises(MalformedMessage):
        server.finish(client_final)


@each("server_first", [
    b"", b"r=client nonce and more", b"r=client nonce and more,s=QSXCR+Q6sek8bf92",
    b"r=client nonce and more,i=4096,s=QSXCR+Q6sek8bf92", b"r=client nonce and more,s=,i=4096",
    b"r=client nonce and more,s=?,i=4096", b"r=client nonce and more,s===,i=4096",
    b"r=client nonce and more,s=QSXCR+Q6sek8bf92,i=", b"r=client nonce and more,s=QSXCR+Q6sek8bf92,i=0",
    b"r=client nonce and more,s=QSXCR+Q6sek8bf92,i=-4096", b"r=client nonce and more,s=QSXCR+Q6sek8bf92,i=4_096",
    b"r=client nonce and more,s=QSXCR+Q6sek8bf92,i=99999999999",
    b"m=must,r=client nonce and more,s=QSXCR+Q6sek8bf92,i=4096", TOO_LONG,
])  # fmt: skip
def test_a_malformed_message_of_the_server_is_refused(server_first: bytes) -> None:
    client = new_client()
    client.first()
    with pytest.raises(MalformedMessage) as error:
        client.final(server_first)
    assert "check that the server" in error.value.hint


@pytest.mark.parametrize("server_final", [b"", b"v=", b"v=?", b"x=y", b"v", TOO_LONG])
def test_a_malformed_signature_is_refused(server_final: bytes) -> None:
    client, server = new_client(), new_server()
    client.final(server.start(client.first()))
    with pytest.raises(MalformedMessage):
        client.verify(server_final)


# --- our own caller -----------------------------------------------------------------------------------------------


def test_calls_out_of_turn_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"finish\(\) out of turn: start\(\) is due"):
        new_server().finish(b"")
    with pytest.raises(LocalProtocolError, match=r"verify\(\) out of turn: first\(\) is due"):
        new_client().verify(b"")
    with pytest.raises(LocalProtocolError, match=r"final\(\) out of turn"):
        new_client().final(b"")


def test_an_exchange_that_failed_is_over() -> None:
    client, server = new_client(password="crayon"), new_server()
    final = client.final(server.start(client.first()))
    with pytest.raises(AuthenticationFailed):
        server.finish(final)
    with pytest.raises(LocalProtocolError, match="nothing more is due"):
        server.finish(final)


@pytest.mark.parametrize("nonce", [b"", b"a,b", b"\n", b"\xff"])
def test_a_nonce_of_ours_must_be_printable(nonce: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="nonce"):
        ScramClient(Mechanism.SCRAM_SHA1, "user", PASSWORD, nonce)
    with pytest.raises(LocalProtocolError, match="nonce"):
        ScramServer(Mechanism.SCRAM_SHA1, lookup, nonce)


@pytest.mark.parametrize("user", ["", "a\0b", "u" * (USER_CHARS_MAX + 1), "\udcff"])
def test_an_impossible_user_name_is_refused(user: str) -> None:
    with pytest.raises(LocalProtocolError, match="user name"):
        new_client(user=user)
    with pytest.raises(LocalProtocolError, match="user name"):
        PlainLogin(user, PASSWORD).encode()


def test_plain_is_not_a_scram_mechanism() -> None:
    with pytest.raises(LocalProtocolError):
        ScramServer(Mechanism.PLAIN, lookup, b"abc")
    with pytest.raises(LocalProtocolError):
        ScramClient(Mechanism.PLAIN, "user", PASSWORD, b"abc")


def test_a_nonce_is_made_of_enough_randomness() -> None:
    assert encode_nonce(bytes(range(18))) == b"AAECAwQFBgcICQoLDA0ODxAR"
    with pytest.raises(LocalProtocolError, match="at least 16"):
        encode_nonce(bytes(15))


# --- PLAIN and the choice of a mechanism --------------------------------------------------------------------------


def test_plain_round_trip() -> None:
    assert PlainLogin("@admin", "password").encode() == b"\0@admin\0password"
    assert PlainLogin.decode(b"\0@admin\0password") == PlainLogin("@admin", "password")
    assert PlainLogin.decode(b"ann\0ann\0pass,word=") == PlainLogin("ann", "pass,word=")
    assert PlainLogin.decode(b"\0ann\0") == PlainLogin("ann", "")


@pytest.mark.parametrize(
    "message",
    [b"", b"ann", b"ann\0secret", b"\0\0secret", b"\0ann\0secret\0", b"\0ann\0\xff", b"\0ann\0" + bytes(5000)],
)
def test_a_malformed_plain_message_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedMessage) as error:
        PlainLogin.decode(message)
    assert "secret" not in str(error.value)


def test_plain_cannot_act_for_another_user_either() -> None:
    with pytest.raises(AuthenticationFailed, match="act for another user"):
        PlainLogin.decode(b"admin\0ann\0secret")


@pytest.mark.parametrize("password", ["a\0b", "x" * SASL_MESSAGE_BYTES_MAX, "\udcff"])
def test_plain_cannot_carry_every_password(password: str) -> None:
    with pytest.raises(LocalProtocolError):
        PlainLogin("ann", password).encode()


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_a_password_is_checked_against_scram_credentials(mechanism: Mechanism) -> None:
    credentials = lookup(mechanism, "user")
    assert password_matches(mechanism, PASSWORD, credentials)
    assert not password_matches(mechanism, "crayon", credentials)
    assert not password_matches(mechanism, PASSWORD, lookup(mechanism, "stranger"))


def test_secrets_are_in_no_repr() -> None:
    credentials = lookup(Mechanism.SCRAM_SHA1, "user")
    assert repr(credentials) == f"ScramCredentials(iterations={ITERATIONS})"
    assert PASSWORD not in repr(PlainLogin("ann", PASSWORD))


@case(b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN", Mechanism.SCRAM_SHA512)
@case(b"PLAIN SCRAM-SHA1 SCRAM-SHA256", Mechanism.SCRAM_SHA256)
@case(b"CRAM-MD5 PLAIN SCRAM-SHA1", Mechanism.SCRAM_SHA1)
def test_the_best_mechanism_is_chosen_whatever_the_order(offered: bytes, best: Mechanism) -> None:
    assert best_mechanism(offered) is best


def test_plain_is_chosen_only_where_it_is_allowed() -> None:
    assert best_mechanism(b"CRAM-MD5 PLAIN", plain_allowed=True) is Mechanism.PLAIN
    assert best_mechanism(b"PLAIN SCRAM-SHA1", plain_allowed=True) is Mechanism.SCRAM_SHA1
    with pytest.raises(AuthenticationFailed, match="TLS"):
        best_mechanism(b"CRAM-MD5 PLAIN")
    with pytest.raises(AuthenticationFailed):
        best_mechanism(b"", plain_allowed=True)


def test_mechanisms_by_name() -> None:
    assert Mechanism.decode(b"SCRAM-SHA512") is Mechanism.SCRAM_SHA512
    with pytest.raises(AuthenticationFailed, match="unknown"):
        Mechanism.decode(b"SCRAM-SHA-512")

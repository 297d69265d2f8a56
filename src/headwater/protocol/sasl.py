"""SASL: how a client proves who it is. SCRAM (RFC 5802) and PLAIN (RFC 4616) as Couchbase uses them, both sides.

A SCRAM exchange is four messages, two in each direction, and the password is in none of them:

    client first    n,,n=USER,r=CLIENT-NONCE
    server first    r=CLIENT-NONCE SERVER-NONCE,s=SALT,i=ITERATIONS
    client final    c=biws,r=CLIENT-NONCE SERVER-NONCE,p=PROOF
    server final    v=SIGNATURE

Both ends stretch the password with the salt. The proof shows that the client knows the password, the signature shows
that the server has what was once made from it. The server keeps two keys per mechanism, neither enough to log in.

Couchbase's dialect: the mechanisms have no hyphen before the number (SCRAM-SHA512), there is no channel binding, names
and passwords are UTF-8 as they are with no SASLprep, and a nonce may contain spaces, as the Python SDK's does.

Three errors come out of here, and no others:

* `MalformedMessage`: the peer's message cannot be read;
* `AuthenticationFailed`: it can, and the log-in fails. It never says whether the user exists;
* `LocalProtocolError`: our own caller gave an impossible value, or made a call out of turn.

Nonces come in as arguments: this file knows no randomness.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from headwater.errors import AuthenticationFailed, LocalProtocolError, MalformedMessage
from headwater.protocol.status import Status

SASL_MESSAGE_BYTES_MAX = 4096
"""Far above any real message: two nonces, a salt and a name."""

USER_CHARS_MAX = 128
"""What a Couchbase cluster allows."""

NONCE_RANDOM_BYTES_MIN = 16

SCRAM_SALT_BYTES = 16

_SALTED_PASSWORDS_MAX = 64
"""That a client remembers."""

SCRAM_ITERATIONS = 15_000
"""For new passwords: what a Couchbase cluster of today uses."""

SCRAM_ITERATIONS_MIN = 4_000
"""A client takes no fewer: a server that asks for one iteration wants a proof that is cheap to guess from. RFC 5802
says 4096, but Couchbase clusters long had 4000 (ns_server's `memcached_password_hash_iterations`): that is the line."""

SCRAM_ITERATIONS_MAX = 1_000_000
"""A client takes no more: the work is the client's, about a second of it here, and a hostile server could ask for an
hour."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who logs in. The password is shown in no repr."""

    user: str
    password: str = field(repr=False)


# --- mechanisms ---------------------------------------------------------------------------------------------------


class Mechanism(StrEnum):
    """The mechanisms by the names Couchbase gives them, best first."""

    SCRAM_SHA512 = "SCRAM-SHA512"
    SCRAM_SHA256 = "SCRAM-SHA256"
    SCRAM_SHA1 = "SCRAM-SHA1"
    PLAIN = "PLAIN"

    @classmethod
    def decode(cls, name: bytes) -> Mechanism:
        """The mechanism a client asks for; `AuthenticationFailed` for an unknown one."""
        mechanism = _BY_NAME.get(name)
        if mechanism is None:
            raise _failed("the mechanism is unknown", hint=f"Use one of {', '.join(Mechanism)}")
        return mechanism


_BY_NAME = {mechanism.encode(): mechanism for mechanism in Mechanism}
_HASHES = {Mechanism.SCRAM_SHA512: "sha512", Mechanism.SCRAM_SHA256: "sha256", Mechanism.SCRAM_SHA1: "sha1"}
SCRAM_MECHANISMS = tuple(_HASHES)


def is_loopback_address(host: str) -> bool:
    """Whether what is sent to, or comes from, this IP address stays on this machine.

    There a password may be sent in clear (PLAIN, and HTTP's basic authentication). What is no IP address is elsewhere.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def best_mechanism(offered: bytes, *, plain_allowed: bool = False) -> Mechanism:
    """The best mechanism of those a server lists, separated by spaces.

    PLAIN shows the password to anyone who listens, and to a false server, so it is taken only where the caller says
    that the connection is safe.
    """
    names = frozenset(offered.split(b" "))
    usable = tuple(Mechanism) if plain_allowed else SCRAM_MECHANISMS
    for mechanism in usable:
        if mechanism.encode() in names:
            return mechanism
    raise _failed(
        f"the server offers none of {', '.join(usable)}", hint="Use TLS if PLAIN is all it has, or check the port"
    )


def _failed(reason: str, *, hint: str = "") -> AuthenticationFailed:
    return AuthenticationFailed(Status.AUTH_ERROR, reason, hint=hint)


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{what} cannot be written in UTF-8", hint="Check the terminal's encoding") from error


def _check_user(user: str) -> None:
    if not 0 < len(user) <= USER_CHARS_MAX or "\0" in user:
        raise LocalProtocolError(f"a user name has 1 to {USER_CHARS_MAX} characters, none of them NUL")


def _check_authzid(authzid: str, user: str) -> None:
    # Couchbase ignores it. To ignore it silently would let a client believe that it acts for another user.
    if authzid not in ("", user):
        raise _failed("to act for another user is not supported", hint="Leave the authorization id empty")


# --- PLAIN --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainLogin:
    """A user name and a password as PLAIN carries them: in clear, and shown in no repr."""

    user: str
    password: str = field(repr=False)

    def encode(self) -> bytes:
        _check_user(self.user)
        if "\0" in self.password:
            raise LocalProtocolError("PLAIN cannot carry a password with NUL in it", hint="Use SCRAM, or another one")
        message = b"\0".join((b"", _utf8(self.user, "the user name"), _utf8(self.password, "the password")))
        if len(message) > SASL_MESSAGE_BYTES_MAX:
            raise LocalProtocolError(f"a user name and password of more than {SASL_MESSAGE_BYTES_MAX} bytes")
        return message

    @classmethod
    def decode(cls, message: bytes) -> PlainLogin:
        """From `authzid NUL user NUL password`."""
        if len(message) > SASL_MESSAGE_BYTES_MAX:
            raise MalformedMessage(f"a PLAIN message of more than {SASL_MESSAGE_BYTES_MAX} bytes")
        try:
            parts = message.decode().split("\0")
        except UnicodeDecodeError as error:
            # Not chained: the original error would carry the password into every traceback.
            raise MalformedMessage("a PLAIN message that is not UTF-8", offset=error.start) from None
        if len(parts) != 3 or not 0 < len(parts[1]) <= USER_CHARS_MAX:
            raise MalformedMessage("a PLAIN message is an authorization id, a user name and a password, NUL between")
        authzid, user, password = parts
        _check_authzid(authzid, user)
        return cls(user, password)


# --- SCRAM: keys --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScramCredentials:
    """What a server keeps of a password for one mechanism. The keys are shown in no repr."""

    salt: bytes = field(repr=False)
    iterations: int
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


LookupCredentials = Callable[[Mechanism, str], ScramCredentials]
"""Gives the credentials of a user, and `decoy_credentials` for a user that does not exist."""


def digest_bytes(mechanism: Mechanism) -> int:
    """The length of the mechanism's keys."""
    return hashlib.new(_hash(mechanism)).digest_size


def derive_credentials(mechanism: Mechanism, password: str, *, salt: bytes, iterations: int) -> ScramCredentials:
    """What a server keeps instead of the password."""
    salted = _salted_password(mechanism, password, salt=salt, iterations=iterations)
    return ScramCredentials(
        salt=salt,
        iterations=iterations,
        stored_key=_digest(mechanism, _client_key(mechanism, salted)),
        server_key=_server_key(mechanism, salted),
    )


def decoy_credentials(mechanism: Mechanism, user: str, *, secret: bytes, iterations: int) -> ScramCredentials:
    """Credentials for a user that does not exist, so that only the proof fails, as with a wrong password.

    They depend on the name alone, because a salt that changes from one try to the next would give the user away. The
    secret keeps others from working them out. No client key is known whose hash is the stored key.
    """

    def derive(label: bytes) -> bytes:
        return hmac.digest(secret, b"\0".join((label, mechanism.encode(), _utf8(user, "the user name"))), "sha512")

    key_bytes = digest_bytes(mechanism)
    return ScramCredentials(
        salt=derive(b"salt")[:SCRAM_SALT_BYTES],
        iterations=iterations,
        stored_key=derive(b"stored key")[:key_bytes],
        server_key=derive(b"server key")[:key_bytes],
    )


def password_matches(mechanism: Mechanism, password: str, credentials: ScramCredentials) -> bool:
    """Whether the credentials were made from this password: how PLAIN is checked where no password is kept."""
    derived = derive_credentials(mechanism, password, salt=credentials.salt, iterations=credentials.iterations)
    return hmac.compare_digest(derived.stored_key, credentials.stored_key)


def _hash(mechanism: Mechanism) -> str:
    if mechanism not in _HASHES:
        raise LocalProtocolError(f"{mechanism} is not a SCRAM mechanism")
    return _HASHES[mechanism]


def _digest(mechanism: Mechanism, data: bytes) -> bytes:
    return hashlib.new(_hash(mechanism), data).digest()


def _hmac(mechanism: Mechanism, key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, _hash(mechanism))


def _salted_password(mechanism: Mechanism, password: str, *, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac(_hash(mechanism), _utf8(password, "the password"), salt, iterations)


_remembered_salted_password = lru_cache(maxsize=_SALTED_PASSWORDS_MAX)(_salted_password)
"""For clients, as RFC 5802 advises in section 5.1: with the same salt they need not work it out for each connection."""


def _client_key(mechanism: Mechanism, salted_password: bytes) -> bytes:
    return _hmac(mechanism, salted_password, b"Client Key")


def _server_key(mechanism: Mechanism, salted_password: bytes) -> bytes:
    return _hmac(mechanism, salted_password, b"Server Key")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


# --- SCRAM: messages ----------------------------------------------------------------------------------------------

_NONCE = re.compile(rb"[\x20-\x2b\x2d-\x7e]+")
"""Printable, no comma. RFC 5802 has no space either, but the Python SDK does."""

_ESCAPED_NAME = re.compile(rb"(?:[^\0,=]|=2C|=3D)+")
_ITERATIONS = re.compile(rb"[1-9][0-9]{0,9}")
_SERVER_MESSAGE_HINT = "Close the connection, and check that the server speaks Couchbase's SCRAM"


def encode_nonce(random: bytes) -> bytes:
    """A nonce from random bytes, which the caller draws."""
    if len(random) < NONCE_RANDOM_BYTES_MIN:
        raise LocalProtocolError(f"a nonce needs at least {NONCE_RANDOM_BYTES_MIN} random bytes")
    return base64.b64encode(random)


def _check_nonce(nonce: bytes) -> bytes:
    if not _NONCE.fullmatch(nonce):
        raise LocalProtocolError("a nonce is printable ASCII with no comma, and not empty")
    return nonce


def _escape(user: str) -> bytes:
    return _utf8(user, "the user name").replace(b"=", b"=3D").replace(b",", b"=2C")


class _Reader:
    """Reads a SCRAM message field by field; the commas are between the fields."""

    def __init__(self, message: bytes, *, hint: str = "") -> None:
        self.message = message
        self.offset = 0
        """Where the field last read begins."""
        self.end = -1
        """Where it ends: at its comma, or at the end of the message."""
        self._hint = hint
        if len(message) > SASL_MESSAGE_BYTES_MAX:
            raise self.malformed(f"a SCRAM message of more than {SASL_MESSAGE_BYTES_MAX} bytes")

    def malformed(self, reason: str) -> MalformedMessage:
        return MalformedMessage(reason, offset=self.offset, hint=self._hint)

    @property
    def at_end(self) -> bool:
        return self.end == len(self.message)

    def field(self) -> bytes:
        if self.at_end:
            raise self.malformed("a SCRAM message that ends too soon")
        self.offset = self.end + 1
        comma = self.message.find(b",", self.offset)
        self.end = len(self.message) if comma < 0 else comma
        return self.message[self.offset : self.end]

    def attribute(self, name: str) -> bytes:
        """The value of the next field, which must be this attribute: the order is fixed (RFC 5802, section 5)."""
        field = self.field()
        if not field.startswith(name.encode() + b"="):
            raise self.malformed(f"a SCRAM message without {name}= where it belongs")
        return field[2:]

    def gs2_header(self) -> str:
        """Reads over the header of a client's first message, and gives the authorization id in it."""
        # "y" is a client that could bind the channel and sees that we cannot, which is true.
        if self.field() not in (b"n", b"y"):
            raise self.malformed("channel binding is not supported")
        authzid = self.field()
        if not authzid:
            return ""
        if not authzid.startswith(b"a="):
            raise self.malformed("an authorization id without a=")
        return self.name(authzid[2:])

    def nonce(self) -> bytes:
        nonce = self.attribute("r")
        if not _NONCE.fullmatch(nonce):
            raise self.malformed("a nonce that is empty or not printable")
        return nonce

    def name(self, value: bytes) -> str:
        """A name without its escapes. "=" must be the start of one (RFC 5802, section 5.1)."""
        if not _ESCAPED_NAME.fullmatch(value):
            raise self.malformed("a user name that is empty, or has = other than in =2C and =3D")
        try:
            name = value.replace(b"=2C", b",").replace(b"=3D", b"=").decode()
        except UnicodeDecodeError as error:
            raise self.malformed("a user name that is not UTF-8") from error
        if len(name) > USER_CHARS_MAX:
            raise self.malformed(f"a user name of more than {USER_CHARS_MAX} characters")
        return name

    def base64(self, value: bytes) -> bytes:
        try:
            decoded = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise self.malformed("an attribute that is not base64") from error
        if not decoded:
            raise self.malformed("an attribute that is empty")
        return decoded

    def proof(self, proof_bytes: int) -> bytes:
        """The proof, which is the last attribute; there may be extensions before it, to be ignored."""
        field = self.field()
        while not field.startswith(b"p="):
            field = self.field()
        proof = self.base64(field[2:])
        if not self.at_end or len(proof) != proof_bytes:
            raise self.malformed(f"a proof that is not {proof_bytes} bytes at the end of the message")
        return proof


class _Turns:
    """Lets the calls of an exchange happen in their order, each of them once, whether they succeed or fail."""

    def __init__(self, *calls: str) -> None:
        self._left = list(calls)

    def take(self, call: str) -> None:
        if not self._left or self._left[0] != call:
            due = f"{self._left[0]}()" if self._left else "nothing more"
            raise LocalProtocolError(
                f"{call}() out of turn: {due} is due", hint="Begin a new exchange for a new log-in"
            )
        del self._left[0]


# --- SCRAM: the two ends ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Challenge:
    """What the server must remember from its first message to the client's proof."""

    credentials: ScramCredentials
    binding: bytes
    """What the client must repeat of its first message's header, in base64."""
    nonce: bytes
    messages: bytes
    """The first two messages, of which the proof is made, too."""


class ScramServer:
    """The server's end of one log-in: `start`, then `finish`."""

    def __init__(self, mechanism: Mechanism, lookup_credentials: LookupCredentials, server_nonce: bytes) -> None:
        _hash(mechanism)
        self.mechanism = mechanism
        self.user = ""
        """Who the client says it is, from `start` on. It is true once `finish` has returned."""
        self._lookup_credentials = lookup_credentials
        self._server_nonce = _check_nonce(server_nonce)
        self._challenge: _Challenge | None = None
        self._turns = _Turns("start", "finish")

    def start(self, client_first: bytes) -> bytes:
        """Takes the client's first message and gives the server's."""
        self._turns.take("start")
        reader = _Reader(client_first)
        authzid = reader.gs2_header()
        bare_offset = reader.end + 1
        self.user = reader.name(reader.attribute("n"))
        nonce = reader.nonce() + self._server_nonce
        _check_authzid(authzid, self.user)

        credentials = self._lookup_credentials(self.mechanism, self.user)
        server_first = b"r=%b,s=%b,i=%d" % (nonce, base64.b64encode(credentials.salt), credentials.iterations)
        self._challenge = _Challenge(
            credentials=credentials,
            binding=base64.b64encode(client_first[:bare_offset]),
            nonce=nonce,
            messages=client_first[bare_offset:] + b"," + server_first,
        )
        return server_first

    def finish(self, client_final: bytes) -> bytes:
        """Takes the client's proof and gives the server's signature, or raises `AuthenticationFailed`."""
        self._turns.take("finish")
        challenge = self._challenge
        assert challenge is not None
        reader = _Reader(client_final)
        binding = reader.attribute("c")
        nonce = reader.nonce()
        proof = reader.proof(digest_bytes(self.mechanism))

        auth_message = challenge.messages + b"," + client_final[: reader.offset - 1]
        signature = _hmac(self.mechanism, challenge.credentials.stored_key, auth_message)
        proven_key = _digest(self.mechanism, _xor(proof, signature))
        # All three are compared whatever the others say, so that the time reveals nothing.
        matches = hmac.compare_digest(proven_key, challenge.credentials.stored_key)
        matches &= hmac.compare_digest(nonce, challenge.nonce)
        matches &= hmac.compare_digest(binding, challenge.binding)
        if not matches:
            raise _failed("the user name or the password is wrong")
        return b"v=" + base64.b64encode(_hmac(self.mechanism, challenge.credentials.server_key, auth_message))


class ScramClient:
    """The client's end of one log-in: `first`, `final`, then `verify`."""

    def __init__(
        self,
        mechanism: Mechanism,
        user: str,
        password: str,
        client_nonce: bytes,
        *,
        iterations_min: int = SCRAM_ITERATIONS_MIN,
    ) -> None:
        _hash(mechanism)
        _check_user(user)
        self.mechanism = mechanism
        self._password = password
        self._client_nonce = _check_nonce(client_nonce)
        self._iterations_min = iterations_min
        self._first_bare = b"n=%b,r=%b" % (_escape(user), client_nonce)
        self._turns = _Turns("first", "final", "verify")

    def first(self) -> bytes:
        """The client's first message."""
        self._turns.take("first")
        return b"n,," + self._first_bare

    def final(self, server_first: bytes) -> bytes:
        """Takes the server's first message and gives the client's proof."""
        self._turns.take("final")
        reader = _Reader(server_first, hint=_SERVER_MESSAGE_HINT)
        nonce = reader.nonce()
        if not nonce.startswith(self._client_nonce) or nonce == self._client_nonce:
            raise _failed("the server's nonce does not continue ours", hint=_SERVER_MESSAGE_HINT)
        salt = reader.base64(reader.attribute("s"))
        iterations = self._iterations(reader)

        salted = _remembered_salted_password(self.mechanism, self._password, salt=salt, iterations=iterations)
        client_key = _client_key(self.mechanism, salted)
        # "biws" is "n,,", the header of the first message, which shows that it was not changed on its way.
        without_proof = b"c=biws,r=" + nonce
        auth_message = b",".join((self._first_bare, server_first, without_proof))
        signature = _hmac(self.mechanism, _digest(self.mechanism, client_key), auth_message)
        self._server_signature = _hmac(self.mechanism, _server_key(self.mechanism, salted), auth_message)
        return without_proof + b",p=" + base64.b64encode(_xor(client_key, signature))

    def verify(self, server_final: bytes) -> None:
        """Takes the server's last message, which shows that the server, too, knows the password."""
        self._turns.take("verify")
        reader = _Reader(server_final, hint=_SERVER_MESSAGE_HINT)
        if server_final.startswith(b"e="):
            raise _failed(f"the server refused the log-in: {reader.field()[2:].decode(errors='replace')!r}")
        signature = reader.base64(reader.attribute("v"))
        if not hmac.compare_digest(signature, self._server_signature):
            raise _failed(
                "the server could not show that it knows the password", hint="Check the address: it may be a false one"
            )

    def _iterations(self, reader: _Reader) -> int:
        text = reader.attribute("i")
        if not _ITERATIONS.fullmatch(text):
            raise reader.malformed("an iteration count that is not a number")
        iterations = int(text)
        if not self._iterations_min <= iterations <= SCRAM_ITERATIONS_MAX:
            raise _failed(
                f"the server asks for {iterations} iterations, not {self._iterations_min} to {SCRAM_ITERATIONS_MAX}",
                hint="Raise scramShaIterations on the server if it is yours, else do not trust it",
            )
        return iterations

"""SASL: how a client proves who it is. SCRAM (RFC 5802) and PLAIN (RFC 4616) as Couchbase uses them, both sides.

A SCRAM exchange is four messages, two in each direction, and the password is in none of them:

    client first    n,,n=USER,r=CLIENT-NONCE
    server first    r=CLIENT-NONCE SERVER-NONCE,s=SALT,i=ITERATIONS
    client final    c=biws,r=CLIENT-NONCE SERVER-NONCE,p=PROOF
    server final    v=SIGNATURE

Both ends stretch the password with the salt. The proof shows that the client knows the password, the signature shows
that the server has keys that were derived from it. The server keeps two keys per mechanism, neither enough to log in.

Couchbase's dialect: the mechanisms have no hyphen before the number (SCRAM-SHA512), there is no channel binding, names
and passwords are plain UTF-8 without SASLprep, and a nonce may contain spaces, as the Python SDK's does.

This module raises three errors, and no others:

* `MalformedMessage`: the peer's message cannot be read;
* `AuthenticationFailed`: it can, and the log-in fails. It never says whether the user exists;
* `LocalProtocolError`: our own caller gave an impossible value, or made a call out of turn.

Callers pass nonces in: this module draws no random numbers.
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
"""The limit of a Couchbase cluster."""

NONCE_RANDOM_BYTES_MIN = 16

SCRAM_SALT_BYTES = 16

_SALTED_PASSWORDS_MAX = 64
"""How many salted passwords a client remembers."""

SCRAM_ITERATIONS = 15_000
"""For new passwords: what a current Couchbase cluster uses."""

SCRAM_ITERATIONS_MIN = 4_000
"""A client accepts no fewer: a server that asks for one iteration wants a proof that is cheap to guess from. RFC 5802
says 4096; this is less, as Couchbase clusters long had 4000 (ns_server's `memcached_password_hash_iterations`)."""

SCRAM_ITERATIONS_MAX = 1_000_000
"""A client accepts no more: the work is the client's, about a second of it here, and a hostile server could ask for an
hour."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who logs in. The password is not in the repr."""

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
        """Return the mechanism that a client asks for. Raises `AuthenticationFailed` for an unknown one."""
        mechanism = _BY_NAME.get(name)
        if mechanism is None:
            raise _failed("the mechanism is unknown", hint=f"Use one of {', '.join(Mechanism)}")
        return mechanism


_BY_NAME = {mechanism.encode(): mechanism for mechanism in Mechanism}
_HASHES = {Mechanism.SCRAM_SHA512: "sha512", Mechanism.SCRAM_SHA256: "sha256", Mechanism.SCRAM_SHA1: "sha1"}
SCRAM_MECHANISMS = tuple(_HASHES)
_CLIENT_KEY, _SERVER_KEY = b"Client Key", b"Server Key"


def is_loopback_address(host: str) -> bool:
    """Whether traffic to or from this IP address stays on this machine.

    Then it may carry a password in clear (PLAIN, HTTP's basic authentication). Other host names count as remote.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def best_mechanism(offered: bytes, *, plain_allowed: bool = False) -> Mechanism:
    """Return the best mechanism of those that a server lists, separated by spaces.

    PLAIN shows the password to anyone who listens, and to a false server, so it is accepted only if the caller says
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
    # Couchbase ignores it. Ignoring it silently would let a client believe that it acts for another user.
    if authzid not in ("", user):
        raise _failed("to act for another user is not supported", hint="Leave the authorization id empty")


# --- PLAIN --------------------------------------------------------------------------------------------------------


class PlainLogin(Credentials):
    """A user name and a password as PLAIN carries them: in clear."""

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
        """Decode `authzid NUL user NUL password`."""
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
    """What a server stores of a password for one mechanism. The keys are not in the repr."""

    salt: bytes = field(repr=False)
    iterations: int
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


LookupCredentials = Callable[[Mechanism, str], ScramCredentials]
"""Returns the credentials of a user, and `decoy_credentials` for a user that does not exist."""


def digest_bytes(mechanism: Mechanism) -> int:
    """Return the length of the mechanism's keys."""
    return hashlib.new(_hash(mechanism)).digest_size


def derive_credentials(mechanism: Mechanism, password: str, *, salt: bytes, iterations: int) -> ScramCredentials:
    """Return what a server stores instead of the password."""
    salted = _salted_password(mechanism, password, salt=salt, iterations=iterations)
    return ScramCredentials(
        salt=salt,
        iterations=iterations,
        stored_key=_digest(mechanism, _hmac(mechanism, salted, _CLIENT_KEY)),
        server_key=_hmac(mechanism, salted, _SERVER_KEY),
    )


def decoy_credentials(mechanism: Mechanism, user: str, *, secret: bytes, iterations: int) -> ScramCredentials:
    """Return credentials for a user that does not exist, so that only the proof fails, as with a wrong password.

    They depend on the name alone, because a salt that changes from one try to the next would reveal that there is no
    such user. The secret keeps others from computing them. No client key is known whose hash is the stored key.
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
    """Whether the credentials were made from this password. This checks PLAIN where no password is stored."""
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
"""For clients, as RFC 5802 advises in section 5.1: with the same salt they need not compute it for each connection."""


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


# --- SCRAM: messages (RFC 5802, section 7) ------------------------------------------------------------------------

_NONCE = rb"[\x20-\x2b\x2d-\x7e]+"
"""Printable, no comma. The RFC has no space either, but the Python SDK does."""
_NAME = rb"(?:[^\0,=]|=2C|=3D)+"
"""With the only two escapes that "=" may begin (section 5.1)."""
_LATER = rb"(?:,.*)?"
"""Extensions, which are ignored. A mandatory one would precede all attributes, where none is accepted."""

# "y" means that the client could bind the channel and sees that we cannot, which is true.
_CLIENT_FIRST = re.compile(
    rb"(?P<header>[ny],(?:a=(?P<authzid>%b))?,)(?P<bare>n=(?P<user>%b),r=(?P<nonce>%b)%b)"
    % (_NAME, _NAME, _NONCE, _LATER),
    re.DOTALL,
)
_SERVER_FIRST = re.compile(
    rb"r=(?P<nonce>%b),s=(?P<salt>[^,]+),i=(?P<iterations>[1-9][0-9]{0,9})%b" % (_NONCE, _LATER), re.DOTALL
)
# The proof is the last attribute, and proves what precedes it.
_CLIENT_FINAL = re.compile(
    rb"(?P<proven>c=(?P<binding>[^,]*),r=(?P<nonce>%b)(?:,(?!p=)[^,]*)*),p=(?P<proof>[^,]+)" % _NONCE
)
_SERVER_FINAL = re.compile(rb"(?:v=(?P<signature>[^,]+)|e=(?P<error>[^,]*))%b" % _LATER, re.DOTALL)
_SERVER_MESSAGE_HINT = "Close the connection, and check that the server speaks Couchbase's SCRAM"


def encode_nonce(random: bytes) -> bytes:
    """Return a nonce made of random bytes, which the caller draws."""
    if len(random) < NONCE_RANDOM_BYTES_MIN:
        raise LocalProtocolError(f"a nonce needs at least {NONCE_RANDOM_BYTES_MIN} random bytes")
    return base64.b64encode(random)


def _check_nonce(nonce: bytes) -> bytes:
    if not re.fullmatch(_NONCE, nonce):
        raise LocalProtocolError("a nonce is printable ASCII with no comma, and not empty")
    return nonce


def _read(form: re.Pattern[bytes], message: bytes, *, hint: str = "") -> re.Match[bytes]:
    if len(message) > SASL_MESSAGE_BYTES_MAX:
        raise MalformedMessage(f"a SCRAM message of more than {SASL_MESSAGE_BYTES_MAX} bytes", hint=hint)
    found = form.fullmatch(message)
    if found is None:
        raise MalformedMessage("a SCRAM message without the attributes that it must have, in their order", hint=hint)
    return found


def _decode_name(value: bytes) -> str:
    try:
        name = value.replace(b"=2C", b",").replace(b"=3D", b"=").decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage("a user name that is not UTF-8") from error
    if len(name) > USER_CHARS_MAX:
        raise MalformedMessage(f"a user name of more than {USER_CHARS_MAX} characters")
    return name


def _decode_base64(value: bytes, *, hint: str = "") -> bytes:
    try:
        decoded = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise MalformedMessage("an attribute of a SCRAM message that is not base64", hint=hint) from error
    if not decoded:
        raise MalformedMessage("an attribute of a SCRAM message that is empty", hint=hint)
    return decoded


class _Turns:
    """Makes sure that the calls of an exchange happen in order, each once, whether they succeed or fail."""

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


class ScramServer:
    """The server's end of one log-in: `start`, then `finish`."""

    def __init__(self, mechanism: Mechanism, lookup_credentials: LookupCredentials, server_nonce: bytes) -> None:
        _hash(mechanism)
        self.mechanism = mechanism
        self.user = ""
        """Who the client claims to be, from `start` on. It is proven once `finish` has returned."""
        self._lookup_credentials = lookup_credentials
        self._server_nonce = _check_nonce(server_nonce)
        self._turns = _Turns("start", "finish")

    def start(self, client_first: bytes) -> bytes:
        """Take the client's first message and return the server's."""
        self._turns.take("start")
        read = _read(_CLIENT_FIRST, client_first)
        self.user = _decode_name(read["user"])
        _check_authzid(_decode_name(read["authzid"] or b""), self.user)
        self._nonce = read["nonce"] + self._server_nonce
        self._credentials = kept = self._lookup_credentials(self.mechanism, self.user)
        server_first = b"r=%b,s=%b,i=%d" % (self._nonce, base64.b64encode(kept.salt), kept.iterations)
        # What the client must repeat of its first message, and the messages that the proof covers.
        self._binding = base64.b64encode(read["header"])
        self._messages = read["bare"] + b"," + server_first
        return server_first

    def finish(self, client_final: bytes) -> bytes:
        """Take the client's proof and return the server's signature, or raise `AuthenticationFailed`."""
        self._turns.take("finish")
        read = _read(_CLIENT_FINAL, client_final)
        proof = _decode_base64(read["proof"])
        if len(proof) != digest_bytes(self.mechanism):
            raise MalformedMessage(f"a proof of {len(proof)} bytes, not {digest_bytes(self.mechanism)}")
        auth_message = self._messages + b"," + read["proven"]
        signature = _hmac(self.mechanism, self._credentials.stored_key, auth_message)
        proven_key = _digest(self.mechanism, _xor(proof, signature))
        # All three are compared whatever the others say, so that the time reveals nothing.
        matches = hmac.compare_digest(proven_key, self._credentials.stored_key)
        matches &= hmac.compare_digest(read["nonce"], self._nonce)
        matches &= hmac.compare_digest(read["binding"], self._binding)
        if not matches:
            raise _failed("the user name or the password is wrong")
        return b"v=" + base64.b64encode(_hmac(self.mechanism, self._credentials.server_key, auth_message))


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
        name = _utf8(user, "the user name").replace(b"=", b"=3D").replace(b",", b"=2C")
        self._first_bare = b"n=%b,r=%b" % (name, client_nonce)
        self._turns = _Turns("first", "final", "verify")

    def first(self) -> bytes:
        """Return the client's first message."""
        self._turns.take("first")
        return b"n,," + self._first_bare

    def final(self, server_first: bytes) -> bytes:
        """Take the server's first message and return the client's proof."""
        self._turns.take("final")
        read = _read(_SERVER_FIRST, server_first, hint=_SERVER_MESSAGE_HINT)
        nonce, iterations = read["nonce"], int(read["iterations"])
        if not nonce.startswith(self._client_nonce) or nonce == self._client_nonce:
            raise _failed("the server's nonce does not continue ours", hint=_SERVER_MESSAGE_HINT)
        if not self._iterations_min <= iterations <= SCRAM_ITERATIONS_MAX:
            raise _failed(
                f"the server asks for {iterations} iterations, not {self._iterations_min} to {SCRAM_ITERATIONS_MAX}",
                hint="Raise scramShaIterations on the server if it is yours, else do not trust it",
            )
        salt = _decode_base64(read["salt"], hint=_SERVER_MESSAGE_HINT)

        salted = _remembered_salted_password(self.mechanism, self._password, salt=salt, iterations=iterations)
        client_key = _hmac(self.mechanism, salted, _CLIENT_KEY)
        # "biws" is "n,,", the header of the first message, which shows that it was not changed on its way.
        without_proof = b"c=biws,r=" + nonce
        auth_message = b",".join((self._first_bare, server_first, without_proof))
        signature = _hmac(self.mechanism, _digest(self.mechanism, client_key), auth_message)
        self._server_signature = _hmac(self.mechanism, _hmac(self.mechanism, salted, _SERVER_KEY), auth_message)
        return without_proof + b",p=" + base64.b64encode(_xor(client_key, signature))

    def verify(self, server_final: bytes) -> None:
        """Take the server's last message, which proves that the server, too, knows the password."""
        self._turns.take("verify")
        read = _read(_SERVER_FINAL, server_final, hint=_SERVER_MESSAGE_HINT)
        if read["error"] is not None:
            raise _failed(f"the server refused the log-in: {read['error'].decode(errors='replace')!r}")
        signature = _decode_base64(read["signature"], hint=_SERVER_MESSAGE_HINT)
        if not hmac.compare_digest(signature, self._server_signature):
            raise _failed(
                "the server could not show that it knows the password", hint="Check the address: it may be a false one"
            )

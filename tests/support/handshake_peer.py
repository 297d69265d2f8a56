"""A server's side of the handshake, made of the protocol package: sans-IO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.errors import AuthenticationFailed
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, decode_message
from headwater.protocol.messages.session import (
    GetClusterConfig,
    Hello,
    HelloResponse,
    SaslAuth,
    SaslListMechanisms,
    SaslStep,
    SelectBucket,
)
from headwater.protocol.sasl import Mechanism, PlainLogin, ScramServer, derive_credentials, encode_nonce
from headwater.protocol.status import Status

USER, PASSWORD = "ada", "pässword, with = and ,"
CONFIG = b'{"rev": 1}'
ASKED = (Feature.XERROR, Feature.COLLECTIONS, Feature.SNAPPY)


class Peer:
    """A server's side of the handshake. `replace` answers one kind of request in another way."""

    def __init__(
        self,
        *,
        mechanisms: str = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN",
        bucket: str = "travel",
        config: bytes = CONFIG,
        is_known_by_certificate: bool = False,
    ) -> None:
        self.mechanisms = mechanisms
        self.bucket = bucket
        self.config = config
        self.is_known_by_certificate = is_known_by_certificate
        self.seen: list[Request] = []
        self.writes: list[int] = []
        """How many requests came in each write."""
        self.pushed_before: dict[type[Request], Request] = {}
        """What is sent of the server's own accord, ahead of an answer."""
        self.replace: dict[type[Request], Callable[[Any], Response | Request]] = {}
        self._frames = FrameBuffer()
        self._scram: ScramServer | None = None

    def receive_data(self, data: bytes) -> bytes:
        self._frames.receive_data(data)
        answers: list[Response | Request] = []
        for frame in self._frames.frames():
            request = decode_message(frame)
            assert isinstance(request, Request)
            self.seen.append(request)
            if type(request) in self.pushed_before:
                answers.append(self.pushed_before[type(request)])
            answers.append(self.replace.get(type(request), self._answer)(request))
        self.writes.append(len(answers))
        return b"".join(answer.encode() for answer in answers)

    def _answer(self, request: Request) -> Response:
        if isinstance(request, Hello):
            agreed = tuple(feature for feature in request.features if feature is not Feature.SNAPPY)
            return HelloResponse(opaque=request.opaque, features=agreed)
        if isinstance(request, SaslListMechanisms | SaslAuth) and self.is_known_by_certificate:
            return refused(request, Status.NOT_SUPPORTED)
        if isinstance(request, SaslListMechanisms):
            return ok(request, self.mechanisms.encode())
        if isinstance(request, SaslStep):
            return self._step(request)
        if isinstance(request, SaslAuth):
            return self._auth(request)
        if isinstance(request, SelectBucket):
            return ok(request) if request.key == self.bucket.encode() else refused(request, Status.KEY_ENOENT)
        assert isinstance(request, GetClusterConfig)
        return ok(request, self.config)

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

"""Key-value connections over real sockets: to servers as they should be, and to everything else that may listen."""

from __future__ import annotations

import asyncio
import gc
import random
import select
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headwater import errors
from headwater.client.bootstrap import connect_any
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import KvConnection, Login, Timeouts, is_loopback, unreachable
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import Request, decode_message, session
from headwater.protocol.messages.documents import Get
from headwater.protocol.sasl import Credentials, Mechanism
from headwater.protocol.status import Status
from support.cases import case, each
from support.fake_servers import (
    CONFIG,
    PASSWORD,
    USER,
    Peer,
    Talk,
    answering,
    down,
    dripping,
    hanging_up,
    ok,
    refused,
    saying,
    serving,
    silent,
)
from support.machine import self_signed

QUICK = Timeouts(connect_s=5.0, answer_s=0.2)
PATIENT = Timeouts()


def settings(
    address: Address, bucket: str = "travel", *, tls: TlsSettings | None = None, **options: Any
) -> ClientSettings:
    scheme = "couchbase" if tls is None else "couchbases"
    options = {"user": USER, "password": PASSWORD, **options}
    return ClientSettings.make(f"{scheme}://{address}/{bucket}", tls=tls, **options)


def connect(address: Address, bucket: str = "travel", **options: Any) -> KvConnection:
    return KvConnection.open(address, settings(address, bucket, **options).login())


def failure(
    address: Address, bucket: str = "travel", *, is_by_chance: bool = False, **options: Any
) -> errors.HeadwaterError:
    """What a blocking connection raises. One under asyncio raises the same, unless it is by chance what is raised."""
    with pytest.raises(errors.HeadwaterError) as raised:
        connect(address, bucket, **options)
    with pytest.raises(errors.HeadwaterError) as raised_by_loop:
        asyncio.run(connect_any(settings(address, bucket, **options)))
    for error in (raised.value, raised_by_loop.value):
        assert error.hint
        assert PASSWORD not in str(error)
    assert is_by_chance or type(raised_by_loop.value) is type(raised.value)
    return raised.value


@pytest.mark.parametrize("mechanism", [None, *Mechanism])
def test_a_connection_that_is_ready(mechanism: Mechanism | None) -> None:
    with serving(answering(Peer)) as address, connect(address, mechanism=mechanism) as connection:
        assert connection.outcome.cluster_config == CONFIG
        assert connection.outcome.mechanism is (mechanism or Mechanism.SCRAM_SHA512)
        assert connection.buffered_bytes == 0
        assert connection.sock.gettimeout() == PATIENT.answer_s


@case(None, False, None, False)
@case(None, False, "PLAIN", True)
@case(None, True, None, True)
@case(TlsSettings(), False, None, True)
def test_where_a_password_may_be_sent_in_clear(
    tls: TlsSettings | None, is_loopback: bool, mechanism: str | None, is_sent: bool
) -> None:
    peer = Peer(mechanisms="PLAIN")
    login = settings(Address("h", 1), tls=tls, mechanism=mechanism).login()
    handshake = login.handshake(is_loopback=is_loopback)
    with nullcontext() if is_sent else pytest.raises(errors.AuthenticationFailed):
        while data := handshake.data_to_send():
            handshake.receive_data(peer.receive_data(data))
    assert (handshake.outcome is not None) is is_sent
    assert any(isinstance(request, session.SaslAuth) for request in peer.seen) is is_sent


def test_every_handshake_has_a_nonce_of_its_own() -> None:
    drawn = iter([b"a" * 18, b"b" * 18])
    login = replace(settings(Address("h", 1)).login(), random_bytes=lambda count: next(drawn)[:count])
    firsts = []
    for _ in range(2):
        handshake, peer = login.handshake(is_loopback=True), Peer()
        for _ in range(2):
            handshake.receive_data(peer.receive_data(handshake.data_to_send()))
        firsts.append(peer.seen[2])
    assert all(isinstance(first, session.SaslAuth) for first in firsts)
    assert firsts[0] != firsts[1]


def test_what_comes_behind_the_handshake_is_not_lost() -> None:
    """A notification and the answer to a request that is made later: all in one piece, with the last answer."""
    noop = session.Noop(opaque=6)  # the handshake has six requests, numbered from 0

    def talk(sock: socket.socket) -> None:
        peer = Peer()
        while data := sock.recv(1 << 16):
            answers = peer.receive_data(data)
            if isinstance(peer.seen[-1], session.GetClusterConfig):
                answers += session.ClustermapChangeNotification(epoch=1, revision=2).encode() + ok(noop).encode()
            sock.sendall(answers)
            if isinstance(peer.seen[-1], session.GetClusterConfig):
                break
        sock.recv(1 << 16)

    with serving(talk) as address, connect(address) as connection:
        assert connection.buffered_bytes > 0
        assert connection.request(noop) == ok(noop)
        assert connection.buffered_bytes == 0


def replying(reply: Callable[[Request], bytes]) -> Callable[[socket.socket], None]:
    """Shakes hands, then answers one request."""

    def talk(sock: socket.socket) -> None:
        peer = Peer()
        while not (peer.seen and isinstance(peer.seen[-1], session.GetClusterConfig)):
            sock.sendall(peer.receive_data(sock.recv(1 << 16)))
        (frame,) = decode_frames(sock.recv(1 << 16))
        request = decode_message(frame)
        assert isinstance(request, Request)
        sock.sendall(reply(request))

    return talk


@case(lambda request: ok(Get(key=b"k")).encode(), errors.UnexpectedMessage, "GET, where the answer to Noop was due")
@case(lambda request: ok(session.Noop(opaque=8)).encode(), errors.UnexpectedMessage, "NOOP, where")
@case(lambda request: ok(request).encode()[:20], errors.ConnectionClosed, "has closed the connection")
@case(lambda request: b"nonsense", errors.BadMagic, "not a magic byte")
@case(lambda request: refused(request, Status.NOT_MY_VBUCKET).encode(), errors.NotMyVBucket, "refused Noop")
def test_answers_that_are_none(
    reply: Callable[[Request], bytes], kind: type[errors.HeadwaterError], reason: str
) -> None:
    with serving(replying(reply)) as address, connect(address) as connection:
        with pytest.raises(errors.HeadwaterError) as raised:
            connection.request(session.Noop(opaque=7))
        assert type(raised.value) is kind
        assert reason in raised.value.reason


def test_an_answer_that_does_not_come() -> None:
    def talk(sock: socket.socket) -> None:
        replying(lambda request: b"")(sock)
        silent(sock)

    with (
        serving(talk) as address,
        connect(address, timeouts=QUICK) as connection,
        pytest.raises(errors.NoAnswer, match=r"0\.2 seconds"),
    ):
        connection.request(session.Noop())


def test_answers_before_the_end_are_handed_out() -> None:
    """Of requests that are sent together, those that were answered have their answers, and the others the end."""

    def talk(sock: socket.socket) -> None:
        peer = Peer()
        while not (peer.seen and isinstance(peer.seen[-1], session.GetClusterConfig)):
            sock.sendall(peer.receive_data(sock.recv(1 << 16)))
        first = decode_message(decode_frames(sock.recv(1 << 16))[0])
        sock.sendall(ok(first).encode() + ok(session.Noop(opaque=first.opaque + 1)).encode()[:-1])

    async def ask(address: Address) -> None:
        connection = await connect_any(settings(address))
        answered, cut_off = connection.send([session.Noop(), session.Noop()])
        assert (await answered)[-1].response().status == Status.SUCCESS
        with pytest.raises(errors.ConnectionClosed):
            await cut_off
        assert connection.is_closed

    with serving(talk) as address:
        asyncio.run(ask(address))


@case(answering(Peer), {"password": "wrong"}, errors.AuthenticationFailed, "the user or the password is wrong", "")
@case(answering(Peer), {"bucket": "travle"}, errors.UnknownBucket, "there is no bucket 'travle'", "")
@case(silent, {"timeouts": QUICK}, errors.NoAnswer, "{address} has not answered for 0.2 seconds", "")
# The handshake as a whole has its time.
@case(dripping(b"\x81" + bytes(1000), every_s=0.02), {"timeouts": QUICK}, errors.NoAnswer, "has not answered", "")
@case(hanging_up, {}, errors.ConnectionClosed, "when Hello was to be answered", "TLS on both ends or on neither")
@case(saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), {}, errors.WrongProtocol, "answers with HTTP", "?bootstrap=http")
@case(None, {}, errors.HostUnreachable, "{address} can't be reached: Connection refused", "")
def test_servers_that_will_not_do(
    talk: Talk | None, options: dict[str, Any], kind: type[errors.HeadwaterError], reason: str, hint: str
) -> None:
    with nullcontext(down()) if talk is None else serving(talk) as address:
        error = failure(address, **options)
    assert type(error) is kind
    assert reason.format(address=address) in error.reason
    assert hint in error.hint


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 63 + "." + "b" * 63])
def test_a_host_that_does_not_exist(host: str) -> None:
    assert type(failure(Address(host, 11210))) is errors.HostUnreachable


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\0", "ü" * 64])
def test_a_name_that_no_host_can_have(host: str) -> None:
    """A cluster map may say anything."""
    login = settings(Address("h", 1)).login()
    with pytest.raises(errors.HostUnreachable):
        KvConnection.open(Address(host, 11210), login)


def resetting(sock: socket.socket) -> None:
    """To linger for no time is to end with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_server_that_hangs_up_at_once() -> None:
    with serving(resetting) as address:
        # Where the end comes before the connection is ready, there is none.
        assert type(failure(address, is_by_chance=True)) in (errors.ConnectionClosed, errors.HostUnreachable)
        assert type(failure(address, tls=TlsSettings(), is_by_chance=True)) in (
            errors.TlsBroken,
            errors.HostUnreachable,
        )


def test_no_socket_is_left_open_if_the_end_comes_before_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would leave it to the garbage collector, whose warning is an error here."""
    real = socket.create_connection

    def create(*arguments: Any, **options: Any) -> socket.socket:
        sock = real(*arguments, **options)
        sock.sendall(b"go")
        select.select([sock], [], [])
        return sock

    def talk(sock: socket.socket) -> None:
        sock.recv(2)
        resetting(sock)

    monkeypatch.setattr(socket, "create_connection", create)
    with serving(talk) as address:
        assert type(failure(address, tls=TlsSettings())) is errors.TlsBroken
    gc.collect()


@each("seed", range(20))
def test_random_bytes(seed: int) -> None:
    with serving(saying(random.Random(seed).randbytes(4096))) as address:
        error = failure(address, timeouts=QUICK, is_by_chance=True)
    # By chance the first bytes may be a header, and then the rest of its body is waited for.
    assert isinstance(error, errors.RemoteProtocolError | errors.ConnectionFailed)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path)


def server_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def test_tls(certificate: tuple[Path, Path]) -> None:
    with serving(answering(Peer), tls=server_context(certificate)) as address:
        for tls in (TlsSettings(ca_file=certificate[0]), TlsSettings(skip_verify=True)):
            with connect(address, tls=tls) as connection:
                assert connection.outcome.cluster_config == CONFIG
        # The same host by a name that is not in its certificate.
        other = failure(Address("127.1", address.port), tls=TlsSettings(ca_file=certificate[0]))
        error = failure(address, tls=TlsSettings())
    assert type(error) is type(other) is errors.TlsFailed
    assert "mismatch" in other.reason
    assert f"the certificate of {address} is not trusted" in error.reason
    assert "--tls-ca" in error.hint
    assert not error.retriable


@pytest.mark.parametrize("talk", [hanging_up, silent, saying(b"what?"), saying(b"HTTP/1.1 400 Bad Request\r\n\r\n")])
def test_tls_to_a_port_without_it(talk: Talk) -> None:
    with serving(talk) as address:
        error = failure(address, tls=TlsSettings(), timeouts=QUICK)
    assert type(error) is (errors.TlsBroken if talk in (hanging_up, silent) else errors.TlsFailed)
    assert f"{address} does not speak TLS" in error.reason
    assert "couchbase:// without TLS" in error.hint


@pytest.mark.parametrize("says_why", [False, True], ids=["closes", "alerts"])
def test_no_tls_to_a_port_with_it(certificate: tuple[Path, Path], says_why: bool) -> None:
    """Some servers send an alert of TLS, which is no frame. Most just hang up, and are asked again with TLS."""

    def talk(sock: socket.socket) -> None:
        if sock.recv(1, socket.MSG_PEEK) != b"\x16":
            sock.recv(1 << 16)
            sock.sendall(b"\x15\x03\x01\x00\x02\x02\x46" if says_why else b"")
            return
        server_context(certificate).wrap_socket(sock, server_side=True).close()

    with serving(talk) as address:
        error = failure(address)
    assert type(error) is errors.TlsFailed
    assert "uses TLS" in error.reason
    assert "couchbases://" in error.hint


@pytest.fixture
def client_certificate(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "client"
    folder.mkdir()
    return self_signed(folder)


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
def strict_context(
    request: pytest.FixtureRequest, certificate: tuple[Path, Path], client_certificate: tuple[Path, Path]
) -> ssl.SSLContext:
    """Of a server that wants a certificate of its clients, and trusts one."""
    context = server_context(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(client_certificate[0])
    context.minimum_version = context.maximum_version = request.param
    return context


def test_a_client_certificate_is_the_login(
    strict_context: ssl.SSLContext, certificate: tuple[Path, Path], client_certificate: tuple[Path, Path]
) -> None:
    shown: list[bytes | None] = []
    peers: list[Peer] = []

    def talk(sock: socket.socket) -> None:
        shown.append(sock.getpeercert(binary_form=True))
        peers.append(Peer(is_known_by_certificate=True))
        answering(lambda: peers[-1])(sock)

    tls = TlsSettings(ca_file=certificate[0], certificate_file=client_certificate[0], key_file=client_certificate[1])
    with serving(talk, tls=strict_context) as address:
        with connect(address, tls=tls, user=None, password=None) as connection:
            assert connection.outcome.mechanism is None
            assert connection.outcome.cluster_config == CONFIG
        with_password = failure(address, tls=tls)
    assert shown[0] == ssl.PEM_cert_to_DER_cert(client_certificate[0].read_text())
    assert [type(request).__name__ for request in peers[0].seen] == ["Hello", "SelectBucket", "GetClusterConfig"]
    assert "omit the user and the password" in with_password.hint
    # A server may also want a certificate of everybody, and know the users by their passwords.
    with serving(answering(Peer), tls=strict_context) as address, connect(address, tls=tls) as connection:
        assert connection.outcome.mechanism is Mechanism.SCRAM_SHA512


@pytest.mark.parametrize("shows_one", [False, True], ids=["none", "an unknown one"])
def test_a_client_certificate_that_is_missing_or_not_trusted(
    strict_context: ssl.SSLContext, certificate: tuple[Path, Path], shows_one: bool
) -> None:
    tls = TlsSettings(
        ca_file=certificate[0],
        certificate_file=certificate[0] if shows_one else None,
        key_file=certificate[1] if shows_one else None,
    )
    with serving(answering(Peer), tls=strict_context) as address:
        for _ in range(20):
            error = failure(address, tls=tls, user=None, password=None)
            assert type(error) is errors.TlsFailed
            assert "has refused TLS with us" in error.reason
            assert "client certificate" in error.hint


@each(
    ("peer", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), ("::", False), ("::1234", False),
        ("node-1", False),
    ],
)  # fmt: skip
def test_what_stays_on_this_machine(peer: str, expected: bool) -> None:
    class _Sock(socket.socket):
        def getpeername(self) -> tuple[str, int]:
            return peer, 1

    with _Sock() as sock, socket.socket() as never_connected:
        assert is_loopback(sock) is expected
        assert not is_loopback(never_connected)


# --- the event loop alone -----------------------------------------------------------------------------------------


class Seen(AsyncKvConnection):
    """Can be had before it is open."""

    made: ClassVar[list[Seen]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)


async def test_an_answer_to_one_that_is_just_being_cancelled() -> None:
    """Between a cancellation and what it does there is a turn of the loop, in which data may come."""
    with serving(silent) as address:
        opening = asyncio.create_task(Seen.open(address, Login(credentials=Credentials(USER, PASSWORD), bucket=None)))
        while not Seen.made or not Seen.made[0].is_usable:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        opening.cancel()
        Seen.made[0].data_received(session.HelloResponse().encode())
        with pytest.raises(asyncio.CancelledError):
            await opening


def test_a_node_without_tls_is_named_as_that() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    assert "write couchbase://" in unreachable(Address("127.0.0.1", 11207), refused).hint
    assert "couchbase://" not in unreachable(Address("127.0.0.1", 11210), refused).hint

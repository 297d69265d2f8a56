"""A node with one bucket on a real engine, a stopped clock, and clients that exchange bytes with its sessions.

Nothing is committed unless `call` does so or a test says so: clients do not see answers that a session holds back
until then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from headwater.node.auth.login_checks import LoginThrottle, judge
from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from headwater.node.kv.session import KvSession, Waits
from headwater.node.options import BucketSettings
from headwater.node.service import BucketService, Service
from headwater.protocol.features import Feature, Negotiated
from headwater.protocol.frames import decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import ErrorResponse, Request, Response
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import Hello, SaslAuth, SelectBucket
from headwater.protocol.numbers import Vbuuid
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket

R = TypeVar("R", bound=Response)

START_S = 1_800_000_000
PASSWORD = "pencil"
FEATURES = (
    Feature.XERROR, Feature.SELECT_BUCKET, Feature.XATTR, Feature.JSON, Feature.SNAPPY, Feature.MUTATION_SEQNO,
    Feature.ALT_REQUEST, Feature.SYNC_REPLICATION, Feature.PRESERVE_TTL,
)  # fmt: skip
WITH_COLLECTIONS = (*FEATURES, Feature.COLLECTIONS)
SECRET = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


@cache
def users() -> Users:
    """Return one user per role, named after it. Cached, because hashing passwords is slow by design."""
    made = Users(decoy_secret=bytes(32), iterations=4096)
    for role in Role:
        made = made.add(made.new_user(role.value, PASSWORD, [Grant(role)], salts=bytes(SALTS_BYTES)))
    return made


class Clock:
    def __init__(self) -> None:
        self.ns = START_S * 1_000_000_000

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1_000_000_000)

    def now_s(self) -> int:
        return self.ns // 1_000_000_000


class Node:
    """One node with the bucket `default`."""

    def __init__(self, folder: Path, *, vbuckets: int = 8, ack_when_durable: bool = True) -> None:
        self.clock = Clock()
        self.changes = 0
        self.logged: list[str] = []
        self._folder = folder
        self._vbuuids = 0
        self._ack_when_durable = ack_when_durable
        facts = BucketFacts(name="default", uuid="0123456789abcdef", vbuckets=vbuckets)
        bucket = create_bucket(LmdbEngine(folder), facts, environment=self._environment(), secret=SECRET)
        for vbucket in range(vbuckets):
            bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
        bucket.commit_now()
        self._serve(bucket)

    def _environment(self) -> StoreEnvironment:
        return StoreEnvironment(now_ns=lambda: self.clock.ns, new_vbuuid=self._new_vbuuid)

    def _new_vbuuid(self) -> Vbuuid:
        self._vbuuids += 1
        return Vbuuid(0xB0_0000_0000 + self._vbuuids)

    def _serve(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.bucket_service = BucketService(
            bucket=bucket,
            ack_when_durable=self._ack_when_durable,
            on_change=self._on_change,
            settings=BucketSettings(flush_enabled=True),
        )
        self.throttle = LoginThrottle()
        self.service = Service(
            buckets={"default": self.bucket_service},
            users=users(),
            now_ns=lambda: self.clock.ns,
            now_s=lambda: self.clock.ns / 1e9,
            random_bytes=lambda count: bytes(range(count)),
            cluster_config=lambda name: b'{"rev":1,"name":"%s"}' % (name or "").encode(),
            server_version="1.2.3",
            log=lambda message, **about: self.logged.append(message),
        )

    def _on_change(self) -> None:
        self.changes += 1

    def commit(self) -> None:
        self.bucket.commit_now()

    def reopen(self, *, in_order: bool = True) -> None:
        """Close the bucket and open it again. Changes that are not durable are lost, unless it is closed cleanly."""
        if in_order:
            close_bucket(self.bucket)
        self.close()
        self._serve(open_bucket(LmdbEngine(self._folder), environment=self._environment(), secret=SECRET))

    def close(self) -> None:
        self.bucket_service.range_scans.end_all()
        self.bucket.engine.close()

    def set_manifest(self, manifest: Manifest) -> None:
        self.bucket_service.set_manifest(manifest)
        self.commit()

    def client(self, *, user: str = "admin", features: tuple[Feature, ...] = FEATURES) -> Client:
        """Return a client that has logged in and selected the bucket."""
        client = Client(self)
        client.succeed(Hello(key=b"test", features=features))
        client.negotiated = Negotiated(frozenset(features))
        client.succeed(SaslAuth(key=b"PLAIN", value=PlainLogin(user=user, password=PASSWORD).encode()))
        client.succeed(SelectBucket(key=b"default"))
        return client


def drive(session: KvSession, data: bytes, throttle: LoginThrottle | None = None) -> None:
    """Let a session handle received data, in as many turns as it takes. Logins and postponed work are done
    immediately."""
    throttle = LoginThrottle() if throttle is None else throttle
    session.receive_data(data)
    while session.waits_for in (Waits.FOR_TURN, Waits.FOR_LOGIN, Waits.FOR_WORK):
        if session.postponed is not None:
            session.postponed.task.run()
            session.finish_work()
            continue
        if session.login is not None:
            attempt, service = session.login.attempt, session.service
            is_right = partial(attempt.is_right, service.users)
            session.finish_login(judge(attempt, throttle, is_right=is_right, now_s=service.now_s()))
        session.receive_data(b"")


class Client:
    """The far end of one session."""

    def __init__(self, node: Node, *, allows_plain: bool = True) -> None:
        self.node = node
        self.negotiated = Negotiated()
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when a newer DCP connection replaces this one."""
        self.session = KvSession(
            node.service, peer="127.0.0.1", allows_plain=allows_plain, on_replaced=lambda: self.on_replaced()
        )

    def send(self, *requests: Request | bytes) -> None:
        """Send requests in one write."""
        data = b"".join(r if isinstance(r, bytes) else r.encode() for r in requests)
        drive(self.session, data, self.node.throttle)

    def received(self) -> list[Response]:
        """Return the answers that the session does not hold back."""
        data = b""
        while piece := self.session.data_to_send():
            data += piece
        messages = [decode_message(frame, self.negotiated) for frame in decode_frames(data)]
        return [message for message in messages if isinstance(message, Response)]

    def call_all(self, *requests: Request | bytes) -> list[Response]:
        self.send(*requests)
        self.node.commit()
        return self.received()

    def call(self, request: Request | bytes) -> Response:
        """Send a request, commit, and return its one answer."""
        (response,) = self.call_all(request)
        return response

    def succeed(self, request: Request) -> Any:
        response = self.call(request)
        assert not isinstance(response, ErrorResponse), (response.status.name, response.context)
        return response

    def refused(self, request: Request | bytes) -> Status:
        response = self.call(request)
        return response.status

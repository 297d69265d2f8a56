"""The context of a request: its session, its bucket, and methods to answer it.

`kv.session` makes one context per request and passes it to the handler of the message. A handler returns one response,
several, or None to send nothing; it raises `RequestRefused` to answer with an error. It must never touch the connection
itself: it records in the context which commit the answer waits for, and what follows the answer. It calls
`Context.work` for what may take longer than a turn of the event loop.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.log_fields import Fields
from headwater.node.auth.login_checks import LoginAttempt, LoginVerdict
from headwater.node.auth.users import Action, Users
from headwater.node.durability import SyncWrite
from headwater.node.producer.connection import ProducerConnection
from headwater.node.service import BucketService, Service
from headwater.protocol.features import Feature, Negotiated, Opcode
from headwater.protocol.messages.base import ErrorResponse, PlainResponse, Request, Response
from headwater.protocol.sasl import ScramServer
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype
from headwater.store.data_format import Document, Entry

if TYPE_CHECKING:
    from headwater.node.consumer.connection import ConsumerConnection

R = TypeVar("R", bound=Response)
T = TypeVar("T")

TURN_WORK = 512 * 1024
"""The work of a turn, after which other connections get theirs: about two milliseconds. The unit is a byte that is
received, scanned, stored or sent. A worker does what takes more than a turn by itself (`Context.work`)."""
REQUEST_WORK = TURN_WORK // 64
"""The work that is counted for every request that a handler serves, however short it is."""
UNBOUNDED_WORK = 2**63
"""The cost of work that grows with everything stored."""
_TASKS_MAX = 16
"""How often a request may repeat its work because its document has changed meanwhile. kv_engine gives up at some point,
too (`daemon/subdocument.cc`)."""


class CloseSession(Exception):
    """The connection must be closed without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLogin:
    """A log-in that the driver of the session still has to check (`auth.login_checks`)."""

    context: Context
    attempt: LoginAttempt
    conclude: Callable[[LoginVerdict], Response]
    """Returns the answer, or raises `RequestRefused`."""


class WorkerTask:
    """Work that takes more than a turn: a function that only reads its arguments."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], key: object) -> None:
        self._function = function
        self._arguments = arguments
        self._key = key
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Call the function, in any thread."""
        try:
            self._result = self._function(*self._arguments)
        except Exception as error:  # Raised in the handler, which is called again and asks for the result.
            self._error = error

    def is_about(self, function: Callable[..., Any], arguments: tuple[Any, ...], key: object) -> bool:
        if key is not None:
            return self._key == key
        return self._key is None and self._function == function and self._arguments == arguments

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Postponed(Exception):
    """A handler needs the result of a task, and is called again when the task is done."""

    def __init__(self, task: WorkerTask) -> None:
        super().__init__()
        self.task = task


class SessionState(ABC):
    """The state of a session that handlers read and set: its peer and user, and what was negotiated with them."""

    def __init__(self, service: Service, *, peer: str, allows_plain: bool) -> None:
        self.service = service
        self.peer = peer
        self.allows_plain = allows_plain
        """Whether passwords may be sent in clear: the connection is encrypted, or does not leave the machine."""
        self.negotiated = Negotiated()
        self.agent = ""
        self.user: str | None = None
        self._rights: dict[Action, bool] = {}
        self._rights_of: tuple[Users | None, str | None, BucketService | None] = (None, None, None)
        self.scram: ScramServer | None = None
        self.login: PendingLogin | None = None
        """The log-in that is being checked. Later requests wait for it."""
        self.bucket: BucketService | None = None
        self.is_quitting = False
        """Whether the peer has sent a quit: close once everything is sent."""
        self.dcp: ProducerConnection | None = None
        """Set once the connection has been opened as a DCP connection on which this node is the producer."""
        self.consumer: ConsumerConnection | None = None
        """Set if this node is the consumer instead: it then handles everything that the connection receives."""

    def has(self, feature: Feature) -> bool:
        return feature in self.negotiated.features

    @property
    def understands_json(self) -> bool:
        return self.has(Feature.JSON)

    @property
    def json_datatype(self) -> Datatype:
        """The datatype of JSON in answers to the peer."""
        return Datatype.JSON if self.understands_json else Datatype.RAW

    @property
    def datatypes(self) -> Datatype:
        """The datatype bits of plain commands that the peer has negotiated."""
        return self.json_datatype | (Datatype.SNAPPY if self.has(Feature.SNAPPY) else Datatype.RAW)

    def may(self, action: Action) -> bool:
        # Cached: this is called for every run of requests and every turn of streams, and users seldom change.
        users, user, bucket_service = self._rights_of
        if users is not self.service.users or user is not self.user or bucket_service is not self.bucket:
            self._rights_of = self.service.users, self.user, self.bucket
            self._rights.clear()
        if action not in self._rights:
            bucket = self.bucket.name if self.bucket else None
            self._rights[action] = self.user is not None and self.service.users.may(self.user, action, bucket)
        return self._rights[action]

    def log_out(self) -> None:
        self.user, self.scram, self.login = None, None, None

    def log_fields(self) -> Fields:
        """The peer, for the log."""
        about = Fields(peer=self.peer, user=self.user)
        if self.bucket is not None:
            about["bucket"] = self.bucket.name
        connection = self.dcp or self.consumer
        if connection is not None:
            about["connection"] = connection.name
        return about

    @abstractmethod
    def flush(self) -> None:
        """Queue the answers so far as one piece to send. Needed before the bucket changes: commits belong to it."""

    @abstractmethod
    def open_dcp(self, connection: ProducerConnection | ConsumerConnection) -> None:
        """Make this a DCP connection. Closes an older one of the same name."""


@dataclass(slots=True)
class Context:
    """One request, and what its handler records for the answer."""

    service: Service
    session: SessionState
    request: Request
    commit: int = field(default=0)
    """The commit that has to be durable before the answer may be sent; 0 for none."""
    after: bytes = b""
    """Bytes to send right after the answer."""
    sync_write: SyncWrite | None = None
    """The durable write whose outcome decides the answer."""
    work_done: int = 0
    """The work of the handler itself, beyond the lengths of the request and its answer."""
    document: tuple[Entry, Document] | None = None
    """The document that was read for the request, kept in case the handler is called again."""
    _tasks: list[WorkerTask] = field(default_factory=list)

    @property
    def bucket_service(self) -> BucketService:
        """The selected bucket. Raises `RequestRefused` if none is selected."""
        selected = self.session.bucket
        if selected is None:
            raise RequestRefused(Status.NO_BUCKET)
        return selected

    def work(self, function: Callable[..., T], *arguments: Any, cost: int, key: object = None) -> T:
        """The result of a function that changes nothing, and scans `cost` bytes.

        If that is more than a turn, a worker calls the function: this raises `Postponed`, and the handler is called
        again when the result is available. The handler repeats all its checks, because anything may have changed, and
        gets the result here if it calls this with equal arguments, or with the same `key` in place of them. So a
        handler must change nothing before its last call of this.
        """
        if cost <= TURN_WORK or self.session.consumer is not None:
            self.work_done += cost
            return function(*arguments)
        for task in self._tasks:
            if task.is_about(function, arguments, key):
                return task.result()  # type: ignore[no-any-return]
        if len(self._tasks) == _TASKS_MAX:
            raise RequestRefused(Status.ETMPFAIL, "the document changes all the time; try again")
        self._tasks.append(WorkerTask(function, arguments, key))
        raise Postponed(self._tasks[-1])

    def wait_for(self, commit: int) -> None:
        """Hold the answer back until this commit is durable."""
        self.commit = max(self.commit, commit)

    def then_send(self, data: bytes) -> None:
        """Send bytes right after the answer."""
        self.after += data

    def reply(self, kind: type[R], **fields: Any) -> R:
        return kind(opcode=Opcode(self.request.opcode), opaque=self.request.opaque, **fields)

    def ok(self, value: bytes = b"", **fields: Any) -> PlainResponse:
        return self.reply(PlainResponse, value=value, **fields)

    def error(self, refused: RequestRefused, *, opcode: int | None = None) -> ErrorResponse:
        """The error response. Give `opcode` if the request could not be decoded."""
        header: dict[str, Any] = {
            "opcode": Opcode(self.request.opcode if opcode is None else opcode),
            "opaque": self.request.opaque,
            "status": refused.status,
        }
        members = dict(refused.members)
        if refused.context:
            members["error"] = {"context": refused.context}
        if not members and refused.body is None:
            return ErrorResponse(**header)
        value = json.dumps(members, separators=(",", ":")).encode() if refused.body is None else refused.body
        return ErrorResponse(**header, datatype=self.session.json_datatype, value=value)

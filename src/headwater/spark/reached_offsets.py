"""How the tasks of a `dcp` stream report to its planner which offsets they have reached.

Spark plans the end of a batch before it is read, and a snapshot that is being written to goes beyond that end. The rows
behind it come with the batch, so the next one has to begin behind them, or they would come twice. Spark's API has no
way back from a task to the planner. So the planner listens on a port, and every attempt at a task holds a connection
while it reads: one line when it begins, one when it has read everything, which is acknowledged.

Nothing depends on a report but that rows do not come twice. Where one is missing (the executor can't reach the port) or
where two attempts differ (it is not known whose rows were used), the next batch begins at the planned end.

The listener takes connections with its token only, on the address by which this machine reaches the bucket.

`source.DcpStreamReader` is the only one that uses it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext

from headwater.client.connection_string import Address
from headwater.client.offsets import Offsets
from headwater.errors import InvalidOffsets
from headwater.log_fields import LogEvent, fields
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

logger = logging.getLogger(__name__)

CONNECT_S_MAX = 5.0
ANSWER_S_MAX = 10.0
LINE_BYTES_MAX = 8 * 1024 * 1024
"""65,536 vbuckets with their numbers fit."""
_TOKEN_BYTES = 16
_TAKEN = b".\n"

_Reached = dict[VBucketId, StreamOffset]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTo:
    """Where the attempts at one task report. It travels with the task."""

    host: str
    port: int
    token: str
    task: int

    @contextlib.contextmanager
    def attempt(self, reached: Callable[[], tuple[Mapping[VBucketId, StreamOffset], int]]) -> Iterator[None]:
        """Around the read of a task; at its end `reached` returns its offsets, and how many rows it had. A report that
        can't be made is left out."""
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((self.host, self.port), CONNECT_S_MAX)
            connection.settimeout(ANSWER_S_MAX)
            connection.sendall(_line({"token": self.token, "task": self.task, "attempt": _attempt_number()}))
        except OSError as error:
            logger.info(
                "the planner at %s can't be reached, so rows may come again: %s",
                *(f"{self.host}:{self.port}", error),
                extra=fields(event=LogEvent.PLANNER_UNREACHABLE, address=f"{self.host}:{self.port}"),
            )
        try:
            yield
            if connection is not None:
                with contextlib.suppress(OSError):
                    offsets, rows = reached()
                    connection.sendall(_line({"reached": Offsets("", offsets).to_json(), "rows": rows}))
                    connection.recv(len(_TAKEN))
        finally:
            if connection is not None:
                connection.close()


class ReachedOffsets:
    """The planner's side: what the tasks of the last batch have reported."""

    def __init__(self, bucket: Address) -> None:
        """`bucket` is any address of the bucket."""
        self._attempts: dict[int, list[_Reached | None]] = {}
        """By task: what each attempt has reached; None while it reads, and for ever if it was cut off."""
        self._rows: dict[int, int] = {}
        """By task: how many rows an attempt has had."""
        self._next_task = 0
        self._lock = threading.Lock()
        self._token = secrets.token_hex(_TOKEN_BYTES)
        host = _own_address(bucket)
        self._server = _ReportServer((host, 0), self)
        self._address = host, self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="reached offsets", daemon=True).start()

    def expect(self, tasks: int) -> list[ReportTo]:
        """Begin a batch of this many tasks. Earlier reports are dropped, and late ones are refused."""
        host, port = self._address
        with self._lock:
            first, self._next_task = self._next_task, self._next_task + tasks
            self._attempts = {task: [] for task in range(first, first + tasks)}
            self._rows = {}
        return [ReportTo(host=host, port=port, token=self._token, task=task) for task in range(first, first + tasks)]

    def rows(self) -> int | None:
        """How many rows the batch has had; None where a task has not reported."""
        with self._lock:
            return sum(self._rows.values()) if len(self._rows) == len(self._attempts) else None

    def take(self) -> _Reached:
        """The offsets that are known for sure: all attempts at a task have come to an end, and to the same one.

        An attempt that is not the first says that there was another, which may have been the one whose rows were used.
        """
        with self._lock:
            attempts, self._attempts = list(self._attempts.values()), {}
        known: _Reached = {}
        for reported in attempts:
            if reported and reported[0] is not None and all(offsets == reported[0] for offsets in reported):
                known |= reported[0]
        return known

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- one connection -----------------------------------------------------------------------------------------------

    def on_begin(self, message: Any) -> tuple[int, int] | None:
        """An attempt begins. Returns its number, or None for one that is not expected."""
        if not isinstance(message, dict) or not secrets.compare_digest(str(message.get("token")), self._token):
            return None
        with self._lock:
            attempts = self._attempts.get(message.get("task", -1))
            if attempts is None:
                return None
            attempts.append(None)
            if message.get("attempt") != 0:
                return None
            return message["task"], len(attempts) - 1

    def on_end(self, attempt: tuple[int, int], message: Any) -> None:
        offsets = dict(Offsets.from_json(message["reached"]).offsets)
        with self._lock:
            if attempt[0] in self._attempts:
                self._attempts[attempt[0]][attempt[1]] = offsets
                self._rows[attempt[0]] = int(message["rows"])


class _ReportServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], reached: ReachedOffsets) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.reached = reached
        super().__init__(address, _Attempt)


class _Attempt(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _ReportServer)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, InvalidOffsets):
            # Only a task may be silent, for hours while it reads: a connection has to begin with the token soon.
            self.connection.settimeout(ANSWER_S_MAX)
            attempt = server.reached.on_begin(json.loads(self.rfile.readline(1024)))
            if attempt is None:
                return
            self.connection.settimeout(None)
            server.reached.on_end(attempt, json.loads(self.rfile.readline(LINE_BYTES_MAX)))
            self.wfile.write(_TAKEN)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _attempt_number() -> int:
    """Of this attempt at a task, as Spark counts: 0 for the first."""
    context = TaskContext.get()
    return 0 if context is None else int(context.attemptNumber())


def _own_address(bucket: Address) -> str:
    """The address by which this machine reaches the bucket: executors are likely to reach us there. Connecting a
    datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in bucket.host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((bucket.host, bucket.port or 1))
        return str(probe.getsockname()[0])
    return "127.0.0.1"

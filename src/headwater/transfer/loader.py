"""Bulk writing: documents in columns are sent to the nodes of a cluster, over a few pipelined connections each.

One thread uses a selector. It encodes a batch of documents as frames and sorts these by the connection of their
vbucket; each connection (`WriteLane`) keeps a bounded window of unanswered bytes. The next batch is taken when every
connection has room, so the slowest one sets the pace and memory stays bounded.

If a node answers that a vbucket is not its own, the loader reads the cluster map again, and resends the frames as the
new map says. A connection that breaks ends the load: it is known what was written, since only answers are counted.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

from headwater import errors
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import RECEIVE_BYTES, broken
from headwater.kernels.machine_code import compile_kernels
from headwater.kernels.memory import Column
from headwater.protocol.exchange import ANSWER_TIMEOUT_S
from headwater.protocol.frames import decode_collection_id
from headwater.protocol.messages import key_text, refused
from headwater.protocol.numbers import CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.transfer import set_frames

# --- one connection -------------------------------------------------------------------------------------------------

WINDOW_BYTES_MAX = 4 * 1024 * 1024
"""How many bytes may be sent and unanswered, by default."""

RETRY_PAUSE_S = 0.01
RETRY_PAUSE_S_MAX = 1.0
RETRY_S_MAX = 60.0
"""How long a document is retried before the load gives up."""

_FAILURES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Frames to be sent again."""

    frames: set_frames.SetFrames
    attempts: int
    due_s: float
    give_up_s: float


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Frames that are sent, or are about to be."""

    frames: set_frames.SetFrames
    attempts: int
    give_up_s: float | None
    answered: int = 0
    put_off: list[int] = field(default_factory=list)
    misplaced: list[int] = field(default_factory=list)


class WriteLane:
    """One pipelined connection, sans-IO: frames are sent within a window, and a kernel counts the answers.

    Requests are answered in order, so unlike `protocol.exchange`, a lane needs no table of pending requests: the
    opaques count up, and the next answer must have the next number. A frame that the server refuses temporarily is
    kept and sent again after a pause that doubles; a frame that belongs to another node is returned
    (`take_misplaced`). Frames that wait for a retry count against the window, so a server that refuses everything
    stops the flow instead of filling the memory.

    Two writes to one key are sent in order. But if the server refuses the first temporarily and accepts the second,
    the first takes effect last: a caller that needs strict order must not write a key twice in one load.
    """

    def __init__(self, *, collections: bool = True, window_bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._collections = collections
        """Whether keys start with their collection id."""
        self.window_bytes_max = window_bytes_max
        self.written = 0
        self.written_bytes = 0
        """The bytes of whole requests, including headers."""
        self.retried = 0
        self._now_s = 0.0
        self._unsent: deque[memoryview] = deque()
        self._unanswered: deque[_Batch] = deque()
        self._held_bytes = 0
        """The bytes in frames that are unanswered, or wait for a retry."""
        self._waiting: list[Retry] = []
        """Ordered by due time."""
        self._misplaced: list[Retry] = []
        self._next_opaque = 0
        self._due_opaque = 0
        self._rest = b""
        self._failures = np.empty((_FAILURES_AT_ONCE, 2), dtype=np.int64)

    @property
    def has_room(self) -> bool:
        return self._held_bytes < self.window_bytes_max

    @property
    def is_waiting_for_answers(self) -> bool:
        return bool(self._unanswered)

    @property
    def is_idle(self) -> bool:
        """Whether everything is answered, and nothing is to be retried."""
        return not (self._unanswered or self._waiting or self._misplaced)

    @property
    def next_retry_s(self) -> float | None:
        return self._waiting[0].due_s if self._waiting else None

    # --- out ----------------------------------------------------------------------------------------------------------

    def send_sets(self, frames: set_frames.SetFrames, *, attempts: int = 0, give_up_s: float | None = None) -> None:
        """Queue frames for sending. They are sent even if there is no room: check `has_room` first."""
        if not len(frames):
            return
        set_frames.set_opaques(frames.data, frames.starts, self._next_opaque)
        self._next_opaque = (self._next_opaque + len(frames)) & 0xFFFFFFFF
        self._unsent.append(frames.data.data)
        self._unanswered.append(_Batch(frames=frames, attempts=attempts, give_up_s=give_up_s))
        self._held_bytes += len(frames.data)

    def data_to_send(self) -> memoryview | None:
        """Return the next bytes to send. Report the number of sent bytes with `sent`."""
        return self._unsent[0] if self._unsent else None

    def sent(self, sent_bytes: int) -> None:
        rest = self._unsent[0][sent_bytes:]
        if rest:
            self._unsent[0] = rest
        else:
            self._unsent.popleft()

    def tick(self, now_s: float) -> None:
        """Set the time, and queue the retries that are due."""
        self._now_s = now_s
        while self._waiting and self._waiting[0].due_s <= now_s:
            retry = self._waiting.pop(0)
            self._held_bytes -= len(retry.frames.data)
            self.send_sets(retry.frames, attempts=retry.attempts, give_up_s=retry.give_up_s)

    def take_misplaced(self) -> list[Retry]:
        """Return the frames that belong to another node. The caller must send them there when they are due."""
        misplaced, self._misplaced = self._misplaced, []
        return misplaced

    # --- in -----------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Count the answers.

        Raises the `StatusError` of a document that the server refuses permanently, after all answers in `data` were
        counted, and `RemoteProtocolError` for data that does not answer our requests.
        """
        received = np.frombuffer(self._rest + bytes(data), dtype=np.uint8)
        at = 0
        refusal: errors.StatusError | None = None
        is_complete = False
        while not is_complete:
            answers = set_frames.scan_answers(received[at:], opaque=self._due_opaque, failures=self._failures)
            at += answers.consumed_bytes
            refusal = self._settle(answers) or refusal
            is_complete = len(answers.failures) < len(self._failures)
        self._rest = received[at:].tobytes()
        if refusal is not None:
            raise refusal

    def _settle(self, answers: set_frames.Answers) -> errors.StatusError | None:
        """Match the answers to their batches. Returns the error for a permanently refused document, if any."""
        self._due_opaque = (self._due_opaque + answers.answered) & 0xFFFFFFFF
        failures = deque(answers.failures)
        refusal: errors.StatusError | None = None
        settled = 0
        while settled < answers.answered:
            if not self._unanswered:
                raise errors.UnexpectedMessage("an answer to a request that was not sent")
            batch = self._unanswered[0]
            count = min(answers.answered - settled, len(batch.frames) - batch.answered)
            self.written += count
            while failures and failures[0][0] < settled + count:
                answer, status = failures.popleft()
                self.written -= 1
                refusal = self._fail(batch, batch.answered + answer - settled, status) or refusal
            batch.answered += count
            settled += count
            if batch.answered == len(batch.frames):
                self._unanswered.popleft()
                self._finish(batch)
        return refusal

    def _fail(self, batch: _Batch, item: int, status: int) -> errors.StatusError | None:
        """Note a refused document for a retry, or return its error if that is permanent or was retried too long."""
        kind = errors.STATUS_ERRORS.get(status, errors.StatusError)
        gives_up = batch.give_up_s is not None and self._now_s >= batch.give_up_s
        if not kind.retriable or gives_up:
            tried = f" {batch.attempts + 1} times" if batch.attempts else ""
            key = self._key(batch, item)
            return refused(f"document {key_text(key)}{tried}", status=status, key=key)
        (batch.misplaced if kind.stale_topology else batch.put_off).append(item)
        return None

    def _key(self, batch: _Batch, item: int) -> bytes:
        key = batch.frames.key(item)
        return key[decode_collection_id(key)[1] :] if self._collections else key

    def _finish(self, batch: _Batch) -> None:
        """Drop a batch that is fully answered, except the frames that must be sent again."""
        self._held_bytes -= len(batch.frames.data)
        self.written_bytes += len(batch.frames.data)
        for items, is_misplaced in ((batch.put_off, False), (batch.misplaced, True)):
            if not items:
                continue
            retry = Retry(
                frames=batch.frames.select(items),
                attempts=batch.attempts + 1,
                due_s=self._now_s + retry_pause_s(batch.attempts),
                give_up_s=self._now_s + RETRY_S_MAX if batch.give_up_s is None else batch.give_up_s,
            )
            self.retried += len(items)
            self.written_bytes -= len(retry.frames.data)
            if is_misplaced:
                self._misplaced.append(retry)
            else:
                self._held_bytes += len(retry.frames.data)
                insort(self._waiting, retry, key=lambda waiting: waiting.due_s)


def retry_pause_s(attempts: int) -> float:
    """Return the pause before the next try: it doubles up to a limit."""
    return min(RETRY_PAUSE_S_MAX, RETRY_PAUSE_S * 2.0 ** min(attempts, 16))


# --- all connections ------------------------------------------------------------------------------------------------

CONNECTIONS = 2
"""The default number of connections to each node."""

CONNECTIONS_MAX = 64
_WAIT_S_MAX = 1.0
_LAST_ANSWERS_S_MAX = 2.0
_LAST_ANSWER_PAUSE_S = 0.3
_TURNS_MAX = 16
"""How often one socket is read or written before the others get their turn."""


class Cluster(Protocol):
    """The cluster that the documents go to."""

    def read_map(self) -> ClusterMap: ...

    def open(self, address: Address) -> socket.socket:
        """Return a socket to a node, ready for SETs."""


class KvLoader:
    """Writes documents and counts the answers. The counts are exact at any time, also after an error."""

    def __init__(
        self,
        cluster: Cluster,
        cluster_map: ClusterMap,
        *,
        collections: Sequence[CollectionId],
        connections: int = CONNECTIONS,
        window_bytes_max: int = WINDOW_BYTES_MAX,
        expiry: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.elapsed_s = 0.0
        """The time from the first byte sent to the last answer."""
        self._cluster = cluster
        self._map = cluster_map
        self._collections = tuple(collections)
        self._connections = connections
        self._window_bytes_max = window_bytes_max
        self._expiry = expiry
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wires: list[_Wire] = []
        self._wires_of: dict[Address, list[int]] = {}
        self._misplaced: list[Retry] = []
        self._taken = 0
        """The number of documents given to the lanes."""
        compile_kernels("headwater.transfer.set_frames")
        try:
            self._wire_of_vbucket = self._route()
        except BaseException:
            self.close()
            raise

    @property
    def written(self) -> int:
        """The number of documents that the servers have accepted."""
        return sum(wire.lane.written for wire in self._wires)

    @property
    def written_bytes(self) -> int:
        """The number of bytes in the requests for these documents."""
        return sum(wire.lane.written_bytes for wire in self._wires)

    @property
    def retried(self) -> int:
        """The number of times a document had to be sent again."""
        return sum(wire.lane.retried for wire in self._wires)

    def load(self, batches: Iterable[set_frames.Documents], on_progress: Callable[[], None] = lambda: None) -> None:
        """Write all documents, or raise the error that prevents it.

        If the source fails, the documents before the failure are written first. After any other error, answers that
        are still in transit are counted if they arrive soon.
        """
        try:
            self._load(iter(batches), on_progress)
        except BaseException:
            self._listen()
            raise

    def _load(self, source: Iterator[set_frames.Documents], on_progress: Callable[[], None]) -> None:
        documents, problem = _next(source)
        started_s = heard_s = self._clock()
        while documents is not None or not self._is_idle:
            if documents is not None and self._has_room:
                self._send(documents)
                self._pump(wait=False)
                documents, problem = _next(source)
                # No answers were read while the source was busy.
                heard_s = self._clock()
            elif self._pump(wait=True):
                heard_s = self._clock()
            self.elapsed_s = self._clock() - started_s
            self._check_silence(heard_s)
            self._follow_moves()
            on_progress()
        if problem is not None:
            raise problem

    def _listen(self) -> None:
        """Count the answers to sent requests, without sending or raising anything."""
        for wire in self._wires:
            self._selector.modify(wire.sock, selectors.EVENT_READ, wire)
        give_up_s = self._clock() + _LAST_ANSWERS_S_MAX
        while any(wire.lane.is_waiting_for_answers for wire in self._wires) and self._clock() < give_up_s:
            ready = self._selector.select(_LAST_ANSWER_PAUSE_S)
            if not ready:
                return
            for key, _ in ready:
                try:
                    key.data.receive()
                except errors.StatusError:
                    pass  # Another document was refused: the first error is the one raised.
                except errors.HeadwaterError:
                    self._selector.unregister(key.data.sock)

    def close(self) -> None:
        for wire in self._wires:
            wire.sock.close()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- documents to wires -------------------------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        return not self._misplaced and all(wire.lane.has_room for wire in self._wires)

    @property
    def _is_idle(self) -> bool:
        return not self._misplaced and all(wire.lane.is_idle for wire in self._wires)

    def _route(self) -> Column:
        """Return the wire of every vbucket. Opens wires to nodes that are new in the map."""
        wire_of_vbucket = np.empty(self._map.vbuckets, dtype=np.int64)
        for vbucket in range(self._map.vbuckets):
            wires = self._open_wires(self._map.address_of(VBucketId(vbucket)))
            wire_of_vbucket[vbucket] = wires[vbucket % len(wires)]
        return wire_of_vbucket

    def _open_wires(self, address: Address) -> list[int]:
        if address not in self._wires_of:
            opened = []
            for _ in range(self._connections):
                sock = self._cluster.open(address)
                sock.setblocking(False)
                lane = WriteLane(collections=bool(self._collections), window_bytes_max=self._window_bytes_max)
                wire = _Wire(sock, address, lane)
                opened.append(len(self._wires))
                self._wires.append(wire)
                self._selector.register(sock, selectors.EVENT_READ, wire)
            self._wires_of[address] = opened
        return self._wires_of[address]

    def _send(self, documents: set_frames.Documents) -> None:
        frames = set_frames.encode_sets(
            documents,
            vbuckets=self._map.vbuckets,
            collections=self._collections,
            first_document=self._taken,
            expiry=self._expiry,
        )
        if isinstance(documents, set_frames.KeptDocuments):
            documents.stamp(frames)
        self._taken += len(documents)
        for wire, part in zip(self._wires, self._split(frames), strict=True):
            wire.lane.send_sets(part)

    def _split(self, frames: set_frames.SetFrames) -> list[set_frames.SetFrames]:
        return set_frames.split_frames(frames, self._wire_of_vbucket, lanes=len(self._wires))

    def _follow_moves(self) -> None:
        """Send misplaced frames where they belong, once the pause is over, after reading the map again."""
        for wire in self._wires:
            self._misplaced += wire.lane.take_misplaced()
        if not self._misplaced or self._clock() < max(retry.due_s for retry in self._misplaced):
            return
        newest = self._cluster.read_map()
        if newest.vbuckets != self._map.vbuckets:
            raise errors.NotMyVBucket(
                Status.NOT_MY_VBUCKET,
                "the bucket was deleted and created again during the load",
                hint="Load it again",
            )
        self._map = max(self._map, newest, key=lambda known: known.version)
        self._wire_of_vbucket = self._route()
        misplaced, self._misplaced = self._misplaced, []
        for retry in misplaced:
            for wire, part in zip(self._wires, self._split(retry.frames), strict=True):
                wire.lane.send_sets(part, attempts=retry.attempts, give_up_s=retry.give_up_s)

    # --- wires to sockets ---------------------------------------------------------------------------------------------

    def _pump(self, *, wait: bool) -> bool:
        """Send and receive what is possible without blocking. Returns whether anything was received."""
        now_s = self._clock()
        for wire in self._wires:
            wire.lane.tick(now_s)
            self._watch(wire)
        came = False
        for key, events in self._selector.select(self._pause_s(now_s) if wait else 0):
            wire = key.data
            if events & selectors.EVENT_WRITE:
                wire.send()
            if events & selectors.EVENT_READ:
                came |= wire.receive()
        return came

    def _watch(self, wire: _Wire) -> None:
        wanted = selectors.EVENT_READ
        if wire.lane.data_to_send() is not None or wire.must_write_to_read:
            wanted |= selectors.EVENT_WRITE
        if wanted != wire.watched:
            self._selector.modify(wire.sock, wanted, wire)
            wire.watched = wanted

    def _pause_s(self, now_s: float) -> float:
        due_s = [wire.lane.next_retry_s for wire in self._wires] + [retry.due_s for retry in self._misplaced]
        return min([_WAIT_S_MAX, *(max(0.0, due - now_s) for due in due_s if due is not None)])

    def _check_silence(self, heard_s: float) -> None:
        if self._clock() - heard_s < ANSWER_TIMEOUT_S:
            return
        for wire in self._wires:
            if wire.lane.is_waiting_for_answers:
                raise broken(wire.address, TimeoutError())


class _Wire:
    """A lane and the socket it is sent over."""

    def __init__(self, sock: socket.socket, address: Address, lane: WriteLane) -> None:
        self.sock = sock
        self.address = address
        self.lane = lane
        self.watched = selectors.EVENT_READ
        self.must_write_to_read = False
        """TLS must send something of its own before more can be read."""

    def send(self) -> None:
        self.must_write_to_read = False
        for _ in range(_TURNS_MAX):
            data = self.lane.data_to_send()
            if data is None:
                return
            try:
                self.lane.sent(self.sock.send(data))
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise broken(self.address, error) from error

    def receive(self) -> bool:
        """Read what has arrived. Returns whether there was anything."""
        for turn in range(_TURNS_MAX):
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                return turn > 0
            except ssl.SSLWantWriteError:
                self.must_write_to_read = True
                return turn > 0
            except OSError as error:
                raise broken(self.address, error) from error
            if not data:
                raise errors.ConnectionFailed(
                    f"{self.address} closed the connection before it answered everything",
                    hint="Look at the server's log",
                )
            self.lane.receive_data(data)
            # TLS returns one record at a time, 16 KiB at most; a select call for each would be slow.
            if not isinstance(self.sock, ssl.SSLSocket):
                return True
        return True


def _next(
    source: Iterator[set_frames.Documents],
) -> tuple[set_frames.Documents | None, errors.HeadwaterError | OSError | None]:
    """Return the next documents, or the error of the source."""
    try:
        return next(source, None), None
    except (errors.HeadwaterError, OSError) as error:
        return None, error

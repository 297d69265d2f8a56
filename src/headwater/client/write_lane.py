"""One pipelined connection of the loader, sans-IO: frames go out in a window, answers are counted as they come.

Requests are answered in their order, so a lane needs no table of what is under way: the opaques count up, and the
next answer must have the next number. What the server refuses for now is kept and sent again after a pause that
doubles; what belongs to another node is handed back (`take_misplaced`). Frames that wait for their next try count
against the window, so a server that refuses everything stops the flow instead of filling the memory.

Two writes to one key go out in their order. If the server puts off the first and takes the second, the first comes
last: who needs the order kept even then must not write a key twice in one load.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headwater.client.set_frames import Answers, SetFrames, scan_answers, set_opaques
from headwater.errors import STATUS_ERRORS, StatusError, UnexpectedMessage
from headwater.protocol.leb128 import decode_collection_id
from headwater.protocol.refusals import key_text, refused

WINDOW_BYTES_MAX = 4 * 1024 * 1024
"""What may be sent and not answered yet, unless told."""

RETRY_PAUSE_S = 0.01
RETRY_PAUSE_S_MAX = 1.0
RETRY_S_MAX = 60.0
"""How long a document is tried again before the load gives up."""

_FAILURES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Frames that are to be sent again."""

    frames: SetFrames
    attempts: int
    due_s: float
    give_up_s: float


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Frames that are sent, or are about to be."""

    frames: SetFrames
    attempts: int
    give_up_s: float | None
    answered: int = 0
    put_off: list[int] = field(default_factory=list)
    misplaced: list[int] = field(default_factory=list)


class WriteLane:
    """The state of one connection that takes SETs."""

    def __init__(self, *, collections: bool = True, window_bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._collections = collections
        """Keys start with their collection id."""
        self.window_bytes_max = window_bytes_max
        self.written = 0
        self.written_bytes = 0
        """Of whole requests, headers included."""
        self.retried = 0
        self._now_s = 0.0
        self._unsent: deque[memoryview] = deque()
        self._unanswered: deque[_Batch] = deque()
        self._held_bytes = 0
        """In frames that are not answered, or wait for another try."""
        self._waiting: list[Retry] = []
        """By the time they are due."""
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
        """Everything is answered, and nothing is to be tried again."""
        return not (self._unanswered or self._waiting or self._misplaced)

    @property
    def next_retry_s(self) -> float | None:
        return self._waiting[0].due_s if self._waiting else None

    # --- out ------------------------------------------------------------------------------------------------------

    def send_sets(self, frames: SetFrames, *, attempts: int = 0, give_up_s: float | None = None) -> None:
        """Take frames to be sent. They are sent even where there is no room: ask `has_room` first."""
        if not len(frames):
            return
        set_opaques(frames.data, frames.starts, self._next_opaque)
        self._next_opaque = (self._next_opaque + len(frames)) & 0xFFFFFFFF
        self._unsent.append(frames.data.data)
        self._unanswered.append(_Batch(frames=frames, attempts=attempts, give_up_s=give_up_s))
        self._held_bytes += len(frames.data)

    def data_to_send(self) -> memoryview | None:
        """The next bytes to send; `sent` says how many have been."""
        return self._unsent[0] if self._unsent else None

    def sent(self, sent_bytes: int) -> None:
        rest = self._unsent[0][sent_bytes:]
        if rest:
            self._unsent[0] = rest
        else:
            self._unsent.popleft()

    def tick(self, now_s: float) -> None:
        """Note the time, and send again what is due."""
        self._now_s = now_s
        while self._waiting and self._waiting[0].due_s <= now_s:
            retry = self._waiting.pop(0)
            self._held_bytes -= len(retry.frames.data)
            self.send_sets(retry.frames, attempts=retry.attempts, give_up_s=retry.give_up_s)

    def take_misplaced(self) -> list[Retry]:
        """The frames that another node has to get, for the caller to send there when they are due."""
        misplaced, self._misplaced = self._misplaced, []
        return misplaced

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Count the answers.

        Raises the `StatusError` of a document that the server refuses for good, after all answers in `data` have been
        counted; `RemoteProtocolError` for what is no answer to our requests.
        """
        received = np.frombuffer(self._rest + bytes(data), dtype=np.uint8)
        at = 0
        refusal: StatusError | None = None
        is_complete = False
        while not is_complete:
            answers = scan_answers(received[at:], opaque=self._due_opaque, failures=self._failures)
            at += answers.consumed_bytes
            refusal = self._settle(answers) or refusal
            is_complete = len(answers.failures) < len(self._failures)
        self._rest = received[at:].tobytes()
        if refusal is not None:
            raise refusal

    def _settle(self, answers: Answers) -> StatusError | None:
        """Give the answers to the batches they belong to; what was refused for good comes back as its error."""
        self._due_opaque = (self._due_opaque + answers.answered) & 0xFFFFFFFF
        failures = deque(answers.failures)
        refusal: StatusError | None = None
        settled = 0
        while settled < answers.answered:
            if not self._unanswered:
                raise UnexpectedMessage("an answer to a request that was not sent")
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

    def _fail(self, batch: _Batch, item: int, status: int) -> StatusError | None:
        """Note what becomes of a document that the server did not take."""
        kind = STATUS_ERRORS.get(status, StatusError)
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
        """A batch is answered: let it go, but for what has to be sent again."""
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
    """The pause before the next try: it doubles up to a limit."""
    return min(RETRY_PAUSE_S_MAX, RETRY_PAUSE_S * 2.0 ** min(attempts, 16))

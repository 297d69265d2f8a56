"""The consumer under judgement: a separate process, whose standard output is read continuously.

It never outlives the run, and never delays it: the judge kills it with all processes of its session, and a thread
reads its output, with limits on the length and the number of lines. `ConsumerLog` keeps what the consumer claims
to hold, and `differences` compares that with the bucket.

A line is a JSON object. A consumer only has to write what it did:

    {"op": "set", "key": "k", "seqno": 7, "value": {"n": 1}}     or "mutation"; "cas" may replace "value"
    {"op": "delete", "key": "k", "seqno": 8}                     or "deletion", "expiration"
    {"op": "rollback", "vbucket": 3, "seqno": 5}                 undoes everything of the vbucket above the seqno

The judge undoes a rollback in its own log, so a consumer need not keep versions to be judged. All lines other than
JSON objects with an "op" are the consumer's own log, and are skipped.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headwater.errors import InvalidInput
from headwater.judge.plan import KEY_PREFIX
from headwater.phrases import printable
from headwater.protocol.numbers import vbucket_of

LINE_BYTES_MAX = 1024 * 1024
LINES_MAX = 1_000_000
SHOWN_CHARS = 100
_U64_MAX = 2**64 - 1
_OPS = {
    "set": "set",
    "mutation": "set",
    "delete": "delete",
    "deletion": "delete",
    "expiration": "delete",
    "rollback": "rollback",
    # The other events that our own `tail` prints.
    "collection_created": "pass",
    "collection_dropped": "pass",
    "collection_modified": "pass",
    "scope_created": "pass",
    "scope_dropped": "pass",
}


@dataclass(frozen=True, slots=True)
class Held:
    """One version of a document. None stands for an unknown value."""

    seqno: int
    value: Any = None
    cas: int | None = None

    def __str__(self) -> str:
        text = json.dumps(self.value, ensure_ascii=False)
        return f"seqno {self.seqno}, {printable(text if len(text) <= SHOWN_CHARS else f'{text[:SHOWN_CHARS]}…')}"

    def equals(self, held: Held) -> bool:
        """Return whether a consumer's version is this one, by value and CAS, or by seqno if it has neither."""
        if held.value is None and held.cas is None:
            return held.seqno == self.seqno
        return held.value in (None, self.value) and held.cas in (None, self.cas)


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    seqno: int
    held: Held | None


class ConsumerLog:
    """Everything that a consumer has written and not undone."""

    def __init__(self, vbuckets: int) -> None:
        self._entries: list[list[_Entry]] = [[] for _ in range(vbuckets)]
        self.lines = 0
        self.passed_over = 0
        """The number of lines in other formats."""
        self.first_passed_over = ""
        self.rollbacks = 0

    def read(self, line: bytes) -> None:
        """Process a line. Raises `InvalidInput` if it has an "op" but is malformed, or if it exceeds a limit."""
        self.lines += 1
        if self.lines > LINES_MAX:
            raise InvalidInput(f"the consumer has written more than {LINES_MAX:,} lines", hint="Check what it repeats")
        if len(line) > LINE_BYTES_MAX:
            raise InvalidInput(f"line {self.lines} has more than {LINE_BYTES_MAX:,} bytes", hint="End each line")
        members = _members(line)
        if members is None:
            if line.strip():
                self.passed_over += 1
                self.first_passed_over = self.first_passed_over or printable(
                    line.decode(errors="replace")[:SHOWN_CHARS]
                )
            return
        op = _OPS.get(members["op"]) if isinstance(members["op"], str) else None
        if op is None:
            raise self._bad(f'"op" is {members["op"]!r}', "Write set, delete or rollback")
        if op == "pass":
            return
        seqno = self._number(members, "seqno", _U64_MAX)
        if op == "rollback":
            vbucket = self._number(members, "vbucket", len(self._entries) - 1)
            self.rollbacks += 1
            self._entries[vbucket] = [entry for entry in self._entries[vbucket] if entry.seqno <= seqno]
            return
        key = members.get("key")
        if not isinstance(key, str):
            raise self._bad("there is no text as its key", 'Write "key": "…"')
        if not key.startswith(KEY_PREFIX):
            return
        vbucket = int(vbucket_of(key.encode(errors="surrogatepass"), len(self._entries)))
        if "vbucket" in members and members["vbucket"] != vbucket:
            raise self._bad(f"the key {key!r} belongs to vbucket {vbucket}", "Leave the vbucket out, or correct it")
        held = None
        if op == "set":
            cas = self._number(members, "cas", _U64_MAX) if members.get("cas") is not None else None
            held = Held(seqno, _value(members.get("value")), cas)
        self._entries[vbucket].append(_Entry(key, seqno, held))

    def _number(self, members: Mapping[str, Any], name: str, most: int) -> int:
        """Return a number, which may be given as text: JavaScript's numbers have only 53 bits."""
        given = members.get(name)
        number = int(given) if isinstance(given, str) and given.isdecimal() and len(given) <= 20 else given
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
            raise self._bad(f'"{name}" is {given!r}', f"Write a number from 0 to {most}")
        return number

    def _bad(self, reason: str, hint: str) -> InvalidInput:
        return InvalidInput(f"line {self.lines} of the consumer: {reason[:SHOWN_CHARS]}", hint=hint)

    def documents(self) -> dict[str, Held]:
        """Return the documents that the consumer holds: for each key, the version it wrote last."""
        last = {entry.key: entry.held for entries in self._entries for entry in entries}
        return {key: held for key, held in last.items() if held is not None}

    def reached(self) -> list[int]:
        """Return the highest seqno of each vbucket."""
        return [max((entry.seqno for entry in entries), default=0) for entries in self._entries]


def _members(line: bytes) -> dict[str, Any] | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        members = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) and "op" in members else None


def _value(given: Any) -> Any:
    """Return a document's value. A consumer that does not parse documents may write one as text."""
    if isinstance(given, str):
        try:
            return json.loads(given)
        except (ValueError, RecursionError):
            pass
    return given


# --- against the bucket -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that differs between the bucket and the consumer. None means that it does not exist on that side."""

    key: str
    vbucket: int
    expected: Held | None
    found: Held | None

    def __str__(self) -> str:
        return (
            f"{self.key} in vbucket {self.vbucket}: the bucket has {self.expected or 'no such document'}; "
            f"the consumer has {self.found or 'no such document'}"
        )


def differences(truth: Mapping[str, Held], found: Mapping[str, Held], vbuckets: int) -> Iterator[Difference]:
    """Yield every document that differs, by vbucket and key."""
    keys = ((int(vbucket_of(key.encode(), vbuckets)), key) for key in truth.keys() | found.keys())
    for vbucket, key in sorted(keys):
        expected, held = truth.get(key), found.get(key)
        if expected is None or held is None:
            if expected is not held:
                yield Difference(key, vbucket, expected, held)
        elif not expected.equals(held):
            yield Difference(key, vbucket, expected, held)


# --- the process ------------------------------------------------------------------------------------------------------


STOP_S_MAX = 2.0
"""How long a consumer may take to end after SIGTERM."""
STDERR_BYTES_SHOWN = 2000
OUTPUT_BYTES_MAX = 512 * 1024 * 1024
"""The limit for standard output, and for standard error."""
_RECEIVE_BYTES = 256 * 1024
_PR_SET_PDEATHSIG = 1


class Consumer:
    """A command that runs until the `with` block ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, vbuckets: int) -> None:
        self._command = [_filled(part, environment) for part in command]
        self._environment = {**os.environ, **environment}
        self._stdout, self._stderr = folder / "consumer.out", folder / "consumer.err"
        self._log = ConsumerLog(vbuckets)
        self._turn = threading.Lock()
        self._heard_s = time.monotonic()
        self._fault: InvalidInput | None = None
        self._process: subprocess.Popen[bytes]
        self._reading: threading.Thread

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
        self._stdout.touch()

        def end_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with self._stderr.open("ab") as errors:
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                    env=self._environment, start_new_session=True, preexec_fn=end_with_parent,
                )  # fmt: skip
            except OSError as error:
                reason = f"{self._command[0]} can't be started: {error.strerror}"
                raise InvalidInput(reason, hint="Check the command behind --") from error
        self._heard_s = time.monotonic()
        self._reading = threading.Thread(target=self._read, name="headwater-judge-reader", daemon=True)
        self._reading.start()

    def restart(self) -> None:
        """Kill the consumer, process the output that it had written, and start it again."""
        self._kill()
        if self._fault is None:
            self._start()

    def __exit__(self, *_: object) -> None:
        try:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S_MAX)
        finally:
            self._kill()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        # A process that has left the session may keep the pipe open; then the reader thread ends with the judge.
        self._reading.join(STOP_S_MAX)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as output, self._stdout.open("ab") as kept:
            while data := os.read(output.fileno(), _RECEIVE_BYTES):
                kept.write(data)
                *lines, rest = (rest + data).split(b"\n")
                with self._turn:
                    self._heard_s = time.monotonic()
                    try:
                        for line in lines if len(rest) <= LINE_BYTES_MAX else [*lines, rest]:
                            self._log.read(line)
                    except InvalidInput as error:
                        self._fault = error
                        return

    # --- what is known of the consumer ----------------------------------------------------------------------------

    @property
    def silent_s(self) -> float:
        """How long the consumer has written nothing."""
        return time.monotonic() - self._heard_s

    @property
    def has_spoken(self) -> bool:
        return bool(self.look(lambda log: log.lines > log.passed_over))

    def look(self, at: Callable[[ConsumerLog], Any]) -> Any:
        """Return what a function returns for the log. No line is added during the call."""
        with self._turn:
            return at(self._log)

    def documents(self) -> dict[str, Held]:
        documents: dict[str, Held] = self.look(ConsumerLog.documents)
        return documents

    def complaint(self) -> str | None:
        """Return why the run can't continue, or None: the consumer has ended, or its output can't be read."""
        if self._fault is not None:
            return str(self._fault)
        if max(self._stdout.stat().st_size, self._stderr.stat().st_size) > OUTPUT_BYTES_MAX:
            return f"the consumer has written more than {OUTPUT_BYTES_MAX:,} bytes"
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        text = self._stderr.read_bytes()[-STDERR_BYTES_SHOWN:].decode(errors="replace").strip()
        said = "; its standard error ends with:\n" + "\n".join(map(printable, text.splitlines())) if text else ""
        return f"the consumer {how} before the judge was done{said}"


def _filled(part: str, environment: Mapping[str, str]) -> str:
    """Return an argument with its placeholders replaced. Other braces stay as they are."""
    for name, value in environment.items():
        part = part.replace("{" + name.removeprefix("HEADWATER_").lower() + "}", value)
    return part

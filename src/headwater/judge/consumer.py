"""The consumer under judgement: a process of its own, whose standard output is read all the time.

It never outlives the run, and never holds it up: it is killed with all processes of its session, and its output is
taken in by a thread, with limits on the length and the number of lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headwater.errors import InvalidInput
from headwater.judge.consumer_log import LINE_BYTES_MAX, ConsumerLog, Held
from headwater.phrases import printable

STOP_S_MAX = 2.0
"""How long a consumer may take to end after SIGTERM."""
STDERR_BYTES_SHOWN = 2000
OUTPUT_BYTES_MAX = 512 * 1024 * 1024
"""Of standard output, and of standard error."""
_RECEIVE_BYTES = 256 * 1024
_PR_SET_PDEATHSIG = 1


class Consumer:
    """A command that runs while the `with` block lasts."""

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
        """Kill it, take in what it had written, and start it again."""
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
        # A process that has left the session may hold the pipe: its reader ends with the judge.
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

    # --- what is known of it --------------------------------------------------------------------------------------

    @property
    def silent_s(self) -> float:
        """How long it has written nothing."""
        return time.monotonic() - self._heard_s

    @property
    def has_spoken(self) -> bool:
        return bool(self.look(lambda log: log.lines > log.passed_over))

    def look(self, at: Callable[[ConsumerLog], Any]) -> Any:
        """What a function makes of the log, while nothing is added to it."""
        with self._turn:
            return at(self._log)

    def documents(self) -> dict[str, Held]:
        documents: dict[str, Held] = self.look(ConsumerLog.documents)
        return documents

    def complaint(self) -> str | None:
        """Why the run can't go on: the consumer has ended, or writes what can't be read."""
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
    """An argument with its placeholders replaced. Other braces stay as they are."""
    for name, value in environment.items():
        part = part.replace("{" + name.removeprefix("HEADWATER_").lower() + "}", value)
    return part

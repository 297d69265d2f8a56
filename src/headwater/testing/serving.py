"""A node's process, over its starts and ends: the data and the ports stay, the process changes."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwater.testing.nursery import READY_S_MAX, STOP_S_MAX, NodeFailed, Nursery

_LOOK_EVERY_S = 0.002


class ServingProcess:
    """`headwater serve` on one data folder."""

    def __init__(self, nursery: Nursery, folder: Path, options: list[str]) -> None:
        self._nursery = nursery
        self._folder = folder
        self._options = options
        self._process: int | None = None
        """A file that stands for the process: a number alone may be another's by now."""
        self._starts = 0
        self.ports = ("0", "0")
        """Key-value and HTTP: free ones, until a start has found some."""
        self.ready: dict[str, Any] = {}
        """What the node has said when it was ready."""
        self.ready_s = 0.0
        """How long the last start took."""

    def start(self) -> None:
        if self._process is not None:
            raise NodeFailed("the node is running: stop or kill it first")
        self._starts += 1
        said = self._folder / f"ready-{self._starts}"
        port, http_port = self.ports
        arguments = ["--data", str(self._folder / "data"), "--port", port, "--http-port", http_port, "--json"]
        began_s = time.monotonic()
        pid = self._nursery.start([*arguments, *self._options], stdout=said, stderr=self._log)
        self._process = os.pidfd_open(pid)
        self.ready = self._read_ready(said, began_s + READY_S_MAX)
        self.ready_s = time.monotonic() - began_s
        self.ports = (_port(self.ready["ready"]), _port(self.ready["http"]))

    def _read_ready(self, said: Path, deadline_s: float) -> dict[str, Any]:
        while time.monotonic() < deadline_s:
            text = said.read_text() if said.exists() else ""
            if text.endswith("\n"):
                ready: dict[str, Any] = json.loads(text)
                return ready
            if self.has_ended:
                self._forget()
                raise NodeFailed(f"the node has ended before it was ready; its log says:\n{self.log()}")
            time.sleep(_LOOK_EVERY_S)
        self.end(signal.SIGKILL)
        raise NodeFailed(f"the node was not ready in {READY_S_MAX:.0f} s; its log says:\n{self.log()}")

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self.has_ended

    @property
    def has_ended(self) -> bool:
        assert self._process is not None
        return bool(select.select([self._process], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        if self._process is None:
            raise NodeFailed("the node is not running")
        signal.pidfd_send_signal(self._process, number)

    def end(self, number: signal.Signals) -> None:
        """Does nothing where no process is left."""
        if self._process is None:
            return
        if not self.has_ended:
            self.send(number)
            # One that is paused gets the signal when it goes on; one that was killed may be gone already.
            with suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
            if not select.select([self._process], [], [], STOP_S_MAX)[0]:
                self.send(signal.SIGKILL)
                self._forget()
                raise NodeFailed(f"the node did not stop in {STOP_S_MAX:.0f} s; its log says:\n{self.log()}")
        self._forget()

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.close(process)

    @property
    def _log(self) -> Path:
        return self._folder / "node.log"

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def _port(url: str) -> str:
    return url.rpartition(":")[2]

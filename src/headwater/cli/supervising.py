"""Restarting single nodes of `headwater serve --nodes`: `headwater cluster restart-node` asks the process that
supervises them.

That process holds a lock on `supervisor.pid` in the data folder, so the process number in it is the right one for as
long as the lock is held. A command leaves a file `start-N` beside it for node N and sends SIGUSR1. The supervisor
removes the file once the node is ready, or writes into it why the node can't be started.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.client.connection_string import Address
from headwater.durable_files import replace_file
from headwater.errors import HeadwaterError, InvalidInput

PORTS_FILE = "nodes.json"
_PID_FILE, _START = "supervisor.pid", "start-"
_LOOK_S = 0.1
REASON_BYTES_MAX = 4096


# --- the supervisor -----------------------------------------------------------------------------------------------


class StartRequests:
    """The requests of commands to the supervisor of a data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.asked = asyncio.Event()

    def take(self) -> list[int]:
        """Return the numbers of the nodes to start. Each is returned again until it is answered."""
        self.asked.clear()
        return sorted(
            int(name)
            for path in self._data.glob(f"{_START}*")
            if (name := path.name.removeprefix(_START)).isdecimal() and not path.stat().st_size
        )

    def answer(self, number: int, *, problem: str = "") -> None:
        """Report that the node is ready, or why it is not."""
        path = self._data / f"{_START}{number}"
        if problem:
            path.write_text(problem[:REASON_BYTES_MAX])
        else:
            path.unlink(missing_ok=True)


@contextmanager
def supervising(data: Path) -> Iterator[StartRequests]:
    """Make this process the only supervisor of a data folder. Call it in the event loop."""
    requests, loop = StartRequests(data), asyncio.get_running_loop()
    # Before the lock exists that commands look for: without a handler, their signal would end this process.
    loop.add_signal_handler(signal.SIGUSR1, requests.asked.set)
    try:
        with (data / _PID_FILE).open("a+") as file:
            if not _lock(file.fileno()):
                hint = "Stop it, or give another --data"
                raise InvalidInput(f"another process already runs the nodes in {data}", hint=hint)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            for path in data.glob(f"{_START}*"):
                # A request that an earlier supervisor did not answer.
                path.unlink(missing_ok=True)
            yield requests
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the command --------------------------------------------------------------------------------------------------


def restart_node(data: Path, address: Address, *, within_s: float) -> None:
    """Restart a node that has ended. Returns once it is ready.

    Raises:
        InvalidInput: There is no such node, or no process that supervises it.
        HeadwaterError: It could not be started, or not in time.
    """
    number = _number_of(data, address)
    supervisor = _supervisor_of(data)
    if supervisor is None:
        raise InvalidInput(
            f"no `headwater serve --nodes` runs the nodes in {data}",
            hint=f"Start them all: `headwater serve --nodes N --data {data}`",
        )
    _ask(data, number, supervisor, within_s=within_s)


def _supervisor_of(data: Path) -> int | None:
    try:
        with (data / _PID_FILE).open() as file:
            return None if _lock(file.fileno()) else int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def _number_of(data: Path, address: Address) -> int:
    path = data / PORTS_FILE
    try:
        nodes = json.loads(path.read_text())
        ports = [{one["port"], one.get("tls_port")} for one in nodes]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{data} is not the data folder of `headwater serve --nodes`",
            hint="Give the one that the command has printed when it started",
        ) from error
    number = next((at for at, known in enumerate(ports, start=1) if address.port in known), None)
    if number is None:
        raise InvalidInput(
            f"{address} is not a node in {data}", hint="See the addresses with `headwater cluster status`"
        )
    return number


def _ask(data: Path, number: int, supervisor: int, *, within_s: float) -> None:
    path, deadline_s = data / f"{_START}{number}", time.monotonic() + within_s
    replace_file(path, b"", is_private=True)
    os.kill(supervisor, signal.SIGUSR1)
    while time.monotonic() < deadline_s:
        try:
            problem = path.read_text()
        except FileNotFoundError:
            return
        if problem:
            path.unlink(missing_ok=True)
            raise HeadwaterError(problem, hint="See the log of `headwater serve`")
        time.sleep(_LOOK_S)
    path.unlink(missing_ok=True)
    raise HeadwaterError(f"the node was not ready in {within_s:.0f} s", hint="See the log of `headwater serve`")

"""A well-behaved client in a separate process: it sends noops over and over, and reports how long they took.

The process that attacks a node has threads, which would delay this client. It runs until its input ends, and then
prints the times in milliseconds as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.protocol.messages.session import Noop
from headwater.protocol.sasl import Credentials
from support.node_process import NodeProcess

_PAUSE_S = 0.002


class NoopClock:
    """Runs until the `with` block ends."""

    def __init__(self, node: NodeProcess) -> None:
        address = (node.address.host, str(node.address.port), str(node.user), node.password, str(node.pid))
        self._command = [sys.executable, "-m", "support.noop_clock", *address]
        self.latencies_ms: list[float] = []
        self.loops_ms: list[float] = []
        """The processor time that the node's event loop took until it answered: the latency on a machine with no
        other load."""

    def __enter__(self) -> NoopClock:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, **pipes, env=environment, text=True)
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate(timeout=120)
        self.latencies_ms, self.loops_ms = (sorted(times) for times in zip(*json.loads(output), strict=True))


def at(share: float, times: list[float]) -> float:
    """Return the time that this share of the times does not exceed."""
    return times[min(len(times) - 1, int(share * len(times)))]


def measure(host: str, port: str, user: str, password: str, pid: str) -> None:
    login = Login(credentials=Credentials(user, password), bucket="default")
    with KvConnection.open(Address(host, int(port)), login) as connection:
        over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
        print("ready", flush=True)
        times_ms = []
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb", buffering=0) as schedule:

            def loop_ns() -> int:
                return int(os.pread(schedule.fileno(), 64, 0).split()[0])

            while not over.is_set():
                began_ns, began_s = loop_ns(), time.perf_counter()
                connection.request(Noop())
                times_ms.append((1e3 * (time.perf_counter() - began_s), 1e-6 * (loop_ns() - began_ns)))
                time.sleep(_PAUSE_S)
    print(json.dumps(times_ms))


if __name__ == "__main__":
    measure(*sys.argv[1:])

"""A small private network: hosts in network namespaces, joined by bridges that can be separated.

Each host is a namespace with one address. Its cable ends at a switch, also in a namespace, with two bridges: hosts
on different bridges can't reach each other. A cut is silent, as in a real network: nothing is refused or reset, and
packets do not arrive. The addresses are from the range for benchmarks (RFC 2544), and no namespace has a route out.

`python -m support.network NAMESPACE ARGUMENT…` runs `python ARGUMENT…` on a host.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

_CLONE_NEWNET = 0x40000000
_BRIDGES = ("one", "two")


def why_not() -> str:
    """Return why namespaces can't be created here, or an empty string if they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and iproute2"
    trial = f"hw{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", trial], check=True)
    return ""


def enter(namespace: str) -> None:
    """Move the calling thread into a namespace: sockets that it creates from now on are in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the namespace {namespace}")
    finally:
        os.close(descriptor)


class Network:
    """Hosts by name. They are removed when the `with` block ends."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self._prefix = f"hw{os.getpid()}-"
        self._switch = f"{self._prefix}switch"

    def namespace(self, host: str) -> str:
        return self._prefix + host

    def address(self, host: str) -> str:
        return f"198.18.29.{self.hosts.index(host) + 1}"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        for bridge in _BRIDGES:
            self._in_switch("link", "add", bridge, "type", "bridge")
            self._in_switch("link", "set", bridge, "up")
        for host in self.hosts:
            namespace = self.namespace(host)
            _ip("netns", "add", namespace)
            self._in_switch("link", "add", f"to-{host}", "type", "veth", "peer", "name", "cable", "netns", namespace)
            self._in_switch("link", "set", f"to-{host}", "master", _BRIDGES[0], "up")
            _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", namespace, "link", "set", device, "up")

    def _remove(self) -> None:
        for host in (*map(self.namespace, self.hosts), self._switch):
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)

    def _in_switch(self, *words: str) -> None:
        _ip("-n", self._switch, *words)

    def cut_off(self, hosts: Collection[str]) -> None:
        """Separate these hosts from the others. Within each of the two groups, all can reach each other."""
        for host in self.hosts:
            self._in_switch("link", "set", f"to-{host}", "master", _BRIDGES[host in hosts])

    def heal(self) -> None:
        self.cut_off(())

    @contextmanager
    def on(self, host: str) -> Iterator[None]:
        """Let the calling thread create its sockets on a host."""
        here = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        before = os.open(here, os.O_RDONLY)
        enter(self.namespace(host))
        try:
            yield
        finally:
            ctypes.CDLL(None).setns(before, _CLONE_NEWNET)
            os.close(before)

    def connect(self, host: str, to: str, port: int, *, timeout_s: float) -> socket.socket:
        """Return a connection from one host to another."""
        with self.on(host):
            return socket.create_connection((self.address(to), port), timeout=timeout_s)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


if __name__ == "__main__":
    from support.forked_program import run_arguments

    enter(sys.argv[1])
    run_arguments(sys.argv[2:])

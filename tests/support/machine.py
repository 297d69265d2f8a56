"""Certificates for tests with TLS."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

from headwater.kernels.machine_code import KERNELS


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for loopback. Returns it and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


class Authority:
    """A private certificate authority, which signs the certificates of several nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate, self._key = folder / "authority.pem", folder / "authority.key"
        _openssl("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=an authority",
                 "-keyout", self._key, "-out", self.certificate)  # fmt: skip

    def certify(self, name: str) -> tuple[Path, Path]:
        """Create a certificate for loopback, followed by the authority's. Returns the chain and its key."""
        chain, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", "-new", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial",
                 "-days", "2", "-extfile", extensions, "-out", chain)  # fmt: skip
        chain.write_text(chain.read_text() + self.certificate.read_text())
        return chain, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


# A DNS server on loopback over UDP, for tests: it answers with SRV records that the test may change at any time.


Record = tuple[int, int, int, str]
"""Priority, weight, port and target."""
Manner = Callable[[bytes], bytes | None]
"""Takes a question and returns the answer; None sends nothing."""

_TTL_S = 300
_QUESTION_BYTES_MAX = 4096


class DnsServer:
    """Runs in a thread until the `with` block ends. Set another `manner` for other kinds of answers."""

    def __init__(self, records: dict[str, list[Record]] | None = None) -> None:
        self.records = records or {}
        """By name, without the final dot. An empty list stands for a name without records of this kind."""
        self.questions: list[str] = []
        self.manner: Manner = self._answer
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="dns server")

    @property
    def options(self) -> str:
        """The options of a connection string that select this server."""
        return f"dns_nameserver=127.0.0.1&dns_port={self.port}"

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def _serve(self) -> None:
        while True:
            question, asker = self._socket.recvfrom(_QUESTION_BYTES_MAX)
            if not question:
                return
            self.questions.append(dns.message.from_wire(question).question[0].name.to_text(omit_final_dot=True))
            answer = self.manner(question)
            if answer is not None:
                self._socket.sendto(answer, asker)

    def _answer(self, question: bytes) -> bytes:
        query = dns.message.from_wire(question)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        name = query.question[0].name
        records = self.records.get(name.to_text(omit_final_dot=True))
        if records is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif records:
            texts = [" ".join(map(str, record)) for record in records]
            response.answer.append(dns.rrset.from_text(name, _TTL_S, "IN", "SRV", *texts))
        return response.to_wire(max_size=0xFFFF)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stopper:
            stopper.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()


# Running something in a separate process: for limits that can't be undone, and for calls that may end a process.


FAILED = 99
"""The exit code of a function that raised an unexpected error."""


def forked(function: Callable[[], int | None]) -> int:
    """Return what a function returns in a fork of this process, or minus the number of the signal that ended it.

    A fork has everything loaded, including compiled kernels, and takes milliseconds where a new process takes a second.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            code = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Work as a number that is the same on every machine: the Python calls and lines that are run.


def calls_of(work: Callable[[], object]) -> int:
    """Return how many calls, lines and returns of Python the work takes."""
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += 1
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


# The kernels that are ready to be called.


def loaded_kernels() -> set[str]:
    return {kernel.name for kernel in KERNELS if kernel.is_loaded}

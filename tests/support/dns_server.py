"""A DNS server on loopback over UDP, for tests: it answers for SRV records that the test may change at any time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

Record = tuple[int, int, int, str]
"""Priority, weight, port and target."""
Manner = Callable[[bytes], bytes | None]
"""Takes a question, gives the answer; None says nothing."""

_TTL_S = 300
_QUESTION_BYTES_MAX = 4096


class DnsServer:
    """Runs in a thread inside of `with`. Other kinds of answers come from another `manner`."""

    def __init__(self, records: dict[str, list[Record]] | None = None) -> None:
        self.records = records or {}
        """By name, without the final dot. An empty list is a name that has no records of the kind."""
        self.questions: list[str] = []
        self.manner: Manner = self._answer
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="dns server")

    @property
    def options(self) -> str:
        """What a connection string says to ask this server."""
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

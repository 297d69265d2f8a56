"""One request to an HTTP server of others, bounded in time and in bytes: a node's management side, or a catalog.

A password or a token goes into a header of the request and nowhere else: no error repeats what was sent.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.errors import ConnectionFailed, HeadwaterError, TlsFailed

CONNECT_S = 10.0
ANSWER_S = 40.0
"""Above what a node may take to answer, which is 30 s where it waits for others."""
ANSWER_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """Where it is, and what a user can do if it does not answer."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    hint: str = ""
    """If nothing answers."""
    hint_other: str = ""
    """If what answers is no HTTP."""
    hint_tls: str = "Check that the port uses TLS, and that this machine trusts its certificate"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def ask(
        self, method: str, target: str, *, headers: Mapping[str, str], body: str | bytes | None = None
    ) -> tuple[int, Any]:
        """Send a request. Returns the status, and the JSON of the answer; what is not JSON as text.

        Raises:
            ConnectionFailed: Nothing answers, or not in time.
            TlsFailed: The server is not trusted, or does not speak TLS.
            HeadwaterError: What answers does not speak HTTP, or does not end.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_S)
        if self.tls is not None:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=CONNECT_S, context=self.tls)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX + 1)
        except http.client.HTTPException as error:
            raise HeadwaterError(f"{self} does not speak HTTP", hint=self.hint_other) from error
        except ssl.SSLError as error:
            raise TlsFailed(f"no TLS with {self}: {error.reason or error}", hint=self.hint_tls) from error
        except OSError as error:
            raise ConnectionFailed(f"{self} can't be reached: {error.strerror or error}", hint=self.hint) from error
        finally:
            connection.close()
        if len(answer) > ANSWER_BYTES_MAX:
            raise HeadwaterError(f"the answer of {self} has more than {ANSWER_BYTES_MAX} bytes")
        try:
            return response.status, json.loads(answer)
        except (ValueError, RecursionError):
            return response.status, answer.decode(errors="replace")

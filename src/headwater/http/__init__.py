"""HTTP for a node and for the page of a lake, and requests to servers of others.

`serving` serves an application on sockets, and has what applications share; it does not know what is served. `ask` is
the other side: one request, bounded in time and in bytes, to a node's management side or to a catalog.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any

from headwater.errors import HeadwaterError

TOKEN_VARIABLE = "HEADWATER_UI_TOKEN"
"""The environment variable with the token of the page of a landing, for who serves it and who asks it."""
CONNECT_S = 10.0
ANSWER_S = 40.0
"""Above what a node may take to answer, which is 30 s where it waits for others."""
ANSWER_BYTES_MAX = 16 * 1024 * 1024


def ask(
    host: str,
    port: int,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str],
    body: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    answer_s: float = ANSWER_S,
) -> tuple[int, Any]:
    """Send a request. Returns the status, and the JSON of the answer; what is not JSON as text.

    Raises:
        OSError: Nothing answers, or not in time; `ssl.SSLError` without TLS that both sides accept. The caller knows
            what a user can do about it.
        http.client.HTTPException: What answers does not speak HTTP.
        HeadwaterError: The answer is too long.
    """
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    if tls is not None:
        connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=tls)
    try:
        connection.connect()
        connection.sock.settimeout(answer_s)
        connection.request(method, target, body, dict(headers))
        response = connection.getresponse()
        answer = response.read(ANSWER_BYTES_MAX + 1)
    finally:
        connection.close()
    if len(answer) > ANSWER_BYTES_MAX:
        raise HeadwaterError(f"the answer of {host}:{port} has more than {ANSWER_BYTES_MAX} bytes")
    try:
        return response.status, json.loads(answer)
    except (ValueError, RecursionError):
        return response.status, answer.decode(errors="replace")

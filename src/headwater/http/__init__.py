"""HTTP for a node and for the page of a lake, and requests to servers of others.

`serving` serves an application on sockets, and has what applications share; it does not know what is served. `ask` is
the other side: one request, bounded in time and in bytes, to a node's management side or to a catalog.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from headwater.errors import HeadwaterError

TOKEN_VARIABLE = "HEADWATER_UI_TOKEN"
"""The environment variable with the token of the page of a landing, for who serves it and who asks it."""
CONNECT_S = 10.0
ANSWER_S = 40.0
"""Above what a node may take to answer, which is 30 s where it waits for others."""
ANSWER_BYTES_MAX = 16 * 1024 * 1024
AS_THEY_ARE = "surrogateescape"


def ask(
    host: str,
    port: int,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    login: tuple[str, str] | None = None,
    form: Mapping[str, str] | None = None,
    body: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    answer_s: float = ANSWER_S,
    bytes_max: int | None = None,
) -> tuple[int, Any]:
    """Send a request, with a user and a password as `login`, and with a `form` or another body. Returns the status, and
    the JSON of the answer; what is not JSON as text.

    Raises:
        OSError: Nothing answers, or not in time; `ssl.SSLError` without TLS that both sides accept. The caller knows
            what a user can do about it.
        http.client.HTTPException: What answers does not speak HTTP.
        HeadwaterError: The answer is too long.
    """
    headers = dict(headers)
    # Bytes of a command line that are not UTF-8 are sent as they are, for the server to refuse.
    if login is not None:
        encoded = base64.b64encode(":".join(login).encode(errors=AS_THEY_ARE))
        headers["Authorization"] = f"Basic {encoded.decode()}"
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        body = urlencode(form, errors=AS_THEY_ARE)
    connect_s = min(CONNECT_S, answer_s)
    connection = http.client.HTTPConnection(host, port, timeout=connect_s)
    if tls is not None:
        connection = http.client.HTTPSConnection(host, port, timeout=connect_s, context=tls)
    try:
        connection.connect()
        connection.sock.settimeout(answer_s)
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        most = ANSWER_BYTES_MAX if bytes_max is None else bytes_max
        answer = response.read(most + 1)
    finally:
        connection.close()
    if len(answer) > most:
        raise HeadwaterError(f"the answer of {host}:{port} has more than {most} bytes")
    try:
        return response.status, json.loads(answer)
    except (ValueError, RecursionError):
        return response.status, answer.decode(errors="replace")

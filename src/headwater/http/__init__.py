"""Serve HTTP for a node and for the page of a lake, and send requests to other servers.

`serving` runs an application on sockets, and has what applications share; it does not know what they serve. `ask` is
the client side: one request, limited in time and in bytes, to a node's management side or to a catalog.
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
"""The environment variable with the token of a landing's page, for the process that serves it and its readers."""
CONNECT_S = 10.0
ANSWER_S = 40.0
"""Longer than a node may take to answer, which is 30 s if it waits for others."""
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
    the answer, which is decoded if it is JSON, and otherwise text.

    Raises:
        OSError: No server answers in time; `ssl.SSLError` if the two sides can't agree on TLS. The caller knows what a
            user can do about it.
        http.client.HTTPException: The server does not speak HTTP.
        HeadwaterError: The answer is too long.
    """
    headers = dict(headers)
    # Bytes of a command line that are not UTF-8 are sent unchanged, for the server to refuse.
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

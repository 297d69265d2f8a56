"""The bounds of connections and requests, of whatever is served."""

from __future__ import annotations

CONNECTIONS_MAX = 512
"""Beyond that a connection takes the place of an idle one."""
CONNECTIONS_RESERVED = 64
"""Where none is idle, so many more are let in to ask whether the server lives. All else is answered with 503 there."""
REQUEST_S_MAX = 10.0
"""How long a connection may take for the TLS handshake, to send the head of a request, and then the body of it."""
KEEP_ALIVE_S = 60
"""How long a connection may rest between two requests. Clients poll every few seconds."""
STOP_S_MAX = 5
"""How long requests under way may take to end when the server stops."""
HEAD_BYTES_MAX = 16 * 1024
"""Path and headers. The longest real one has a password in it."""
HEAD_BUFFER_BYTES_MAX = 32 * 1024
"""Where the HTTP parser gives up, with an answer of its own: above what gets ours."""
BODY_BYTES_MAX = 64 * 1024
"""The longest form there is names a collection."""
LOGIN_BODY_BYTES_MAX = 8 * 1024
"""A log-in on a page is a name and a password, or a token."""
SESSIONS_MAX = 256
"""Log-ins on a page that are remembered at a time; beyond that the one that was used longest ago is forgotten."""
SESSION_S = 12 * 3600.0
"""How long a log-in on a page lasts that is not used."""
HSTS_S = 365 * 86_400
"""For how long a browser that has come by TLS comes back by TLS only."""

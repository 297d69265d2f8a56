"""The bounds of the HTTP side, in one place."""

from __future__ import annotations

CONNECTIONS_MAX = 512
"""Beyond that a request is answered with 503."""

REQUEST_S_MAX = 10.0
"""How long a connection may take to send the head of a request, and then the body of it."""

KEEP_ALIVE_S = 60
"""How long a connection may rest between two requests. Clients poll every few seconds."""

STOP_S_MAX = 5
"""How long requests under way may take to end when the node stops."""

HEAD_BYTES_MAX = 16 * 1024
"""Path and headers. The longest real one has a password in it."""

HEAD_BUFFER_BYTES_MAX = 32 * 1024
"""Where the HTTP parser gives up, with an answer of its own: above what gets ours."""

BODY_BYTES_MAX = 64 * 1024
"""The longest form there is names a collection."""

FORM_FIELDS_MAX = 16

STREAMS_MAX = 256
"""Streams of configs that are open at a time."""

STREAM_REPEAT_S = 60.0
"""A stream says the config again after this time, so that a client that is gone is noticed."""

ENSURE_S_DEFAULT = 30.0
ENSURE_S_MAX = 300.0
"""How long a request may wait for a manifest."""

LOGINS_KNOWN_MAX = 1_024
LOGIN_KNOWN_S = 60.0
"""How many checked passwords are remembered, as keyed hashes, and how long."""

LOGINS_WAITING_MAX = 64
"""Passwords are checked one at a time; this many may wait for that."""

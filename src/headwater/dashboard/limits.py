"""The bounds of the dashboard, in one place."""

from __future__ import annotations

SESSIONS_MAX = 256
"""Log-ins that are remembered at a time; beyond that the one that was used longest ago is forgotten."""
SESSION_S = 12 * 3600.0
"""How long a log-in lasts that nobody uses."""

VIEWERS_MAX = 32
"""Live feeds that are open at a time."""

TICK_S = 1.0
"""How often numbers are taken, and sent to those who look."""
TICK_SHARE_MAX = 0.05
TICK_S_MAX = 5.0
"""Which part of its time the node may spend on that before it is done less often, and how seldom that gets."""
PEERS_IDLE_TICKS = 10
"""The other nodes of the cluster are asked at every tick while somebody looks, and else once in so many."""
PEERS_S_MAX = 0.2
"""How long a tick waits for their answers, so that what is shown of all nodes is of about the same moment."""
HISTORY_POINTS = 600
"""Ticks that the charts can look back."""
EVENTS_MAX = 200
"""Events that are remembered."""
EVENT_VBUCKETS_MAX = 8
"""Vbuckets that one event names; the rest is counted."""

COUNTED_SLOTS_MAX = 2_000_000
"""Slots of the index that a tick looks at to count documents; the rest has its turn in the next."""

CONNECTIONS_SHOWN_MAX = 64
STREAMS_SHOWN_MAX = 1024

SEARCH_ROWS_MAX = 200
SEARCH_KEY_CHARS_MAX = 250
SEARCH_BYTES_MAX = 256 * 1024 * 1024
"""How much of what is stored one search looks through, newest first."""
SEARCH_S_MAX = 1.0
SEARCHES_WAITING_MAX = 16
"""One search runs at a time; this many may wait for that."""

PREVIEW_CHARS_MAX = 200
VALUE_CHARS_MAX = 256 * 1024
"""How much of one document is shown."""

LOGIN_BODY_BYTES_MAX = 8 * 1024
LOGIN_BODY_S_MAX = 10.0

LANDING_EVERY_S = 2.0
LANDING_S_MAX = 2.0
LANDING_BYTES_MAX = 1024 * 1024
LANDINGS_MAX = 8
"""How often the metrics of a landing are fetched, how long that may take, how long they may be, and how many."""

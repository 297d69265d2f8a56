"""The bounds of the HTTP side, the dashboard's included: every buffer, queue, wait and list that a client can fill.

Handlers import what they need from here. The bounds of connections, requests and log-ins are in
`headwater.http.limits`. A bound that is named in neither does not exist.
"""

from __future__ import annotations

# --- connections and requests -------------------------------------------------------------------------------------

FORM_FIELDS_MAX = 16

STREAMS_MAX = 256
"""Streams of configs that are open at a time."""
STREAM_REPEAT_S = 60.0
"""A stream sends the config again after this time, so that a client that is gone is noticed."""
ENSURE_S_DEFAULT = 30.0
ENSURE_S_MAX = 300.0
"""How long a request may wait for a manifest."""

OTHER_NODE_S_MAX = 20.0
OTHER_NODE_BYTES_MAX = 64 * 1024
"""How long another node of the cluster may take to do its part of a change, and how long its answer may be."""

# --- the dashboard's numbers --------------------------------------------------------------------------------------

VIEWERS_MAX = 32
"""Live feeds that are open at a time."""
TICK_S = 1.0
"""How often numbers are taken, and sent to viewers."""
TICK_SHARE_MAX = 0.05
TICK_S_MAX = 5.0
"""Which part of its time the node may spend on that before it is done less often, and how seldom that gets."""
PEERS_IDLE_TICKS = 3
"""The other nodes of the cluster are asked at every tick while there are viewers, and else once in so many. What they
last had is the measure of what their loss loses."""
PEERS_S_MAX = 0.2
"""How long a tick waits for their answers, so that what is shown of all nodes is of about the same moment."""
HISTORY_POINTS = 600
"""Ticks that the charts can look back."""
COUNTED_SLOTS_MAX = 500_000
"""Slots of the index that a tick looks at to count documents; the rest has its turn in the next."""
EVENTS_ROOM_BYTES = 64 * 1024 * 1024
"""With less room on the disk the history is kept in memory only."""
CONNECTIONS_SHOWN_MAX = 64
STREAMS_SHOWN_MAX = 1024

# --- searches -----------------------------------------------------------------------------------------------------

SEARCH_ROWS_MAX = 200
SEARCH_KEY_CHARS_MAX = 250
NAME_CHARS_MAX = 600
"""Names of collections and connections in a query."""
SEARCH_BYTES_MAX = 256 * 1024 * 1024
"""How much of what is stored one search looks through, newest first."""
SEARCH_S_MAX = 1.0
SEARCHES_WAITING_MAX = 16
"""One search runs at a time; this many may wait for that."""
PREVIEW_CHARS_MAX = 200
VALUE_CHARS_MAX = 256 * 1024
"""How much of one document is shown."""

# --- landings -----------------------------------------------------------------------------------------------------

LANDING_EVERY_S = 2.0
LANDING_S_MAX = 2.0
LANDING_BYTES_MAX = 1024 * 1024
LANDINGS_MAX = 8
"""How often the metrics of a landing are fetched, how long that may take, how long they may be, and how many."""

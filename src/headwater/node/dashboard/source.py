"""What the dashboard needs of a node. Whoever starts the node hands in something that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, Unpack

import numpy as np
from starlette.requests import Request

from headwater.log_fields import Fields
from headwater.node.auth.users import Action
from headwater.node.consumer.views import ConsumerView
from headwater.node.http.call import Refusal
from headwater.node.http.logins import Logins
from headwater.node.kv.service import Traffic
from headwater.node.node import Node
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics, stream_backlogs
from headwater.store.bucket import Bucket

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
"""A number of each vbucket."""


class StreamNumbers(Protocol):
    """A DCP stream."""

    @property
    def vbucket(self) -> int: ...
    @property
    def stream_id(self) -> int | None: ...
    @property
    def state(self) -> str: ...
    @property
    def start_seqno(self) -> int: ...
    @property
    def end_seqno(self) -> int: ...
    @property
    def last_sent_seqno(self) -> int: ...
    @property
    def backlog_items(self) -> int:
        """How many seqnos it is behind what is durable."""
        ...

    @property
    def frames_sent(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...


class ConnectionNumbers(Protocol):
    """A DCP connection that gets changes."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def open_s(self) -> float: ...
    @property
    def total_bytes_sent(self) -> int: ...
    @property
    def total_messages_sent(self) -> int: ...
    @property
    def total_acked_bytes(self) -> int: ...
    @property
    def unacked_bytes(self) -> int: ...
    @property
    def max_buffer_bytes(self) -> int:
        """The consumer's buffer; 0 for no flow control."""
        ...

    @property
    def noop_wait(self) -> bool: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def backlog_items(self) -> int: ...
    @property
    def streams(self) -> Sequence[StreamNumbers] | None:
        """None where the connection was not asked for by its name."""
        ...


class ConsumerNumbers(Protocol):
    """A DCP connection by which this node receives its copies of vbuckets that are active elsewhere."""

    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> str:
        """The address that it goes to."""
        ...

    @property
    def is_proxied(self) -> bool:
        """Whether somebody joins this node to the producer, as in a takeover."""
        ...

    @property
    def open_s(self) -> float: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def received_changes(self) -> int: ...
    @property
    def unacked_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def buffer_bytes_max(self) -> int: ...
    @property
    def is_held(self) -> bool: ...
    @property
    def vbuckets(self) -> Sequence[int]: ...


class TrafficNumbers(Protocol):
    """What was moved since the node started."""

    @property
    def requests(self) -> int: ...
    @property
    def sent_messages(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def rollbacks(self) -> int: ...


class NodeSource(Protocol):
    """The node, read only. Everything is called in the event loop that serves the dashboard."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def version(self) -> str: ...

    def now_s(self) -> float:
        """A clock that never goes back."""
        ...

    def uptime_s(self) -> float: ...

    def log(self, message: str, **about: Unpack[Fields]) -> None: ...

    async def log_in(self, peer: str, name: str, password: str) -> None:
        """Raise what the HTTP side answers with a refusal unless the user has this password."""
        ...

    async def user_of(self, request: Request) -> str:
        """The user by HTTP's basic authentication; raises a refusal, too."""
        ...

    def user(self, name: str) -> object | None:
        """What stands for a user: another object once its password or its rights have changed."""
        ...

    def may_see(self, user: str, bucket: str) -> bool:
        """Whether the user may read the bucket's documents and changes. False where there is no such user."""
        ...

    def bucket_names(self) -> Iterable[str]: ...

    def bucket(self, name: str) -> Bucket: ...

    def disk_bytes(self, bucket: str) -> int: ...

    def cluster_config(self, bucket: str) -> bytes: ...

    def traffic(self, bucket: str) -> TrafficNumbers: ...

    def connections(self, bucket: str, name: str | None = None) -> Sequence[ConnectionNumbers]:
        """The connections that get changes, or the one that is named, with its streams."""
        ...

    def consumers(self, bucket: str) -> Sequence[ConsumerNumbers]:
        """The connections by which this node receives its copies."""
        ...

    def lags(self, bucket: str) -> Counts:
        """Of each vbucket: how many seqnos the stream of it that is furthest behind has still to get."""
        ...

    # --- the other nodes of the cluster ---------------------------------------------------------------------------

    def holds_replicas(self, bucket: str) -> bool:
        """Whether copies here are let fall behind, for a drill."""
        ...

    def offer_numbers(self, bucket: str, tell: Callable[[], Iterable[tuple[str, object]]]) -> None:
        """Let the other nodes have what this tells, when they ask for it with `numbers_of`."""
        ...

    def other_nodes(self, bucket: str) -> Sequence[str]:
        """The other nodes of the bucket's cluster, by the names that its config has for them."""
        ...

    async def numbers_of(self, bucket: str, node: str) -> Mapping[str, str]:
        """What another node offers. Raises a `HeadwaterError` where it does not answer."""
        ...


# The bounds of the dashboard, in one place.


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


# The node as those see it who show it to people: read only, and with nothing made for them in advance.
#
# The dashboard names what it needs (`dashboard.source.NodeSource`), and this has it. Neither package knows the other.


Lags = np.ndarray[tuple[int], np.dtype[np.int64]]


class Inspection:
    """See the module. Everything is called in the node's event loop."""

    def __init__(self, node: Node, logins: Logins) -> None:
        self._node = node
        self._logins = logins

    @property
    def is_ready(self) -> bool:
        return self._node.is_ready

    @property
    def version(self) -> str:
        return self._node.server_version

    def now_s(self) -> float:
        return self._node.now_s()

    def uptime_s(self) -> float:
        return self._node.uptime_s()

    def log(self, message: str, **about: Unpack[Fields]) -> None:
        self._node.log(message, **about)

    # --- who asks -------------------------------------------------------------------------------------------------

    async def log_in(self, peer: str, name: str, password: str) -> None:
        """Raise a refusal unless the user has this password. Failures count in the node's one throttle."""
        try:
            await self._logins.check(peer, name, password)
        except Refusal as refusal:
            # A browser would ask with a window of its own if it saw the challenge.
            headers = {key: value for key, value in (refusal.headers or {}).items() if key != "WWW-Authenticate"}
            raise Refusal(refusal.status, refusal.body, headers=headers) from refusal

    async def user_of(self, request: Request) -> str:
        """The user by HTTP's basic authentication, for programs."""
        return await self._logins.user_of(request)

    def user(self, name: str) -> object | None:
        """What stands for the user as it is now: another object once its password or its rights have changed."""
        return self._node.users.by_name.get(name)

    def may_see(self, user: str, bucket: str) -> bool:
        """Whether the user may read the bucket's documents and changes."""
        users = self._node.users
        return users.may(user, Action.READ, bucket) and users.may(user, Action.STREAM, bucket)

    # --- what there is --------------------------------------------------------------------------------------------

    def bucket_names(self) -> Iterable[str]:
        return self._node.bucket_names()

    def bucket(self, name: str) -> Bucket:
        return self._node.bucket_service(name).bucket

    def disk_bytes(self, bucket: str) -> int:
        return self._node.folder.disk_bytes(bucket)

    def cluster_config(self, bucket: str) -> bytes:
        return self._node.cluster_config(bucket)

    def traffic(self, bucket: str) -> Traffic:
        """The totals of all connections, those that are gone included."""
        ended, connections = self._node.bucket_service(bucket).ended, self._node.producer_connections(bucket)
        return Traffic(
            requests=self._node.kv_requests(bucket),
            sent_messages=ended.sent_messages + sum(connection.sent_messages for connection in connections),
            sent_bytes=ended.sent_bytes + sum(connection.sent_bytes for connection in connections),
            rollbacks=ended.rollbacks,
        )

    def connections(self, bucket: str, name: str | None = None) -> list[ConnectionStatistics]:
        """All connections without their streams, or the one that is named with them."""
        connections = self._node.producer_connections(bucket)
        return connection_statistics(connections, now_s=self.now_s(), name=name, streams_max=0)

    def consumers(self, bucket: str, name: str | None = None) -> list[ConsumerView]:
        """All connections that this node receives its copies by without their streams, or the one named with them."""
        return self._node.consumer_views(bucket, name, streams_max=0)

    def lags(self, bucket: str) -> Lags:
        """Of each vbucket: how many seqnos the stream of it that is furthest behind has still to get."""
        lags: Lags = np.zeros(len(self.bucket(bucket).vbuckets), dtype=np.int64)
        for connection in self._node.producer_connections(bucket):
            np.maximum.at(lags, *stream_backlogs(connection))
        return lags

    # --- the other nodes of the cluster ---------------------------------------------------------------------------

    def holds_replicas(self, bucket: str) -> bool:
        """Whether copies here are let fall behind, for a drill."""
        return self._node.membership(bucket).replication.is_held

    def offer_numbers(self, bucket: str, tell: Callable[[], Iterable[tuple[str, object]]]) -> None:
        """Let the other nodes have what this tells, when they ask for it with `numbers_of`."""
        self._node.bucket_service(bucket).vbucket_numbers = tell

    def other_nodes(self, bucket: str) -> list[str]:
        """The other nodes of the bucket's cluster, by the names that its config has for them."""
        return self._node.membership(bucket).peer_statistics.names()

    async def numbers_of(self, bucket: str, node: str) -> Mapping[str, str]:
        """What another node offers. Raises a `HeadwaterError` where it does not answer."""
        return await self._node.membership(bucket).peer_statistics.ask(node, "headwater-vbuckets")

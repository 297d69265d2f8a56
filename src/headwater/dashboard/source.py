"""What the dashboard needs of a node. Whoever starts the node hands in something that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, Unpack

import numpy as np
from starlette.requests import Request

from headwater.log_fields import Fields
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

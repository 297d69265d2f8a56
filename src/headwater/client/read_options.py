"""What can be asked of a read: where it starts and ends, what of the changes it wants, and how it is to be carried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from headwater.client.offsets import Offsets
from headwater.errors import InvalidInput
from headwater.protocol.numbers import CONNECTION_BUFFER_BYTES_MAX, CONNECTION_NAME_BYTES_MAX, Seqno, VBucketId

MIB = 1024 * 1024
NAME_BYTES_MAX = CONNECTION_NAME_BYTES_MAX - 64
"""The rest is for what tells the connections of a reader apart."""


class Start(StrEnum):
    BEGINNING = "beginning"
    NOW = "now"


class End(StrEnum):
    NOW = "now"


class Snapshots(StrEnum):
    """When a change is handed out."""

    COMPLETE = "complete"
    """When all of its snapshot is there, so that a snapshot that breaks off is never seen. One much larger than
    `batch_bytes` comes in several batches, with nothing in between; offsets tell whether they are at its end."""
    AS_THEY_COME = "as-they-come"
    """At once. A snapshot that is cut off may leave some keys newer than others until the read goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of `changes` and `batches`. Values are checked when it is made."""

    start: Start | Offsets = Start.BEGINNING
    """`now` is when the first change is asked for, or when `start()` of the read returns. Vbuckets that given offsets
    don't name are read from their beginning."""
    end: End | Mapping[VBucketId, Seqno] | None = None
    """None is for ever. A vbucket that a mapping does not name is not read. The read goes on to the end of the
    snapshot that holds the last seqno."""
    boundaries: Mapping[VBucketId, Sequence[Seqno]] = field(default_factory=dict)
    """By vbucket: seqnos before the start, rising, at which the caller held all there was. A rollback to before the
    start goes back to one of them, and to 0 where there is none."""
    scopes: tuple[str, ...] = ()
    """Names; everything in these scopes is read, that of collections made later, too."""
    collections: tuple[str | int, ...] = ()
    """`scope.collection`, or ids. With neither scopes nor collections everything is read."""
    vbuckets: frozenset[VBucketId] | None = None
    """Read these only; None is all."""
    no_value: bool = False
    """Keys and metadata only: the server does not send values."""
    xattrs: bool = False
    """Extended attributes, too."""
    history: bool = False
    """All versions of a document, not just the newest, where the collection keeps its history."""
    snapshots: Snapshots = Snapshots.COMPLETE
    """When a change is handed out: `complete`, when all of its snapshot is there, or `as-they-come`, at once."""
    compression: bool = False
    """Let the server send values compressed. They are inflated here."""
    buffer_bytes: int = 16 * MIB
    """What a server may send on a connection before the caller has taken it."""
    held_bytes_max: int = 32 * MIB
    """What is kept in memory of snapshots that are not complete. The rest is put in a temporary file."""
    batch_bytes: int = 4 * MIB
    """How much is handed out at once, about, where that much is there."""
    noop_interval_s: int = 20
    """A connection that has been silent for two and a half of these is dead."""
    connections_per_node: int = 1
    """More of them share the vbuckets of a node."""
    name: str = "headwater"
    """What the server shows the connections as."""
    mitigate_rollbacks: bool = False
    """Hand a change out only when all replicas have persisted it, so that a failover can't take it back."""
    missing_replicas_hold: bool = True
    """With that: a replica that is missing holds changes back. It must be off where a bucket has fewer nodes than
    copies, for there nothing would ever be handed out."""
    poll_interval_s: float = 2.5
    """How often the cluster map and the high seqnos are asked for."""
    reconnect_delay_s_min: float = 0.1
    """The wait before a lost connection is made again. It grows with each failure in a row."""
    reconnect_delay_s_max: float = 10.0
    """What it grows to."""
    give_up_after_s: float | None = 300.0
    """How long a vbucket may be out of reach before the read fails; None is for ever."""

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InvalidInput(f"{name} is {value}", hint=f"Use {least} to {most}")
        if self.reconnect_delay_s_min > self.reconnect_delay_s_max:
            raise InvalidInput(
                "reconnect_delay_s_min exceeds reconnect_delay_s_max", hint="The first delay can't be the longest"
            )
        if not self.name or len(self.name.encode()) > NAME_BYTES_MAX:
            raise InvalidInput(f"{self.name!r} is no name for a reader", hint=f"Use 1 to {NAME_BYTES_MAX} bytes")

    @classmethod
    def make(cls, **options: Any) -> ReadOptions:
        """From what a caller wrote: strings for choices, any iterable for sets."""
        known = {it.name for it in fields(cls)}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise InvalidInput(f"there is no option {unknown[0]!r}", hint=f"Use some of {', '.join(sorted(known))}")
        read = {name: _READ_AS[name](value) if name in _READ_AS else value for name, value in options.items()}
        return cls(**read)


def _read_start(start: Any) -> Start | Offsets:
    return start if isinstance(start, Offsets) else _read_choice(Start, start, "or offsets")


def _read_end(end: Any) -> End | Mapping[VBucketId, Seqno] | None:
    return end if end is None or isinstance(end, Mapping) else _read_choice(End, end, "a mapping of seqnos, or None")


def _read_choice(kind: type[StrEnum], value: Any, others: str = "") -> Any:
    if value not in tuple(kind):
        choices = ", ".join(repr(str(choice)) for choice in kind)
        raise InvalidInput(f"{value!r} is none of the choices", hint=f"Use {choices}{f', {others}' if others else ''}")
    return kind(value)


def _read_names(names: Iterable[str | int] | str) -> tuple[Any, ...]:
    return (names,) if isinstance(names, str | int) else tuple(names)


_READ_AS: dict[str, Callable[[Any], Any]] = {
    "start": _read_start,
    "end": _read_end,
    "snapshots": lambda value: _read_choice(Snapshots, value),
    "scopes": _read_names,
    "collections": _read_names,
    "vbuckets": lambda value: None if value is None else frozenset(value),
}

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("buffer_bytes", 1024, CONNECTION_BUFFER_BYTES_MAX),
    ("held_bytes_max", 0, 2**40),
    ("batch_bytes", 1, 1024 * MIB),
    ("noop_interval_s", 1, 10_000),
    ("connections_per_node", 1, 64),
    ("poll_interval_s", 0.01, 3600),
    ("reconnect_delay_s_min", 0.001, 3600),
    ("reconnect_delay_s_max", 0.001, 3600),
    ("give_up_after_s", 0, 10**9),
)

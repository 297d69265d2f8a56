"""The options of a read, checked: where it starts and ends, which changes it takes, and how they are carried.

The client makes `ReadOptions` from the keywords of `changes` and `batches`, Spark and the command line from their own
options. What an option means, its default and its limits stand in `options`, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict, Unpack

from headwater.client.offsets import Offsets
from headwater.client.options import TO_READ, check_keywords, default_of
from headwater.errors import InvalidInput
from headwater.protocol.numbers import CONNECTION_NAME_BYTES_MAX, Seqno, VBucketId

NAME_BYTES_MAX = CONNECTION_NAME_BYTES_MAX - 64
"""The rest distinguishes the connections of a reader."""


class Start(StrEnum):
    BEGINNING = "beginning"
    NOW = "now"


class End(StrEnum):
    NOW = "now"


class Snapshots(StrEnum):
    """When a change is handed out."""

    COMPLETE = "complete"
    """When all of its snapshot has been received, so that a snapshot that breaks off is never seen. One that is much
    larger than `batch_bytes` comes in several batches, with nothing in between; offsets show whether they are at its
    end."""
    AS_THEY_COME = "as-they-come"
    """At once. A snapshot that is cut off may leave some keys newer than others until the read goes on."""


class Priority(StrEnum):
    """How a server ranks the connections of a read among others. The values are those of the control `set_priority`."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class ReadKeywords(TypedDict, total=False):
    """What `changes` and `batches` take: strings for choices, any iterable for sets. `options.TO_READ` describes it."""

    start: Start | Offsets | Literal["beginning", "now"]
    end: End | Mapping[VBucketId, Seqno] | Mapping[int, int] | Literal["now"] | None
    boundaries: Mapping[VBucketId, Sequence[Seqno]]
    scopes: Iterable[str] | str
    collections: Iterable[str | int] | str | int
    vbuckets: Iterable[int] | None
    no_value: bool
    xattrs: bool
    history: bool
    needs_history_behind_end: bool
    snapshots: Snapshots | Literal["complete", "as-they-come"]
    compression: bool
    buffer_bytes: int
    held_bytes_max: int
    batch_bytes: int
    noop_interval_s: int
    connections_per_node: int
    priority: Priority | Literal["low", "medium", "high"] | None
    name: str
    mitigate_rollbacks: bool
    missing_replicas_hold: bool
    poll_interval_s: float
    reconnect_delay_s_min: float
    reconnect_delay_s_max: float
    give_up_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of one read, checked. Defaults, limits and meanings are those of `options.TO_READ`."""

    start: Start | Offsets = Start.BEGINNING
    end: End | Mapping[VBucketId, Seqno] | None = None
    boundaries: Mapping[VBucketId, Sequence[Seqno]] = field(default_factory=dict)
    scopes: tuple[str, ...] = ()
    collections: tuple[str | int, ...] = ()
    vbuckets: frozenset[VBucketId] | None = None
    no_value: bool = default_of("no_value")
    xattrs: bool = default_of("xattrs")
    history: bool = default_of("history")
    needs_history_behind_end: bool = default_of("needs_history_behind_end")
    snapshots: Snapshots = Snapshots.COMPLETE
    compression: bool = default_of("compression")
    buffer_bytes: int = default_of("buffer_bytes")
    held_bytes_max: int = default_of("held_bytes_max")
    batch_bytes: int = default_of("batch_bytes")
    noop_interval_s: int = default_of("noop_interval_s")
    connections_per_node: int = default_of("connections_per_node")
    priority: Priority | None = None
    name: str = default_of("name")
    mitigate_rollbacks: bool = default_of("mitigate_rollbacks")
    missing_replicas_hold: bool = default_of("missing_replicas_hold")
    poll_interval_s: float = default_of("poll_interval_s")
    reconnect_delay_s_min: float = default_of("reconnect_delay_s_min")
    reconnect_delay_s_max: float = default_of("reconnect_delay_s_max")
    give_up_after_s: float | None = default_of("give_up_after_s")

    def __post_init__(self) -> None:
        for option in TO_READ:
            value = getattr(self, option.name)
            if (hint := option.check(value)) is not None:
                raise InvalidInput(f"{option.name} is {value}", hint=hint)
        if self.reconnect_delay_s_min > self.reconnect_delay_s_max:
            raise InvalidInput(
                "reconnect_delay_s_min exceeds reconnect_delay_s_max", hint="The first delay can't be the longest"
            )
        if not self.name or len(self.name.encode()) > NAME_BYTES_MAX:
            raise InvalidInput(f"{self.name!r} is no name for a reader", hint=f"Use 1 to {NAME_BYTES_MAX} bytes")

    @classmethod
    def make(cls, function: str = "ReadOptions.make", /, **options: Unpack[ReadKeywords]) -> ReadOptions:
        """From the keywords of a function. An unknown one raises `TypeError`, a wrong value `InvalidInput`."""
        check_keywords(function, options, ReadKeywords.__annotations__, beside=("checkpoint", "group"))
        read: dict[str, Any] = {
            name: _READ_AS[name](value) if name in _READ_AS else value for name, value in options.items()
        }
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
    "priority": lambda value: None if value is None else _read_choice(Priority, value, "or None"),
    "scopes": _read_names,
    "collections": _read_names,
    "vbuckets": lambda value: None if value is None else frozenset(value),
}

"""The options of a read: where it starts and ends, which changes it returns, and how they are transferred.

The client makes `ReadOptions` from the keywords of `changes` and `batches`; Spark and the command line make them from
their options, which these fields define.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, TypedDict, Unpack

from headwater.client.offsets import Offsets
from headwater.errors import InvalidInput
from headwater.options import MIB, check_keywords, option, options_of, parse_interval_s
from headwater.protocol.numbers import CONNECTION_BUFFER_BYTES_MAX, CONNECTION_NAME_BYTES_MAX, Seqno, VBucketId

NAME_BYTES_MAX = CONNECTION_NAME_BYTES_MAX - 64
"""The rest of the name distinguishes the connections of a reader."""


class Start(StrEnum):
    BEGINNING = "beginning"
    NOW = "now"


class End(StrEnum):
    NOW = "now"


START_TIMES = "a time such as 2026-11-18T10:00:00Z, 2026-11-18, 1795000000 or -2h"
AHEAD_S_MAX = 60.0
"""How far a start time may lie ahead of the local clock: a server's clock may be slightly fast."""

_EPOCH_TIME = re.compile(r"(?P<seconds>[0-9]{9,10})(?:\.(?P<fraction>[0-9]{1,9}))?")
_EPOCH_MILLISECONDS = re.compile(r"[0-9]{12,13}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def parse_start_time(text: str) -> datetime | None:
    """Parse the start time of a read; None if the text is not a time.

    It may be a date (midnight in UTC), a date and time with a zone in ISO 8601, seconds since 1970, or `-` and a span
    such as `2h` or `7d`, counted back from now. Raises `InvalidInput` for a time without a zone or in the future.
    """
    text = text.strip()
    try:
        if text.startswith("-"):
            return datetime.now(UTC) - timedelta(seconds=parse_interval_s(text[1:]))
        if (match := _EPOCH_TIME.fullmatch(text)) is not None:
            fraction = timedelta(microseconds=int((match["fraction"] or "0").ljust(6, "0")[:6]))
            return checked_start_time(datetime.fromtimestamp(int(match["seconds"]), UTC) + fraction)
        if _EPOCH_MILLISECONDS.fullmatch(text) is not None:
            raise InvalidInput(f"{text} looks like milliseconds", hint="Write a time as seconds since 1970")
        if _DATE.match(text) is None:
            return None
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
    return checked_start_time(at.replace(tzinfo=UTC) if _DATE.fullmatch(text) is not None else at)


def checked_start_time(at: datetime) -> datetime:
    """Return a start time in UTC. Raises `InvalidInput` if it has no zone, or lies in the future."""
    if at.tzinfo is None:
        raise InvalidInput(f"the time {at.isoformat()} has no zone", hint="Add Z for UTC, or one such as +01:00")
    if at > datetime.now(UTC) + timedelta(seconds=AHEAD_S_MAX):
        raise InvalidInput(
            f"the time {at.isoformat()} lies in the future", hint='Start at "now" to read what is written from now on'
        )
    return at.astimezone(UTC)


class Snapshots(StrEnum):
    """When a change is returned to the caller."""

    COMPLETE = "complete"
    """When its whole snapshot has been received, so that the caller never sees an interrupted snapshot. A snapshot
    that is much larger than `batch_bytes` is returned in several consecutive batches; the offsets show whether they
    are at its end."""
    AS_THEY_COME = "as-they-come"
    """Immediately. An interrupted snapshot may leave some keys newer than others until the read continues."""


class Priority(StrEnum):
    """The priority of a read's connections at the server. The values are those of the control `set_priority`."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class ReadKeywords(TypedDict, total=False):
    """The keywords of `changes` and `batches`: strings for choices, any iterable for sets. See `ReadOptions`."""

    start: Start | Offsets | datetime | str
    end: End | Mapping[VBucketId, Seqno] | Mapping[int, int] | Literal["now"] | None
    boundaries: Mapping[VBucketId, Sequence[Seqno]]
    collections: Iterable[str | int] | str | int
    scopes: Iterable[str] | str
    vbuckets: Iterable[int] | None
    no_value: bool
    xattrs: bool
    history: bool
    needs_history_behind_end: bool
    snapshots: Snapshots | Literal["complete", "as-they-come"]
    mitigate_rollbacks: bool
    missing_replicas_hold: bool
    compression: bool
    buffer_bytes: int
    held_bytes_max: int
    batch_bytes: int
    noop_interval_s: int
    connections_per_node: int
    priority: Priority | Literal["low", "medium", "high"] | None
    name: str
    poll_interval_s: float
    reconnect_delay_s_min: float
    reconnect_delay_s_max: float
    give_up_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of one read, checked."""

    start: Start | Offsets | datetime = option(
        "Where the read starts: `beginning`, `now`, a time, or offsets. `now` is the moment when the first change is "
        "requested, or when `start()` of the read returns. With a time, each vbucket starts at its first change at or "
        "after it, by the CAS: a `datetime`, or a text such as `2026-11-18T10:00:00Z`, `2026-11-18` (UTC), "
        "`1795000000` (seconds) or `-2h`. Vbuckets that are missing in the given offsets are read from their "
        "beginning.",
        Start.BEGINNING,
        spark=True,
        spark_also=("streamFrom", "startAt"),
        spark_name="startingOffsets",
        spark_note="Offsets are JSON; Spark's `earliest` and `latest` work, too.",
        commands=("tail",),
        cli_name="--from",
        cli_also=("--start-at",),
    )
    end: End | Mapping[VBucketId, Seqno] | None = option(
        "Where the read ends: `now`, or a mapping of vbuckets to seqnos; `None` means that it does not end. Vbuckets "
        "that are missing in a mapping are not read. The read continues to the end of the snapshot that contains the "
        "last seqno.",
        spark=True,
        spark_name="endingOffsets",
        spark_default="now",
        spark_note="For a batch read; offsets are JSON.",
        commands=("tail",),
        cli_name="--to",
    )
    boundaries: Mapping[VBucketId, Sequence[Seqno]] = option(
        "For each vbucket, increasing seqnos before the start at which the caller held complete snapshots. A rollback "
        "to before the start goes back to one of them, or to 0 if there is none.",
        factory=dict,
        default_words="none",
    )
    collections: tuple[str | int, ...] = option(
        "Read only these collections: `scope.collection`.",
        (),
        default_words="all",
        spark=True,
        spark_also=("collection",),
        spark_note="Separate names with commas.",
        commands=("tail", "export", "land", "verify"),
        cli_name="--collection",
        cli_note="Repeat for more.",
        metavar="SCOPE.COLLECTION",
    )
    scopes: tuple[str, ...] = option(
        "Read only these scopes, including collections created in them later.",
        (),
        default_words="all",
        spark=True,
        spark_also=("scope",),
        spark_note="Separate names with commas.",
        commands=("tail", "export", "land", "verify"),
        cli_name="--scope",
        cli_note="Repeat for more.",
        metavar="SCOPE",
    )
    vbuckets: frozenset[VBucketId] | None = option(
        "Read only these vbuckets.",
        default_words="all",
        commands=("tail",),
        cli_name="--vbucket",
        cli_note="Repeat for more.",
        metavar="N|N-M",
    )
    no_value: bool = option(
        "Read only keys and metadata: the server does not send values.", False, spark=True, commands=("tail",)
    )
    xattrs: bool = option(
        "Read extended attributes, too.",
        False,
        spark=True,
        spark_note="They are the column `xattrs`.",
        commands=("tail", "land"),
    )
    history: bool = option(
        "Read all versions of a document, not just the newest, if the collection keeps its history.",
        False,
        spark=True,
        commands=("tail",),
    )
    needs_history_behind_end: bool = option(
        "Fail with `NoConsistentCut` if a snapshot extends beyond `end` and does not have all versions. For callers "
        "that drop changes beyond `end`: such a snapshot may contain the only version of a document beyond it.",
        False,
    )
    snapshots: Snapshots = option(
        "When to return a change: `complete` waits for its whole snapshot, `as-they-come` returns it immediately.",
        Snapshots.COMPLETE,
        choices=Snapshots,
        commands=("tail",),
    )
    mitigate_rollbacks: bool = option(
        "Return a change only when all replicas have persisted it, so that a failover can't take it back.",
        False,
        spark=True,
        commands=("tail",),
    )
    missing_replicas_hold: bool = option(
        "With `mitigate_rollbacks`: a missing replica delays changes. Turn this off if a bucket has fewer nodes than "
        "copies; otherwise nothing would be returned.",
        True,
    )
    compression: bool = option(
        "Let the server compress values. The client decompresses them.", False, spark=True, commands=("tail",)
    )
    buffer_bytes: int = option(
        "How much a server may send on a connection ahead of the caller.",
        16 * MIB,
        least=1024,
        most=CONNECTION_BUFFER_BYTES_MAX,
        spark=True,
        spark_also=("streamFlowControlBufferSize",),
        commands=("tail",),
    )
    held_bytes_max: int = option(
        "How much of incomplete snapshots to keep in memory. The rest goes to a temporary file.",
        32 * MIB,
        least=0,
        most=2**40,
    )
    batch_bytes: int = option(
        "Approximate size of a batch, if that much has been received.", 4 * MIB, least=1, most=1024 * MIB
    )
    noop_interval_s: int = option(
        "Seconds between a server's noops. The client drops a connection that is silent for two and a half intervals.",
        20,
        least=1,
        most=10_000,
        spark=True,
    )
    connections_per_node: int = option(
        "Number of connections to each node, which share its vbuckets.",
        1,
        least=1,
        most=64,
        spark=True,
        commands=("tail",),
    )
    priority: Priority | None = option(
        "The server's priority for these connections: `low`, `medium` or `high`. `None` uses the server's default.",
        choices=Priority,
        commands=("tail",),
    )
    name: str = option(
        "The name of the connections in the server's statistics.",
        "headwater",
        spark=True,
        spark_default="headwater-spark",
        commands=("tail",),
    )
    poll_interval_s: float = option(
        "Seconds between two requests for the cluster map and the high seqnos.", 2.5, least=0.01, most=3600
    )
    reconnect_delay_s_min: float = option(
        "Seconds before a lost connection is opened again. The delay grows with each failure in a row.",
        0.1,
        least=0.001,
        most=3600,
    )
    reconnect_delay_s_max: float = option("The longest such delay.", 10.0, least=0.001, most=3600)
    give_up_after_s: float | None = option(
        "Seconds that a vbucket may be unreachable before the read fails. `None` disables this.",
        300.0,
        least=0,
        most=10**9,
        spark=True,
        commands=("tail",),
    )

    def __post_init__(self) -> None:
        for one in READ_OPTIONS.values():
            value = getattr(self, one.name)
            if (hint := one.check(value)) is not None:
                raise InvalidInput(f"{one.name} is {value}", hint=hint)
        if self.reconnect_delay_s_min > self.reconnect_delay_s_max:
            raise InvalidInput(
                "reconnect_delay_s_min exceeds reconnect_delay_s_max", hint="The minimum delay can't exceed the maximum"
            )
        if not self.name or len(self.name.encode()) > NAME_BYTES_MAX:
            raise InvalidInput(
                f"{self.name!r} is not a valid name for a reader", hint=f"Use 1 to {NAME_BYTES_MAX} bytes"
            )

    @classmethod
    def make(cls, function: str = "ReadOptions.make", /, **options: Unpack[ReadKeywords]) -> ReadOptions:
        """Make options from keywords. An unknown one raises `TypeError`, a wrong value `InvalidInput`."""
        check_keywords(function, options, ReadKeywords.__annotations__, beside=("checkpoint", "group"))
        read: dict[str, Any] = {
            name: _READ_AS[name](value) if name in _READ_AS else value for name, value in options.items()
        }
        return cls(**read)


READ_OPTIONS = options_of(ReadOptions)


def _read_choice(kind: type[StrEnum], value: Any, others: str = "") -> Any:
    if value not in tuple(kind):
        choices = ", ".join(repr(str(choice)) for choice in kind)
        raise InvalidInput(f"{value!r} is not a valid choice", hint=f"Use {choices}{f', {others}' if others else ''}")
    return kind(value)


def _read_start(value: Any) -> Start | Offsets | datetime:
    if isinstance(value, Offsets):
        return value
    at = parse_start_time(value) if isinstance(value, str) and value not in tuple(Start) else value
    if isinstance(at, datetime):
        return checked_start_time(at)
    read: Start = _read_choice(Start, value, f"{START_TIMES}, or offsets")
    return read


def _read_names(names: Iterable[str | int] | str) -> tuple[Any, ...]:
    return (names,) if isinstance(names, str | int) else tuple(names)


_READ_AS: dict[str, Callable[[Any], Any]] = {
    "start": _read_start,
    "end": lambda value: (
        value if isinstance(value, Mapping | None) else _read_choice(End, value, "a mapping of seqnos, or None")
    ),
    "snapshots": lambda value: _read_choice(Snapshots, value),
    "priority": lambda value: None if value is None else _read_choice(Priority, value, "or None"),
    "scopes": _read_names,
    "collections": _read_names,
    "vbuckets": lambda value: None if value is None else frozenset(value),
}

"""The options of reads, connections and the Spark source: one table, from which three places take them.

The client's keywords, the options of `format("dcp")` and those of the command line are made from it, and so are the
pages that list them: name, type, unit, limits, default and help stand here once. An option has one name in three
spellings: `buffer_bytes` in Python, `bufferBytes` in Spark, `--buffer-bytes` on the command line. This module is pure:
it opens no file and imports no library.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from headwater.errors import InvalidInput
from headwater.phrases import did_you_mean
from headwater.protocol.numbers import CONNECTION_BUFFER_BYTES_MAX

MIB = 1024 * 1024

F = TypeVar("F", bound=Callable[..., Any])


class Kind(Enum):
    """What an option takes."""

    FLAG = auto()
    WHOLE = auto()
    BYTES = auto()
    """A whole number of bytes. As a text it may end with K, M or G."""
    NUMBER = auto()
    TEXT = auto()
    FILE = auto()
    NAMES = auto()
    """As a text, names with commas between them."""


_PYTHON_TYPES = {
    Kind.FLAG: "bool",
    Kind.WHOLE: "int",
    Kind.BYTES: "int",
    Kind.NUMBER: "float",
    Kind.TEXT: "str",
    Kind.FILE: "Path",
    Kind.NAMES: "tuple[str, ...]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, in all places that have it."""

    name: str
    """In Python. The unit is its last part: `_s` for seconds, `_bytes` for bytes."""
    kind: Kind
    help: str
    """A sentence, or several."""
    default: Any = None
    default_words: str | None = None
    """The default as the pages name it, where the value does not say it."""
    least: float | None = None
    most: float | None = None
    python_type: str | None = None
    """Where it is more than the type of `kind`."""
    python: bool = True
    spark: bool = False
    spark_name: str | None = None
    """Where Spark's own sources have a word for it, which counts more than the rule."""
    spark_default: Any = None
    spark_note: str = ""
    spark_old: tuple[str, ...] = ()
    """Earlier spellings, which still work and warn."""
    spark_also: tuple[str, ...] = ()
    """What Spark's source of Kafka and Couchbase's own connector call it. They work, too."""
    commands: tuple[str, ...] = ()
    """The commands that have it; `*` for all that connect."""
    cli_name: str | None = None
    """Where the command line has its own word. What can be repeated is in the singular."""
    cli_note: str = ""
    cli_old: Mapping[str, tuple[str, ...]] | None = None
    """Earlier spellings, and what stands for each now."""

    @property
    def type_name(self) -> str:
        return self.python_type or _PYTHON_TYPES[self.kind]

    @property
    def unit(self) -> str:
        """`seconds`, `bytes`, or nothing."""
        parts = self.name.removesuffix("_max").removesuffix("_min").rsplit("_", 1)
        return {"s": "seconds", "bytes": "bytes"}.get(parts[-1], "")

    @property
    def in_spark(self) -> str:
        """`bufferBytes`."""
        first, *others = self.name.split("_")
        return self.spark_name or first + "".join(part.capitalize() for part in others)

    @property
    def on_command_line(self) -> str:
        """`--buffer-bytes`."""
        return self.cli_name or f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """The value of a text, or `ValueError`."""
        value = _PARSERS[self.kind](text)
        if self.kind is Kind.WHOLE and self.least is not None and not self.python and value < self.least:
            # The client checks its own options, and names their limits.
            raise ValueError(text)
        return value

    def write(self, value: Any) -> str:
        """A value as the text that `parse` takes."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str | Path) or not isinstance(value, Iterable):
            return str(value)
        return ",".join(map(str, value))

    def check(self, value: Any) -> str | None:
        """What is wrong with a number, as the values that it may have; None where it is within its limits."""
        if value is None or self.least is None or self.most is None or self.least <= value <= self.most:
            return None
        return f"Use {self.least} to {self.most}"


def _parse_flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_SIZE = re.compile(r"(?P<number>[0-9]{1,12})(?P<unit>[kmg]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def parse_bytes(text: str) -> int:
    """A number of bytes, such as 65536, 64K or 16M; `ValueError` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(match["number"]) * _UNITS[match["unit"].lower()]


_INTERVAL = re.compile(
    r"(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)(?:(?P<short>ms|s|m|h)| +(?P<long>millisecond|second|minute|hour|day)s?)"
)
_SHORT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONG_S = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}


def parse_interval_s(text: str) -> float:
    """The seconds of a time, as commands write it ("500ms", "5s", "1m", "1h") or as Spark writes triggers ("500
    milliseconds", "5 seconds", "1 minute")."""
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"{text!r} is no time", hint='Write one like "5 seconds", "500 milliseconds" or "1 minute"')
    return float(match["number"]) * (_SHORT_S[match["short"]] if match["short"] else _LONG_S[match["long"]])


def write_bytes(size: int) -> str:
    """16777216 as 16M."""
    for unit in ("g", "m", "k"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit.upper()}"
    return str(size)


_PARSERS: dict[Kind, Callable[[str], Any]] = {
    Kind.FLAG: _parse_flag,
    Kind.WHOLE: int,
    Kind.BYTES: parse_bytes,
    Kind.NUMBER: float,
    Kind.TEXT: str,
    Kind.FILE: Path,
    Kind.NAMES: lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
}

# --- the table ----------------------------------------------------------------------------------------------------

TO_CONNECT = (
    Option(
        name="user",
        kind=Kind.TEXT,
        help="The user that logs in.",
        python_type="str | None",
        default_words="that of the URL; in Spark and on the command line also `HEADWATER_USER`",
        spark=True,
        spark_also=("username",),
        commands=("*",),
    ),
    Option(
        name="password",
        kind=Kind.TEXT,
        help="The password of the user.",
        python_type="str | None",
        default_words="none; in Spark and on the command line `HEADWATER_PASSWORD`",
        spark=True,
        spark_note="Spark hides it.",
        commands=("*",),
        cli_note="It is asked for on a terminal. As an option, others on the machine can see it.",
    ),
    Option(
        name="password_file",
        kind=Kind.FILE,
        help="A file with the password, where the query is planned.",
        python=False,
        spark=True,
    ),
    Option(
        name="tls",
        kind=Kind.TEXT,
        help="Which certificates to trust, and which to show: what the options `tls_…` set elsewhere.",
        python_type="TlsSettings | None",
        default_words="trusts the system's, with a URL that has TLS",
    ),
    Option(
        name="tls_ca",
        kind=Kind.FILE,
        help="A PEM file with the certificates to trust.",
        default_words="the system's",
        python=False,
        spark=True,
        spark_note="It must be on the executors, too, as all files of TLS.",
        commands=("*",),
    ),
    Option(
        name="tls_cert",
        kind=Kind.FILE,
        help="A PEM file with a client certificate to log in with.",
        python=False,
        spark=True,
        spark_old=("tlsCertificate",),
        commands=("*",),
    ),
    Option(
        name="tls_key",
        kind=Kind.FILE,
        help="A PEM file with the key of the client certificate.",
        default_words="that in the certificate's file",
        python=False,
        spark=True,
        commands=("*",),
    ),
    Option(
        name="tls_key_password",
        kind=Kind.TEXT,
        help="The password of that key, if it is encrypted.",
        python=False,
        spark=True,
        spark_note="Spark hides it.",
        commands=("*",),
    ),
    Option(
        name="tls_skip_verify",
        kind=Kind.FLAG,
        help="Accept any certificate of a server. For tests: it does not protect from a server in between.",
        default=False,
        python=False,
        spark=True,
        commands=("*",),
    ),
    Option(
        name="mechanism",
        kind=Kind.TEXT,
        help="How to log in: `SCRAM-SHA512`, `SCRAM-SHA256`, `SCRAM-SHA1`, or `PLAIN`, which may send the password in"
        " clear.",
        python_type="Mechanism | str | None",
        default_words="the strongest that the server offers",
        spark=True,
    ),
    Option(
        name="network",
        kind=Kind.TEXT,
        help="By which of their addresses nodes are reached: `auto`, `default` or `external`.",
        python_type="Network | str | None",
        default_words="that of the URL, or `auto`",
        spark=True,
    ),
    Option(
        name="agent",
        kind=Kind.TEXT,
        help="What the server's log calls this client.",
        default_words="`headwater/` and the version",
    ),
    Option(
        name="features",
        kind=Kind.NAMES,
        help="What is offered in HELLO.",
        python_type="tuple[Feature, ...]",
        default_words="all that the client uses",
    ),
    Option(
        name="timeouts",
        kind=Kind.TEXT,
        help="How long to wait for a connection, and for an answer.",
        python_type="Timeouts | None",
        default_words="`Timeouts(connect_s=5.0, answer_s=30.0)`",
    ),
)
"""What `connect` takes, and what the others take in its place."""

TO_READ = (
    Option(
        name="start",
        kind=Kind.TEXT,
        help="Where the read starts: `beginning`, `now`, or offsets. `now` is when the first change is asked for, or"
        " when `start()` of the read returns. Vbuckets that given offsets don't name are read from their beginning.",
        default="beginning",
        python_type="Start | Offsets",
        spark=True,
        spark_also=("streamFrom",),
        spark_name="startingOffsets",
        spark_note="Offsets are JSON; Spark's `earliest` and `latest` work, too.",
        commands=("tail",),
        cli_name="--from",
    ),
    Option(
        name="end",
        kind=Kind.TEXT,
        help="Where the read ends: `now`, or a mapping of vbuckets to seqnos; None is for ever. A vbucket that a"
        " mapping does not name is not read. The read goes on to the end of the snapshot that holds the last seqno.",
        python_type="End | Mapping[VBucketId, Seqno] | None",
        spark=True,
        spark_name="endingOffsets",
        spark_default="now",
        spark_note="Of a batch read, and offsets as JSON.",
        commands=("tail",),
        cli_name="--to",
    ),
    Option(
        name="boundaries",
        kind=Kind.TEXT,
        help="By vbucket: seqnos before the start, rising, at which the caller held whole snapshots. A rollback to"
        " before the start goes back to one of them, and to 0 if there is none.",
        python_type="Mapping[VBucketId, Sequence[Seqno]]",
        default_words="none",
    ),
    Option(
        name="scopes",
        kind=Kind.NAMES,
        help="Read these scopes, with the collections that are created in them later.",
        default=(),
        default_words="all",
        spark=True,
        spark_also=("scope",),
        spark_note="Names with commas between them.",
        commands=("tail", "export", "land", "verify"),
        cli_name="--scope",
        cli_note="Repeat it for more.",
    ),
    Option(
        name="collections",
        kind=Kind.NAMES,
        help="Read these collections: `scope.collection`.",
        default=(),
        default_words="all",
        python_type="tuple[str | int, ...]",
        spark=True,
        spark_also=("collection",),
        spark_note="Names with commas between them.",
        commands=("tail", "export", "land", "verify"),
        cli_name="--collection",
        cli_note="Repeat it for more.",
    ),
    Option(
        name="vbuckets",
        kind=Kind.NAMES,
        help="Read these vbuckets only.",
        default_words="all",
        python_type="frozenset[VBucketId] | None",
        commands=("tail",),
        cli_name="--vbucket",
        cli_note="Repeat it for more.",
    ),
    Option(
        name="no_value",
        kind=Kind.FLAG,
        help="Keys and metadata only: the server does not send values.",
        default=False,
        spark=True,
        commands=("tail",),
    ),
    Option(
        name="xattrs",
        kind=Kind.FLAG,
        help="Extended attributes, too.",
        default=False,
        spark=True,
        spark_note="They are the column `xattrs`.",
        commands=("tail", "land"),
    ),
    Option(
        name="history",
        kind=Kind.FLAG,
        help="All versions of a document, not just the newest, if the collection keeps its history.",
        default=False,
        spark=True,
        commands=("tail",),
    ),
    Option(
        name="needs_history_behind_end",
        kind=Kind.FLAG,
        help="Fail with `NoConsistentCut` if a snapshot goes beyond `end` and has not all versions. For callers that"
        " leave out what comes behind `end`: such a snapshot may have a document behind it only.",
        default=False,
    ),
    Option(
        name="snapshots",
        kind=Kind.TEXT,
        help="When a change is handed out: `complete`, when all of its snapshot has been received, or `as-they-come`,"
        " at once.",
        default="complete",
        python_type="Snapshots",
        commands=("tail",),
        cli_old={"--as-they-come": ("--snapshots", "as-they-come")},
    ),
    Option(
        name="compression",
        kind=Kind.FLAG,
        help="Let the server send values compressed. They are inflated here.",
        default=False,
        spark=True,
        commands=("tail",),
    ),
    Option(
        name="buffer_bytes",
        kind=Kind.BYTES,
        help="How much a server may send on a connection before the caller has taken it.",
        default=16 * MIB,
        least=1024,
        most=CONNECTION_BUFFER_BYTES_MAX,
        spark=True,
        spark_also=("streamFlowControlBufferSize",),
        commands=("tail",),
        cli_old={"--buffer-size": ("--buffer-bytes",)},
    ),
    Option(
        name="held_bytes_max",
        kind=Kind.BYTES,
        help="How much is kept in memory of snapshots that are not complete. The rest is put in a temporary file.",
        default=32 * MIB,
        least=0,
        most=2**40,
    ),
    Option(
        name="batch_bytes",
        kind=Kind.BYTES,
        help="How much is handed out at once, about, if that much has been received.",
        default=4 * MIB,
        least=1,
        most=1024 * MIB,
    ),
    Option(
        name="noop_interval_s",
        kind=Kind.WHOLE,
        help="Seconds between a server's noops. A connection that is silent for two and a half of these is dropped.",
        default=20,
        least=1,
        most=10_000,
        spark=True,
        spark_old=("noopInterval",),
    ),
    Option(
        name="connections_per_node",
        kind=Kind.WHOLE,
        help="Connections to each node, which share its vbuckets.",
        default=1,
        least=1,
        most=64,
        spark=True,
        commands=("tail",),
        cli_old={"--connections": ("--connections-per-node",)},
    ),
    Option(
        name="priority",
        kind=Kind.TEXT,
        help="How the server ranks these connections among others: `low`, `medium` or `high`. `None` leaves it to the"
        " server.",
        default=None,
        python_type="Priority | None",
        commands=("tail",),
    ),
    Option(
        name="name",
        kind=Kind.TEXT,
        help="The name of the connections in the server's statistics.",
        default="headwater",
        spark=True,
        spark_default="headwater-spark",
        commands=("tail",),
    ),
    Option(
        name="mitigate_rollbacks",
        kind=Kind.FLAG,
        help="Hand a change out only when all replicas have persisted it, so that a failover can't take it back.",
        default=False,
        spark=True,
        commands=("tail",),
        cli_old={"--persisted": ("--mitigate-rollbacks",)},
    ),
    Option(
        name="missing_replicas_hold",
        kind=Kind.FLAG,
        help="With `mitigate_rollbacks`: a replica that is missing holds changes back. Turn it off if a bucket has"
        " fewer nodes than copies, for there nothing would ever be handed out.",
        default=True,
    ),
    Option(
        name="poll_interval_s",
        kind=Kind.NUMBER,
        help="Seconds between two requests for the cluster map and the high seqnos.",
        default=2.5,
        least=0.01,
        most=3600,
    ),
    Option(
        name="reconnect_delay_s_min",
        kind=Kind.NUMBER,
        help="Seconds before a lost connection is opened again. The delay grows with each failure in a row.",
        default=0.1,
        least=0.001,
        most=3600,
    ),
    Option(
        name="reconnect_delay_s_max",
        kind=Kind.NUMBER,
        help="The longest such delay.",
        default=10.0,
        least=0.001,
        most=3600,
    ),
    Option(
        name="give_up_after_s",
        kind=Kind.NUMBER,
        help="Seconds that a vbucket may be out of reach before the read fails; None is for ever.",
        default=300.0,
        least=0,
        most=10**9,
        python_type="float | None",
        spark=True,
        spark_old=("giveUpAfter",),
        commands=("tail",),
        cli_old={"--give-up-after": ("--give-up-after-s",)},
    ),
)
"""What `changes` and `batches` take."""

OF_SPARK = (
    Option(
        name="mode",
        kind=Kind.TEXT,
        help="What a row is: `changes`, or `documents` for one row a live document, with its fields as columns, see"
        " below.",
        default="changes",
        python=False,
        spark=True,
    ),
    Option(
        name="value",
        kind=Kind.TEXT,
        help="What the column `value` is: `binary`, `string`, or `variant`, which is JSON parsed as by Spark's"
        " `parse_json`, in less time. Where an object has a name twice, the last value counts.",
        default="binary",
        python=False,
        spark=True,
    ),
    Option(
        name="columns",
        kind=Kind.NAMES,
        help="The columns of the frame, in this order. No other is made, and where none needs the values the server"
        " does not send them.",
        default=(),
        default_words="all",
        python=False,
        spark=True,
        spark_note="Names with commas between them. A `schema` with these columns does the same.",
    ),
    Option(
        name="where",
        kind=Kind.TEXT,
        help="Read such rows only: conditions on `vbucket`, `key`, `scope`, `collection` and `op`, see below.",
        default_words="all",
        python=False,
        spark=True,
        spark_note="A stream has its rollbacks besides.",
    ),
    Option(
        name="max_rows_per_trigger",
        kind=Kind.WHOLE,
        help="Rows of a micro-batch, about: it takes whole vbuckets, in turn.",
        least=1,
        python=False,
        spark=True,
        spark_also=("maxOffsetsPerTrigger",),
        commands=("land",),
        cli_old={"--max-rows": ("--max-rows-per-trigger",)},
    ),
    Option(
        name="max_bytes_per_trigger",
        kind=Kind.WHOLE,
        help="The same in bytes, counted as 512 a row.",
        least=1,
        python=False,
        spark=True,
    ),
    Option(
        name="min_partitions",
        kind=Kind.WHOLE,
        help="Tasks that read, at least.",
        default=1,
        least=1,
        most=10_000,
        python=False,
        spark=True,
        spark_also=("numPartitions",),
        commands=("land",),
        cli_old={"--partitions": ("--min-partitions",)},
    ),
    Option(
        name="seen_collections",
        kind=Kind.TEXT,
        help="What the bucket once had: `scope`, `scope.collection`, `scope.collection=id`, with commas between them,"
        " see below.",
        default=(),
        default_words="none",
        python=False,
        spark=True,
    ),
)
"""What only a query of Spark takes, and `land`, which is one."""

URL = Option(
    name="url",
    kind=Kind.TEXT,
    help="`couchbase://host[,host…]/bucket`, or `couchbases://` for TLS.",
    default_words="needed",
    spark=True,
    spark_also=("connectionString",),
)

OPTIONS: dict[str, Option] = {option.name: option for option in (URL, *TO_CONNECT, *TO_READ, *OF_SPARK)}
"""All of them, by their names in Python."""

SPARK_OPTIONS = tuple(option for option in OPTIONS.values() if option.spark)

CONNECT_KEYWORDS = tuple(option for option in TO_CONNECT if option.python)
FRAME_KEYWORDS = tuple(
    option for option in OPTIONS.values() if option.name == "tls" or (option.spark and option is not URL)
)
"""Of `headwater.spark.read`."""
LANDING_KEYWORDS = tuple(
    option
    for option in FRAME_KEYWORDS
    if option.name not in ("mode", "end", "value", "no_value", "columns", "where")  # a table has all that there is
)


def default_of(name: str) -> Any:
    return OPTIONS[name].default


# --- keywords -----------------------------------------------------------------------------------------------------


def check_keywords(
    function: str, given: Iterable[str], known: Collection[str], *, beside: Collection[str] = ()
) -> None:
    """Raise what Python raises for a keyword that a function does not have, and name the nearest one.

    `beside` are keywords that it has beside the known ones, and that are not among the given.
    """
    for name in given:
        if name not in known:
            nearest = get_close_matches(name, {*known, *beside}, n=1)
            advice = did_you_mean(nearest[0]) if nearest else f"It takes {', '.join(sorted({*known, *beside}))}."
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {advice}")


def names_keywords(made: F) -> F:
    """A function or a class whose error for an unknown keyword names the nearest one, as `check_keywords` does."""
    call: Any = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
    parameters = inspect.signature(call).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]

    @wraps(call)
    def checked(*given: Any, **keywords: Any) -> Any:
        check_keywords(made.__name__, keywords, known)
        return call(*given, **keywords)

    if not isinstance(made, type):
        return checked  # type: ignore[return-value]
    made.__init__ = checked  # type: ignore[misc]
    return made


def takes_options(options: Sequence[Option]) -> Callable[[F], F]:
    """Of a function with `**options: Unpack[…]`: show them one by one, as completion in a notebook needs it.

    Type checkers see them by `Unpack`. At run time the signature and the documentation get them from the table.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *map(_parameter, options)]
        )
        listed = "\n".join(f"        {option.name}: {option.help}" for option in options)
        function.__doc__ = f"{function.__doc__}\n        Keywords:\n\n{listed}\n"
        return function

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    is_none_possible = option.default is not None or "None" in option.type_name
    # As in stubs, three dots say that there is a default, and that it is no constant.
    default = option.default if is_none_possible else ...
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option.type_name)


def warn_of_old(old: str, new: str, *, kind: type[Warning] = DeprecationWarning, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is an old spelling: write {new}", kind, stacklevel=stacklevel)

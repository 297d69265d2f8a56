"""The options of `format("dcp")`: parses and checks them.

The source makes `SourceOptions` from the texts that Spark passes, and `headwater.spark.land` makes such texts from its
keywords; names, defaults and help are those of the fields. A password comes from the option `password`, whose value
Spark hides in plans and pages because of its name, from a file (`passwordFile`), or from the environment
(`HEADWATER_PASSWORD`). It must never appear in a `repr` or in an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from headwater.client.cluster_map import vbucket_of
from headwater.client.offsets import Offsets
from headwater.client.read_options import READ_OPTIONS, ReadOptions, Snapshots, Start, parse_start_time
from headwater.client.settings import (
    CONNECT_OPTIONS,
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    ClientSettings,
    ConnectOptions,
    TlsSettings,
)
from headwater.errors import InvalidInput
from headwater.options import Option, check_keywords, option, options_of
from headwater.phrases import did_you_mean, may_be_escaped
from headwater.protocol.numbers import VBucketId

if TYPE_CHECKING:
    from headwater.client.bootstrap import BucketView
    from headwater.lake.where import Condition
    from headwater.landing.bucket_watch import SeenCollection

_VBUCKETS_MAX = 65_536
"""Vbucket numbers have 16 bits."""
TEXT_COLUMNS = ("op", "scope", "collection", "key")

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<": int.__lt__,
    "<=": int.__le__,
    ">": int.__gt__,
    ">=": int.__ge__,
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions on rows that `dcp` applies itself, so that other rows are not read, or not passed to Spark.

    All of them must hold. Conditions on five columns limit what is read: `vbucket` and `key` select the vbuckets,
    `scope` and `collection` what the server sends of them (in a batch read). The tasks apply all other conditions.
    They come from the option `where`, as a text (`headwater.lake.where`), and from Spark, which passes the filters of
    a query to a source (`pushFilters`).

    Conditions that limit what is read are stored as the values that a column may have. That covers `=` and `IN`, and,
    because vbuckets have so few numbers, also `<` and `BETWEEN` on vbuckets. A column without an entry may have any
    value. Null never matches.
    """

    allowed: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    others: tuple[Condition, ...] = ()
    text: str = field(default="", compare=False)
    """The text that was parsed, if any."""

    def __bool__(self) -> bool:
        return bool(self.allowed or self.others)

    def __and__(self, other: Conditions) -> Conditions:
        both = {name: self.allowed.get(name, values) & values for name, values in other.allowed.items()}
        return Conditions({**self.allowed, **both}, (*self.others, *other.others), self.text)

    @property
    def columns(self) -> frozenset[str]:
        """The columns of changes that the conditions use."""
        from headwater.lake.where import operands_of

        others = (it.column for one in self.others for it in operands_of(one) if it.column)
        return frozenset((*self.allowed, *others))

    @property
    def need_values(self) -> bool:
        """Whether they use fields of documents, or datatypes: a server that omits values omits these, too."""
        from headwater.lake.where import operands_of

        return "datatype" in self.columns or any(it.path for one in self.others for it in operands_of(one))

    def is_same(self, other: Conditions) -> bool:
        """Whether both have the same literals. Compares the repr, because in Python 1 equals True."""
        return self.allowed == other.allowed and repr(self.others) == repr(other.others)

    @classmethod
    def one(cls, column: str, operator: str, values: Collection[Any]) -> Conditions | None:
        """Make a single condition; None if it can't be applied here. `values` has one value, or several for `IN`."""
        if operator in _COMPARISONS:
            (bound,) = values
            if column != "vbucket" or not _is_whole(bound):
                return None
            compare = _COMPARISONS[operator]
            return cls({column: frozenset(number for number in range(_VBUCKETS_MAX) if compare(number, bound))})
        is_fitting = _is_whole if column == "vbucket" else _is_text
        if column not in ("vbucket", *TEXT_COLUMNS) or operator not in ("=", "IN") or not all(map(is_fitting, values)):
            return None
        return cls({column: frozenset(values)})

    @classmethod
    def parse(cls, text: str) -> Conditions:
        """Parse conditions in SQL, or none from an empty text. Raises `InvalidInput` if one can't be applied here."""
        from headwater.lake.where import Comparison, OneOf, Where

        found = cls(text=text.strip())
        for one in Where.parse(text).conditions if found.text else ():
            limiting = None
            if isinstance(one, Comparison):
                limiting = cls.one(one.operand.column, one.operator, [one.literal])
            elif isinstance(one, OneOf):
                limiting = cls.one(one.operand.column, "IN", one.literals)
            found &= cls(others=(one,)) if limiting is None else limiting
        return found

    # --- what is read -------------------------------------------------------------------------------------------------

    def vbuckets(self, count: int) -> list[VBucketId] | None:
        """Return those of `count` vbuckets that can contain matching rows; None for all.

        A document is in the vbucket of its key's hash: clients look for it nowhere else.
        """
        chosen = set(range(count))
        if "vbucket" in self.allowed:
            chosen &= self.allowed["vbucket"]
        keys = self.allowed.get("key")
        if keys is not None and not any(map(may_be_escaped, keys)):
            chosen &= {int(vbucket_of(key.encode(), count)) for key in keys}
        return None if len(chosen) == count else [VBucketId(vbucket) for vbucket in sorted(chosen)]

    def selection(self, options: ReadOptions, view: BucketView, ids: Collection[int]) -> ReadOptions | None:
        """Return the options with which the server leaves other collections out; None if nothing is left to read.

        `ids` are the collections that the options select by themselves, if they select any.
        """
        scopes, collections = self.allowed.get("scope"), self.allowed.get("collection")
        if scopes is None and collections is None:
            return options
        is_of_all = not options.scopes and not options.collections
        wanted = tuple(
            f"{scope.name}.{held.name}"
            for scope, held in view.manifest.collections()
            if (is_of_all or held.id in ids)
            and (scopes is None or scope.name in scopes)
            and (collections is None or held.name in collections)
        )
        if not view.has_collections:
            return options if wanted else None
        if is_of_all and collections is None:
            # Select whole scopes: a filter by collections would omit the events of the scopes.
            there = tuple(scope.name for scope in view.manifest.scopes if scopes is None or scope.name in scopes)
            return replace(options, scopes=there) if there else None
        return replace(options, scopes=(), collections=wanted) if wanted else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# --- the options ------------------------------------------------------------------------------------------------------

PASSWORD_FILE_BYTES_MAX = 4096

_OF_OTHERS = {
    "bucket": "Name it in the url: couchbase://host/bucket",
    "connectionidentifier": "Give the url, the user and the password of the other cluster",
    "failondataloss": "Omit it: what a failover takes back arrives as rows whose op is rollback",
    "idfieldname": "Omit it: the key is the column key",
    "includeheaders": "Use xattrs for extended attributes",
    "kafka.bootstrap.servers": "Use url: couchbase://host/bucket",
    "streamcontent": "Use noValue=true for keys and metadata alone",
    "streammetadata": "Omit it, and choose with columns",
    "streampersistencepollinginterval": "Use mitigateRollbacks=true",
    "subscribe": "Use collections, or leave it out for all of them",
}
"""Options of Spark's Kafka source and Couchbase's connector that this source lacks, and what to use instead."""


class ValueForm(StrEnum):
    """The type of the column `value`."""

    BINARY = "binary"
    STRING = "string"
    """Bytes that are not UTF-8 become null, and remain in the column `value_bytes`."""
    VARIANT = "variant"
    """Parsed JSON documents; other values become null, and remain in the column `value_bytes`."""


class Mode(StrEnum):
    """What a row represents."""

    CHANGES = "changes"
    DOCUMENTS = "documents"


DOCUMENT_COLUMNS = ("scope", "collection", "key", "document")
"""The columns that are not fields, with `mode=documents`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Checked options. They are sent to the executors."""

    settings: ClientSettings
    read: ReadOptions
    start: Start | Offsets | datetime
    end: Offsets | None
    """The end of a batch read; None means now."""
    mode: Mode = option(
        "What a row is: a change (`changes`), or a live document (`documents`) with its fields as columns; see below.",
        Mode.CHANGES,
        python=False,
        spark=True,
    )
    value_form: ValueForm = option(
        "The type of the column `value`: `binary`, `string`, or `variant`, which is parsed JSON like that of Spark's "
        "`parse_json`, but faster. If an object has duplicate names, the last value counts.",
        ValueForm.BINARY,
        name="value",
        python=False,
        spark=True,
    )
    columns: tuple[str, ...] = option(
        "The columns of the frame, in this order. If none of them needs the values, the server does not send them.",
        (),
        default_words="all",
        python=False,
        spark=True,
        spark_note="Separate names with commas. A `schema` with these columns does the same.",
    )
    where: Conditions = option(
        "Read only documents that meet a condition of SQL, such as `type = 'order' AND total > 10`.",
        Conditions(),
        default_words="all",
        python=False,
        spark=True,
        spark_note="It may be on the columns of a change as well; see below. A stream always includes rollbacks.",
        commands=("land",),
        metavar="CONDITION",
    )
    system: bool = option(
        "Include the records of the system: the scope `_system`, and documents of transactions, whose keys begin with "
        "`_txn:`.",
        False,
        python=False,
        spark=True,
        commands=("land",),
    )
    rows_per_trigger_max: int | None = option(
        "Approximate number of rows per micro-batch: it reads whole vbuckets, in turn.",
        name="max_rows_per_trigger",
        least=1,
        python=False,
        spark=True,
        spark_also=("maxOffsetsPerTrigger",),
        commands=("land",),
    )
    bytes_per_trigger_max: int | None = option(
        "The same in bytes, estimated at 512 per row.", name="max_bytes_per_trigger", least=1, python=False, spark=True
    )
    partitions_min: int = option(
        "Minimum number of tasks that read.",
        1,
        name="min_partitions",
        least=1,
        most=10_000,
        python=False,
        spark=True,
        spark_also=("numPartitions",),
        commands=("land",),
    )
    seen: tuple[SeenCollection, ...] = option(
        "What the bucket had in the past: `scope`, `scope.collection`, `scope.collection=id`, separated by commas; "
        "see below.",
        (),
        name="seen_collections",
        default_words="none",
        python=False,
        spark=True,
    )

    @classmethod
    def make(cls, options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> SourceOptions:
        """Make options from Spark's texts. Their names are not case-sensitive."""
        take = _Taker(options)
        if take("mode") is Mode.DOCUMENTS:
            _check_documents(take)
        return cls(
            settings=_settings(take, environment),
            read=_read_options(take),
            value_form=take("value"),
            start=take("start"),
            end=take("end"),
            rows_per_trigger_max=take("max_rows_per_trigger"),
            bytes_per_trigger_max=take("max_bytes_per_trigger"),
            partitions_min=take("min_partitions"),
            mode=take("mode"),
            columns=take("columns"),
            where=take("where"),
            system=take("system"),
            seen=take("seen_collections"),
        )


_URL = Option(
    name="url",
    type_name="str",
    help="`couchbase://host[,host…]/bucket`, or `couchbases://` for TLS.",
    default_words="needed",
    spark=True,
    spark_also=("connectionString",),
)
SOURCE_OPTIONS = {
    "url": _URL,
    **{name: one for name, one in (CONNECT_OPTIONS | READ_OPTIONS | options_of(SourceOptions)).items() if one.spark},
}
"""The options of `format("dcp")`, by their names in Python, in the order of messages and of the documentation page."""
_NAMES = {name.lower(): one for one in SOURCE_OPTIONS.values() for name in (one.in_spark, *one.spark_also)}


class _Taker:
    """Returns the values of options by their names in Python. Errors use Spark's names."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given: dict[str, str] = {}
        spelled: dict[str, str] = {}
        for name, text in given.items():
            if (known := _NAMES.get(name.lower())) is not None:
                before = spelled.setdefault(known.name, name)
                if before != name:
                    raise InvalidInput(f"{before} and {name} are one option of the dcp source", hint="Give one of them")
                self._given[known.in_spark.lower()] = text
            else:
                raise InvalidInput(f"the dcp source has no option {name!r}", hint=_hint(name.lower()))

    def has(self, name: str) -> bool:
        return SOURCE_OPTIONS[name].in_spark.lower() in self._given

    def __call__(self, name: str) -> Any:
        asked = SOURCE_OPTIONS[name]
        text = self._given.get(asked.in_spark.lower())
        if text is None:
            default = asked.default if asked.spark_default is None else asked.spark_default
            return _PARSERS[name](default) if name in _PARSERS and isinstance(default, str) else default
        try:
            return _PARSERS.get(name, asked.parse)(text)
        except ValueError:
            raise InvalidInput(
                f"{text!r} is not a valid value for the option {asked.in_spark}", hint="See the options' page"
            ) from None


def _hint(name: str) -> str:
    if name in _OF_OTHERS:
        return _OF_OTHERS[name]
    nearest = get_close_matches(name, _NAMES, n=1)
    if nearest:
        return did_you_mean(_NAMES[nearest[0]].in_spark)
    return f"Use some of {', '.join(one.in_spark for one in SOURCE_OPTIONS.values())}"


def _settings(take: _Taker, environment: Mapping[str, str]) -> ClientSettings:
    url = take("url")
    if url is None:
        raise InvalidInput(
            "the dcp source needs the option url", hint="Write .option('url', 'couchbase://host/bucket')"
        )
    given = ConnectOptions(**{name: take(name) for name, one in CONNECT_OPTIONS.items() if one.spark})
    return ClientSettings.make(
        url,
        user=environment.get(USER_VARIABLE) if given.user is None else given.user,
        password=_password(given, environment),
        tls=given.tls_settings,
        mechanism=given.mechanism,
        network=given.network,
    )


def _password(given: ConnectOptions, environment: Mapping[str, str]) -> str | None:
    if given.password is not None:
        return given.password
    file = given.password_file
    if file is None:
        return environment.get(PASSWORD_VARIABLE)
    try:
        with file.open("rb") as opened:
            return opened.read(PASSWORD_FILE_BYTES_MAX).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the password file {file} can't be read: {error}", hint="Check its path and rights"
        ) from None


def _read_options(take: _Taker) -> ReadOptions:
    names = [name for name, one in READ_OPTIONS.items() if one.spark and name not in ("start", "end")]
    given = {name: take(name) for name in names}
    if len(given["scopes"]) == 1 and given["collections"] and not any("." in name for name in given["collections"]):
        # As in Couchbase's connector: collections of a single scope, without its name.
        given["collections"] = tuple(f"{given['scopes'][0]}.{name}" for name in given["collections"])
        given["scopes"] = ()
    columns = frozenset(take("columns"))
    if take("mode") is Mode.DOCUMENTS:
        given["no_value"] = bool(columns) and columns < {*DOCUMENT_COLUMNS} and "document" not in columns
    elif columns:
        given["xattrs"] = "xattrs" in columns
        # A server that omits values also omits their datatypes.
        given["no_value"] |= columns.isdisjoint(("value", "value_bytes", "datatype", "xattrs"))
    where = take("where")
    if where.need_values and take("no_value"):
        raise InvalidInput("a condition on fields of documents needs their values", hint="Omit noValue")
    if where.need_values:
        given["no_value"] = False
    # A task reads up to a planned seqno, and a snapshot may go on after it.
    return ReadOptions.make(**given, snapshots=Snapshots.AS_THEY_COME)


def _check_documents(take: _Taker) -> None:
    for name in ("value", "xattrs", "history", "no_value", "start", "end"):
        if take.has(name):
            raise InvalidInput(
                f"the option {SOURCE_OPTIONS[name].in_spark} is for changes, and mode is documents",
                hint="Omit it: the documents are read as they are now",
            )
    if "op" in take("where").columns:
        raise InvalidInput("a condition on op is for changes, and mode is documents", hint="Leave it out")


_STARTS = {
    "earliest": Start.BEGINNING,
    "latest": Start.NOW,
    "frombeginning": Start.BEGINNING,
    "fromnow": Start.NOW,
}
"""The names that Spark's own sources and Couchbase's connector use."""


def _parse_start(text: str) -> Start | Offsets | datetime:
    if text.lstrip().startswith("{"):
        return Offsets.from_json(text)
    return parse_start_time(text) or Start(_STARTS.get(text.lower(), text.lower()))


def _parse_seen(text: str) -> tuple[SeenCollection, ...]:
    # Imported here: it needs Arrow, whose import takes long, and `headwater.spark` may be imported only for its names.
    from headwater.landing.bucket_watch import SeenCollection

    return tuple(SeenCollection.parse(name.strip()) for name in text.split(",") if name.strip())


_PARSERS: dict[str, Callable[[str], Any]] = {
    "start": _parse_start,
    "end": lambda text: None if text.lower() in ("now", "latest") else Offsets.from_json(text),
    "mode": lambda text: Mode(text.lower()),
    "value": lambda text: ValueForm(text.lower()),
    "where": Conditions.parse,
    "seen_collections": _parse_seen,
}
"""The parsers of options whose values are more than numbers and texts."""

# --- as keywords ------------------------------------------------------------------------------------------------------


class SourceKeywords(TypedDict, total=False):
    """The options of the source as keywords of `headwater.spark.land` and `headwater.spark.read`."""

    user: str
    password: str
    password_file: Path | str
    tls: TlsSettings
    tls_ca: Path | str
    tls_cert: Path | str
    tls_key: Path | str
    tls_key_password: str
    tls_skip_verify: bool
    mechanism: str
    network: str
    start: Offsets | datetime | str
    scopes: Iterable[str] | str
    collections: Iterable[str] | str
    xattrs: bool
    history: bool
    compression: bool
    buffer_bytes: int
    noop_interval_s: int
    connections_per_node: int
    name: str
    mitigate_rollbacks: bool
    give_up_after_s: float
    max_rows_per_trigger: int
    max_bytes_per_trigger: int
    min_partitions: int
    seen_collections: Iterable[str] | str
    where: str
    system: bool


class FrameKeywords(SourceKeywords, total=False):
    """The keywords of `headwater.spark.read`: those that tables have, too, and these."""

    mode: Literal["changes", "documents"]
    end: Offsets | Literal["now"]
    value: Literal["binary", "string", "variant"]
    no_value: bool
    columns: Iterable[str] | str


FRAME_KEYWORDS = tuple((CONNECT_OPTIONS | SOURCE_OPTIONS)[name] for name in FrameKeywords.__annotations__)
LANDING_KEYWORDS = tuple((CONNECT_OPTIONS | SOURCE_OPTIONS)[name] for name in SourceKeywords.__annotations__)


def source_texts(
    url: str,
    keywords: Mapping[str, Any],
    *,
    function: str = "land",
    known: Collection[str] = frozenset(SourceKeywords.__annotations__),
    beside: Collection[str] = (),
) -> dict[str, str]:
    """Return the source's options for the keywords of a function.

    `beside` are other keywords of the function, to suggest for an unknown one.
    """
    check_keywords(function, keywords, known, beside=beside)
    given = dict(keywords)
    if (tls := given.pop("tls", None)) is not None:
        given |= {
            "tls_ca": tls.ca_file,
            "tls_cert": tls.certificate_file,
            "tls_key": tls.key_file,
            "tls_key_password": tls.key_password,
            "tls_skip_verify": tls.skip_verify or None,
        }
    texts = {"url": url}
    for name, value in given.items():
        if value is not None:
            one = SOURCE_OPTIONS[name]
            texts[one.in_spark] = value.to_json() if isinstance(value, Offsets) else one.write(value)
    return texts

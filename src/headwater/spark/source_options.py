"""The options of `format("dcp")`, read and checked.

The source makes `SourceOptions` from the texts that Spark hands over, and `headwater.spark.land` makes such texts from
its keywords; names, defaults and help are those of `headwater.client.options`. A password comes from the option
`password`, whose value Spark hides in plans and pages because of its name, from a file (`passwordFile`), or from the
environment (`HEADWATER_PASSWORD`). It must never stand in a `repr` or in an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypedDict

from headwater.client.offsets import Offsets
from headwater.client.options import OPTIONS, SPARK_OPTIONS, TO_READ, Option, check_keywords, warn_of_old
from headwater.client.read_options import ReadOptions, Snapshots, Start
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.errors import InvalidInput
from headwater.phrases import did_you_mean
from headwater.spark.conditions import Conditions
from headwater.spark.selection_watch import SeenCollection

PASSWORD_FILE_BYTES_MAX = 4096

OPTION_NAMES = tuple(option.in_spark for option in SPARK_OPTIONS)
"""In the order in which messages and the page name them."""

_OLD_NAMES = {old.lower(): option for option in SPARK_OPTIONS for old in option.spark_old}
_NAMES = {name.lower(): option for option in SPARK_OPTIONS for name in (option.in_spark, *option.spark_also)}
_OF_OTHERS = {
    "bucket": "Name it in the url: couchbase://host/bucket",
    "connectionidentifier": "Give the url, the user and the password of the other cluster",
    "failondataloss": "Leave it out: what a failover takes back comes as rows whose op is rollback",
    "idfieldname": "Leave it out: the key is the column key",
    "includeheaders": "Use xattrs for extended attributes",
    "kafka.bootstrap.servers": "Use url: couchbase://host/bucket",
    "streamcontent": "Use noValue=true for keys and metadata alone",
    "streammetadata": "Leave it out, and choose with columns",
    "streampersistencepollinginterval": "Use mitigateRollbacks=true",
    "subscribe": "Use collections, or leave it out for all of them",
}
"""What Spark's source of Kafka and Couchbase's connector have and this one has not, and what to do instead."""


class ValueForm(StrEnum):
    """What the column `value` is."""

    BINARY = "binary"
    STRING = "string"
    """Bytes that are no UTF-8 become null, and stay in the column `value_bytes`."""
    VARIANT = "variant"
    """JSON documents parsed; null for all others, which stay in the column `value_bytes`."""


class Mode(StrEnum):
    """What a row is."""

    CHANGES = "changes"
    DOCUMENTS = "documents"


DOCUMENT_COLUMNS = ("scope", "collection", "key", "document")
"""With `mode=documents`: those that are no fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Checked options. They travel to the executors."""

    settings: ClientSettings
    read: ReadOptions
    value_form: ValueForm
    start: Start | Offsets
    end: Offsets | None
    """Of a batch read; None for now."""
    rows_per_trigger_max: int | None
    bytes_per_trigger_max: int | None
    partitions_min: int
    mode: Mode = Mode.CHANGES
    columns: tuple[str, ...] = ()
    """Those of the frame; none for all."""
    where: Conditions = Conditions()
    seen: tuple[SeenCollection, ...] = ()
    """What `collections` and `scopes` may name though the bucket has it no longer; see `selection_watch`."""

    @classmethod
    def make(cls, options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> SourceOptions:
        """From the texts that Spark has, whose names are taken in any case."""
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
            where=take("where") or Conditions(),
            seen=take("seen_collections"),
        )


class _Taker:
    """Takes options by their names in Python, and names them as Spark has them where a value is wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given: dict[str, str] = {}
        spelled: dict[str, str] = {}
        for name, text in given.items():
            if (known := _NAMES.get(name.lower())) is not None:
                before = spelled.setdefault(known.name, name)
                if before != name:
                    raise InvalidInput(f"{before} and {name} are one option of the dcp source", hint="Give one of them")
                self._given[known.in_spark.lower()] = text
            elif (renamed := _OLD_NAMES.get(name.lower())) is not None:
                # FutureWarning is shown by default: those who run a query are seldom those who wrote it.
                warn_of_old(f"the option {name}", renamed.in_spark, kind=FutureWarning, stacklevel=4)
                self._given.setdefault(renamed.in_spark.lower(), text)
            else:
                raise InvalidInput(f"the dcp source has no option {name!r}", hint=_hint(name.lower()))

    def has(self, name: str) -> bool:
        return OPTIONS[name].in_spark.lower() in self._given

    def __call__(self, name: str) -> Any:
        option = OPTIONS[name]
        text = self._given.get(option.in_spark.lower())
        if text is None:
            default = option.default if option.spark_default is None else option.spark_default
            return _PARSERS[name](default) if name in _PARSERS and isinstance(default, str) else default
        try:
            return _PARSERS.get(name, option.parse)(text)
        except ValueError:
            raise InvalidInput(
                f"{text!r} is no value for the option {option.in_spark}", hint="See the options' page"
            ) from None


def _hint(name: str) -> str:
    if name in _OF_OTHERS:
        return _OF_OTHERS[name]
    nearest = get_close_matches(name, _NAMES, n=1)
    return did_you_mean(_NAMES[nearest[0]].in_spark) if nearest else f"Use some of {', '.join(OPTION_NAMES)}"


def _settings(take: _Taker, environment: Mapping[str, str]) -> ClientSettings:
    url = take("url")
    if url is None:
        raise InvalidInput(
            "the dcp source needs the option url", hint="Write .option('url', 'couchbase://host/bucket')"
        )
    tls = TlsSettings(
        ca_file=take("tls_ca"),
        certificate_file=take("tls_cert"),
        key_file=take("tls_key"),
        key_password=take("tls_key_password"),
        skip_verify=take("tls_skip_verify"),
    )
    return ClientSettings.make(
        url,
        user=take("user") if take.has("user") else environment.get("HEADWATER_USER"),
        password=_password(take, environment),
        tls=None if tls == TlsSettings() else tls,
        mechanism=take("mechanism"),
        network=take("network"),
    )


def _password(take: _Taker, environment: Mapping[str, str]) -> str | None:
    password: str | None = take("password")
    if password is not None:
        return password
    file: Path | None = take("password_file")
    if file is None:
        return environment.get("HEADWATER_PASSWORD")
    try:
        with file.open("rb") as opened:
            return opened.read(PASSWORD_FILE_BYTES_MAX).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the password file {file} can't be read: {error}", hint="Check its path and rights"
        ) from None


def _read_options(take: _Taker) -> ReadOptions:
    names = [option.name for option in TO_READ if option.spark and option.name not in ("start", "end")]
    given = {name: take(name) for name in names}
    if len(given["scopes"]) == 1 and given["collections"] and not any("." in name for name in given["collections"]):
        # As Couchbase's connector has it: the collections of a scope, by their own names.
        given["collections"] = tuple(f"{given['scopes'][0]}.{name}" for name in given["collections"])
        given["scopes"] = ()
    columns = frozenset(take("columns"))
    if take("mode") is Mode.DOCUMENTS:
        given["no_value"] = bool(columns) and columns < {*DOCUMENT_COLUMNS} and "document" not in columns
    elif columns:
        given["xattrs"] = "xattrs" in columns
        # A server that leaves the values out leaves their datatypes out as well.
        given["no_value"] |= columns.isdisjoint(("value", "value_bytes", "datatype", "xattrs"))
    # A task reads up to a seqno that was planned, and a snapshot may go on behind it.
    return ReadOptions.make(**given, snapshots=Snapshots.AS_THEY_COME)


def _check_documents(take: _Taker) -> None:
    for name in ("value", "xattrs", "history", "no_value", "start", "end"):
        if take.has(name):
            raise InvalidInput(
                f"the option {OPTIONS[name].in_spark} is for changes, and mode is documents",
                hint="Leave it out: the documents are read as they are now",
            )
    where: Conditions | None = take("where")
    if where is not None and "op" in where.allowed:
        raise InvalidInput("a condition on op is for changes, and mode is documents", hint="Leave it out")


_STARTS = {
    "earliest": Start.BEGINNING,
    "latest": Start.NOW,
    "frombeginning": Start.BEGINNING,
    "fromnow": Start.NOW,
}
"""As Spark's own sources have it, and Couchbase's connector."""


def _parse_start(text: str) -> Start | Offsets:
    if text.lstrip().startswith("{"):
        return Offsets.from_json(text)
    return Start(_STARTS.get(text.lower(), text.lower()))


def _parse_end(text: str) -> Offsets | None:
    return None if text.lower() in ("now", "latest") else Offsets.from_json(text)


def _parse_where(text: str) -> Conditions:
    try:
        return Conditions.parse(text)
    except ValueError:
        raise InvalidInput(
            f"{text!r} is no value for the option where",
            hint="Write conditions on vbucket, key, scope, collection and op, such as op = 'mutation' AND key IN"
            " ('a', 'b'), with AND between them; Spark's own where() takes all others",
        ) from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "start": _parse_start,
    "end": _parse_end,
    "mode": lambda text: Mode(text.lower()),
    "value": lambda text: ValueForm(text.lower()),
    "where": _parse_where,
    "seen_collections": lambda text: tuple(
        SeenCollection.parse(name.strip()) for name in text.split(",") if name.strip()
    ),
}
"""Of the options whose values are more than numbers and texts."""

# --- as keywords ------------------------------------------------------------------------------------------------------


class SourceKeywords(TypedDict, total=False):
    """The options of the source as `headwater.spark.land` takes them, and `headwater.spark.read`."""

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
    start: Offsets | Literal["beginning", "now"]
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


class FrameKeywords(SourceKeywords, total=False):
    """What `headwater.spark.read` takes beside the options that tables have, too."""

    mode: Literal["changes", "documents"]
    end: Offsets | Literal["now"]
    value: Literal["binary", "string", "variant"]
    no_value: bool
    columns: Iterable[str] | str
    where: str


def source_texts(
    url: str,
    keywords: Mapping[str, Any],
    *,
    function: str = "land",
    known: Collection[str] = frozenset(SourceKeywords.__annotations__),
    beside: Collection[str] = (),
) -> dict[str, str]:
    """The options of the source for the keywords of a function. Spark's own spelling of a keyword works, and warns.

    `beside` are further keywords of the function, which an unknown one may be close to.
    """
    by_spelling: dict[str, Option] = {
        spelling: option for option in SPARK_OPTIONS for spelling in (option.in_spark, *option.spark_old)
    }
    texts = {"url": url}
    for name, value in keywords.items():
        if name not in known and (spelled := by_spelling.get(name)) is not None:
            warn_of_old(name, spelled.name, stacklevel=4)
            name = spelled.name
        else:
            check_keywords(function, [name], known, beside=beside)
        if isinstance(value, TlsSettings):
            texts |= tls_texts(value)
        elif isinstance(value, Offsets):
            texts[OPTIONS[name].in_spark] = value.to_json()
        elif value is not None:
            texts[OPTIONS[name].in_spark] = OPTIONS[name].write(value)
    return texts


def tls_texts(tls: TlsSettings) -> dict[str, str]:
    """The options of the source for these settings."""
    given = {
        "tls_ca": tls.ca_file,
        "tls_cert": tls.certificate_file,
        "tls_key": tls.key_file,
        "tls_key_password": tls.key_password,
        "tls_skip_verify": tls.skip_verify or None,
    }
    return {OPTIONS[name].in_spark: OPTIONS[name].write(value) for name, value in given.items() if value is not None}

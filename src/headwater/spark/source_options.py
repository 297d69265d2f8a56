"""The options of `format("dcp")`: what they are called, what they take, and what is made of them.

Passwords come from the option `password`, whose value Spark hides in plans and pages because of its name, from a file
(`passwordFile`), or from the environment (`HEADWATER_PASSWORD`). None of them is shown in a `repr` of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions, Snapshots, Start
from headwater.client.settings import ClientSettings, TlsSettings
from headwater.errors import InvalidInput
from headwater.spark.selection_watch import SeenCollection

PASSWORD_FILE_BYTES_MAX = 4096


class ValueForm(StrEnum):
    """What the column `value` is."""

    BINARY = "binary"
    STRING = "string"
    """Bytes that are no UTF-8 become null, and stay in the column `value_bytes`."""
    VARIANT = "variant"
    """JSON documents parsed; null for all others, which stay in the column `value_bytes`."""


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
    seen: tuple[SeenCollection, ...] = ()
    """What `collections` and `scopes` may name though it is gone; see `selection_watch`."""

    @classmethod
    def make(cls, options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> SourceOptions:
        given = {name.lower(): value for name, value in options.items()}
        unknown = sorted(given.keys() - {name.lower() for name in OPTION_NAMES})
        if unknown:
            raise InvalidInput(
                f"the dcp source has no option {unknown[0]!r}", hint=f"Use some of {', '.join(OPTION_NAMES)}"
            )
        take = _Taker(given)
        return cls(
            settings=_settings(take, environment),
            read=_read_options(take),
            value_form=take("value"),
            start=take("startingOffsets"),
            end=take("endingOffsets"),
            rows_per_trigger_max=take("maxRowsPerTrigger"),
            bytes_per_trigger_max=take("maxBytesPerTrigger"),
            partitions_min=take("minPartitions"),
            seen=take("seenCollections"),
        )


class _Taker:
    """Takes options by name, in any case, and names the option where its value is wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __call__(self, name: str) -> Any:
        option = _BY_NAME[name]
        text = self._given.get(name.lower())
        if text is None:
            return option.default
        try:
            return option.read(text)
        except ValueError:
            raise InvalidInput(f"{text!r} is no value for the option {name}", hint="See the options' page") from None


def _settings(take: _Taker, environment: Mapping[str, str]) -> ClientSettings:
    url = take("url")
    if url is None:
        raise InvalidInput(
            "the dcp source needs the option url", hint="Write .option('url', 'couchbase://host/bucket')"
        )
    tls = TlsSettings(
        ca_file=take("tlsCa"),
        certificate_file=take("tlsCertificate"),
        key_file=take("tlsKey"),
        skip_verify=take("tlsSkipVerify"),
    )
    return ClientSettings.make(
        url,
        user=environment.get("HEADWATER_USER") if take("user") is None else take("user"),
        password=_password(take, environment),
        tls=None if tls == TlsSettings() else tls,
        mechanism=take("mechanism"),
        network=take("network"),
    )


def _password(take: _Taker, environment: Mapping[str, str]) -> str | None:
    password: str | None = take("password")
    if password is not None:
        return password
    file: Path | None = take("passwordFile")
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
    given = {option.read_option: take(option.name) for option in OPTIONS if option.read_option is not None}
    told = {name: value for name, value in given.items() if value is not None}
    # A task reads up to a seqno that was planned, and a snapshot may go on behind it.
    return ReadOptions.make(**told, snapshots=Snapshots.AS_THEY_COME)


# --- the options --------------------------------------------------------------------------------------------------


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _seen(text: str) -> tuple[SeenCollection, ...]:
    return tuple(map(SeenCollection.parse, _names(text)))


def _value_form(text: str) -> ValueForm:
    return ValueForm(text.lower())


def _start(text: str) -> Start | Offsets:
    if text.lstrip().startswith("{"):
        return Offsets.from_json(text)
    # Spark's own sources say earliest and latest.
    return Start({"earliest": Start.BEGINNING, "latest": Start.NOW}.get(text.lower(), text.lower()))


def _end(text: str) -> Offsets | None:
    return None if text.lower() in ("now", "latest") else Offsets.from_json(text)


@dataclass(frozen=True, slots=True)
class SourceOption:
    """An option: how its text is read, and what its page tells of it."""

    name: str
    read: Callable[[str], Any]
    meaning: str = ""
    """As a sentence for the page. Left out where the option is one of the client's, and means the same there."""
    default: Any = None
    told_default: str | None = None
    """What the page tells as the default, where that is more than the value."""
    read_option: str | None = None
    """The client's option that it sets, by its name in `ReadOptions`."""


OPTIONS = (
    SourceOption(
        "url", str, "`couchbase://host[,host…]/bucket`, or `couchbases://` for TLS.", told_default="needed"
    ),
    SourceOption("user", str, "Who logs in.", told_default="`HEADWATER_USER`"),
    SourceOption("password", str, "The password. It is shown nowhere.", told_default="`HEADWATER_PASSWORD`"),
    SourceOption("passwordFile", Path, "A file with the password, where the query is planned."),
    SourceOption(
        "tlsCa", Path, "A file with the authorities to trust. It must be on the executors, too, as all files of TLS.",
        told_default="the system's",
    ),
    SourceOption("tlsCertificate", Path, "A file with a certificate to log in with."),
    SourceOption("tlsKey", Path, "A file with the key of that certificate."),
    SourceOption(
        "tlsSkipVerify", _flag, "Take any certificate from the server: for tests, as it protects from nobody.", False
    ),
    SourceOption(
        "mechanism", str, "How to log in, see [connecting](connecting.md#logging-in).", told_default="the best"
    ),
    SourceOption(
        "network", str, "By which of their addresses nodes are reached, see"
        " [connecting](connecting.md#nodes-with-two-addresses).", told_default="`auto`",
    ),
    SourceOption(
        "scopes", _names, "Read these scopes: names with commas between them.", told_default="all", read_option="scopes"
    ),
    SourceOption(
        "collections", _names, "Read these collections: `scope.collection`, with commas between them.",
        told_default="all", read_option="collections",
    ),
    SourceOption("noValue", _flag, read_option="no_value"),
    SourceOption("xattrs", _flag, "Extended attributes, too, as the column `xattrs`.", read_option="xattrs"),
    SourceOption("history", _flag, read_option="history"),
    SourceOption("compression", _flag, read_option="compression"),
    SourceOption("bufferBytes", int, read_option="buffer_bytes"),
    SourceOption(
        "noopInterval", int, "Seconds between a server's signs of life. Much longer silence is a lost connection.",
        read_option="noop_interval_s",
    ),
    SourceOption("connectionsPerNode", int, read_option="connections_per_node"),
    SourceOption("name", str, default="headwater-spark", read_option="name"),
    SourceOption(
        "giveUpAfter", float, "Seconds that a vbucket may be out of reach before the query fails.",
        read_option="give_up_after_s",
    ),
    SourceOption("mitigateRollbacks", _flag, read_option="mitigate_rollbacks"),
    SourceOption(
        "value", _value_form, "What the column `value` is: `binary`, `string`, or `variant`, which is parsed in Python;"
        " Spark's `parse_json` on a string is faster.", ValueForm.BINARY,
    ),
    SourceOption(
        "startingOffsets", _start, "`beginning`, `now`, or offsets as JSON; Spark's `earliest` and `latest` will do.",
        Start.BEGINNING,
    ),
    SourceOption("endingOffsets", _end, "Of a batch read: `now`, or offsets as JSON.", told_default="`now`"),
    SourceOption("maxRowsPerTrigger", _whole, "Rows of a micro-batch, about: it takes whole vbuckets, in turn."),
    SourceOption("maxBytesPerTrigger", _whole, "The same in bytes, counted as 512 a row."),
    SourceOption("minPartitions", _whole, "Tasks of a batch, at least.", 1),
    SourceOption(
        "seenCollections", _seen, "What was there once: `scope`, `scope.collection`, `scope.collection=id`, with commas"
        " between them, see below.", (), told_default="none",
    ),
)  # fmt: skip
"""In the order in which messages and the page name them."""

OPTION_NAMES = tuple(option.name for option in OPTIONS)
_BY_NAME = {option.name: option for option in OPTIONS}

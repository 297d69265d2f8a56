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

from headwater.client.client_settings import ClientSettings
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions, Snapshots, Start
from headwater.client.tls_settings import TlsSettings
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
    progress_dir: str | None
    """Where tasks tell how far the snapshots they read went; see `read_extents`."""
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
            value_form=take("value", _value_form, ValueForm.BINARY),
            start=take("startingOffsets", _start, Start.BEGINNING),
            end=take("endingOffsets", _end, None),
            rows_per_trigger_max=take("maxRowsPerTrigger", _whole, None),
            bytes_per_trigger_max=take("maxBytesPerTrigger", _whole, None),
            partitions_min=take("minPartitions", _whole, 1),
            progress_dir=take("progressDir", str, None),
            seen=take("seenCollections", _seen, ()),
        )


OPTION_NAMES = (
    "url", "user", "password", "passwordFile", "tlsCa", "tlsCertificate", "tlsKey", "tlsSkipVerify", "mechanism",
    "network", "scopes", "collections", "noValue", "xattrs", "history", "compression", "bufferBytes", "noopInterval",
    "connectionsPerNode", "name", "giveUpAfter", "mitigateRollbacks", "value", "startingOffsets", "endingOffsets",
    "maxRowsPerTrigger", "maxBytesPerTrigger", "minPartitions", "progressDir",
    "seenCollections",
)  # fmt: skip


class _Taker:
    """Takes options by name, in any case, and names the option where its value is wrong."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __call__(self, name: str, read: Callable[[str], Any], default: Any) -> Any:
        text = self._given.get(name.lower())
        if text is None:
            return default
        try:
            return read(text)
        except ValueError:
            raise InvalidInput(f"{text!r} is no value for the option {name}", hint="See the options' page") from None


def _settings(take: _Taker, environment: Mapping[str, str]) -> ClientSettings:
    url = take("url", str, None)
    if url is None:
        raise InvalidInput(
            "the dcp source needs the option url", hint="Write .option('url', 'couchbase://host/bucket')"
        )
    tls = TlsSettings(
        ca_file=take("tlsCa", Path, None),
        certificate_file=take("tlsCertificate", Path, None),
        key_file=take("tlsKey", Path, None),
        skip_verify=take("tlsSkipVerify", _flag, False),
    )
    return ClientSettings.make(
        url,
        user=take("user", str, environment.get("HEADWATER_USER")),
        password=_password(take, environment),
        tls=None if tls == TlsSettings() else tls,
        mechanism=take("mechanism", str, None),
        network=take("network", str, None),
    )


def _password(take: _Taker, environment: Mapping[str, str]) -> str | None:
    password: str | None = take("password", str, None)
    if password is not None:
        return password
    file: Path | None = take("passwordFile", Path, None)
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
    given = {
        "scopes": take("scopes", _names, None),
        "collections": take("collections", _names, None),
        "no_value": take("noValue", _flag, None),
        "xattrs": take("xattrs", _flag, None),
        "history": take("history", _flag, None),
        "compression": take("compression", _flag, None),
        "buffer_bytes": take("bufferBytes", int, None),
        "noop_interval_s": take("noopInterval", int, None),
        "connections_per_node": take("connectionsPerNode", int, None),
        "name": take("name", str, "headwater-spark"),
        "give_up_after_s": take("giveUpAfter", float, None),
        "mitigate_rollbacks": take("mitigateRollbacks", _flag, None),
        # A task reads up to a seqno that was planned, and a snapshot may go on behind it.
        "snapshots": Snapshots.AS_THEY_COME,
    }
    return ReadOptions.make(**{name: value for name, value in given.items() if value is not None})


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

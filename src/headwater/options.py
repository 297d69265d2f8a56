"""Define an option once, as the field of a dataclass, for Python, Spark, the command line and the reference.

    buffer_bytes: int = option("How much a server may send.", 16 * MIB, least=1024, spark=True, commands=("tail",))

The field gives the option its name, its type and its default; `options_of` lists the options of a class. A name has
three spellings: `buffer_bytes` in Python, `bufferBytes` in Spark, `--buffer-bytes` on the command line. The fields are
in `ReadOptions`, `ConnectOptions`, `SourceOptions`, `NodeOptions` and `ServerLimits`; options of a single command are
in `cli/COMMAND.py`. This module is pure: it opens no file and imports no library.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum, StrEnum, auto
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from headwater.errors import InvalidInput
from headwater.phrases import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

MIB = 1024 * 1024


class Kind(Enum):
    """The type of an option's value."""

    FLAG = auto()
    WHOLE = auto()
    BYTES = auto()
    """A whole number of bytes. As text, it may end with K, M or G."""
    NUMBER = auto()
    TEXT = auto()
    FILE = auto()
    NAMES = auto()
    """As text, names separated by commas."""


_KINDS = {"bool": Kind.FLAG, "int": Kind.WHOLE, "float": Kind.NUMBER, "Path": Kind.FILE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, with its names and defaults everywhere it is used."""

    name: str = ""
    """The name in Python. Its last part is the unit: `_s` for seconds, `_bytes` for bytes."""
    type_name: str = ""
    default: Any = None
    help: str
    """A sentence, or several."""
    default_words: str | None = None
    """The default in words, for pages, if the value does not explain itself."""
    least: float | None = None
    most: float | None = None
    choices: Mapping[str, Any] | type[StrEnum] | None = None
    """What a user may write. A mapping also has the value that each choice stands for."""
    python: bool = True
    spark: bool = False
    spark_name: str | None = None
    """The name in Spark's own sources, if they have the option. It overrides the derived name."""
    spark_default: Any = None
    spark_note: str = ""
    spark_also: tuple[str, ...] = ()
    """The names in Spark's Kafka source and in Couchbase's own connector. They work, too."""
    commands: tuple[str, ...] = ()
    """The commands that have it; `*` for all that connect."""
    cli_name: str | None = None
    """The name on the command line, if it differs. The name of an option that can be repeated is in the singular."""
    cli_also: tuple[str, ...] = ()
    """Further names on the command line."""
    cli_note: str = ""
    cli_type: Any = None
    """The click type that reads it, if the field's type is not enough."""
    metavar: str | None = None
    variable: str | None = None
    """The environment variable that commands read it from."""

    @property
    def kind(self) -> Kind:
        plain = self.type_name.removesuffix(" | None")
        if plain.startswith(("tuple", "frozenset")):
            return Kind.NAMES
        kind = _KINDS.get(plain, Kind.TEXT)
        return Kind.BYTES if kind is Kind.WHOLE and self.unit == "bytes" else kind

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
        """Parse a value. Raises `ValueError` if the text is not valid."""
        value = _PARSERS[self.kind](text)
        if self.kind is Kind.WHOLE and self.least is not None and not self.python and value < self.least:
            # The client checks its own options itself; its errors name their limits.
            raise ValueError(text)
        return value

    def write(self, value: Any) -> str:
        """The value as text that `parse` accepts."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str | Path) or not isinstance(value, Iterable):
            return str(value)
        return ",".join(map(str, value))

    def check(self, value: Any) -> str | None:
        """Advice with the valid range if a number is outside its limits; otherwise None."""
        if value is None or self.least is None or self.most is None or self.least <= value <= self.most:
            return None
        return f"Use {self.least} to {self.most}"


def option(
    help: str, default: Any = None, *, factory: Callable[[], Any] | None = None, secret: bool = False, **others: Any
) -> Any:
    """A dataclass field that is an option. `others` are attributes of `Option`; a secret is left out of `repr`."""
    metadata = {"option": Option(help=help, **others)}
    if factory is not None:
        return field(default_factory=factory, repr=not secret, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


@cache
def options_of(cls: type) -> dict[str, Option]:
    """The options among the fields of a dataclass, by name. A name passed to `option` overrides the field's name."""
    found = [
        replace(
            one.metadata["option"],
            name=one.metadata["option"].name or one.name,
            type_name=str(one.type),
            default=None if one.default is MISSING else one.default,
        )
        for one in fields(cls)
        if "option" in one.metadata
    ]
    return {one.name: one for one in found}


# --- texts --------------------------------------------------------------------------------------------------------


def _parse_flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_SIZE = re.compile(r"(?P<number>[0-9]{1,12})(?P<unit>[kmg]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as 65536, 64K or 16M. Raises `ValueError` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(match["number"]) * _UNITS[match["unit"].lower()]


def write_bytes(size: int) -> str:
    """A number of bytes in its largest whole unit: 16777216 as 16M."""
    for unit in ("g", "m", "k"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit.upper()}"
    return str(size)


_INTERVAL = re.compile(
    r"(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)(?:(?P<short>ms|s|m|h|d)| +(?P<long>millisecond|second|minute|hour|day)s?)"
)
_SHORT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONG_S = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}


def parse_interval_s(text: str) -> float:
    """Parse a time into seconds, as commands write it ("500ms", "5s", "1m", "1h", "7d") or as Spark writes triggers
    ("500 milliseconds", "5 seconds", "1 minute")."""
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"{text!r} is no time", hint='Write one like "5 seconds", "500 milliseconds" or "1 minute"')
    return float(match["number"]) * (_SHORT_S[match["short"]] if match["short"] else _LONG_S[match["long"]])


_PARSERS: dict[Kind, Callable[[str], Any]] = {
    Kind.FLAG: _parse_flag,
    Kind.WHOLE: int,
    Kind.BYTES: parse_bytes,
    Kind.NUMBER: float,
    Kind.TEXT: str,
    Kind.FILE: Path,
    Kind.NAMES: lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
}


# --- keywords -----------------------------------------------------------------------------------------------------


def check_keywords(
    function: str, given: Iterable[str], known: Collection[str], *, beside: Collection[str] = ()
) -> None:
    """Raise Python's own error for a keyword that a function does not have, and name the nearest one.

    `beside` are further keywords of the function. They are suggested, but are never in `given`.
    """
    for name in given:
        if name not in known:
            nearest = get_close_matches(name, {*known, *beside}, n=1)
            advice = did_you_mean(nearest[0]) if nearest else f"It takes {', '.join(sorted({*known, *beside}))}."
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {advice}")


def suggest_keywords(made: F) -> F:
    """Decorate a function or a class: its error for an unknown keyword names the nearest one."""
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


def list_keywords(options: Iterable[Option]) -> Callable[[F], F]:
    """Decorate a function with `**options: Unpack[…]`: its signature and its documentation list them one by one.

    Type checkers read `Unpack`; completion in a notebook and `help()` need this.
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
    # As in stubs, three dots stand for a default that is not a constant.
    default = option.default if is_none_possible else ...
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option.type_name)

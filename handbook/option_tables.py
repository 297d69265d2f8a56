"""Tables of options, from the one in `headwater.client.options`."""

from __future__ import annotations

from collections.abc import Iterable

from handbook.markdown import code, table
from headwater.client.options import OPTIONS, SPARK_OPTIONS, TO_CONNECT, TO_READ, Option


def read_options_table() -> str:
    return _spellings(TO_READ)


def client_settings_table() -> str:
    return _spellings(TO_CONNECT)


def _spellings(options: Iterable[Option]) -> str:
    rows = [
        (
            code(option.name) if option.python else "",
            code(option.in_spark) if option.spark else "",
            code(option.on_command_line) if option.commands else "",
            f"{code(option.type_name)}{f', {option.unit}' if option.unit else ''}",
            _default(option, option.default),
            option.help,
        )
        for option in options
    ]
    return table(("Python", "Spark", "command line", "type", "default", "meaning"), rows)


def source_options_table() -> str:
    rows = [
        (
            code(option.in_spark),
            _default(option, option.default if option.spark_default is None else option.spark_default),
            " ".join(filter(None, (option.help, option.spark_note))),
        )
        for option in SPARK_OPTIONS
    ]
    return table(("option", "default", "meaning"), rows)


def old_spellings_table() -> str:
    rows = [
        (code(old), code(new), where)
        for option in OPTIONS.values()
        for old, new, where in (
            *((old, option.in_spark, "Spark") for old in option.spark_old),
            *((old, " ".join(new), ", ".join(option.commands)) for old, new in (option.cli_old or {}).items()),
        )
    ]
    return table(("old", "today", "where"), rows)


def _default(option: Option, default: object) -> str:
    """As one would write it in Spark or on the command line."""
    if option.default_words is not None:
        return option.default_words
    if default is None:
        return "none"
    return code(str(default).lower() if isinstance(default, bool) else str(default))

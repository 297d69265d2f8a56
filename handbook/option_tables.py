"""Tables of options, from where they are declared and what is written below their fields."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from handbook.markdown import code, table
from handbook.written_below import written_below
from headwater.client.read_options import ReadOptions
from headwater.client.settings import ClientSettings
from headwater.spark.source_options import OPTIONS, SourceOption


def read_options_table() -> str:
    return _options(ReadOptions)


def client_settings_table() -> str:
    return _options(ClientSettings)


def _options(kind: type[Any]) -> str:
    told = _docs_of(kind)
    rows = [
        (code(field.name), code(str(field.type)), _default(field), told.get(field.name, ""))
        for field in fields(kind)
        if not field.name.startswith("_")
    ]
    return table(("option", "type", "default", "meaning"), rows)


def _default(field: Any) -> str:
    if field.default is MISSING:
        return "needed" if field.default_factory is MISSING else ""
    default = field.default
    if isinstance(default, tuple) and default and all(isinstance(one, Enum) for one in default):
        return ", ".join(code(one.name) for one in default)
    return code(repr(str(default)) if isinstance(default, Enum) else f"{default!r}")


def _docs_of(kind: type[Any]) -> dict[str, str]:
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    return written_below(definition.body)


# --- of the Spark source ------------------------------------------------------------------------------------------


def source_options_table() -> str:
    of_client = _docs_of(ReadOptions)
    rows = [
        (code(option.name), _source_default(option), option.meaning or of_client[option.read_option or ""])
        for option in OPTIONS
    ]
    return table(("option", "default", "meaning"), rows)


def _source_default(option: SourceOption) -> str:
    """As one would write it in Spark."""
    if option.told_default is not None:
        return option.told_default
    default = option.default
    if default is None and option.read_option is not None:
        default = {field.name: field.default for field in fields(ReadOptions)}[option.read_option]
    if default is None:
        return "none"
    return code(str(default).lower() if isinstance(default, bool) else str(default))

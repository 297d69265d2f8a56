"""Tables of options, from the dataclasses that hold them and what is written below their fields."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from handbook.markdown import code, table
from headwater.client.client_settings import ClientSettings
from headwater.client.read_options import ReadOptions
from headwater.spark.source_options import OPTION_NAMES


def read_options_table() -> str:
    return _options(ReadOptions)


def client_settings_table() -> str:
    return _options(ClientSettings)


def source_option_names() -> str:
    """The names alone: what they mean is told by hand."""
    return ", ".join(code(name) for name in OPTION_NAMES)


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
    return code(repr(str(default)) if isinstance(default, Enum) else f"{default!r}")


def _docs_of(kind: type[Any]) -> dict[str, str]:
    """What is written below each field."""
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    told = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        is_told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_told:
            told[statement.target.id] = str(below.value.value)  # type: ignore[attr-defined]
    return told

"""Markdown helpers, and the docstrings below assignments, which describe fields in this project."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import pairwise


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`"


def sentence(docstring: str | None) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((docstring or "").strip().partition("\n\n")[0].split())


def written_below(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Return the docstrings of the fields of a class, or of the attributes set on `self`, by name."""
    found = {}
    for statement, below in pairwise(body):
        name = _assigned(statement)
        if name is not None and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[name] = str(below.value.value)
    return found


def _assigned(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return None
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else None

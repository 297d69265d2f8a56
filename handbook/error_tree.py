"""The errors, from the tree in `errors.py` and from the code that raises them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from handbook.markdown import code, table
from headwater import errors

SOURCE = Path(errors.__file__).parent
_SECTIONS = {
    "Connecting and reading": ("client",),
    "Commands": ("cli", "judge", "sim"),
    "Files in and out": ("transfer",),
    "Nodes and their data": ("node", "store"),
    "Clusters": ("cluster",),
    "Tables and Spark": ("lake", "spark"),
}
"""The errors that users of the commands or the client can meet, by the packages that raise them. The codec's errors
are about bytes, and have their own table."""
_INNER = ("StatusError",)


def error_tree() -> str:
    return "\n".join(["```text", *_branch(errors.HeadwaterError, ""), "```"])


def _branch(kind: type[errors.HeadwaterError], indent: str) -> Iterator[str]:
    flags = " (may succeed later)" if kind.retriable else ""
    yield f"{indent}{kind.__name__}{flags}"
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _branch(below, indent + "  ")


def status_table() -> str:
    rows = [
        (statuses_of(kind), code(kind.__name__), "yes" if kind.retriable else "no", kind.default_hint)
        for kind in dict.fromkeys(errors.STATUS_ERRORS.values())
    ]
    return table(("status", "error", "may succeed later", "what to do"), rows)


def statuses_of(kind: type[errors.StatusError]) -> str:
    """Return the number of an error's status; the first and the last if it has several."""
    first, *rest = [f"0x{status:02x}" for status, of_it in errors.STATUS_ERRORS.items() if of_it is kind]
    return f"{first} to {rest[-1]}" if rest else first


# --- by message ---------------------------------------------------------------------------------------------------


_OPERATORS_FIRST = (
    "another process uses the data in ",
    "the data has format ",
    "the disk is full: no space for the data in ",
    "the data in … is damaged",
    "listening on … without TLS ",
    "the UPR port has no authentication",
    "another program listens on port ",
    "can't listen on port ",
)
"""The beginnings of the messages that a node's operator meets first."""


def message_sections() -> str:
    """Return every message that has a hint, by subject and then by its beginning. A message of two subjects is
    listed under the first."""
    parts, seen = [], set[tuple[str, str]]()
    for title, folders in _SECTIONS.items():
        found = {which: kind for which, kind in _messages(folders).items() if which not in seen}
        seen |= found.keys()
        rows = [(message, advice, code(kind)) for (message, advice), kind in sorted(found.items(), key=_sorting)]
        parts += [f"### {title}", table(("message", "what to do", "error"), rows)]
    return "\n\n".join(parts)


def operators_messages() -> str:
    rows = []
    for beginning in _OPERATORS_FIRST:
        every = _messages(tuple(chain.from_iterable(_SECTIONS.values())))
        found = sorted({message for message in every if message[0].startswith(beginning)})
        if not found:
            raise LookupError(f"no message begins with {beginning!r} any more")
        rows += found
    return table(("message", "what to do"), rows)


@cache
def _messages(folders: tuple[str, ...]) -> dict[tuple[str, str], str]:
    """Return messages with their hints, and the name of their error."""
    return {
        (message, advice): kind
        for folder in folders
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for kind, message, advice in _raised(ast.parse(path.read_text(encoding="utf-8")))
    }


def _sorting(item: tuple[tuple[str, str], str]) -> tuple[str, str]:
    (message, advice), _ = item
    return re.sub(r"^[…\W]+", "", message).lower(), advice


def _raised(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the errors whose reason and hint can be read from the source."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or (kind := ast.unparse(call.func).removeprefix("errors.")) not in kinds:
            continue
        texts = [text for text in map(_text, call.args) if text]
        hint = next((_text(keyword.value) for keyword in call.keywords if keyword.arg == "hint"), None)
        if texts and hint:
            yield kind, texts[-1], hint


def _text(node: ast.expr) -> str | None:
    """Return the text of an expression, with … for inserted values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return re.sub(r"…+", "…", "".join(str(part) for part in parts))
    return None

"""The errors, from the tree in `errors.py` and from the places that raise them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from handbook.markdown import code, sentence, table
from headwater import errors

SOURCE = Path(errors.__file__).parent
_USERS_PLACES = ("cli", "client", "node", "store", "spark", "cluster", "sim")
"""What a user of the commands or the client can meet; the codec's errors tell of bytes, and are in their own table."""
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
        (f"0x{status:02x}", code(kind.__name__), "yes" if kind.retriable else "no", kind.default_hint)
        for status, kind in errors.STATUS_ERRORS.items()
    ]
    return table(("status", "error", "may succeed later", "what to do"), rows)


# --- by message ---------------------------------------------------------------------------------------------------


def message_table() -> str:
    """Every message that has an advice, by its beginning."""
    found = {
        (message, advice): kind
        for folder in _USERS_PLACES
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for kind, message, advice in _raised(ast.parse(path.read_text(encoding="utf-8")))
    }
    rows = [(message, advice, code(kind)) for (message, advice), kind in sorted(found.items(), key=_sorting)]
    return table(("message", "what to do", "error"), rows)


def _sorting(item: tuple[tuple[str, str], str]) -> tuple[str, str]:
    (message, advice), _ = item
    return re.sub(r"^[…\W]+", "", message).lower(), advice


def _raised(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Errors that are made with a reason and a hint that can be read from the source."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in kinds:
            continue
        texts = [text for text in map(_text, call.args) if text]
        hint = next((_text(keyword.value) for keyword in call.keywords if keyword.arg == "hint"), None)
        if texts and hint:
            yield call.func.id, texts[-1], hint


def _text(node: ast.expr) -> str | None:
    """A text, with … for what is put into it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return re.sub(r"…+", "…", "".join(str(part) for part in parts))
    return None


def first_sentences() -> dict[str, str]:
    """What every class says about itself."""
    return {
        name: sentence(kind.__doc__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.HeadwaterError)
    }

"""Words that all parts use: numbers and their nouns, advice on what to install, and text of a server made harmless.

Anything may import it. It imports nothing but the standard library, so that a command can use it before libraries are
loaded.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def counted(count: int, noun: str, *, plural: str | None = None) -> str:
    """`plural` is for nouns that do not just get an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def counted_changes(changes: int, system_events: int) -> str:
    """Changes of documents, apart from what says that collections were created or dropped, once for each vbucket."""
    events = f" and {counted(system_events, 'system event')}" if system_events else ""
    return f"{counted(changes, 'change')}{events}"


def parse_number(text: str, largest: int) -> int | None:
    """A number from 0 to `largest` in decimal digits; None for anything else."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(largest))
    return int(text) if is_number and int(text) <= largest else None


def did_you_mean(name: str) -> str:
    return f"Did you mean {name}?"


# --- how this program was installed -------------------------------------------------------------------------------
#
# What to type so that an extra comes to the same environment. The name alone would not do: a clone is on no package
# index, and its environment may not be the one on the path.


PACKAGE = "headwater"


def missing_library(error: ModuleNotFoundError) -> str:
    """What is not installed. A module of ours that is not found is a fault, and raised as that."""
    if error.name is None or error.name.startswith(PACKAGE):
        raise error
    return error.name


def install_command(extra: str) -> str:
    """The command that installs an extra beside what is there."""
    options, what = _where_from(extra)
    return shlex.join([sys.executable, "-m", "pip", "install", *options, what])


def _where_from(extra: str) -> tuple[list[str], str]:
    origin = _origin()
    if origin is None:
        return [], f"{PACKAGE}[{extra}]"
    url = str(origin.get("url", ""))
    if not url.startswith("file:"):
        # A URL of a repository names the tool that gets it.
        tool = origin.get("vcs_info", {}).get("vcs")
        return [], f"{PACKAGE}[{extra}] @ {f'{tool}+{url}' if tool else url}"
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return (["-e"] if is_editable else []), f"{unquote(urlsplit(url).path)}[{extra}]"


def _origin() -> dict[str, Any] | None:
    """Where an installer has taken the package from, as PEP 610 has it. None for an index."""
    # It takes longer to import than the rest of what every command begins with.
    from importlib.metadata import Distribution, PackageNotFoundError

    try:
        text = Distribution.from_name(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        # It runs from its sources.
        return {"url": Path(__file__).parents[2].as_uri(), "dir_info": {"editable": True}}
    return json.loads(text) if text else None


# --- compiling ----------------------------------------------------------------------------------------------------
#
# Kernels are compiled on a new machine, which takes long and would look like standing still. A command registers here
# how it reports that; without one, nothing is reported.


COMPILING = (
    "compiling the kernels of this command, which takes up to a minute; `headwater kernels` compiles those of all "
    "commands ahead"
)


class _FirstCompile:
    """How this process reports that it compiles, and whether it has: it does so once."""

    report: Callable[[], None] | None = None
    is_reported = False


def report_first_compile(report: Callable[[], None] | None) -> None:
    """Call this when the process compiles its first kernel. It replaces what was registered before."""
    _FirstCompile.report = report


def report_compile() -> None:
    """Report, once, that this process compiles a kernel."""
    if _FirstCompile.report is not None and not _FirstCompile.is_reported:
        _FirstCompile.is_reported = True
        _FirstCompile.report()


# --- text of a server, in one line --------------------------------------------------------------------------------


_NOT_UTF_8 = "surrogateescape"
_SURROGATES = range(0xDC80, 0xDD00)


def escaped(text: str) -> str:
    """A byte that is not UTF-8 is a lone surrogate, as in the keys of changes, and is shown as the byte."""
    return text if text.isprintable() else "".join(map(_shown, text))


def escaped_bytes(data: bytes) -> str:
    return escaped(data.decode(errors=_NOT_UTF_8))


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if ord(char) in _SURROGATES:
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def printable(text: str) -> str:
    """Text from the input without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def may_be_escaped(key: str) -> bool:
    """Whether the text of a key may stand for bytes that are no text: those are shown with escapes."""
    return "\\" in key

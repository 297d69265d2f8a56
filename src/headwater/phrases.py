"""Wording that all parts share: counted nouns, advice on what to install, and escaped text from a server.

Any module may import it. It imports only the standard library, so that a command can use it before libraries are
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
    """A number and its noun. Pass `plural` for nouns that do not just get an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def counted_changes(changes: int, system_events: int) -> str:
    """Count changes of documents, and apart from them system events, which occur once for each vbucket."""
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
# The command that installs an extra into the same environment. The name alone is not enough: a clone is on no package
# index, and its environment may not be the one on the path.


PACKAGE = "headwater"


def missing_library(error: ModuleNotFoundError) -> str:
    """The name of the missing library. If one of our own modules is missing, that is a bug, and is raised again."""
    if error.name is None or error.name.startswith(PACKAGE):
        raise error
    return error.name


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation."""
    options, what = _where_from(extra)
    return shlex.join([sys.executable, "-m", "pip", "install", *options, what])


def _where_from(extra: str) -> tuple[list[str], str]:
    origin = _origin()
    if origin is None:
        return [], f"{PACKAGE}[{extra}]"
    url = str(origin.get("url", ""))
    if not url.startswith("file:"):
        # The URL of a repository starts with the tool that fetches it.
        tool = origin.get("vcs_info", {}).get("vcs")
        return [], f"{PACKAGE}[{extra}] @ {f'{tool}+{url}' if tool else url}"
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return (["-e"] if is_editable else []), f"{unquote(urlsplit(url).path)}[{extra}]"


def _origin() -> dict[str, Any] | None:
    """Where the package was installed from, as recorded by the installer (PEP 610). None for a package index."""
    # Imported here, because it takes longer to import than everything else that each command loads first.
    from importlib.metadata import Distribution, PackageNotFoundError

    try:
        text = Distribution.from_name(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        # The program runs from its sources.
        return {"url": Path(__file__).parents[2].as_uri(), "dir_info": {"editable": True}}
    return json.loads(text) if text else None


# --- compiling ----------------------------------------------------------------------------------------------------
#
# A new machine has to compile the kernels, which takes long and would look like a hang. A command registers here how
# it reports that; without one, nothing is reported.


COMPILING = (
    "compiling the kernels of this command, which takes up to a minute; `headwater kernels` compiles those of all "
    "commands ahead"
)


class _FirstCompile:
    """How this process reports its first compilation, and whether it has done so."""

    report: Callable[[], None] | None = None
    is_reported = False


def report_first_compile(report: Callable[[], None] | None) -> None:
    """Set the function to call when the process compiles its first kernel. It replaces an earlier one."""
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
    """Escape what is not printable. A lone surrogate stands for a byte that is not UTF-8, and is shown as that byte."""
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
    """Replace every character that a terminal might interpret with a question mark."""
    return "".join(char if char.isprintable() else "?" for char in text)


def may_be_escaped(key: str) -> bool:
    """Whether a key, as shown, may contain escapes, which stand for bytes that are not text."""
    return "\\" in key

"""How this program was installed, for advice on what is missing: what to type so that an extra comes to the same place.

The name alone would not do: a clone is on no package index, and its environment may not be the one on the path.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
        return [], f"{PACKAGE}[{extra}] @ {_with_tool(url, origin)}"
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return (["-e"] if is_editable else []), f"{unquote(urlsplit(url).path)}[{extra}]"


def _origin() -> dict[str, Any] | None:
    """Where an installer has taken the package from, as PEP 610 has it. None for an index."""
    try:
        told = Distribution.from_name(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        # It runs from its sources.
        return {"url": Path(__file__).parents[2].as_uri(), "dir_info": {"editable": True}}
    return json.loads(told) if told else None


def _with_tool(url: str, origin: dict[str, Any]) -> str:
    """A URL of a repository names the tool that gets it."""
    tool = origin.get("vcs_info", {}).get("vcs")
    return f"{tool}+{url}" if tool else url

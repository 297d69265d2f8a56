"""Compiling kernels ahead of their first call, where the machine code is kept, and when it is stale.

`compile_kernels` is what a node calls before it is ready, and what `headwater kernels` and a Spark driver call; it runs
no kernel.

numba keeps the machine code of a kernel under the source of that kernel alone. But a kernel holds the code of every
kernel it calls: change one, and its callers in other files would go on with the old one. So all kernels are kept
together under one digest of all their sources, and any change makes a new folder. The folder is the user's, not the
package's, which may be read-only; it is private, because what is loaded from it is run. The location of the package
plays no part, so that code compiled in one place serves in another: another virtual environment, or an executor of
Spark.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any, get_origin, get_type_hints

import numba
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from headwater.phrases import is_compiling

_PACKAGE = Path(__file__).parents[2]
_FOLDERS_KEPT = 4
_IN_USE_S = 24 * 60 * 60.0
"""A folder that was used so lately may be in use, and stays, however many there are."""
_PRIVATE = 0o700
_MARK = re.compile(rb"^@(kernel|kernel_part|inlined_part)$|= intrinsic\(", re.MULTILINE)
"""What a file has whose code becomes part of kernels."""

KERNELS: list[Any] = []
"""Every kernel of the modules that were imported, in the order of their definitions."""
_PLAIN = {int: (types.int64,), bool: (types.boolean,)}


def register_kernel(dispatcher: Any) -> None:
    KERNELS.append(dispatcher)


def compile_kernels(*packages: str) -> None:
    """Compile the kernels of these packages or modules for all declared types, or load them if they were compiled.

    Imports the modules that define them, and raises `ModuleNotFoundError` if a library of theirs is not installed.
    """
    names = {name for name in kernel_modules() if any(f"{name}.".startswith(f"{package}.") for package in packages)}
    for name in sorted(names):
        import_module(name)
    for dispatcher in KERNELS:
        if dispatcher.py_func.__module__ in names:
            for signature in declared_signatures(dispatcher):
                dispatcher.compile(signature)


def declared_signatures(dispatcher: Any) -> list[tuple[Any, ...]]:
    """The types under which a kernel is called, read from its annotations (the aliases are in `memory`)."""
    hints = get_type_hints(dispatcher.py_func, include_extras=True)
    hints.pop("return", None)
    for name, hint in hints.items():
        if hint not in _PLAIN and get_origin(hint) is not Annotated:
            module = dispatcher.py_func.__module__
            raise TypeError(f"{module}.{dispatcher.__name__} is a kernel, and {name!r} has no exact type: {hint}")
    return list(product(*(_PLAIN.get(hint) or hint.__metadata__ for hint in hints.values())))


def kernel_modules() -> list[str]:
    """The names of all modules of Headwater that define kernels, imported or not."""
    return [".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts) for path in _kernel_sources()]


@cache
def _kernel_sources() -> dict[Path, bytes]:
    """Every file of the package that has a kernel or an intrinsic, and what stands in it."""
    sources = {path: path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))}
    return {path: source for path, source in sources.items() if _MARK.search(source)}


@cache
def sources_digest() -> str:
    """A digest of every file of the package that has a kernel or an intrinsic, of numba's version and of Python's."""
    digest = sha256(f"{numba.__version__} {sys.version}".encode())
    for path, source in _kernel_sources().items():
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + source + b"\0")
    return digest.hexdigest()[:16]


@cache
def code_folder() -> Path:
    """The folder for this state of the sources: the first candidate that can be made and belongs to no other user."""
    for parent in _candidates():
        folder = parent / sources_digest()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
            status = folder.stat()
            is_ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not is_ours or not os.access(folder, os.W_OK):
                continue
            folder.chmod(_PRIVATE)
            # The time of a folder is that of its last use.
            os.utime(folder)
        except OSError:
            continue
        _forget_old(parent)
        return folder
    return Path(tempfile.mkdtemp(prefix="headwater-kernels-"))


def _candidates() -> list[Path]:
    folders = []
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        folders.append(Path(named) / "headwater")
    caches = os.environ.get("XDG_CACHE_HOME")
    folders.append((Path(caches) if caches else Path.home() / ".cache") / "headwater" / "kernels")
    folders.append(Path(tempfile.gettempdir()) / f"headwater-kernels-{os.getuid()}")
    return folders


def _forget_old(parent: Path) -> None:
    """Every upgrade leaves a folder behind; those go that were not used for longest."""
    used_s: dict[Path, float] = {}
    for entry in parent.iterdir():
        # Another process may be doing the same.
        with suppress(FileNotFoundError):
            status = entry.stat()
            if stat.S_ISDIR(status.st_mode):
                used_s[entry] = status.st_mtime
    # One has been used just now.
    now_s = max(used_s.values(), default=0.0)
    for folder in sorted(used_s, key=lambda folder: used_s[folder])[:-_FOLDERS_KEPT]:
        if used_s[folder] < now_s - _IN_USE_S:
            rmtree(folder, ignore_errors=True)


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Gives numba the folder, and the digest as the stamp of the source."""

    def __init__(self, function: Any, source_file: str) -> None:
        where = sha256(os.path.relpath(source_file, _PACKAGE).encode()).hexdigest()[:8]
        self._disambiguator = f"{where}-{function.__code__.co_firstlineno}"

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(code_folder())

    def ensure_cache_path(self) -> None:
        """Before code is kept. A folder that was removed meanwhile comes back as private as it was."""
        code_folder().mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
        super().ensure_cache_path()

    def get_source_stamp(self) -> str:
        return sources_digest()

    def get_disambiguator(self) -> str:
        return self._disambiguator


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012  (numba's own attribute)


class KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, in that folder."""

    _impl_class = _CacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept code, or None: numba compiles then."""
        kept = super().load_overload(sig, target_context)
        if kept is None:
            is_compiling()
        return kept

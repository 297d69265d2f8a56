"""Kernels as Python calls them: load their machine code, compile it ahead, store it, and detect when it is stale.

A node calls `compile_kernels` before it is ready, and so do `headwater kernels` and a Spark driver; it runs no kernel.
If LLVM is not installed, as in the environment of a mere client, `interpreting` runs the few kernels that this needs.

numba compiles a kernel, and is not needed after that: importing it takes longer than everything else that a command
does until its first output. So the stored form of a kernel is an object file with a function that CPython can call
(`compiling` says how it takes its arguments). LLVM links it into the process when the kernel is first called.

A kernel contains the code of every kernel it calls: if one changed, its callers in other files would continue with the
old code. So all kernels are stored together under one digest of all their sources, and any change makes a new folder.
The folder is the user's, not the package's, which may be read-only; it is private, because code from it is run. The
location of the package does not matter, so that code compiled in one place works in another: another virtual
environment, or an executor of Spark. The name of a file says which processor it is for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import get_data
from shutil import rmtree
from threading import RLock
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import numpy as np

from headwater.phrases import report_compile

_FOLDERS_KEPT = 4
_IN_USE_S = 24 * 60 * 60.0
"""A folder that was used this recently may be in use, and stays, however many there are."""
_PRIVATE = 0o700
_WAIT_S_MAX = 120.0
"""How long to wait while another process compiles a kernel: far longer than that takes, unless it hangs."""
_POLL_S = 0.02

KERNEL_MODULES = (
    "headwater.client.batches",
    "headwater.kernels.siphash",
    "headwater.lake.json_fields",
    "headwater.lake.key_index",
    "headwater.lake.variants",
    "headwater.lake.verify_hashes",
    "headwater.node.producer.outbound",
    "headwater.node.producer.stream",
    "headwater.protocol.kernels.decode",
    "headwater.protocol.kernels.frame_runs",
    "headwater.protocol.kernels.json_check",
    "headwater.protocol.kernels.json_path",
    "headwater.protocol.kernels.snappy",
    "headwater.protocol.kernels.xattr_split",
    "headwater.store.checksums",
    "headwater.store.commits",
    "headwater.store.compaction",
    "headwater.store.index",
    "headwater.store.prepares",
    "headwater.store.range_scan",
    "headwater.store.read_run",
    "headwater.store.receiving",
    "headwater.store.runs",
    "headwater.store.scan",
    "headwater.store.search",
    "headwater.store.set_run",
    "headwater.store.vbuckets",
    "headwater.transfer.change_lines",
    "headwater.transfer.json_lines",
    "headwater.transfer.key_template",
    "headwater.transfer.set_frames",
)
"""Every module of Headwater that has a kernel or a part. (To find them, a command would have to read all sources, which
takes longer than loading its kernels. A test compares.)"""
_COMPILER_MODULES = (
    "headwater.kernels.compiling",
    "headwater.kernels.machine_code",
    "headwater.kernels.memory",
    "headwater.store.checksum_step",
)
"""The other modules that decide how a kernel is compiled and called."""

KERNELS: list[Kernel] = []
"""Every kernel of the modules that were imported, in the order of their definitions."""


# --- what a kernel is made of -----------------------------------------------------------------------------------------


class ArrayType(NamedTuple):
    """A parameter that is a contiguous array: the type of its items, as numpy names it, and its dimensions."""

    item: str
    dimensions: int = 1


class KernelPart:
    """A function that only kernels call. Python can't call it, because it would wait for a compilation on every start.

    Tests call what `compiling.part_for_python` makes of it.
    """

    def __init__(self, function: Callable[..., Any], *, is_inlined: bool = False) -> None:
        self.function = function
        self.is_inlined = is_inlined


class Intrinsic(NamedTuple):
    """A numba function that kernels call, and the module that defines it, which imports numba."""

    module: str
    name: str


_PLAIN: dict[Any, str] = {int: "int64", bool: "bool"}


class Kernel(partial[Any]):
    """A function that Python calls, and that is machine code.

    It is a `partial` because the function of a partial can be replaced: by the machine code, once that is loaded. A
    method `__call__` would cost each call as much as the machine code needs to read its arguments.
    """

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> Kernel:
        made = super().__new__(cls, function)
        made.function = function
        made._point_at(made._load_and_call)
        KERNELS.append(made)
        return made

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def is_loaded(self) -> bool:
        return self.func != self._load_and_call

    def parameters(self) -> dict[str, ArrayType | str]:
        """The types of its arguments by name, read from its annotations (the aliases are in `memory`)."""
        hints = get_type_hints(self.function, include_extras=True)
        hints.pop("return", None)
        for name, hint in hints.items():
            if hint not in _PLAIN and get_origin(hint) is not Annotated:
                raise TypeError(f"{self.name} is a kernel, and {name!r} has no exact type: {hint}")
        return {name: _PLAIN.get(hint) or hint.__metadata__[0] for name, hint in hints.items()}

    def load(self) -> None:
        """Link the stored machine code into the process. If there is none, compile it first."""
        with _LOADING:
            if not self.is_loaded:
                self._point_at(_linked(self) if has_machine_code() else _interpreted(self))

    def _load_and_call(self, *args: Any) -> Any:
        self.load()
        return self.func(*args)

    def _point_at(self, function: Callable[..., Any]) -> None:
        # A partial is unpickled in this way, too.
        self.__setstate__((function, (), {}, self.__dict__))  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def compile_kernels(*packages: str) -> None:
    """Compile the kernels of these packages or modules, or load them if they were compiled.

    Imports the modules that define them. Raises `ModuleNotFoundError` if a library that they need is not installed.
    """
    for kernel in _kernels_of(packages):
        kernel.load()


def are_compiled(*packages: str) -> bool:
    """Whether machine code is stored for each of their kernels. Loads none of it."""
    return all(_file_of(kernel).exists() for kernel in _kernels_of(packages))


def _kernels_of(packages: tuple[str, ...]) -> list[Kernel]:
    names = {name for name in KERNEL_MODULES if any(f"{name}.".startswith(f"{package}.") for package in packages)}
    for name in sorted(names):
        import_module(name)
    return [kernel for kernel in KERNELS if kernel.function.__module__ in names]


# --- loading ----------------------------------------------------------------------------------------------------------


_LOADING = RLock()
"""Several threads may call a kernel for the first time at once."""
_LOADED: list[Any] = []
"""Objects that must stay as long as the machine code may be called."""

FASTCALL = 0x80
"""METH_FASTCALL: the arguments come as an array of objects."""
SELF = (np.ndarray, TypeError, RuntimeError, None)
"""The Python objects that the machine code needs, passed to it as `self`: it contains no address itself."""


class _MethodDef(ctypes.Structure):
    """PyMethodDef, from which CPython makes a callable for a C function."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def has_machine_code() -> bool:
    """Whether kernels run as machine code here. LLVM links it, and is installed together with numba."""
    return find_spec("llvmlite") is not None


def _interpreted(kernel: Kernel) -> Callable[..., Any]:
    from headwater.kernels.interpreting import interpreted

    return interpreted(kernel)


@cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_lljit_compiler(machine)


def _linked(kernel: Kernel) -> Callable[..., Any]:
    """The kernel as a builtin function of this process."""
    import llvmlite.binding as llvm

    name = symbol_of(kernel)
    builder = llvm.JITLibraryBuilder().add_object_img(_kept_code(kernel)).add_current_process().export_symbol(name)
    library = builder.link(_linker(), name)
    definition = _MethodDef(kernel.function.__name__.encode(), library[name], FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    _LOADED.append((library, definition))
    made: Callable[..., Any] = make(ctypes.addressof(definition), SELF, None)
    return made


def symbol_of(kernel: Kernel) -> str:
    """The name of its entry. Two kernels of a module may have one name: not both, one of them as a local function."""
    return kernel.name.replace(".", "_")


def _kept_code(kernel: Kernel) -> bytes:
    """The object file of a kernel. If there is none for this processor, compile it now."""
    file = _file_of(kernel)
    with suppress(FileNotFoundError):
        return file.read_bytes()
    report_compile()
    # Import numba only for compiling, see above.
    from headwater.kernels.compiling import compiled_object

    if kernel.function.__module__ not in KERNEL_MODULES:
        return compiled_object(kernel)  # A test's own kernel: the digest does not cover its source.
    # If the folder was removed meanwhile, create it again, as private as it was.
    file.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    with only_writer(file.parent):
        with suppress(FileNotFoundError):
            return file.read_bytes()  # Another process has compiled it while this one waited.
        code = compiled_object(kernel)
        # Another process may read the file at any time, so write another one and rename it.
        handle, written = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as opened:
            opened.write(code)
        Path(written).replace(file)
        return code


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make other processes wait that also want to write there, as tasks that Spark starts at once on a new machine do.

    This only saves work: if there are no locks, or one is held for too long, the caller continues without.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        give_up_s = time.monotonic() + _WAIT_S_MAX
        with suppress(OSError):  # a file system without locks
            while time.monotonic() < give_up_s:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_S)
        yield
    finally:
        with suppress(OSError):
            # Closing is not enough: a process that was forked meanwhile holds the file open.
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _file_of(kernel: Kernel) -> Path:
    return code_folder() / f"{kernel.name}-{_processor()}.o"


@cache
def _processor() -> str:
    """A digest of the processor that kernels are compiled for: of its name and its features."""
    import llvmlite.binding as llvm

    named = [os.environ.get(f"NUMBA_CPU_{what}", "") for what in ("NAME", "FEATURES")]
    own = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    return sha256(" ".join([*named, *own]).encode()).hexdigest()[:8]


# --- where it is kept -------------------------------------------------------------------------------------------------


@cache
def sources_digest() -> str:
    """A digest of every file that determines machine code, of LLVM's version and of Python's."""
    import llvmlite

    digest = sha256(f"{llvmlite.__version__} {sys.version}".encode())
    for name in (*_COMPILER_MODULES, *KERNEL_MODULES):
        # The package may be in a zip file, as after `spark-submit --py-files`.
        source = get_data("headwater", f"{name.partition('.')[2].replace('.', '/')}.py")
        assert source is not None, "its loader is one of Python's own"
        digest.update(name.encode() + b"\0" + source + b"\0")
    return digest.hexdigest()[:16]


@cache
def code_folder() -> Path:
    """The folder for this state of the sources: the first candidate that can be created and is not another user's."""
    for parent in _candidates():
        folder = parent / sources_digest()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
            # A user who can write to the parent folder could replace this one.
            if not (_is_ours(parent) and _is_ours(folder) and os.access(folder, os.W_OK)):
                continue
            folder.chmod(_PRIVATE)
            # The modification time of a folder is the time of its last use.
            os.utime(folder)
        except OSError:
            continue
        _forget_old(parent)
        return folder
    return Path(tempfile.mkdtemp(prefix="headwater-kernels-"))


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder of this user, not a link, and no other user can write to it."""
    status = folder.lstat()
    is_private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_private


def _candidates() -> list[Path]:
    folders = []
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        folders.append(Path(named) / "headwater")
    caches = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # A user without a home, as in many containers.
        folders.append((Path(caches) if caches else Path.home() / ".cache") / "headwater" / "kernels")
    folders.append(Path(tempfile.gettempdir()) / f"headwater-kernels-{os.getuid()}")
    return folders


def _forget_old(parent: Path) -> None:
    """Remove the folders that were not used for longest: every upgrade leaves one behind."""
    used_s: dict[Path, float] = {}
    for entry in parent.iterdir():
        # Another process may be doing the same.
        with suppress(FileNotFoundError):
            status = entry.stat()
            if stat.S_ISDIR(status.st_mode):
                used_s[entry] = status.st_mtime
    # One of them has been used just now.
    now_s = max(used_s.values(), default=0.0)
    for folder in sorted(used_s, key=lambda folder: used_s[folder])[:-_FOLDERS_KEPT]:
        if used_s[folder] < now_s - _IN_USE_S:
            rmtree(folder, ignore_errors=True)

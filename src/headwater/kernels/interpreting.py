"""Kernels without a compiler: the same functions, run by Python.

A client that is installed without numba uses these. A change takes some microseconds instead of a fraction of one; the
results are the same, because the source is the same. Arrays are memoryviews here: their items are Python's integers,
which take half the time of numpy's and have no width. So a kernel in which 64-bit numbers wrap would give other
results, and only the kernels that a client needs are run like this (`INTERPRETED_MODULES`). The tests compare each of
them with its machine code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from types import FunctionType
from typing import Any

import numpy as np

from headwater.kernels.machine_code import Intrinsic, Kernel, KernelPart

INTERPRETED_MODULES = frozenset(
    {
        "headwater.client.batches",
        "headwater.protocol.kernels.decode",
        "headwater.protocol.kernels.frame_runs",
        "headwater.protocol.kernels.json_check",
        "headwater.protocol.kernels.snappy",
        "headwater.protocol.kernels.xattr_split",
        "headwater.transfer.change_lines",
    }
)
"""The modules whose kernels never let a number wrap."""


def interpreted(kernel: Kernel) -> Callable[..., Any]:
    """The kernel as a Python function. Raises `ModuleNotFoundError` if it needs machine code."""
    if kernel.function.__module__ not in INTERPRETED_MODULES:
        raise ModuleNotFoundError(f"{kernel.name} has to be compiled, and numba is not installed", name="numba")
    body = _for_python(kernel.function)

    def call(*args: Any) -> Any:
        return body(*[arg.data if isinstance(arg, np.ndarray) else arg for arg in args])

    return call


@cache
def _for_python(function: Any) -> FunctionType:
    """A copy of the function that calls Python's forms of its parts."""
    names = (name for name in function.__code__.co_names if name in function.__globals__)
    known = {name: _python_value(function.__globals__[name]) for name in names}
    return FunctionType(function.__code__, known | {"__name__": function.__module__}, function.__name__)


def _python_value(value: Any) -> Any:
    if isinstance(value, Intrinsic):
        return _INTRINSICS[value.name]
    if isinstance(value, KernelPart | Kernel):
        return _for_python(value.function)
    if isinstance(value, np.ndarray):
        return value.data
    return _CONVERSIONS.get(value, value) if isinstance(value, type) else value


def _signed(number: int) -> int:
    return number if number < 1 << 63 else number - (1 << 64)


def _unsigned(bits: int) -> Callable[[int], int]:
    mask = (1 << bits) - 1
    return lambda number: number & mask


_CONVERSIONS: dict[type, Callable[[int], int]] = {
    np.int64: _signed,
    np.uint8: _unsigned(8),
    np.uint16: _unsigned(16),
    np.uint32: _unsigned(32),
    np.uint64: _unsigned(64),
}


def _load(format_: str) -> Callable[[memoryview, int], int]:
    unpack = Struct(format_).unpack_from

    def load(data: memoryview, at: int) -> int:
        number: int = unpack(data, at)[0]
        return number

    return load


def _store(format_: str) -> Callable[[memoryview, int, int], None]:
    pack = Struct(format_).pack_into
    return lambda data, at, number: pack(data, at, number)


def _bytes_at(address: int, length: int) -> memoryview:
    # Go through numpy, because a memoryview can't read items in the format that ctypes gives.
    memory: Any = (ctypes.c_uint8 * length).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8).data


def _copy(target: memoryview, to: int, source: memoryview, at: int, length: int) -> None:
    target[to : to + length] = source[at : at + length]


_INTRINSICS: dict[str, Callable[..., Any]] = {
    "load_u8": memoryview.__getitem__,
    "load_u16": _load(">H"),
    "load_u32": _load(">I"),
    "load_u64": _load(">Q"),
    "store_u16": _store(">H"),
    "store_u32": _store(">I"),
    "store_u64": _store(">Q"),
    "copy_bytes": _copy,
    "borrowed": lambda array: array,
    "bytes_at": _bytes_at,
    "local_bytes": lambda length: memoryview(bytearray(length)),
}
"""The intrinsics that `INTERPRETED_MODULES` use. They check bounds, as all of Python does."""

"""What kernels are written with: the decorators, the types of their parameters, loads, stores and block copies.

Every module with a kernel imports this one. A function that Python calls is a `kernel`; its annotations are the exact
types of its arguments, and `compile_kernels` compiles it for them ahead of the first call. A function that only kernels
call is a part; its annotations are for the reader.

This module does not import numba, which is needed to compile a kernel (`compiling`), but not to call one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headwater.kernels.machine_code import ArrayType, Intrinsic, Kernel, KernelPart

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=np.generic)

# --- the types of a kernel's parameters -----------------------------------------------------------------------------
#
# For the type checker, each is an array or an integer. The metadata is the type that the kernel is compiled for, and
# that its callers' arrays are compared with. An array that can't be written to, such as one over received bytes or over
# an Arrow column, is refused if the kernel itself writes to that parameter. The `ReadOnly...` and `Any...` forms tell
# the reader that the kernel does not.

Bytes: TypeAlias = Annotated[NDArray[np.uint8], ArrayType("uint8")]
ReadOnlyBytes: TypeAlias = Annotated[NDArray[np.uint8], ArrayType("uint8")]
AnyBytes: TypeAlias = ReadOnlyBytes
Bools: TypeAlias = Annotated[NDArray[np.bool_], ArrayType("bool")]
Int8s: TypeAlias = Annotated[NDArray[np.int8], ArrayType("int8")]
Int32s: TypeAlias = Annotated[NDArray[np.int32], ArrayType("int32")]
ReadOnlyInt32s: TypeAlias = Annotated[NDArray[np.int32], ArrayType("int32")]
Int64s: TypeAlias = Annotated[NDArray[np.int64], ArrayType("int64")]
ReadOnlyInt64s: TypeAlias = Annotated[NDArray[np.int64], ArrayType("int64")]
UInt16s: TypeAlias = Annotated[NDArray[np.uint16], ArrayType("uint16")]
ReadOnlyUInt16s: TypeAlias = Annotated[NDArray[np.uint16], ArrayType("uint16")]
UInt32s: TypeAlias = Annotated[NDArray[np.uint32], ArrayType("uint32")]
ReadOnlyUInt32s: TypeAlias = Annotated[NDArray[np.uint32], ArrayType("uint32")]
UInt64s: TypeAlias = Annotated[NDArray[np.uint64], ArrayType("uint64")]
ReadOnlyUInt64s: TypeAlias = Annotated[NDArray[np.uint64], ArrayType("uint64")]
ByteRows: TypeAlias = Annotated[NDArray[np.uint8], ArrayType("uint8", 2)]
Int64Rows: TypeAlias = Annotated[NDArray[np.int64], ArrayType("int64", 2)]
UInt64Rows: TypeAlias = Annotated[NDArray[np.uint64], ArrayType("uint64", 2)]
UInt32: TypeAlias = Annotated[int, "uint32"]
UInt64: TypeAlias = Annotated[int, "uint64"]
Column: TypeAlias = NDArray[Any]
"""An array of any numbers, for parts and for Python's own functions; a kernel's parameter has an exact type."""


def read_only(array: NDArray[T]) -> NDArray[T]:
    """A view of the array that can't be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


# Inside a kernel every number has a machine type, and mixing signed and unsigned numbers makes floats. These explicit
# conversions prevent that. For the type checker they give plain numbers.
i64: Any = np.int64
u8: Any = np.uint8
u16: Any = np.uint16
u32: Any = np.uint32
u64: Any = np.uint64

# --- the decorators -------------------------------------------------------------------------------------------------


def kernel(function: F) -> F:
    """Decorate a function that Python calls, and register it for `compile_kernels` with the types of its annotations.

    Other threads can run while it does. If it was not compiled before its first call, it is compiled then.
    """
    return cast(F, Kernel(function))


def kernel_part(function: F) -> F:
    """Decorate a function that only kernels call: it is compiled with each of them, for the types it gets there."""
    return cast(F, KernelPart(function))


def inlined_part(function: F) -> F:
    """Decorate a part that becomes part of its callers' machine code, whatever its size.

    The compiler inlines small functions by itself. If the body of a loop is divided into larger ones, a call per part
    and item would be expensive, because an array is passed as seven numbers. See also `borrowed`.
    """
    return cast(F, KernelPart(function, is_inlined=True))


# --- intrinsics -----------------------------------------------------------------------------------------------------
#
# numba has no unaligned loads, no byte swap and no memcpy of its own; each of these is one or two machine
# instructions, so they are intrinsics. None of them checks bounds: the kernels do, before each use.


def _intrinsic(name: str) -> Any:
    return Intrinsic("headwater.kernels.compiling", name)


load_u8 = _intrinsic("load_u8")
"""A byte, without the check for a negative index that `array[at]` makes."""
load_u16 = _intrinsic("load_u16")
load_u32 = _intrinsic("load_u32")
load_u64 = _intrinsic("load_u64")
store_u16 = _intrinsic("store_u16")
store_u32 = _intrinsic("store_u32")
store_u64 = _intrinsic("store_u64")
leading_zeros = _intrinsic("leading_zeros")
"""The number of zero bits before the first set bit of a 64-bit word; 64 if none is set."""
multiply_high = _intrinsic("multiply_high")
"""The upper 64 bits of the product of two 64-bit words; `*` gives the lower ones."""
copy_bytes = _intrinsic("copy_bytes")
"""memcpy between byte arrays: target and position, source and position, length. The ranges must not overlap."""
move_bytes = _intrinsic("move_bytes")
"""memmove inside a byte array: target position, source position, length. The ranges may overlap."""
borrowed = _intrinsic("borrowed")
"""The same array without its reference count, for a kernel to pass to its parts. Parts count references wherever the
compiler does not see that this is needless, and for one item that takes as long as the rest of the work. The caller of
the kernel holds the array meanwhile."""
bytes_at = _intrinsic("bytes_at")
"""An array of the bytes at an address, of the given length. The caller of the kernel holds the memory meanwhile."""
int64s_at = _intrinsic("int64s_at")
local_bytes = _intrinsic("local_bytes")
"""An array of bytes, of constant length, that is gone when the function returns."""
prefetch = _intrinsic("prefetch")
"""Prefetch a line of memory that will be read soon. It may lie beyond the array's end."""


def address_of(array: Column) -> int:
    """The address of an array, for a table that a kernel reads. Keep the array as long as the address is used."""
    address: int = array.__array_interface__["data"][0]
    return address

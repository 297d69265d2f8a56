"""What kernels are written with: the decorators, the types of their parameters, loads, stores and block copies.

Every module with a kernel imports this one. A function that Python calls is a `kernel`; its annotations say exactly
which types it is called with, and `compile_kernels` compiles it for them ahead of the first call. A function that only
kernels call is a part; its annotations are for the reader.

numba has no unaligned loads, no byte swap and no memcpy of its own; each of these is one or two machine
instructions, so they are given to it as intrinsics. None of them checks a bound: the kernels do, before each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from headwater.protocol.kernels.machine_code import KernelCache, register_kernel

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=np.generic)

# --- the types of a kernel's parameters -----------------------------------------------------------------------------
#
# To the type checker each is an array or an integer; the metadata is what numba calls it. An array that can't be
# written to, such as one over received bytes or over a column of Arrow, is another type to numba than one that can.
# Where a kernel meets both, its parameter is annotated with the `Any...` form, and the kernel is compiled for each.


def _array(item: Any, dimensions: int = 1) -> Any:
    return types.Array(item, dimensions, "C")


def _read_only(item: Any) -> Any:
    return types.Array(item, 1, "C", readonly=True)


Bytes: TypeAlias = Annotated[NDArray[np.uint8], _array(types.uint8)]
ReadOnlyBytes: TypeAlias = Annotated[NDArray[np.uint8], _read_only(types.uint8)]
AnyBytes: TypeAlias = Annotated[NDArray[np.uint8], _array(types.uint8), _read_only(types.uint8)]
Bools: TypeAlias = Annotated[NDArray[np.bool_], _array(types.boolean)]
Int8s: TypeAlias = Annotated[NDArray[np.int8], _array(types.int8)]
Int32s: TypeAlias = Annotated[NDArray[np.int32], _array(types.int32)]
ReadOnlyInt32s: TypeAlias = Annotated[NDArray[np.int32], _read_only(types.int32)]
Int64s: TypeAlias = Annotated[NDArray[np.int64], _array(types.int64)]
ReadOnlyInt64s: TypeAlias = Annotated[NDArray[np.int64], _read_only(types.int64)]
UInt16s: TypeAlias = Annotated[NDArray[np.uint16], _array(types.uint16)]
ReadOnlyUInt16s: TypeAlias = Annotated[NDArray[np.uint16], _read_only(types.uint16)]
UInt32s: TypeAlias = Annotated[NDArray[np.uint32], _array(types.uint32)]
ReadOnlyUInt32s: TypeAlias = Annotated[NDArray[np.uint32], _read_only(types.uint32)]
UInt64s: TypeAlias = Annotated[NDArray[np.uint64], _array(types.uint64)]
ReadOnlyUInt64s: TypeAlias = Annotated[NDArray[np.uint64], _read_only(types.uint64)]
ByteRows: TypeAlias = Annotated[NDArray[np.uint8], _array(types.uint8, 2)]
Int64Rows: TypeAlias = Annotated[NDArray[np.int64], _array(types.int64, 2)]
UInt64Rows: TypeAlias = Annotated[NDArray[np.uint64], _array(types.uint64, 2)]
UInt32: TypeAlias = Annotated[int, types.uint32]
UInt64: TypeAlias = Annotated[int, types.uint64]
Column: TypeAlias = NDArray[Any]
"""An array of any numbers, for parts and for Python's own functions; a kernel's parameter says which."""


def read_only(array: NDArray[T]) -> NDArray[T]:
    """The same array as one that can't be written to, so that a kernel is compiled for one type and not for both."""
    view = array.view()
    view.flags.writeable = False
    return view


# Inside a kernel every number has a machine type, and mixing signed with unsigned makes floats: the conversions that
# prevent it are written out. To the type checker they are plain numbers.
i64: Any = np.int64
u8: Any = np.uint8
u16: Any = np.uint16
u32: Any = np.uint32
u64: Any = np.uint64

# --- the decorators -------------------------------------------------------------------------------------------------


def kernel(function: F) -> F:
    """A kernel that Python calls, registered for `compile_kernels` under the types of its annotations.

    It lets other threads run meanwhile. Called before it was compiled, or with other types, it is compiled then.
    """
    dispatcher = _kept(njit(nogil=True)(function), function)
    register_kernel(dispatcher)
    return dispatcher


def kernel_part(function: F) -> F:
    """A kernel that only kernels call: it is compiled with each of them, for the types that it gets there."""
    return _kept(njit(nogil=True)(function), function)


def inlined_part(function: F) -> F:
    """A part that becomes part of its callers' machine code, whatever its size.

    The compiler does that with small functions by itself. Where the body of a loop is cut into larger ones, a call per
    part and item would be expensive: an array is passed as seven numbers. See `borrowed`, too.
    """
    return _kept(njit(nogil=True, forceinline=True)(function), function)


def _kept(dispatcher: Any, function: F) -> F:
    dispatcher._cache = KernelCache(function)
    return cast(F, dispatcher)


# --- intrinsics -----------------------------------------------------------------------------------------------------


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    byte_pointer = builder.bitcast(data, ir.IntType(8).as_pointer())
    return builder.gep(byte_pointer, [offset])


def _load_big_endian(bits: int) -> Any:
    def load(typing_context: Any, array: Any, offset: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = _address(context, builder, signature.args[0], args[0], args[1])
            value = builder.load(builder.bitcast(address, ir.IntType(bits).as_pointer()), align=1)
            return builder.bswap(value) if bits > 8 else value

        return types.Integer.from_bitwidth(bits, signed=False)(array, types.int64), codegen

    return intrinsic(load)


def _store_big_endian(bits: int) -> Any:
    unsigned = types.Integer.from_bitwidth(bits, signed=False)

    def store(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = _address(context, builder, signature.args[0], args[0], args[1])
            pointer = builder.bitcast(address, ir.IntType(bits).as_pointer())
            builder.store(builder.bswap(args[2]), pointer, align=1)
            return context.get_dummy_value()

        return types.void(array, types.int64, unsigned), codegen

    return intrinsic(store)


load_u8 = _load_big_endian(8)
"""A byte, without the check whether its index counts from the end, which `array[at]` makes."""
load_u16 = _load_big_endian(16)
load_u32 = _load_big_endian(32)
load_u64 = _load_big_endian(64)
store_u16 = _store_big_endian(16)
store_u32 = _store_big_endian(32)
store_u64 = _store_big_endian(64)


def _leading_zeros(typing_context: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_zero_undefined = ir.Constant(ir.IntType(1), 0)
        return builder.ctlz(args[0], is_zero_undefined)

    return types.int64(types.uint64), codegen


leading_zeros: Any = intrinsic(_leading_zeros)
"""How many bits of a word of 64 are zero before the first that is set; 64 where none is."""


def _multiply_high(typing_context: Any, one: Any, other: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(arg, wide) for arg in args))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


multiply_high: Any = intrinsic(_multiply_high)
"""The upper 64 bits of the product of two words of 64; the lower ones are what `*` leaves."""


def _copy_bytes(typing_context: Any, target: Any, target_at: Any, source: Any, source_at: Any, length: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature.args[0], args[0], args[1])
        origin = _address(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, origin, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


copy_bytes: Any = intrinsic(_copy_bytes)
"""memcpy between byte arrays: target and where, source and where, length. The ranges must not overlap."""


def _move_bytes(typing_context: Any, array: Any, to: Any, at: Any, length: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, origin = (_address(context, builder, signature.args[0], args[0], offset) for offset in args[1:3])
        cgutils.raw_memmove(builder, target, origin, args[3], 1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, types.int64), codegen


move_bytes: Any = intrinsic(_move_bytes)
"""memmove inside a byte array: to where, from where, length. The ranges may overlap."""


def _borrowed(typing_context: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        made.meminfo = cgutils.get_null_value(made.meminfo.type)
        return made._getvalue()

    return array(array), codegen


borrowed: Any = intrinsic(_borrowed)
"""The same array without its reference count, for a kernel to hand to its parts. These count references wherever the
compiler does not see that it is needless, and for one item that takes as long as the rest of the work. The caller of
the kernel holds the array meanwhile."""


def _array_at(item: Any, item_bytes: int) -> Any:
    array_type = types.Array(item, 1, "C")

    def array_at(typing_context: Any, address: Any, length: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = context.make_array(array_type)(context, builder)
            pointer = builder.inttoptr(args[0], context.get_data_type(item).as_pointer())
            stride = context.get_constant(types.intp, item_bytes)
            populate_array(made, data=pointer, shape=[args[1]], strides=[stride], itemsize=stride, meminfo=None)
            return made._getvalue()

        return array_type(types.int64, types.int64), codegen

    return intrinsic(array_at)


bytes_at = _array_at(types.uint8, 1)
"""The bytes at an address, so many of them, as an array. The caller of the kernel holds the memory meanwhile."""
int64s_at = _array_at(types.int64, 8)


def address_of(array: Column) -> int:
    """Where an array lies, for a table of addresses that a kernel reads. What keeps the address keeps the array."""
    address: int = array.__array_interface__["data"][0]
    return address


def _prefetch(typing_context: Any, array: Any, offset: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], args[0], args[1])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(instruction, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


prefetch: Any = intrinsic(_prefetch)
"""Have the processor fetch a line of memory that will be read soon. It may lie beyond the array's end."""

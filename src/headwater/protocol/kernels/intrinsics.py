"""What numba has no function for, as the machine instructions that they are: unaligned loads, byte swaps, memcpy.

`memory` names them and says what they do. They are imported when a kernel is compiled, and by no process that only
calls kernels: numba takes a quarter of a second to import.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


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


def _multiply_high(typing_context: Any, one: Any, other: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(arg, wide) for arg in args))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


multiply_high: Any = intrinsic(_multiply_high)


def _copy_bytes(typing_context: Any, target: Any, target_at: Any, source: Any, source_at: Any, length: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature.args[0], args[0], args[1])
        origin = _address(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, origin, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


copy_bytes: Any = intrinsic(_copy_bytes)


def _move_bytes(typing_context: Any, array: Any, to: Any, at: Any, length: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, origin = (_address(context, builder, signature.args[0], args[0], offset) for offset in args[1:3])
        cgutils.raw_memmove(builder, target, origin, args[3], 1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, types.int64), codegen


move_bytes: Any = intrinsic(_move_bytes)


def _borrowed(typing_context: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        made.meminfo = cgutils.get_null_value(made.meminfo.type)
        return made._getvalue()

    return array(array), codegen


borrowed: Any = intrinsic(_borrowed)


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
int64s_at = _array_at(types.int64, 8)


def _local_bytes(typing_context: Any, length: Any) -> Any:
    if not isinstance(length, types.IntegerLiteral):
        return None  # numba asks again, with the constant.
    array_type, size_bytes = types.Array(types.uint8, 1, "C"), length.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(array_type)(context, builder)
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), size_bytes))
        pointer = builder.bitcast(memory, ir.IntType(8).as_pointer())
        one, size = context.get_constant(types.intp, 1), context.get_constant(types.intp, size_bytes)
        populate_array(made, data=pointer, shape=[size], strides=[one], itemsize=one, meminfo=None)
        return made._getvalue()

    return array_type(length), codegen


local_bytes: Any = intrinsic(prefer_literal=True)(_local_bytes)


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

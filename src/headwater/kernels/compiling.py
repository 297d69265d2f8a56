"""Compile a kernel to an object file that does not need numba: numba's code, and an entry that CPython can call.

The entry is a METH_FASTCALL function. It reads the arguments from their Python objects, calls numba's code of the
kernel while other threads may run, and makes an object of the result. numba's own entries do the same, but call numba's
functions, and find out on every call for which types the kernel was compiled. Here each parameter has exactly one type,
which its annotation declares. So an entry compares an array with that type, and reads it where numpy keeps it: the
layout of PyArrayObject and PyArray_Descr is part of numpy's ABI (the struct in numpy's ndarraytypes.h, the same in 1.x
and 2.x), and the size of an object's head is `object.__basicsize__`.

A kernel returns nothing, a number, or a tuple of numbers. It creates no array: its caller passes in what it fills.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib import import_module
from textwrap import dedent
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.typing.templates import Signature
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from headwater.kernels.machine_code import ArrayType, Intrinsic, Kernel, KernelPart, symbol_of

# --- from functions to numba's ----------------------------------------------------------------------------------------


@cache
def _numba_function(function: Any, *, is_inlined: bool = False) -> Any:
    # Without its runtime (nrt), numba counts no references to arrays, which the caller holds, and can't create any.
    options = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return njit(**options, forceinline=is_inlined)(_for_numba(function))


@cache
def part_for_python(part: KernelPart) -> Any:
    return njit(_for_numba(part.function))


def _for_numba(function: Any) -> FunctionType:
    """A copy of the function that calls numba's forms of its parts."""
    names = (name for name in function.__code__.co_names if name in function.__globals__)
    known = {name: _numba_value(function.__globals__[name]) for name in names}
    return FunctionType(function.__code__, known | {"__name__": function.__module__}, function.__name__)


def _numba_value(value: Any) -> Any:
    if isinstance(value, Intrinsic):
        return _numba_value(getattr(import_module(value.module), value.name))
    if isinstance(value, KernelPart):
        return _numba_function(value.function, is_inlined=value.is_inlined)
    return _numba_function(value.function) if isinstance(value, Kernel) else value


def _numba_type(parameter: ArrayType | str) -> Any:
    if isinstance(parameter, ArrayType):
        return types.Array(_numba_type(parameter.item), parameter.dimensions, "C")
    return types.boolean if parameter == "bool" else getattr(types, parameter)


@global_compiler_lock  # type: ignore[untyped-decorator]
def compiled_object(kernel: Kernel) -> bytes:
    """The object file of a kernel, which defines its entry under the kernel's symbol."""
    parameters = kernel.parameters()
    dispatcher = _numba_function(kernel.function)
    argument_types = tuple(_numba_type(parameter) for parameter in parameters.values())
    dispatcher.compile(argument_types)
    compiled = dispatcher.overloads[argument_types]
    context = cpu_target.target_context
    module = context.create_module(kernel.name)
    _Entry(context, module, kernel, compiled).build(parameters)
    library = context.codegen().create_library(kernel.name)
    library.enable_object_caching()
    library.add_ir_module(module)
    library.add_linking_library(compiled.library)
    library.finalize()
    code: bytes = library._get_compiled_object()
    return code


_WRITING = ("copy_bytes", "move_bytes", "store_u16", "store_u32", "store_u64")


def _written_names(function: Any) -> frozenset[str]:
    """The arrays to whose items a kernel assigns, or that it passes to an intrinsic as the target."""
    nodes = list(ast.walk(ast.parse(dedent(inspect.getsource(function)))))
    assigned = [node.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    targets = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id in _WRITING]
    return frozenset(node.id for node in (*assigned, *targets) if isinstance(node, ast.Name))


# --- the entry --------------------------------------------------------------------------------------------------------

_BYTE, _HALF, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _BYTE.as_pointer()

_HEAD_BYTES = object.__basicsize__
_TYPE_AT = _HEAD_BYTES - 8
"""The last field of an object's head is its type."""
_DATA_AT, _DIMENSIONS_AT, _SHAPE_AT, _STRIDES_AT = (_HEAD_BYTES + at for at in (0, 8, 16, 24))
_DTYPE_AT, _FLAGS_AT = _HEAD_BYTES + 40, _HEAD_BYTES + 48
"""Offsets in PyArrayObject."""
_BYTE_ORDER_AT, _NUMBER_AT = _HEAD_BYTES + 10, _HEAD_BYTES + 12
"""Offsets in PyArray_Descr."""
_CONTIGUOUS, _ALIGNED, _WRITABLE = 0x1, 0x100, 0x400

_NDARRAY, _TYPE_ERROR, _RUNTIME_ERROR, _NONE = (tuple.__basicsize__ + 8 * place for place in range(4))
"""The offsets of the items of `machine_code.SELF`."""


class _Entry:
    """Builds `PyObject *entry(PyObject *self, PyObject *const *args, Py_ssize_t count)`."""

    def __init__(self, context: Any, module: Any, kernel: Kernel, compiled: Any) -> None:
        self._context = context
        self._compiled = compiled
        self._kernel = kernel
        self._written = _written_names(kernel.function)
        kind = ir.FunctionType(_POINTER, [_POINTER, _POINTER, _WORD])
        function = ir.Function(module, kind, name=symbol_of(kernel))
        self._self, self._args, self._count = function.args
        self._builder = ir.IRBuilder(function.append_basic_block())

    def build(self, parameters: dict[str, ArrayType | str]) -> None:
        builder, context = self._builder, self._context
        self._refuse_unless(self._is(self._count, len(parameters)), f"takes {len(parameters)} arguments")
        values = [
            self._argument(name, parameter, self._load(self._args, 8 * place, _POINTER))
            for place, (name, parameter) in enumerate(parameters.items())
        ]
        fault = self._call("PyErr_Occurred", _POINTER)
        with cgutils.if_unlikely(builder, cgutils.is_not_null(builder, fault)):
            builder.ret(_POINTER(None))
        thread = self._call("PyEval_SaveThread", _POINTER)
        signature: Signature = self._compiled.signature
        status, result = context.call_internal_no_propagate(builder, self._compiled.fndesc, signature, values)
        self._call("PyEval_RestoreThread", ir.VoidType(), thread)
        self._refuse_unless(builder.not_(status.is_error), "failed", _RUNTIME_ERROR)
        builder.ret(self._object(signature.return_type, result))

    def _argument(self, name: str, parameter: ArrayType | str, given: Any) -> Any:
        builder = self._builder
        if isinstance(parameter, ArrayType):
            return self._array(name, parameter, given)
        if parameter == "bool":
            return self._builder.trunc(self._call("PyObject_IsTrue", _HALF, given), ir.IntType(1))
        if parameter == "int64":
            return self._call("PyLong_AsLongLong", _WORD, given)
        number = self._call("PyLong_AsUnsignedLongLongMask", _WORD, given)
        return builder.trunc(number, self._context.get_value_type(_numba_type(parameter)))

    def _array(self, name: str, parameter: ArrayType, given: Any) -> Any:
        """numba's form of an array, after a check that it is of the declared type."""
        builder = self._builder
        wanted = f"takes a contiguous array of {parameter.item} as {name}, with {parameter.dimensions} dimensions"
        is_array = builder.icmp_unsigned("==", self._load(given, _TYPE_AT, _POINTER), self._of_self(_NDARRAY))
        self._refuse_unless(is_array, wanted)
        dtype = self._load(given, _DTYPE_AT, _POINTER)
        self._refuse_unless(self._is(self._load(dtype, _NUMBER_AT, _HALF), np.dtype(parameter.item).num), wanted)
        is_swapped = self._is(self._load(dtype, _BYTE_ORDER_AT, _BYTE), ord(np.dtype(">u2").byteorder))
        self._refuse_unless(builder.not_(is_swapped), f"{wanted}, in the machine's byte order")
        self._refuse_unless(self._is(self._load(given, _DIMENSIONS_AT, _HALF), parameter.dimensions), wanted)
        flags, needed = self._load(given, _FLAGS_AT, _HALF), _CONTIGUOUS | _ALIGNED
        self._refuse_unless(self._is(builder.and_(flags, _HALF(needed)), needed), wanted)
        if name in self._written:
            self._refuse_unless(self._is(builder.and_(flags, _HALF(_WRITABLE)), _WRITABLE), f"{wanted}, to write to")
        array_type = _numba_type(parameter)
        made = self._context.make_array(array_type)(self._context, builder)
        shape, strides = (self._load(given, at, _POINTER) for at in (_SHAPE_AT, _STRIDES_AT))
        populate_array(
            made,
            data=self._load(given, _DATA_AT, self._context.get_data_type(array_type.dtype).as_pointer()),
            shape=[self._load(shape, 8 * axis, _WORD) for axis in range(parameter.dimensions)],
            strides=[self._load(strides, 8 * axis, _WORD) for axis in range(parameter.dimensions)],
            itemsize=_WORD(np.dtype(parameter.item).itemsize),
            # The caller holds the array, so no reference is counted.
            meminfo=None,
        )
        return made._getvalue()

    def _object(self, result_type: Any, result: Any) -> Any:
        """A new reference to the result as a Python object."""
        builder = self._builder
        if result_type == types.none:
            nothing = self._of_self(_NONE)
            self._call("Py_IncRef", ir.VoidType(), nothing)
            return nothing
        if isinstance(result_type, types.Boolean):
            return self._call("PyBool_FromLong", _POINTER, builder.zext(result, _WORD))
        if isinstance(result_type, types.Integer):
            if result_type.signed:
                return self._call("PyLong_FromLongLong", _POINTER, builder.sext(result, _WORD))
            return self._call("PyLong_FromUnsignedLongLong", _POINTER, builder.zext(result, _WORD))
        if not isinstance(result_type, types.BaseTuple):
            raise TypeError(f"{self._kernel.name} is a kernel, and returns no number: {result_type}")
        made = self._call("PyTuple_New", _POINTER, _WORD(len(result_type)))
        for place, item_type in enumerate(result_type):
            item = self._object(item_type, builder.extract_value(result, place))
            self._call("PyTuple_SetItem", _HALF, made, _WORD(place), item)
        return made

    # Helpers that emit instructions.

    def _load(self, pointer: Any, at: int, kind: Any) -> Any:
        builder = self._builder
        return builder.load(builder.bitcast(builder.gep(pointer, [_WORD(at)]), kind.as_pointer()))

    def _of_self(self, at: int) -> Any:
        return self._load(self._self, at, _POINTER)

    def _is(self, value: Any, number: int) -> Any:
        return self._builder.icmp_unsigned("==", value, value.type(number))

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in args])
        return self._builder.call(cgutils.get_or_insert_function(self._builder.module, kind, name), args)

    def _refuse_unless(self, condition: Any, what: str, error_at: int = _TYPE_ERROR) -> None:
        builder = self._builder
        with cgutils.if_unlikely(builder, builder.not_(condition)):
            message = self._context.insert_const_string(builder.module, f"the kernel {self._kernel.name} {what}")
            self._call("PyErr_SetString", ir.VoidType(), self._of_self(error_at), message)
            builder.ret(_POINTER(None))


# --- intrinsics -------------------------------------------------------------------------------------------------------
#
# Functions that numba lacks, written as machine instructions: unaligned loads, byte swaps, memcpy. `memory` names them
# and says what they do.


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

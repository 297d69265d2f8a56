"""One step of CRC32C with the processor's instruction, if it has one; imported when `checksums` is compiled."""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwater.store.checksums import step_by_tables


def _instruction() -> tuple[str, int] | None:
    """Return LLVM's name of the instruction for eight bytes, and the width of its checksum; None if there is none."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return None  # Kernels are compiled for another processor than this one.
    features, machine = llvmlite.binding.get_host_cpu_features(), platform.machine().lower()
    if machine in ("x86_64", "amd64") and features.get("sse4.2"):
        return "llvm.x86.sse42.crc32.64.64", 64
    if machine in ("aarch64", "arm64") and features.get("crc"):
        return "llvm.aarch64.crc32cx", 32
    return None


_INSTRUCTION = _instruction()


def _by_instruction(typing_context: Any, array: Any, at: Any, crc: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        assert _INSTRUCTION is not None
        name, width = _INSTRUCTION
        word, wide = ir.IntType(64), ir.IntType(width)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        loaded = builder.load(builder.bitcast(address, word.as_pointer()), align=1)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(wide, [wide, word]), name)
        before = args[2] if width == 32 else builder.zext(args[2], word)
        after = builder.call(function, [before, loaded])
        return after if width == 32 else builder.trunc(after, ir.IntType(32))

    return types.uint32(array, types.int64, types.uint32), codegen


step: Any = intrinsic(_by_instruction) if _INSTRUCTION else step_by_tables

"""Compiled kernels are kept, and serve wherever the same sources lie."""

from __future__ import annotations

from importlib import import_module

import pytest
from numba import njit

from headwater.protocol.kernels import machine_code
from headwater.protocol.kernels.machine_code import KERNELS, compile_kernels, declared_signatures, kernel_modules
from headwater.protocol.kernels.memory import AnyBytes, Column, Int64s


def test_every_kernel_declares_exact_types() -> None:
    for name in kernel_modules():
        import_module(name)
    assert all(declared_signatures(kernel) for kernel in KERNELS)


def test_a_parameter_without_an_exact_type_is_refused() -> None:
    def loose(column: Column) -> int:
        return len(column)

    with pytest.raises(TypeError, match="loose is a kernel, and 'column' has no exact type"):
        declared_signatures(njit(loose))


def test_kernels_are_compiled_without_being_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(numbers: Int64s, data: AnyBytes, is_wanted: bool) -> None:
        raise AssertionError("it was called")

    kernel = njit(double)
    monkeypatch.setattr(machine_code, "KERNELS", [kernel])
    monkeypatch.setattr(machine_code, "kernel_modules", lambda: [__name__])
    compile_kernels("another.package")
    assert not kernel.signatures
    compile_kernels(__name__)
    assert len(kernel.signatures) == 2

"""Which kernels are compiled for which types."""

from __future__ import annotations

from headwater.protocol.kernels.machine_code import KERNELS


def compiled_signatures() -> dict[str, set[str]]:
    """By the names of all kernels that were imported."""
    return {
        f"{kernel.py_func.__module__}.{kernel.__name__}": {str(signature) for signature in kernel.overloads}
        for kernel in KERNELS
    }

"""A node has all its kernels when it is ready: writing, streaming, replicating, compacting and restarting add none."""

from __future__ import annotations

from headwater.node.bucket_lifecycle import KERNEL_PACKAGES
from headwater.protocol.kernels.machine_code import compile_kernels
from headwater.sim.plan import RunPlan
from headwater.sim.run import run_seed
from support.machine import loaded_kernels

SEED = 10354
"""A seed whose nodes crash, compact and roll back."""


def test_simulated_nodes_compile_nothing() -> None:
    # Its consumers are clients.
    compile_kernels(*KERNEL_PACKAGES, "headwater.protocol", "headwater.client")
    before = loaded_kernels()
    assert run_seed(SEED, plan=RunPlan.mixture(SEED)).complaints == ()
    assert loaded_kernels() == before

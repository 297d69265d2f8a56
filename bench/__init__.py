"""Benchmarks. `make bench` runs them all and writes `docs/internals/performance.md`.

Machines differ and are noisy, so what counts are ratios of two things measured in one run, in turns.
"""

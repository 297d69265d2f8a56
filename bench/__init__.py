"""Benchmarks. `make bench` runs them all and writes `docs/internals/performance.md`.

Machines differ and are noisy, so only ratios of two things count, measured in turns in one run.
"""

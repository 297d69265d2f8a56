"""Whole simulated clusters in one process: the production code with a simulated clock, network and disk.

All randomness comes from one seed, so a seed always replays the same run, byte by byte.
"""

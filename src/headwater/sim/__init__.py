"""Whole clusters in one process, simulated: the production code on a simulated clock, network and disk.

Everything random comes from one seed, so a seed replays what it once did, to the byte.
"""

"""Bytes <-> messages, and the decisions of the protocol.

Sans-IO: no socket, no clock, no random. The same logic runs under asyncio, in a blocking Spark worker and in the
simulation.
"""

"""The hosts that a read asks for the cluster map when no node of the map that it has can be reached.

They are those of the connection string. Where DNS lists them they may be others by then, so whoever runs the read looks
them up anew while it is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator

from headwater.client.connection_string import Address


class Seeds:
    """What is iterated over is what is known at that moment."""

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self._addresses = addresses

    def __iter__(self) -> Iterator[Address]:
        return iter(self._addresses)

    def replace(self, addresses: tuple[Address, ...]) -> None:
        self._addresses = addresses

"""Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse."""

from headwater._version import __version__

__all__ = ["__version__"]

"""Couchbase's change protocol (DCP) in Python, from the wire to the lakehouse.

    async with headwater.connect("couchbase://host/bucket", user="reader", password=…) as client:
        async for change in client.changes():
            …

`headwater.blocking.connect` is the same without asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwater._version import __version__

if TYPE_CHECKING:
    from headwater import blocking
    from headwater.client.asyncio_client import Client, connect
    from headwater.client.offsets import Offsets
    from headwater.client.settings import TlsSettings

_HOMES = {
    "Client": "headwater.client.asyncio_client",
    "connect": "headwater.client.asyncio_client",
    "Offsets": "headwater.client.offsets",
    "TlsSettings": "headwater.client.settings",
}
"""Loaded when they are first asked for: the command line and the node can do without the client's libraries."""

__all__ = ["Client", "Offsets", "TlsSettings", "__version__", "blocking", "connect"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "blocking":
        return import_module("headwater.blocking")
    raise AttributeError(f"module 'headwater' has no attribute {name!r}")

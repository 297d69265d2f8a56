"""The client without asyncio: `with headwater.blocking.connect("couchbase://host/bucket", …) as client`."""

from headwater.client.blocking_client import Client, connect
from headwater.client.blocking_reading import Batches, Changes

__all__ = ["Batches", "Changes", "Client", "connect"]

"""The client without asyncio: `with headwater.blocking.connect("couchbase://host/bucket", …) as client`."""

from headwater.client.blocking_client import Batches, Changes, Client, connect

__all__ = ["Batches", "Changes", "Client", "connect"]

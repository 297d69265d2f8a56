"""The blocking twin of `asyncio_client`: the same names, and an event loop in a thread behind them."""

from __future__ import annotations

from typing import Any, Self

from headwater.client import asyncio_client
from headwater.client.blocking_reading import Batches, Changes
from headwater.client.checkpoints.store import CheckpointStore
from headwater.client.client_settings import ClientSettings
from headwater.client.cluster_map import ClusterMap
from headwater.client.groups.membership import Membership
from headwater.client.loop_thread import LoopThread
from headwater.client.read_options import ReadOptions
from headwater.client.tls_settings import TlsSettings


def connect(
    url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    tls: TlsSettings | None = None,
    **settings: Any,
) -> Client:
    """A client of the bucket that the connection string names. Use it in `with`."""
    return Client(ClientSettings.make(url, user=user, password=password, tls=tls, **settings))


def connect_with(settings: ClientSettings) -> Client:
    """As `connect`, with settings that were made elsewhere, perhaps in another process."""
    return Client(settings)


class Client:
    """Reads one bucket."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._client = asyncio_client.Client(settings)
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread("headwater")
        try:
            self._thread.run(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all reads. What their callers have finished with is saved."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._client.close())
            finally:
                thread.close()

    @property
    def cluster_map(self) -> ClusterMap:
        """As it was when the client connected."""
        return self._client.cluster_map

    @property
    def bucket_uuid(self) -> str:
        return self._client.bucket_uuid

    def batches(
        self, *, checkpoint: CheckpointStore | None = None, group: Membership | None = None, **options: Any
    ) -> Batches:
        """Changes as Arrow record batches. See the asyncio client for the arguments."""
        return self.read(ReadOptions.make(**options), checkpoint=checkpoint, group=group)

    def changes(
        self, *, checkpoint: CheckpointStore | None = None, group: Membership | None = None, **options: Any
    ) -> Changes:
        """Changes as objects, one by one. The arguments are those of `batches`."""
        return Changes(self.batches(checkpoint=checkpoint, group=group, **options))

    def read(
        self, options: ReadOptions, *, checkpoint: CheckpointStore | None = None, group: Membership | None = None
    ) -> Batches:
        """As `batches`, with options that were made before."""
        batches = self._client.read(options, checkpoint=checkpoint, group=group)
        assert self._thread is not None, "an unconnected client has refused already"
        return Batches(batches, self._thread)

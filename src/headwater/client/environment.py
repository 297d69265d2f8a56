"""What a client takes from the machine it runs on, but for the event loop: the defaults are a real machine.

The clock is the event loop's own. So a client runs in a simulation by being started on a simulated loop and given an
environment that draws all that is random from one seed. Spark's tasks give it a look at the bucket that the planner has
taken, and so make no connection of their own for it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO

from headwater.client.bootstrap import BucketView, look_at_bucket
from headwater.client.pieces import OpenSpool
from headwater.client.settings import ClientSettings


def _open_spool() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="headwater-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnvironment:
    random: Callable[[], float] = random.random
    random_bytes: Callable[[int], bytes] = os.urandom
    open_spool: OpenSpool = _open_spool
    look: Callable[[ClientSettings], Awaitable[BucketView]] | None = None
    """What takes the place of a look at the bucket over a connection of its own."""

    async def look_at(self, settings: ClientSettings) -> BucketView:
        """One look at the bucket."""
        if self.look is not None:
            return await self.look(settings)
        return await look_at_bucket(settings, random_bytes=self.random_bytes)

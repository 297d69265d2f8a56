"""What a client takes from the machine it runs on, but for the event loop: the defaults are a real machine.

The clock is the event loop's own. So a client runs in a simulation by being started on a simulated loop and given
surroundings that draw all that is random from one seed.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from headwater.client.bucket_view import BucketView, look_at_bucket
from headwater.client.client_settings import ClientSettings
from headwater.client.daemon_thread import in_daemon_thread
from headwater.client.spool import OpenSpool


async def _look(settings: ClientSettings) -> BucketView:
    return await in_daemon_thread(partial(look_at_bucket, settings))


def _open_spool() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="headwater-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSurroundings:
    look: Callable[[ClientSettings], Awaitable[BucketView]] = _look
    """One look at the bucket, over a connection of its own."""
    random: Callable[[], float] = random.random
    random_bytes: Callable[[int], bytes] = os.urandom
    open_spool: OpenSpool = _open_spool

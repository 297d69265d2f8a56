"""Key-value connections of the event loop, where they are not as the blocking ones."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.protocol.messages.session import HelloResponse
from headwater.protocol.sasl import Credentials
from support.fake_servers import PASSWORD, USER, serving, silent


class Seen(AsyncKvConnection):
    """Can be had before it is open."""

    made: ClassVar[list[Seen]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)


def test_an_answer_to_one_that_is_just_being_cancelled() -> None:
    """Between a cancellation and what it does there is a turn of the loop, in which data may come."""

    async def story() -> None:
        with serving(silent) as address:
            opening = asyncio.create_task(
                Seen.open(address, Login(credentials=Credentials(USER, PASSWORD), bucket=None))
            )
            while not Seen.made or not Seen.made[0].is_usable:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            opening.cancel()
            Seen.made[0].data_received(HelloResponse().encode())
            with pytest.raises(asyncio.CancelledError):
                await opening

    asyncio.run(story())

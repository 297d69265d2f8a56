"""A document in memory that members share, and access to it that can fail."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headwater.client.groups import GroupBucket, Membership, StoredDocument
from headwater.client.groups.group_document import GroupDocument
from headwater.errors import HeadwaterError
from headwater.protocol.numbers import Cas

ANSWER_S = 0.01


@dataclass
class MemoryDocument:
    """The document in the bucket."""

    vbuckets: int = 6
    value: bytes | None = None
    cas: int = 0
    ports: list[MemoryPort] = field(default_factory=list)
    asked_for: list[tuple[bytes, str | None]] = field(default_factory=list)

    def bucket(self) -> GroupBucket:
        return GroupBucket(vbuckets=self.vbuckets, open_document=self._open)

    def _open(self, key: bytes, collection: str | None) -> MemoryPort:
        self.asked_for.append((key, collection))
        self.ports.append(MemoryPort(self))
        return self.ports[-1]

    def decoded(self) -> GroupDocument:
        assert self.value is not None
        return GroupDocument.decode(self.value)

    def members(self) -> list[str]:
        return [seat.member_id for seat in self.decoded().seats]


class MemoryPort:
    """A `DocumentPort` of one member."""

    def __init__(self, document: MemoryDocument) -> None:
        self._document = document
        self.failure: HeadwaterError | None = None
        """The error that every call raises from now on."""
        self.is_silent = False
        """Whether calls wait forever from now on."""
        self.is_closed = False
        self.calls = 0
        self.races = 0
        """How many of the next writes fail because another writer is faster."""

    async def read(self) -> StoredDocument | None:
        await self._travel()
        value = self._document.value
        return None if value is None else StoredDocument(value, Cas(self._document.cas))

    async def add(self, value: bytes) -> Cas | None:
        return await self._write(value, is_allowed=lambda: self._document.value is None)

    async def replace(self, value: bytes, cas: Cas) -> Cas | None:
        return await self._write(value, is_allowed=lambda: self._document.cas == cas)

    async def _write(self, value: bytes, *, is_allowed: object) -> Cas | None:
        await self._travel()
        assert callable(is_allowed)
        if self.races:
            self.races -= 1
            return None
        if not is_allowed():
            return None
        self._document.value = value
        self._document.cas += 1
        return Cas(self._document.cas)

    async def _travel(self) -> None:
        assert not self.is_closed
        self.calls += 1
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(ANSWER_S)
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        self.is_closed = True


# An event loop whose clock jumps to the next event, so that nothing in a test waits.


T = TypeVar("T")
M = TypeVar("M", bound=Membership)

START_S = 5000.0


class _JumpingSelector(selectors.DefaultSelector):
    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def virtual_clock_s() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


def run(call: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(call)


@asynccontextmanager
async def joined(membership: M, bucket: GroupBucket) -> AsyncIterator[M]:
    """Start a membership, and stop it at the end."""
    await membership.start(bucket)
    try:
        yield membership
    finally:
        await membership.stop()

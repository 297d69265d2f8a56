"""What a reader asks of a place to keep its offsets in."""

from __future__ import annotations

from typing import Protocol

from headwater.client.offsets import Offsets


class CheckpointStore(Protocol):
    """A place to keep offsets in. To write one's own, have these three methods; there is nothing to inherit from.

    * Keep what `Offsets.to_json` gives, and get it back with `Offsets.from_json`: the same offsets are the same bytes.
    * A save is all or nothing. When it returns, the offsets are where they survive a power cut. When it raises, or the
      process is killed in it, what was saved before is still there.
    * Seqnos may go back: after a rollback a vbucket continues below where it was. Never keep the higher one.
    * What is there and can't be read is an error, `CheckpointFailed`. None means that nothing was ever saved, and then
      everything is read from the beginning.
    * If two readers use the same place, one of them gets `CheckpointInUse`, best of all when it loads.
    * Don't hold up the event loop: leave what blocks to `asyncio.to_thread`.

    Calls come one after the other. Data and offsets that are saved by one transaction are what makes delivery exactly
    once; `SqliteCheckpoint.save_in` is an example of it.
    """

    async def load(self) -> Offsets | None:
        """What was saved last, or None where nothing was."""

    async def save(self, offsets: Offsets) -> None:
        """Keep these offsets for good. They are of all vbuckets that the reader has read."""

    async def close(self) -> None:
        """Let go of files and connections. What was saved stays."""

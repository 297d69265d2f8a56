"""Offsets for the tests of checkpoints, and a way to call coroutines from a plain test."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine
from typing import Any, TypeVar

from headwater.client.offsets import Offsets
from headwater.client.settings import ClientSettings
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.node_process import PASSWORD, USER, NodeProcess

UUID = "5ab1d6bd2ee8f9b4d9d6cf4a3f3f6f5e"

VBUCKETS = 16
"""The number of vbuckets of the node that tests share."""

T = TypeVar("T")


_RUNNER = asyncio.Runner()
atexit.register(_RUNNER.close)


def run(call: Coroutine[Any, Any, T]) -> T:
    """Run all calls in one loop, since connections are kept between calls."""
    return _RUNNER.run(call)


def settings_for(node: NodeProcess, **more: Any) -> ClientSettings:
    return ClientSettings.make(f"{node.url}/default", user=USER, password=PASSWORD, **more)


def offset_at(seqno: int, *, vbuuid: int = 2**63 + 1) -> StreamOffset:
    return StreamOffset(
        vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(max(seqno - 1, 0)), snapshot_end=Seqno(seqno)
    )


def offsets_at(seqno: int, *, vbuckets: int = 4, bucket_uuid: str = UUID) -> Offsets:
    """Return offsets with the same seqno in all vbuckets, so that a mixture of two saves is easy to detect."""
    return Offsets(bucket_uuid, {VBucketId(vbucket): offset_at(seqno) for vbucket in range(vbuckets)})

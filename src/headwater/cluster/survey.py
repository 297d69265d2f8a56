"""What the nodes of a cluster have: every copy of every vbucket, asked of all nodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwater.cluster.kv_port import NodeCopy, NodePort
from headwater.cluster.planning import Copy
from headwater.errors import HeadwaterError
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import VBucketId


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The copies by node, and the nodes that could not be asked."""

    copies: Mapping[str, Mapping[VBucketId, NodeCopy]]
    unreachable: Mapping[str, HeadwaterError]

    def state(self, node: str, vbucket: VBucketId) -> VBucketState | None:
        copy = self.copies.get(node, {}).get(vbucket)
        return None if copy is None else copy.state

    def copy(self, node: str, vbucket: VBucketId) -> Copy | None:
        copy = self.copies.get(node, {}).get(vbucket)
        return None if copy is None else copy.copy

    def copies_of(self, vbucket: VBucketId, nodes: Iterable[str]) -> dict[str, Copy]:
        found = {node: self.copy(node, vbucket) for node in nodes}
        return {node: copy for node, copy in found.items() if copy is not None}


async def survey(ports: Mapping[str, NodePort]) -> Survey:
    """Ask these nodes."""
    results = await asyncio.gather(*(port.copies() for port in ports.values()), return_exceptions=True)
    copies: dict[str, Mapping[VBucketId, NodeCopy]] = {}
    unreachable: dict[str, HeadwaterError] = {}
    for name, result in zip(ports, results, strict=True):
        if isinstance(result, HeadwaterError):
            unreachable[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            copies[name] = result
    return Survey(copies=copies, unreachable=unreachable)

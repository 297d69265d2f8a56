"""The replication topology of a vbucket: chains of nodes, and when a majority of each holds a change.

A chain names the nodes that have a copy, the active one first; a place whose node is missing is None and still counts,
so that a majority of what is left can never be a majority of nothing. During a rebalance there are two chains, the old
one and the new, and a durable write needs a majority of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Chain = tuple[str | None, ...]
Chains = tuple[Chain, ...]


def chains_of(topology: Sequence[Any] | None) -> Chains:
    """The chains of a stored topology that have more than the active node: those that others have a say in."""
    return tuple(tuple(chain) for chain in topology or () if len(chain) > 1)


def majority(chain: Chain) -> int:
    """How many copies are more than half of them."""
    return len(chain) // 2 + 1


def is_possible(chains: Chains) -> bool:
    """Whether there are enough nodes for a majority of each chain."""
    return all(sum(node is not None for node in chain) >= majority(chain) for chain in chains)


def satisfied_seqno(chains: Chains, acknowledged: Mapping[str, int], *, active_seqno: int) -> int:
    """Up to where a majority of each chain holds everything.

    The active node comes first in each chain. It holds what is durable there, others what they have acknowledged, which
    they have got from it; whatever else they say is not believed.
    """
    return min((_held_seqno(chain, acknowledged, active_seqno) for chain in chains), default=active_seqno)


def _held_seqno(chain: Chain, acknowledged: Mapping[str, int], active_seqno: int) -> int:
    replicas = (0 if node is None else min(acknowledged.get(node, 0), active_seqno) for node in chain[1:])
    return sorted([active_seqno, *replicas], reverse=True)[majority(chain) - 1]

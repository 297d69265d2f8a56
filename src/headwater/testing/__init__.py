"""A pytest plug-in: real nodes and clusters, for tests of anything that connects to them.

Its fixtures are `headwater_node` (a `HeadwaterNode`) and `headwater_cluster` (a `HeadwaterCluster`). Without them only
`plugin` is imported: the names in `__all__` are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.lazy_names import lazy_names

if TYPE_CHECKING:
    from headwater.testing.cluster import HeadwaterCluster
    from headwater.testing.node import HeadwaterNode
    from headwater.testing.nursery import NodeFailed

_HOMES = {
    "headwater.testing.cluster": ("HeadwaterCluster",),
    "headwater.testing.node": ("HeadwaterNode",),
    "headwater.testing.nursery": ("NodeFailed",),
}
"""For each module, the names that are loaded from it on first use."""

__all__ = [
    "HeadwaterCluster",
    "HeadwaterNode",
    "NodeFailed",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)

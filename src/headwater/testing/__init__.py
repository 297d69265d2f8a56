"""A pytest plug-in: real nodes and clusters for the tests of anything that speaks to them.

Its fixtures are `headwater_node` (a `HeadwaterNode`) and `headwater_cluster` (a `HeadwaterCluster`). Where neither is
used, nothing but `plugin` is imported: what `__all__` names is loaded when it is first used.
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
"""By module, what is loaded from it when it is first used."""

__all__ = [
    "HeadwaterCluster",
    "HeadwaterNode",
    "NodeFailed",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)

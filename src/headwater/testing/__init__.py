"""A pytest plug-in: real nodes and clusters for the tests of anything that speaks to them.

Its fixtures are `headwater_node` (a `HeadwaterNode`) and `headwater_cluster` (a `HeadwaterCluster`). Where neither is
used, nothing but `plugin` is imported: what `__all__` names is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

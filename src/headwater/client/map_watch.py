"""The cluster map as a reader follows it, sans-IO: which node has a vbucket, and when to look for a newer map.

A newer map comes by itself, with every poll, or because it is wanted: a node refused a vbucket, or is gone. Then it is
asked for on every connection there is, and by a scout where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.link_pool import LinkPool
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.numbers import VBucketId

MAP_INTERVAL_S = 0.25
"""How often the cluster map is asked for, at most, while it does not tell what we need to know."""


class MapWatch:
    def __init__(self, cluster_map: ClusterMap, *, seeds: Iterable[Address], now_s: float) -> None:
        self.map = cluster_map
        self._seeds = seeds
        self._is_wanted = False
        self._due_s = now_s

    def want(self) -> None:
        """The map that is known can't be the newest."""
        self._is_wanted = True

    def is_of_this_bucket(self, new: ClusterMap) -> bool:
        """A bucket that was deleted and made anew is another one."""
        return new.uuid == self.map.uuid and new.vbuckets == self.map.vbuckets

    def replace(self, new: ClusterMap) -> ClusterMap | None:
        """A map has come. Returns the one that it takes the place of, or None where it is no news."""
        self._is_wanted = False
        if new.version <= self.map.version:
            return None
        old, self.map = self.map, new
        return old

    def look(self, pool: LinkPool, now_s: float) -> None:
        """Ask for a newer map, if one is wanted and it is time."""
        if not self._is_wanted:
            return
        ready = pool.ready
        if ready and now_s >= self._due_s:
            self._is_wanted = False
            self._due_s = now_s + MAP_INTERVAL_S
            for slot in ready:
                assert slot.link is not None
                slot.link.request(GetClusterConfig())
        elif not ready:
            pool.scout((*self._seeds, *self.map.nodes), now_s=now_s)


def active_address(cluster_map: ClusterMap, vbucket: VBucketId) -> Address | None:
    """The node that has a vbucket, or None where nobody has it."""
    node = cluster_map.active_node(vbucket)
    return None if node < 0 else cluster_map.nodes[node]

"""When a read fails: at once for what can't get better by waiting, and for the rest when it has waited too long."""

from __future__ import annotations

from headwater.client.backoff import Tolerance, is_final
from headwater.client.cluster_map import ClusterMap
from headwater.client.link_pool import LinkPool, Slot
from headwater.client.map_watch import active_address
from headwater.client.persistence_gate import PersistenceGate
from headwater.client.vbucket_waits import VBucketWaits
from headwater.errors import ConnectionFailed, HeadwaterError, RemoteProtocolError

REFUSALS_MAX = 3
"""How often in a row a node may refuse to have us before we believe it."""


class GivingUp:
    """The patience of one read."""

    def __init__(self, after_s: float | None, *, pool: LinkPool, waits: VBucketWaits) -> None:
        """None is for ever patient."""
        self._after_s = after_s
        self._pool = pool
        self._waits = waits
        self._tolerance = Tolerance(within_s=after_s)

    def is_hopeless(self, slot: Slot, error: HeadwaterError, cluster_map: ClusterMap, now_s: float) -> bool:
        """A link was lost: whether it makes no sense to try again."""
        if slot.is_ready:
            breaks_protocol = isinstance(error, RemoteProtocolError)
            return is_final(error) or (breaks_protocol and self._tolerance.ends_with(slot.address, now_s))
        # A node that has just left the cluster may refuse us, and the others know better: their map comes soon.
        is_insisting = self._pool.failures_in_a_row(slot.address) >= REFUSALS_MAX
        return is_final(error) and is_insisting and slot.address in cluster_map.nodes

    def overdue(self, cluster_map: ClusterMap, gate: PersistenceGate | None, now_s: float) -> HeadwaterError | None:
        """What the read fails with, where something has been waited for too long."""
        if self._after_s is None:
            return None
        if gate is not None and (stalled := gate.stalled(now_s, after_s=self._after_s)) is not None:
            return ConnectionFailed(
                f"vbucket {stalled} has not been persisted by all copies for {self._after_s:g} seconds: "
                f"{gate.why_held(stalled)}",
                hint="Look at the nodes that are named; where replicas are missing, set missing_replicas_hold to False",
            )
        overdue = self._waits.overdue(now_s, after_s=self._after_s)
        if overdue is None:
            return None
        vbucket, last = overdue
        address = active_address(cluster_map, vbucket)
        # A node that can't be connected to is the newest of what stands in the way: a connection ends its failures.
        last = (None if address is None else self._pool.last_failure(address)) or last
        silence = "no node has it" if address is None else f"{address} has not answered"
        why = silence if last is None else last.reason
        plain = ConnectionFailed(
            f"vbucket {vbucket} has been out of reach for {self._after_s:g} seconds: {why}",
            hint="Look whether its node is up, or raise give_up_after_s",
        )
        # The kind of what stands in the way, and what to do about that, are worth more than ours.
        return plain if last is None else last.retold(plain.reason)

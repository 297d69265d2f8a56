"""Judge in one sentence how well a bucket is on this node and in its cluster, and say what to do about problems.

`health_of` runs the checks in the table below. The live feed sends its verdict to the page, which shows it at the top,
and `/headwater/buckets/BUCKET/health` returns it, for monitoring and `headwater health`. A check reads the last sample;
it asks no node and waits for nothing. To add a check, write a generator of findings and add it to `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.findings import Finding, Level, Verdict
from headwater.node.history import LOSING, Kind
from headwater.node.http.dashboard.samples import Landings
from headwater.phrases import counted
from headwater.protocol.cluster_config import CopyCounts, PublishedConfig
from headwater.protocol.messages.dcp_streams import VBucketState

if TYPE_CHECKING:
    from headwater.node.http.dashboard.samples import BucketSampler
    from headwater.node.node_state import NodeState

STUCK_S = 30.0
"""A connection that has changes to send and has sent none for this long is stuck."""
LOSS_SHOWN_MS = 3_600_000
"""How long a loss stays in the verdict; the history keeps it for longer."""
LANDING_LAG_S = 300.0
DISK_LOW_SHARE, DISK_FULL_SHARE = 0.10, 0.02
"""Free space, as a share of the whole disk: below the first warn; below the second, the next large commit may fail."""
_NAMES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketVerdict(Verdict):
    """A node's verdict on a bucket, and where the copies are."""

    unreachable: tuple[str, ...]
    """The nodes that can't be reached from this one."""
    copies: CopyCounts | None
    """Counts for all vbuckets of the cluster; None if the bucket is not in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What the checks read."""

    sampler: BucketSampler
    config: PublishedConfig | None
    """None if the bucket is not in a cluster."""
    this_node: int | None
    is_waiting: bool
    landings: Sequence[dict[str, Any]]
    free_bytes: int
    disk_bytes: int
    url: str
    """For suggested commands."""
    supervised_in: Path | None = None
    """The data folder of all nodes, if one process runs them on this machine."""
    unreachable: tuple[str, ...] = ()
    copies: CopyCounts | None = None

    @classmethod
    def of(cls, node: NodeState, sampler: BucketSampler, landings: Landings) -> Examined:
        service, disk = node.bucket_service(sampler.name), disk_usage(node.options.data)
        unreachable = tuple(peer.name for peer in sampler.cluster.unreachable())
        return cls(
            sampler=sampler,
            unreachable=unreachable,
            supervised_in=node.options.supervised_in,
            copies=sampler.copies(),
            config=service.config,
            this_node=service.this_node,
            is_waiting=service.is_waiting,
            landings=landings.of(sampler.name),
            free_bytes=disk.free,
            disk_bytes=disk.total,
            url=f"couchbase://{node.address.kv_address}/{sampler.name}",
        )


def health_of(examined: Examined) -> BucketVerdict:
    """The verdict of all checks, with the findings worst first."""
    return BucketVerdict.of(
        (one for check in CHECKS for one in check(examined)),
        well=_all_is_well(examined),
        unreachable=examined.unreachable,
        copies=examined.copies,
    )


def _all_is_well(examined: Examined) -> str:
    if examined.config is None or len(examined.config.nodes) == 1:
        return "Healthy: the node serves all its vbuckets"
    nodes = counted(len(examined.config.nodes), "node")
    silent = sum(not peer.is_heard for peer in examined.sampler.cluster.peers.values())
    if silent:
        return f"Nothing wrong is known: {silent:,} of {nodes} have not answered yet"
    replicas = examined.config.replicas
    return f"Healthy: {nodes} answer" + (f", every vbucket has its {counted(replicas, 'replica')}" if replicas else "")


# --- the checks ---------------------------------------------------------------------------------------------------


def _left_out(examined: Examined) -> Iterator[Finding]:
    if examined.is_waiting:
        yield Finding(
            check="waiting",
            level=Level.BAD,
            text="This node serves nothing yet: it was away, and is asking the other nodes whether it was failed over",
            do="Start the other nodes, or check the log of this one",
        )
    elif examined.config is not None and examined.this_node is None:
        yield Finding(
            check="left-out",
            level=Level.BAD,
            text="This node is no longer in the cluster, and serves nothing",
            do=f"Add it again with `headwater cluster add`, a node of the cluster and {_address(examined)}",
        )


def _address(examined: Examined) -> str:
    return examined.url.removeprefix("couchbase://").partition("/")[0]


def _damage(examined: Examined) -> Iterator[Finding]:
    damaged = len(examined.sampler.bucket.vbuckets.damage)
    if damaged:
        yield Finding(
            check="damage",
            level=Level.BAD,
            text=f"{counted(damaged, 'vbucket')} stopped: stored data is damaged",
            do="Run `headwater check` on the data folder, and restore it or fail this node over",
        )


def _unserved(examined: Examined) -> Iterator[Finding]:
    copies = examined.copies
    if copies is not None and copies.active_unreachable:
        yield Finding(
            check="unserved",
            level=Level.BAD,
            text=f"No node that can be reached has the active copy of {copies.active_unreachable:,} of "
            f"{counted(copies.vbuckets, 'vbucket')}: their documents can't be read or written",
            do=_without_lost(examined),
        )


def _nodes(examined: Examined) -> Iterator[Finding]:
    gone = examined.unreachable
    if gone:
        names = ", ".join(gone[:_NAMES_MAX]) + (f" and {len(gone) - _NAMES_MAX} more" if len(gone) > _NAMES_MAX else "")
        yield Finding(
            check="nodes",
            level=Level.BAD,
            text=f"{counted(len(gone), 'node')} of {_cluster_size(examined)} can't be reached: {names}",
            do=_without_lost(examined),
        )


def _without_lost(examined: Examined) -> str:
    lost = examined.unreachable
    it = "it" if len(lost) == 1 else "them"
    start = f"Start {it} again"
    if examined.supervised_in is not None:
        # All nodes are on this machine, so there is no network between them.
        start += f": `headwater cluster restart-node {quote(str(examined.supervised_in))} {' '.join(lost)}`"
    elif 2 * len(lost) >= max(3, _cluster_size(examined)):
        # This node itself may be cut off while the others serve: a failover would be wrong then.
        return f"{start}, or check the network between this node and {it}"
    return f"{start}, or continue without {it}: `headwater cluster failover {examined.url} {' '.join(lost)}`"


def _cluster_size(examined: Examined) -> int:
    return 1 if examined.config is None else len(examined.config.nodes)


def _copies(examined: Examined) -> Iterator[Finding]:
    config, copies = examined.config, examined.copies
    if config is None or copies is None:
        return
    rebalance = f"`headwater cluster rebalance {examined.url}`"
    if copies.active_missing:
        yield Finding(
            check="orphans",
            level=Level.BAD,
            text=f"No node has {counted(copies.active_missing, 'vbucket')}: their documents can't be read or written",
            do=f"Start the node that has them, or create them again, empty, with {rebalance}",
        )
    if copies.replicas_unknown:
        wanted = counted(copies.replicas_wanted, "replica")
        yield Finding(
            check="unknown-replicas",
            level=Level.WARN,
            text=f"Nodes that can't be reached have {copies.replicas_unknown:,} of {wanted}: what is in them is "
            "unknown",
            do=_without_lost(examined),
        )
    if copies.replicas_missing:
        first = "Add a node with `headwater cluster add`, then make" if len(config.nodes) <= config.replicas else "Make"
        yield Finding(
            check="replicas",
            level=Level.WARN,
            text=f"{counted(copies.replicas_missing, 'replica')} missing: losing a node loses documents",
            do=f"{first} them with {rebalance}",
        )
    elif not config.settled:
        yield Finding(
            check="settled",
            level=Level.WARN,
            text="Vbuckets are moving to other nodes",
            do=f"Wait for the rebalance; if none runs, finish it with {rebalance}",
        )


def _held(examined: Examined) -> Iterator[Finding]:
    here, sampler = _address(examined), examined.sampler
    held = [here] if sampler.holds_replicas else []
    held += [peer.name for peer in sampler.cluster.peers.values() if peer.numbers is not None and peer.numbers.is_held]
    if held:
        yield Finding(
            check="held",
            level=Level.WARN,
            text=f"A drill holds the copies back on {', '.join(held[:_NAMES_MAX])}: a failover would lose changes now",
            do=f"End it with `headwater drill release-replicas couchbase://{held[0]}/{sampler.name}`",
        )


def _unfed(examined: Examined) -> Iterator[Finding]:
    """Copies on this node that no connection feeds."""
    sampler = examined.sampler
    fed = {vbucket for consumer in sampler.consumers for vbucket in consumer.vbuckets}
    copies = np.flatnonzero(sampler.bucket.vbuckets.states == VBucketState.REPLICA).tolist()
    lags = sampler.lags()
    behind = [vbucket for vbucket in copies if vbucket not in fed and lags[vbucket] > 0]
    if behind:
        yield Finding(
            check="unfed",
            level=Level.WARN,
            text=f"{counted(len(behind), 'copy', plural='copies')} on this node get no changes, and are behind",
            do="Check the log of this node to see why it can't stream from the others",
            page="streams",
        )


def _disk(examined: Examined) -> Iterator[Finding]:
    free, total = examined.free_bytes, examined.disk_bytes
    if total and free < total * DISK_LOW_SHARE:
        is_full = free < total * DISK_FULL_SHARE
        yield Finding(
            check="disk",
            level=Level.BAD if is_full else Level.WARN,
            text=f"The disk of this node is nearly full: {free / 1e9:,.1f} GB of {total / 1e9:,.0f} GB are free",
            do="Free space, or move the data folder to a larger disk: writes fail once it is full",
        )


def _landings(examined: Examined) -> Iterator[Finding]:
    for landing in examined.landings:
        url, numbers = landing["url"], landing.get("numbers") or {}
        if landing.get("is_ended") and numbers:
            text, level = f"The landing at {url} was stopped or has failed: nothing listens there", Level.BAD
            do = "Start `headwater land` again: it resumes where it stopped. If you did not stop it, its log says why"
        elif "error" in landing:
            # The bucket of a landing is known only once the landing has answered.
            since = "can't be reached" if numbers else "has not answered yet"
            text, level = f"The landing at {url} {since}: {landing['error']}", Level.BAD
            do = "Start `headwater land` if it does not run, or check the network between it and this node"
        elif numbers.get("active") == 0:
            text, level, do = f"The landing at {url} has stopped", Level.BAD, "Check its log, and start it again"
        elif numbers.get("failures", 0) > 0:
            failed = counted(int(numbers["failures"]), "batch", plural="batches")
            text, level, do = f"The landing at {url} failed {failed} in a row", Level.WARN, "Check its log"
        elif numbers.get("lag_seconds", 0.0) > LANDING_LAG_S:
            text, level = f"The landing at {url} is {numbers['lag_seconds']:,.0f} s behind", Level.WARN
            do = "Give it more cores, or larger batches"
        else:
            continue
        yield Finding(check="landing", level=level, text=text, do=do, page="landing")


def _stuck(examined: Examined) -> Iterator[Finding]:
    stuck = examined.sampler.stuck_connections(STUCK_S)
    if stuck:
        more = f", and {len(stuck) - 1} more" if len(stuck) > 1 else ""
        yield Finding(
            check="stuck",
            level=Level.WARN,
            text=f"{stuck[0].name} takes no changes, with {stuck[0].backlog_items:,} waiting for it{more}",
            do="Check that consumer: it does not read, or does not acknowledge what it receives",
            page="streams",
        )


def _losses(examined: Examined) -> Iterator[Finding]:
    """The newest loss of the last hour, so that it does not go unseen."""
    since_ms = examined.sampler.now_ms() - LOSS_SHOWN_MS
    for event in reversed(examined.sampler.events.events):
        if event.time_ms < since_ms:
            return
        # Users ask for what a drill takes back.
        is_loss = event.kind in LOSING and event.kind is not Kind.DRILL
        if is_loss and (event.lost_changes or event.unknown_vbuckets):
            yield Finding(
                check="losses",
                level=Level.WARN,
                text=event.sentence()[:1].upper() + event.sentence()[1:],
                do="Consumers roll back by themselves; repeat the lost writes if the application still has them",
                page="history",
            )
            return


CHECKS: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    _left_out,
    _unserved,
    _nodes,
    _damage,
    _copies,
    _held,
    _unfed,
    _disk,
    _landings,
    _stuck,
    _losses,
)
"""Findings of one level are shown in this order."""

"""A failover: nodes are gone, and the others go on with the best copies that are left.

First the lost nodes are cut off: what is active there is frozen, so that the others take nothing more from them. One
that is not as lost as it seems could go on and get its majority from a copy that is not the one chosen. What another
command has on its way is frozen, too. Then the copies are compared and promoted, and the config without the lost nodes
is published. In between, clients still go to a node that does not answer. A coordinator that dies in between is run
again, and finds what it had promoted active.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from headwater.cluster.nodes import LOOK_S_MAX, Inventory, NodePort, answered, take_inventory
from headwater.cluster.planning import Row, fail_over
from headwater.cluster.publisher import Publisher, rows_of, with_frozen, with_nodes, with_rows
from headwater.errors import HeadwaterError, InvalidInput
from headwater.node.history import loss_sentence
from headwater.node.service import ConfigVersion
from headwater.phrases import counted
from headwater.protocol.cluster_config import NO_NODE, PublishedConfig
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import VBucketId

_SHOWN = 10
_FIRST_LOOK_S_MAX = 2 * LOOK_S_MAX
"""For the copies of the nodes that stay, before anything is changed: another one of them may hang as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOver:
    """What a failover has done."""

    nodes: tuple[str, ...]
    promoted: int
    lost: tuple[VBucketId, ...]
    """Vbuckets of which no copy was left. They are empty now."""
    lost_changes: int
    """That are known of, by what the lost nodes last said of themselves: at least so many."""
    lost_vbuckets: int
    """In how many vbuckets those were."""
    unknown_vbuckets: int
    """Vbuckets of which nothing is known that the lost nodes had."""

    def losses(self) -> str:
        return loss_sentence(changes=self.lost_changes, vbuckets=self.lost_vbuckets, unknown=self.unknown_vbuckets)


async def fail_nodes_over(
    publisher: Publisher, port_of: Callable[[str], NodePort], lost: Sequence[str], *, force: bool
) -> FailedOver:
    """Go on without the lost nodes. With `force` also where vbuckets are lost with them."""
    config = publisher.config
    left = [name for name in config.names() if name not in lost]
    if not left:
        raise InvalidInput("no node would be left", hint="Start one of the nodes again")
    ports = {name: port_of(name) for name in left}
    found = await take_inventory(ports, within_s=_FIRST_LOOK_S_MAX)
    for name, error in found.unreachable.items():
        raise HeadwaterError(
            f"{name} can't be reached either: {error.reason}", hint="Start it again, or fail it over as well"
        )
    orphans = _orphans(_rows_without(config, lost, found))
    if orphans and not force:
        raise InvalidInput(
            f"{counted(len(orphans), 'vbucket')} would be lost, as no other node has them ({_some(orphans)})",
            hint="Start the node again, or give --force to go on without them",
        )
    publisher.may_miss(frozenset(lost))
    await _cut_off(publisher, lost)
    found = await take_inventory(ports)
    rows = _rows_without(publisher.config, lost, found)
    orphans = _orphans(rows)
    for at, vbucket in enumerate(orphans):
        rows[vbucket] = (left[at % len(left)], *(None,) * config.replicas)
    promoted = await _promote(port_of, rows, found, publisher.config.version)
    kept = [node for node in config.nodes if node.kv_address in left]

    def without(config: PublishedConfig) -> PublishedConfig:
        return with_rows(replace(with_nodes(config, kept), handing_over={}, settled=False), rows)

    await publisher.publish(without)
    losses = await _losses(ports, promoted)
    return FailedOver(
        nodes=tuple(lost),
        promoted=sum(map(len, promoted.values())) - len(orphans),
        lost=orphans,
        lost_changes=sum(loss or 0 for loss in losses),
        lost_vbuckets=sum(bool(loss) for loss in losses),
        unknown_vbuckets=losses.count(None),
    )


async def _losses(ports: Mapping[str, NodePort], promoted: Mapping[str, Collection[VBucketId]]) -> list[int | None]:
    """How many changes each promoted vbucket has lost, as far as its node knows.

    The failover is done. A node that can't say it any more makes the loss unknown, and nothing else.
    """
    losses: list[int | None] = []
    for name, vbuckets in promoted.items():
        try:
            known = await answered(ports[name].losses, LOOK_S_MAX)
        except HeadwaterError:
            known = {}
        losses += [known.get(vbucket) for vbucket in vbuckets]
    return losses


async def _cut_off(publisher: Publisher, lost: Sequence[str]) -> None:
    """Have no node stream what is active on the lost ones, or take over anything, until it is decided who has it."""
    config = publisher.config
    names = config.names()
    frozen = [
        number
        for number, row in enumerate(config.rows)
        if row[0] != NO_NODE
        and names[row[0]] in lost
        and any(names[node] not in lost for node in config.holders(number))
    ]
    if frozen or config.handing_over:
        await publisher.publish(lambda config: with_frozen(config, frozen))


def _rows_without(config: PublishedConfig, lost: Sequence[str], found: Inventory) -> dict[VBucketId, Row]:
    names = config.names()
    rows: list[Row] = []
    copies = {}
    for number, row in enumerate(rows_of(config)):
        vbucket = VBucketId(number)
        holders = [names[node] for node in config.holders(number) if names[node] not in lost]
        copies[vbucket] = found.copies_of(vbucket, holders)
        if number in config.handing_over:
            # One that was on its way, or promoted before, is where it is active; else where its newest copy is.
            nodes = [name for name in (row[0], *holders) if name is not None]
            active = next((name for name in nodes if found.state(name, vbucket) == VBucketState.ACTIVE), None)
            row = (active, *row[1:])
        rows.append(row)
    result = fail_over(tuple(rows), lost, copies)
    return {VBucketId(vbucket): row for vbucket, row in enumerate(result.rows)}


async def _promote(
    port_of: Callable[[str], NodePort], rows: Mapping[VBucketId, Row], found: Inventory, version: ConfigVersion
) -> dict[str, dict[VBucketId, Row]]:
    """Make the first node of every row active. Returns those that were not, by node."""
    by_node: dict[str, dict[VBucketId, Row]] = {}
    for vbucket, row in rows.items():
        if row[0] is not None and found.state(row[0], vbucket) != VBucketState.ACTIVE:
            by_node.setdefault(row[0], {})[vbucket] = row
    for name, promoted in by_node.items():
        await port_of(name).activate({vbucket: (list(row),) for vbucket, row in promoted.items()}, version=version)
    return by_node


def _orphans(rows: Mapping[VBucketId, Row]) -> tuple[VBucketId, ...]:
    return tuple(vbucket for vbucket, row in rows.items() if row[0] is None)


def _some(vbuckets: Sequence[VBucketId]) -> str:
    shown = ", ".join(str(vbucket) for vbucket in vbuckets[:_SHOWN])
    return shown if len(vbuckets) <= _SHOWN else f"{shown}, …"

"""What a newer config makes of the vbuckets of this node: their states, and the takeovers that end.

A membership calls it with each config that it takes.

The table, for a vbucket whose active node the config knows:

    this node is…                the state here becomes…
    its active node              as it is: the coordinator promotes it, the config only says so; its topology is set
    a replica, or building       replica
    neither, but in the cluster  dead if it took writes; gone once the config is settled
    not in the cluster           dead if it took writes; the data is kept for the day the node is added again
    handed over (to or from)     as it is: the takeover decides
    frozen                       as it is: the coordinator decides

An active vbucket is demoted here and nowhere else, so it happens only where a newer config names another active node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwater.errors import InvalidInput
from headwater.node.service import BucketService, DcpSession
from headwater.protocol.cluster_config import NO_NODE, PublishedConfig
from headwater.protocol.features import WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import HEADER_BYTES, decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.settling import roll_back

_TAKES_WRITES = frozenset({VBucketState.ACTIVE, VBucketState.PENDING})


def apply_config(service: BucketService, config: PublishedConfig, this_node: int | None) -> list[int]:
    """Bring the states in line with a newer config. Returns the vbuckets that are to be removed."""
    bucket = service.bucket
    names = config.names()
    surplus: list[int] = []
    for vbucket, row in enumerate(config.rows):
        facts = bucket.vbuckets.facts[vbucket]
        state = None if facts is None else facts.state
        if this_node is None:
            _stop_writes(service, vbucket, state)
        elif vbucket in config.handing_over:
            if config.is_handed_over_to(vbucket, this_node):
                _prepare_to_take_over(bucket, vbucket, state, config)
        elif row[0] == this_node:
            _set_topology(bucket, vbucket, facts, [None if node == NO_NODE else names[node] for node in row])
        elif config.is_holder(vbucket, this_node):
            _make_replica(service, vbucket, state, has_active=row[0] != NO_NODE)
        elif state is not None and row[0] != NO_NODE:
            _stop_writes(service, vbucket, state)
            surplus.append(vbucket)
    return surplus if config.settled else []


def replicated(service: BucketService, config: PublishedConfig, this_node: int | None) -> dict[int, list[int]]:
    """The vbuckets that this node streams, by the node that is active."""
    sources: dict[int, list[int]] = {}
    if this_node is None:
        return sources
    for vbucket, row in enumerate(config.rows):
        if row[0] in (NO_NODE, this_node) or vbucket in config.handing_over:
            continue
        facts = service.bucket.vbuckets.facts[vbucket]
        is_replica = facts is not None and facts.state == VBucketState.REPLICA
        if is_replica and config.is_holder(vbucket, this_node):
            sources.setdefault(row[0], []).append(vbucket)
    return sources


def _set_topology(bucket: Bucket, vbucket: int, facts: VBucketFacts | None, chain: list[str | None]) -> None:
    if facts is not None and facts.state == VBucketState.ACTIVE and facts.topology != (chain,):
        bucket.set_vbucket_facts(vbucket, replace(facts, topology=(chain,)))


def _prepare_to_take_over(bucket: Bucket, vbucket: int, state: VBucketState | None, config: PublishedConfig) -> None:
    """Let durable writes wait from the moment the vbucket becomes active until a config says so.

    It gets a chain that can't be satisfied meanwhile: the node that hands it over, whose copy is dead by then.
    """
    if state is None:
        bucket.set_vbucket_state(vbucket, VBucketState.REPLICA)
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    if config.replicas and facts.state != VBucketState.ACTIVE and config.rows[vbucket][0] != NO_NODE:
        names = config.names()
        chain = [names[config.handing_over[vbucket]], names[config.rows[vbucket][0]]]
        bucket.set_vbucket_facts(vbucket, replace(facts, topology=(chain,)))


def _make_replica(service: BucketService, vbucket: int, state: VBucketState | None, *, has_active: bool) -> None:
    if state is None or (state != VBucketState.REPLICA and has_active):
        service.bucket.set_vbucket_state(vbucket, VBucketState.REPLICA)
        service.forget_locks({vbucket})


def _stop_writes(service: BucketService, vbucket: int, state: VBucketState | None) -> None:
    if state in _TAKES_WRITES:
        service.bucket.set_vbucket_state(vbucket, VBucketState.DEAD)
        service.forget_locks({vbucket})


# --- takeovers ----------------------------------------------------------------------------------------------------


def end_takeovers(service: BucketService, config: PublishedConfig, this_node: int | None) -> None:
    """End the connections of takeovers that a newer config does not name.

    A coordinator may die, or be overtaken by another one, while its takeovers are on their way. The next one publishes
    a config that freezes their vbuckets, and once both nodes have it, neither changes a state because of the old
    takeover: not the one that takes over, which would become active, and not the one that hands over, which would be
    dead.
    """
    for session in list(service.dcp_sessions.values()):
        if _takes_over(session, config, this_node) or _hands_over(session, config):
            session.end_dcp()


def _takes_over(session: DcpSession, config: PublishedConfig, this_node: int | None) -> bool:
    takeovers = () if session.consumer is None else session.consumer.takeovers()
    return any(not config.is_handed_over_to(vbucket, this_node) for vbucket in takeovers)


def _hands_over(session: DcpSession, config: PublishedConfig) -> bool:
    streams = {} if session.dcp is None else session.dcp.streams
    return any(
        stream.is_takeover and (vbucket not in config.handing_over or config.is_frozen(vbucket))
        for (vbucket, _), stream in streams.items()
    )


# --- the failover drill --------------------------------------------------------------------------------------------
# What such a copy lacks is gone, and a new branch of history begins where it ended. Streams of the vbucket end, and a
# consumer that has more than the copy had has to roll back when it asks again. All of it is real: for a consumer
# there is no difference to a failover, and there is no way back.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What a drill has done."""

    vbucket: VBucketId
    to_seqno: Seqno
    """The seqno asked for, or 0 where that lies before the history window."""
    vbuuid: Vbuuid
    """The branch that begins there."""
    high_seqno_before: Seqno


def roll_back_vbucket(service: BucketService, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
    """Roll an active vbucket back. The bucket must be at rest: nothing in flight, no housekeeping under way."""
    bucket = service.bucket
    high_seqno = _checked_high_seqno(bucket, vbucket, to_seqno)
    bucket.commit_now()
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    kept_seqno = to_seqno if to_seqno >= facts.history_start_seqno else Seqno(0)
    # The cluster gives a promoted copy the collections that it does not know.
    events = list(_events_after(bucket, vbucket, kept_seqno))
    reached = roll_back(bucket, vbucket, to_seqno, branch=True)
    bucket.enter_again(vbucket, events)
    had = Seqno(high_seqno - len(events))
    service.history.rolled_back(vbucket, kept=reached, had=max(had, reached), is_drill=True)
    service.on_change()
    service.sync_writes.evaluate(vbucket)
    service.on_rolled_back(vbucket)
    rolled = bucket.vbuckets.facts[vbucket]
    assert rolled is not None
    return RolledBack(
        vbucket=vbucket,
        to_seqno=reached,
        vbuuid=rolled.failover_log.newest.vbuuid,
        high_seqno_before=high_seqno,
    )


def _checked_high_seqno(bucket: Bucket, vbucket: VBucketId, to_seqno: Seqno) -> Seqno:
    numbers = bucket.vbuckets
    state = numbers.state(vbucket) if numbers.exists(vbucket) else None
    if state is None:
        raise InvalidInput(f"there is no vbucket {vbucket}", hint=f"The bucket has {len(numbers)}, counted from 0")
    if state != VBucketState.ACTIVE:
        raise InvalidInput(f"vbucket {vbucket} is {state.name.lower()}", hint="Use one that is active")
    high_seqno = numbers.high_seqno(vbucket)
    if to_seqno > high_seqno:
        raise InvalidInput(
            f"seqno {to_seqno} is beyond the high seqno {high_seqno} of vbucket {vbucket}",
            hint=f"Use one from 0 to {high_seqno}",
        )
    return high_seqno


def _events_after(bucket: Bucket, vbucket: VBucketId, seqno: Seqno) -> Iterator[SystemEvent]:
    if bucket.manifest.uid == 0:
        # There have never been other collections than the default one.
        return
    for run in bucket.runs(vbucket, after_seqno=seqno):
        at = 0
        while at < len(run):
            if run[at + 1] == Opcode.DCP_SYSTEM_EVENT:
                decoded = decode_frame(run[at:].data)
                assert decoded is not None, "stored frames are whole"
                event = decode_message(decoded[0], WITH_COLLECTIONS)
                assert isinstance(event, SystemEvent)
                if event.seqno > seqno:
                    yield event
            at += HEADER_BYTES + int.from_bytes(run[at + 8 : at + 12])

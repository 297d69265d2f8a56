"""Promotion: a copy becomes the active one.

Another copy may have gone on from what this one holds, so a new branch of history begins: at the high seqno where the
snapshot that was being received is complete. Where it is not, this copy holds a state that never was, and those who
have the same half of it must go back to where the snapshot began.

Durable writes that are undecided here may have been decided over there, so they are committed (`prepares`).

A copy hears of collections by the stream, the bucket by the cluster. Whichever is behind is brought up to the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.data_format import VBucketFacts
from headwater.store.prepares import commit_inherited
from headwater.store.vbucket_manifest import vbucket_manifest

if TYPE_CHECKING:
    from headwater.store.bucket import Bucket


def promote(bucket: Bucket, vbucket: int, facts: VBucketFacts) -> int:
    """Make a copy active. Returns the commit that makes it durable."""
    high = Seqno(int(bucket.vbuckets.high_seqnos[vbucket]))
    is_inside_snapshot = facts.snapshot_start_seqno <= high < facts.snapshot_end_seqno
    branch_seqno = facts.snapshot_start_seqno if is_inside_snapshot else high
    log = facts.failover_log.branch(bucket.outside.new_vbuuid(), at_seqno=branch_seqno)
    facts = replace(
        facts,
        state=VBucketState.ACTIVE,
        failover_log=log,
        history_start_seqno=Seqno(min(facts.history_start_seqno, high)),
    )
    _bring_collections_together(bucket, vbucket)
    commit_inherited(bucket, vbucket)
    return bucket.set_vbucket_facts(vbucket, facts)


def demote(bucket: Bucket, vbucket: int, facts: VBucketFacts, state: VBucketState) -> int:
    """Give a vbucket that is not to be active another state.

    What an active one has written is complete as it is. A dead one is not taken for complete: if it was active, this
    was seen to when it died, and if it was pending, it may have half of a snapshot.

    Only an active one has a chain of copies, or a pending one, which was given the chain for when it is active.
    """
    facts = replace(facts, state=state, topology=facts.topology if state == VBucketState.PENDING else None)
    if bucket.vbuckets.states[vbucket] == VBucketState.ACTIVE:
        high = Seqno(int(bucket.vbuckets.high_seqnos[vbucket]))
        facts = replace(facts, snapshot_start_seqno=high, snapshot_end_seqno=high)
    return bucket.set_vbucket_facts(vbucket, facts)


def _bring_collections_together(bucket: Bucket, vbucket: int) -> None:
    if bucket.vbuckets.manifest_uids[vbucket] == bucket.manifest.uid:
        # Only the last event of a manifest carries its uid, so the vbucket has heard of all of it.
        return
    known = vbucket_manifest(bucket, vbucket)
    if known.uid > bucket.manifest.uid:
        bucket.set_manifest(known)
    else:
        bucket.enter_events(vbucket, known.events_to(bucket.manifest))

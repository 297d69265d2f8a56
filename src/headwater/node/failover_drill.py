"""The failover drill: a vbucket behaves as if a copy that had not got everything had been promoted.

What such a copy lacks is gone, and a new branch of history begins where it ended. Streams of the vbucket end, and a
consumer that has more than the copy had has to roll back when it asks again. All of it is real: for a consumer
there is no difference to a failover, and there is no way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwater.errors import InvalidInput
from headwater.node.service import BucketService
from headwater.protocol.features import WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import HEADER_BYTES, decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.store.bucket import Bucket
from headwater.store.settling import roll_back


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
    """Take an active vbucket back. The bucket must be at rest: nothing in flight, no house-keeping under way."""
    bucket = service.bucket
    high_seqno = _checked_high_seqno(bucket, vbucket, to_seqno)
    bucket.commit_now()
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    kept_seqno = to_seqno if to_seqno >= facts.history_start_seqno else Seqno(0)
    # The cluster gives a promoted copy the collections that it does not know.
    events = list(_events_after(bucket, vbucket, kept_seqno))
    reached = roll_back(bucket, vbucket, to_seqno, branch=True)
    bucket.entered_events += len(events)
    for event in events:
        again = replace(event, seqno=bucket.vbuckets.next_seqno(vbucket))
        bucket.pending.append(vbucket, again.encode())
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
        raise InvalidInput(f"vbucket {vbucket} is {state.name.lower()}", hint="Take one that is active")
    high_seqno = Seqno(int(numbers.high_seqnos[vbucket]))
    if to_seqno > high_seqno:
        raise InvalidInput(
            f"seqno {to_seqno} is beyond the high seqno {high_seqno} of vbucket {vbucket}",
            hint=f"Take one from 0 to {high_seqno}",
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

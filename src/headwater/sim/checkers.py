"""The judges of a run. They know the store's frames and the writers' log, and none of the code that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Abort, Deletion, Expiration, Mutation, Prepare
from headwater.protocol.messages.dcp_system_event import SystemEvent
from headwater.protocol.system_events import CollectionDropped, decode_event
from headwater.sim.consumer_state import Document, Kept, Key, documents_of
from headwater.sim.write_log import Outcome, Write, WriteLog
from headwater.store.bucket import Bucket


def stored_changes(bucket: Bucket, vbucket: int, *, after_seqno: int = 0) -> list[Kept]:
    """The durable changes of a vbucket behind a seqno, read frame by frame. Seqnos must rise.

    Prepares and aborts have seqnos of their own and change no document: a commit is stored as the mutation itself.
    """
    changes: list[Kept] = []
    reached = after_seqno
    for run in bucket.runs(vbucket, after_seqno=after_seqno):
        for frame in decode_frames(bytes(run)):
            message = decode_message(frame, WITH_COLLECTIONS)
            # In what is stored, the first number of an abort is its own.
            seqno = int(message.prepared_seqno if isinstance(message, Abort) else message.seqno)  # type: ignore[attr-defined]
            assert seqno > reached, f"{type(message).__name__} {seqno} is stored after {reached} in vbucket {vbucket}"
            reached = seqno
            if isinstance(message, Mutation):
                key = (int(message.collection_id or 0), bytes(message.key))
                changes.append((seqno, key, (seqno, int(message.cas), bytes(message.value))))
            elif isinstance(message, Deletion | Expiration):
                changes.append((seqno, (int(message.collection_id or 0), bytes(message.key)), None))
            elif isinstance(message, SystemEvent):
                event = decode_event(message)
                if isinstance(event, CollectionDropped):
                    changes.append((seqno, None, int(event.collection_id)))
    return changes


def visible_seqno(bucket: Bucket, vbucket: int) -> int:
    """The seqno of the last change that a consumer gets to see which knows nothing of durable writes."""
    reached = 0
    for run in bucket.runs(vbucket):
        for frame in decode_frames(bytes(run)):
            message = decode_message(frame, WITH_COLLECTIONS)
            if not isinstance(message, Abort | Prepare):
                reached = int(message.seqno)  # type: ignore[attr-defined]
    return reached


def stored_documents(bucket: Bucket, vbucket: int) -> dict[Key, Document]:
    return documents_of(stored_changes(bucket, vbucket))


def differences(whose: str, held: dict[Key, Document], stored: dict[Key, Document]) -> list[str]:
    """What somebody has wrong, a line a key."""
    keys = sorted(key for key in held.keys() | stored.keys() if held.get(key) != stored.get(key))
    return [f"{whose} has {held.get(key)} for {key}, and stored is {stored.get(key)}" for key in keys]


def index_differences(bucket: Bucket, vbucket: int) -> list[str]:
    """Where the index, by which documents are read, does not agree with the stored changes."""
    wrong = []
    for (collection, key), (seqno, cas, _) in stored_documents(bucket, vbucket).items():
        entry = bucket.find(vbucket, collection, key)  # type: ignore[arg-type]
        if entry is None or entry.is_deleted or (entry.seqno, entry.cas) != (seqno, cas):
            wrong.append(f"the index has {entry} for {key!r}, and stored is seqno {seqno}")
    return wrong


class Needs(Enum):
    """What it takes for a write to be there for good."""

    ACKNOWLEDGEMENT = auto()
    MAJORITY = auto()
    """A failover may have cut off what the copies did not have."""
    NOTHING = auto()
    """A drill may have taken anything."""


def lost_writes(log: WriteLog, stored: dict[Key, Document], needs: Mapping[Key, Needs]) -> list[str]:
    """Acknowledged writes that are neither there nor followed by one that is."""
    wrong = []
    for key, writes in log.by_key.items():
        found = stored[key][2] if key in stored else None
        if not _is_allowed(writes, found, needs[key]):
            told = ", ".join(_told(write) for write in writes[-6:])
            wrong.append(f"an acknowledged write of {key} is lost: {found!r} is there after {told}")
    return wrong


def _told(write: Write) -> str:
    return f"{write.value!r} {'durable ' if write.is_durable else ''}{write.outcome.name}"


def _is_allowed(writes: list[Write], found: bytes | None, needs: Needs) -> bool:
    """Whether a value can be what is left after these writes."""
    # A write of unknown outcome may come to pass late, after others that were made later.
    may_be: set[bytes | None] = {write.value for write in writes if write.outcome is Outcome.UNKNOWN}
    for write in reversed(writes):
        if write.outcome is Outcome.REFUSED:
            continue
        may_be.add(write.value)
        if write.may_expire:
            may_be.add(None)
        if write.outcome is Outcome.ACKNOWLEDGED and _is_kept(write, needs):
            return found in may_be
    return found is None or found in may_be


def _is_kept(write: Write, needs: Needs) -> bool:
    return needs is Needs.ACKNOWLEDGEMENT or (needs is Needs.MAJORITY and write.is_durable)

"""A document as it is stored, read back from its frame."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.protocol.datatype import Datatype
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.numbers import Cas, CollectionId, Seqno


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The newest version of a document, or what is left of a deleted one."""

    collection_id: CollectionId
    key: bytes
    value: bytes
    datatype: Datatype
    flags: int
    expiry: int
    cas: Cas
    seqno: Seqno
    rev_seqno: int
    is_deleted: bool
    delete_time: int = 0


def decode_document(frame: bytes | memoryview) -> Document:
    """The document in a stored frame."""
    decoded = decode_frame(frame)
    assert decoded is not None, "stored frames are whole"
    change = decode_message(decoded[0], WITH_COLLECTIONS)
    assert isinstance(change, Mutation | Deletion | Expiration), "only changes of documents are read back"
    assert change.collection_id is not None
    mutation = change if isinstance(change, Mutation) else None
    return Document(
        collection_id=change.collection_id,
        key=change.key,
        value=change.value,
        datatype=change.datatype,
        flags=mutation.flags if mutation else 0,
        expiry=mutation.expiry if mutation else 0,
        cas=change.cas,
        seqno=change.seqno,
        rev_seqno=change.rev_seqno,
        is_deleted=mutation is None,
        delete_time=0 if isinstance(change, Mutation) else change.delete_time or 0,
    )

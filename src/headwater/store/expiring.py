"""Expiry: documents whose time has come become expirations, whether somebody asks for them or not."""

from __future__ import annotations

from dataclasses import replace

from headwater.protocol.datatype import Datatype
from headwater.protocol.leb128 import encode_collection_id
from headwater.protocol.xattrs import keep_system_xattrs
from headwater.store.bucket import Bucket, Written
from headwater.store.index import Entry
from headwater.store.runs import as_run

DOCUMENTS_MAX = 256
"""Documents of a vbucket in one go."""


def expire_documents(bucket: Bucket, vbucket: int) -> int:
    """Let expired documents of a vbucket go, up to a bound. Returns how many went."""
    went = 0
    for entry in bucket.index.expired(vbucket, now_s=bucket.outside.now_s(), entries_max=DOCUMENTS_MAX):
        document = bucket.read(vbucket, entry)
        if bucket.manifest.collection_by_id(document.collection_id) is None:
            # Its collection is gone, of which nothing may be told any more. Compaction drops it; until then it is not
            # to be found here again.
            key = as_run(encode_collection_id(document.collection_id) + document.key)
            bucket.index.put(vbucket, key, replace(entry, expiry=0))
        elif bucket.prepares.find(vbucket, document.collection_id, document.key) is None:
            # One that a durable write is about to replace is left to that.
            expire_document(bucket, vbucket, entry)
            went += 1
    return went


def expire_document(bucket: Bucket, vbucket: int, entry: Entry) -> Written:
    """Let a document go. The extended attributes of the system stay in its tombstone."""
    document = bucket.read(vbucket, entry)
    kept = keep_system_xattrs(document.value) if document.datatype & Datatype.XATTR else b""
    return bucket.put_removal(
        vbucket,
        collection_id=document.collection_id,
        key=document.key,
        expired=True,
        value=kept,
        datatype=Datatype.XATTR if kept else Datatype.RAW,
    )


def is_expired(entry: Entry, now_s: int) -> bool:
    return not entry.is_deleted and 0 < entry.expiry <= now_s

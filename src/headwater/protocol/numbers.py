"""Numbers: the kinds of integers DCP is made of, and the limits on what comes from outside.

The type checker keeps the kinds apart. Everything in the package may import this module; it imports none.
"""

from __future__ import annotations

import zlib
from typing import NewType

VBucketId = NewType("VBucketId", int)
Seqno = NewType("Seqno", int)
Vbuuid = NewType("Vbuuid", int)
Cas = NewType("Cas", int)
CollectionId = NewType("CollectionId", int)
ScopeId = NewType("ScopeId", int)
ManifestUid = NewType("ManifestUid", int)

SEQNO_MAX = Seqno(2**64 - 1)
"""As the end of a stream request: never end."""

DEFAULT_COLLECTION = CollectionId(0)
DEFAULT_SCOPE = ScopeId(0)


# --- a limit on everything that comes from outside; names end in their unit -------------------------------------------


KEY_BYTES_MAX = 250
"""A key without its collection id; the LEB128 prefix is counted separately (`kv_engine/docs/DocumentSizeLimits.md`)."""

LEB128_BYTES_MAX = 5
"""32 bits, seven to a byte."""

VALUE_BYTES_MAX = 20 * 1024 * 1024
"""A document's value, xattrs included."""

RELATIVE_EXPIRY_S_MAX = 30 * 24 * 60 * 60
"""An expiry up to this counts from now; a larger one is a date, in seconds since 1970."""

XATTR_SECTION_BYTES_MAX = 1024 * 1024
XATTR_NAME_BYTES_MAX = 16

CONNECTION_NAME_BYTES_MAX = 200

FRAME_BODY_BYTES_MAX = VALUE_BYTES_MAX + 64 * 1024
"""A value plus room for key, extras and framing extras. A header that announces more is refused before its body is
buffered."""

FAILOVER_LOG_ENTRIES_MAX = 25
"""What a real server keeps (`max_failover_entries`)."""

STREAM_REQUEST_VALUE_BYTES_MAX = 64 * 1024
"""Far above any filter: it names five times as many collections as a bucket can have."""

STREAMS_PER_VBUCKET_MAX = 64
"""Streams with a `sid` on one vbucket of one connection."""

STREAM_ID_MAX = 0xFFFF
CONNECTION_BUFFER_BYTES_MAX = 2**32 - 1


def vbucket_of(key: bytes, vbuckets: int) -> VBucketId:
    """Return the vbucket that a key belongs to.

    Args:
        key: The key, without a collection id.
        vbuckets: How many vbuckets the bucket has.
    """
    return VBucketId((zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets)

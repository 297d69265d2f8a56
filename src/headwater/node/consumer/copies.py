"""What a consumer may do to this bucket's copies: which may be received, and how one is taken back."""

from __future__ import annotations

from headwater.errors import StoreError
from headwater.node.kv.context import Refused
from headwater.node.kv.locks import forget_vbuckets
from headwater.node.kv.service import BucketService
from headwater.protocol.messages.dcp_stream import AddStream, StreamFlags
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.store.receiving import RECEIVING_STATES
from headwater.store.rewinding import roll_back

ADD_STREAM_FLAGS = (
    StreamFlags.TAKEOVER
    | StreamFlags.DISK_ONLY
    | StreamFlags.LATEST
    | StreamFlags.ACTIVE_ONLY
    | StreamFlags.STRICT_VBUUID
    | StreamFlags.IGNORE_PURGED_TOMBSTONES
)
"""Those that make a copy. Without values, or from the latest change on, it would not be one."""


def check_addable(service: BucketService, request: AddStream) -> None:
    """Whether a stream may be asked for."""
    if int(request.flags) & ~int(ADD_STREAM_FLAGS):
        raise Refused(Status.EINVAL)
    if StreamFlags.TAKEOVER in request.flags and not service.may_take_over(request.vbucket):
        raise Refused(Status.NOT_MY_VBUCKET)
    if request.vbucket in service.receivers:
        raise Refused(Status.KEY_EEXISTS)
    numbers = service.bucket.vbuckets
    if not numbers.exists(request.vbucket) or numbers.state(request.vbucket) not in RECEIVING_STATES:
        raise Refused(Status.NOT_MY_VBUCKET)


def take_back(service: BucketService, vbucket: VBucketId, to_seqno: Seqno) -> Seqno:
    """Take a copy back, and return the seqno it was taken to. The bucket must be at rest."""
    if service.bucket.vbuckets.state(vbucket) not in RECEIVING_STATES:
        raise Refused(Status.NOT_MY_VBUCKET)
    try:
        reached = roll_back(service.bucket, vbucket, to_seqno)
    except StoreError as error:
        raise Refused(Status.ETMPFAIL, error.reason) from error
    forget_vbuckets(service, {vbucket})
    for connection in service.producer_connections():
        connection.on_rolled_back(vbucket)
    return reached

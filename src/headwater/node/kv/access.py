"""Where a request's document lives, and its newest version.

What is found may not be durable yet, and an answer that tells of it, be it a document or that there is none, has to
wait until it is: otherwise a crash could take back what a client has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

from headwater.node.kv.context import Context, Refused
from headwater.node.kv.service import BucketService
from headwater.protocol.manifest import Collection
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.status import Status
from headwater.store.bucket import Bucket
from headwater.store.documents import Document
from headwater.store.expiring import expire_document, is_expired
from headwater.store.index import Entry


class DocumentRequest(Protocol):
    """A request about one document."""

    @property
    def vbucket(self) -> VBucketId: ...

    @property
    def collection_id(self) -> CollectionId | None: ...

    @property
    def key(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a document lives, whether there is one or not."""

    service: BucketService
    vbucket: VBucketId
    collection: Collection
    key: bytes

    @property
    def bucket(self) -> Bucket:
        return self.service.bucket

    def find(self) -> Entry | None:
        """What the index knows, deleted and expired documents included."""
        return self.bucket.find(self.vbucket, self.collection.id, self.key)

    def read(self, entry: Entry) -> Document:
        return self.bucket.read(self.vbucket, entry)


def place_of(context: Context, request: DocumentRequest, *, state: VBucketState = VBucketState.ACTIVE) -> Place:
    """The place a request is about. The vbucket must be here and in this state, the collection must exist."""
    service = context.bucket_service
    if service.bucket.vbuckets.state(request.vbucket) != state:
        refuse_vbucket(context)
    collection_id = DEFAULT_COLLECTION if request.collection_id is None else request.collection_id
    collection = collection_by_id(context, collection_id)
    return Place(service=service, vbucket=request.vbucket, collection=collection, key=request.key)


def place_to_write(context: Context, request: DocumentRequest) -> Place:
    """The place of a document that is to be written. One that has an undecided durable write is left to that."""
    place = place_of(context, request)
    in_the_way = place.service.sync_writes.in_the_way(place.vbucket, place.collection.id, place.key)
    if in_the_way is not None:
        raise Refused(in_the_way)
    return place


def refuse_vbucket(context: Context) -> NoReturn:
    """The vbucket is not here. The cluster config tells the client where it is."""
    raise Refused(Status.NOT_MY_VBUCKET, body=context.service.cluster_config(context.bucket_service.name))


def collection_by_id(context: Context, collection_id: CollectionId) -> Collection:
    manifest = context.bucket_service.bucket.manifest
    found = manifest.collection_by_id(collection_id)
    if found is None:
        raise Refused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")
    return found[1]


def newest(context: Context, place: Place) -> Entry | None:
    """The newest version of a document, or its tombstone. One that has expired becomes an expiration first."""
    bucket = place.bucket
    entry = place.find()
    if entry is not None and is_expired(entry, bucket.outside.now_s()) and _is_active(place):
        if bucket.prepares.find(place.vbucket, place.collection.id, place.key) is not None:
            # A durable write is about to give it another version. Until then nobody gets to see the old one.
            return None
        expire_document(bucket, place.vbucket, entry)
        place.service.on_change()
        entry = place.find()
    if entry is not None and place.service.ack_when_durable:
        context.wait_for(bucket.commit_of(entry))
    return entry


def live(context: Context, place: Place) -> Entry | None:
    """The newest version of a document that is neither deleted nor expired."""
    entry = newest(context, place)
    # A replica's documents expire when its active copy says so, but nobody gets to see them meanwhile.
    if entry is None or entry.is_deleted or is_expired(entry, place.bucket.outside.now_s()):
        return None
    return entry


def live_or_refuse(context: Context, place: Place) -> Entry:
    entry = live(context, place)
    if entry is None:
        raise Refused(Status.KEY_ENOENT)
    return entry


def _is_active(place: Place) -> bool:
    return place.bucket.vbuckets.state(place.vbucket) == VBucketState.ACTIVE

"""Answers that a real node does not give, or not at will. The others are tested with one, in `tests/client_groups`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headwater.client.cluster_map import ClusterMap, vbucket_of
from headwater.client.connection_string import Address
from headwater.client.groups.group_document import ANSWER_S_MAX, KvDocument, group_bucket
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.errors import (
    KeyExists,
    KeyNotFound,
    StatusError,
    SyncWriteAmbiguous,
    TemporaryFailure,
    UnknownBucket,
    status_error,
)
from headwater.protocol.messages import Request, Response
from headwater.protocol.numbers import Cas, CollectionId
from headwater.protocol.status import Status

KEY = b"the document"


class RefusingKv:
    """A `KvPort` that answers every request in the same way."""

    def __init__(self, answer: StatusError, collection_id: CollectionId | None = None) -> None:
        self._answer = answer
        self._collection_id = collection_id
        self.requests: list[Request] = []
        self.is_closed = False

    async def cluster_map(self) -> ClusterMap:
        return ClusterMap(
            epoch=1, revision=1, bucket="b", uuid="u", nodes=(Address("h", 1),), vbucket_nodes=((0,),) * 64
        )

    async def collection_id(self, name: str | None) -> CollectionId | None:
        return self._collection_id

    async def request(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        self.requests += requests
        return [self._answer] * len(requests)

    async def close(self) -> None:
        self.is_closed = True


def calls(answer: StatusError) -> dict[str, object]:
    """What each call makes of the answer."""
    document = KvDocument(RefusingKv(answer), KEY)
    found: dict[str, object] = {}
    for name, call in (
        ("read", document.read()),
        ("add", document.add(b"{}")),
        ("replace", document.replace(b"{}", Cas(1))),
    ):
        try:
            found[name] = asyncio.run(call)
        except StatusError as error:
            found[name] = error
    return found


def status(number: Status) -> StatusError:
    return status_error(number, "no")


@pytest.mark.parametrize(
    ("answer", "that_are_none"),
    [
        (KeyNotFound(Status.KEY_ENOENT), {"read", "replace"}),
        (KeyExists(Status.KEY_EEXISTS), {"add", "replace"}),
        (status(Status.NOT_STORED), {"add"}),
        (UnknownBucket(Status.KEY_ENOENT), set()),
        (TemporaryFailure(Status.ETMPFAIL), set()),
        (SyncWriteAmbiguous(Status.SYNC_WRITE_AMBIGUOUS), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_others_have_done_is_a_value(answer: StatusError, that_are_none: set[str]) -> None:
    assert calls(answer) == {name: None if name in that_are_none else answer for name in ("read", "add", "replace")}


def test_a_request_names_the_vbucket_and_the_collection() -> None:
    for collection_id in (None, CollectionId(0), CollectionId(9)):
        kv = RefusingKv(KeyNotFound(Status.KEY_ENOENT), collection_id)
        document = KvDocument(kv, KEY)
        asyncio.run(document.read())
        asyncio.run(document.close())
        (request,) = kv.requests
        assert (request.vbucket, request.collection_id) == (vbucket_of(KEY, 64), collection_id)
        assert kv.is_closed


@pytest.mark.parametrize(("asked_s", "used_s"), [(30.0, ANSWER_S_MAX), (1.0, 1.0)])
def test_a_group_does_not_wait_longer_than_its_lease_can_bear(asked_s: float, used_s: float) -> None:
    settings = ClientSettings.make("couchbase://h/b", timeouts=Timeouts(connect_s=asked_s, answer_s=asked_s))
    document = group_bucket(settings, vbuckets=64).open_document(KEY, None)
    assert document._kv._settings.timeouts == Timeouts(connect_s=used_s, answer_s=used_s)

"""The group's document: what is written is read again, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from headwater import errors
from headwater.client.cluster_map import ClusterMap, vbucket_of
from headwater.client.connection_string import Address
from headwater.client.groups import group_document
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.protocol.messages import Request, Response
from headwater.protocol.numbers import Cas, CollectionId
from headwater.protocol.status import Status
from support.cases import case, each

ADA = group_document.Seat(id="1a", member_id="ada", heartbeat=3, lease_s=15.0)
BEA = group_document.Seat(id="2b", member_id="bea", heartbeat=9, lease_s=4.5, is_replaced=True)
DOCUMENT = group_document.GroupDocument(
    first_generation=1000, seats=(ADA, BEA), owners=("1a", "2b", None), targets=("1a", "1a", "2b"), takings=(1, 4, 2)
)


def test_what_is_written_is_read_again() -> None:
    assert group_document.GroupDocument.decode(DOCUMENT.encode()) == DOCUMENT
    empty = group_document.GroupDocument.empty(vbuckets=5, first_generation=7)
    assert group_document.GroupDocument.decode(empty.encode()) == empty


def test_the_form_is_stable() -> None:
    """Members of other versions read it."""
    assert json.loads(DOCUMENT.encode()) == {
        "format": 1,
        "first_generation": 1000,
        "seats": [
            {"id": "1a", "member": "ada", "heartbeat": 3, "lease_s": 15.0, "replaced": False},
            {"id": "2b", "member": "bea", "heartbeat": 9, "lease_s": 4.5, "replaced": True},
        ],
        "owners": [0, 1, -1],
        "targets": [0, 0, 1],
        "generations": [1, 4, 2],
    }


def test_generations_count_on_from_the_first() -> None:
    assert [DOCUMENT.generation(vbucket) for vbucket in range(3)] == [1001, 1004, 1002]


def test_the_largest_group_of_the_largest_bucket_fits() -> None:
    seats = tuple(
        group_document.Seat(
            id=f"{number:016x}", member_id="m" * group_document.NAME_CHARS_MAX, heartbeat=2**40, lease_s=15.0
        )
        for number in range(group_document.SEATS_MAX)
    )
    everywhere = (seats[-1].id,) * 65536
    largest = group_document.GroupDocument(
        first_generation=2**40, seats=seats, owners=everywhere, targets=everywhere, takings=(2**31,) * 65536
    )
    assert len(largest.encode()) < group_document.DOCUMENT_BYTES_MAX
    assert group_document.GroupDocument.decode(largest.encode()) == largest


def test_a_seat_that_goes_leaves_its_vbuckets_to_nobody() -> None:
    left = DOCUMENT.without_seats(["2b"])
    assert (left.seats, left.owners, left.targets) == ((ADA,), ("1a", None, None), ("1a", "1a", None))
    assert left.takings == DOCUMENT.takings


def test_a_seat_is_added_or_changed() -> None:
    older = group_document.Seat(id="1a", member_id="ada", heartbeat=4, lease_s=15.0)
    assert DOCUMENT.with_seat(older).seats == (older, BEA)
    other = group_document.Seat(id="3c", member_id="cleo", heartbeat=1, lease_s=15.0)
    assert DOCUMENT.with_seat(other).seats == (ADA, BEA, other)


def changed(**members: Any) -> bytes:
    return json.dumps({**json.loads(DOCUMENT.encode()), **members}).encode()


def seat(**members: Any) -> bytes:
    first, second = json.loads(DOCUMENT.encode())["seats"]
    return changed(seats=[{**first, **members}, second])


INVALID = {
    "not JSON": b"{",
    "nested too deeply": b"[" * 100_000,
    "not an object": b"[]",
    "not UTF-8": b'{"format": "\xff"}',
    "no format": b"{}",
    "another format": changed(format=2),
    "too large": b" " * (group_document.DOCUMENT_BYTES_MAX + 1),
    "no first generation": changed(first_generation=None),
    "a first generation below 0": changed(first_generation=-1),
    "a first generation that is true": changed(first_generation=True),
    "seats that are no list": changed(seats={}),
    "a seat that is no object": changed(seats=[1]),
    "two seats of one id": seat(id="2b"),
    "more seats than may be": changed(seats=[{**json.loads(seat())["seats"][0], "id": str(at)} for at in range(257)]),
    "a seat with no id": seat(id=""),
    "a seat with a long id": seat(id="x" * (group_document.NAME_CHARS_MAX + 1)),
    "a seat with a number for an id": seat(id=1),
    "a seat of no member": seat(member=None),
    "a heartbeat below 0": seat(heartbeat=-1),
    "a heartbeat that is no number": seat(heartbeat=1.5),
    "a heartbeat too large": seat(heartbeat=2**53),
    "no lease": seat(lease_s=0),
    "a lease for ever": seat(lease_s=float("inf")),
    "a lease that is no number": seat(lease_s=float("nan")),
    "a lease that is too long": seat(lease_s=group_document.LEASE_S_MAX + 1),
    "a lease that is text": seat(lease_s="15"),
    "a lease that is true": seat(lease_s=True),
    "replaced by a number": seat(replaced=1),
    "an owner that is no member": changed(owners=[0, 2, -1]),
    "an owner below none": changed(owners=[0, 1, -2]),
    "an owner that is true": changed(owners=[0, True, -1]),
    "a target that is no member": changed(targets=[0, 0, 2]),
    "a generation below 0": changed(generations=[1, 4, -1]),
    "owners that are missing": changed(owners=None),
    "fewer targets than owners": changed(targets=[0, 0]),
    "fewer generations than owners": changed(generations=[1, 4]),
}


@each("value", INVALID.values())
def test_anything_else_is_refused(value: bytes) -> None:
    with pytest.raises(errors.GroupDocumentInvalid) as caught:
        group_document.GroupDocument.decode(value)
    assert caught.value.hint


# Answers that a real node does not give, or not at will. The others are tested with one, in `tests/client`.


KEY = b"the document"


class RefusingKv:
    """A `KvPort` that answers every request in the same way."""

    def __init__(self, answer: errors.StatusError, collection_id: CollectionId | None = None) -> None:
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

    async def request(self, requests: Sequence[Request]) -> list[Response | errors.StatusError]:
        self.requests += requests
        return [self._answer] * len(requests)

    async def close(self) -> None:
        self.is_closed = True


def calls(answer: errors.StatusError) -> dict[str, object]:
    """What each call makes of the answer."""
    document = group_document.KvDocument(RefusingKv(answer), KEY)
    found: dict[str, object] = {}
    for name, call in (
        ("read", document.read()),
        ("add", document.add(b"{}")),
        ("replace", document.replace(b"{}", Cas(1))),
    ):
        try:
            found[name] = asyncio.run(call)
        except errors.StatusError as error:
            found[name] = error
    return found


def status(number: Status) -> errors.StatusError:
    return errors.status_error(number, "no")


@case(errors.KeyNotFound(Status.KEY_ENOENT), {"read", "replace"})
@case(errors.KeyExists(Status.KEY_EEXISTS), {"add", "replace"})
@case(status(Status.NOT_STORED), {"add"})
@case(errors.UnknownBucket(Status.KEY_ENOENT), set())
@case(errors.TemporaryFailure(Status.ETMPFAIL), set())
@case(errors.SyncWriteAmbiguous(Status.SYNC_WRITE_AMBIGUOUS), set())
def test_only_what_others_have_done_is_a_value(answer: errors.StatusError, that_are_none: set[str]) -> None:
    assert calls(answer) == {name: None if name in that_are_none else answer for name in ("read", "add", "replace")}


def test_a_request_names_the_vbucket_and_the_collection() -> None:
    for collection_id in (None, CollectionId(0), CollectionId(9)):
        kv = RefusingKv(errors.KeyNotFound(Status.KEY_ENOENT), collection_id)
        document = group_document.KvDocument(kv, KEY)
        asyncio.run(document.read())
        asyncio.run(document.close())
        (request,) = kv.requests
        assert (request.vbucket, request.collection_id) == (vbucket_of(KEY, 64), collection_id)
        assert kv.is_closed


@pytest.mark.parametrize(("asked_s", "used_s"), [(30.0, group_document.ANSWER_S_MAX), (1.0, 1.0)])
def test_a_group_does_not_wait_longer_than_its_lease_can_bear(asked_s: float, used_s: float) -> None:
    settings = ClientSettings.make("couchbase://h/b", timeouts=Timeouts(connect_s=asked_s, answer_s=asked_s))
    document = group_document.group_bucket(settings, vbuckets=64).open_document(KEY, None)
    assert document._kv._settings.timeouts == Timeouts(connect_s=used_s, answer_s=used_s)

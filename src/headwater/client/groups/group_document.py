"""The document that the members of a group share: the members, who reads which vbucket, and who should.

It is JSON, so that operators can read it:

    {
      "format": 1,
      "first_generation": 1767225600,
      "seats": [{"id": "5f0c…", "member": "worker-1", "heartbeat": 12, "lease_s": 15.0, "replaced": false}, …],
      "owners":      [0, 0, 1, -1, …],
      "targets":     [0, 1, 1, 0, …],
      "generations": [1, 1, 1, 2, …]
    }

`owners`, `targets` and `generations` have a number for every vbucket. Owners and targets are indices of `seats`, or -1
for none; generations count from `first_generation`. `lease_member` explains their meaning.

A member that does not understand the document does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from headwater.client.bucket_kv import BucketKv, KvPort
from headwater.client.cluster_map import vbucket_of
from headwater.client.groups import GroupBucket, StoredDocument
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.errors import GroupDocumentInvalid, UnknownBucket, UnknownCollection, UnknownScope
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.documents import Add, Get, GetResponse, Replace
from headwater.protocol.numbers import Cas
from headwater.protocol.status import Status

FORMAT = 1
KEY_PREFIX = "_headwater:group:"
DOCUMENT_BYTES_MAX = 4 * 1024 * 1024
"""A bucket with 65536 vbuckets, the maximum, needs about a quarter of it."""
SEATS_MAX = 256
NAME_CHARS_MAX = 100
"""For the names of groups, members and seats."""
LEASE_S_MAX = 3600.0
COUNT_MAX = 2**53 - 1
"""For heartbeats and generations: the largest integer that every JSON parser represents exactly."""

_NO_SEAT = -1
_HINT = "End all members of the group, delete the document, and start them again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A member, from when it joins until its lease has run out. A member that joins again gets another seat."""

    id: str
    member_id: str
    heartbeat: int
    """Counts up. Other members see only that it changes."""
    lease_s: float
    """How long the member may read after its last heartbeat. Each member sets its own."""
    is_replaced: bool = False
    """A newer process has joined with the same member id: this seat must give up its vbuckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDocument:
    """One state of the group. It is immutable: a change makes a new one."""

    first_generation: int
    seats: tuple[Seat, ...]
    owners: tuple[str | None, ...]
    """For each vbucket, the id of the seat that may read it."""
    targets: tuple[str | None, ...]
    """For each vbucket, the id of the seat that should read it."""
    takings: tuple[int, ...]
    """For each vbucket, how often it was taken."""

    @classmethod
    def empty(cls, *, vbuckets: int, first_generation: int) -> GroupDocument:
        none = (None,) * vbuckets
        return cls(first_generation=first_generation, seats=(), owners=none, targets=none, takings=(0,) * vbuckets)

    @property
    def vbuckets(self) -> int:
        return len(self.owners)

    def seat(self, seat_id: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.id == seat_id), None)

    def generation(self, vbucket: int) -> int:
        return self.first_generation + self.takings[vbucket]

    @property
    def is_settled(self) -> bool:
        """Whether every vbucket is owned by its target."""
        return self.owners == self.targets

    def with_seat(self, seat: Seat) -> GroupDocument:
        """Return the document with a seat added, or replaced if it exists."""
        if self.seat(seat.id) is None:
            return replace(self, seats=(*self.seats, seat))
        return replace(self, seats=tuple(seat if other.id == seat.id else other for other in self.seats))

    def without_seats(self, gone: Iterable[str]) -> GroupDocument:
        """Return the document without some seats. Their vbuckets then have no owner."""
        ids = frozenset(gone)
        return replace(
            self,
            seats=tuple(seat for seat in self.seats if seat.id not in ids),
            owners=tuple(None if owner in ids else owner for owner in self.owners),
            targets=tuple(None if target in ids else target for target in self.targets),
        )

    # --- bytes ----------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        index: dict[str | None, int] = {seat.id: at for at, seat in enumerate(self.seats)}
        index[None] = _NO_SEAT
        members = {
            "format": FORMAT,
            "first_generation": self.first_generation,
            "seats": [
                {
                    "id": seat.id,
                    "member": seat.member_id,
                    "heartbeat": seat.heartbeat,
                    "lease_s": seat.lease_s,
                    "replaced": seat.is_replaced,
                }
                for seat in self.seats
            ],
            "owners": [index[owner] for owner in self.owners],
            "targets": [index[target] for target in self.targets],
            "generations": self.takings,
        }
        return json.dumps(members, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> GroupDocument:
        """Decode a document, or raise `GroupDocumentInvalid`."""
        root = _parse(value)
        seats = tuple(_decode_seat(seat) for seat in _get(root, "seats", list))
        ids = [seat.id for seat in seats]
        if len(set(ids)) != len(ids) or len(ids) > SEATS_MAX:
            raise _invalid(f"it has {len(ids)} seats, of which {len(set(ids))} differ, and may have {SEATS_MAX}")
        takings = _numbers(root, "generations", 0, COUNT_MAX)
        owners = _numbers(root, "owners", _NO_SEAT, len(seats) - 1)
        targets = _numbers(root, "targets", _NO_SEAT, len(seats) - 1)
        if not len(owners) == len(targets) == len(takings):
            raise _invalid("it does not say the same number of vbuckets everywhere")
        by_index: list[str | None] = [*ids, None]
        return cls(
            first_generation=_count(root, "first_generation"),
            seats=seats,
            owners=tuple(by_index[owner] for owner in owners),
            targets=tuple(by_index[target] for target in targets),
            takings=tuple(takings),
        )


def _invalid(reason: str, *, hint: str = _HINT) -> GroupDocumentInvalid:
    return GroupDocumentInvalid(f"the group's document can't be read: {reason}", hint=hint)


def _parse(value: bytes) -> dict[str, Any]:
    if len(value) > DOCUMENT_BYTES_MAX:
        raise _invalid(f"it has {len(value)} bytes, more than {DOCUMENT_BYTES_MAX}")
    try:
        root = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _invalid("it is not JSON") from error
    if not isinstance(root, dict):
        raise _invalid("it is not an object")
    if root.get("format") != FORMAT:
        raise _invalid(
            f"its format is {root.get('format')!r}, not {FORMAT}",
            hint="Use one version of Headwater for all members of a group",
        )
    return root


def _get(parent: dict[str, Any], name: str, kind: type) -> Any:
    value = parent.get(name)
    if type(value) is not kind:
        raise _invalid(f"{name} is missing or not what it should be")
    return value


def _count(parent: dict[str, Any], name: str) -> int:
    count: int = _get(parent, name, int)
    if not 0 <= count <= COUNT_MAX:
        raise _invalid(f"{name} is {count}")
    return count


def _numbers(parent: dict[str, Any], name: str, least: int, most: int) -> list[int]:
    numbers: list[int] = _get(parent, name, list)
    if not all(type(number) is int and least <= number <= most for number in numbers):
        raise _invalid(f"{name} has what is no number from {least} to {most}")
    return numbers


def _name(parent: dict[str, Any], name: str) -> str:
    text: str = _get(parent, name, str)
    if not 0 < len(text) <= NAME_CHARS_MAX:
        raise _invalid(f"{name} has {len(text)} characters")
    return text


def _decode_seat(seat: Any) -> Seat:
    if not isinstance(seat, dict):
        raise _invalid("a seat is not an object")
    lease_s: Any = seat.get("lease_s")
    # NaN fails every comparison, so the condition must be written this way round.
    if type(lease_s) not in (int, float) or not 0 < lease_s <= LEASE_S_MAX:
        raise _invalid(f"a lease of {lease_s!r} seconds")
    return Seat(
        id=_name(seat, "id"),
        member_id=_name(seat, "member"),
        heartbeat=_count(seat, "heartbeat"),
        lease_s=float(lease_s),
        is_replaced=_get(seat, "replaced", bool),
    )


# --- the document in the bucket -------------------------------------------------------------------------------------


ANSWER_S_MAX = 4.0
"""If a server is silent for longer, give up: better than waiting until the lease has run out."""

_ALREADY_THERE = frozenset({Status.KEY_EEXISTS, Status.NOT_STORED})
_CHANGED_OR_GONE = frozenset({Status.KEY_EEXISTS, Status.KEY_ENOENT})
_NOT_THERE = frozenset({Status.KEY_ENOENT})


def group_bucket(settings: ClientSettings, *, vbuckets: int) -> GroupBucket:
    """Describe a client's bucket for a group that shares it."""
    known = settings.timeouts
    short = Timeouts(connect_s=min(known.connect_s, ANSWER_S_MAX), answer_s=min(known.answer_s, ANSWER_S_MAX))

    def open_document(key: bytes, collection: str | None) -> KvDocument:
        # No retries here: a group retries by itself, and reads the document each time.
        return KvDocument(BucketKv(replace(settings, timeouts=short), retry_s_max=0), key, collection)

    return GroupBucket(vbuckets=vbuckets, open_document=open_document)


class KvDocument:
    """A `DocumentPort` over key-value requests."""

    def __init__(self, kv: KvPort, key: bytes, collection: str | None = None) -> None:
        self._kv = kv
        self._key = key
        self._collection = collection
        self._fields: dict[str, Any] | None = None

    async def read(self) -> StoredDocument | None:
        answer = await self._ask(lambda fields: Get(**fields), none_for=_NOT_THERE)
        if answer is None:
            return None
        assert isinstance(answer, GetResponse)
        return StoredDocument(answer.value, answer.cas)

    async def add(self, value: bytes) -> Cas | None:
        answer = await self._ask(lambda fields: Add(**fields, value=value), none_for=_ALREADY_THERE)
        return None if answer is None else answer.cas

    async def replace(self, value: bytes, cas: Cas) -> Cas | None:
        answer = await self._ask(lambda fields: Replace(**fields, value=value, cas=cas), none_for=_CHANGED_OR_GONE)
        return None if answer is None else answer.cas

    async def close(self) -> None:
        await self._kv.close()

    async def _ask(
        self, make_request: Callable[[dict[str, Any]], Request], *, none_for: frozenset[Status]
    ) -> Response | None:
        """Return the answer, or None for the statuses in `none_for`. Raises any other refusal."""
        fields = await self._location()
        (answer,) = await self._kv.request([make_request(fields)])
        if isinstance(answer, Response):
            return answer
        # `UnknownBucket`, from a connection that was reopened, has the same status as a missing document.
        if isinstance(answer, UnknownBucket) or answer.status not in none_for:
            raise answer
        return None

    async def _location(self) -> dict[str, Any]:
        """Return the fields that all requests for the document share. The first call looks up the collection."""
        if self._fields is None:
            vbuckets = (await self._kv.cluster_map()).vbuckets
            try:
                collection_id = await self._kv.collection_id(self._collection)
            except (UnknownCollection, UnknownScope) as error:
                raise error.reworded(f"there is no collection {self._collection!r} for the group's document") from error
            self._fields = {
                "key": self._key,
                "vbucket": vbucket_of(self._key, vbuckets),
                "collection_id": collection_id,
            }
        return self._fields

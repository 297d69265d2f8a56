"""The position of a consumer in every vbucket of a bucket, and its text form.

The text is JSON in ASCII, and equal offsets always give the same bytes:

    {"version":1,"bucket_uuid":"5ab1…","offsets":[[0,"187031423418927",120,100],[1,"9213372036854775808",7,0,9],…]}

There is a row for each vbucket, in order: the vbucket, its vbuuid, the seqno, the start of the snapshot, its end if
the seqno has not reached it, and then the purge seqno if the seqno is below it. Vbuuids have up to 64 bits, but
programs that read JSON numbers as doubles, as JavaScript does, keep only 53 of them. So a vbuuid is a string of
decimal digits, which is how servers show it, and so is a seqno if one should ever exceed 2**53 - 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headwater.errors import CheckpointOfOtherBucket, InvalidOffsets, LocalProtocolError, OffsetsTooNew
from headwater.phrases import counted
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

VERSION = 1

VBUCKETS_MAX = 0x10000
"""The 16 bits of a request's header can name this many."""
BUCKET_UUID_CHARS_MAX = 128
"""Couchbase's UUIDs have 32."""
TEXT_CHARS_MAX = 8 * 1024 * 1024
"""Larger than any text that the other limits allow."""

_U64_MAX = 2**64 - 1
_EXACT_MAX = 2**53 - 1
"""The largest integer that a double, and so JavaScript, can distinguish from its neighbours."""
_DIGITS = re.compile(r"0|[1-9][0-9]{0,19}", re.ASCII)
_MEMBERS = frozenset({"version", "bucket_uuid", "offsets"})
_HINT = "Give the whole text as `to_json` has made it, or bring it back from a backup"


@dataclass(frozen=True, slots=True, repr=False)
class Offsets:
    """The position of a consumer in a bucket, to resume from. It is immutable; `updated` makes a new one.

    A vbucket without an entry has not been read yet.
    """

    bucket_uuid: str
    """Seqnos are valid only in this bucket, not in a later one with the same name."""
    offsets: Mapping[VBucketId, StreamOffset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.bucket_uuid) > BUCKET_UUID_CHARS_MAX or not self.bucket_uuid.isprintable():
            raise _invalid(f"the uuid of a bucket is not up to {BUCKET_UUID_CHARS_MAX} printable characters")
        copied = dict(self.offsets)
        _check_ranges(copied)
        object.__setattr__(self, "offsets", MappingProxyType(copied))

    def __repr__(self) -> str:
        seqnos = [offset.seqno for offset in self.offsets.values()]
        upto = f", up to seqno {max(seqnos)}" if seqnos else ""
        return f"<Offsets of {counted(len(seqnos), 'vbucket')}{upto}, bucket {self.bucket_uuid}>"

    # --- looking --------------------------------------------------------------------------------------------------

    @property
    def vbuckets(self) -> tuple[VBucketId, ...]:
        """The vbuckets that have been read, sorted."""
        return tuple(sorted(self.offsets))

    def __getitem__(self, vbucket: VBucketId) -> StreamOffset:
        return self.offsets[vbucket]

    def get(self, vbucket: VBucketId) -> StreamOffset | None:
        return self.offsets.get(vbucket)

    def __contains__(self, vbucket: object) -> bool:
        return vbucket in self.offsets

    def __iter__(self) -> Iterator[VBucketId]:
        return iter(self.vbuckets)

    def check_bucket(self, bucket_uuid: str) -> None:
        """Raise `CheckpointOfOtherBucket` if these offsets belong to another bucket than this."""
        if self.bucket_uuid != bucket_uuid:
            raise CheckpointOfOtherBucket(
                f"the checkpoint belongs to the bucket with uuid {self.bucket_uuid!r}, and this one has "
                f"{bucket_uuid!r}",
                hint="Name the bucket of the checkpoint; if that was deleted and created again, start from the "
                "beginning with a new checkpoint",
            )

    # --- moving on ------------------------------------------------------------------------------------------------

    def updated(self, changes: Mapping[VBucketId, StreamOffset]) -> Offsets:
        """Return a copy with other offsets for some vbuckets. Raises `InvalidOffsets` if a number is out of range."""
        _check_ranges(changes)
        # Skip the checks in `__init__`, which the old offsets have passed: this runs for every batch.
        made = object.__new__(Offsets)
        object.__setattr__(made, "bucket_uuid", self.bucket_uuid)
        object.__setattr__(made, "offsets", MappingProxyType({**self.offsets, **changes}))
        return made

    # --- to and from text -----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the text that `from_json` reads. Equal offsets give equal texts."""
        rows = ",".join(_encode_row(vbucket, self.offsets[vbucket]) for vbucket in self.vbuckets)
        return f'{{"version":{VERSION},"bucket_uuid":{json.dumps(self.bucket_uuid)},"offsets":[{rows}]}}'

    @classmethod
    def from_json(cls, text: str) -> Offsets:
        """Decode the text of `to_json`. Raises `InvalidOffsets` for any other text, `OffsetsTooNew` for a newer one."""
        if len(text) > TEXT_CHARS_MAX:
            raise _invalid(f"the text has more than {TEXT_CHARS_MAX} characters")
        try:
            root = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid("the text is not JSON") from error
        _check_version(root)
        if root.keys() != _MEMBERS:
            raise _invalid(f"the members of the text are not {', '.join(sorted(_MEMBERS))}")
        bucket_uuid, rows = root["bucket_uuid"], root["offsets"]
        if not isinstance(bucket_uuid, str) or not isinstance(rows, list):
            raise _invalid("the bucket's uuid is not a string, or the offsets are not a list")
        if len(rows) > VBUCKETS_MAX:
            raise _invalid(f"there are {len(rows)} vbuckets, and a bucket has at most {VBUCKETS_MAX}")
        offsets = dict(map(_decode_row, rows))
        if len(offsets) != len(rows):
            raise _invalid("a vbucket is there twice")
        return cls(bucket_uuid, offsets)

    # --- what a read-only mapping does not support ----------------------------------------------------------------

    def __hash__(self) -> int:
        return hash((self.bucket_uuid, frozenset(self.offsets.items())))

    def __reduce__(self) -> tuple[Callable[..., Offsets], tuple[object, ...]]:
        return Offsets, (self.bucket_uuid, dict(self.offsets))


def _invalid(reason: str) -> InvalidOffsets:
    return InvalidOffsets(f"the offsets can't be used: {reason}", hint=_HINT)


def _check_ranges(offsets: Mapping[VBucketId, StreamOffset]) -> None:
    for vbucket, offset in offsets.items():
        if not 0 <= vbucket < VBUCKETS_MAX:
            raise _invalid(f"there is no vbucket {vbucket}")
        # `StreamOffset` ensures that the seqno lies between these two.
        is_small = offset.snapshot_end <= _U64_MAX and 0 <= offset.purge_seqno <= _U64_MAX
        if not (0 <= offset.vbuuid <= _U64_MAX and offset.snapshot_start >= 0 and is_small):
            raise _invalid(f"a number of vbucket {vbucket} does not fit into 64 bits")


def _check_version(root: Any) -> None:
    version = root.get("version") if isinstance(root, dict) else None
    if type(version) is not int or version < 1:
        raise _invalid("the text has no version")
    if version > VERSION:
        raise OffsetsTooNew(
            f"the offsets have version {version}, and this program supports versions up to {VERSION}",
            hint="Use the version of Headwater that wrote them, or a newer one",
        )


def _encode_row(vbucket: VBucketId, offset: StreamOffset) -> str:
    row = f'[{vbucket},"{offset.vbuuid}",{_encode_seqno(offset.seqno)},{_encode_seqno(offset.snapshot_start)}'
    if offset.purge_seqno:
        return f"{row},{_encode_seqno(offset.snapshot_end)},{_encode_seqno(offset.purge_seqno)}]"
    return f"{row}]" if offset.is_complete else f"{row},{_encode_seqno(offset.snapshot_end)}]"


def _encode_seqno(seqno: Seqno) -> str:
    return str(seqno) if seqno <= _EXACT_MAX else f'"{seqno}"'


def _decode_row(row: Any) -> tuple[VBucketId, StreamOffset]:
    if not isinstance(row, list) or len(row) not in (4, 5, 6) or type(row[0]) is not int:
        raise _invalid("a row is not a vbucket with its vbuuid, seqno and snapshot")
    vbucket, vbuuid, seqno, start = row[0], *map(_decode_number, row[1:4])
    end = _decode_number(row[4]) if len(row) > 4 else seqno
    purge_seqno = _decode_number(row[5]) if len(row) > 5 else 0
    try:
        offset = StreamOffset(
            vbuuid=Vbuuid(vbuuid),
            seqno=Seqno(seqno),
            snapshot_start=Seqno(start),
            snapshot_end=Seqno(end),
            purge_seqno=Seqno(purge_seqno),
        )
    except LocalProtocolError as error:
        raise _invalid(f"in vbucket {vbucket}, {error.reason}") from error
    return VBucketId(vbucket), offset


def _decode_number(value: Any) -> int:
    # In Python, True is an int; in JSON it is not a number.
    if type(value) is int:
        return value
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    raise _invalid("what should be a number is not")

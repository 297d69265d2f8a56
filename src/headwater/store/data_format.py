"""Keys and values of the tables, and the version of the format.

Bump `FORMAT_VERSION` whenever data written by this program could be misread by an older one.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from headwater.errors import DataDamaged, DataTooNew, HeadwaterError, MalformedSnappy, StoreError
from headwater.kernels.memory import u32
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import HEADER_BYTES, decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.values import Datatype, decompress, decompressed_bytes
from headwater.store.checksums import crc32c

FORMAT_VERSION = 3
"""The only version that is read: 1 and 2, which had no checksums, were never released."""
VBUCKETS_MAX = 1024

BUCKET_FACTS = b"facts"
CLEAN_STOP = b"clean-stop"
"""This row exists only while the bucket is closed, and only if it was closed in order."""
MANIFEST = b"manifest"

_RESTORE = "Restore a backup, or start the node on an empty data folder and add it to its cluster again"
_SNAPPY_LENGTH_BYTES_MAX = 5
"""A number of 32 bits, with seven bits in a byte."""
_COMMIT_KEY = struct.Struct(">Q")
_BLOCK_KEY = struct.Struct(">HQ")
_VBUCKET_KEY = struct.Struct(">H")


def commit_key(number: int) -> bytes:
    return _COMMIT_KEY.pack(number)


def commit_number(key: bytes) -> int:
    return _number_in(key, _COMMIT_KEY)


def block_key(vbucket: int, last_seqno: int) -> bytes:
    return _BLOCK_KEY.pack(vbucket, last_seqno)


def block_last_seqno(key: bytes) -> Seqno:
    return Seqno(_number_in(key, _BLOCK_KEY))


def vbucket_of_block(key: bytes) -> VBucketId:
    _number_in(key, _BLOCK_KEY)
    return VBucketId(int.from_bytes(key[:2]))


def vbucket_key(vbucket: int) -> bytes:
    return _VBUCKET_KEY.pack(vbucket)


def vbucket_of_key(key: bytes) -> VBucketId:
    return VBucketId(_number_in(key, _VBUCKET_KEY))


def _number_in(key: bytes, layout: struct.Struct) -> int:
    """The last number of a key."""
    if len(key) != layout.size:
        raise DataDamaged(f"a row has a key of {len(key)} bytes, not {layout.size}", hint="Restore the data")
    number: int = layout.unpack(key)[-1]
    return number


def blocks_of(vbucket: int, *, from_seqno: int = 0) -> tuple[bytes, bytes]:
    """Return the range of a vbucket's blocks, from the one that holds `from_seqno` on."""
    return block_key(vbucket, from_seqno), block_key(vbucket, 2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFacts:
    """What identifies a bucket, fixed when it is created."""

    name: str
    uuid: str
    vbuckets: int

    def encode(self) -> bytes:
        facts = {"version": FORMAT_VERSION, "name": self.name, "uuid": self.uuid, "vbuckets": self.vbuckets}
        facts["crc32c"] = _crc_of(facts)
        return json.dumps(facts).encode()

    @classmethod
    def decode(cls, value: bytes | memoryview) -> BucketFacts:
        facts = _members(value)
        # Check the checksum in any version that has one: a version that the disk has changed must not be trusted.
        if facts.get("version") == FORMAT_VERSION or "crc32c" in facts:
            found = facts.pop("crc32c", None)
            if found != _crc_of(facts):
                raise DataDamaged("the checksum of the bucket's facts does not fit", hint=_RESTORE)
        version = facts.get("version")
        if not _is_number(version) or version < 1:
            raise DataDamaged("the bucket's facts have no version", hint="Restore the data from a backup")
        if version < FORMAT_VERSION:
            raise StoreError(
                f"the data has format {version}, which no release has written", hint="Start on an empty data folder"
            )
        if version > FORMAT_VERSION:
            raise DataTooNew(
                f"the data has format {version}, this program reads up to {FORMAT_VERSION}",
                hint="Use the version of Headwater that wrote it, or a newer one",
            )
        name, uuid, vbuckets = facts.get("name"), facts.get("uuid"), facts.get("vbuckets")
        if not (isinstance(name, str) and isinstance(uuid, str) and _is_number(vbuckets)) or (
            not 1 <= vbuckets <= VBUCKETS_MAX
        ):
            raise DataDamaged("the bucket's facts are damaged", hint="Restore the data from a backup")
        return cls(name=name, uuid=uuid, vbuckets=vbuckets)


RISING_FACTS = (
    "purge_seqno", "history_start_seqno", "high_seqno_floor", "visible_seqno_floor", "completed_seqno_floor",
    "max_cas_floor", "deleted_rev_floor",
)  # fmt: skip
"""The numbers of a vbucket's facts that compaction only ever raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketFacts:
    """What is stored about a vbucket beside its changes."""

    state: VBucketState
    failover_log: FailoverLog
    purge_seqno: Seqno = Seqno(0)
    history_start_seqno: Seqno = Seqno(0)
    """Every version after this seqno is still stored, so a rollback to it or later is exact."""
    snapshot_start_seqno: Seqno = Seqno(0)
    snapshot_end_seqno: Seqno = Seqno(0)
    """The snapshot a replica was receiving; meaningful in a replica only."""
    high_seqno_floor: Seqno = Seqno(0)
    """A high seqno that the changes alone would not show, because the last ones were purged."""
    visible_seqno_floor: Seqno = Seqno(0)
    completed_seqno_floor: Seqno = Seqno(0)
    """The same for the last change that is neither a prepare nor an abort, and for the last decided prepare."""
    max_cas_floor: int = 0
    deleted_rev_floor: int = 0
    """The highest revision of a deleted document, which purged ones no longer show."""
    topology: tuple[Any, ...] | None = field(default=None)

    def encode(self) -> bytes:
        members = {
            "state": int(self.state),
            "failover_log": [[entry.vbuuid, entry.seqno] for entry in self.failover_log.entries],
            "snapshot": [self.snapshot_start_seqno, self.snapshot_end_seqno],
            "topology": self.topology,
        }
        return json.dumps(members | {name: getattr(self, name) for name in RISING_FACTS}).encode()

    @classmethod
    def decode(cls, value: bytes | memoryview) -> VBucketFacts:
        members = _members(value)
        try:
            entries = [
                FailoverEntry(vbuuid=Vbuuid(_u64(vbuuid)), seqno=Seqno(_u64(seqno)))
                for vbuuid, seqno in members["failover_log"]
            ]
            snapshot_start, snapshot_end = (Seqno(_u64(seqno)) for seqno in members["snapshot"])
            state, topology = VBucketState(_u64(members["state"])), members["topology"]
            rising: dict[str, Any] = {name: _u64(members[name]) for name in RISING_FACTS}
            if not state.is_known:
                raise ValueError(f"{state} is not a state")
            return cls(
                state=state,
                failover_log=FailoverLog.of(entries),
                snapshot_start_seqno=snapshot_start,
                snapshot_end_seqno=snapshot_end,
                topology=None if topology is None else tuple(topology),
                **rising,
            )
        except (KeyError, TypeError, ValueError, HeadwaterError) as error:
            raise DataDamaged(f"the facts of a vbucket are damaged: {error!r}", hint="Restore the data") from error


def _crc_of(facts: dict[str, Any]) -> int:
    """Return the checksum of the bucket's facts, whatever the order of their members."""
    return int(crc32c(np.frombuffer(json.dumps(facts, sort_keys=True).encode(), dtype=np.uint8), u32(0)))


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _u64(value: object) -> int:
    if not _is_number(value) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a number of 64 bits")
    return value


def _members(value: bytes | memoryview) -> dict[str, Any]:
    try:
        members = json.loads(bytes(value))
    except (ValueError, RecursionError) as error:
        raise DataDamaged(f"a stored fact is not JSON: {error}", hint="Restore the data from a backup") from error
    if not isinstance(members, dict):
        raise DataDamaged("a stored fact is not an object", hint="Restore the data from a backup")
    return members


# --- documents ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the index holds about a document."""

    seqno: Seqno
    cas: Cas
    rev_seqno: int
    expiry: int
    commit: int
    """The low 32 bits of the commit's number."""
    is_deleted: bool
    is_locked: bool = False
    has_xattrs: bool = False


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
    packed: bytes | None = None
    """The stored value, if it is compressed. `value` is always inflated, and `datatype` is without Snappy."""

    @property
    def stored_value(self) -> bytes:
        return self.value if self.packed is None else self.packed

    @property
    def stored_datatype(self) -> Datatype:
        return self.datatype if self.packed is None else self.datatype | Datatype.SNAPPY


def decode_stored(frame: bytes | memoryview) -> Message:
    """Return the message in a stored frame."""
    decoded = decode_frame(frame)
    assert decoded is not None, "stored frames are whole"
    return decode_message(decoded[0], WITH_COLLECTIONS)


def inflated_bytes(frame: memoryview) -> int:
    """Return the length of a stored frame's value when it is inflated; 0 if it is not compressed."""
    if not frame[5] & Datatype.SNAPPY:
        return 0
    value_at = HEADER_BYTES + frame[4] + int.from_bytes(frame[2:4])
    with suppress(MalformedSnappy):
        return decompressed_bytes(bytes(frame[value_at : value_at + _SNAPPY_LENGTH_BYTES_MAX]))
    return 0


def decode_document(frame: bytes | memoryview) -> Document:
    """Return the document in a stored frame."""
    change = decode_stored(frame)
    assert isinstance(change, Mutation | Deletion | Expiration), "only changes of documents are read back"
    assert change.collection_id is not None
    mutation = change if isinstance(change, Mutation) else None
    value, packed = change.value, None
    if change.datatype & Datatype.SNAPPY:
        # A copy from a server that did not check its values may hold one that is not Snappy: then it is plain bytes.
        with suppress(MalformedSnappy):
            value, packed = decompress(change.value), change.value
    return Document(
        collection_id=change.collection_id,
        key=change.key,
        value=value,
        datatype=change.datatype & ~Datatype.SNAPPY,
        flags=mutation.flags if mutation else 0,
        expiry=mutation.expiry if mutation else 0,
        cas=change.cas,
        seqno=change.seqno,
        rev_seqno=change.rev_seqno,
        is_deleted=mutation is None,
        delete_time=0 if isinstance(change, Mutation) else change.delete_time or 0,
        packed=packed,
    )

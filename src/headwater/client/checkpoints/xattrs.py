"""A checkpoint in the bucket that is read, so that a consumer needs no store of its own.

Each vbucket has a document with the offset in an extended attribute, `headwater`:

    {"writer":"9f86d081884c7d65","checkpoint":{"version":1,"bucket_uuid":"…","offsets":[[VBUCKET,…]]}}

Each vbucket has its own document, because the members of a group save disjoint vbuckets and would conflict in a shared
one. Offsets that have not moved are not written. And each document lies in the vbucket that it is about, under a key
computed for that (`checkpoint_key`), which has two advantages:

* A save is itself a change in the bucket, which the reader receives and which moves an offset. If that were the offset
  of another vbucket, it would have to be saved too, and a group on an idle bucket would save forever. Here it is the
  same vbucket, the server returns the seqno of the save, and an offset that has moved by only that change needs no
  save. A vbucket without other writers comes to rest after one save.
* The save follows the changes it covers in the same history. So that history never ends before its checkpoint,
  whichever replica takes over.

The document's CAS detects a second reader. A reader overwrites only what it has read or written itself. If it finds
anything else, another reader saves the same vbucket, and it gets `CheckpointInUse`. By `writer` a reader recognizes
its own writes, because a write whose answer was lost also changes the CAS.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from headwater import errors
from headwater.client.bucket_kv import BucketKv, KvPort
from headwater.client.checkpoints import damaged, read_offsets
from headwater.client.cluster_map import ClusterMap, vbucket_of
from headwater.client.offsets import Offsets
from headwater.client.settings import ClientSettings
from headwater.options import suggest_keywords
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.subdocument import DocFlags, PathFlags, SubdocDictUpsert, SubdocGet, SubdocResponse
from headwater.protocol.numbers import Cas, CollectionId, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status

# --- keys -----------------------------------------------------------------------------------------------------------
#
# Each document lies in the vbucket that it is about. Its key is:
#
#     _headwater:checkpoint:GROUP:VBUCKET:NUMBER
#
# A key's vbucket derives from its CRC32, so NUMBER, always five digits, is the lowest that puts the key into the right
# vbucket. Trying numbers one by one would take half a second for 1,024 vbuckets. But CRC is linear: for two prefixes,
# the checksums with the same suffix always differ by the same bits, whatever the suffix of that length is. So the
# checksums of all numbers are computed once, and those with a prefix differ from them by a constant.


KEY_PREFIX = b"_headwater:checkpoint:"
"""The keys of all groups' checkpoints begin with this. They appear in streams; readers can filter them out by it."""

GROUP_BYTES_MAX = 200
"""With the other parts, a key stays below the 250 bytes that servers allow."""

_NUMBERS = 100_000
_HASHES = 0x8000
"""Vbuckets derive from this many values of a key's checksum: see `vbucket_of`."""


def checkpoint_key(group: str, vbucket: VBucketId, vbuckets: int) -> bytes:
    """Return the key of a vbucket's document, in a bucket with `vbuckets` vbuckets."""
    beginning = KEY_PREFIX + b"%s:%d:" % (group.encode(), vbucket)
    difference = _hash(zlib.crc32(_ending(0), zlib.crc32(beginning))) ^ _hash(zlib.crc32(_ending(0)))
    lowest = _lowest_numbers()
    number = min((lowest[value ^ difference] for value in range(vbucket, _HASHES, vbuckets)), default=_NUMBERS)
    if number == _NUMBERS:
        raise errors.CheckpointFailed(
            f"there is no key for the checkpoint of vbucket {vbucket} of {vbuckets}", hint="Use a file instead"
        )
    key = beginning + _ending(number)
    assert vbucket_of(key, vbuckets) == vbucket
    return key


@cache
def _lowest_numbers() -> list[int]:
    """For each hash of the digits alone, the lowest number with it; `_NUMBERS` if there is none."""
    lowest = [_NUMBERS] * _HASHES
    for number in reversed(range(_NUMBERS)):
        lowest[_hash(zlib.crc32(_ending(number)))] = number
    return lowest


def _ending(number: int) -> bytes:
    return b"%05d" % number


def _hash(checksum: int) -> int:
    return checksum >> 16 & 0x7FFF


XATTR = b"headwater"
"""Not a system attribute (these start with an underscore), which would need extra privileges."""

ATTEMPTS_MAX = 5
"""How often one save may find a document changed by something other than another reader's save."""

_UNREAD = StreamOffset()
_TO_START_OVER = "delete the document"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A vbucket's document, as it was last read or written."""

    cas: Cas = Cas(0)
    """0 if there is no document."""
    writer: str = ""
    offset: StreamOffset = _UNREAD
    saved_as: tuple[int, int] | None = None
    """The vbuuid and the seqno of the save itself, if this object made it."""

    def covers(self, offset: StreamOffset) -> bool:
        """Whether resuming from the stored offset is equivalent: only our own save lies in between."""
        if offset == self.offset:
            return True
        return offset.seqno == self.offset.seqno + 1 and self.saved_as == (offset.vbuuid, offset.seqno)

    def is_by_same_save(self, other: _Stored) -> bool:
        return (self.writer, self.offset) == (other.writer, other.offset)


_NOTHING_STORED = _Stored()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """Where the documents are. The keys depend on the bucket's number of vbuckets."""

    cluster_map: ClusterMap
    collection_id: CollectionId | None
    keys: tuple[bytes, ...]


@suggest_keywords
class XattrCheckpoint:
    """Keeps offsets in documents of the bucket that is read.

    Args:
        kv: The settings of a client, `client.settings`, or any other `KvPort`.
        group: The name of the consumer. All members of a group use the same name, and each saves the vbuckets that it
            reads.
        collection: The collection of the documents, as `scope.collection`, or None for the default one.

    The documents' bodies are `{}`. They appear in streams and queries, with keys that start with `KEY_PREFIX`. The
    collection must not have a time to live: if a checkpoint expires, its vbucket is read from the beginning.

    A save is atomic for each vbucket, not for all together: if it fails, each has its old offset or its new one.

    A failover that loses changes also loses the checkpoints that were saved after them. The reader then resumes from
    an older offset, and gets no rollback for the lost changes that it has processed. If that matters, read with
    `mitigate_rollbacks=True`, or keep the offsets elsewhere.
    """

    def __init__(self, kv: KvPort | ClientSettings, *, group: str, collection: str | None = None) -> None:
        if not group.isprintable() or {" ", ":"} & {*group} or not 0 < len(group.encode()) <= GROUP_BYTES_MAX:
            raise errors.InvalidInput(
                f"{group[:GROUP_BYTES_MAX]!r} is not a valid name for a group",
                hint=f"Use 1 to {GROUP_BYTES_MAX} bytes without spaces and colons",
            )
        self.group = group
        self._kv = BucketKv(kv) if isinstance(kv, ClientSettings) else kv
        self._collection = collection
        self._writer = secrets.token_hex(8)
        self._location: _Location | None = None
        self._stored: dict[VBucketId, _Stored] = {}

    def __repr__(self) -> str:
        return f"<XattrCheckpoint of the group {self.group!r}>"

    async def load(self, vbuckets: Iterable[VBucketId] | None = None) -> Offsets | None:
        """Return the offsets that were saved last, of some vbuckets or of all; None if nothing was saved.

        From now on, this reader may overwrite what it found.
        """
        location = await self._locate()
        wanted = range(location.cluster_map.vbuckets) if vbuckets is None else vbuckets
        found = await self._look_at(location, sorted(map(VBucketId, wanted)))
        self._stored |= found
        offsets = {vbucket: stored.offset for vbucket, stored in found.items() if stored.cas}
        return Offsets(location.cluster_map.uuid, offsets) if offsets else None

    async def save(self, offsets: Offsets) -> None:
        """Write the offsets that have moved."""
        location = await self._locate()
        offsets.check_bucket(location.cluster_map.uuid)
        new = [vbucket for vbucket in offsets.vbuckets if vbucket not in self._stored]
        self._stored |= await self._look_at(location, new)
        due = [vbucket for vbucket in offsets.vbuckets if not self._stored[vbucket].covers(offsets[vbucket])]
        for _ in range(ATTEMPTS_MAX):
            due = await self._write(location, offsets, due)
            if not due:
                return
            await self._check_changed(location, due)
        raise self._in_use(due[0])

    async def close(self) -> None:
        """Close the connections. A later load reads the bucket again."""
        self._location = None
        self._stored.clear()
        await self._kv.close()

    # --- reading --------------------------------------------------------------------------------------------------

    async def _locate(self) -> _Location:
        if self._location is None:
            try:
                cluster_map = await self._kv.cluster_map()
                collection_id = await self._kv.collection_id(self._collection)
            except errors.HeadwaterError as error:
                raise self._failed("reached", error) from error
            keys = await asyncio.to_thread(self._keys, cluster_map.vbuckets)
            self._location = _Location(cluster_map=cluster_map, collection_id=collection_id, keys=keys)
        return self._location

    def _keys(self, vbuckets: int) -> tuple[bytes, ...]:
        return tuple(checkpoint_key(self.group, VBucketId(vbucket), vbuckets) for vbucket in range(vbuckets))

    async def _look_at(self, location: _Location, vbuckets: Sequence[VBucketId]) -> dict[VBucketId, _Stored]:
        """Read the documents of some vbuckets."""
        if unknown := [vbucket for vbucket in vbuckets if not 0 <= vbucket < len(location.keys)]:
            raise errors.InvalidOffsets(
                f"there is no vbucket {unknown[0]}: the bucket has {len(location.keys)}",
                hint="Check that the offsets belong to this bucket",
            )
        requests = [
            SubdocGet(
                vbucket=vbucket,
                collection_id=location.collection_id,
                key=location.keys[vbucket],
                flags=PathFlags.XATTR,
                path=XATTR,
            )
            for vbucket in vbuckets
        ]
        answers = await self._ask("read", requests)
        return {
            vbucket: self._decode(location, vbucket, answer) for vbucket, answer in zip(vbuckets, answers, strict=True)
        }

    def _decode(self, location: _Location, vbucket: VBucketId, answer: Response | errors.StatusError) -> _Stored:
        # A missing bucket has the same status as a missing document.
        if isinstance(answer, errors.KeyNotFound) and not isinstance(answer, errors.UnknownBucket):
            return _NOTHING_STORED
        what = f"the checkpoint in document {location.keys[vbucket].decode()!r}"
        if isinstance(answer, errors.StatusError):
            if answer.status == Status.SUBDOC_PATH_ENOENT:
                raise damaged(what, "the attribute is missing", to_start_over=_TO_START_OVER) from answer
            raise self._failed("read", answer) from answer
        assert isinstance(answer, SubdocResponse)
        writer, offsets = _decode_xattr(answer.value, what)
        offsets.check_bucket(location.cluster_map.uuid)
        if offsets.vbuckets != (vbucket,):
            raise damaged(what, "it is of another vbucket", to_start_over=_TO_START_OVER)
        return _Stored(cas=answer.cas, writer=writer, offset=offsets[vbucket])

    # --- writing --------------------------------------------------------------------------------------------------

    async def _write(self, location: _Location, offsets: Offsets, vbuckets: Sequence[VBucketId]) -> list[VBucketId]:
        """Save some vbuckets. Returns those whose documents changed since they were last seen."""
        requests = [self._save_request(location, offsets, vbucket) for vbucket in vbuckets]
        answers = await self._ask("written", requests)
        changed: list[VBucketId] = []
        refusal: errors.StatusError | None = None
        for vbucket, answer in zip(vbuckets, answers, strict=True):
            if isinstance(answer, SubdocResponse):
                saved_as = None if answer.vbuuid is None or answer.seqno is None else (answer.vbuuid, answer.seqno)
                self._stored[vbucket] = _Stored(
                    cas=answer.cas, writer=self._writer, offset=offsets[vbucket], saved_as=saved_as
                )
            elif isinstance(answer, errors.KeyExists | errors.KeyNotFound):
                changed.append(vbucket)
            else:
                assert isinstance(answer, errors.StatusError)
                refusal = refusal or answer
        if refusal is not None:
            raise self._failed("written", refusal) from refusal
        return changed

    def _save_request(self, location: _Location, offsets: Offsets, vbucket: VBucketId) -> Request:
        cas = self._stored[vbucket].cas
        alone = Offsets(offsets.bucket_uuid, {vbucket: offsets[vbucket]})
        return SubdocDictUpsert(
            vbucket=vbucket,
            cas=cas,
            collection_id=location.collection_id,
            key=location.keys[vbucket],
            flags=PathFlags.XATTR,
            doc_flags=None if cas else DocFlags.ADD,
            path=XATTR,
            new_value=f'{{"writer":"{self._writer}","checkpoint":{alone.to_json()}}}'.encode(),
        )

    async def _check_changed(self, location: _Location, vbuckets: Sequence[VBucketId]) -> None:
        """Read changed documents again, and continue unless another reader has saved them.

        The change may be our own write whose answer was lost, or a deletion, or a change of another part.
        """
        for vbucket, stored in (await self._look_at(location, vbuckets)).items():
            is_ours = stored.writer == self._writer or stored.is_by_same_save(self._stored[vbucket])
            if stored.cas and not is_ours:
                raise self._in_use(vbucket)
            self._stored[vbucket] = stored

    # --- both -----------------------------------------------------------------------------------------------------

    async def _ask(self, done: str, requests: Sequence[Request]) -> list[Response | errors.StatusError]:
        if not requests:
            return []
        try:
            return await self._kv.request(requests)
        except errors.CheckpointError:
            raise
        except errors.HeadwaterError as error:
            raise self._failed(done, error) from error

    def _failed(self, done: str, error: errors.HeadwaterError) -> errors.CheckpointFailed:
        return errors.CheckpointFailed(
            f"the checkpoint of group {self.group!r} can't be {done}: {error.reason}", hint=error.hint
        )

    def _in_use(self, vbucket: VBucketId) -> errors.CheckpointInUse:
        return errors.CheckpointInUse(
            f"another reader has saved vbucket {vbucket} of group {self.group!r}",
            hint="Stop it, give this one its own group, or load the checkpoint again and resume from there",
        )


def _decode_xattr(text: bytes, what: str) -> tuple[str, Offsets]:
    try:
        root = json.loads(text)
        writer, checkpoint = str(root["writer"]), json.dumps(root["checkpoint"])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise damaged(what, "the attribute is not what was written", to_start_over=_TO_START_OVER) from error
    return writer, read_offsets(checkpoint.encode(), what=what, to_start_over=_TO_START_OVER)

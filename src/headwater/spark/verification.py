"""Is the table the bucket? Digests of every vbucket of both, at the same place in its history. No Spark is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from headwater.client.blocking_client import Client
from headwater.client.bucket_view import look_at_bucket
from headwater.client.client_settings import ClientSettings
from headwater.client.collection_names import CollectionNames
from headwater.client.offsets import Offsets
from headwater.client.read_options import End, ReadOptions
from headwater.client.survey import Surveyor
from headwater.errors import InvalidInput, UnknownCollection, UnknownScope
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.lake.digests import ChangeDigester, VBucketDigests, digest_documents
from headwater.spark.lake.lake import Lake
from headwater.spark.own_folder import OwnFolder, Selection

_NOWHERE = StreamOffset()


class Verdict(StrEnum):
    EQUAL = "equal"
    DIFFERS = "differs"
    BEHIND = "behind"
    """The two are at different seqnos, so nothing can be said. Land what is missing, and compare again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketComparison:
    vbucket: int
    verdict: Verdict
    bucket_seqno: int
    table_seqno: int
    bucket_documents: int
    table_documents: int
    bucket_digest: str
    table_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A bucket and its tables, vbucket by vbucket."""

    vbuckets: tuple[VBucketComparison, ...]
    collections: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return all(one.verdict is Verdict.EQUAL for one in self.vbuckets)

    def count(self, verdict: Verdict) -> int:
        return sum(one.verdict is verdict for one in self.vbuckets)

    @property
    def documents(self) -> int:
        return sum(one.bucket_documents for one in self.vbuckets)


def compare(
    settings: ClientSettings, into: str, *, scopes: Iterable[str] = (), collections: Iterable[str] = ()
) -> Comparison:
    """Read the bucket and the tables in a directory, and compare them.

    `scopes` and `collections` are those that were landed; where none are given, the directory tells.
    """
    with Surveyor(settings) as surveyor:
        lake = Lake.open(into, bucket_uuid=surveyor.cluster_map.uuid)
        if lake is None:
            raise InvalidInput(f"{into} holds no tables of a bucket", hint="Give the directory that was landed into")
        selection = Selection(scopes=tuple(scopes), collections=tuple(collections))
        landed = OwnFolder(into).read_selection()
        if selection == Selection():
            selection = landed or selection
        left = _what_is_left(settings, selection, landed)
        digester = ChangeDigester(lake.facts.vbuckets)
        if left is None:
            # Of what was dropped there is nothing in the bucket. The seqnos still have to be the same.
            bucket_seqnos = {vbucket: status.high_seqno for vbucket, status in surveyor.survey().items()}
        else:
            bucket_seqnos = _digest_bucket(settings, left, digester)
    names = sorted(lake.tables)
    of_tables = digest_documents(
        chain.from_iterable(lake.documents_now(name) for name in names), vbuckets=lake.facts.vbuckets
    )
    of_bucket = digester.finish()
    return Comparison(
        vbuckets=tuple(
            _compare_vbucket(VBucketId(vbucket), of_bucket, of_tables, bucket_seqnos, lake.held_offsets())
            for vbucket in range(lake.facts.vbuckets)
        ),
        collections=tuple(names),
    )


def _what_is_left(settings: ClientSettings, selection: Selection, landed: Selection | None) -> Selection | None:
    """What there is still in the bucket of a selection; None for nothing. What was never there raises."""
    if selection == Selection():
        return selection
    names = CollectionNames(look_at_bucket(settings).manifest)
    was_there = landed or Selection()

    def find(look: Callable[[str], object], name: str, known: tuple[str, ...]) -> bool:
        try:
            look(name)
        except (UnknownScope, UnknownCollection):
            if name not in known:
                raise
            return False
        return True

    left = Selection(
        scopes=tuple(name for name in selection.scopes if find(names.find_scope, name, was_there.scopes)),
        collections=tuple(
            name for name in selection.collections if find(names.find_collection, name, was_there.collections)
        ),
    )
    return None if left == Selection() else left


def _digest_bucket(settings: ClientSettings, selection: Selection, digester: ChangeDigester) -> dict[VBucketId, Seqno]:
    """Returns the seqnos that were read to."""
    options = ReadOptions.make(
        end=End.NOW, name="headwater-verify", scopes=selection.scopes, collections=selection.collections
    )
    with Client(settings) as client:
        batches = client.read(options)
        for batch in batches:
            digester.add(batch)
        return {vbucket: offset.seqno for vbucket, offset in batches.offsets.offsets.items()}


def _compare_vbucket(
    vbucket: VBucketId,
    of_bucket: VBucketDigests,
    of_tables: VBucketDigests,
    bucket_seqnos: Mapping[VBucketId, Seqno],
    tables: Offsets,
) -> VBucketComparison:
    bucket_seqno = bucket_seqnos.get(vbucket, Seqno(0))
    table_seqno = (tables.get(vbucket) or _NOWHERE).seqno
    digests = of_bucket.text(vbucket), of_tables.text(vbucket)
    counts = int(of_bucket.counts[vbucket]), int(of_tables.counts[vbucket])
    verdict = Verdict.BEHIND
    if bucket_seqno == table_seqno:
        verdict = Verdict.EQUAL if digests[0] == digests[1] and counts[0] == counts[1] else Verdict.DIFFERS
    return VBucketComparison(
        vbucket=vbucket,
        verdict=verdict,
        bucket_seqno=bucket_seqno,
        table_seqno=table_seqno,
        bucket_documents=counts[0],
        table_documents=counts[1],
        bucket_digest=digests[0],
        table_digest=digests[1],
    )

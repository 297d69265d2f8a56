"""Is the table the bucket? Digests of every vbucket of both, at the same place in its history. No Spark is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from headwater.client.blocking_client import Client
from headwater.client.client_settings import ClientSettings
from headwater.client.offsets import Offsets
from headwater.client.read_options import End, ReadOptions
from headwater.errors import InvalidInput
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.lake.digests import ChangeDigester, VBucketDigests, digest_documents
from headwater.spark.lake.lake import Lake

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

    `scopes` and `collections` are those that were landed, where it was not everything.
    """
    options = ReadOptions.make(end=End.NOW, name="headwater-verify", scopes=scopes, collections=collections)
    with Client(settings) as client:
        lake = Lake.open(into, bucket_uuid=client.bucket_uuid)
        if lake is None:
            raise InvalidInput(f"{into} holds no tables of a bucket", hint="Give the directory that was landed into")
        digester = ChangeDigester(lake.facts.vbuckets)
        batches = client.read(options)
        for batch in batches:
            digester.add(batch)
        bucket_offsets = batches.offsets
    names = sorted(lake.tables)
    of_tables = digest_documents(
        chain.from_iterable(lake.documents_now(name) for name in names), vbuckets=lake.facts.vbuckets
    )
    of_bucket = digester.finish()
    return Comparison(
        vbuckets=tuple(
            _compare_vbucket(VBucketId(vbucket), of_bucket, of_tables, bucket_offsets, lake.held_offsets())
            for vbucket in range(lake.facts.vbuckets)
        ),
        collections=tuple(names),
    )


def _compare_vbucket(
    vbucket: VBucketId, of_bucket: VBucketDigests, of_tables: VBucketDigests, bucket: Offsets, tables: Offsets
) -> VBucketComparison:
    bucket_seqno = (bucket.get(vbucket) or _NOWHERE).seqno
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

"""A bucket in which everything happens, landed step by step: after each the tables are the bucket.

The story ends with a failover. Documents A are on every copy of a vbucket; documents B are on the active copy alone,
and that is lost; the copy that takes over goes on with documents C. Some keys are written in A and again in B, and the
tables get both in one batch. A server then sends the newer version alone, so the older one, which holds again after the
failover, is nowhere in the tables, and has to be read again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headwater.lake.documents_merge import MergeRules
from headwater.lake.layout import folder_name
from headwater.lake.verify import compare
from headwater.landing.tasks import LandedShare, LandShare
from headwater.protocol.snapshots import StreamOffset
from support.driven_source import RunHere, SimulatedLanding
from support.lake_model import table_rows
from support.landings import DEFAULT, LandedBucket, SourceBucket, key_of, run_headwater, value_of

HOTELS = "inventory.hotel"
ROOMS = "inventory.room"
VBUCKET = 2
TRAPS = 5

ODD_KEYS = {
    b"\xff\xfe": b'{"key":"no UTF-8"}',
    b"\\xff\\xfe": b'{"key":"looks like the other one"}',
    "schlüssel ☃".encode(): b'{"key":"beyond ASCII"}',
    b"with\nline\x00and nul": b'{"key":"control characters"}',
    b'\'; DROP TABLE "x" --%': b'{"key":"quotes"}',
    b"k" * 246: b'{"key":"as long as it may be"}',
}
VALUES = {
    b"binary": b"\x00\xff\xfe\x80",
    b"empty": b"",
    b"number": b"17",
    b"text": "nur Text: ☃".encode(),
    b"almost": b'{"cut off":',
    b"spaces": b'{ "a" : [1, 2.50, null] }',
    b"large": b'{"padding":"' + b"x" * 100_000 + b'"}',
}


@pytest.mark.spark_versions("land")
def test_everything_that_happens_to_a_bucket(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    landed = LandedBucket(bucket, spark, tmp_path / "our lake", rules=MergeRules(history=True))
    expected = {**ODD_KEYS, **VALUES, **{b"plain-%d" % number: b'{"n":%d}' % number for number in range(20)}}

    # Documents of all kinds, and collections.
    bucket.put_each(expected)
    bucket.put([b"plain-0"], expected[b"plain-0"], flags=0x02000006)
    bucket.create_scope("inventory")
    old_id = bucket.create_collection(HOTELS)
    bucket.create_collection(ROOMS)
    bucket.put([b"h1", b"h2"], b'{"in":"the first"}', into=HOTELS)
    bucket.put([b"r1"], b'{"room":1}', into=ROOMS)
    landed.land()
    landed.check_equal()
    assert landed.documents(DEFAULT) == expected
    assert landed.documents(HOTELS).keys() == {b"h1", b"h2"}

    # Updates, deletions, expirations; a collection is dropped and another one has its name.
    bucket.put([b"plain-1", b"\xff\xfe", b"empty"], b'{"updated":true}')
    expected |= dict.fromkeys([b"plain-1", b"\xff\xfe", b"empty"], b'{"updated":true}')
    gone = [b"plain-2", b"\\xff\\xfe", b"binary", b"plain-3"]
    bucket.delete(gone[:3])
    bucket.expire([*gone[3:], b"never landed"])
    expected = {key: value for key, value in expected.items() if key not in gone}
    bucket.drop_collection(HOTELS)
    new_id = bucket.create_collection(HOTELS)
    bucket.put([b"h2", b"h3"], b'{"in":"the second"}', into=HOTELS)
    bucket.drop_collection(ROOMS)
    landed.land()
    landed.check_equal()
    assert landed.documents(DEFAULT) == expected
    assert landed.documents(HOTELS) == dict.fromkeys([b"h2", b"h3"], b'{"in":"the second"}')
    assert {row["collection_id"] for row in landed.rows("documents", HOTELS)} == {new_id}
    assert {row["collection_id"] for row in landed.rows("history", HOTELS)} == {old_id, new_id}
    assert landed.documents(ROOMS) == {}
    assert {row["op"] for row in landed.rows("changes")} >= {"deletion", "expiration", "collection_dropped"}

    # A and B come in one batch, and C after the failover.
    traps = bucket.keys("trap", TRAPS, vbucket=VBUCKET)
    doomed = bucket.keys("doomed", 2, vbucket=VBUCKET)
    bucket.put([*traps, *doomed], b'{"wrote":"A"}')
    bucket.put(bucket.keys("in-hotels", 2, vbucket=VBUCKET), b'{"wrote":"A"}', into=HOTELS)
    shared_seqno = bucket.high_seqnos()[VBUCKET]
    bucket.put([*traps, *bucket.keys("b", 3, vbucket=VBUCKET)], b'{"wrote":"B"}')
    bucket.delete(doomed)
    bucket.delete(bucket.keys("in-hotels", 2, vbucket=VBUCKET), of=HOTELS)
    bucket.put(bucket.keys("in-hotels-b", 2, vbucket=VBUCKET), b'{"wrote":"B"}', into=HOTELS)
    lost_seqno = bucket.high_seqnos()[VBUCKET]
    landed.land()
    landed.check_equal()
    versions = [row for row in landed.rows("changes") if row["key"] is not None and key_of(row) in traps]
    assert len(versions) == TRAPS, "the trap is set: the versions of A were never seen"

    vbuuid = bucket.fail_over(VBUCKET, shared_seqno)
    bucket.put([*bucket.keys("c", 3, vbucket=VBUCKET), traps[0]], b'{"wrote":"C"}')
    verify = ("verify", bucket.url, str(landed.folder), "--json")
    assert run_headwater(*verify).returncode == 1, "the tables are not the bucket until it is landed"
    landed.land()
    landed.check_equal()
    assert landed.rolled_back.keys() == {VBUCKET}
    wrote_a, wrote_c = b'{"wrote":"A"}', b'{"wrote":"C"}'
    expected |= dict.fromkeys([*traps, *doomed], wrote_a)
    expected |= dict.fromkeys([*bucket.keys("c", 3, vbucket=VBUCKET), traps[0]], wrote_c)
    assert landed.documents(DEFAULT) == expected
    assert landed.documents(HOTELS) == {
        **dict.fromkeys([b"h2", b"h3"], b'{"in":"the second"}'),
        **dict.fromkeys(bucket.keys("in-hotels", 2, vbucket=VBUCKET), wrote_a),
    }
    check_what_was_undone(landed, kept_seqno=landed.rolled_back[VBUCKET], lost_seqno=lost_seqno, vbuuid=vbuuid)

    told = run_headwater(*verify)
    assert (told.returncode, told.stderr) == (0, "")
    counts = {name: it["landed"] for name, it in json.loads(told.stdout)["collections"].items() if it["landed"]}
    assert counts == {name: len(found) for name in landed.tables if (found := landed.documents(name))}
    # Nothing is new, so nothing is done.
    version = landed.version()
    landed.land()
    assert (landed.batches, landed.version()) == ([], version)


def check_what_was_undone(landed: LandedBucket, *, kept_seqno: int, lost_seqno: int, vbuuid: int) -> None:
    """`changes` has the dead branch, marked; `history` knows nothing of it."""
    changes = [row for row in landed.rows("changes") if row["vbucket"] == VBUCKET]
    (rollback,) = (row for row in changes if row["op"] == "rollback")
    assert (rollback["seqno"], rollback["vbuuid"], rollback["void"]) == (kept_seqno, vbuuid, False)
    assert json.loads(rollback["value"])["from_seqno"] == lost_seqno
    dead = [row for row in changes if row["void"]]
    assert {row["seqno"] for row in dead} >= {lost_seqno}
    assert all(row["seqno"] > kept_seqno and row["batch"] < rollback["batch"] for row in dead)
    assert not [
        row for row in changes if not row["void"] and row["batch"] < rollback["batch"] > kept_seqno < row["seqno"]
    ]
    for collection in (DEFAULT, HOTELS):
        versions = [row for row in landed.rows("history", collection) if row["vbucket"] == VBUCKET]
        assert not [row for row in versions if b"B" in (row["document"] or "").encode() and "wrote" in row["document"]]
        current = {key_of(row) for row in versions if row["is_current"]}
        assert current == {key for key in landed.documents(collection) if landed.bucket.vbucket_of(key) == VBUCKET}


# --- and without it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Credulous:
    """Takes the place of a task, and never listens to a rollback: it goes on from the seqno that the tables have."""

    share: LandShare

    def run(self) -> LandedShare:
        ranges = [replace(it, start=StreamOffset.whole(it.branch, it.start.seqno)) for it in self.share.ranges]
        return replace(self.share, ranges=tuple(ranges)).run()


class CredulousRunner(RunHere):
    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        return super().__call__([Credulous(task) if isinstance(task, LandShare) else task for task in tasks])


@pytest.mark.parametrize("runner", [RunHere, CredulousRunner], ids=["as it is", "without the rollback"])
def test_without_the_handling_of_rollbacks_the_tables_differ(
    bucket: SourceBucket, tmp_path: Path, runner: type[RunHere]
) -> None:
    """With it, the same steps end well: it is the handling of rollbacks that makes the difference, and nothing else."""
    landing = SimulatedLanding(bucket, tmp_path / "lake")
    keys = bucket.keys("key", 3, vbucket=VBUCKET)
    bucket.put(keys, b'"A"')
    shared_seqno = bucket.high_seqnos()[VBUCKET]
    bucket.put(keys, b'"B"')
    landing.landing.start(runner()).awaitTermination()
    landing.check_equal()
    bucket.fail_over(VBUCKET, shared_seqno)
    bucket.put(bucket.keys("c", 4, vbucket=VBUCKET), b'"C"')
    landing.landing.start(runner()).awaitTermination()
    if runner is RunHere:
        landing.check_equal()
    else:
        assert not compare(bucket.settings, str(landing.folder)).is_equal


def test_no_document_no_name_and_no_damaged_table_stops_a_landing(bucket: SourceBucket, tmp_path: Path) -> None:
    landing, long = SimulatedLanding(bucket, tmp_path / "lake"), f"{'s' * 251}.{'c' * 251}"
    folders = {"shop.x%20y": "shop.x~20y", long: folder_name(long), DEFAULT: DEFAULT}
    poison = b'{"n\\u0000m": 1, "n": 99999999999999999999, "m": {"a": 1, "A": 2, "a": 3}}'

    def documents(path: str) -> dict[bytes, bytes]:
        rows = table_rows(landing.folder / "documents" / folders[path])
        return {key_of(row): value_of(row) for row in rows}

    for path in folders:
        if path != DEFAULT:
            bucket.create_scope(path.partition(".")[0])
            bucket.create_collection(path)
        bucket.put([b"poison"], poison, into=path)
    landing.land()
    landing.check_equal()
    assert all(documents(path) == {b"poison": poison} for path in folders)
    # One of the tables is damaged: it is named, and the others go on.
    log = landing.folder / "documents/shop.x~20y/_delta_log" / f"{0:020}.json"
    content = log.read_bytes()
    log.write_text("{")
    for path in folders:
        bucket.put([b"more"], b'{"n": 1}', into=path)
    command = ("land", bucket.url, "--into", str(landing.folder), "--once", "--groups", "2", "--runner", "local")
    done = run_headwater(*command, COLUMNS="2000")
    assert done.returncode == 1
    assert "Error: the table of shop.x%20y is set aside: the log of the table at " in done.stderr
    assert "All other tables have landed, and `changes` has what is missing" in done.stderr
    assert all(documents(path).keys() == {b"poison", b"more"} for path in (DEFAULT, long))
    log.write_bytes(content)
    landing.land()
    landing.check_equal()

"""The planner and the tasks of the `dcp` source on a real node, as Spark drives them."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from headwater.client.offsets import Offsets
from headwater.errors import (
    CheckpointOfOtherBucket,
    ConnectionFailed,
    HeadwaterError,
    InvalidInput,
    ReadRolledBack,
    UnknownCollection,
)
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.driven_source import DrivenStream, batch_reader, read_batch, rows_of
from support.landings import SourceBucket, SparkNode

VBUCKET = 1


def seqnos(text: str) -> dict[int, int]:
    return {int(vbucket): int(offset.seqno) for vbucket, offset in Offsets.from_json(text).offsets.items()}


def moved(text: str, vbucket: int, *, seqno: int) -> str:
    """Offsets with another seqno, of which everything was read."""
    offsets = Offsets.from_json(text)
    vbuuid = (offsets.get(VBucketId(vbucket)) or StreamOffset()).vbuuid
    at = StreamOffset(vbuuid=vbuuid, seqno=Seqno(seqno), snapshot_start=Seqno(seqno), snapshot_end=Seqno(seqno))
    return offsets.updated({VBucketId(vbucket): at}).to_json()


def put(bucket: SourceBucket, name: str, count: int, vbucket: int = VBUCKET) -> None:
    bucket.put(bucket.keys(name, count, vbucket=vbucket), b'{"in":"%s"}' % name.encode())


def keys_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["key"] for row in rows if row["key"] is not None]


def names(bucket: SourceBucket, name: str, count: int) -> list[str]:
    """The keys that `put` has written."""
    return [key.decode() for key in bucket.keys(name, count, vbucket=VBUCKET)]


# --- batches ------------------------------------------------------------------------------------------------------


def test_a_batch_ends_at_the_high_seqnos_and_the_next_one_begins_there(bucket: SourceBucket) -> None:
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        # After a restart the last batch is repeated first: this is asked for before anything is planned.
        assert seqnos(json.dumps(stream.reader.reportLatestOffset())) == bucket.high_seqnos()
        start = stream.initial()
        assert set(seqnos(start).values()) == {0}
        first = stream.latest(start)
        assert seqnos(first) == bucket.high_seqnos()
        assert len(keys_of(stream.read(start, first))) == 3
        put(bucket, "b", 2)
        second = stream.latest(first)
        assert keys_of(stream.read(first, second)) == [key.decode() for key in bucket.keys("b", 2, vbucket=VBUCKET)]
        assert stream.latest(second) == second, "the same place is the same text"


def test_a_batch_has_whole_snapshots_and_the_next_one_begins_behind_them(bucket: SourceBucket) -> None:
    """What is written between the plan and the read comes with the batch, once."""
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        start = stream.initial()
        end = stream.latest(start)
        put(bucket, "a", 1)
        put(bucket, "b", 2)
        rows = stream.read(start, end)
        assert sorted(keys_of(rows)) == sorted(names(bucket, "a", 3) + names(bucket, "b", 2))
        assert {row["snapshot_end"] for row in rows} == {6}
        assert stream.latest(end) == end, "there is nothing new"
        put(bucket, "c", 1)
        assert keys_of(stream.read(end, stream.latest(end))) == names(bucket, "c", 1)


def test_a_hot_document_comes_with_every_batch(bucket: SourceBucket) -> None:
    """It is rewritten between every plan and its read. The version that a batch has is the newest at its read."""
    (key,) = bucket.keys("hot", 1, vbucket=VBUCKET)
    seen = []
    with DrivenStream(bucket) as stream:
        offset = stream.initial()
        for number in range(5):
            bucket.put([key], b"%d" % (2 * number))
            end = stream.latest(offset)
            bucket.put([key], b"%d" % (2 * number + 1))
            seen += [bytes(row["value"]) for row in stream.read(offset, end)]
            offset = end
    assert seen == [b"1", b"3", b"5", b"7", b"9"]


def test_a_repeated_batch_begins_where_the_first_attempt_did(bucket: SourceBucket) -> None:
    """It has all of it, and what came on top; and what it has on top comes again, for the sink may have skipped it."""
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        start = stream.initial()
        first = stream.latest(start)
        put(bucket, "b", 2)
        stream.read(start, first)
        put(bucket, "c", 1)
        second = stream.latest(first)
        assert keys_of(stream.read(first, second)) == names(bucket, "c", 1)
    put(bucket, "d", 1)
    with DrivenStream(bucket) as restarted:
        assert keys_of(restarted.read(first, second)) == names(bucket, "c", 1) + names(bucket, "d", 1)
        assert keys_of(restarted.read(second, restarted.latest(second))) == names(bucket, "d", 1)


@pytest.mark.parametrize("attempts", [0, 2])
def test_where_it_is_not_known_how_far_a_batch_was_read_nothing_is_lost(bucket: SourceBucket, attempts: int) -> None:
    """No task has reported, or two attempts at one have read to different places: rows come again."""
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        start = stream.initial()
        end = stream.latest(start)
        (partition,) = stream.partitions(start, end)
        for _ in range(attempts):
            put(bucket, "b", 2)
            stream.read_partition(partition)
            put(bucket, "b", 3)
        put(bucket, "b", 3)
        assert set(keys_of(stream.read(end, stream.latest(end)))) == set(names(bucket, "b", 3))


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_limit_of_rows_takes_fewer_vbuckets_and_cuts_none(bucket: SourceBucket) -> None:
    for vbucket, count in enumerate([50, 3, 20, 0]):
        put(bucket, "a", count, vbucket)
    with DrivenStream(bucket, maxRowsPerTrigger="23") as stream:
        limit, offset, taken = stream.reader.getDefaultReadLimit(), stream.initial(), []
        assert limit == ReadMaxRows(23)
        while (end := stream.latest(offset, limit)) != offset:
            rows = stream.read(offset, end)
            taken.append([sum(row["vbucket"] == vbucket for row in rows) for vbucket in range(4)])
            offset = end
    assert taken == [[50, 0, 0, 0], [0, 3, 20, 0]], "one that is larger than the limit comes whole"


def test_a_limit_of_bytes(bucket: SourceBucket) -> None:
    for vbucket in range(3):
        put(bucket, "a", 4, vbucket)
    for bytes_max, vbuckets in ((8 * 512, 2), (1, 1)):
        with DrivenStream(bucket, maxBytesPerTrigger=str(bytes_max)) as stream:
            limit = stream.reader.getDefaultReadLimit()
            assert limit == ReadMaxBytes(bytes_max)
            assert sum(bool(at) for at in seqnos(stream.latest(stream.initial(), limit)).values()) == vbuckets


def test_available_now_ends_where_it_began(bucket: SourceBucket) -> None:
    put(bucket, "a", 5)
    with DrivenStream(bucket) as stream:
        assert stream.reader.getDefaultReadLimit() == ReadAllAvailable()
        stream.reader.prepareForTriggerAvailableNow()
        put(bucket, "b", 5)
        end = stream.latest(stream.initial())
        assert seqnos(end)[VBUCKET] == 5
        assert stream.latest(end) == end


def test_at_least_so_many_partitions(bucket: SourceBucket) -> None:
    for vbucket in range(4):
        put(bucket, "a", 2, vbucket)
    for wanted, made in (("1", 1), ("3", 3), ("100", 4)):
        with DrivenStream(bucket, minPartitions=wanted) as stream:
            start = stream.initial()
            assert len(stream.partitions(start, stream.latest(start))) == made


# --- where it starts and ends -------------------------------------------------------------------------------------


def test_starting_now(bucket: SourceBucket) -> None:
    """The first batch is empty, and its end, which Spark keeps, is "now": also if it has to be repeated."""
    put(bucket, "a", 3)
    with DrivenStream(bucket, startingOffsets="now") as stream:
        start = stream.initial()
        now = stream.latest(start)
        assert seqnos(now) == bucket.high_seqnos()
        assert stream.read(start, now) == []
    put(bucket, "b", 2)
    with DrivenStream(bucket, startingOffsets="now") as restarted:
        assert restarted.initial() == start
        assert restarted.read(restarted.initial(), now) == []
        assert keys_of(restarted.read(now, restarted.latest(now))) == names(bucket, "b", 2)


def test_starting_at_a_time(bucket: SourceBucket) -> None:
    """A stream has an empty first batch, and its end, which Spark keeps, is where the time was found."""
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        before = stream.latest(stream.initial())
    time.sleep(0.01)
    at = datetime.now(UTC).isoformat()
    put(bucket, "b", 2)
    bucket.delete(bucket.keys("a", 1, vbucket=VBUCKET))
    since = [*names(bucket, "b", 2), *names(bucket, "a", 1)]
    assert keys_of(read_batch(bucket, startAt=at)) == since
    assert read_batch(bucket, startAt=at, endingOffsets=before) == []
    assert keys_of(read_batch(bucket, startingOffsets="-1h", where="op = 'deletion'")) == since[2:]
    with DrivenStream(bucket, startAt=at) as stream:
        start = stream.initial()
        found = stream.latest(start)
        assert seqnos(found) == {vbucket: 3 if vbucket == VBUCKET else 0 for vbucket in range(4)}
        assert stream.read(start, found) == []
        first = stream.latest(found)
        assert keys_of(stream.read(found, first)) == since
    with DrivenStream(bucket, startAt="-1ms") as restarted:
        assert restarted.initial() == start
        assert keys_of(restarted.read(found, first)) == since
        put(bucket, "c", 1)
        assert keys_of(restarted.read(first, restarted.latest(first))) == names(bucket, "c", 1)


def test_starting_at_given_offsets(bucket: SourceBucket) -> None:
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        given = stream.latest(stream.initial())
    put(bucket, "b", 2)
    with DrivenStream(bucket, startingOffsets=given) as stream:
        assert seqnos(stream.initial()) == seqnos(given)
    assert len(read_batch(bucket, startingOffsets=given)) == 2
    assert len(read_batch(bucket, endingOffsets=given)) == 5, "to the end of the snapshot that holds the end"
    assert len(read_batch(bucket)) == 5
    assert len(read_batch(bucket, startingOffsets="now")) == 0


def test_offsets_that_name_some_vbuckets_only(bucket: SourceBucket) -> None:
    """What does not have a start begins at the beginning; what does not have an end is not read."""
    for vbucket in range(3):
        put(bucket, "a", vbucket + 1, vbucket)
    with DrivenStream(bucket) as stream:
        all_of_them = Offsets.from_json(stream.latest(stream.initial()))
    of_one = Offsets(all_of_them.bucket_uuid, {vb: at for vb, at in all_of_them.offsets.items() if vb == 2}).to_json()
    assert len(read_batch(bucket, startingOffsets=of_one)) == 3
    assert len(read_batch(bucket, endingOffsets=of_one)) == 3


def test_offsets_that_can_not_be(bucket: SourceBucket) -> None:
    put(bucket, "a", 3)
    other = Offsets("of another").to_json()
    with DrivenStream(bucket) as stream:
        first = stream.initial()
        early = stream.latest(first)
        put(bucket, "b", 3)
        late = stream.latest(early)
        with pytest.raises(CheckpointOfOtherBucket):
            stream.latest(other)
    nowhere = moved(first, 900, seqno=3)
    with DrivenStream(bucket, startingOffsets=nowhere) as stream, pytest.raises(InvalidInput, match="no vbucket 900"):
        stream.initial()
    for start, end, error, sentence in (
        (other, "now", CheckpointOfOtherBucket, "bucket"),
        ("beginning", other, CheckpointOfOtherBucket, "bucket"),
        (nowhere, "now", InvalidInput, "there is no vbucket 900: the bucket has 4"),
        ("beginning", nowhere, InvalidInput, "there is no vbucket 900: the bucket has 4"),
        (late, early, InvalidInput, "from seqno 6 up to 3, which lies before"),
        ("beginning", moved(late, VBUCKET, seqno=50), InvalidInput, f"vbucket {VBUCKET} ends at seqno 6"),
    ):
        with pytest.raises(error, match=sentence):
            read_batch(bucket, startingOffsets=start, endingOffsets=end)


def test_offsets_of_a_branch_that_is_dead(bucket: SourceBucket) -> None:
    """The same seqnos are there again, but with other changes."""
    put(bucket, "a", 3)
    with DrivenStream(bucket) as stream:
        early = stream.latest(stream.initial())
        put(bucket, "b", 3)
        late = stream.latest(early)
        bucket.fail_over(VBUCKET, 4)
        put(bucket, "c", 8)
        now = stream.latest(stream.initial())
    for start, end in ((late, "now"), ("beginning", late), (late, now)):
        with pytest.raises(InvalidInput, match="failover"):
            read_batch(bucket, startingOffsets=start, endingOffsets=end)
    assert len(read_batch(bucket, startingOffsets=moved(early, VBUCKET, seqno=3))) == 9
    assert len(read_batch(bucket, endingOffsets=early)) == 12, "to the end of the snapshot that holds the end"


# --- collections --------------------------------------------------------------------------------------------------


def test_some_collections_only(bucket: SourceBucket) -> None:
    """Also where the last changes are of others: a task must come to its end all the same."""
    bucket.create_scope("inventory")
    for name in ("inventory.hotel", "inventory.room"):
        bucket.create_collection(name)
        bucket.put([b"k1", b"k2"], b'{"of":"%s"}' % name.encode(), into=name)
    put(bucket, "others", 20)

    def documents(**options: str) -> set[str]:
        rows = read_batch(bucket, **options)
        return {f"{row['scope']}.{row['collection']}/{row['key']}" for row in rows if row["op"] == "mutation"}

    hotels = {"inventory.hotel/k1", "inventory.hotel/k2"}
    rooms = {"inventory.room/k1", "inventory.room/k2"}
    assert documents(collections="inventory.hotel") == hotels
    assert documents(collections="inventory.hotel, inventory.room") == hotels | rooms
    assert documents(scopes="inventory") == hotels | rooms
    with pytest.raises(UnknownCollection):
        documents(collections="inventory.car")


# --- failovers ----------------------------------------------------------------------------------------------------


def test_a_failover_between_the_plan_and_the_read(bucket: SourceBucket) -> None:
    """The task reads what the new branch has. It is shorter than planned, so the next batch reads that range again."""
    put(bucket, "a", 4)
    with DrivenStream(bucket) as stream:
        offset = stream.initial()
        first = stream.latest(offset)
        assert len(stream.read(offset, first)) == 4
        put(bucket, "b", 4)
        second = stream.latest(first)
        bucket.fail_over(VBUCKET, 6)
        assert keys_of(stream.read(first, second)) == names(bucket, "b", 2)
        put(bucket, "c", 1)
        rollback, *rows = stream.read(second, stream.latest(second))
        assert (rollback["op"], rollback["vbucket"], rollback["seqno"]) == ("rollback", VBUCKET, 4)
        assert keys_of(rows) == names(bucket, "b", 2) + names(bucket, "c", 1)


def test_a_failover_to_before_the_batch_between_the_plan_and_the_read(bucket: SourceBucket) -> None:
    """The batch itself has the rollback, and what the new branch has."""
    put(bucket, "a", 4)
    with DrivenStream(bucket) as stream:
        offset = stream.initial()
        first = stream.latest(offset)
        stream.read(offset, first)
        put(bucket, "b", 4)
        second = stream.latest(first)
        bucket.fail_over(VBUCKET, 2)
        put(bucket, "c", 10)
        rollback, *rows = stream.read(first, second)
        assert (rollback["op"], rollback["seqno"]) == ("rollback", 0)
        assert keys_of(rows) == names(bucket, "a", 2) + names(bucket, "c", 10)


@pytest.mark.parametrize("starts_later", [True, False])
def test_a_failover_under_a_batch_read_fails_it(bucket: SourceBucket, starts_later: bool) -> None:
    """There is no next batch that could make up for it, so rows must not be missing in silence. It is a rollback of
    what was read before, or the history is shorter than was planned."""
    put(bucket, "a", 4)
    with DrivenStream(bucket) as stream:
        start = stream.latest(stream.initial()) if starts_later else "beginning"
    put(bucket, "b", 4)
    reader = batch_reader(bucket, startingOffsets=start)
    (partition,) = reader.partitions()
    reader.close()
    bucket.fail_over(VBUCKET, 2)
    with pytest.raises(ReadRolledBack, match=f"vbucket {VBUCKET}"):
        rows_of(reader.read(partition))


# --- a node that is away for a while ------------------------------------------------------------------------------


def test_the_planner_waits_for_a_node_that_is_started_again_but_not_for_ever(tmp_path: Path) -> None:
    with SparkNode(tmp_path / "data") as node:
        bucket = SourceBucket(node)
        put(bucket, "a", 3)
        bucket.close()
        with DrivenStream(bucket) as patient, DrivenStream(bucket, giveUpAfterS="0.5") as hasty:
            start = patient.initial()
            assert hasty.initial() == start
            node.process.kill()
            began_s = time.monotonic()
            with pytest.raises(ConnectionFailed):
                hasty.latest(start)
            assert time.monotonic() - began_s >= 0.5
            later = threading.Timer(0.5, node.process.start)
            later.start()
            try:
                assert seqnos(patient.latest(start))[VBUCKET] == 3
            finally:
                later.join()


def test_it_does_not_wait_for_what_won_t_come(bucket: SourceBucket) -> None:
    with DrivenStream(bucket, password="not this one") as stream, pytest.raises(HeadwaterError):
        stream.initial()

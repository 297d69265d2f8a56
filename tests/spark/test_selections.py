"""Landings that leave something out: records of the system, and documents that do not meet a condition. What is judged
here are the tables as anybody reads them, with the bucket as it answers itself; `verify` has to agree."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.client.blocking_bucket import look_at_bucket
from headwater.errors import InvalidInput
from headwater.lake.delta_log import TableCommit
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, landed_selection
from headwater.lake.lake_look import look_at_lake
from headwater.lake.location import Location
from headwater.lake.repair import read_from_bucket, repair
from headwater.lake.table_state import Selection
from headwater.lake.verify import compare
from headwater.protocol.manifest import Collection, Scope
from headwater.protocol.messages.vbuckets import SetCollectionsManifest
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId
from headwater.spark.source import DcpDataSource
from support.driven_source import DrivenStream, SimulatedLanding, read_batch
from support.lake_model import table_rows
from support.landings import DEFAULT, LandProcess, SourceBucket, SparkNode, check_tables
from support.live_bucket import LiveChecker, TurningWriter

EQUAL_S_MAX = 120.0
SYSTEM = "_system._mobile"
TRANSACTION_KEYS = (b"_txn:client-record", b"_txn:atr-3-#a0")


def add_system_scope(bucket: SourceBucket) -> None:
    """As Couchbase Server makes it by itself; nobody else can."""
    manifest = look_at_bucket(bucket.settings).manifest
    id_ = manifest.ids_used + 1
    held = Collection(id=CollectionId(id_ + 1), name="_mobile")
    system = Scope(id=ScopeId(id_), name="_system", collections=(held,))
    changed = replace(manifest, uid=ManifestUid(manifest.uid + 1), scopes=(*manifest.scopes, system), ids_used=id_ + 1)
    bucket.request(SetCollectionsManifest(value=changed.encode(with_ids_used=True)))
    bucket.ids[SYSTEM] = held.id


def fill_with_system(bucket: SourceBucket) -> None:
    add_system_scope(bucket)
    bucket.put([b"syncgw", b"gone"], b'{"of":"system"}', into=SYSTEM)
    bucket.put([*TRANSACTION_KEYS, b"_txn:gone", b"_tx", b"txn:_txn:", b"a"], b'{"of":"all"}')
    bucket.delete([b"_txn:gone", b"a"])
    bucket.delete([b"gone"], of=SYSTEM)


def check_lands(landed: SimulatedLanding, documents: dict[str, set[str]]) -> list[dict[str, Any]]:
    """By collection, the keys of `documents`; and nobody misses anything. Returns `changes`."""
    found = {path.name: {row["key"] for row in table_rows(path)} for path in (landed.folder / "documents").iterdir()}
    assert found == documents
    changes = check_tables(landed.bucket, landed.folder)
    status = landed.start()
    assert status.awaitTermination(60)
    assert status.landing_status.lag_seqnos == 0
    assert status.landing_status.documents == sum(map(len, documents.values()))
    return changes


def test_records_of_the_system_are_left_out(bucket: SourceBucket, tmp_path: Path) -> None:
    fill_with_system(bucket)
    landed = SimulatedLanding(bucket, tmp_path / "lake", rules=MergeRules(history=True))
    landed.land()
    plain = {"_tx", "txn:_txn:"}
    changes = check_lands(landed, {DEFAULT: plain})
    assert {row["key"] for row in changes if row["key"]} == {*plain, "a"}
    assert {row["scope"] for row in changes} == {"_default"}
    assert look_at_lake(Location.of(str(landed.folder))).selection == "all collections, without records of the system"
    # Their removals, more of them, and a rollback over them.
    vbucket = bucket.vbucket_of(TRANSACTION_KEYS[0])
    kept = bucket.high_seqnos()[vbucket]
    bucket.delete([*TRANSACTION_KEYS])
    bucket.put([b"_txn:atr-4-#a1", b"b"], b"{}")
    landed.land()
    bucket.fail_over(vbucket, kept)
    bucket.put([TRANSACTION_KEYS[0], b"c"], b"{}")
    landed.land()
    alive = {key.decode() for key in (b"_tx", b"txn:_txn:", b"b", b"c") if bucket.get(key) is not None}
    check_lands(landed, {DEFAULT: alive})
    # What `repair` reads is left out as well.
    for file in reopened(landed).changes.files():
        (landed.folder / "changes" / file.path).write_bytes(b"")
    location = Location.of(str(landed.folder))
    done = repair(location, lambda: compare(bucket.settings, location), read_from_bucket(bucket.settings))
    assert not done.found.is_equal
    assert done.left.is_equal
    assert {row["key"] for row in landed.changes() if row["op"] == "mutation"} == alive
    landed.options["system"] = "true"
    with pytest.raises(InvalidInput, match=r"were landed without the records of the system\. Omit system"):
        landed.land()


def test_a_lake_goes_on_with_them_as_it_was_begun(bucket: SourceBucket, tmp_path: Path) -> None:
    fill_with_system(bucket)
    landed = SimulatedLanding(bucket, tmp_path / "all", options={"system": "true"})
    landed.land()
    landed.options.clear()
    bucket.put([b"_txn:later"], b"{}")
    landed.land()
    there = {"_tx", "txn:_txn:", "_txn:later", *(key.decode() for key in TRANSACTION_KEYS)}
    check_lands(landed, {DEFAULT: there, SYSTEM: {"syncgw"}})
    # As an earlier version says it, which has no such choice.
    assert Selection.of_note({"scopes": [], "collections": []}) == Selection() == landed_selection(reopened(landed))

    named = SimulatedLanding(bucket, tmp_path / "named", options={"collections": f"{SYSTEM},{DEFAULT}"})
    named.land()
    check_lands(named, {DEFAULT: {"_tx", "txn:_txn:"}, SYSTEM: {"syncgw"}})


def reopened(landed: SimulatedLanding) -> Lake:
    lake = Lake.open(Location.of(str(landed.folder)))
    assert lake is not None
    return lake


def test_the_source_leaves_them_out(bucket: SourceBucket) -> None:
    fill_with_system(bucket)
    plain = {"_tx", "txn:_txn:", "a"}

    def keys(rows: list[dict[str, Any]]) -> set[str]:
        assert rows
        return {row["key"] for row in rows if row["key"]}

    assert keys(read_batch(bucket)) == plain
    assert keys(read_batch(bucket, columns="key")) == plain
    assert keys(read_batch(bucket, where="scope = '_default' AND NOT key = 'a'")) == plain - {"a"}
    everything = {*plain, "_txn:gone", "syncgw", "gone", *(key.decode() for key in TRANSACTION_KEYS)}
    assert keys(read_batch(bucket, system="true")) == everything
    assert keys(read_batch(bucket, scopes="_system")) == {"syncgw", "gone"}
    with DrivenStream(bucket) as stream:
        start = stream.initial()
        end = stream.latest(start)
        assert keys(stream.read(start, end)) == plain
        assert stream.latest(end) == end


ORDERS = "type = 'order' AND (total > 10 OR address.city IN ('Oslo'))"


def order(total: Any, city: str = "Rome", *, type_: str = "order") -> bytes:
    return json.dumps({"type": type_, "total": total, "address": {"city": city}}).encode()


def test_documents_that_begin_and_stop_to_fit(bucket: SourceBucket, tmp_path: Path) -> None:
    landed = SimulatedLanding(
        bucket, tmp_path / "lake", rules=MergeRules(history=True), options={"where": ORDERS, "xattrs": "true"}
    )
    keys = bucket.keys("o", 6, vbucket=1)
    fits, stops, begins, never, removed, text = keys
    bucket.put_each({fits: order(11), stops: order(5, "Oslo"), begins: order(10), removed: order(12)})
    bucket.put_each({never: order(99, type_="user"), text: b"type = 'order'"})
    bucket.set_xattr(never, b"mark", b'"secret"')
    landed.land()

    def held() -> dict[bytes, str]:
        rows = table_rows(landed.folder / "documents" / DEFAULT)
        return {row["key"].encode(): row["document"] for row in rows}

    before = {key: bucket.get(key).decode() for key in (fits, stops, removed)}
    assert held() == before
    changes = check_tables(bucket, landed.folder)
    unmatched = [row for row in changes if row["op"] == "unmatched"]
    assert {row["key"].encode() for row in unmatched} == {begins, never, text}
    assert all(row["value"] is None and not row["xattrs"] and not row["datatype"] for row in unmatched)
    assert not any(b"secret" in path.read_bytes() for path in landed.folder.rglob("*.parquet"))

    kept = bucket.high_seqnos()[1]
    bucket.put_each({stops: order(1), begins: order(10.5), fits: order(13)})
    bucket.delete([removed, never])
    landed.land()
    assert held() == {fits: order(13).decode(), begins: order(10.5).decode()}
    check_tables(bucket, landed.folder)
    history = table_rows(landed.folder / "history" / DEFAULT)
    ends = {row["key"].encode(): row["valid_to"] for row in history if row["document"] in before.values()}
    assert {key for key, at in ends.items() if at is not None} == {fits, stops, removed}
    assert {row["key"].encode() for row in history if row["is_current"]} == {fits, begins}

    # A failover takes it back: all is again as it was before.
    bucket.fail_over(1, kept)
    landed.land()
    assert held() == before
    assert check_tables(bucket, landed.folder)
    history = table_rows(landed.folder / "history" / DEFAULT)
    assert (
        {row["key"].encode() for row in history if row["is_current"]}
        == before.keys()
        == {row["key"].encode() for row in history}
    )
    bucket.put_each({stops: order(2), never: order("12"), text: order(12)})
    landed.land()
    assert held() == {fits: before[fits], removed: before[removed], text: order(12).decode()}
    check_tables(bucket, landed.folder)

    for where, sentence in {
        "type = 'order'": "were landed where type = 'order' AND .* Use the same where",
        "": "Use the same where, or land into another directory",
        "op = 'mutation'": "the condition of a landing is on documents",
        "sum(total) > 1": "'SUM.total.' is neither a field nor a column",
    }.items():
        with pytest.raises(InvalidInput, match=sentence):
            replace(landed, options={"where": where, "xattrs": "true"}).land()
    replace(landed, options={"where": ORDERS.lower().replace("oslo", "Oslo"), "xattrs": "true"}).land()
    whole = SimulatedLanding(bucket, tmp_path / "whole")
    whole.land()
    with pytest.raises(InvalidInput, match="were landed without a condition"):
        replace(whole, options={"where": ORDERS}).land()


def test_a_fault_in_what_is_left_out_is_found(bucket: SourceBucket, tmp_path: Path) -> None:
    """With another condition than that of the tables, `verify` finds documents that are missing, and some too many."""
    landed = SimulatedLanding(bucket, tmp_path / "lake", options={"where": "n >= 5"})
    bucket.put_each({b"key-%d" % number: b'{"n":%d}' % number for number in range(10)})
    landed.land()
    lake = reopened(landed)
    selection = lake.state.selection
    assert selection is not None
    lake.commit_changes(TableCommit(state=replace(lake.state, selection=replace(selection, where="n >= 4 AND n < 8"))))
    found = compare(bucket.settings, str(landed.folder))
    assert {one.what for one in found.findings if one.table == f"documents/{DEFAULT}"} >= {"key-4", "key-8", "key-9"}


def test_rows_of_the_source_that_meet_a_condition(bucket: SourceBucket) -> None:
    bucket.put_each({b"key-%d" % number: b'{"n":%d,"of":{"a":"%d"}}' % (number, number % 3) for number in range(12)})
    bucket.put([b"key-3"], b'{"n":"3"}')
    bucket.delete([b"key-4"])
    fitting = {f"key-{number}" for number in (5, 8, 11)}
    rows = read_batch(bucket, where="n > 4 AND of.a = '2'", columns="key,op")
    assert {row["key"] for row in rows} == fitting
    assert {*rows[0]} == {"key", "op"}
    removed = read_batch(bucket, where="op = 'deletion' OR n = 5 AND op = 'mutation'", columns="key")
    assert {row["key"] for row in removed} == {"key-4", "key-5"}

    source = DcpDataSource({**bucket.options, "mode": "documents", "where": "n > 2 AND seqno > 0", "columns": "key"})
    reader: Any = source.reader(source.schema())
    with closing(reader._watch):
        found = [row for one in reader.partitions() for batch in reader.read(one) for row in batch.to_pylist()]
    assert {row["key"] for row in found} == {f"key-{number}" for number in range(5, 12)}


def run_turns(folder: Path, *, turns_s: float, kills: int) -> None:
    """Documents begin and stop to fit while they are landed, vbuckets fail over, the landing is killed."""
    with SparkNode(folder / "data") as node:
        bucket = SourceBucket(node)
        options = ["--runner", "local", "--history", "--where", TurningWriter.WHERE]
        with LandProcess(bucket, folder / "lake", "local[2]", *options) as land:
            with TurningWriter(bucket, failovers=0.002) as writer:
                checker = LiveChecker(land.folder, writer)
                for kill in range(kills + 1):
                    land.wait_for_batches(2)
                    until_s = time.monotonic() + turns_s
                    while time.monotonic() < until_s or not writer.failovers:
                        checker.look()
                        time.sleep(0.3)
                    if kill < kills:
                        land.kill_all()
                        land.start()
            give_up_s = time.monotonic() + EQUAL_S_MAX
            while not (verdict := compare(bucket.settings, str(land.folder))).is_equal or verdict.pending:
                assert time.monotonic() < give_up_s, verdict
                time.sleep(0.5)
        print(
            f"{checker.looks} looks, {checker.compared} compared, {writer.written} writes, {writer.failovers} failovers"
        )
        checker.check_end(bucket)
        rows = table_rows(land.folder / "history" / DEFAULT)
        current = {row["key"].encode() for row in rows if row["is_current"]}
        assert current == {row["key"].encode() for row in table_rows(land.folder / "documents" / DEFAULT)}
        assert any(row["op"] == "unmatched" for row in check_tables(bucket, land.folder))
        bucket.close()


def test_documents_turn_while_they_are_landed(tmp_path: Path) -> None:
    run_turns(tmp_path, turns_s=3, kills=1)


@pytest.mark.soak
def test_documents_turn_for_minutes(tmp_path: Path) -> None:
    run_turns(tmp_path, turns_s=20, kills=5)

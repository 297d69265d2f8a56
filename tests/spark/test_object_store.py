"""A lake in an object store: S3, by moto's server, with its faults, and Azure, by its emulator. Tables are looked at
through deltalake alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater.cli import main
from headwater.client.offsets import Offsets
from headwater.errors import LakeError, LakeInUse, LakeTaken
from headwater.lake import upkeep
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.lake_look import LakeWatch
from headwater.lake.layout import TableKind
from headwater.lake.location import Location
from headwater.lake.table_state import TableState
from headwater.lake.upkeep import DeadBytes, DeadFiles, clean_logs, join_files, trim_changes, vacuum
from headwater.lake_page.app import LakeState
from headwater.landing import loop
from headwater.landing.query import Landing, LandingQuery
from headwater.spark import documents
from headwater.spark.executors import SparkRunner
from support.driven_source import RunHere
from support.lake_model import read_rows
from support.landings import ALWAYS_FRESH, DEFAULT, GROUPS, LOGIN, SourceBucket, check_tables
from support.object_store import AZURITE, READ_ONLY, SECRET_KEY, AzureServer, Faults, S3Server

_NUMBERS = count()


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    if shutil.which(AZURITE) is None:
        pytest.skip(f"{AZURITE} is not on the path: npm install azurite")
    with AzureServer() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURITE_BLOB_STORAGE_URL", running.url)
        running.make_container("lakes")
        yield running


@dataclass
class StoredLake:
    """A bucket, and its tables in the store."""

    bucket: SourceBucket
    store: S3Server | AzureServer
    uri: str = field(default_factory=lambda: f"s3://lakes/lake-{next(_NUMBERS)}")

    @property
    def landing(self) -> Landing:
        return Landing(
            source={**self.bucket.options, "minPartitions": "2"},
            into=self.uri,
            storage_options=self.store.options,
            fresh=ALWAYS_FRESH,
            groups=GROUPS,
            # Every other one.
            lake=LakeSettings(merging=MergeRules(on_read=self.uri[-1] in "13579")),
        )

    def start(self, *, every: float | None = None) -> LandingQuery:
        return self.landing.start(RunHere(), every=every)

    def land(self) -> None:
        self.start().awaitTermination()

    def rows(self, table: str) -> list[dict[str, Any]]:
        """As any reader of Delta tables sees them."""
        return read_rows(DeltaTable(f"{self.uri}/{table}", storage_options=self.store.options))

    def data_files(self) -> list[str]:
        """Of `changes`, whether a commit names them or not."""
        location = Location.of(f"{self.uri}/changes", self.store.options)
        return [entry.name for entry in location.entries() if entry.name.endswith(".parquet")]

    def check_equal(self) -> None:
        check_tables(self.bucket, Location.of(self.uri, self.store.options))


@pytest.fixture
def lake(bucket: SourceBucket, store: S3Server) -> Iterator[StoredLake]:
    bucket.put([b"a", b"b", b"c"], b'{"n":1}')
    yield StoredLake(bucket, store)
    store.set_faults(Faults())


@pytest.fixture(params=["S3", "Azure"])
def lake_anywhere(bucket: SourceBucket, request: pytest.FixtureRequest) -> StoredLake:
    bucket.put([b"a", b"b", b"c"], b'{"n":1}')
    if request.param == "S3":
        return StoredLake(bucket, request.getfixturevalue("store"))
    return StoredLake(bucket, request.getfixturevalue("azure"), "abfss://lakes@tests.dfs.core.windows.net/lake")


def test_an_object_is_read_by_few_requests(store: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    for name in ("get", "get_range", "head"):
        ask = getattr(obstore, name)
        monkeypatch.setattr(
            obstore, name, lambda *given, _ask=ask, _name=name, **more: requests.append(_name) or _ask(*given, **more)
        )
    location = Location.of(f"s3://lakes/objects-{next(_NUMBERS)}", store.options)
    whole = os.urandom(1_000_000)
    for size, asked in (
        (0, ["get", "head"]),
        (5, ["get"]),
        (100_000, ["get"]),
        (1_000_000, ["get", *["get_range"] * 2]),
    ):
        with closing(location.open_output(f"of-{size}")) as output:
            output.write(whole[:size])
        requests.clear()
        with location.open_input(f"of-{size}") as file:
            assert file.size() == size
            assert file.read_at(100, max(0, size - 100)) == whole[max(0, size - 100) : size]
            assert file.read_at(10, 0) == whole[:size][:10]
            file.seek(0)
            assert file.read() == whole[:size]
        assert requests == asked


def test_of_two_writers_of_a_version_one_succeeds(store: S3Server) -> None:
    """Also where the answer is lost after the entry was written: an entry that is there already is the writer's own."""
    location = Location.of(f"s3://lakes/lake-{next(_NUMBERS)}", store.options)
    columns, state = pa.schema([pa.field("seqno", pa.int64())]), TableState(offsets=Offsets("5ab1e", {}))
    log = DeltaLog.create(location, columns, ranges=["seqno"], properties={}, transactions={}, state=state)
    other = DeltaLog.open(location)
    assert other is not None
    for faults in (Faults(), Faults(lose_answer=0.3, seed=4)):
        store.set_faults(faults)
        for number in range(10):
            log.refresh()
            other.refresh()
            log.commit(TableCommit(transactions={"number": number}, state=state))
            with pytest.raises(LakeInUse, match="another process"):
                other.commit(TableCommit(state=state))
            assert log.transaction("number") == number
        store.set_faults(Faults())


def test_a_rollback_upkeep_and_verify(lake_anywhere: StoredLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a landing does in its life, on each kind of store."""
    lake = lake_anywhere
    monkeypatch.setattr(upkeep, "JOIN_FILES_MIN", 3)
    for number in range(3):
        lake.bucket.put([b"c"], b'{"n":%d}' % number)
        lake.land()
    vbucket = lake.bucket.vbucket_of(b"c")
    lake.bucket.fail_over(vbucket, to_seqno=lake.bucket.high_seqnos()[vbucket] - 1)
    lake.bucket.put([b"d"], b'{"n":3}')
    lake.land()
    lake.check_equal()
    assert any(row["void"] for row in lake.rows("changes"))

    monkeypatch.setattr(upkeep, "VACUUM_HOURS_MIN", 0)
    monkeypatch.setattr(upkeep, "TRIM_ROWS_PER_DOCUMENT", 0)
    tables = lake.landing.prepare()
    before = set(lake.data_files())
    assert join_files(tables) > 1
    assert trim_changes(tables, datetime.now(UTC) + timedelta(days=1)) > 0
    assert vacuum(tables, retention_hours=0) >= 3
    clean_logs(tables, retention_days=0)
    assert not before & set(lake.data_files())
    lake.bucket.put([b"e"], b'{"n":4}')
    lake.land()
    lake.bucket.put([b"e"], b'{"n":5}')
    lake.land()
    dead = DeadFiles(DeadBytes(0.0, 0), keep_hours=168)
    assert dead.keep_within_bound(lake.landing.prepare(), now_s=time.time() + 1e6) > 0
    assert dead.dead_bytes == 0
    lake.check_equal()
    words = [word for pair in lake.store.options.items() for word in ("--storage-option", "=".join(pair))]
    result = CliRunner().invoke(main, ["verify", lake.bucket.url, lake.uri, *words], env=LOGIN)
    assert result.output.splitlines()[-1] == "Equal: 5 documents in 1 collection."
    # Its page finds the tables there, the verdict, and how the landing has ended.
    state = LakeState(LakeWatch(Location.of(lake.uri, lake.store.options)))
    shown = state.show()
    assert (shown["lake"]["documents"], shown["lake"]["verdict"]["is_equal"]) == (5, True)
    assert shown["landing"]["state"] == "stopped"
    assert "e" in {row[0] for row in state.sample(TableKind.DOCUMENTS, DEFAULT).rows}


def test_spark_lands_a_rollback_into_s3(lake: StoredLake, spark: SparkSession) -> None:
    lake.landing.start(SparkRunner(spark)).awaitTermination()
    lake.bucket.put([b"c"], b'{"n":2}')
    lake.landing.start(SparkRunner(spark)).awaitTermination()
    vbucket = lake.bucket.vbucket_of(b"c")
    lake.bucket.fail_over(vbucket, to_seqno=lake.bucket.high_seqnos()[vbucket] - 1)
    lake.bucket.put([b"d"], b'{"n":3}')
    lake.landing.start(SparkRunner(spark)).awaitTermination()
    lake.check_equal()
    assert any(row["void"] for row in lake.rows("changes"))
    frame = documents(spark, lake.uri, DEFAULT, storage_options=lake.store.options)
    assert sorted(row.key for row in frame.collect()) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "faults",
    [Faults(slow_down=0.2, seed=1), Faults(lose_answer=0.05, seed=2), Faults(reset=0.1, seed=3)],
    ids=["throttled", "answers lost", "connections reset"],
)
def test_a_store_that_fails_now_and_then(lake: StoredLake, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose answer was lost is refused when it is sent again, and is ours all the same."""
    monkeypatch.setattr(loop, "_RETRY_S_MIN", 0.01)
    monkeypatch.setattr(loop, "_RETRY_S_MAX", 0.02)
    lake.land()
    lake.store.set_faults(faults)
    query = lake.start(every=0.01)
    for number in range(20):
        lake.bucket.put([b"a", f"key-{number}".encode()], b'{"n":%d}' % number)
        time.sleep(0.05)
    query.processAllAvailable()
    lake.store.set_faults(Faults())
    query.stop()
    lake.check_equal()


def test_of_two_landings_one_goes_on(lake: StoredLake) -> None:
    lake.land()
    first, second = lake.start(every=0.01), lake.start(every=0.01)
    ended: list[LandingQuery] = []
    for number in range(200):
        lake.bucket.put([b"k-%d" % number], b"{}")
        ended = [query for query in (first, second) if not query.isActive]
        if ended:
            break
        time.sleep(0.05)
    (loser,) = ended
    with pytest.raises(LakeTaken, match="another landing writes to the tables"):
        loser.awaitTermination()
    winner = second if loser is first else first
    winner.processAllAvailable()
    winner.stop()
    lake.check_equal()


KILLS = 1
SOAK_KILLS = 20
LANDER = """
import json, sys
from headwater.landing.query import Landing
from support.driven_source import RunHere
from support.landings import ALWAYS_FRESH, GROUPS
made = json.load(sys.stdin)
landing = Landing(**made, fresh=ALWAYS_FRESH, groups=GROUPS)
report = lambda landed: print(landed.batch_id, flush=True)
query = landing.start(RunHere(), every=0.01, on_batch=report)
query.awaitTermination()
"""


@pytest.mark.parametrize("kills", [KILLS, pytest.param(SOAK_KILLS, marks=pytest.mark.soak)])
def test_kill_nine_while_it_lands(lake: StoredLake, kills: int) -> None:
    """Between any two requests to the store, and so between the upload of files and their commit."""
    made = json.dumps({"source": dict(lake.landing.source), "into": lake.uri, "storage_options": lake.store.options})
    for number in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", LANDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(made)
        process.stdin.close()
        lake.bucket.put([b"begin-%d" % number], b"{}")
        assert process.stdout.readline(), "it lands"
        for write in range(5 + number % 7):
            lake.bucket.put([b"key-%d-%d" % (number, write), b"hot"], b'{"n":%d}' % write)
            time.sleep(0.01 * (number % 5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    lake.land()
    lake.check_equal()


# --- what can't work --------------------------------------------------------------------------------------------------


def test_an_emulator_that_is_taken_for_azure(azure: AzureServer) -> None:
    options = {**azure.options, "azure_storage_endpoint": f"{azure.url}/tests", "azure_allow_http": "true"}
    del options["azure_storage_use_emulator"]
    with pytest.raises(LakeError, match=r"it ignores the start of a listing.*use_emulator=true"):
        Location.of("az://lakes/other", options).check()


@pytest.mark.parametrize(
    ("uri", "options", "sentence"),
    [
        ("s3://missing/lake", {}, "s3://missing/lake can't be used: there is no such bucket. Make it"),
        ("s3://lakes/new", {"aws_access_key_id": "other"}, "the credentials are not valid. Check them"),
        ("s3://lakes/new", {"aws_region": "us-east-1"}, "the bucket is in another region. Give its region"),
        (f"s3://{READ_ONLY}/lake", {}, "access is denied. Ask for the right to list, read, write and delete there"),
        ("s3://lakes/new", {"aws_endpoint_url": "http://127.0.0.1:1"}, "does not answer (connection refused)"),
        ("s3://lakes/new", {"aws_allow_http": "false"}, "the endpoint is plain HTTP. Add --storage-option allow_http"),
        ("s3://lakes/new", {"aws_secret_acces_key": "x"}, "Did you mean aws_secret_access_key?"),
        ("az://lakes/new", None, "no storage account is named. Write abfss://CONTAINER@ACCOUNT"),
        ("hdfs://somewhere/lake", None, "hdfs: is not a supported store for tables. Give a directory, or s3://"),
        ("file://other/lake", None, "is on another host. Write file:///path"),
        ("plain-folder", {"aws_region": "x"}, "is not an object store and takes no options"),
    ],
)  # fmt: skip
def test_one_sentence_and_nothing_made(
    bucket: SourceBucket, store: S3Server, tmp_path: Path, uri: str, options: dict[str, str] | None, sentence: str
) -> None:
    if READ_ONLY in uri:
        store.make_bucket(READ_ONLY)
    given = {} if options is None else ({**store.options, **options} if "://" in uri else options)
    arguments = [part for name, value in given.items() for part in ("--storage-option", f"{name}={value}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = CliRunner().invoke(
            main,
            ["land", bucket.url, "--into", uri, "--once", *arguments],
            env=LOGIN,
        )
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert sentence in line
    assert SECRET_KEY not in result.output
    assert store.keys("lakes") == [key for key in store.keys("lakes") if not key.startswith("new")]
    assert [*tmp_path.iterdir()] == []

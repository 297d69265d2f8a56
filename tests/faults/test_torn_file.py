"""Data files that were cut off or overwritten: what is stored comes back exactly, or a sentence says why it does not.

LMDB maps its file and follows page numbers without a doubt, so a damaged file would end the process (SIGBUS behind the
end of the file, SIGSEGV elsewhere) or give rows that were never stored. `lmdb_pages` walks all pages before LMDB does,
and the store checks the frames of every run that it opens.

What neither can know, because LMDB keeps no checksums: bytes that change inside a stored value, where they do not break
the shape of what is there. That is a document's value, key, flags or CAS, or a number in the facts of a vbucket. The
last test shows that there is nothing else: damage outside of stored values is always seen or harmless.

Every case runs in a fork, since what must not happen is that the process ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from headwater.errors import StoreError
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import CollectionId, Vbuuid
from headwater.protocol.values import Datatype
from headwater.store import settling
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.compaction import Retention, compact_vbucket, finish_compaction
from headwater.store.data_format import BucketFacts, VBucketFacts
from headwater.store.engine import Table
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket
from headwater.store.settling import settle_now
from support.machine import FAILED, forked

PAGE = 4096
VBUCKETS = 8
DOCUMENTS = 120
_VBUUIDS = count(7)
ENVIRONMENT = StoreEnvironment(now_ns=lambda: 1_800_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(next(_VBUUIDS)))
RIGHT, REFUSED, WRONG = 0, 10, 11
CASES, SEED = 100, 4
EVERY = 3
"""A run tries one of so many places in the file. The soak tries all of them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A bucket as it lies on disk, and what it holds."""

    data: bytes
    contents: object
    spans: tuple[tuple[int, int], ...]
    """Where in the file stored values lie."""

    def is_value(self, start: int, end: int) -> bool:
        return any(first < end and start < last for first, last in self.spans)


def contents(bucket: Bucket) -> object:
    """Everything that a reader, a stream or a consumer that comes back could see."""
    changes = [b"".join(run.tobytes() for run in bucket.runs(vbucket)) for vbucket in range(VBUCKETS)]
    read = []
    for number in range(DOCUMENTS):
        for vbucket in (number % VBUCKETS, 3):
            entry = bucket.find(vbucket, CollectionId(number % 2 * 8), b"key %d" % number)
            read.append(None if entry is None else bucket.read_frame(vbucket, entry).tobytes())
    facts = [shown(facts) for facts in bucket.vbuckets.facts]
    return changes, read, facts, bucket.manifest, bucket.vbuckets.high_seqnos.tolist(), bucket.facts


def shown(facts: VBucketFacts | None) -> object:
    # The file is a copy of the one that was closed, so there is one branch more.
    return facts and (facts.state, facts.failover_log.entries[-1], facts.purge_seqno, facts.history_start_seqno)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Blocks, a journal, free pages, large and small values, a manifest, and a clean stop."""
    folder = tmp_path_factory.mktemp("torn") / "data"
    engine = LmdbEngine(folder)
    facts = BucketFacts(name="torn", uuid="0", vbuckets=VBUCKETS)
    bucket = create_bucket(engine, facts, environment=ENVIRONMENT, secret=(1, 2))
    for vbucket in range(VBUCKETS):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    bucket.set_manifest(Manifest().with_collection("_default", "fruit"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settling, "BLOCK_BYTES_TARGET", 6000)
        for number in range(DOCUMENTS):
            place = {"collection_id": CollectionId(number % 2 * 8), "key": b"key %d" % number}
            for vbucket in (number % VBUCKETS, 3):
                value = b"value %d" % number * (number % 9 * 4)
                bucket.put_mutation(vbucket, **place, value=value, datatype=Datatype.RAW)
                bucket.put_mutation(vbucket, **place, value=value, datatype=Datatype.RAW)
            if number % 5 == 0:
                bucket.put_removal(number % VBUCKETS, **place)
            if number % 4 == 0:
                bucket.commit_now()
            if number % 20 == 8:
                settle_now(bucket)
        compacted = compact_vbucket(bucket, 3, Retention(history_s=0, history_bytes=0))
        bucket.engine.write(compacted.changes)
        finish_compaction(bucket, 3, compacted)
    close_bucket(bucket)
    # Opened once more here, so that forks have the kernels that opening needs.
    bucket = open_bucket(engine, environment=ENVIRONMENT, secret=(3, 4))
    held = contents(bucket)
    close_bucket(bucket)
    with engine.view() as view:
        values = [bytes(v) for table in Table for _, v in view.scan(table, b"", b"\xff" * 16) if len(v) > 8]
    engine.close()
    data = (folder / "data.mdb").read_bytes()
    return Stored(data=data, contents=held, spans=tuple(span for value in values for span in places(data, value)))


@pytest.fixture(params=[EVERY, pytest.param(1, marks=pytest.mark.soak)])
def every(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def places(data: bytes, value: bytes) -> list[tuple[int, int]]:
    """Where a value lies in the file: in its pages, and where older transactions have left it."""
    found = []
    at = data.find(value)
    while at >= 0:
        found.append((at, at + len(value)))
        at = data.find(value, at + 1)
    assert found
    return found


def outcome(stored: Stored, folder: Path, data: bytes, *, writes: bool = False) -> int:
    """How it ends to open this file, as an exit code; negative where a signal ended the process.

    What can be read can be written to as well: whether it can takes most of the time, so only some cases try.
    """
    folder.mkdir(exist_ok=True)
    (folder / "data.mdb").write_bytes(data)

    def open_it() -> int:
        try:
            engine = LmdbEngine(folder)
            bucket = open_bucket(engine, environment=ENVIRONMENT, secret=(3, 4))
            if contents(bucket) != stored.contents:
                return WRONG
            if writes:
                bucket.put_removal(0, collection_id=CollectionId(0), key=b"key 0")
                bucket.commit_now()
                settle_now(bucket)
        except StoreError as error:
            return REFUSED if is_a_sentence(error) else FAILED
        return RIGHT

    return forked(open_it)


def is_a_sentence(error: StoreError) -> bool:
    return bool(error.hint) and "\n" not in str(error) and len(str(error)) < 400


def overwritten(data: bytes, at: int, junk: bytes) -> bytes:
    return data[:at] + junk[: len(data) - at] + data[at + len(junk) :]


# --- whole --------------------------------------------------------------------------------------------------------


def test_the_file_has_everything_in_it(stored: Stored, tmp_path: Path) -> None:
    assert len(stored.data) > 40 * PAGE
    assert outcome(stored, tmp_path / "data", stored.data, writes=True) == RIGHT


def test_an_empty_file_is_a_new_one(stored: Stored, tmp_path: Path) -> None:
    """There is nothing in it that could be wrong; the store then finds no bucket."""
    assert outcome(stored, tmp_path / "data", b"") == REFUSED


# --- cut off ------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_anywhere(stored: Stored, tmp_path: Path, every: int) -> None:
    chosen = random.Random(1)
    pages = len(stored.data) // PAGE
    cuts = [
        *(page * PAGE for page in range(1, pages)),
        *(chosen.randrange(1, len(stored.data)) for _ in range(30)),
        1,
        50,
    ]
    ends = [outcome(stored, tmp_path / "data", stored.data[:cut]) for cut in cuts[::every]]
    assert set(ends) <= {RIGHT, REFUSED}
    assert ends[0] == REFUSED


def test_a_file_that_is_too_long_is_no_fault(stored: Stored, tmp_path: Path) -> None:
    """A crash leaves pages behind the last that count for nothing."""
    for more in (b"\0", bytes(PAGE), random.Random(2).randbytes(3 * PAGE)):
        assert outcome(stored, tmp_path / "data", stored.data + more) == RIGHT


def test_a_file_that_was_put_together_again_from_zeros(stored: Stored, tmp_path: Path, every: int) -> None:
    """What some file systems give after a crash: the right length, but nothing in the last pages."""
    pages = len(stored.data) // PAGE
    for kept in range(2, pages, 5 * every):
        data = stored.data[: kept * PAGE] + bytes((pages - kept) * PAGE)
        assert outcome(stored, tmp_path / "data", data) in (RIGHT, REFUSED)


# --- overwritten --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zeros", "ones", "junk", "another page"])
def test_pages_that_were_overwritten(stored: Stored, tmp_path: Path, kind: str, every: int) -> None:
    """A page is larger than any document here, so the shape of what it holds goes with it."""
    chosen = random.Random(kind)
    pages = len(stored.data) // PAGE
    make: dict[str, Callable[[], bytes]] = {
        "zeros": lambda: bytes(PAGE),
        "ones": lambda: b"\xff" * PAGE,
        "junk": lambda: chosen.randbytes(PAGE),
        "another page": lambda: stored.data[(at := chosen.randrange(pages) * PAGE) : at + PAGE],
    }
    ends = [
        outcome(stored, tmp_path / "data", overwritten(stored.data, page * PAGE, make[kind]()))
        for page in chosen.sample(range(pages), min(pages, 30) // every)
    ]
    assert set(ends) <= {RIGHT, REFUSED}
    assert REFUSED in ends


@pytest.mark.parametrize("page", [0, 1])
def test_bytes_of_the_meta_pages_count_or_do_not(stored: Stored, tmp_path: Path, page: int, every: int) -> None:
    """One of the two is the newest and says where everything is; the other is what it was one transaction before."""
    for at in range(0, 16 + 24 + 2 * 48 + 16, 2 * every):
        data = bytearray(stored.data)
        data[page * PAGE + at + at // 2 % 2] ^= 0x15
        assert outcome(stored, tmp_path / "data", bytes(data), writes=at % 8 == 0) in (RIGHT, REFUSED)


def test_bytes_that_were_overwritten_outside_of_values_are_seen_or_harmless(
    stored: Stored, tmp_path: Path, every: int
) -> None:
    """Headers of pages and nodes, keys, lists of free pages, and what is not in use.

    Inside of values it can't be seen, but the process goes on.
    """
    chosen = random.Random(SEED)
    ends: set[int] = set()
    inside = 0
    for number in range(CASES // every):
        page = chosen.randrange(len(stored.data) // PAGE)
        at = page * PAGE + chosen.choice([chosen.randrange(16), chosen.randrange(64), chosen.randrange(PAGE)])
        junk = chosen.choice([b"\0", b"\xff", chosen.randbytes(1), chosen.randbytes(2), chosen.randbytes(8)])
        end = outcome(stored, tmp_path / "data", overwritten(stored.data, at, junk), writes=number % 3 == 0)
        if stored.is_value(at, at + len(junk)):
            inside += 1
            assert end in (RIGHT, REFUSED, WRONG), (number, at, junk)
        else:
            ends.add(end)
            assert end in (RIGHT, REFUSED), (number, at, junk)
    assert ends == {RIGHT, REFUSED}
    assert inside > CASES // every // 8

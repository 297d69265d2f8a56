"""Data files that were cut off or overwritten: opening works with exactly the stored data, or says what is wrong.

Every case runs in a process of its own, because a file that is shorter than the engine believes ends a process that
reads it. What the engine cannot know is a flipped byte inside a stored value: LMDB keeps no checksums of pages, and
such a value is given out as it lies. The cases here damage what is checked: lengths, the engine's own pages, and the
shape of stored changes.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.errors import StoreError
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, Vbuuid
from headwater.protocol.values import Datatype
from headwater.store.bucket import StoreEnvironment
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket
from headwater.store.settling import settle_now

ENVIRONMENT = StoreEnvironment(now_ns=lambda: 1_700_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(7))
SECRET = (1, 2)
DOCUMENTS = {b"key-%d" % number: b"value-%d" % number * 50 for number in range(400)}
VBUCKETS = 4
RIGHT, REFUSED, WRONG = 0, 10, 11


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket that was closed in order, half of it settled."""
    folder = tmp_path_factory.mktemp("stored") / "bucket"
    engine = LmdbEngine(folder)
    facts = BucketFacts(name="b", uuid="u", vbuckets=VBUCKETS)
    bucket = create_bucket(engine, facts, environment=ENVIRONMENT, secret=SECRET)
    for vbucket in range(VBUCKETS):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    for number, (key, value) in enumerate(DOCUMENTS.items()):
        bucket.put_mutation(
            number % VBUCKETS, collection_id=DEFAULT_COLLECTION, key=key, value=value, datatype=Datatype.RAW
        )
        if number % 40 == 0:
            bucket.commit_now()
        if number == 200:
            settle_now(bucket)
    close_bucket(bucket)
    engine.close()
    return folder


def opened(folder: Path) -> int:
    """How opening a folder ends, as an exit code."""
    try:
        engine = LmdbEngine(folder)
        bucket = open_bucket(engine, environment=ENVIRONMENT, secret=SECRET)
        for number, (key, value) in enumerate(DOCUMENTS.items()):
            entry = bucket.find(number % VBUCKETS, DEFAULT_COLLECTION, key)
            if entry is None or bucket.read(number % VBUCKETS, entry).value != value:
                return WRONG
    except StoreError as error:
        return REFUSED if error.hint else WRONG
    return RIGHT


def in_a_process(function: Callable[[], int]) -> int:
    """The exit code, or the negative number of the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        # Whatever happens, the child must not go on as a second copy of the tests.
        code = WRONG
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def damaged_copy(stored: Path, folder: Path, damage: Callable[[bytearray], None]) -> Path:
    copy = folder / "copy"
    shutil.copytree(stored, copy)
    data = bytearray((copy / "data.mdb").read_bytes())
    damage(data)
    (copy / "data.mdb").write_bytes(data)
    return copy


def test_what_is_not_damaged_opens(stored: Path, tmp_path: Path) -> None:
    assert in_a_process(lambda: opened(damaged_copy(stored, tmp_path, lambda data: None))) == RIGHT


@pytest.mark.parametrize("kept", [0, 100, 4096, 8192, 20_000, 0.25, 0.5, 0.9])
def test_a_file_that_was_cut_off_is_refused_or_right(stored: Path, tmp_path: Path, kept: float) -> None:
    def cut(data: bytearray) -> None:
        del data[int(kept if kept > 1 else kept * len(data)) :]

    assert in_a_process(lambda: opened(damaged_copy(stored, tmp_path, cut))) in (RIGHT, REFUSED)


@pytest.mark.parametrize("page", range(12))
def test_a_page_that_was_overwritten_with_zeros_is_refused_or_right(stored: Path, tmp_path: Path, page: int) -> None:
    def wipe(data: bytearray) -> None:
        data[page * 4096 : (page + 1) * 4096] = bytes(4096)

    assert in_a_process(lambda: opened(damaged_copy(stored, tmp_path, wipe))) in (RIGHT, REFUSED)


@pytest.mark.parametrize("seed", range(8))
def test_pages_that_were_overwritten_with_junk_do_not_end_the_process(stored: Path, tmp_path: Path, seed: int) -> None:
    """Junk may fall into a value, which nobody can know, so a wrong value is no fault here; a crash is."""
    chosen = random.Random(seed)

    def spoil(data: bytearray) -> None:
        page = chosen.randrange(len(data) // 4096)
        data[page * 4096 : (page + 1) * 4096] = chosen.randbytes(4096)

    assert in_a_process(lambda: opened(damaged_copy(stored, tmp_path, spoil))) in (RIGHT, REFUSED, WRONG)

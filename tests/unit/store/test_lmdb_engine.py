"""The walk over LMDB's pages: sound files are never refused, whatever their history, and single faults are named.

`tests/faults/test_torn_file.py` damages files everywhere; here each kind of fault is made on purpose.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import lmdb
import pytest

from headwater.errors import DataDamaged, DataInUse
from headwater.store import lmdb_engine
from headwater.store.engine import PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine, check_pages
from support.cases import case_apart

PAGE = 4096
TABLES = ["one", "two", "three"]
SIZES = [0, 10, 300, 2000, 5000, 60_000]


BRANCH, LEAF, LARGE = 1, 2, 4
"""Flags of pages."""
NUMBER_AT = 144
"""Where a meta page has the number of its transaction."""


def new_environment(folder: Path) -> lmdb.Environment:
    return lmdb.open(str(folder), map_size=2**32, max_dbs=len(TABLES), meminit=False, sync=False)


def last_page(data: bytes) -> int:
    """Of the newest transaction."""
    metas = [struct.unpack_from("<QQ", data, page * PAGE + 16 + 24 + 96) for page in (0, 1)]
    return int(max(metas, key=lambda meta: meta[1])[0])


# --- sound files --------------------------------------------------------------------------------------------------


def test_a_sound_file_is_never_refused(tmp_path: Path) -> None:
    """Random rows come, grow, shrink and go, within transactions and between them, beside readers of old states.

    Two things that would be signs of damage elsewhere do occur: a file that ends before the last page, and a value that
    keeps more pages than it needs.
    """
    short = sum(states_of_a_sound_file(tmp_path / str(seed), seed) for seed in range(8))
    assert short > 0


def states_of_a_sound_file(folder: Path, seed: int) -> int:
    """Checks many. Returns how many of them ended before their last page."""
    chosen = random.Random(seed)
    folder.mkdir()
    environment = new_environment(folder)
    tables = [environment.open_db(name.encode()) for name in TABLES]
    keys: list[set[bytes]] = [set() for _ in TABLES]
    reader = None
    short = 0
    for number in range(120):
        with environment.begin(write=True) as transaction:
            for _ in range(chosen.choice([1, 3, 30, 150])):
                at = chosen.randrange(len(TABLES))
                if keys[at] and chosen.random() < 0.5:
                    transaction.delete(keys[at].pop(), db=tables[at])
                else:
                    key = b"%0*d" % (chosen.choice([1, 10, 200]), chosen.randrange(10**9))
                    for _ in range(chosen.choice([1, 1, 2])):
                        transaction.put(key, bytes(chosen.choice(SIZES)), db=tables[at])
                    keys[at].add(key)
            if chosen.random() < 0.03:
                transaction.drop(tables[0], delete=False)
                keys[0].clear()
        reader = environment.begin() if chosen.random() < 0.2 else reader if chosen.random() < 0.8 else None
        data = folder / "data.mdb"
        short += data.stat().st_size < (last_page(data.read_bytes()) + 1) * PAGE
        if number % 4 == 0 or short == 1:
            check_pages(data, TABLES)
    del reader
    environment.close()
    check_pages(folder / "data.mdb", TABLES)
    return short


def test_what_is_not_there_yet_is_sound(tmp_path: Path) -> None:
    check_pages(tmp_path / "data.mdb", TABLES)
    (tmp_path / "data.mdb").touch()
    check_pages(tmp_path / "data.mdb", TABLES)
    new_environment(tmp_path).close()
    check_pages(tmp_path / "data.mdb", TABLES)


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A tree of two levels, large values, and free pages."""
    environment = new_environment(tmp_path)
    one, two = environment.open_db(b"one"), environment.open_db(b"two")
    environment.open_db(b"three")
    with environment.begin(write=True) as transaction:
        for number in range(500):
            transaction.put(b"key %05d" % number, b"v" * 50, db=one)
        for number in range(10):
            transaction.put(b"large %d" % number, bytes([number]) * 9000, db=two)
    with environment.begin(write=True) as transaction:
        for number in range(5):
            transaction.delete(b"large %d" % number, db=two)
    with environment.begin(write=True) as transaction:
        transaction.put(b"key 00000", b"w", db=one)
    environment.close()
    check_pages(tmp_path / "data.mdb", TABLES)
    return tmp_path / "data.mdb"


def pages_with(data: bytes, flags: int, sign: bytes = b"") -> list[int]:
    """Where pages of a kind begin that have something in them."""
    starts = range(2 * PAGE, len(data), PAGE)
    return [at for at in starts if struct.unpack_from("<H", data, at + 10)[0] == flags and sign in data[at : at + PAGE]]


def refusal(path: Path, damaged: bytes) -> str | None:
    """Why a file is refused; None where it is not, because the page was of an older transaction."""
    path.write_bytes(damaged)
    try:
        check_pages(path, TABLES)
    except DataDamaged as error:
        return reason_of(error, path)
    return None


def reason_of(error: DataDamaged, path: Path) -> str:
    place, _, reason = error.reason.partition(" is damaged: ")
    assert place == f"the data in {path.parent}"
    assert error.hint == "Restore it from a backup or a replica"
    return reason


def refusals(path: Path, starts: list[int], at: int, junk: bytes) -> set[str]:
    """The reasons when the same bytes are put into each of some pages in turn."""
    sound = path.read_bytes()
    found = [refusal(path, sound[: s + at] + junk + sound[s + at + len(junk) :]) for s in starts]
    path.write_bytes(sound)
    return {reason for reason in found if reason is not None}


def one_of(found: set[str], *parts: str) -> None:
    assert found, "nothing was refused"
    assert all(any(part in reason for part in parts) for reason in found), found


@case_apart(LEAF, 0, b"\x63", ["is not what"])
@case_apart(LEAF, 10, b"\x01", ["is not what"])
@case_apart(LEAF, 10, b"\x22", ["is not what"])
@case_apart(BRANCH, 10, b"\x02", ["is not what"])
@case_apart(LEAF, 12, b"\x00\x00", ["list of nodes"])
@case_apart(LEAF, 12, b"\x11\x00", ["list of nodes"])
@case_apart(LEAF, 12, b"\xff\xff", ["list of nodes"])
@case_apart(LEAF, 14, b"\xff\xff", ["list of nodes", "begin"])
@case_apart(LEAF, 16, b"\xff\x0f", ["outside", "begin"])
@case_apart(LEAF, 16, b"\x00\x00", ["begin"])
@case_apart(LARGE, 0, b"\x63", ["does not begin"])
@case_apart(LARGE, 10, b"\x02", ["does not begin"])
@case_apart(LARGE, 12, b"\x01\x00\x00\x00", ["does not begin"])
@case_apart(LARGE, 12, b"\xff\xff\xff\xff", ["used twice"])
def test_pages_that_are_not_sound(data: Path, kind: int, at: int, junk: bytes, reasons: list[str]) -> None:
    one_of(refusals(data, pages_with(data.read_bytes(), kind), at, junk), *reasons)


def test_keys_that_are_not_in_order(data: Path) -> None:
    sound = data.read_bytes()
    keys = [at for number in range(10, 490) for at in positions(sound, b"key %05d" % number)]
    found = {refusal(data, sound[:at] + b"zzz" + sound[at + 3 :]) for at in keys[::7]}
    one_of({reason for reason in found if reason}, "not in order", "does not hold", "is not what")


def positions(data: bytes, part: bytes) -> list[int]:
    found, at = [], data.find(part)
    while at >= 0:
        found.append(at)
        at = data.find(part, at + 1)
    return found


def test_free_pages_that_are_in_use(data: Path) -> None:
    sound = data.read_bytes()
    newest = max((0, 1), key=lambda page: struct.unpack_from("<Q", sound, page * PAGE + NUMBER_AT)[0])
    root = struct.unpack_from("<Q", sound, newest * PAGE + 16 + 24 + 40)[0]
    list_end = struct.unpack_from("<H", sound, root * PAGE + 12)[0]
    node = struct.unpack_from("<H", sound, root * PAGE + list_end - 2)[0]
    # The row's key has 8 bytes, then come the count and the pages.
    first = root * PAGE + node + 8 + 8
    count = struct.unpack_from("<Q", sound, first)[0]
    assert count > 0
    for value, reason in ((struct.pack("<Q", root), "free and in use"), (struct.pack("<Q", 2**40), "free and in use")):
        damaged = sound[: first + 8] + value + sound[first + 16 :]
        assert reason in (refusal(data, damaged) or "")
    assert "length" in (refusal(data, sound[:first] + struct.pack("<Q", count + 1) + sound[first + 8 :]) or "")


def test_a_table_that_has_lost_its_name(data: Path) -> None:
    sound = data.read_bytes()
    damaged = sound.replace(b"three", b"threw")
    assert refusal(data, damaged) == "a table has lost its name"
    # A later version may have more tables than we know; that it is later, it says itself.
    data.write_bytes(sound)
    check_pages(data, TABLES[:2])


def test_a_file_that_is_cut_off(data: Path) -> None:
    sound = data.read_bytes()
    assert refusal(data, sound[:100]) == "the file is cut off"
    assert refusal(data, sound[:PAGE]) == "the file is cut off"
    assert "cut off" in (refusal(data, sound[: len(sound) // 2]) or "")


@case_apart(0, b"\x05", "is not one")
@case_apart(10, b"\x02", "is not one")
@case_apart(16, b"\x00", "is not one")
@case_apart(20, b"\x02", "is not one")
@case_apart(40, b"\x01\x10", "pages of")
@case_apart(40, b"\x00\x00\x08", "pages of")
@case_apart(44, b"\x04", "no known kind")
@case_apart(46, b"\xff", "no known kind")
@case_apart(80, b"\xff\xff", "is used twice, or is beyond")
@case_apart(136, b"\x00\x00", "the last page is 0")
@case_apart(142, b"\xff", "the last page is")
@case_apart(144, b"\xf0\xff", "do not follow")
def test_meta_pages(data: Path, at: int, junk: bytes, reason: str) -> None:
    found = refusals(data, [0, PAGE], at, junk)
    assert any(reason in refused for refused in found), found


def test_other_builds_of_lmdb_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are not known here."""
    (tmp_path / "data.mdb").write_bytes(b"something else")
    with pytest.raises(DataDamaged):
        check_pages(tmp_path / "data.mdb", TABLES)
    monkeypatch.setattr(lmdb_engine.lmdb, "version", lambda: (1, 0, 0))
    check_pages(tmp_path / "data.mdb", TABLES)


@pytest.mark.parametrize("transactions", [5, 6, 7, 8])
def test_no_older_state_passes_for_the_newest(tmp_path: Path, transactions: int) -> None:
    """One flipped bit of a meta page's number could make it the older of the two, or its older one the newer."""
    engine = LmdbEngine(tmp_path)
    for number in range(transactions):
        engine.write([PutRow(Table.BUCKET, b"k", b"%d" % number)])
    engine.close()
    path = tmp_path / "data.mdb"
    sound = path.read_bytes()
    tables = [*(table.value.decode() for table in Table), "engine"]
    check_pages(path, tables)
    for meta in range(2):
        for bit in range(64):
            damaged = bytearray(sound)
            damaged[meta * PAGE + NUMBER_AT + bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(DataDamaged, match=r"meta page"):
                check_pages(path, tables)


def test_the_lock_does_not_depend_on_a_file_that_may_be_deleted(tmp_path: Path) -> None:
    LmdbEngine(tmp_path).close()
    engine = LmdbEngine(tmp_path)
    (tmp_path / "owner").unlink()
    with pytest.raises(DataInUse):
        LmdbEngine(tmp_path)
    engine.close()
    (tmp_path / "owner").unlink()
    again = LmdbEngine(tmp_path)
    assert not again.was_left_alone
    again.close()

"""Data files that were cut off or overwritten, or in which bits were flipped: damage is found and never served.

The judge shares no code with the store: it knows what was written, asks for every document and compares. A refusal is a
find; a document that is another one, or is not there any more, was served. What is damaged is a compacted copy of the
file (LMDB's own), in which every page is in use: elsewhere a flipped bit may lie where nothing is stored.

Every case runs in a process of its own, because a file that is shorter than the engine believes ends a process that
reads it. The long form asks real nodes over the network, and reads their streams.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from urllib.request import urlopen

import lmdb
import pytest

from headwater.errors import StoreError, VBucketDamaged
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, Vbuuid
from headwater.protocol.values import Datatype
from headwater.store.bucket import StoreEnvironment
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket
from headwater.store.settling import settle_now
from support.node_process import NodeProcess

ENVIRONMENT = StoreEnvironment(now_ns=lambda: 1_700_000_000_000_000_000, new_vbuuid=lambda: Vbuuid(7))
SECRET = (1, 2)
VBUCKETS = 4
PAGE = 4096
DOCUMENTS = {b"key-%04d" % number: b"value-%04d." % number * 50 for number in range(1200)}
RIGHT, FOUND, WRONG = 0, 10, 11
FLIPS_AND_CUTS = 60

Damage = Callable[[bytearray, random.Random], None]


def vbucket_of(key: bytes) -> int:
    return int(key[4:]) % VBUCKETS


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a node: most of its bucket in blocks, the rest in the journal; closed in order, compacted."""
    data = tmp_path_factory.mktemp("stored") / "data"
    folder = data / "buckets" / "default"
    engine = LmdbEngine(folder)
    facts = BucketFacts(name="default", uuid="5eed" * 8, vbuckets=VBUCKETS)
    bucket = create_bucket(engine, facts, environment=ENVIRONMENT, secret=SECRET)
    for vbucket in range(VBUCKETS):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    for number, (key, value) in enumerate(DOCUMENTS.items()):
        bucket.put_mutation(
            vbucket_of(key), collection_id=DEFAULT_COLLECTION, key=key, value=value, datatype=Datatype.RAW,
            expiry=2**32 - 1 - number,
        )  # fmt: skip
        if number % 100 == 99:
            bucket.commit_now()
        if number in (399, 899):
            settle_now(bucket)
    close_bucket(bucket)
    engine.close()
    compacted = folder.with_name("compacted")
    compacted.mkdir()
    with lmdb.open(str(folder), max_dbs=8) as environment:
        environment.copy(str(compacted), compact=True)
    shutil.rmtree(folder)
    compacted.rename(folder)
    return data


# --- where to damage it -------------------------------------------------------------------------------------------


def flip(data: bytearray, at: int, chosen: random.Random) -> None:
    data[at] ^= 1 << chosen.randrange(8)


def places(data: bytearray, text: bytes) -> list[int]:
    """Where a text stands: keys and values stand once in blocks, or once in the journal."""
    found = [match.start() for match in re.finditer(re.escape(text), data)]
    assert found
    return found


def a_key(data: bytearray, chosen: random.Random) -> None:
    flip(data, chosen.choice(places(data, chosen.choice(list(DOCUMENTS)))) + chosen.randrange(8), chosen)


def a_value(data: bytearray, chosen: random.Random) -> None:
    text = chosen.choice(list(DOCUMENTS.values()))
    flip(data, chosen.choice(places(data, text)) + chosen.randrange(len(text)), chosen)


def a_header(data: bytearray, chosen: random.Random) -> None:
    """Lengths, seqno, revision, flags, expiry: what stands in front of a key, but its collection."""
    flip(data, chosen.choice(places(data, chosen.choice(list(DOCUMENTS)))) - 2 - chosen.randrange(54), chosen)


def the_journal(data: bytearray, chosen: random.Random) -> None:
    """The documents that were written last have not been settled."""
    flip(data, chosen.choice(places(data, chosen.choice(list(DOCUMENTS)[1000:]))) + chosen.randrange(300), chosen)


def a_tree_page(data: bytearray, chosen: random.Random) -> None:
    """The number, the kind, the bounds and the list of a page, or the head and the key of one of its nodes."""
    pages = [at for at in range(2 * PAGE, len(data), PAGE) if is_tree_page(data, at)]
    at = chosen.choice(pages)
    list_end = struct.unpack_from("<H", data, at + 12)[0]
    nodes = struct.unpack_from(f"<{(list_end - 16) // 2}H", data, at + 16)
    node = at + chosen.choice(nodes)
    key_bytes = struct.unpack_from("<H", data, node + 6)[0]
    fields = [*range(at, at + 8), *range(at + 10, at + list_end), *range(node, node + 8 + key_bytes)]
    flip(data, chosen.choice(fields), chosen)


def is_tree_page(data: bytearray, at: int) -> bool:
    number, flags = struct.unpack_from("<QxxH", data, at)
    return number == at // PAGE and flags in (0x01, 0x02)


def a_meta_page(data: bytearray, chosen: random.Random) -> None:
    """What LMDB reads of the newest: magic, version, roots, depth, counts, last page, transaction."""
    fields = [*range(16, 24), *range(40, 44), *range(46, 88), *range(94, 136), *range(136, 152)]
    flip(data, PAGE + chosen.choice(fields), chosen)


def a_page_zeroed(data: bytearray, chosen: random.Random) -> None:
    at = PAGE * chosen.randrange(1, len(data) // PAGE)
    data[at : at + PAGE] = bytes(PAGE)


def a_page_of_junk(data: bytearray, chosen: random.Random) -> None:
    at = PAGE * chosen.randrange(len(data) // PAGE)
    data[at : at + PAGE] = chosen.randbytes(PAGE)


def a_page_of_ones(data: bytearray, chosen: random.Random) -> None:
    at = PAGE * chosen.randrange(2, len(data) // PAGE)
    data[at : at + PAGE] = b"\xff" * PAGE


def another_page(data: bytearray, chosen: random.Random) -> None:
    at, source = (PAGE * page for page in chosen.sample(range(2, len(data) // PAGE), 2))
    data[at : at + PAGE] = data[source : source + PAGE]


def the_end_of_zeros(data: bytearray, chosen: random.Random) -> None:
    """What some file systems give after a crash: the right length, but nothing in the last pages."""
    at = PAGE * chosen.randrange(2, len(data) // PAGE)
    data[at:] = bytes(len(data) - at)


def the_end_cut_off(data: bytearray, chosen: random.Random) -> None:
    del data[chosen.randrange(len(data) - PAGE) :]


KINDS: tuple[Damage, ...] = (
    a_key, a_value, a_header, the_journal, a_tree_page, a_meta_page, a_page_zeroed, a_page_of_junk, a_page_of_ones,
    another_page, the_end_of_zeros, the_end_cut_off,
)  # fmt: skip


def damaged_copy(stored: Path, folder: Path, damage: Damage, seed: int) -> Path:
    copy = folder / f"{damage.__name__}-{seed}"
    shutil.copytree(stored, copy)
    path = copy / "buckets" / "default" / "data.mdb"
    data = bytearray(path.read_bytes())
    damage(data, random.Random(seed))
    path.write_bytes(data)
    return copy


# --- in a process -------------------------------------------------------------------------------------------------


def opened(data: Path) -> int:
    """How it ends to open a bucket and read every document, as an exit code."""
    found = RIGHT
    try:
        bucket = open_bucket(LmdbEngine(data / "buckets" / "default"), environment=ENVIRONMENT, secret=SECRET)
        for key, value in DOCUMENTS.items():
            if vbucket_of(key) in bucket.vbuckets.damage:
                found = FOUND
                continue
            entry = bucket.find(vbucket_of(key), DEFAULT_COLLECTION, key)
            if entry is None or entry.expiry != 2**32 - 1 - int(key[4:]):
                return WRONG
            if bucket.read(vbucket_of(key), entry).value != value:
                return WRONG
    except VBucketDamaged:
        return WRONG  # Opening reads everything, and so it finds everything.
    except StoreError as error:
        return FOUND if error.hint and "\n" not in str(error) else WRONG
    return found


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


def nothing(data: bytearray, chosen: random.Random) -> None:
    """What is opened is changed by that, so this is a copy as well."""


def too_long(data: bytearray, chosen: random.Random) -> None:
    """A crash leaves pages behind the last that count for nothing."""
    data += chosen.randbytes(3 * PAGE)


def nothing_left(data: bytearray, chosen: random.Random) -> None:
    """A new file: there is nothing in it that could be wrong, and the store finds no bucket."""
    data.clear()


def bytes_anywhere(data: bytearray, chosen: random.Random) -> None:
    """Headers of pages and nodes, keys, values, lists of free pages, and what is not in use."""
    page = chosen.randrange(len(data) // PAGE)
    at = page * PAGE + chosen.choice([chosen.randrange(16), chosen.randrange(64), chosen.randrange(PAGE - 8)])
    junk = chosen.choice([b"\0", b"\xff", chosen.randbytes(1), chosen.randbytes(2), chosen.randbytes(8)])
    data[at : at + len(junk)] = junk


@pytest.mark.parametrize(("change", "outcome"), [(nothing, RIGHT), (too_long, RIGHT), (nothing_left, FOUND)])
def test_what_is_not_damaged_opens(stored: Path, tmp_path: Path, change: Damage, outcome: int) -> None:
    assert in_a_process(lambda: opened(damaged_copy(stored, tmp_path, change, 0))) == outcome


@pytest.mark.parametrize("cases", [30, pytest.param(600, marks=pytest.mark.soak)])
def test_bytes_that_were_overwritten_are_found_or_harmless(stored: Path, tmp_path: Path, cases: int) -> None:
    for seed in range(cases):
        copy = damaged_copy(stored, tmp_path, bytes_anywhere, seed)
        assert in_a_process(lambda copy=copy: opened(copy)) in (RIGHT, FOUND), f"seed {seed}"
        shutil.rmtree(copy)


@pytest.mark.parametrize("damage", KINDS)
def test_damage_is_found(stored: Path, tmp_path: Path, damage: Damage) -> None:
    for seed in range(4):
        copy = damaged_copy(stored, tmp_path, damage, seed)
        assert in_a_process(lambda copy=copy: opened(copy)) == FOUND, f"seed {seed}"


# --- over the network ---------------------------------------------------------------------------------------------

_GET, _STREAM_REQUEST, _MUTATION, _STREAM_END, _MARKER = 0x00, 0x53, 0x57, 0x55, 0x56
_HEADER = struct.Struct(">BBHBBHIIQ")
_TO_LATEST = 0x04
_UNREADABLE = {0x07, 0x84, 0x86}
"""Not my vbucket, internal error, temporary failure."""


Frames = Iterator[tuple[int, int, int, bytes]]


def frames(connection: socket.socket) -> Frames:
    """Magic, opcode, vbucket or status, and body of everything that comes."""
    buffered = b""
    while True:
        while len(buffered) >= 24 and len(buffered) >= 24 + int.from_bytes(buffered[8:12]):
            magic, opcode, _, _, _, specific, body_bytes, _, _ = _HEADER.unpack_from(buffered)
            yield magic, opcode, specific, buffered[24 : 24 + body_bytes]
            buffered = buffered[24 + body_bytes :]
        received = connection.recv(1 << 20)
        if not received:
            return
        buffered += received


def log_in(connection: socket.socket, node: NodeProcess) -> Frames:
    """Returns what comes from then on."""
    token = f"\0{node.user}\0{node.password}".encode()
    for opcode, key, value in ((0x21, b"PLAIN", token), (0x89, b"default", b"")):
        size = len(key) + len(value)
        connection.sendall(_HEADER.pack(0x80, opcode, len(key), 0, 0, 0, size, 0, 0) + key + value)
    received = frames(connection)
    assert [next(received)[2] for _ in range(2)] == [0, 0]
    return received


def open_streams(connection: socket.socket, vbuckets: Iterable[int], *, flags: int) -> None:
    name = b"a judge"
    opened = _HEADER.pack(0x80, 0x50, len(name), 8, 0, 0, 8 + len(name), 0, 0) + struct.pack(">II", 0, 1) + name
    connection.sendall(opened)
    for vbucket in vbuckets:
        extras = struct.pack(">IIQQQQQ", flags, 0, 0, 2**64 - 1, 0, 0, 0)
        connection.sendall(_HEADER.pack(0x80, _STREAM_REQUEST, 0, 48, 0, vbucket, 48, vbucket, 0) + extras)


def gets(connection: socket.socket, answers: Frames) -> int:
    """Ask for every document by its key."""
    found = RIGHT
    for number, key in enumerate(DOCUMENTS):
        connection.sendall(_HEADER.pack(0x80, _GET, len(key), 0, 0, vbucket_of(key), len(key), number, 0) + key)
    for value in DOCUMENTS.values():
        _, _, status, body = next(answers)
        if status in _UNREADABLE:
            found = FOUND
        elif status != 0 or body[4:] != value:
            return WRONG
    return found


def streamed(connection: socket.socket, received: Frames) -> int:
    """Read every vbucket from 0 to its end. One that does not come to its end is found; what comes must be right."""
    open_streams(connection, range(VBUCKETS), flags=_TO_LATEST)
    seen: dict[bytes, bytes] = {}
    ends = {}
    for magic, opcode, specific, body in received:
        if magic == 0x81 and opcode == _STREAM_REQUEST and specific != 0:
            assert specific in _UNREADABLE
            ends[len(ends) + 100] = specific
        elif magic == 0x80 and opcode == _MUTATION:
            seen[body[31:39]] = body[39:]
        elif magic == 0x80 and opcode == _STREAM_END:
            ends[specific] = int.from_bytes(body[:4])
        if len(ends) == VBUCKETS:
            break
    complete = {vbucket for vbucket, reason in ends.items() if vbucket < VBUCKETS and reason == 0}
    if any(DOCUMENTS.get(key) != value for key, value in seen.items()):
        return WRONG
    if any(vbucket_of(key) in complete and key not in seen for key in DOCUMENTS):
        return WRONG
    return RIGHT if len(complete) == VBUCKETS else FOUND


def served(data: Path) -> int:
    """What clients of a node on this data get."""
    with NodeProcess(data, "--vbuckets", str(VBUCKETS), "--scrub-bytes-per-second", "0") as node:
        try:
            node.start()
        except AssertionError:
            assert "Traceback" not in node.log()
            return FOUND
        outcomes = []
        for judge in (gets, streamed):
            with socket.create_connection((node.address.host, node.address.port), timeout=20) as connection:
                outcomes.append(judge(connection, log_in(connection, node)))
        return max(outcomes)


def test_a_running_node_stops_what_is_damaged_and_serves_the_rest(stored: Path, tmp_path: Path) -> None:
    copy = damaged_copy(stored, tmp_path, nothing, 0)
    with NodeProcess(copy, "--vbuckets", str(VBUCKETS)) as node:
        node.start()
        with socket.create_connection((node.address.host, node.address.port), timeout=20) as live:
            received = log_in(live, node)
            open_streams(live, [2], flags=0)
            sent = list(islice((frame for frame in received if frame[1] == _MUTATION), len(DOCUMENTS) // VBUCKETS))
            assert {vbucket for _, _, vbucket, _ in sent} == {2}
            # In the mapped file this is as if the system had read the page again, and the disk had changed it.
            path = copy / "buckets" / "default" / "data.mdb"
            at = places(bytearray(path.read_bytes()), b"value-0002.")[0]
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"V")
            with socket.create_connection((node.address.host, node.address.port), timeout=20) as connection:
                answers = log_in(connection, node)
                assert gets(connection, answers) == FOUND
                connection.sendall(_HEADER.pack(0x80, 0xB5, 0, 0, 0, 0, 0, 0, 0))
                shown = json.loads(next(answers)[3])["vBucketServerMap"]["vBucketMap"]
                assert [copies[0] for copies in shown] == [0] * VBUCKETS
            assert next(received)[1::2] == (_STREAM_END, struct.pack(">I", 5))
        with urlopen(f"{node.http_url}/ready") as answer:
            assert json.load(answer) == {"status": "ready", "damaged_vbuckets": 1}
        assert node.log().count("the vbucket is stopped, the others go on") == 1


@pytest.mark.soak
def test_of_sixty_damaged_files_none_is_served(stored: Path, tmp_path: Path) -> None:
    assert served(damaged_copy(stored, tmp_path, nothing, 0)) == RIGHT
    outcomes = {}
    for seed in range(FLIPS_AND_CUTS):
        damage = KINDS[seed % len(KINDS)]
        copy = damaged_copy(stored, tmp_path, damage, seed=1000 + seed)
        outcomes[f"{damage.__name__} {seed}"] = served(copy)
        shutil.rmtree(copy)
    assert {name: outcome for name, outcome in outcomes.items() if outcome != FOUND} == {}

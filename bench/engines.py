"""LMDB compared with RocksDB on the store's design: commits, settling, scans and point reads of blocks.

Not part of `make bench`: it backs a decision (`docs/internals/decisions.md`) and needs both engines installed. Run
it with `python -m bench engines`.
"""

from __future__ import annotations

import random
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from bench.report import Section

COMMITS, COMMIT_BYTES = 400, 64 * 1024
VBUCKETS, BLOCKS_A_VBUCKET, BLOCK_BYTES = 256, 8, 64 * 1024
READS = 5_000


class Engine(Protocol):
    def write(self, rows: Iterable[tuple[bytes, bytes]]) -> None: ...
    def scan(self) -> Iterator[Any]: ...
    def get(self, key: bytes) -> Any: ...
    def size_bytes(self) -> int: ...


class Lmdb:
    def __init__(self, path: Path) -> None:
        import lmdb

        self._path = path
        self._environment = lmdb.open(str(path), map_size=2**40, max_dbs=2)
        self._table = self._environment.open_db(b"blocks")

    def write(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        with self._environment.begin(write=True, db=self._table) as transaction:
            for key, value in rows:
                transaction.put(key, value)

    def scan(self) -> Iterator[Any]:
        with self._environment.begin(db=self._table, buffers=True) as transaction:
            for _, value in transaction.cursor():
                yield value

    def get(self, key: bytes) -> Any:
        with self._environment.begin(db=self._table, buffers=True) as transaction:
            return transaction.get(key)[:1]

    def size_bytes(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self._path.iterdir())


class RocksDb:
    def __init__(self, path: Path) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self._path = path
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(64 * 1024 * 1024)
        self._database = Rdict(str(path), options)
        self._durable = WriteOptions()
        self._durable.sync = True

    def write(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, value in rows:
            batch.put(key, value)
        self._database.write(batch, self._durable)

    def scan(self) -> Iterator[Any]:
        for _, value in self._database.items():
            yield value

    def get(self, key: bytes) -> Any:
        return self._database[key][:1]

    def size_bytes(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self._path.iterdir())


def block_key(vbucket: int, seqno: int) -> bytes:
    return struct.pack(">HQ", vbucket, seqno)


def measure(engine: Engine) -> list[str]:
    random_bytes = random.Random(7).randbytes(BLOCK_BYTES)
    start = time.perf_counter()
    for number in range(COMMITS):
        engine.write([(block_key(0xFFFF, number), random_bytes[:COMMIT_BYTES])])
    commit_s = (time.perf_counter() - start) / COMMITS
    start = time.perf_counter()
    for step in range(BLOCKS_A_VBUCKET):
        engine.write((block_key(vbucket, step), random_bytes) for vbucket in range(VBUCKETS))
    settle_s = time.perf_counter() - start
    start = time.perf_counter()
    scanned = 0
    for value in engine.scan():
        scanned += len(value)
    scan_s = time.perf_counter() - start
    rng = random.Random(1)
    start = time.perf_counter()
    for _ in range(READS):
        engine.get(block_key(rng.randrange(VBUCKETS), rng.randrange(BLOCKS_A_VBUCKET)))
    read_s = (time.perf_counter() - start) / READS
    settled = VBUCKETS * BLOCKS_A_VBUCKET * BLOCK_BYTES
    return [
        f"{commit_s * 1e3:.2f} ms",
        f"{settled / settle_s / 1e6:.0f} MB/s",
        f"{scanned / scan_s / 1e9:.1f} GB/s",
        f"{read_s * 1e6:.1f} µs",
        f"{engine.size_bytes() / scanned:.2f}",
    ]


def run() -> Section:
    rows = []
    for engine in (Lmdb, RocksDb):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = Path(folder) / "data"
            path.mkdir()
            rows.append([engine.__name__, *measure(engine(path))])
    return Section(
        title="Engines",
        text=f"Durable commits of one row of {COMMIT_BYTES // 1024} KiB; settling {VBUCKETS} blocks of "
        f"{BLOCK_BYTES // 1024} KiB a transaction; reading every block once; reading one block at random; "
        "bytes on disk per byte stored.",
        columns=["engine", "commit", "settle", "scan", "point read", "space"],
        rows=rows,
    )

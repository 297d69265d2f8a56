"""Keeps a full-text index of a bucket in SQLite, exactly once.

    python examples/search_index.py couchbase://127.0.0.1/default index.db --search 'graz OR lyon'

The index and its offsets are written in one transaction, so whenever the program is killed it goes on without a gap and
without a double. An index holds the newest version of each document only, so what a failover takes
back can't be undone from it: the vbucket is forgotten, and read again from its beginning.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

import headwater
from headwater import HeadwaterError, SqliteCheckpoint

SCHEMA = """
    CREATE VIRTUAL TABLE IF NOT EXISTS documents USING fts5 (
        text, key UNINDEXED, collection UNINDEXED, collection_id UNINDEXED, vbucket UNINDEXED);
    CREATE TABLE IF NOT EXISTS places (
        vbucket, collection_id, key, document INTEGER, PRIMARY KEY (vbucket, collection_id, key));
"""


class SearchIndex:
    """The index, and where it is in the bucket's history."""

    def __init__(self, path: str, name: str) -> None:
        self._database = sqlite3.connect(path)
        self._database.executescript(SCHEMA)
        self._checkpoint = SqliteCheckpoint(path, name=name)

    def catch_up(self, client: headwater.blocking.Client) -> int:
        """Index what has changed since the last time. Gives the number of changes."""
        start = self._checkpoint.load_from(self._database) or headwater.Offsets(client.bucket_uuid)
        changes = 0
        while True:
            reading = client.batches(start=start, end="now", name="search-index")
            rolled_back: set[int] = set()
            for batch in reading:
                with self._database:
                    rolled_back |= set(self._apply(batch))
                    known = {
                        vbucket: offset
                        for vbucket, offset in reading.offsets.offsets.items()
                        if vbucket not in rolled_back
                    }
                    start = replace(reading.offsets, offsets=known)
                    self._checkpoint.save_in(self._database, start)
                changes += batch.num_rows
                if rolled_back:
                    break
            reading.close()
            if not rolled_back:
                return changes

    def _apply(self, batch: pa.RecordBatch) -> Iterator[int]:
        """Take in a batch. Gives the vbuckets that have to be read again."""
        for row in batch.to_pylist():
            match row["op"]:
                case "mutation":
                    self._forget("vbucket = :vbucket AND collection_id = :collection_id AND key = :key", row)
                    self._add(row)
                case "deletion" | "expiration":
                    self._forget("vbucket = :vbucket AND collection_id = :collection_id AND key = :key", row)
                case "collection_dropped" | "collection_created":
                    self._forget("vbucket = :vbucket AND collection_id = :collection_id", row)
                case "rollback":
                    self._forget("vbucket = :vbucket", row)
                    yield row["vbucket"]

    def _add(self, row: dict[str, object]) -> None:
        text = _text(row["value"])
        added = self._database.execute(
            "INSERT INTO documents VALUES (?, ?, ?, ?, ?)",
            (text, row["key"], f"{row['scope']}.{row['collection']}", row["collection_id"], row["vbucket"]),
        )
        self._database.execute(
            "INSERT INTO places VALUES (:vbucket, :collection_id, :key, :document)",
            {**row, "document": added.lastrowid},
        )

    def _forget(self, where: str, row: dict[str, object]) -> None:
        wanted = f"SELECT document FROM places WHERE {where}"
        self._database.execute(f"DELETE FROM documents WHERE rowid IN ({wanted})", row)
        self._database.execute(f"DELETE FROM places WHERE {where}", row)

    def search(self, words: str, limit: int = 10) -> list[tuple[str, str]]:
        """Collections and keys of the documents that fit best."""
        found = "SELECT collection, key FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?"
        return self._database.execute(found, (words, limit)).fetchall()


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep a full-text index of a bucket.")
    parser.add_argument("url", help="couchbase://host/bucket")
    parser.add_argument("database", help="the file of the index")
    parser.add_argument("--search", metavar="WORDS", help="words, and what SQLite's FTS5 knows beside: AND, OR, NOT, *")
    options = parser.parse_args()
    index = SearchIndex(options.database, name=options.url)
    user, password = os.environ.get("HEADWATER_USER"), os.environ.get("HEADWATER_PASSWORD")
    with headwater.blocking.connect(options.url, user=user, password=password) as client:
        print(index.catch_up(client), "changes indexed")
    try:
        found = index.search(options.search) if options.search else []
    except sqlite3.OperationalError as error:
        sys.exit(f"Error: {options.search} can't be searched for: {error}")
    for collection, key in found:
        print(collection, key)


if __name__ == "__main__":
    try:
        main()
    except HeadwaterError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

"""What must be true of a lake, checked with nothing of its own code but the reading of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from support.bucket_model import ENDS, Change, changed_at

Row = dict[str, Any]
Place = tuple[int, int, bytes]
"""Vbucket, collection and key."""


def table_rows(directory: Path) -> list[Row]:
    """The rows of a table, as anybody reads them; none where there is no table."""
    if not (directory / "_delta_log").exists():
        return []
    rows: list[Row] = DeltaTable(directory).to_pyarrow_table().to_pylist()
    return rows


def place_of(row: Row) -> Place:
    key = row["key_bytes"] if row["key_bytes"] is not None else row["key"].encode()
    return row["vbucket"], row["collection_id"], key


def check_documents(rows: Iterable[Row], expected: dict[Place, Change]) -> None:
    """The rows are exactly these documents."""
    found: dict[Place, Row] = {}
    for row in rows:
        assert place_of(row) not in found, f"two rows of {place_of(row)}"
        found[place_of(row)] = row
    assert found.keys() == expected.keys()
    for place, row in found.items():
        change = expected[place]
        value = row["content"] if row["document"] is None else row["document"].encode()
        assert (row["seqno"], row["rev"], row["cas"]) == (change.seqno, change.rev, change.cas), place
        assert (value, row["flags"], row["expiry"]) == (change.value, change.flags, change.expiry), place
        assert row["datatype"] == int(change.is_json), place
        assert (row["document"] is not None) == (change.is_json and _is_text(change.value)), place
        assert row["changed_at"] == changed_at(change), place


def _is_text(value: bytes | None) -> bool:
    try:
        return value is not None and value.decode() is not None
    except UnicodeDecodeError:
        return False


def check_no_duplicates(changes: Iterable[Row]) -> None:
    """No change is alive twice."""
    alive = [row for row in changes if not row["void"] and row["op"] != "rollback"]
    counts = Counter((row["vbucket"], row["vbuuid"], row["seqno"]) for row in alive)
    assert [place for place, count in counts.items() if count > 1] == []
    seqnos = Counter((row["vbucket"], row["seqno"]) for row in alive)
    assert [place for place, count in seqnos.items() if count > 1] == []


Version = tuple[int, int, bytes, int, int | None]
"""Vbucket, collection, key, and the seqnos at which it began and ended."""


def expected_history(delivered: Sequence[Sequence[Change]]) -> dict[Version, tuple[datetime | None, datetime | None]]:
    """The versions of what was handed out and is still true, by vbucket; with the times that they began and ended."""
    versions: dict[Version, tuple[datetime | None, datetime | None]] = {}
    for vbucket, changes in enumerate(delivered):
        current: dict[tuple[int, bytes], Change] = {}
        for change in changes:
            if change.op in ENDS:
                ended = [place for place in current if place[0] == change.collection_id]
            else:
                ended = [(change.collection_id, change.key or b"")]
            for place in ended:
                if (begun := current.pop(place, None)) is not None:
                    versions[vbucket, *place, begun.seqno, change.seqno] = changed_at(begun), changed_at(change)
            if change.op == "mutation":
                current[change.collection_id, change.key or b""] = change
        for place, begun in current.items():
            versions[vbucket, *place, begun.seqno, None] = changed_at(begun), None
    return versions


def check_history(rows: Iterable[Row], expected: dict[Version, tuple[datetime | None, datetime | None]]) -> None:
    found: dict[Version, Row] = {}
    for row in rows:
        version = (*place_of(row), row["seqno"], row["valid_to_seqno"])
        assert version not in found
        found[version] = row
        assert row["is_current"] == (row["valid_to_seqno"] is None)
    assert found.keys() == expected.keys()
    for version, row in found.items():
        begun, ended = expected[version]
        assert row["valid_from"] == begun
        # The end of a collection tells no time: then it is that of the batch.
        assert row["valid_to"] == ended or (ended is None and row["valid_to"] is not None)

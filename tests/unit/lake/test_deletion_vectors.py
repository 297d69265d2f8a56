"""Deletion vectors: as Delta's protocol has them, and nothing that is damaged is taken for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LakeDamaged
from headwater.lake.deletion_vectors import INLINE_BYTES_MAX, DeletionVector, VectorWriter
from headwater.lake.location import Location

ROWS = 1 << 33


def write(location: Location, *marked: list[int], inline_bytes_max: int = INLINE_BYTES_MAX) -> list[DeletionVector]:
    writer = VectorWriter(location, inline_bytes_max=inline_bytes_max)
    vectors = [writer.write(np.array(positions, dtype=np.int64)) for positions in marked]
    writer.close()
    return vectors


def read(location: Location, vector: DeletionVector, rows: int = ROWS) -> list[int]:
    return vector.read(location, "part-1.parquet", rows=rows).tolist()


def test_the_examples_of_the_protocol() -> None:
    """Delta's PROTOCOL.md, "Deletion Vector Descriptor Schema". Its inline example is big-endian, and Delta for Spark
    refuses it as well; the other text is one that it reads."""
    inline = {"storageType": "i", "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"}
    with pytest.raises(LakeDamaged, match="does not begin as one"):
        read(Location("/nowhere"), DeletionVector.of_action({**inline, "sizeInBytes": 40, "cardinality": 6}))
    inline = {"storageType": "i", "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000625c8Xg0rri41POJ5"}
    vector = DeletionVector.of_action({**inline, "sizeInBytes": 38, "cardinality": 3})
    assert read(Location("/nowhere"), vector) == [1, 3, 5]
    in_file = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4}
    action = {**in_file, "sizeInBytes": 40, "cardinality": 6}
    vector = DeletionVector.of_action(action)
    assert vector.file == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert vector.unique_id == "uab^-aqEH.-t@S}K{vb[*k^@4"
    assert vector.to_action() == action


@given(st.lists(st.sets(st.integers(0, ROWS - 1) | st.integers(0, 3000), min_size=1).map(sorted), min_size=1))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, marked: list[list[int]]) -> None:
    location = Location(str(tmp_path_factory.mktemp("vectors")))
    for inline_bytes_max in (0, 80, INLINE_BYTES_MAX):
        vectors = write(location, *marked, inline_bytes_max=inline_bytes_max)
        assert [read(location, DeletionVector.of_action(vector.to_action())) for vector in vectors] == marked
        assert all((vector.storage == "i") == (vector.size_bytes <= inline_bytes_max) for vector in vectors)


def test_every_byte_of_a_vector_is_checked(tmp_path: Path) -> None:
    """In a file by its checksum. One in the log has none: there, another bit marks another number of rows, rows that
    the file does not have, or is no bitmap; only another row in place of the right one is left to `verify`."""
    location, rows = Location(str(tmp_path)), [1, 5, 900]
    inline, in_file = write(location, rows)[0], write(location, rows, inline_bytes_max=0)[0]
    assert in_file.file is not None
    path = tmp_path / in_file.file
    sound = path.read_bytes()
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        with pytest.raises(LakeDamaged, match=rf"part-1\.parquet, in {in_file.file}, can't be read"):
            read(location, in_file)
    path.write_bytes(sound[:-1])
    with pytest.raises(LakeDamaged, match="ends before"):
        read(location, in_file)
    path.unlink()
    with pytest.raises(LakeDamaged, match="not there"):
        read(location, in_file)
    for at in range(len(inline.text)):
        for other in "09azAZ#~":
            try:
                found = read(location, replace(inline, text=inline.text[:at] + other + inline.text[at + 1 :]), 1000)
            except LakeDamaged:
                continue
            assert len(found) == len(rows)
            assert max(found) < 1000


def test_a_vector_of_another_file_is_found_by_its_rows(tmp_path: Path) -> None:
    location = Location(str(tmp_path))
    (vector,) = write(location, [1, 5, 900])
    for wrong, rows, says in (
        (vector, 900, "it marks row 900, and the file has 900 rows"),
        (replace(vector, cardinality=2), 1000, "it marks 3 rows, and the table's log says 2"),
        (replace(vector, size_bytes=vector.size_bytes + 8), 1000, "bytes, and the table's log says"),
        (replace(vector, storage="p"), 1000, "does not say which file"),
        (replace(vector, storage="u", text=vector.text[:20], offset=None), 1000, "does not say where"),
    ):
        with pytest.raises(LakeDamaged, match=says):
            read(location, wrong, rows)

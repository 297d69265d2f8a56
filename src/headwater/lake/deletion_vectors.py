"""Deletion vectors: which rows of a Parquet file are dead, in the format of Delta's protocol ("Deletion Vectors").

A file of a table never changes. When some of its rows are superseded, the log names the file again with a vector: the
positions of the dead rows, counted from 0 over the whole file, as a 64-bit Roaring bitmap. A vector has all of the
file's dead rows, not only those that the last commit has marked.

A vector is data with a magic number in front. A small one lies in the log itself (storage `i`: as text, in Z85). A
larger one lies in a file beside the table's files that has the vectors of one task (storage `u`):

    version (1 byte: 1), then for each vector: length (4 bytes) | data | CRC-32 of the data (4 bytes)

Lengths and checksums are big-endian, the magic number and the bitmap little-endian. The vector's `offset` points
at the length. Other engines write both kinds, too, and sometimes add a folder prefix to the file's name.

Everything that is read is checked; a failure raises `LakeDamaged` with the name of the file: a wrong vector would bring
dead rows back, or remove live ones.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from headwater.errors import LakeDamaged
from headwater.lake.location import Location, Output

INLINE_BYTES_MAX = 1024
"""Vectors up to this size, about 500 rows, lie in the log: that costs no request to a store, and adds no more than the
other members of a file's entry do. Larger ones would make the log and all its checkpoints grow."""
_MAGIC = struct.pack("<I", 1681511377)
_FILE_VERSION = b"\x01"
_BIG_ENDIAN = struct.Struct(">I")
_UUID_CHARS = 20
"""A UUID has 16 bytes, and Z85 needs five characters for four bytes."""
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_VALUES = {character: value for value, character in enumerate(_Z85)}

Positions = NDArray[np.int64]
"""Of rows in a file, in ascending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionVector:
    """Where the vector of a file lies, and how many rows it marks. Its data is read when needed."""

    storage: str
    """`i` for a vector in the log, `u` for one in a file whose name is made from a UUID."""
    text: str
    """The data; or a folder name, which may be empty, followed by the UUID."""
    size_bytes: int
    cardinality: int
    offset: int | None = None
    """Only for a vector in a file."""

    @classmethod
    def of_action(cls, members: Mapping[str, Any]) -> Self:
        """Convert from the form in an action of the log."""
        offset = members.get("offset")
        return cls(
            storage=str(members["storageType"]),
            text=str(members["pathOrInlineDv"]),
            size_bytes=int(members["sizeInBytes"]),
            cardinality=int(members["cardinality"]),
            offset=None if offset is None else int(offset),
        )

    def to_action(self) -> dict[str, Any]:
        offset = {} if self.offset is None else {"offset": self.offset}
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.text,
            **offset,
            "sizeInBytes": self.size_bytes,
            "cardinality": self.cardinality,
        }

    @property
    def unique_id(self) -> str:
        """Together with the file's path, it identifies what Delta's protocol calls a logical file."""
        return f"{self.storage}{self.text}" + ("" if self.offset is None else f"@{self.offset}")

    @property
    def file(self) -> str | None:
        """The path of the file that contains the vector; None for one in the log. Raises `LakeDamaged`."""
        if self.storage == "i":
            return None
        if self.storage != "u" or len(self.text) < _UUID_CHARS:
            raise _damaged(f"the deletion vector {self.unique_id!r}", "it does not say which file it lies in")
        folder, name = self.text[:-_UUID_CHARS], self.text[-_UUID_CHARS:]
        made = uuid.UUID(bytes=_from_z85(name, f"the deletion vector {self.unique_id!r}"))
        return f"{folder}/deletion_vector_{made}.bin" if folder else f"deletion_vector_{made}.bin"

    def read(self, location: Location, path: str, *, rows: int) -> Positions:
        """Return the dead rows of the file at a path, which has `rows` rows."""
        where = f"the deletion vector of {path}"
        if self.file is None:
            data = _from_z85(self.text, where)[: self.size_bytes]
        else:
            where += f", in {self.file},"
            data = self._read_data(location, self.file, where)
        if len(data) != self.size_bytes:
            raise _damaged(where, f"it has {len(data):,} bytes, and the table's log says {self.size_bytes:,}")
        if data[: len(_MAGIC)] != _MAGIC:
            raise _damaged(where, "it does not begin as one")
        try:
            bitmap = BitMap64.deserialize(data[len(_MAGIC) :])
        except (ValueError, MemoryError) as error:
            raise _damaged(where, str(error)) from error
        if len(bitmap) != self.cardinality:
            raise _damaged(where, f"it marks {len(bitmap):,} rows, and the table's log says {self.cardinality:,}")
        if bitmap and bitmap.max() >= rows:
            raise _damaged(where, f"it marks row {bitmap.max():,}, and the file has {rows:,} rows")
        return np.array(bitmap.to_array() if bitmap else (), dtype=np.int64)

    def _read_data(self, location: Location, file: str, where: str) -> bytes:
        if self.offset is None or self.offset < len(_FILE_VERSION) or self.size_bytes < 0:
            raise _damaged(where, "the table's log does not say where in the file it lies")
        try:
            with location.answering(), location.open_input(file) as source:
                framed = bytes(source.read_at(self.size_bytes + 2 * _BIG_ENDIAN.size, self.offset))
                version = source.read_at(len(_FILE_VERSION), 0)
        except FileNotFoundError as error:
            raise _damaged(where, "the file is not there") from error
        if version != _FILE_VERSION:
            raise _damaged(where, "the file is of a version that is not known")
        if len(framed) != self.size_bytes + 2 * _BIG_ENDIAN.size:
            raise _damaged(where, "the file ends before it does")
        data = framed[_BIG_ENDIAN.size : -_BIG_ENDIAN.size]
        if framed[: _BIG_ENDIAN.size] != _BIG_ENDIAN.pack(len(data)):
            raise _damaged(where, "it has another length than the table's log says")
        if framed[-_BIG_ENDIAN.size :] != _BIG_ENDIAN.pack(zlib.crc32(data)):
            raise _damaged(where, "it does not have the checksum that was written with it")
        return data


class VectorWriter:
    """Writes the vectors of one task: small ones into the log, all others into one file, which is complete when the
    writer is closed."""

    def __init__(self, location: Location, *, inline_bytes_max: int = INLINE_BYTES_MAX) -> None:
        self._location = location
        self._inline_bytes_max = inline_bytes_max
        self._uuid = uuid.uuid4()
        self._output: Output | None = None

    def write(self, positions: Positions) -> DeletionVector:
        """Return a vector that marks these rows, which must be all dead rows of a file."""
        data = _MAGIC + BitMap64(positions.astype(np.uint64)).serialize()
        if len(data) <= self._inline_bytes_max:
            text = _to_z85(data + bytes(-len(data) % 4))
            return DeletionVector(storage="i", text=text, size_bytes=len(data), cardinality=len(positions))
        with self._location.answering():
            if self._output is None:
                self._output = self._location.open_output(f"deletion_vector_{self._uuid}.bin")
                self._output.write(_FILE_VERSION)
            offset = self._output.tell()
            self._output.write(_BIG_ENDIAN.pack(len(data)) + data + _BIG_ENDIAN.pack(zlib.crc32(data)))
        text = _to_z85(self._uuid.bytes)
        return DeletionVector(storage="u", text=text, size_bytes=len(data), cardinality=len(positions), offset=offset)

    def close(self) -> None:
        if self._output is not None:
            with self._location.answering():
                self._output.close()
            self._output = None


# --- text -------------------------------------------------------------------------------------------------------------


def _to_z85(data: bytes) -> str:
    """Encode as in ZeroMQ's RFC 32; the module `base64` can do it from Python 3.13 on."""
    assert len(data) % 4 == 0, "Z85 is of whole words"
    words = np.frombuffer(data, dtype=">u4").astype(np.int64)
    digits = words[:, None] // 85 ** np.arange(4, -1, -1) % 85
    return "".join(_Z85[digit] for digit in digits.ravel().tolist())


def _from_z85(text: str, where: str) -> bytes:
    digits = [_Z85_VALUES.get(character, -1) for character in text]
    if len(digits) % 5 or -1 in digits:
        raise _damaged(where, "its text in the table's log is no Z85")
    words = np.array(digits, dtype=np.int64).reshape(-1, 5) @ 85 ** np.arange(4, -1, -1)
    if len(words) and words.max() >= 1 << 32:
        raise _damaged(where, "its text in the table's log is no Z85")
    return words.astype(">u4").tobytes()


def _damaged(what: str, reason: str) -> LakeDamaged:
    return LakeDamaged(
        f"{what} can't be read: {' '.join(reason.split())}",
        hint="Run `headwater repair`, or restore it from a backup; `headwater verify` lists all damage",
    )

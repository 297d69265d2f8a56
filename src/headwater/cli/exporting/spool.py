"""The mutations of a read in temporary files, one a collection, to be read again when it is known which hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from headwater.cli.exporting.survivors import Survivors
from headwater.errors import StoreFull

_KEPT = ("vbucket", "seqno", "collection_id", "key", "value", "datatype", "flags", "expiry")
POSITION = "position"


class Spool:
    """Takes batches in, and gives back the live documents of each collection. `folder` is the caller's to remove."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._survivors = Survivors()
        self._writers: dict[tuple[str, str], pa.RecordBatchFileWriter] = {}

    @property
    def rows(self) -> int:
        """That have come, of all kinds."""
        return self._survivors.positions

    def add(self, batch: pa.RecordBatch) -> None:
        are_mutations, positions = self._survivors.note(batch)
        if not are_mutations.any():
            return
        for name, marks in _by_collection(batch, are_mutations):
            rows = batch.select(_KEPT).append_column(POSITION, pa.array(positions))
            try:
                self._writer(name, rows.schema).write_batch(rows if marks.all() else rows.filter(pa.array(marks)))
            except OSError as error:
                raise StoreFull(
                    f"{self._folder} can't take the documents: {error.strerror or error}",
                    hint="Export to a disk with more room: it needs that of the documents twice for a time",
                ) from error

    def collections(self) -> list[tuple[str, str]]:
        """Scopes and collections that have had a document, in order. No more can be added then."""
        for writer in self._writers.values():
            writer.close()
        return sorted(self._writers)

    def documents(self, name: tuple[str, str]) -> Iterator[pa.RecordBatch]:
        """The live documents of a collection, with `key`, `value`, `datatype`, `flags` and `expiry`."""
        with pa.memory_map(str(self._path(name))) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                alive = self._survivors.alive(batch, batch.column(POSITION).to_numpy())
                if alive.any():
                    yield batch if alive.all() else batch.filter(pa.array(alive))

    def _writer(self, name: tuple[str, str], schema: pa.Schema) -> pa.RecordBatchFileWriter:
        if name not in self._writers:
            self._writers[name] = pa.ipc.new_file(str(self._path(name)), schema)
        return self._writers[name]

    def _path(self, name: tuple[str, str]) -> Path:
        return self._folder / f"{name[0]}.{name[1]}.arrow"


def _by_collection(batch: pa.RecordBatch, wanted: np.ndarray) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """The collections of a batch, and which of the wanted rows are in each."""
    ids = batch.column("collection_id").fill_null(0).to_numpy()
    for collection_id in np.unique(ids[wanted]):
        marks = wanted & (ids == collection_id)
        row = int(np.flatnonzero(marks)[0])
        scope, collection = (batch.column(name)[row].as_py() for name in ("scope", "collection"))
        # Nobody tells the name of a collection that is gone, and nothing of it is alive.
        if scope is not None and collection is not None:
            yield (scope, collection), marks


def key_texts(keys: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Keys as text, and which of them are: a key may be any bytes."""
    try:
        return keys.cast(pa.large_string()), pa.repeat(pa.scalar(True), len(keys))
    except pa.ArrowInvalid:
        texts = [_text(key) for key in keys.to_pylist()]
        array = pa.array(texts, pa.large_string())
        return array, pc.is_valid(array)


def _text(key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None

"""Changes as an Arrow IPC stream, for `pyarrow.ipc.open_stream` and everything else that reads Arrow."""

from __future__ import annotations

import io

import pyarrow as pa


class ArrowStream:
    """Makes the bytes of the stream, batch by batch. They start with the schema, and with `end` they are whole."""

    def __init__(self, schema: pa.Schema) -> None:
        self._made = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._made, schema)

    def encode(self, batch: pa.RecordBatch) -> bytes:
        self._writer.write_batch(batch)
        return self._take()

    def end(self) -> bytes:
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        taken = self._made.getvalue()
        self._made.seek(0)
        self._made.truncate()
        return taken

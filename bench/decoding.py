"""Bulk decoding to Arrow, compared with memcpy of the same bytes and with the typed codec plus Arrow."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bench.measure import in_new_process, in_turns
from bench.report import Goal, Section
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.kernels import CHANGES_SCHEMA, decode_changes
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId

BUFFER_BYTES = 4 * 1024 * 1024
TYPED_ROWS_MAX = 10_000
VALUE_BYTES = (100, 270, 4096)


def mutations(value_bytes: int, count: int) -> bytes:
    """Return frames as a consumer with collections receives them."""
    return b"".join(
        Mutation(
            vbucket=VBucketId(number % 1024),
            opaque=7,
            cas=Cas(1_794_715_140_654_366_720 + number),
            seqno=Seqno(number + 1),
            rev_seqno=1,
            collection_id=CollectionId(8),
            key=b"user::%08d" % number,
            value=b"x" * value_bytes,
        ).encode()
        for number in range(count)
    )


def decode_typed(data: bytes) -> pa.RecordBatch:
    """Decode the same columns with the typed codec."""
    buffer = FrameBuffer()
    buffer.receive_data(data)
    columns: dict[str, list[object]] = {name: [] for name in CHANGES_SCHEMA.names}
    for frame in buffer.frames():
        change = decode_message(frame, WITH_COLLECTIONS)
        assert isinstance(change, Mutation)
        for name, column in columns.items():
            column.append(0 if name in ("stream_id", "delete_time") else getattr(change, name))
    return pa.RecordBatch.from_pydict(columns, schema=CHANGES_SCHEMA)


def copy_and_decode(value_bytes: int, rounds: int, keep_results: bool) -> list[float]:
    """Return the seconds to memcpy one buffer, and to bulk-decode it."""
    buffer = _buffer(value_bytes)

    def copy() -> pa.Buffer:
        target = pa.allocate_buffer(len(buffer))  # From the pool that the decoder uses, too
        np.copyto(np.frombuffer(target, dtype=np.uint8), buffer)
        return target

    return in_turns(copy, lambda: decode_changes(buffer, collections=True), rounds=rounds, keep_results=keep_results)


def _buffer(value_bytes: int) -> NDArray[np.uint8]:
    count = BUFFER_BYTES // len(mutations(value_bytes, 1))
    return np.frombuffer(mutations(value_bytes, count), dtype=np.uint8)


def measure_row(value_bytes: int) -> tuple[list[str], Goal, Goal]:
    buffer = _buffer(value_bytes)
    count = decode_changes(buffer, collections=True).batch.num_rows
    copy_kept, decode_kept = in_new_process(copy_and_decode, value_bytes, 50, True)
    copy_hot, decode_hot = in_new_process(copy_and_decode, value_bytes, 200, False)
    part = mutations(value_bytes, min(count, TYPED_ROWS_MAX))
    typed, bulk = in_turns(lambda: decode_typed(part), lambda: decode_changes(part, collections=True), rounds=7)
    row = [
        f"{value_bytes} B",
        f"{count / decode_hot / 1e6:.1f} M/s, {len(buffer) / decode_hot / 1e9:.1f} GB/s",
        f"{copy_kept / decode_kept:.2f} ({len(buffer) / copy_kept / 1e9:.2f} GB/s)",
        f"{copy_hot / decode_hot:.2f} ({len(buffer) / copy_hot / 1e9:.1f} GB/s)",
        f"{typed / bulk:.0f}×",
    ]
    return (
        row,
        Goal(f"decoding {value_bytes} B, results kept, of memcpy", 0.7, copy_kept / decode_kept),
        Goal(f"decoding {value_bytes} B, of the typed codec", 15, typed / bulk),
    )


def run() -> Section:
    rows, *goals = zip(*(measure_row(value_bytes) for value_bytes in VALUE_BYTES), strict=True)
    return Section(
        title="Bulk decode to Arrow",
        text=(
            "Mutations of one collection, in buffers of 4 MiB, decoded to Arrow columns. *Results kept*: every result "
            "gets fresh memory, as where batches are collected; the machine then pays for each new page, and copying "
            "and decoding cost about the same (goal ≥ 0.7 of memcpy). *Results dropped*: memory is used again and "
            "everything stays in the cache, where memcpy moves tens of bytes a nanosecond and no decoder that looks at "
            "each frame can follow it for small values. The last column is the typed codec with Arrow behind it "
            "(goal ≥ 15×)."
        ),
        columns=[
            "value",
            "bulk decode, results dropped",
            "of memcpy, results kept (memcpy)",
            "of memcpy, results dropped (memcpy)",
            "against the typed codec",
        ],
        rows=rows,
        goals=[goal for kind in goals for goal in kind],
    )

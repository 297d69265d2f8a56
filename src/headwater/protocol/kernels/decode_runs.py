"""The decode kernel for runs: changes that lie in many buffers to the columns of one batch.

It does what `decode` does, run after run, and gives the rows one place. Joining the runs first would copy every byte
once more, and that takes a third of the time of decoding them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numba import carray, types
from numba.extending import intrinsic

from headwater.errors import LocalProtocolError, TruncatedFrame, UnexpectedMessage
from headwater.protocol.kernels.decode import BUFFER_BYTES_MAX, _Columns, _extract, _survey, decode_changes
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel
from headwater.protocol.limits import FRAME_BODY_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRuns:
    batch: pa.RecordBatch
    """The changes, with the schema that `decode_changes` has."""
    rows: Column
    """How many of them each run had."""


def decode_runs(runs: Sequence[bytes | memoryview], *, collections: bool) -> DecodedRuns:
    """Decode runs of whole frames that are all changes."""
    # The buffers hold the bytes in their places while the kernels work with nothing but addresses.
    buffers = [pa.py_buffer(run) for run in runs]
    addresses = np.array([buffer.address for buffer in buffers], dtype=np.int64)
    lengths = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    if lengths.sum() > BUFFER_BYTES_MAX:
        raise LocalProtocolError(
            f"runs of {lengths.sum()} bytes exceed {BUFFER_BYTES_MAX}", hint="Decode fewer of them at a time"
        )
    counts = np.empty((len(runs), 3), dtype=np.int64)
    bad_run = _survey_runs(addresses, lengths, collections, FRAME_BODY_BYTES_MAX, counts)
    if bad_run >= 0:
        _raise_fault(runs[bad_run], collections=collections)
    rows, key_bytes, value_bytes = counts.sum(axis=0).tolist()
    columns = _Columns(rows, key_bytes, value_bytes)
    _extract_runs(addresses, lengths, collections, counts, *columns.arrays)
    return DecodedRuns(batch=columns.to_batch(rows), rows=counts[:, 0].copy())


def _raise_fault(run: bytes | memoryview, *, collections: bool) -> None:
    """Name what is wrong with a run."""
    decoded = decode_changes(run, collections=collections)
    if decoded.others:
        # Such as a change whose framing extras hold more than the id of its stream.
        raise UnexpectedMessage("a frame among changes that is none", offset=decoded.others[0].start)
    raise TruncatedFrame("a run of changes ends inside a frame", offset=decoded.consumed_bytes)


def _bytes_pointer(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


_pointer: Any = intrinsic(_bytes_pointer)


@kernel
def _bytes_at(address: int, length: int) -> Bytes:
    return carray(_pointer(address), (length,), np.uint8)


@kernel
def _survey_runs(addresses: Column, lengths: Column, collections: bool, body_bytes_max: int, counts: Column) -> int:
    """Check every frame, and count the rows of each run and the bytes of their keys and values.

    Returns the first run that is not changes from its first byte to its last, or -1.
    """
    for run in range(len(addresses)):
        data = _bytes_at(addresses[run], lengths[run])
        rows, others, key_bytes, value_bytes, _, consumed, faulty = _survey(data, collections, body_bytes_max)
        if faulty or others > 0 or consumed != lengths[run]:
            return run
        counts[run, 0] = rows
        counts[run, 1] = key_bytes
        counts[run, 2] = value_bytes
    return -1


@kernel
def _extract_runs(
    addresses: Column, lengths: Column, collections: bool, counts: Column,
    vbuckets: Column, opaques: Column, stream_ids: Column, opcodes: Column, datatypes: Column, seqnos: Column,
    rev_seqnos: Column, cas: Column, flags: Column, expiries: Column, delete_times: Column, collection_ids: Column,
    key_offsets: Column, keys: Bytes, value_offsets: Column, values: Bytes,
) -> None:  # fmt: skip
    """Copy what the survey has found sound, each run behind the one before."""
    no_others = np.empty((0, 2), dtype=np.int64)
    row = i64(0)
    key_at = i64(0)
    value_at = i64(0)
    key_offsets[0] = 0
    value_offsets[0] = 0
    for run in range(len(addresses)):
        data = _bytes_at(addresses[run], lengths[run])
        _extract(
            data, lengths[run], collections, no_others,
            vbuckets[row:], opaques[row:], stream_ids[row:], opcodes[row:], datatypes[row:], seqnos[row:],
            rev_seqnos[row:], cas[row:], flags[row:], expiries[row:], delete_times[row:], collection_ids[row:],
            key_offsets[row:], keys[key_at:], value_offsets[row:], values[value_at:],
        )  # fmt: skip
        end = row + counts[run, 0]
        for i in range(row, end + 1):
            key_offsets[i] += key_at
            value_offsets[i] += value_at
        row = end
        key_at += counts[run, 1]
        value_at += counts[run, 2]

"""A kernel that Python runs says what its machine code says, for any changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.kernels.interpreting import INTERPRETED_MODULES, interpreted
from headwater.kernels.machine_code import KERNEL_MODULES, KERNELS
from headwater.kernels.siphash import siphash128
from headwater.protocol.kernels import decode_changes, decompress_values
from headwater.protocol.kernels.decode import decode_runs
from headwater.protocol.kernels.frame_runs import cut_runs
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.kernels.xattr_split import split_xattrs
from headwater.protocol.messages.dcp_changes import Deletion, Mutation
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs

u32, u64 = (st.integers(0, 2**bits - 1) for bits in (32, 64))
bodies = st.binary(max_size=40) | st.builds(lambda times: b'{"a":[1,"x"]}' * times, st.integers(0, 90))
xattrs = st.dictionaries(st.sampled_from(["_sync", "größe"]), st.sampled_from([b"1", b"", b'{"a":2}']))
place = {
    "vbucket": st.integers(0, 0xFFFF), "opaque": st.integers(1, 3), "cas": u64, "seqno": u64, "rev_seqno": u64,
    "key": st.binary(min_size=2, max_size=20).map(lambda key: b"\x88\x01" + key),
}  # fmt: skip


@st.composite
def changes(draw):
    value, datatype = draw(bodies), Datatype(draw(st.integers(0, 7)))
    if Datatype.XATTR in datatype:
        value = encode_xattrs(ValueParts(draw(xattrs), value))
    if Datatype.SNAPPY in datatype:
        value = compress(value)
    parts = {name: draw(part) for name, part in place.items()} | {"value": value, "datatype": datatype}
    if draw(st.booleans()):
        return Mutation(**parts, flags=draw(u32), expiry=draw(u32))
    return Deletion(**parts, delete_time=draw(st.none() | u32))


@contextmanager
def run_by_python() -> Iterator[None]:
    ours = [kernel for kernel in KERNELS if kernel.function.__module__ in INTERPRETED_MODULES]
    before = [kernel.func for kernel in ours]
    try:
        for kernel in ours:
            kernel._point_at(interpreted(kernel))
        yield
    finally:
        for kernel, function in zip(ours, before, strict=True):
            kernel._point_at(function)


def said_of(data: bytes):
    runs = cut_runs(np.frombuffer(data, dtype=np.uint8))
    decoded = decode_runs([data, data], collections=True)
    plain = decompress_values(decode_changes(data, collections=True).batch)
    split = split_xattrs(plain.column("value"), plain.column("datatype").to_numpy())
    return (
        bytes(runs.data), runs.runs, decoded.batch.to_pylist(), plain.to_pylist(),
        split.bodies.to_pylist(), split.xattrs.to_pylist(), is_json(np.frombuffer(data, dtype=np.uint8), 0, len(data)),
    )  # fmt: skip


@given(st.lists(changes(), min_size=1, max_size=8))
def test_both_say_the_same(messages) -> None:
    data = b"".join(message.encode() for message in messages)
    compiled = said_of(data)
    with run_by_python():
        assert said_of(data) == compiled


def test_others_have_to_be_compiled() -> None:
    assert set(KERNEL_MODULES) >= INTERPRETED_MODULES
    with pytest.raises(ModuleNotFoundError, match="numba is not installed"):
        interpreted(siphash128)

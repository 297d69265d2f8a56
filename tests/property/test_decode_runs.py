"""Runs decoded where they lie equal the same runs joined and decoded, and are refused where those are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LocalProtocolError, RemoteProtocolError, TruncatedFrame, UnexpectedMessage
from headwater.protocol import frames
from headwater.protocol.kernels import decode as module
from headwater.protocol.kernels import decode_changes
from headwater.protocol.kernels.decode import decode_runs
from headwater.protocol.messages.dcp_changes import Deletion, Mutation
from headwater.protocol.messages.dcp_streams import DcpNoop
from support.cases import case

u32, u64 = (st.integers(0, 2**bits - 1) for bits in (32, 64))
common = {
    "vbucket": st.integers(0, 0xFFFF), "opaque": u32, "cas": u64, "seqno": u64, "rev_seqno": u64,
    "frame_infos": st.sampled_from([(), (frames.stream_id(7),)]),
    "key": st.binary(min_size=2, max_size=20).map(lambda key: b"\x08" + key), "value": st.binary(max_size=50),
}  # fmt: skip
changes = st.one_of(
    st.builds(Mutation, **common, flags=u32, expiry=u32),
    st.builds(Deletion, **common, delete_time=st.one_of(st.none(), u32)),
)
runs = st.lists(st.lists(changes, max_size=6), max_size=6)


def encoded(run) -> bytes:
    return b"".join(change.encode() for change in run)


@given(runs, st.booleans(), st.integers(0, 3))
def test_runs_give_the_rows_of_the_joined_bytes(runs, collections, front):
    data = [encoded(run) for run in runs]
    # Views into larger buffers, as a receive buffer is cut.
    views = [memoryview(b"?" * front + part)[front:] for part in data]
    decoded = decode_runs(views, collections=collections)
    decoded.batch.validate(full=True)
    assert decoded.batch.equals(decode_changes(b"".join(data), collections=collections).batch)
    assert decoded.rows.tolist() == [len(run) for run in runs]


@given(runs, st.data())
def test_damaged_runs_are_taken_or_refused_as_each_is_by_itself(runs, data):
    parts = [bytearray(encoded(run)) for run in runs]
    for part in parts:
        if part and data.draw(st.booleans()):
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    damaged = [bytes(part) for part in parts]
    faults = [fault for fault in map(fault_of, damaged) if fault is not None]
    try:
        decode_runs(damaged, collections=True)
        found = []
    except RemoteProtocolError as error:
        found = [type(error)]
    assert found == faults[:1]


def fault_of(run: bytes) -> type[RemoteProtocolError] | None:
    try:
        decoded = decode_changes(run, collections=True)
    except RemoteProtocolError as error:
        return type(error)
    if decoded.others:
        return UnexpectedMessage
    return TruncatedFrame if decoded.consumed_bytes != len(run) else None


GOOD = Mutation(seqno=1, rev_seqno=1, key=b"\x08k").encode()


@case(GOOD + GOOD[:-1], TruncatedFrame, r"ends inside a frame \(at byte 57\)")
@case(GOOD + GOOD[:20], TruncatedFrame, r"ends inside a frame \(at byte 57\)")
@case(GOOD + DcpNoop().encode(), UnexpectedMessage, r"among changes that is none \(at byte 57\)")
@case(
    GOOD + Mutation(seqno=1, rev_seqno=1, key=b"k", frame_infos=(frames.preserve_ttl(),)).encode(),
    UnexpectedMessage,
    r"among changes that is none \(at byte 57\)",
)
def test_a_run_is_changes_from_its_first_byte_to_its_last(run, error, reason):
    assert len(GOOD) == 57
    with pytest.raises(error, match=reason):
        decode_runs([GOOD, run, GOOD], collections=False)


def test_more_than_a_column_can_hold_is_refused(monkeypatch):
    monkeypatch.setattr(module, "BUFFER_BYTES_MAX", 2 * len(GOOD))
    assert decode_runs([GOOD, GOOD], collections=False).batch.num_rows == 2
    with pytest.raises(LocalProtocolError, match="Decode fewer of them at a time"):
        decode_runs([GOOD, GOOD, GOOD], collections=False)

"""Runs against the typed codec: whatever is sent, in whatever turns, each stream gets its frames in order."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BadMagic, FrameTooLarge, LengthMismatch
from headwater.protocol.features import Opcode
from headwater.protocol.frames import decode_frames, stream_id
from headwater.protocol.kernels.frame_runs import cut_runs
from headwater.protocol.messages import PlainResponse, Request
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SeqnoAdvanced
from headwater.protocol.messages.dcp_streams import DcpNoop
from headwater.protocol.numbers import CollectionId, Seqno

_changes = st.builds(
    lambda kind, opaque, seqno, value, infos: kind(
        opaque=opaque,
        seqno=Seqno(seqno),
        rev_seqno=1,
        key=b"k",
        collection_id=CollectionId(8),
        value=value,
        frame_infos=infos,
    ),
    st.sampled_from([Mutation, Deletion, Expiration]),
    st.integers(0, 3),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=30),
    st.sampled_from([(), (stream_id(5),)]),
)
_others = st.one_of(
    st.builds(lambda opaque: SeqnoAdvanced(opaque=opaque, seqno=Seqno(7)), st.integers(0, 3)),
    st.builds(lambda opaque: DcpNoop(opaque=opaque), st.integers(0, 3)),
    st.builds(lambda opaque: PlainResponse(opcode=Opcode.DCP_STREAM_REQUEST, opaque=opaque), st.integers(0, 3)),
)
_messages = st.lists(st.one_of(_changes, _others), max_size=40)


def _seqno(message: object) -> int:
    assert isinstance(message, Mutation | Deletion | Expiration)
    return message.seqno


@settings(deadline=None)
@given(_messages, st.integers(0, 30))
def test_every_stream_gets_its_frames_in_order(messages: list[Request], cut_off: int) -> None:
    tail = Mutation(seqno=Seqno(1), rev_seqno=1, key=b"k", collection_id=CollectionId(0)).encode()[:cut_off]
    data = b"".join(message.encode() for message in messages)
    cut = cut_runs(np.frombuffer(data + tail, dtype=np.uint8))
    assert cut.consumed_bytes == len(data)
    sent: dict[int, list[object]] = defaultdict(list)
    for message in messages:
        sent[message.opaque].append(message.to_frame())
    got: dict[int, list[object]] = defaultdict(list)
    for run in cut.runs:
        frames = decode_frames(bytes(cut.data[run.start : run.end]))
        assert {frame.opaque for frame in frames} == {run.opaque}
        assert len(frames) == max(run.rows, 1)
        got[run.opaque] += frames
    assert got == sent


@settings(deadline=None)
@given(st.lists(_changes, min_size=1, max_size=20))
def test_runs_tell_their_seqnos(changes: list[Mutation]) -> None:
    cut = cut_runs(np.frombuffer(b"".join(change.encode() for change in changes), dtype=np.uint8))
    by_stream: dict[int, list[int]] = defaultdict(list)
    for change in changes:
        by_stream[change.opaque].append(_seqno(change))
    for run in cut.runs:
        seqnos, by_stream[run.opaque] = by_stream[run.opaque][: run.rows], by_stream[run.opaque][run.rows :]
        assert (run.first_seqno, run.last_seqno) == (seqnos[0], seqnos[-1])
        assert bool(run.is_rising) == all(a < b for a, b in pairwise(seqnos))
    assert not any(by_stream.values())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 400 Bad Request", BadMagic),
        (bytes.fromhex("8057000000000000ffffffff") + bytes(12), FrameTooLarge),
        (bytes.fromhex("80570005000000000000000100000000") + bytes(8), LengthMismatch),
    ],
)
def test_nonsense_is_the_documented_error(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        cut_runs(np.frombuffer(data, dtype=np.uint8))


def test_streams_in_turns_become_one_run_each() -> None:
    frames = [
        Mutation(opaque=turn % 4, seqno=Seqno(turn + 1), rev_seqno=1, key=b"k", collection_id=CollectionId(0)).encode()
        for turn in range(400)
    ]
    cut = cut_runs(np.frombuffer(b"".join(frames), dtype=np.uint8))
    assert [(run.opaque, run.rows) for run in cut.runs] == [(0, 100), (1, 100), (2, 100), (3, 100)]

"""Captures: junk raises only `CaptureError` and takes bounded memory, and no order of segments changes the bytes."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from io import BytesIO

import dpkt
from hypothesis import given
from hypothesis import strategies as st

from headwater.cli.decode import annotate, json_line
from headwater.cli.frame_view import view_dcp_frame, view_upr_frame
from headwater.errors import CaptureError
from headwater.protocol.capture import CapturedFrame, CaptureFault, CaptureFormat, Chunk, Gap, read_capture, read_frames
from headwater.protocol.capture.files import Segment, SocketAddress, reassemble
from headwater.protocol.messages.dcp_changes import Mutation
from support.cases import case, each
from support.message_strategies import any_message

CLIENT = SocketAddress(b"\x0a\x00\x00\x02", 50000)
SERVER = SocketAddress(b"\x0a\x00\x00\x01", 11210)
FRAMES = b"".join(Mutation(seqno=n, rev_seqno=1, key=b"key", value=b"v" * n).encode() for n in range(1, 6))


def packet_capture(link_type: int, *, pcapng: bool) -> bytes:
    """A sound file: one connection, its bytes in three segments, the middle one twice."""
    file = BytesIO()
    writer = (dpkt.pcapng if pcapng else dpkt.pcap).Writer(file, linktype=link_type)
    for start, end in ((0, 100), (100, 200), (100, 200), (200, len(FRAMES))):
        tcp = dpkt.tcp.TCP(sport=50000, dport=11210, seq=start, flags=dpkt.tcp.TH_ACK, data=FRAMES[start:end])
        ip = dpkt.ip.IP(src=CLIENT.address, dst=SERVER.address, p=6, data=tcp)
        link = {1: bytes(12) + b"\x08\x00", 0: b"\x02\x00\x00\x00", 113: bytes(14) + b"\x08\x00", 101: b""}
        writer.writepkt(link[link_type] + bytes(ip), ts=0)
    return file.getvalue()


SESSION = f"[dcp] C->S x\n    {FRAMES[:100].hex(' ', 4)}\n    {FRAMES[100:].hex(' ', 4)}\n".encode()
DUMP = "".join(f"{at:08x}: {FRAMES[at : at + 16].hex(' ', 2)}  text\n" for at in range(0, len(FRAMES), 16)).encode()
SOUND = [
    FRAMES,
    FRAMES.hex().encode(),
    SESSION,
    DUMP,
    *(packet_capture(link_type, pcapng=pcapng) for link_type in (0, 1, 101, 113) for pcapng in (False, True)),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A sound capture with some bytes changed, cut out or put in."""
    data = bytearray(draw(st.sampled_from(SOUND)))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


JUNK = st.one_of(
    st.binary(max_size=2000),
    damaged(),
    st.text(st.sampled_from("0123456789abcdefx:#[]*C->S \t\n|"), max_size=500).map(str.encode),
    st.sampled_from([b"\xd4\xc3\xb2\xa1\x02\x00\x04\x00", b"\x0a\x0d\x0d\x0a\x1c\x00\x00\x00\x4d\x3c\x2b\x1a"]).flatmap(
        lambda magic: st.binary(max_size=500).map(lambda rest: magic + rest)
    ),
)


def show(captured: CapturedFrame) -> None:
    """Both prints of a frame, as either protocol."""
    for view_frame in (view_dcp_frame, view_upr_frame):
        view = view_frame(captured, value_bytes_max=100)
        lines = [line for line, _ in annotate(view, grid=True, value_bytes_max=100)]
        assert all(line.isprintable() for line in lines)
        assert json.loads(json_line(view, value_bytes_max=100))["value_length"] == len(captured.frame.value)


@each("data", SOUND)
def test_sound_captures_are_read_whole(data: bytes) -> None:
    frames = list(read_frames(read_capture(data)))
    assert b"".join(item.frame.encode() for item in frames if isinstance(item, CapturedFrame)) == FRAMES
    assert not any(isinstance(item, CaptureFault) for item in frames)


@given(data=JUNK, capture_format=st.sampled_from([None, *CaptureFormat]), collections=st.sampled_from([None, True]))
def test_junk_raises_documented_errors(
    data: bytes, capture_format: CaptureFormat | None, collections: bool | None
) -> None:
    with suppress(CaptureError):
        for item in read_frames(read_capture(data, capture_format), collections=collections):
            if isinstance(item, CaptureFault):
                assert item.error.hint
            else:
                show(item)


@given(collections=st.booleans(), extra=st.binary(max_size=4), data=st.data())
def test_every_message_can_be_shown_sound_or_not(collections: bool, extra: bytes, data: st.DataObject) -> None:
    encoded = data.draw(any_message(collections=collections)).encode()
    at = data.draw(st.integers(4, 23))
    for candidate in (encoded, encoded[:at] + b"\x01" + encoded[at + 1 :] + extra):
        for item in read_frames([Chunk(data=candidate)], collections=collections):
            if isinstance(item, CapturedFrame):
                show(item)


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """All of `FRAMES` in segments that overlap, repeat and come in any order, from any sequence number."""
    start = draw(st.integers(0, 2**32 - 1))
    cuts = sorted(draw(st.sets(st.integers(1, len(FRAMES) - 1), max_size=10)))
    spans = list(zip([0, *cuts], [*cuts, len(FRAMES)], strict=True))
    spans += draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5))
    return [
        Segment(
            number=number,
            source=CLIENT,
            destination=SERVER,
            sequence=(start + first) % 2**32,
            payload=FRAMES[first:last],
        )
        for number, (first, last) in enumerate(draw(st.permutations(spans)), 1)
        if first < last
    ]


@given(segments=segments())
def test_any_order_of_segments_gives_the_same_bytes(segments: list[Segment]) -> None:
    events = list(reassemble(segments))
    assert b"".join(event.data for event in events if isinstance(event, Chunk)) == FRAMES
    assert [event.missing_bytes for event in events if isinstance(event, Gap)] == [None]


INPUT_BYTES = 512 * 1024


@case(FRAMES * (INPUT_BYTES // len(FRAMES)))
# A header that announces as much as a frame may have, and never gets it.
@case(b"\x80\x57\x00\x00\x00\x00\x00\x00\x01\x40\x00\x00" + bytes(INPUT_BYTES))
@case(b"\xff" * INPUT_BYTES)
@case(b"80" * (INPUT_BYTES // 2))
@case(b"80 57\n" * (INPUT_BYTES // 6))
# A packet that claims four gigabytes.
@case(b"\xd4\xc3\xb2\xa1\x02\x00\x04\x00" + bytes(12) + b"\x01\x00\x00\x00" + b"\xff" * INPUT_BYTES)
@case(b"\xd4\xc3\xb2\xa1\x02\x00\x04\x00" + bytes(12) + b"\x01\x00\x00\x00" + bytes(INPUT_BYTES))
@case(
    packet_capture(1, pcapng=False)
    + packet_capture(1, pcapng=False)[24:] * (INPUT_BYTES // len(packet_capture(1, pcapng=False)))
)
def test_memory_is_bounded_by_the_input(data: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(CaptureError):
            for _ in read_frames(read_capture(data)):
                pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * len(data)

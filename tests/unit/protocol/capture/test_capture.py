"""Captures: every form of input gives the same bytes in the same order, and what is missing is reported."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from io import BytesIO
from struct import pack
from typing import Any

import dpkt
import pytest

from headwater.errors import BadMagic, CaptureError, TruncatedFrame
from headwater.protocol.capture import (
    UNKNOWN_FLOW,
    CapturedFrame,
    CaptureFault,
    CaptureFormat,
    Chunk,
    ConnectionOpened,
    Direction,
    Flow,
    Gap,
    find_format,
    find_frame,
    read_capture,
    read_frames,
)
from headwater.protocol.capture.files import WAITING_BYTES_MAX, Segment, SocketAddress, reassemble
from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import DcpNoop, Open
from headwater.protocol.messages.session import Hello, HelloResponse
from support.cases import case, each

NOOP = DcpNoop(opaque=7).encode()
OPEN = Open(opaque=1, key=b"test").encode()
CLIENT = SocketAddress(b"\x0a\x00\x00\x02", 50000)
SERVER = SocketAddress(b"\x0a\x00\x00\x01", 11210)
CLIENT_6 = SocketAddress(bytes(15) + b"\x02", 50000)
SERVER_6 = SocketAddress(bytes(15) + b"\x01", 11210)
TO_CLIENT = Direction.SERVER_TO_CLIENT
TO_SERVER = Direction.CLIENT_TO_SERVER


def mutations(count: int) -> bytes:
    return b"".join(
        Mutation(opaque=1, seqno=seqno, rev_seqno=1, key=b"key-%d" % seqno, value=b"x" * seqno).encode()
        for seqno in range(1, count + 1)
    )


def joined(data: bytes, capture_format: CaptureFormat | None = None) -> bytes:
    """All bytes of a capture that has one flow."""
    return b"".join(event.data for event in read_capture(data, capture_format) if isinstance(event, Chunk))


def by_direction(data: bytes) -> dict[Direction | None, bytes]:
    flows: dict[Direction | None, bytes] = defaultdict(bytes)
    for event in read_capture(data):
        if isinstance(event, Chunk):
            flows[event.flow.direction] += event.data
    return dict(flows)


def found(data: bytes, **options: Any) -> tuple[list[CapturedFrame], list[CaptureFault]]:
    items = list(read_frames(read_capture(data), **options))
    return [i for i in items if isinstance(i, CapturedFrame)], [i for i in items if isinstance(i, CaptureFault)]


# --- the format ---------------------------------------------------------------------------------------------------


@case(NOOP, CaptureFormat.RAW)
@case(b"\x08\x57", CaptureFormat.RAW)
@case(b"\x18\x57", CaptureFormat.RAW)
@case(b"\x83\x01", CaptureFormat.RAW)
@case(b"805c", CaptureFormat.HEX)
@case(b"\n\n# a remark", CaptureFormat.HEX)
@case(b"", CaptureFormat.HEX)
@case(b"\xd4\xc3\xb2\xa1", CaptureFormat.PCAP)
@case(b"\xa1\xb2\xc3\xd4", CaptureFormat.PCAP)
@case(b"\x4d\x3c\xb2\xa1", CaptureFormat.PCAP)
@case(b"\xa1\xb2\x3c\x4d", CaptureFormat.PCAP)
@case(b"\x0a\x0d\x0d\x0a\x1c\x00\x00\x00\x4d\x3c\x2b\x1a", CaptureFormat.PCAP)
@case(b"\x0a\x0d\x0d\x0a8053", CaptureFormat.HEX)
def test_the_format_is_found_by_the_first_bytes(data: bytes, expected: CaptureFormat) -> None:
    assert find_format(data) is expected


def test_raw_bytes_come_as_they_are() -> None:
    data = mutations(600)
    assert len(data) > 2 * 64 * 1024
    assert joined(data) == data


# --- hex text -----------------------------------------------------------------------------------------------------

HEX = NOOP.hex()
PAIRS = [HEX[i : i + 2] for i in range(0, len(HEX), 2)]
HEX_FORMS = {
    "bare": HEX,
    "upper case": HEX.upper(),
    "lines": "\n".join(PAIRS),
    "windows lines": "\r\n".join(PAIRS) + "\r\n",
    "byte order mark": "\ufeff" + HEX,
    "pairs": " ".join(PAIRS),
    "words": " ".join(HEX[i : i + 8] for i in range(0, len(HEX), 8)),
    "0x": "0x" + HEX,
    "C array": ", ".join(f"0x{pair}" for pair in PAIRS),
    "escapes": "".join(rf"\x{pair}" for pair in PAIRS),
    "colons": ":".join(PAIRS),
    "dashes": "-".join(PAIRS),
    "remarks": f"# DCP noop\n{HEX[:16]}  # the first half\n\n  {HEX[16:]}\n",
}


@each("text", HEX_FORMS.values())
def test_hex_in_every_spelling(text: str) -> None:
    assert joined(text.encode()) == NOOP


DUMPED = bytes.fromhex("805e000b00000000000000110000000500000000000000006162636465663132333435364142437c23")
DUMPS = {
    "xxd": """\
00000000: 805e 000b 0000 0000 0000 0011 0000 0005  .^..............
00000010: 0000 0000 0000 0000 6162 6364 6566 3132  ........abcdef12
00000020: 3334 3536 4142 437c 23                   3456ABC|#
""",
    "xxd -g1": """\
00000000: 80 5e 00 0b 00 00 00 00 00 00 00 11 00 00 00 05  .^..............
00000010: 00 00 00 00 00 00 00 00 61 62 63 64 65 66 31 32  ........abcdef12
00000020: 33 34 35 36 41 42 43 7c 23                       3456ABC|#
""",
    "hexdump -C": """\
00000000  80 5e 00 0b 00 00 00 00  00 00 00 11 00 00 00 05  |.^..............|
00000010  00 00 00 00 00 00 00 00  61 62 63 64 65 66 31 32  |........abcdef12|
00000020  33 34 35 36 41 42 43 7c  23                       |3456ABC|#|
00000029
""",
    "od -A x -t x1z": """\
000000 80 5e 00 0b 00 00 00 00 00 00 00 11 00 00 00 05  >.^..............<
000010 00 00 00 00 00 00 00 00 61 62 63 64 65 66 31 32  >........abcdef12<
000020 33 34 35 36 41 42 43 7c 23                       >3456ABC|#<
000029
""",
    "wireshark": """\
0000   80 5e 00 0b 00 00 00 00 00 00 00 11 00 00 00 05   .^..............
0010   00 00 00 00 00 00 00 00 61 62 63 64 65 66 31 32   ........abcdef12
0020   33 34 35 36 41 42 43 7c 23                        3456ABC|#
""",
    "wireshark, followed stream": """\
00000000  80 5e 00 0b 00 00 00 00  00 00 00 11 00 00 00 05   .^...... ........
00000010  00 00 00 00 00 00 00 00  61 62 63 64 65 66 31 32   ........ abcdef12
00000020  33 34 35 36 41 42 43 7c  23                        3456ABC| #
""",
    "tcpdump": """\
\t0x0000:  805e 000b 0000 0000 0000 0011 0000 0005  .^..............
\t0x0010:  0000 0000 0000 0000 6162 6364 6566 3132  ........abcdef12
\t0x0020:  3334 3536 4142 437c 23                   3456ABC|#
""",
}


@pytest.mark.parametrize("text", DUMPS.values(), ids=DUMPS.keys())
def test_dumps_lose_their_offsets_and_their_text(text: str) -> None:
    assert joined(text.encode()) == DUMPED


def test_text_that_looks_like_hex_stays_text() -> None:
    # The last line of a dump, eight bytes long, whose text is eight hex digits.
    assert joined(b"00000000: 6162 6364 6162 6364                      abcdabcd\n") == b"abcdabcd"
    assert joined(b"00000000: 6162 6364 6162 6364  abcdabcd\n") == b"abcdabcd"


def test_an_annotated_session_tells_connections_and_directions() -> None:
    text = f"""\
# a remark
## [dcp] new TCP connection

[dcp] C->S DCP_OPEN  open
    {OPEN[:16].hex(" ", 4)}
    {OPEN[16:].hex(" ", 4)}
[dcp] S->C DCP_NOOP are you alive
    {NOOP.hex(" ", 4)}
[dcp] (nothing more for 1.0 s)
## [dcp] reconnecting + DCP_OPEN (not shown)
"""
    server, client = Flow("dcp", TO_SERVER), Flow("dcp", TO_CLIENT)
    assert list(read_capture(text.encode())) == [
        ConnectionOpened(connection="dcp"),
        Chunk(flow=server, data=OPEN[:16], where="line 5", starts_frame=True),
        Chunk(flow=server, data=OPEN[16:], where="line 6"),
        Chunk(flow=client, data=NOOP, where="line 8", starts_frame=True),
        ConnectionOpened(connection="dcp"),
    ]


@case(b"805c\nhello\n", "line 2 is neither")
@case(b"805", "line 1 is neither")
@case(b"80 5 c0", "line 1 is neither")
@case(b"\xff\xfe8\x000\x00", "line 1 is neither")
@case(b"00000000  80 5c 00 00\n*\n00000020\n", "line 2 stands for repeated lines")
def test_other_lines_are_refused_by_number(text: bytes, complaint: str) -> None:
    with pytest.raises(CaptureError, match=complaint) as caught:
        list(read_capture(text))
    assert caught.value.hint


def test_what_stands_before_a_bad_line_is_read() -> None:
    events = read_capture(NOOP.hex().encode() + b"\nhello")
    assert next(events) == Chunk(data=NOOP, where="line 1")


# --- packets ------------------------------------------------------------------------------------------------------


def ip_packet(source: SocketAddress, destination: SocketAddress, sequence: int, payload: bytes, flags: int) -> bytes:
    tcp = dpkt.tcp.TCP(
        sport=source.port, dport=destination.port, seq=sequence % 2**32, flags=flags, off=5, data=payload
    )
    if len(source.address) == 4:
        return bytes(dpkt.ip.IP(src=source.address, dst=destination.address, p=6, data=tcp))
    return bytes(dpkt.ip6.IP6(src=source.address, dst=destination.address, nxt=6, plen=len(tcp), data=tcp))


def syn(sequence: int = 999, source: SocketAddress = CLIENT, destination: SocketAddress = SERVER) -> bytes:
    return ip_packet(source, destination, sequence, b"", dpkt.tcp.TH_SYN)


def from_client(sequence: int, payload: bytes) -> bytes:
    return ip_packet(CLIENT, SERVER, sequence, payload, dpkt.tcp.TH_ACK)


def from_server(sequence: int, payload: bytes) -> bytes:
    return ip_packet(SERVER, CLIENT, sequence, payload, dpkt.tcp.TH_ACK)


def ethernet(packet: bytes) -> bytes:
    return bytes(12) + (b"\x08\x00" if packet[0] >> 4 == 4 else b"\x86\xdd") + packet


def pcap(packets: Iterable[bytes], link_type: int = 101, nano: bool = False) -> bytes:
    file = BytesIO()
    writer = dpkt.pcap.Writer(file, linktype=link_type, nano=nano)
    for number, packet in enumerate(packets):
        writer.writepkt(packet, ts=number)
    return file.getvalue()


def cut(data: bytes, size: int, start: int = 1000) -> list[tuple[int, bytes]]:
    return [(start + at, data[at : at + size]) for at in range(0, len(data), size)]


LINK_LAYERS = {
    "ethernet": (1, ethernet),
    "vlan": (1, lambda p: bytes(12) + b"\x81\x00\x00\x05\x08\x00" + p),
    "two vlans": (1, lambda p: bytes(12) + b"\x88\xa8\x00\x05\x81\x00\x00\x06\x08\x00" + p),
    "padded": (1, lambda p: ethernet(p) + bytes(20)),
    "loopback, little-endian": (0, lambda p: b"\x02\x00\x00\x00" + p),
    "loopback, big-endian": (0, lambda p: b"\x00\x00\x00\x02" + p),
    "loopback, OpenBSD": (108, lambda p: b"\x00\x00\x00\x02" + p),
    "cooked": (113, lambda p: bytes(14) + b"\x08\x00" + p),
    "cooked, version 2": (276, lambda p: b"\x08\x00" + bytes(18) + p),
    "raw": (101, lambda p: p),
    "raw, old number": (12, lambda p: p),
    "raw IPv4": (228, lambda p: p),
    "with a frame check sequence": (1 | 0x24000000, ethernet),
}


@each(("link_type", "wrap"), LINK_LAYERS.values())
def test_link_layers(link_type: int, wrap: Any) -> None:
    packets = [syn(), from_client(1000, OPEN), from_server(5, NOOP)]
    assert by_direction(pcap(map(wrap, packets), link_type)) == {TO_SERVER: OPEN, TO_CLIENT: NOOP}


def test_ipv6_with_an_extension_header() -> None:
    plain = ip_packet(CLIENT_6, SERVER_6, 1000, OPEN, dpkt.tcp.TH_ACK)
    other = ip_packet(CLIENT_6, SERVER_6, 1000 + len(OPEN), NOOP, dpkt.tcp.TH_ACK)
    hop_by_hop = b"\x06\x00\x01\x04\x00\x00\x00\x00"
    extended = other[:4] + pack(">HB", len(other) - 40 + 8, 0) + other[7:40] + hop_by_hop + other[40:]
    for link_type, wrap in ((1, ethernet), (0, lambda p: b"\x1e\x00\x00\x00" + p), (229, lambda p: p)):
        frames, faults = found(pcap([wrap(plain), wrap(extended)], link_type))
        assert [f.frame.encode() for f in frames] == [OPEN, NOOP]
        assert faults == []
        assert frames[0].flow == Flow("[::2]:50000-[::1]:11210", TO_SERVER)


@pytest.mark.parametrize("nano", [False, True])
def test_both_resolutions_of_pcap(nano: bool) -> None:
    assert by_direction(pcap([syn(), from_client(1000, OPEN)], nano=nano)) == {TO_SERVER: OPEN}


def test_other_packets_are_passed_over() -> None:
    udp = bytes(dpkt.ip.IP(src=CLIENT.address, dst=SERVER.address, p=17, data=dpkt.udp.UDP(data=b"dns")))
    tcp = from_client(1000, OPEN)
    later_fragment = tcp[:6] + b"\x00\x10" + tcp[8:]
    packets = [ethernet(udp), bytes(12) + b"\x08\x06" + bytes(28), ethernet(tcp)[:40], b"", ethernet(later_fragment)]
    assert by_direction(pcap([*packets, ethernet(syn()), ethernet(tcp)], 1)) == {TO_SERVER: OPEN}


def test_other_link_types_are_refused() -> None:
    with pytest.raises(CaptureError, match="packet 1 has link type 127") as caught:
        list(read_capture(pcap([b"radio"], 127)))
    assert "Ethernet" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"no pcap", b"x" * 100, b"\xd4\xc3\xb2\xa1"])
def test_no_packet_capture(data: bytes) -> None:
    with pytest.raises(CaptureError, match="not a pcap or pcapng"):
        list(read_capture(data, CaptureFormat.PCAP))


def test_a_file_that_is_cut_off_gives_what_it_has() -> None:
    whole = pcap([syn(), from_client(1000, OPEN)])
    events = read_capture(whole + b"\x00\x00\x00")
    assert next(events) == ConnectionOpened(connection="10.0.0.2:50000-10.0.0.1:11210")
    assert next(events) == Chunk(flow=Flow("10.0.0.2:50000-10.0.0.1:11210", TO_SERVER), data=OPEN, where="packet 2")
    with pytest.raises(CaptureError, match="cut off in packet 3"):
        next(events)


# --- pcapng -------------------------------------------------------------------------------------------------------


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += bytes(-len(body) % 4)
    length = pack(order + "I", len(body) + 12)
    return pack(order + "I", kind) + length + body + length


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def interface(link_type: int, order: str = "<") -> bytes:
    return block(1, pack(order + "HHI", link_type, 0, 65535), order)


def enhanced(number: int, packet: bytes, order: str = "<") -> bytes:
    return block(6, pack(order + "IIIII", number, 0, 0, len(packet), len(packet)) + packet, order)


def test_pcapng_as_dpkt_writes_it() -> None:
    file = BytesIO()
    writer = dpkt.pcapng.Writer(file, linktype=1)
    for packet in (syn(), from_client(1000, OPEN), from_server(5, NOOP)):
        writer.writepkt(ethernet(packet), ts=1)
    assert by_direction(file.getvalue()) == {TO_SERVER: OPEN, TO_CLIENT: NOOP}


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng_interfaces_have_their_own_link_types(order: str) -> None:
    data = (
        section(order)
        + interface(1, order)
        + interface(0, order)
        + block(5, b"statistics", order)
        + enhanced(1, b"\x02\x00\x00\x00" + syn(), order)
        + enhanced(0, ethernet(from_client(1000, OPEN)), order)
        + enhanced(1, b"\x02\x00\x00\x00" + from_client(1000 + len(OPEN), NOOP), order)
    )
    assert by_direction(data) == {TO_SERVER: OPEN + NOOP}


def test_pcapng_old_and_simple_packets_and_a_second_section() -> None:
    first, second = syn(), from_client(1000, OPEN)
    third = from_client(1000 + len(OPEN), NOOP)
    data = (
        section()
        + interface(101)
        + block(3, pack("<I", len(first)) + first)
        + block(2, pack("<HHIIII", 0, 0, 0, 0, len(second), len(second)) + second)
        + section(">")
        + interface(101, ">")
        + enhanced(0, third, ">")
    )
    assert by_direction(data) == {TO_SERVER: OPEN + NOOP}


@each("damage", [
    b"\x00", pack("<II", 6, 0) + bytes(4), pack("<II", 6, 13) + bytes(20), pack("<II", 6, 4000) + bytes(20),
    block(6, bytes(4)), block(6, pack("<IIIII", 0, 0, 0, 4000, 4000)), block(3, b""), enhanced(7, b"x"),
    b"\x0a\x0d\x0d\x0a" + bytes(24), block(0x0A0D0D0A, b"\x4d\x3c\x2b\x1a"),
])  # fmt: skip
def test_a_damaged_pcapng_is_read_up_to_the_damage(damage: bytes) -> None:
    good = section() + interface(101) + enhanced(0, syn()) + enhanced(0, from_client(1000, OPEN))
    events = read_capture(good + damage)
    taken = [next(events), next(events)]
    assert isinstance(taken[1], Chunk)
    assert taken[1].data == OPEN
    with pytest.raises(CaptureError, match=f"at byte {len(good)}"):
        list(events)


# --- reassembly ---------------------------------------------------------------------------------------------------


@each("seed", range(5))
def test_segments_in_any_order_after_a_syn_give_the_bytes_once(seed: int) -> None:
    """Without one: `property/test_capture_properties`."""
    chance = random.Random(seed)
    data = mutations(40)
    start = chance.choice([1000, 2**32 - 500])  # sequence numbers wrap around
    segments = cut(data, 100, start) + cut(data, 130, start)
    chance.shuffle(segments)
    packets = [syn(start - 1), *(from_client(sequence, payload) for sequence, payload in segments)]
    assert by_direction(pcap(packets)) == {TO_SERVER: data}


def test_a_late_syn_still_tells_the_start_and_the_client() -> None:
    low_port = SocketAddress(CLIENT.address, 1024)
    data = [ip_packet(low_port, SERVER, 1000, OPEN, dpkt.tcp.TH_ACK), syn(999, low_port)]
    frames, faults = found(pcap(data))
    assert [(f.flow, f.frame.encode()) for f in frames] == [(Flow("10.0.0.2:1024-10.0.0.1:11210", TO_SERVER), OPEN)]
    assert faults == []


def test_who_is_the_client_without_a_syn() -> None:
    odd = SocketAddress(b"\x0a\x00\x00\x03", 9000)
    (first,), _ = found(pcap([from_server(1, NOOP)]))
    (second,), _ = found(pcap([ip_packet(odd, CLIENT, 1, NOOP, dpkt.tcp.TH_ACK)]))
    assert (first.flow.direction, second.flow.direction) == (TO_CLIENT, TO_CLIENT)


def test_the_same_ports_again_are_a_new_connection() -> None:
    other_start = 5_000_000
    packets = [
        syn(),
        from_client(1000, OPEN[:10]),
        syn(),  # repeated, not new
        syn(other_start - 1),
        from_client(other_start, NOOP),
    ]
    frames, faults = found(pcap(packets))
    assert [str(f.flow) for f in frames] == ["10.0.0.2:50000-10.0.0.1:11210 #2 C->S"]
    assert [fault.error.reason for fault in faults] == ["the bytes end 10 bytes into a frame (at byte 0)"]


def test_a_missing_segment_is_a_gap_and_decoding_goes_on() -> None:
    data = mutations(30)
    segments = cut(data, 200)
    del segments[3]
    frames, faults = found(pcap([syn(), *(from_client(s, p) for s, p in segments)]))
    seqnos = [int.from_bytes(f.frame.extras[:8], "big") for f in frames]
    assert seqnos == sorted(set(seqnos))
    assert set(seqnos) < set(range(1, 31))
    assert seqnos[-1] == 30
    (fault,) = faults
    assert isinstance(fault.error, TruncatedFrame)
    assert fault.error.reason.startswith("200 bytes are missing from the capture and ")
    assert "decoding goes on at the next frame" in fault.error.reason
    # Offsets count the missing bytes, too.
    assert all(data.startswith(f.frame.encode(), f.offset) for f in frames)


def test_a_gap_that_no_frame_follows() -> None:
    data = mutations(3)
    frames, faults = found(pcap([syn(), from_client(1000, data[:150]), from_client(1400, b"\xff" * 50)]))
    assert len(frames) == 2
    (fault,) = faults
    assert "no frame was found after that" in fault.error.reason


def test_a_snap_length_cuts_every_packet_and_is_told() -> None:
    frames, faults = found(pcap([syn(), from_client(1000, NOOP)[:50], from_client(1024, NOOP)]))
    assert [f.offset for f in frames] == [24]
    (fault,) = faults
    assert fault.error.reason.startswith("14 bytes are missing from the capture and 10 around them were skipped")


def test_waiting_for_a_missing_segment_has_a_limit() -> None:
    size = 64 * 1024
    early = [
        Segment(number=n, source=CLIENT, destination=SERVER, sequence=2000 + n * size, payload=bytes(size))
        for n in range(WAITING_BYTES_MAX // size + 1)
    ]
    opening = Segment(number=0, source=CLIENT, destination=SERVER, sequence=999, syn=True, ack=False)
    late = Segment(number=999, source=CLIENT, destination=SERVER, sequence=1000, payload=NOOP)
    # More segments than the window, so that the late one comes after the limit was reached.
    filler = [Segment(number=n, source=SERVER, destination=CLIENT, sequence=n, payload=b"x") for n in range(1000, 1400)]
    events = list(reassemble([opening, *early, *filler, late]))
    flow = Flow("10.0.0.2:50000-10.0.0.1:11210", TO_SERVER)
    assert [e for e in events if isinstance(e, Gap) and e.flow == flow] == [Gap(flow=flow, missing_bytes=1000)]
    assert not any(isinstance(e, Chunk) and e.where == "packet 999" for e in events)


def test_a_capture_that_begins_inside_a_frame() -> None:
    data = mutations(10)
    frames, faults = found(pcap([from_server(500, data[30:])]))
    assert [int.from_bytes(f.frame.extras[:8], "big") for f in frames] == list(range(2, 11))
    (fault,) = faults
    assert "the capture does not begin at a frame: 31 bytes were skipped" in fault.error.reason


def test_a_capture_that_begins_between_frames_has_no_fault() -> None:
    frames, faults = found(pcap([from_server(500, mutations(3))]))
    assert (len(frames), faults) == (3, [])


def test_another_protocol_stops_its_own_connection_only() -> None:
    web = SocketAddress(b"\x0a\x00\x00\x09", 8091)
    packets = [
        syn(99, CLIENT, web),
        ip_packet(CLIENT, web, 100, b"GET / HTTP/1.1\r\n", dpkt.tcp.TH_ACK),
        syn(),
        from_client(1000, OPEN),
        ip_packet(CLIENT, web, 116, b"\r\n", dpkt.tcp.TH_ACK),
    ]
    frames, faults = found(pcap(packets))
    assert [f.frame.encode() for f in frames] == [OPEN]
    assert [type(fault.error) for fault in faults] == [BadMagic]


# --- frames -------------------------------------------------------------------------------------------------------


def test_frames_know_their_number_offset_and_place() -> None:
    frames, faults = found(f"{OPEN.hex()}\n{NOOP[:3].hex()}\n{NOOP[3:].hex()}".encode())
    assert [(f.number, f.offset, f.where, f.flow) for f in frames] == [
        (1, 0, "line 1", UNKNOWN_FLOW),
        (2, len(OPEN), "line 2", UNKNOWN_FLOW),
    ]
    assert faults == []


def test_a_capture_that_ends_inside_a_frame() -> None:
    frames, (fault,) = found(NOOP + OPEN[:30])
    assert len(frames) == 1
    assert isinstance(fault.error, TruncatedFrame)
    assert fault.error.offset == 24


def test_bytes_that_are_no_frame_stop_the_flow() -> None:
    frames, (fault,) = found(NOOP + b"\xff" + NOOP)
    assert len(frames) == 1
    assert isinstance(fault.error, BadMagic)
    assert fault.error.offset == 24


def test_an_entry_of_a_session_starts_a_frame_even_after_a_cut_one() -> None:
    text = (
        f"[a] C->S OPEN\n{OPEN[:30].hex()}\n[a] C->S NOOP\n{NOOP.hex()}\n[a] C->S bad\nff\n[a] C->S NOOP\n{NOOP.hex()}"
    )
    frames, faults = found(text.encode())
    assert [(f.offset, f.where) for f in frames] == [(30, "line 4"), (55, "line 8")]
    assert [(fault.where, type(fault.error)) for fault in faults] == [("line 2", TruncatedFrame), ("line 6", BadMagic)]


HELLO = HelloResponse(features=(Feature.COLLECTIONS, Feature.JSON)).encode()


def test_collections_are_learnt_from_the_hello_response_of_the_same_connection() -> None:
    refused = HelloResponse(features=(Feature.JSON,)).encode()
    asked = Hello(features=(Feature.COLLECTIONS,)).encode()
    text = "".join(
        f"[{connection}] {direction} x\n{data.hex()}\n"
        for connection, direction, data in [
            ("a", "C->S", asked),
            ("a", "C->S", NOOP),
            ("a", "S->C", HELLO),
            ("a", "C->S", NOOP),
            ("a", "S->C", NOOP),
            ("b", "S->C", refused),
            ("b", "S->C", NOOP),
        ]
    )
    text += f"## [a] new TCP connection\n[a] C->S x\n{NOOP.hex()}\n"
    frames, _ = found(text.encode())
    assert [f.negotiated.collections for f in frames] == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("collections", [True, False])
def test_collections_can_be_told(collections: bool) -> None:
    frames, _ = found(NOOP + HELLO + NOOP, collections=collections)
    assert [f.negotiated.collections for f in frames] == [collections] * 3


def test_a_malformed_hello_response_teaches_nothing() -> None:
    malformed = HELLO[:11] + b"\x01" + HELLO[12:24] + b"\x00"
    frames, faults = found(malformed + NOOP)
    assert [f.negotiated.collections for f in frames] == [False, False]
    assert faults == []


def test_a_frame_is_found_by_its_header_and_by_the_next_one() -> None:
    data = mutations(2)
    assert find_frame(b"\x80junk" + data) == 5
    # A header that no other follows where its body ends is none.
    assert find_frame(NOOP + b"\xff" * 30 + data) == len(NOOP) + 30
    assert find_frame(b"\xff" * 100) is None
    assert find_frame(data[:23]) is None

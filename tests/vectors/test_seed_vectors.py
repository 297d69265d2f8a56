"""The packets that the seeds draw: each decodes to its seed's table and encodes back to the same bytes.

`seeds/ERRATA.md` says how the files are read and what was corrected in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import MalformedMessage
from headwater.protocol import upr
from headwater.protocol.failover_log import ConsumerPoint, FailoverEntry, FailoverLog, decide_rollback
from headwater.protocol.frames import HEADER_BYTES, Frame, FrameBuffer, decode_frame, decode_frames
from headwater.protocol.messages import dcp_streams, decode_message
from headwater.protocol.messages.base import Layout, octets, u8, u16, u32, u64
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.stream_requests import StreamRequestValue

SEEDS = Path(__file__).parent / "seeds"
ERRATA = (SEEDS / "ERRATA.md").read_text()

ATTRIBUTES = {"Data type": "datatype", "opaque": "stream_opaque", "rollback #": "rollback_seqno", "vb UUID": "vbuuid"}
"""What the seeds' names are in the source, where lower case and underscores do not make them so."""

NO_ATTRIBUTES = {"magic", "opcode", "key length", "extra length", "total body", "request type"}
"""What the class or the frame knows by itself; the bytes of these rows are held against the table all the same."""


@dataclass(frozen=True)
class Row:
    """A line of a vector's table."""

    start: int
    end: int
    name: str
    value: int | bytes

    @property
    def data(self) -> bytes:
        width = self.end - self.start
        return self.value if isinstance(self.value, bytes) else self.value.to_bytes(width, "big")

    @property
    def attribute(self) -> str:
        return ATTRIBUTES.get(self.name, self.name.lower().replace(" ", "_"))


@dataclass(frozen=True)
class Correction:
    start: int
    drawn: bytes
    table: bytes
    here: bytes
    erratum: str


@dataclass(frozen=True)
class Vector:
    name: str
    protocol: str
    packet: str
    data: bytes
    rows: tuple[Row, ...] = ()
    corrections: tuple[Correction, ...] = ()
    members: dict[str, str] = field(default_factory=dict)
    printed: str = ""

    def __str__(self) -> str:
        return self.name


def read_vector(path: Path) -> Vector:
    head, *parts = re.split(r"^(bytes|fields|corrections|printed):\n", path.read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    protocol, packet = re.findall(r"^packet: (\w+)\.(\w+)$", head, re.MULTILINE)[0]
    is_json = protocol == "json"
    return Vector(
        name=path.stem,
        protocol=protocol,
        packet=packet,
        data=read_bytes(sections["bytes"]),
        rows=() if is_json else tuple(map(read_row, lines(sections["fields"]))),
        corrections=tuple(map(read_correction, lines(sections.get("corrections", "")))),
        members=dict(line.split(maxsplit=1) for line in lines(sections["fields"])) if is_json else {},
        printed=sections.get("printed", ""),
    )


def lines(section: str) -> list[str]:
    return [line.strip() for line in section.splitlines() if line.strip() and not line.strip().startswith("# at")]


def read_bytes(section: str) -> bytes:
    data = b""
    for line in lines(section):
        offset, _, octets = line.partition(" ")
        assert int(offset) == len(data)
        data += bytes.fromhex(octets)
    return data


def read_row(line: str) -> Row:
    offsets, name, value = re.split(r" {2,}", line)
    start, _, last = offsets.partition("-")
    text = re.fullmatch(r'"(.*)"', value)
    return Row(int(start), int(last or start) + 1, name, text[1].encode() if text else int(value, 16))


def read_correction(line: str) -> Correction:
    offsets, drawn, table, here, erratum = line.split()
    start = int(offsets.partition("-")[0])
    in_drawing = b"" if drawn == "-" else bytes.fromhex(drawn)
    return Correction(start, in_drawing, bytes.fromhex(table), bytes.fromhex(here), erratum)


@cache
def vectors() -> dict[str, Vector]:
    return {path.stem: read_vector(path) for path in sorted(SEEDS.glob("*.txt"))}


def every(*protocols: str, but: str = "") -> pytest.MarkDecorator:
    chosen = [v for v in vectors().values() if v.protocol in protocols and v.packet != but]
    return pytest.mark.parametrize("vector", chosen, ids=str)


def decode(vector: Vector, frame: Frame) -> Any:
    """What the frame of a vector is to its protocol."""
    if vector.packet == "header":
        return frame
    return upr.decode_packet(frame) if vector.protocol == "upr" else decode_message(frame)


def expected(vector: Vector) -> Any:
    """The message made from the vector's table alone."""
    is_upr = vector.protocol == "upr"
    cls = getattr(upr, f"Upr{vector.packet}") if is_upr else getattr(dcp_streams, vector.packet)
    attributes: dict[str, Any] = {}
    log: list[int] = []
    has_log = "failover_log" in {known.name for known in fields(cls)}
    for row in vector.rows:
        if vector.packet == "StreamEnd" and row.name == "Request Type":
            attributes["reason"] = row.value
        elif has_log and row.name in ("vb UUID", "vb seqno", "VBucket UUID", "High Seqno"):
            assert isinstance(row.value, int)
            log.append(row.value)
        elif row.name.lower() not in NO_ATTRIBUTES:
            attributes[row.attribute] = row.value
    if log:
        attributes["failover_log"] = tuple(
            FailoverEntry(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno))
            for vbuuid, seqno in zip(log[::2], log[1::2], strict=True)
        )
    return cls(**attributes)


# --- that the vectors are all there, and sound by themselves ---------------------------------------------------


def test_no_vector_has_vanished() -> None:
    count = {seed: sum(name.startswith(seed) for name in vectors()) for seed in ("000", "001", "002", "004")}
    assert count == {"000": 4, "001": 5, "002": 2, "004": 16}
    assert len(vectors()) == 27


@every("dcp", "upr")
def test_the_table_covers_every_byte_once(vector: Vector) -> None:
    assert [row.start for row in vector.rows[1:]] == [row.end for row in vector.rows[:-1]]
    assert b"".join(row.data for row in vector.rows) == vector.data


@every("dcp", "upr")
def test_a_correction_is_in_the_bytes_and_in_the_errata(vector: Vector) -> None:
    for correction in vector.corrections:
        assert vector.data[correction.start :].startswith(correction.here)
        assert correction.here != correction.drawn or correction.here != correction.table
        assert f"| {correction.erratum} |" in ERRATA


def test_every_wrong_byte_of_the_seeds_is_a_correction() -> None:
    corrected = sorted(correction.erratum for vector in vectors().values() for correction in vector.corrections)
    of_lengths = ["004-1", "004-2", "004-4", "004-6", *(f"004-{number}" for number in range(9, 15))]
    assert corrected == sorted(["000-1", "000-2", *of_lengths])


# --- parsed three ways -----------------------------------------------------------------------------------------


@every("dcp", "upr")
def test_whole(vector: Vector) -> None:
    [frame] = decode_frames(vector.data)
    assert frame.encode() == vector.data
    if vector.packet != "header":
        assert decode(vector, frame) == expected(vector)
        assert type(decode(vector, frame)) is type(expected(vector))


@every("dcp", "upr")
def test_byte_by_byte(vector: Vector) -> None:
    buffer = FrameBuffer()
    for octet in vector.data[:-1]:
        buffer.receive_data(bytes([octet]))
        assert buffer.next_frame() is None
    buffer.receive_data(vector.data[-1:])
    frame = buffer.next_frame()
    assert frame is not None
    assert decode(vector, frame) == decode(vector, decode_frames(vector.data)[0])
    buffer.receive_end()


@every("dcp", "upr")
def test_with_trailing_bytes_of_a_next_frame(vector: Vector) -> None:
    for trailing in range(1, len(vector.data)):
        buffer = FrameBuffer()
        buffer.receive_data(vector.data + vector.data[:trailing])
        [frame] = buffer.frames()
        assert frame.encode() == vector.data
        assert buffer.buffered_bytes == trailing
        buffer.receive_data(vector.data[trailing:])
        assert list(buffer.frames()) == [frame]


# --- encoded ---------------------------------------------------------------------------------------------------


@every("dcp", "upr", but="header")
def test_encodes_back_to_the_same_bytes(vector: Vector) -> None:
    assert expected(vector).encode() == vector.data
    assert decode(vector, decode_frames(vector.data)[0]).encode() == vector.data


UPR_HEADER = Layout(
    u8("magic"), u8("opcode"), u16("key_length"), u8("extra_length"), u8("request_type"), u16("vbucket"),
    u32("total_body"), u32("request_id"), u64("cas"),
)  # fmt: skip


def upr_rows(packet: upr.UprPacket) -> Iterator[tuple[int, int, str, object]]:
    """Where every field of a packet begins and ends, its name and its value, by the layouts of the packet."""
    frame = packet.to_frame()
    key, value = Layout(octets(packet.key_field or "key", len(frame.key))), Layout(octets("value", len(frame.value)))
    parts = [(UPR_HEADER, frame.encode()[:HEADER_BYTES]), (packet.layout(), frame.extras), (key, frame.key)]
    at = 0
    for layout, data in (*parts, (packet.value_layout if packet.value_layout.fields else value, frame.value)):
        for start in range(0, len(data), layout.size_bytes or 1):
            numbers = layout.unpack(data, start)
            for known in layout.fields:
                yield at, at + known.width_bytes, known.name, numbers[known.name]
                at += known.width_bytes


@every("upr", but="header")
def test_the_fields_are_the_rows_of_the_table(vector: Vector) -> None:
    assert list(upr_rows(upr.decode_packet(decode_frames(vector.data)[0]))) == [
        (row.start, row.end, row.name.lower().replace(" ", "_"), row.value) for row in vector.rows
    ]


# --- JSON ------------------------------------------------------------------------------------------------------


def expected_value(vector: Vector) -> StreamRequestValue:
    members: dict[str, Any] = {name: int(text.split()[0], 16) for name, text in vector.members.items()}
    if "collections" in members:
        members["collections"] = tuple(int(text, 16) for text in vector.members["collections"].split())
    return StreamRequestValue(**members)


@every("json")
def test_a_json_example_decodes_and_encodes(vector: Vector) -> None:
    assert StreamRequestValue.decode(vector.data) == expected_value(vector)
    assert StreamRequestValue.decode(vector.printed.encode()) == expected_value(vector)
    assert expected_value(vector).encode() == vector.data


@every("json")
def test_a_json_example_rides_in_a_stream_request(vector: Vector) -> None:
    request = dcp_streams.StreamRequest(value=vector.data)
    data = request.encode()
    assert [decode_message(frame) for frame in decode_frames(data)] == [request]
    buffer = FrameBuffer()
    for octet in data:
        assert buffer.next_frame() is None
        buffer.receive_data(bytes([octet]))
    assert [decode_message(frame) for frame in buffer.frames()] == [request]
    whole = decode_frame(data + data[:-1])
    assert decode_message(whole[0]) == request
    assert whole[1] == len(data)


# --- what single errata rest on --------------------------------------------------------------------------------


def test_the_header_by_itself_is_no_packet() -> None:
    """Erratum 004-17."""
    [frame] = decode_frames(vectors()["004-01-header"].data)
    assert (frame.opcode, frame.datatype, frame.opaque) == (1, 0, 10)
    with pytest.raises(MalformedMessage, match="REQUEST has no type 0"):
        upr.decode_packet(frame)


def test_only_the_tables_reading_explains_the_rollback_that_follows() -> None:
    """Erratum 000-1: the request as its table has it is rolled back to 0, as drawn it would go elsewhere."""
    request, rollback, _, ok = (expected(vector) for name, vector in vectors().items() if name[:3] == "000")
    [correction] = vectors()["000-1-stream-request"].corrections
    log = FailoverLog.of(ok.failover_log)

    def rolled_back_to(snapshot_start: int) -> int | None:
        point = ConsumerPoint(
            vbuuid=request.vbuuid,
            start_seqno=request.start_seqno,
            snapshot_start_seqno=Seqno(snapshot_start),
            snapshot_end_seqno=request.snapshot_end_seqno,
        )
        high_seqno = log.newest.seqno
        decided = decide_rollback(point, failover_log=log, high_seqno=high_seqno, purge_seqno=Seqno(0))
        return None if decided is None else decided.to_seqno

    assert rolled_back_to(int.from_bytes(correction.table, "big")) == rollback.rollback_seqno == 0
    assert rolled_back_to(int.from_bytes(correction.drawn, "big")) == log.newest.seqno


def test_the_other_reading_is_a_sound_request_too() -> None:
    """Erratum 000-1, as drawn."""
    vector = vectors()["000-1-stream-request"]
    [correction] = vector.corrections
    end = correction.start + len(correction.here)
    drawn = vector.data[: correction.start] + correction.drawn + vector.data[end:]
    [frame] = decode_frames(drawn)
    request = decode_message(frame)
    assert request.snapshot_start_seqno == request.start_seqno == 0xFFEEDD
    assert request.encode() == drawn

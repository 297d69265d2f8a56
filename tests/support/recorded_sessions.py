"""Reads the annotated sessions in `sessions/`: recorded with real Couchbase servers, one frame per entry.

    ## [dcp] new TCP connection
    [dcp] C->S DCP_CONTROL  CONTROL enable_noop=true          an entry of the client: opcode, free text
        805e000b 00000000 …                                   its bytes
    [dcp] S->C DCP_CONTROL response status=0x00 SUCCESS …     an entry of the server: opcode, named fields
    ## [dcp] reconnecting                                     HELLO as on the previous connection of that name
    [dcp] ** server closed the connection
    [dcp] (nothing more for 0.5 s)

Nothing here uses the codec under test, not even to parse the negotiated features: those are in the annotations, too.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

SESSIONS = Path(__file__).parents[1] / "vectors" / "sessions"

_COLLECTIONS = 0x12
_ENTRY = re.compile(r"\[(?P<connection>\w+)\] (?P<direction>C->S|S->C) (?P<opcode>\w+) ?(?P<text>.*)")
_NEW_CONNECTION = re.compile(r"## \[(?P<connection>\w+)\] (new TCP connection|reconnecting)")
_CLOSED = re.compile(r"\[(?P<connection>\w+)\] \*\* server closed the connection")
_BYTES = re.compile(r" {4}[0-9a-f ]+")
_FIELD = re.compile(r"""(\w+)=(b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*"|\(.*?\)(?! *\()|\S+)""")


@dataclass(kw_only=True)
class RecordedFrame:
    """One frame of a session, with the recorder's annotations."""

    version: str
    line: int
    section: str
    connection: str
    """The recorder's name for the connection, and its number among those of that name."""
    is_from_server: bool
    opcode: str
    text: str
    collections: bool
    """Whether HELLO on this connection has negotiated collections."""
    data: bytearray = field(default_factory=bytearray)
    closes: bool = False
    """Whether the server closed the connection after this frame."""

    @property
    def fields(self) -> dict[str, str]:
        """The named fields of an annotation, as they are written."""
        return dict(_FIELD.findall(self.text))

    @property
    def is_response(self) -> bool:
        return self.text.startswith("response")

    @property
    def is_cut(self) -> bool:
        """Whether the recorder has left out the end of a long frame."""
        return len(self.data) < 24 + int.from_bytes(self.data[8:12])

    def __str__(self) -> str:
        return f"{self.version} line {self.line} {self.opcode}"


def read_session(version: str) -> list[RecordedFrame]:
    """Return all frames of a session, in order. Its name starts with the server's version."""
    frames: list[RecordedFrame] = []
    connections: dict[str, int] = {}
    with_collections: set[str] = set()
    section = ""
    lines = (SESSIONS / f"couchbase-{version}.txt").read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("### "):
            section = line.removeprefix("### ")
        elif match := _NEW_CONNECTION.match(line):
            number_before = connections.get(match["connection"], 0)
            connections[match["connection"]] = number_before + 1
            if "reconnecting" in line and f"{match['connection']}#{number_before}" in with_collections:
                with_collections.add(f"{match['connection']}#{number_before + 1}")
        elif match := _ENTRY.match(line):
            connection = f"{match['connection']}#{connections[match['connection']]}"
            frame = RecordedFrame(
                version=version,
                line=number,
                section=section,
                connection=connection,
                is_from_server=match["direction"] == "S->C",
                opcode=match["opcode"],
                text=match["text"].strip(),
                collections=connection in with_collections,
            )
            frames.append(frame)
            if frame.opcode == "HELLO" and frame.is_response and _COLLECTIONS in hello_features(frame):
                with_collections.add(connection)
        elif match := _CLOSED.match(line):
            name = f"{match['connection']}#{connections[match['connection']]}"
            next(frame for frame in reversed(frames) if frame.connection == name).closes = True
        elif _BYTES.fullmatch(line):
            frames[-1].data += bytes.fromhex(line)
    return frames


def hello_features(frame: RecordedFrame) -> list[int]:
    """Return the features in the annotation of a HELLO response."""
    if "val" not in frame.fields:
        return [int(number, 16) for number in re.findall(r"0x\w\w(?=,|$)", frame.text.partition("features")[2])]
    value = bytes_literal(frame.fields["val"])
    return [int.from_bytes(value[at : at + 2]) for at in range(0, len(value), 2)]


def bytes_literal(text: str) -> bytes:
    value = ast.literal_eval(text)
    assert isinstance(value, bytes)
    return value

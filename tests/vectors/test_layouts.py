"""A second opinion on every field: `layouts.txt` has what documents and recordings say, and the codec has to agree.

Each message is encoded with another number in every field, and each number has to be where the table has it. Then a
frame is put together by the table alone, and has to decode to those numbers. Tests between two ends of our own can't
see an error that both ends make.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import headwater.protocol.messages.dcp_changes as dcp_changes
import headwater.protocol.messages.dcp_streams as dcp_streams
import headwater.protocol.messages.documents as documents
import headwater.protocol.messages.vbuckets as vbuckets
from headwater.protocol import manifest as manifests
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Opcode
from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frames, stream_id
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import CacheItem, SystemEvent
from headwater.protocol.messages.vbuckets import VBucketSeqno
from headwater.protocol.status import Status
from support.recorded_sessions import SESSIONS, read_session

_FIELD = re.compile(r"(header|extras|value) (\d+) (\d+) ([\w.\[\]]+)(?: = (\w+))?")
_ENTRY_FIELD = re.compile(r"(\w+)\[(\d+)\]\.(\w+)")
ENTRIES: dict[str, type[Any]] = {"failover_log": FailoverEntry, "seqnos": VBucketSeqno, "items": CacheItem}
HAVE_A_KEY = ("Open", "Control", "Mutation", "Deletion", "Expiration", "Prepare", "Commit", "Abort", "Set")


@dataclass(frozen=True, slots=True)
class TableField:
    part: str
    offset: int
    width_bytes: int
    name: str
    number: int
    """Another one for every field, so that no two can be taken for each other."""
    is_fixed: bool

    @property
    def data(self) -> bytes:
        return self.number.to_bytes(self.width_bytes)


@dataclass(slots=True)
class Table:
    """One message in one form."""

    title: str
    of: str
    opcode: str
    kind: str
    since: str
    checked: str
    source: str
    fields: list[TableField] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.title} {self.kind}"

    def add(self, line: str) -> None:
        matched = _FIELD.fullmatch(line)
        assert matched is not None, line
        part, offset, width_bytes, name, fixed = matched.groups()
        first = 0x10 * (len(self.fields) + 1) % 0x100
        distinct = int.from_bytes(bytes((first + at) % 0x100 for at in range(int(width_bytes))))
        number = distinct if fixed is None else int(fixed, 0)
        self.fields.append(TableField(part, int(offset), int(width_bytes), name, number, fixed is not None))

    def part(self, name: str) -> bytes:
        """The bytes of a part, put together by the table alone."""
        data = bytearray()
        for one in sorted((one for one in self.fields if one.part == name), key=lambda one: one.offset):
            assert one.offset == len(data), f"{self}: a gap before {one.name}, or two fields at one place"
            data += one.data
        return bytes(data)

    @property
    def numbers(self) -> dict[str, Any]:
        """What the fields are called in the message, entries that repeat in their lists."""
        numbers: dict[str, Any] = {}
        for one in self.fields:
            entry = _ENTRY_FIELD.fullmatch(one.name)
            if entry is not None:
                entries = numbers.setdefault(entry[1], [])
                entries += [{}] * (int(entry[2]) + 1 - len(entries))
                entries[int(entry[2])] = {**entries[int(entry[2])], entry[3]: one.number}
            elif not one.is_fixed:
                numbers[one.name] = one.number
        return numbers


def read_tables() -> list[Table]:
    tables: list[Table] = []
    for line in (Path(__file__).parent / "layouts.txt").read_text().splitlines():
        if line.startswith("## "):
            tables.append(Table(*(part.strip() for part in line[3:].split(" | "))))
        elif line and not line.startswith("#"):
            tables[-1].add(line)
    return tables


TABLES = read_tables()
HEADERS = [table for table in TABLES if table.of == "-"]
MESSAGES = [table for table in TABLES if table.of != "-" and not table.of.startswith("event ")]
EVENTS = [table for table in TABLES if table.of.startswith("event ")]


def header(table: Table, *, key: bytes, extras: bytes, value: bytes) -> bytes:
    """A header by the table of headers, for these parts."""
    is_request = table.kind == "request"
    (layout,) = [one for one in HEADERS if one.title == "header" and one.kind == table.kind.split()[0]]
    given = {
        "opcode": int(table.opcode, 0),
        "key_bytes": len(key),
        "extras_bytes": len(extras),
        "body_bytes": len(extras) + len(key) + len(value),
        "status": 0 if is_request else int(table.kind.split()[1], 0),
    }
    data = bytearray(HEADER_BYTES)
    for one in layout.fields:
        number = one.number if one.is_fixed else given.get(one.name, 0)
        data[one.offset : one.offset + one.width_bytes] = number.to_bytes(one.width_bytes)
    return bytes(data)


def message_of(table: Table) -> tuple[Message, bytes]:
    """Our message with the numbers of the table, and its key."""
    modules = (dcp_changes, dcp_streams, documents, vbuckets)
    (cls,) = {getattr(module, table.of) for module in modules if hasattr(module, table.of)}
    fixed = {one.name: one.number for one in table.fields if one.is_fixed and one.name in cls.__dataclass_fields__}
    given = {**table.numbers, **fixed}
    for name, entry_class in ENTRIES.items():
        if name in given:
            given[name] = tuple(entry_class(**_without_lengths(entry)) for entry in given[name])
    key = b"key" if table.of in HAVE_A_KEY else b""
    if key:
        given["key"] = key
    if table.of == "Control":
        given["value"] = table.part("value")
    if not table.kind.startswith("request"):
        given |= {"opcode": Opcode(int(table.opcode, 0)), "status": Status(int(table.kind.split()[1], 0))}
    return cls(**given), key


def _without_lengths(entry: dict[str, Any]) -> dict[str, Any]:
    """An item of a cache transfer says how long its parts are by having them."""
    given = {name: number for name, number in entry.items() if name not in ("key_bytes", "value_bytes")}
    return {**given, "key": given["key"].to_bytes(1)} if "key" in given else given


@pytest.mark.parametrize("table", MESSAGES, ids=str)
def test_every_field_is_where_the_documents_have_it(table: Table) -> None:
    message, key = message_of(table)
    extras, value = table.part("extras"), table.part("value")
    expected = header(table, key=key, extras=extras, value=value) + extras + key + value
    encoded = message.encode()
    assert encoded == expected, f"{table}: the documents have {expected.hex(' ')}"
    decoded = decode_message(decode_frames(expected)[0])
    assert decoded == message


@pytest.mark.parametrize("table", EVENTS, ids=str)
def test_every_field_of_an_event_is_where_the_documents_have_it(table: Table) -> None:
    cls: type[Any] = getattr(manifests, table.of.removeprefix("event "))
    has_name = "name" in cls.__dataclass_fields__
    event = cls(**table.numbers, **({"name": "c"} if has_name else {}))
    encoded = manifests.encode_event(event)
    assert encoded.value == table.part("value")
    fixed = {one.name: one.number for one in table.fields if one.is_fixed}
    assert (int(encoded.event), encoded.version) == (fixed["event"], fixed["version"])
    message = SystemEvent(seqno=1, event=encoded.event, version=encoded.version, key=encoded.key, value=encoded.value)
    assert manifests.decode_event(message) == event


def test_every_field_of_the_header_is_where_the_documents_have_it() -> None:
    """Also with flexible framing, whose extras come first of the body."""
    message = replace(
        dcp_changes.SeqnoAdvanced(seqno=0x1111111111111111), vbucket=0x2122, opaque=0x31323334,
        cas=0x4142434445464748, datatype=0x01,
    )  # fmt: skip
    flexible = replace(message, frame_infos=(stream_id(0x5152),))
    for one, title, framing in ((message, "header", b""), (flexible, "header, flexible", b"\x22\x51\x52")):
        (layout,) = [table for table in HEADERS if (table.title, table.kind) == (title, "request")]
        numbers = {
            "opcode": 0x64, "key_bytes": 0, "extras_bytes": 8, "datatype": 1, "vbucket": 0x2122, "framing_bytes": 3,
            "body_bytes": 8 + len(framing), "opaque": 0x31323334, "cas": 0x4142434445464748,
        }  # fmt: skip
        encoded = one.encode()
        for place in layout.fields:
            expected = place.number if place.is_fixed else numbers[place.name]
            found = int.from_bytes(encoded[place.offset : place.offset + place.width_bytes])
            assert found == expected, place.name
        assert encoded[HEADER_BYTES:] == framing + b"\x11" * 8


def test_every_dcp_message_is_in_the_table() -> None:
    assert {int(table.opcode, 0) for table in MESSAGES} >= {
        int(opcode) for opcode in Opcode if opcode.name.startswith("DCP_")
    }


# --- what "recorded" says -----------------------------------------------------------------------------------------

SESSION_NAMES = sorted(path.stem.removeprefix("couchbase-") for path in SESSIONS.glob("couchbase-*.txt"))
RECORDED = [
    (name.partition("-")[0], frame)
    for name in SESSION_NAMES
    for recorded in read_session(name)
    if not recorded.is_cut
    for frame in decode_frames(bytes(recorded.data))
]
VERSIONS = {version for version, _ in RECORDED}


def _is_of(frame: Frame, table: Table) -> bool:
    kind = "request" if frame.magic.is_request else f"response 0x{frame.specific:02x}"
    form = (int(table.opcode, 0), table.kind, len(table.part("extras")))
    fixed = [one for one in table.fields if one.is_fixed and one.name != "value"]
    return (frame.opcode, kind, len(frame.extras)) == form and all(_stands_in(one, frame) for one in fixed)


def _stands_in(one: TableField, frame: Frame) -> bool:
    part = frame.extras if one.part == "extras" else frame.value
    return part[one.offset : one.offset + one.width_bytes] == one.data


@pytest.mark.parametrize("table", MESSAGES, ids=str)
def test_the_table_names_the_servers_of_whose_recordings_it_is(table: Table) -> None:
    claimed = re.match(r"recorded ((?:\d+\.\d+\.\d+(?:, )?)+)", table.checked)
    named = set(claimed[1].split(", ")) & VERSIONS if claimed else set()
    assert named == {version for version, frame in RECORDED if _is_of(frame, table)}
    if (oldest := table.since.removeprefix("by ")) in VERSIONS:
        assert oldest == min(named), "what no document says, the oldest recording does"


def test_the_documentation_says_how_each_form_was_checked() -> None:
    text = (Path(__file__).parents[2] / "docs" / "supported-dcp.md").read_text()
    section = text.partition("### How each form was checked")[2].partition("\n## ")[0]
    rows = [
        f"| {table.opcode} | {table.title}{'' if table.kind == 'request' else ', response'} | {table.since} | "
        f"{table.checked} |"
        for table in TABLES
        if table.opcode != "-" and Opcode(int(table.opcode, 0)).name.startswith("DCP_")
    ]
    assert [line for line in section.splitlines() if line.startswith("| 0x")] == rows

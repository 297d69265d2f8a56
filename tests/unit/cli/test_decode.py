"""`headwater decode`: what it prints, what it complains about, and how it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dpkt
import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.cli.frame_view import read_value
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.frames import (
    DurabilityLevel,
    Frame,
    FrameInfo,
    RequestInfo,
    durability,
    server_duration,
    stream_id,
)
from headwater.protocol.manifest import CollectionCreated, ScopeCreated, encode_event
from headwater.protocol.messages import Message, dcp_streams
from headwater.protocol.messages.base import NO_FIELDS, ErrorResponse
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotFlags, SnapshotMarker, SystemEvent
from headwater.protocol.messages.documents import RangeScanContinue, Set, StoreResponse
from headwater.protocol.messages.session import HelloResponse
from headwater.protocol.messages.subdocument import LookupSpec, MultiLookup
from headwater.protocol.messages.vbuckets import GetAllVbSeqnosResponse, VBucketSeqno
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
from support.cases import case, each

SESSION = Path(__file__).parents[2] / "vectors" / "captures" / "collections-7.0.5.txt"
NOOP = dcp_streams.DcpNoop(opaque=7).encode()


def run(*arguments: str, stdin: bytes | str = b"") -> Result:
    return CliRunner().invoke(main, ["decode", *arguments], input=stdin)


def annotated(data: bytes, *arguments: str) -> str:
    result = run("-", "--no-grid", *arguments, stdin=data)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(data: bytes | str, *arguments: str, exit_code: int = 0) -> list[dict[str, Any]]:
    result = run("-", "--json", *arguments, stdin=data)
    assert result.exit_code == exit_code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


SEED_ADD_STREAM = """\
#1  byte 0  DCP_ADD_STREAM command  magic 0x80 REQUEST  (line 1)
      Byte/     0       |       1       |       2       |       3       |
         /              |               |               |               |
        |0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|
        +---------------+---------------+---------------+---------------+
       0| 0x80          | 0x51          | 0x00          | 0x00          |
        +---------------+---------------+---------------+---------------+
       4| 0x04          | 0x00          | 0x00          | 0x05          |
        +---------------+---------------+---------------+---------------+
       8| 0x00          | 0x00          | 0x00          | 0x04          |
        +---------------+---------------+---------------+---------------+
      12| 0x00          | 0x00          | 0x00          | 0x01          |
        +---------------+---------------+---------------+---------------+
      16| 0x00          | 0x00          | 0x00          | 0x00          |
        +---------------+---------------+---------------+---------------+
      20| 0x00          | 0x00          | 0x00          | 0x00          |
        +---------------+---------------+---------------+---------------+
      24| 0x00          | 0x00          | 0x00          | 0x01          |
        +---------------+---------------+---------------+---------------+
    DCP_ADD_STREAM command
    Field        (offset) (value)
    Magic        (0)    : 0x80 (REQUEST)
    Opcode       (1)    : 0x51 (DCP_ADD_STREAM)
    Key length   (2,3)  : 0x0000
    Extra length (4)    : 0x04
    Data type    (5)    : 0x00
    Vbucket      (6,7)  : 0x0005
    Total body   (8-11) : 0x00000004
    Opaque       (12-15): 0x00000001
    CAS          (16-23): 0x0000000000000000
      flags      (24-27): 0x00000001 (TAKEOVER)

"""


def test_bytes_in_extras_are_hex() -> None:
    scan_id = bytes(range(16))
    data = RangeScanContinue(scan_id=scan_id, items_max=500).encode()
    assert f"0x{scan_id.hex()}" in annotated(data)
    (frame,) = as_json(data)
    assert frame["extras"]["scan_id"] == f"0x{scan_id.hex()}"
    assert frame["extras"]["items_max"] == 500


def test_a_packet_is_drawn_as_the_seed_draws_it() -> None:
    """Seed `002_badd0e48f35a0c7f.txt`, the add-stream command."""
    packet = "80510000 04000005 00000004 00000001 00000000 00000000 00000001"
    result = run("-", stdin=packet)
    assert (result.exit_code, result.stdout, result.stderr) == (0, SEED_ADD_STREAM, "")


def test_key_and_value_are_drawn_with_their_characters_and_long_values_cut() -> None:
    result = run("-", stdin=Mutation(seqno=1, rev_seqno=1, key=b"k1", value=b"{" + b"x" * 99).encode())
    assert "      52| 0x00          | 0x00          | 0x00          | 0x6b ('k')    |" in result.stdout
    assert "        | ... 36 more bytes of value\n" in result.stdout


def test_the_last_row_has_only_the_bytes_there_are() -> None:
    result = run("-", stdin=dcp_streams.StreamEnd().encode()[:8] + b"\0\0\0\x06" + bytes(16) + b"ab")
    assert "      28| 0x61 ('a')    | 0x62 ('b')    |\n        +---------------+---------------+\n" in result.stdout


def test_the_rollback_of_the_seed() -> None:
    """Seed `000_80ff00f4af6670e7.txt`: the value's field with its offset, the status by name."""
    printed = annotated(
        dcp_streams.StreamRequestResponse(status=Status.ROLLBACK, opaque=0x1000, rollback_seqno=0).encode()
    )
    assert "    Status           (6,7)  : 0x0023 (ROLLBACK)\n" in printed
    assert "      rollback seqno (24-31): 0x0000000000000000\n" in printed


def test_meanings_stand_in_brackets() -> None:
    printed = annotated(
        b"".join(
            (
                dcp_streams.StreamRequest(vbucket=513, vbuuid=0xFEEDDECA).encode(),
                dcp_streams.StreamEnd(reason=dcp_streams.StreamEndReason.LOST_PRIVILEGES).encode(),
                SnapshotMarker(start_seqno=1, end_seqno=2, flags=SnapshotFlags(0x46)).encode(),
                Mutation(seqno=1, rev_seqno=1, expiry=1794718740, key=b"k", datatype=Datatype(1)).encode(),
                Set(expiry=3600, key=b"k").encode(),
            )
        )
    )
    for line in (
        "Vbucket                (6,7)  : 0x0201 (513)",
        "end seqno            (40-47): 0xffffffffffffffff (no end)",
        "vbuuid               (48-55): 0x00000000feeddeca (4277001930)",
        "reason     (24-27): 0x00000008 (LOST_PRIVILEGES)",
        "flags       (40-43): 0x00000046 (DISK | CHECKPOINT | 0x40)",
        "expiry     (44-47): 0x6af93c14 (2026-11-15T04:59:00Z)",
        "expiry     (28-31): 0x00000e10 (in 3600 s)",
        "Data type    (5)    : 0x01 (JSON)",
    ):
        assert f" {line}\n" in printed


def test_frame_infos_have_their_place_and_meaning() -> None:
    infos = (stream_id(71), durability(DurabilityLevel.MAJORITY, timeout_ms=500), FrameInfo(20, b"\x01"))
    printed = annotated(Mutation(seqno=1, rev_seqno=1, key=b"k", frame_infos=infos).encode())
    assert "    Framing length (2)    : 0x0a (10)\n    Key length     (3)    : 0x01\n" in printed
    assert "      STREAM ID    (24-26): 0x220047 (sid 71)\n" in printed
    assert "      DURABILITY   (27-30): 0x130101f4 (MAJORITY within 500 ms)\n" in printed
    assert "      UNKNOWN 0x14 (31-33): 0xf10501\n" in printed
    assert "      seqno        (34-41): 0x0000000000000001\n" in printed


def test_server_durations_and_malformed_infos() -> None:
    taken = StoreResponse(opcode=Opcode.SET, frame_infos=(server_duration(1000),))
    broken = StoreResponse(opcode=Opcode.SET, frame_infos=(FrameInfo(RequestInfo.BARRIER, b"x"),))
    printed = annotated(taken.encode() + broken.encode())
    assert "      SERVER DURATION (24-26): 0x02004f (1002 us)\n" in printed
    assert "(a server duration of 1 bytes, not 2 (at byte 0))" in printed


def test_collection_ids_are_split_off_once_they_are_negotiated() -> None:
    mutation = Mutation(seqno=1, rev_seqno=1, collection_id=0x98, key=b"apple").encode()
    hello = HelloResponse(features=(Feature.COLLECTIONS,)).encode()
    row = '      collection id (55,56): 0x9801 (collection 0x98)\n    Key             (57-61): "apple"\n'
    assert row in annotated(hello + mutation)
    assert row in annotated(mutation, "--collections")
    assert row not in annotated(hello + mutation, "--no-collections")


def test_values_are_shown_for_what_they_are() -> None:
    printed = annotated(
        b"".join(
            Mutation(seqno=n, rev_seqno=1, key=b"k", value=value, datatype=Datatype(datatype)).encode()
            for n, (value, datatype) in enumerate(
                [
                    (b'{"n":0}', 1),
                    (b"text", 0),
                    (b"\x00\x01", 0),
                    ("ü".encode() * 200, 0),
                    (compress(b'{"z":"' + b"z" * 50 + b'"}'), 3),
                    (encode_xattrs(ValueParts({"_sync": b'{"rev":1}'}, b'{"n":1}')), 5),
                ]
            )
        )
    )
    assert ': {"n":0}\n' in printed
    assert ': "text"\n' in printed
    assert ": 0x0001\n" in printed
    assert f': "{"ü" * 128}" ... 144 more bytes\n' in printed
    assert f'{{"z":"{"z" * 50}"}} (snappy, 58 bytes inflated)\n' in printed
    assert '      xattr _sync        : {"rev":1}\n' in printed
    assert '(56-86): {"n":1}\n' in printed


def test_nothing_that_a_terminal_would_obey_is_printed() -> None:
    escape = b"\x1b]0;owned\x07"
    mutation = Mutation(seqno=1, rev_seqno=1, key=escape, value=escape).encode()
    text = f"[\x1b[31mred] C->S x\n{mutation.hex()}"
    result = run("-", stdin=text)
    assert "\x1b" not in result.stdout
    assert f"0x{escape.hex()}" in result.stdout


def test_passwords_are_hidden() -> None:
    for arguments in ([], ["--json"]):
        result = run(str(SESSION), *arguments)
        assert "PLAIN" in result.stdout
        assert "password" not in result.stdout
        assert b"password".hex() not in result.stdout
        assert "0x70 ('p')    | 0x61 ('a')    | 0x73" not in result.stdout
    assert "    Value        (29-44): hidden, 16 bytes\n" in run(str(SESSION)).stdout


def test_structured_values_without_a_drawing_are_told_in_words() -> None:
    printed = annotated(
        HelloResponse(features=(Feature.JSON, Feature.XATTR)).encode()
        + MultiLookup(key=b"k", specs=(LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"a.b"),)).encode()
        + GetAllVbSeqnosResponse(seqnos=tuple(VBucketSeqno(vbucket=n, seqno=n * 2) for n in range(40))).encode()
    )
    assert "      features          : JSON, XATTR\n" in printed
    assert '      specs[0]          : opcode=SUBDOC_GET flags=0 path="a.b"\n' in printed
    assert "      seqnos[31]        : vbucket=31 seqno=62\n      ...               : 8 more of these\n" in printed
    log = tuple(FailoverEntry(vbuuid=n, seqno=n) for n in range(40))
    assert ": 8 more of these\n" in annotated(dcp_streams.GetFailoverLogResponse(failover_log=log).encode())


LOG = (FailoverEntry(vbuuid=3, seqno=20), FailoverEntry(vbuuid=1, seqno=0))
MARKER = SnapshotMarker(start_seqno=1, end_seqno=9, flags=SnapshotFlags(5), max_visible_seqno=8, high_completed_seqno=7)
EVENTS = [
    SystemEvent(seqno=1, **vars_of)
    for vars_of in (
        {name: getattr(encoded, name) for name in ("event", "version", "key", "value")}
        for encoded in (
            encode_event(ScopeCreated(manifest_uid=1, scope_id=8, name="s")),
            encode_event(CollectionCreated(manifest_uid=1, scope_id=8, collection_id=9, name="c")),
            encode_event(CollectionCreated(manifest_uid=1, scope_id=8, collection_id=9, name="c", max_ttl_s=5)),
        )
    )
]


@each(
    "message",
    [
        dcp_streams.GetFailoverLogResponse(failover_log=LOG),
        dcp_streams.StreamRequestResponse(failover_log=LOG),
        dcp_streams.StreamRequestResponse(status=Status.ROLLBACK, rollback_seqno=5),
        MARKER,
        SnapshotMarker(
            start_seqno=1,
            end_seqno=9,
            flags=SnapshotFlags(5),
            max_visible_seqno=8,
            high_completed_seqno=7,
            high_prepared_seqno=6,
            purge_seqno=5,
        ),
        *EVENTS,
    ],
)
def test_drawn_values_are_what_the_message_says(message: Message) -> None:
    frame = message.to_frame()
    view = read_value(frame, message, NO_FIELDS, bytes_max=100)
    drawn: list[tuple[str, int]] = [(part.name, int(part.number or 0)) for part in view.parts]
    members = view.fields.get("failover_log", [view.fields])
    said = [(name, value) for member in members for name, value in member.items() if isinstance(value, int)]
    assert [pair for pair in said if pair in drawn] == drawn
    assert sum(part.width_bytes for part in view.parts) == len(frame.value)


def session() -> list[dict[str, Any]]:
    return as_json(SESSION.read_text(), exit_code=1)


def test_every_frame_of_a_recorded_session_is_an_object() -> None:
    frames = session()
    assert len(frames) == 42
    assert [frame["frame"] for frame in frames] == list(range(1, 43))
    for frame in frames:
        needed = {"magic", "opcode", "opaque", "cas", "extras", "key", "value_length", "offset", "datatype"}
        assert {*needed, "frame_infos"} <= frame.keys()
        assert ("vbucket" in frame) != ("status" in frame)


def test_the_fields_of_a_recorded_mutation() -> None:
    (apple,) = (frame for frame in session() if frame["key"] == "apple")
    assert apple == {
        "frame": 32, "offset": 1215, "where": "line 107", "connection": "coll", "direction": "S->C",
        "magic": "REQUEST", "magic_number": 0x80, "opcode": "DCP_MUTATION", "opcode_number": 0x57, "vbucket": 0,
        "opaque": 0x4001, "cas": 0x18E81BEFE92E0000, "datatype": ["JSON"], "frame_infos": [],
        "extras": {"seqno": 23, "rev_seqno": 8, "flags": 0, "expiry": 0, "lock_time": 0, "nmeta": 0, "nru": 2},
        "meanings": {}, "collection_id": 8, "key": "apple", "value_length": 7, "value": '{"c":1}',
    }  # fmt: skip


def test_recorded_structures_reasons_and_errors() -> None:
    frames = session()
    hello = frames[1]
    assert (hello["status"], hello["status_number"]) == ("SUCCESS", 0)
    assert hello["value_fields"] == {"features": ["XATTR", "SNAPPY", "JSON", "COLLECTIONS"]}
    assert frames[13]["value_fields"] == {"failover_log": [{"vbuuid": 0x000005B54D28A950, "seqno": 0}]}
    assert frames[14]["meanings"] == {"flags": "DISK | CHECKPOINT"}
    assert frames[29]["value_fields"]["collection_id"] == 8
    assert frames[29]["meanings"] == {"event": "COLLECTION_CREATED"}
    assert frames[36]["value_fields"] == {"rollback_seqno": 3}
    assert frames[39]["meanings"] == {"reason": "OK"}
    malformed, refused = frames[40:]
    assert malformed["error"] == "StreamRequest must have extras of 48 bytes, not 40 (at byte 24)"
    assert malformed["extras"] == {"extras": "0x" + "00" * 40}
    assert refused["value"] == '{"error":{"context":"Request must include extras of length 48"}}'


def test_what_json_has_no_form_for() -> None:
    assert as_json(dcp_streams.StreamRequest().encode())[0]["extras"]["end_seqno"] == 2**64 - 1, "beyond a double"
    (frame,) = as_json(Mutation(seqno=1, rev_seqno=1, key=b"a\xff", value=b"\xff\x00").encode())
    assert (frame["key"], frame["key_hex"], frame["value_hex"]) == ("a\ufffd", "61ff", "ff00")


def test_values_are_shortened_and_say_so() -> None:
    value = b'{"v":"' + b"x" * 5000 + b'"}'
    long = Mutation(seqno=1, rev_seqno=1, key=b"k", value=value).encode()
    assert value.decode() in annotated(long, "--value-bytes", "10000"), "a line is not cut"
    mutation = Mutation(seqno=1, rev_seqno=1, key=b"k", value=b"abcdef").encode()
    (frame,) = as_json(mutation, "--value-bytes", "3")
    assert (frame["value"], frame["value_length"], frame["value_truncated"]) == ("abc", 6, True)


def test_compressed_values_with_attributes() -> None:
    value = compress(encode_xattrs(ValueParts({"_sync": b"1"}, b"{}")))
    mutation = Mutation(seqno=1, rev_seqno=1, key=b"k", value=value, datatype=Datatype(7)).encode()
    (frame,) = as_json(mutation)
    assert frame["datatype"] == ["JSON", "SNAPPY", "XATTR"]
    assert (frame["value"], frame["xattrs"], frame["value_inflated_length"]) == ("{}", {"_sync": "1"}, 18)


@case(Frame(magic=Magic.REQUEST, opcode=0x57, extras=bytes(31)), "Mutation must have a key (at byte 24)")
@case(Frame(magic=Magic.REQUEST, opcode=0x79), "unknown opcode 0x79 (at byte 1)")
@case(
    Frame(magic=Magic.FLEXIBLE_REQUEST, opcode=0x5C, framing_extras=b"\x25"), "frame info 2 claims 5 bytes (at byte 0)"
)
@case(Frame(magic=Magic.REQUEST, opcode=0x57, extras=bytes(31), key=b"k", value=b"\xff", datatype=2), "not snappy")
@case(Frame(magic=Magic.REQUEST, opcode=0x5F, extras=bytes(13), value=b"x"), "system event COLLECTION_CREATED")
def test_a_malformed_message_is_still_a_frame(frame: Frame, error: str) -> None:
    (printed,) = as_json(frame.encode(), exit_code=1)
    assert error in printed["error"]
    assert printed["opcode_number"] == frame.opcode
    result = run("-", stdin=frame.encode())
    assert "    Error: " in result.stdout
    assert result.stderr.startswith("Error: frame #1, byte 0: ")


@case(Frame(magic=Magic.REQUEST, opcode=Opcode.SET_WITH_META, extras=bytes(24), key=b"k", value=b"v"))
@case(Frame(magic=Magic.SERVER_RESPONSE, opcode=1))
@case(Frame(magic=Magic.SERVER_REQUEST, opcode=2, value=b"{}"))
@case(ErrorResponse(opcode=Opcode.DCP_OPEN, status=Status.EINVAL, value=b"{}").to_frame())
def test_a_named_opcode_without_a_message_is_no_error(frame: Frame) -> None:
    (printed,) = as_json(frame.encode())
    assert "error" not in printed
    assert not printed["opcode"].startswith("UNKNOWN")


def test_upr_packets_go_by_the_draft_names() -> None:
    """Seed `004_76bf363098cb3e8e.txt`, the stream request, with its lengths put right."""
    request = (
        "8001000E 2001000C 0000002E 0000002D 00000000 00000000 00000000 00000000"
        "FFFFFFFF FFFFFFFF 00000000 0003C58A 00000000 00000A78 7265706C 69636174 696F6E5F 3132"
    )
    printed = annotated(request.encode(), "--upr")
    assert "#1  byte 0  UPR StreamRequest  magic 0x80 REQUEST  (line 1)\n" in printed
    assert "    Request type     (5)    : 0x01 (StreamRequest)\n" in printed
    assert "      vbucket uuid   (40-47): 0x000000000003c58a (247178)\n" in printed
    assert '    Group ID         (56-69): "replication_12"\n' in printed
    (frame,) = as_json(request, "--upr")
    assert (frame["packet"], frame["vbucket"], frame["extras"]["high_seqno"]) == ("StreamRequest", 12, 2680)


def test_upr_structures_reasons_and_faults() -> None:
    rollback = "81020000 0003000C 00000008 0000002D 00000000 00000000 00000000 000045A8"
    log = "81020000 0002000C 00000010 0000002D 00000000 00000000 00000000 00000DF2 00000000 0000F294"
    end = "81050000 0002000C 00000000 0000002D 00000000 00000000"
    wrong = "81040000 0409000C 00000004 0000002D 00000000 00000000 01020304"
    unknown = "81060000 0000000C 00000000 0000002D 00000000 00000000"
    frames = as_json("\n".join((rollback, log, end, wrong, unknown)), "--upr", exit_code=1)
    assert frames[0]["value_fields"] == {"rollback_seqno": 0x45A8}
    assert frames[1]["value_fields"] == {"failover_log": [{"vbuuid": 0xDF2, "seqno": 0xF294}]}
    assert frames[2]["packet"] == "StreamEnd"
    assert frames[3]["extras"] == {"extras": "0x01020304"}
    assert "has no type 9" in frames[3]["error"]
    assert (frames[4]["opcode"], "unknown opcode" in frames[4]["error"]) == ("UNKNOWN_0x06", True)
    assert "    Request type (5)    : 0x02 (STATE_CHANGED)\n" in annotated(end.encode(), "--upr")


def test_a_packet_capture_names_connection_direction_and_packet(tmp_path: Path) -> None:
    def packet(sequence: int, payload: bytes, flags: int) -> bytes:
        tcp = dpkt.tcp.TCP(sport=50000, dport=11210, seq=sequence, flags=flags, data=payload)
        return bytes(dpkt.ip.IP(src=b"\x7f\0\0\1", dst=b"\x7f\0\0\1", p=6, data=tcp))

    file = tmp_path / "dcp.pcap"
    with file.open("wb") as opened:
        writer = dpkt.pcap.Writer(opened, linktype=101)
        writer.writepkt(packet(9, b"", dpkt.tcp.TH_SYN), ts=0)
        writer.writepkt(packet(10, NOOP, dpkt.tcp.TH_ACK), ts=0)
        writer.writepkt(packet(44, NOOP, dpkt.tcp.TH_ACK), ts=0)
    result = run(str(file))
    assert result.exit_code == 1
    title = "  [127.0.0.1:50000-127.0.0.1:11210]  C->S  DCP_NOOP command  magic 0x80 REQUEST  "
    assert f"#1  byte 0{title}(packet 2)\n" in result.stdout
    assert f"#2  byte 34{title}(packet 3)\n" in result.stdout
    assert "\n-- [127.0.0.1:50000-127.0.0.1:11210 C->S] 10 bytes are missing from the capture" in result.stdout
    assert result.stderr.startswith("Error: 127.0.0.1:50000-127.0.0.1:11210 C->S, packet 3: 10 bytes are missing")
    assert result.stderr.count("\n") == 1


@case(
    NOOP + NOOP[:10],
    "the bytes end 10 bytes into a frame (at byte 24). Send the rest of the bytes, or check that the capture",
)
@case(NOOP + b"GET /", "0x47 is not a magic byte (at byte 24). Cut what stands before the next frame")
@case(f"{NOOP.hex()}\nhello\n".encode(), "line 2 is neither whole bytes in hex nor an annotation: 'hello'")
def test_what_stands_before_a_fault_is_printed(stdin: bytes, said: str) -> None:
    result = run("-", "--json", stdin=stdin)
    assert (result.exit_code, len(result.stdout.splitlines())) == (1, 1)
    assert result.stderr.startswith(f"Error: {said}")
    assert result.stderr.count("\n") == 1


def test_the_format_can_be_told() -> None:
    assert run("-", "--input-format", "raw", stdin=NOOP).exit_code == 0
    assert "0x38 is not a magic byte" in run("-", "--input-format", "raw", stdin=NOOP.hex()).stderr
    assert "not a pcap or pcapng" in run("-", "--input-format", "pcap", stdin=NOOP).stderr
    assert "line 1 is neither" in run("-", "--input-format", "hex", stdin=NOOP).stderr


def test_no_frames_at_all() -> None:
    result = run("-")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "There are no frames in the input\n")


def test_many_problems_are_counted_but_not_all_told() -> None:
    unknown = Frame(magic=Magic.REQUEST, opcode=0x79).encode()
    result = run("-", "--json", stdin=unknown * 30)
    lines = result.stderr.splitlines()
    assert len(result.stdout.splitlines()) == 30
    assert len(lines) == 21
    assert lines[-1] == "Error: and 10 more of that kind"


def test_the_input_has_a_limit() -> None:
    assert run("-", "--limit-bytes", "24", stdin=NOOP).exit_code == 0
    result = run("-", "--limit-bytes", "23", stdin=NOOP)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "the input is longer than 23 bytes. Raise --limit-bytes" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-file"], ["-", "--input-format", "xml"], ["-", "--limit-bytes", "0"], ["-", "--value-bytes", "-1"]],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2

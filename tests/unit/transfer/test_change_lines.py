"""`tail --json`: every line is one object, with the members of the typed change."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa
import pytest

from headwater.client.changes import changes_of
from headwater.transfer.change_lines import ChangeLines
from support.cases import case, each
from support.commands import batch_of, document, event, rollback


def lines_of(batch: pa.RecordBatch, **options: Any) -> list[dict[str, Any]]:
    text = bytes(ChangeLines(**{"no_value": False, **options}).encode(batch))
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.decode().removesuffix("\n").split("\n")]


def line_of(**members: Any) -> dict[str, Any]:
    [line] = lines_of(batch_of(document(**members)))
    return line


def test_a_line_has_the_members_of_the_change() -> None:
    batch = batch_of(document())
    [change] = changes_of(batch)
    [line] = lines_of(batch)
    assert line == change.to_dict()
    assert list(line) == list(change.to_dict()), "in the same order"
    assert line["vbuuid"] == 2**64 - 1
    assert line["changed_at"] == "2025-11-15T08:16:00.123437+00:00"


@pytest.mark.parametrize("op", ["mutation", "deletion", "expiration"])
def test_operations_of_documents(op: str) -> None:
    assert line_of(op=op, value=None if op != "mutation" else b"1")["op"] == op


@each("key", ["fox", 'quo"te', "back\\slash", "line\nbreak\r\t\x00\x1f", "Füchse 🦊", "\x7f\u2028", " ", "a" * 250])
def test_keys(key: str) -> None:
    assert line_of(key=key.encode())["key"] == key


def test_a_key_that_is_not_utf8() -> None:
    keys = [b"\xff\xfe", b"fox", b"\xc3", b"ab\x80"]
    lines = lines_of(batch_of(*(document(key=key) for key in keys)))
    assert [line.get("key") for line in lines] == [None, "fox", None, None]
    assert base64.b64decode(lines[0]["key_base64"]) == b"\xff\xfe"
    assert lines == [change.to_dict() for change in changes_of(batch_of(*(document(key=key) for key in keys)))]


@each(
    "value",
    ["{}", "[]", "1", '"text"', "null", '{\n  "legs": 4,\r\n  "name": "a\\nb"\n}\n', " [1,\n\n2] ", '"é\\u00e9"'],
)
def test_json_values(value: str) -> None:
    assert line_of(value=value.encode())["value"] == json.loads(value)


def test_numbers_are_printed_as_they_were_written() -> None:
    text = bytes(
        ChangeLines(no_value=False).encode(batch_of(document(value=b'{"n":1.10,"big":123456789012345678901}')))
    )
    assert b'"value":{"n":1.10,"big":123456789012345678901}' in text


@pytest.mark.parametrize(
    ("value", "datatype"),
    [(b"{", 1), (b"", 1), (b'{"a":1}', 0), (b"\x00\xff", 0), (b"text", 0), (b'{"a":1}{', 1), (b"\xef\xbb\xbf1", 1)],
)
def test_values_that_are_no_json(value: bytes, datatype: int) -> None:
    line = line_of(value=value, datatype=datatype)
    assert "value" not in line
    assert base64.b64decode(line["value_base64"]) == value


@pytest.mark.parametrize("length", range(7))
def test_base64_of_any_length(length: int) -> None:
    data = bytes(range(250, 250 + length) if length < 6 else range(6))
    assert line_of(value=data, datatype=0)["value_base64"] == base64.b64encode(data).decode()


def test_a_removal_has_no_value() -> None:
    assert line_of(op="deletion", value=None, datatype=0)["value"] is None


@case(None, None)
@case(0, "1970-01-01T00:00:00.000000+00:00")
@case(951_827_696_000_000, "2000-02-29T12:34:56.000000+00:00")
@case(4_107_542_399_999_999, "2100-02-28T23:59:59.999999+00:00")
@case(4_107_542_400_000_000, "2100-03-01T00:00:00.000000+00:00")
@case(2**64 // 1000, "2554-07-21T23:34:33.709551+00:00")
def test_times(time_us: int | None, time: str | None) -> None:
    assert line_of(changed_at=time_us)["changed_at"] == time


def test_names_that_are_not_known_or_need_escapes() -> None:
    line = line_of(scope=None, collection=None, collection_id=9)
    assert (line["scope"], line["collection"], line["collection_id"]) == (None, None, 9)
    assert line_of(collection='q"\n')["collection"] == 'q"\n'


def test_events_and_rollbacks_among_documents() -> None:
    rows = [
        rollback(), document(seqno=1), event("collection_created", collection="orders", collection_id=8),
        event("scope_dropped", collection=None, collection_id=None), document(seqno=2),
        document(seqno=3, op="deletion", value=None), rollback(vbucket=1),
    ]  # fmt: skip
    batch = batch_of(*rows)
    assert lines_of(batch) == [change.to_dict() for change in changes_of(batch)]
    assert lines_of(batch_of(rows[0])) == [
        {"op": "rollback", "vbucket": 7, "seqno": 40, "from_seqno": 99, "old_vbuuid": 5, "new_vbuuid": 6}
    ]


def test_extended_attributes() -> None:
    rows = [
        document(xattrs=[("_sync", b'{"rev":1}'), ("mine", b"2")]),
        document(),
        document(xattrs=[("bad", b"{")]),
        document(seqno=77),
    ]
    lines = lines_of(batch_of(*rows, xattrs=True))
    assert lines[0]["xattrs"] == {"_sync": {"rev": 1}, "mine": 2}
    assert "xattrs" not in lines[1]
    assert lines[2]["xattrs_base64"] == {"bad": "ew=="}
    assert lines[3]["seqno"] == 77


def test_without_values() -> None:
    rows = [document(value=b"", datatype=0), document(xattrs=[("a", b"1")]), rollback()]
    lines = lines_of(batch_of(*rows, xattrs=True), no_value=True)
    assert not any({"value", "value_base64"} & line.keys() for line in lines)
    assert lines[0]["flags"] == 33554432
    assert lines[1]["xattrs"] == {"a": 1}


def test_parts_of_batches() -> None:
    """A batch may begin in the middle of its buffers."""
    batch = batch_of(*(document(seqno=seqno, key=b"key-%d" % seqno, value=b"%d" % seqno) for seqno in range(10)))
    assert [line["key"] for line in lines_of(batch.slice(3, 4))] == ["key-3", "key-4", "key-5", "key-6"]
    assert [line["value"] for line in lines_of(batch.slice(9))] == [9]


def test_one_encoder_for_batches_of_any_size() -> None:
    encoder = ChangeLines(no_value=False)
    for count in (1, 1000, 3, 2000):
        batch = batch_of(*(document(seqno=seqno) for seqno in range(count)))
        lines = bytes(encoder.encode(batch)).decode().splitlines()
        assert [json.loads(line)["seqno"] for line in lines] == list(range(count))
    assert encoder.end() == b""

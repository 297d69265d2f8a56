"""JSON lines: which lines are documents, and what is said about the first that is not."""

from __future__ import annotations

import io

import pytest

from headwater.errors import InvalidDocument
from headwater.transfer import json_lines
from headwater.transfer.json_lines import BATCH_DOCUMENTS_MAX, JsonLines
from headwater.transfer.key_template import KeyTemplate
from support.cases import each


def read(data: bytes, template: str = "{#}") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    collect(JsonLines(io.BytesIO(data), KeyTemplate.parse(template)), found)
    return found


def collect(source: JsonLines, found: list[tuple[str, str]]) -> None:
    for batch in source.batches():
        assert 0 < len(batch) <= BATCH_DOCUMENTS_MAX
        start = 0
        for item in range(len(batch)):
            key = batch.keys[start : batch.key_ends[item]].tobytes()
            value = batch.values[batch.value_starts[item] : batch.value_ends[item]].tobytes()
            found.append((key.decode(), value.decode()))
            start = batch.key_ends[item]


@pytest.mark.parametrize(
    ("data", "documents"),
    [
        (b"", []),
        (b"\n \n\r\n", []),
        (b"{}", [("1", "{}")]),
        (b"{}\n", [("1", "{}")]),
        (b"{}\n[]", [("1", "{}"), ("2", "[]")]),
        (b"\xef\xbb\xbf{}\r\n\r\n 1 \n", [("1", "{}"), ("3", "1")]),
        (b'"a\\nb"\n\n\n\t{"x": 1}\t', [("1", '"a\\nb"'), ("4", '{"x": 1}')]),
    ],
)
def test_lines_are_documents_and_blank_ones_only_count(data: bytes, documents: list[tuple[str, str]]) -> None:
    assert read(data) == documents


def test_many_lines_come_in_batches() -> None:
    count = 3 * BATCH_DOCUMENTS_MAX + 7
    data = b"".join(b'{"id": %d, "pad": "%s"}\n' % (number, b"x" * 150) for number in range(count))
    found = read(data, "k{id}")
    assert [key for key, _ in found] == [f"k{number}" for number in range(count)]


@each(
    ("line", "reason"),
    [
        (b"{", "line 3 is not JSON"),
        (b"{'a': 1}", "line 3 is not JSON"),
        (b"{} {}", "line 3 is not JSON"),
        (b"NaN", "line 3 is not JSON"),
        (b'"\xff"', "line 3 is not JSON"),
        (b"\xef\xbb\xbf{}", "line 3 is not JSON"),
    ],
)
@each("end", [b"", b"\n", b"\n{}\n"])
def test_a_bad_line_is_told_after_those_before_it(line: bytes, reason: str, end: bytes) -> None:
    found: list[tuple[str, str]] = []
    with pytest.raises(InvalidDocument) as raised:
        collect(JsonLines(io.BytesIO(b"1\n2\n" + line + end), KeyTemplate.parse("{#}")), found)
    assert found == [("1", "1"), ("2", "2")]
    assert raised.value.reason == reason
    assert "one document a line" in raised.value.hint


def test_a_key_that_is_missing_comes_before_a_later_line_that_is_not_json() -> None:
    with pytest.raises(InvalidDocument, match="line 2: the document has no field 'id'"):
        read(b'{"id":1}\n{}\n{\n', "{id}")


@pytest.mark.parametrize("end", [b"", b"\n", b"\n1\n"])
def test_a_line_that_is_too_long(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(json_lines, "VALUE_BYTES_MAX", 1000)
    with pytest.raises(InvalidDocument, match="line 2 is longer than 1000 bytes") as raised:
        read(b"1\n[" + b"1," * 600 + b"1]" + end)
    assert "jq" in raised.value.hint


def test_how_much_was_read_is_known() -> None:
    source = JsonLines(io.BytesIO(b"1\n2\n"), KeyTemplate.parse("{#}"))
    assert source.bytes_read == 0
    list(source.batches())
    assert source.bytes_read == 4

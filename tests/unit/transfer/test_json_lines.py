"""JSON lines: which lines are documents, and what is said about the first that is not."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidDocument
from headwater.protocol.features import NOTHING_NEGOTIATED
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.documents import Set
from headwater.transfer import json_lines
from headwater.transfer.json_lines import BATCH_DOCUMENTS_MAX, NUMBERED, ExportedDocuments, JsonLines, begins_an_export
from headwater.transfer.key_template import KeyTemplate
from headwater.transfer.set_frames import JSON_FLAGS, KeptDocuments, encode_sets
from support.cases import case, each


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


@case(b"", [])
@case(b"\n \n\r\n", [])
@case(b"{}", [("1", "{}")])
@case(b"{}\n", [("1", "{}")])
@case(b"{}\n[]", [("1", "{}"), ("2", "[]")])
@case(b"\xef\xbb\xbf{}\r\n\r\n 1 \n", [("1", "{}"), ("3", "1")])
@case(b'"a\\nb"\n\n\n\t{"x": 1}\t', [("1", '"a\\nb"'), ("4", '{"x": 1}')])
def test_lines_are_documents_and_blank_ones_only_count(data: bytes, documents: list[tuple[str, str]]) -> None:
    assert read(data) == documents


def test_many_lines_come_in_batches() -> None:
    count = 3 * BATCH_DOCUMENTS_MAX + 7
    data = b"".join(b'{"id": %d, "pad": "%s"}\n' % (number, b"x" * 150) for number in range(count))
    found = read(data, "k{id}")
    assert [key for key, _ in found] == [f"k{number}" for number in range(count)]


@each("end", [b"", b"\n", b"\n{}\n"])
@case(b"{", "line 3 is not JSON")
@case(b"{'a': 1}", "line 3 is not JSON")
@case(b"{} {}", "line 3 is not JSON")
@case(b"NaN", "line 3 is not JSON")
@case(b'"\xff"', "line 3 is not JSON")
@case(b"\xef\xbb\xbf{}", "line 3 is not JSON")
def test_a_bad_line_is_told_after_those_before_it(end: bytes, line: bytes, reason: str) -> None:
    found: list[tuple[str, str]] = []
    with pytest.raises(InvalidDocument) as raised:
        collect(JsonLines(io.BytesIO(b"1\n2\n" + line + end), KeyTemplate.parse("{#}")), found)
    assert found == [("1", "1"), ("2", "2")]
    assert raised.value.reason == reason
    assert "one document per line" in raised.value.hint


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


# --- exported documents read back: what is in front of a line, and that the document behind it is as it was -----------


def documents_in(text: str, **options: Any) -> list[tuple[bytes, bytes, int, int]]:
    """Key, value, flags and expiry."""
    source = ExportedDocuments(JsonLines(io.BytesIO(text.encode()), NUMBERED), unit="line", **options)
    return [document for batch in source.batches() for document in _each(batch)]


def _each(batch: KeptDocuments) -> Iterator[tuple[bytes, bytes, int, int]]:
    start = 0
    for row, end in enumerate(batch.key_ends):
        value = batch.values[batch.value_starts[row] : batch.value_ends[row]].tobytes()
        yield batch.keys[start:end].tobytes(), value, int(batch.flags[row]), int(batch.expiries[row])
        start = end


@case('{"_key":"a","x":1}', (b"a", b'{"x":1}', JSON_FLAGS, 0))
@case('{"_key":"a"}', (b"a", b"{}", JSON_FLAGS, 0))
@case('{ "_key" : "a" , "x": [1, 2] }', (b"a", b'{ "x": [1, 2] }', JSON_FLAGS, 0))
@case('{"_key":"a" }', (b"a", b"{}", JSON_FLAGS, 0))
@case('{"_key":"a","_flags":7,"_expiry":1790000000,"x":1}', (b"a", b'{"x":1}', 7, 1790000000))
@case('{"_key":"a","_expiry":9}', (b"a", b"{}", JSON_FLAGS, 9))
@case('{"_key":"a","_value":[1, 2]}', (b"a", b"[1, 2]", JSON_FLAGS, 0))
@case('{"_key":"a","_flags":0,"_value":{"_key":"mine"}}', (b"a", b'{"_key":"mine"}', 0, 0))
@case('{"_key":"a","_value_base64":"/wA="}', (b"a", b"\xff\x00", JSON_FLAGS, 0))
@case('{"_key":"a","_value_base64":""}', (b"a", b"", JSON_FLAGS, 0))
@case('{"_key_base64":"/ms=","x":1}', (b"\xfek", b'{"x":1}', JSON_FLAGS, 0))
@case(r'{"_key":"a\"\u00e4\\","x":1}', ('a"ä\\'.encode(), b'{"x":1}', JSON_FLAGS, 0))
# Only what stands in front is ours.
@case('{"_key":"a","x":1,"_flags":7}', (b"a", b'{"x":1,"_flags":7}', JSON_FLAGS, 0))
@case('{"_key":"a","_flags":1.5}', (b"a", b'{"_flags":1.5}', JSON_FLAGS, 0))
def test_a_line(line: str, document: tuple[bytes, bytes, int, int]) -> None:
    assert documents_in(line) == [document]
    # Between others, too, which decides how the keys of a batch are read.
    plain = '{"_key":"plain","y":2}'
    found = (b"plain", b'{"y":2}', JSON_FLAGS, 0)
    assert documents_in(f"{plain}\n\n  {line}  \r\n{plain}\n") == [found, document, found]


@case('{"x":1}', "there is no key in front")
@case("[1]", "there is no key in front")
@case('{"_key":7}', "there is no key in front")
@case('{"_key":""}', "its key is empty or longer than 250 bytes")
@case(json.dumps({"_key": "k" * 251}), "its key is empty or longer than 250 bytes")
@case(r'{"_key":"\ud800"}', "its key is not valid Unicode")
@case('{"_key_base64":"=="}', "its key is not base64")
@case('{"_key":"a","_value":1,"x":2}', "something stands behind its _value")
@case('{"_key":"a","_value_base64":"=="}', "its _value_base64 is not base64")
@case('{"_key":"a","_value_base64":1}', "its _value_base64 is not base64")
@case('{"_key":"a","_flags":4294967296}', "_flags is larger than 4294967295")
def test_a_line_that_can_t_be_used(line: str, flaw: str) -> None:
    """Those before it are given first, whatever is among them."""
    before = '{"_key":"a","x":1}\n{"_key":"b","_value_base64":"/w=="}\n\n'
    source = ExportedDocuments(JsonLines(io.BytesIO(f"{before}{line}\n{before}".encode()), NUMBERED), unit="line")
    given_first: list[tuple[bytes, bytes]] = []
    with pytest.raises(InvalidDocument) as caught:
        given_first.extend((key, value) for batch in source.batches() for key, value, _, _ in _each(batch))
    assert given_first == [(b"a", b'{"x":1}'), (b"b", b"\xff")]
    assert caught.value.reason == f"line 4: {flaw}"


def test_another_expiry_for_all() -> None:
    assert documents_in('{"_key":"a","_expiry":9}\n{"_key":"b"}', expiry=60) == [
        (b"a", b"{}", JSON_FLAGS, 60),
        (b"b", b"{}", JSON_FLAGS, 60),
    ]


def test_a_set_has_the_flags_and_the_expiry_of_its_document() -> None:
    text = b'{"_key":"a","_flags":7,"_expiry":1790000000,"x":1}\n{"_key":"bb"}\n{"_key":"c","_flags":4294967295}\n'
    [batch] = ExportedDocuments(JsonLines(io.BytesIO(text), NUMBERED), unit="line").batches()
    frames = encode_sets(batch, vbuckets=16, expiry=3)
    batch.stamp(frames)
    sent = [decode_message(frame, NOTHING_NEGOTIATED) for frame in decode_frames(frames.data.tobytes())]
    assert all(isinstance(message, Set) for message in sent)
    found = [(message.key, message.flags, message.expiry, message.value) for message in sent]
    assert found == [(b"a", 7, 1790000000, b'{"x":1}'), (b"bb", JSON_FLAGS, 0, b"{}"), (b"c", 2**32 - 1, 0, b"{}")]


@case(b'{"_key":"a","x', True)
@case(b'\n { "_key" : "a', True)
@case(b'{"_key_base64":"', True)
@case(b'{"_key":7}', False)
@case(b'{"id":1,"_key":"a"}', False)
@case(b"", False)
@case(b"\xff\xfe", False)
def test_how_an_export_is_known(start: bytes, is_one: bool) -> None:
    assert begins_an_export(start) is is_one


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=60).filter(lambda key: len(key.encode("utf-8", "replace")) <= 250),
            st.dictionaries(st.text(max_size=9).filter(lambda name: not name.startswith("_")), json_values, max_size=4),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_members_behind_a_key_are_the_document(items: list[tuple[str, dict[str, Any]]], ascii_only: bool) -> None:
    items = [(key, value) for key, value in items if _is_unicode([key, value])]
    lines = [json.dumps({"_key": key, **value}, ensure_ascii=ascii_only) for key, value in items]
    found = documents_in("\n".join(lines))
    assert [(key.decode(), json.loads(value)) for key, value, _, _ in found] == items


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

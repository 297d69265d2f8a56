"""Exported documents read back: what is in front of a line, and that the document behind it is as it was."""

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
from headwater.transfer.json_lines import NUMBERED, ExportedDocuments, JsonLines, begins_an_export
from headwater.transfer.set_frames import JSON_FLAGS, KeptDocuments, encode_sets
from support.cases import each


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


@each(
    ("line", "document"),
    [
        ('{"_key":"a","x":1}', (b"a", b'{"x":1}', JSON_FLAGS, 0)),
        ('{"_key":"a"}', (b"a", b"{}", JSON_FLAGS, 0)),
        ('{ "_key" : "a" , "x": [1, 2] }', (b"a", b'{ "x": [1, 2] }', JSON_FLAGS, 0)),
        ('{"_key":"a" }', (b"a", b"{}", JSON_FLAGS, 0)),
        ('{"_key":"a","_flags":7,"_expiry":1790000000,"x":1}', (b"a", b'{"x":1}', 7, 1790000000)),
        ('{"_key":"a","_expiry":9}', (b"a", b"{}", JSON_FLAGS, 9)),
        ('{"_key":"a","_value":[1, 2]}', (b"a", b"[1, 2]", JSON_FLAGS, 0)),
        ('{"_key":"a","_flags":0,"_value":{"_key":"mine"}}', (b"a", b'{"_key":"mine"}', 0, 0)),
        ('{"_key":"a","_value_base64":"/wA="}', (b"a", b"\xff\x00", JSON_FLAGS, 0)),
        ('{"_key":"a","_value_base64":""}', (b"a", b"", JSON_FLAGS, 0)),
        ('{"_key_base64":"/ms=","x":1}', (b"\xfek", b'{"x":1}', JSON_FLAGS, 0)),
        (r'{"_key":"a\"\u00e4\\","x":1}', ('a"ä\\'.encode(), b'{"x":1}', JSON_FLAGS, 0)),
        # Only what stands in front is ours.
        ('{"_key":"a","x":1,"_flags":7}', (b"a", b'{"x":1,"_flags":7}', JSON_FLAGS, 0)),
        ('{"_key":"a","_flags":1.5}', (b"a", b'{"_flags":1.5}', JSON_FLAGS, 0)),
    ],
)
def test_a_line(line: str, document: tuple[bytes, bytes, int, int]) -> None:
    assert documents_in(line) == [document]
    # Between others, too, which decides how the keys of a batch are read.
    plain = '{"_key":"plain","y":2}'
    found = (b"plain", b'{"y":2}', JSON_FLAGS, 0)
    assert documents_in(f"{plain}\n\n  {line}  \r\n{plain}\n") == [found, document, found]


@each(
    ("line", "flaw"),
    [
        ('{"x":1}', "there is no key in front"),
        ("[1]", "there is no key in front"),
        ('{"_key":7}', "there is no key in front"),
        ('{"_key":""}', "its key is empty or longer than 250 bytes"),
        (json.dumps({"_key": "k" * 251}), "its key is empty or longer than 250 bytes"),
        (r'{"_key":"\ud800"}', "its key is not valid Unicode"),
        ('{"_key_base64":"=="}', "its key is not base64"),
        ('{"_key":"a","_value":1,"x":2}', "something stands behind its _value"),
        ('{"_key":"a","_value_base64":"=="}', "its _value_base64 is not base64"),
        ('{"_key":"a","_value_base64":1}', "its _value_base64 is not base64"),
        ('{"_key":"a","_flags":4294967296}', "_flags is larger than 4294967295"),
    ],
)
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
    found = [(message.key, message.flags, message.expiry, message.value) for message in sent]  # type: ignore[union-attr]
    assert found == [
        (b"a", 7, 1790000000, b'{"x":1}'),
        (b"bb", JSON_FLAGS, 0, b"{}"),
        (b"c", 2**32 - 1, 0, b"{}"),
    ]


@pytest.mark.parametrize(
    ("start", "is_one"),
    [
        (b'{"_key":"a","x', True),
        (b'\n { "_key" : "a', True),
        (b'{"_key_base64":"', True),
        (b'{"_key":7}', False),
        (b'{"id":1,"_key":"a"}', False),
        (b"", False),
        (b"\xff\xfe", False),
    ],
)
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

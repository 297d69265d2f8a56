"""Templates of keys: how they are read, and what they make of documents."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.errors import InvalidDocument, InvalidKeyTemplate
from headwater.transfer.key_template import KeyField, KeyTemplate, Literal, Number
from support.cases import each


def build(template: str, *documents: str, first: int = 1) -> tuple[list[str], InvalidDocument | None]:
    encoded = [document.encode() for document in documents]
    ends = np.cumsum([len(document) for document in encoded], dtype=np.int64)
    starts = ends - [len(document) for document in encoded]
    text = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    numbers = np.arange(first, first + len(documents))
    keys, key_ends, problem = KeyTemplate.parse(template).build(text, starts, ends, numbers)
    key_starts = [0, *key_ends.tolist()]
    return [keys[start:end].tobytes().decode() for start, end in zip(key_starts, key_ends, strict=False)], problem


def test_a_template_in_pieces() -> None:
    template = KeyTemplate.parse("ü::{a}-{#}-{b}{a}{{}}")
    assert template.pieces == (
        Literal("ü::".encode()),
        KeyField("a"),
        Literal(b"-"),
        Number(),
        Literal(b"-"),
        KeyField("b"),
        KeyField("a"),
        Literal(b"{"),
        Literal(b"}"),
    )
    assert template.fields == ("a", "b")


@each(
    ("text", "reason"),
    [
        ("", "every key the same"),
        ("user", "every key the same"),
        ("{{id}}", "every key the same"),
        ("{}", "empty {}"),
        ("a{id", "lone {"),
        ("a}{id}", "lone }"),
        ("{#}" + "x" * 1024, "more than 1024"),
        ("{1}{2}{3}{4}{5}{6}{7}{8}{9}", "more than 8 fields"),
    ],
)
def test_a_template_that_cannot_be_used(text: str, reason: str) -> None:
    with pytest.raises(InvalidKeyTemplate) as raised:
        KeyTemplate.parse(text)
    assert reason in raised.value.reason
    assert "{#}" in raised.value.hint


def test_numbers() -> None:
    assert build("doc::{#}", "1", "2", "3", first=9) == (["doc::9", "doc::10", "doc::11"], None)
    assert build("{#}", "1", first=2**62) == ([str(2**62)], None)
    assert build("{#}") == ([], None)


@each(
    ("document", "key"),
    [
        ('{"id":"x"}', "x"),
        ('{"id":7}', "7"),
        ('{"id":-7,"a":1}', "-7"),
        ('{ "id" :\t7 }', "7"),
        ('{"id":7\r}', "7"),
        ('{"a":{"id":1},"id":2}', "2"),
        ('{"a":["id",{"id":1}],"id":2}', "2"),
        ('{"a":"id","b":[],"id":2}', "2"),
        ('{"id":1,"id":2}', "2"),
        ('{"id":"ünïcödé"}', "ünïcödé"),
        ('{"id":"a\\"b\\u0041"}', 'a"bA'),
        ('{"\\u0069d":5}', "5"),
        ('{"a\\\\":1,"id":5}', "5"),
        ('{"a":"\\\\","id":5}', "5"),
        ('{"id":123456789012345678901234567890}', "123456789012345678901234567890"),
    ],
)
def test_fields(document: str, key: str) -> None:
    assert build("{id}", document) == ([key], None)
    assert build("u::{id}!", document, document) == ([f"u::{key}!"] * 2, None)


@each(
    ("document", "reason"),
    [
        ("{}", "has no field 'id'"),
        ("[]", "has no field 'id'"),
        ('["x","id",5]', "has no field 'id'"),
        ('"id"', "has no field 'id'"),
        ('{"a":{"id":1}}', "has no field 'id'"),
        ('{"id":null}', "neither a string nor a whole number"),
        ('{"id":true}', "neither a string nor a whole number"),
        ('{"id":1.5}', "neither a string nor a whole number"),
        ('{"id":1e3}', "neither a string nor a whole number"),
        ('{"id":{}}', "neither a string nor a whole number"),
        ('{"id":["x"]}', "neither a string nor a whole number"),
        ('{"id":"\\ud800"}', "not valid Unicode"),
        ('{"id":""}', "empty or longer than 250 bytes"),
        (f'{{"id":"{"x" * 251}"}}', "empty or longer than 250 bytes"),
        (f'{{"id":"{"x" * 100_000}"}}', "empty or longer than 250 bytes"),
        (f'{{"\\u0061":1,"n":{"9" * 5000}}}', "too much for Python's JSON"),
    ],
)
def test_the_first_document_without_a_key_is_told(document: str, reason: str) -> None:
    keys, problem = build("{id}", '{"id":1}', '{"id":"two"}', document, '{"id":4}', "{}")
    assert keys == ["1", "two"]
    assert problem is not None
    assert problem.reason.startswith("line 3: ")
    assert reason in problem.reason
    assert "template" in problem.hint


def test_the_longest_key() -> None:
    assert build("{id}", f'{{"id":"{"x" * 250}"}}') == (["x" * 250], None)


def test_several_fields_fail_at_the_first_document() -> None:
    keys, problem = build("{a}-{b}-{#}", '{"a":1,"b":2}', '{"a":3}', '{"b":4}')
    assert keys == ["1-2-1"]
    assert problem is not None
    assert problem.reason == "line 2: the document has no field 'b'"
    keys, problem = build("{a}-{b}", '{"a":"\\u0041","b":"\\u0042"}', '{"a":"c","b":"\\u0044"}')
    assert (keys, problem) == (["A-B", "c-D"], None)

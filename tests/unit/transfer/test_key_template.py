"""Templates of keys: how they are read, and what they make of documents."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headwater.errors import InvalidDocument, InvalidKeyTemplate
from headwater.transfer import key_template
from headwater.transfer.key_template import VALUE_BYTES_MIN, GeneratedDocuments, KeyField, KeyTemplate, Literal, Number
from support.cases import case


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
        Literal("ü::".encode()), KeyField("a"), Literal(b"-"), Number(), Literal(b"-"), KeyField("b"), KeyField("a"),
        Literal(b"{"), Literal(b"}"),
    )  # fmt: skip
    assert template.fields == ("a", "b")


@case("", "every key the same")
@case("user", "every key the same")
@case("{{id}}", "every key the same")
@case("{}", "empty {}")
@case("a{id", "lone {")
@case("a}{id}", "lone }")
@case("{#}" + "x" * 1024, "more than 1024")
@case("{1}{2}{3}{4}{5}{6}{7}{8}{9}", "more than 8 fields")
def test_a_template_that_cannot_be_used(text: str, reason: str) -> None:
    with pytest.raises(InvalidKeyTemplate) as raised:
        KeyTemplate.parse(text)
    assert reason in raised.value.reason
    assert "{#}" in raised.value.hint


def test_numbers() -> None:
    assert build("doc::{#}", "1", "2", "3", first=9) == (["doc::9", "doc::10", "doc::11"], None)
    assert build("{#}", "1", first=2**62) == ([str(2**62)], None)
    assert build("{#}") == ([], None)


@case('{"id":"x"}', "x")
@case('{"id":7}', "7")
@case('{"id":-7,"a":1}', "-7")
@case('{ "id" :\t7 }', "7")
@case('{"id":7\r}', "7")
@case('{"a":{"id":1},"id":2}', "2")
@case('{"a":["id",{"id":1}],"id":2}', "2")
@case('{"a":"id","b":[],"id":2}', "2")
@case('{"id":1,"id":2}', "2")
@case('{"id":"ünïcödé"}', "ünïcödé")
@case('{"id":"a\\"b\\u0041"}', 'a"bA')
@case('{"\\u0069d":5}', "5")
@case('{"a\\\\":1,"id":5}', "5")
@case('{"a":"\\\\","id":5}', "5")
@case('{"id":123456789012345678901234567890}', "123456789012345678901234567890")
@case(f'{{"id":"{"x" * 248}"}}', "x" * 248)  # with the two of the template, the longest key
def test_fields(document: str, key: str) -> None:
    assert build("{id}", document) == ([key], None)
    assert build("u{id}!", document, document) == ([f"u{key}!"] * 2, None)


@case("{}", "has no field 'id'")
@case("[]", "has no field 'id'")
@case('["x","id",5]', "has no field 'id'")
@case('"id"', "has no field 'id'")
@case('{"a":{"id":1}}', "has no field 'id'")
@case('{"id":null}', "neither a string nor a whole number")
@case('{"id":true}', "neither a string nor a whole number")
@case('{"id":1.5}', "neither a string nor a whole number")
@case('{"id":1e3}', "neither a string nor a whole number")
@case('{"id":{}}', "neither a string nor a whole number")
@case('{"id":["x"]}', "neither a string nor a whole number")
@case('{"id":"\\ud800"}', "not valid Unicode")
@case('{"id":""}', "empty or longer than 250 bytes")
@case(f'{{"id":"{"x" * 251}"}}', "empty or longer than 250 bytes")
@case(f'{{"id":"{"x" * 100_000}"}}', "empty or longer than 250 bytes")
@case(f'{{"\\u0061":1,"n":{"9" * 5000}}}', "too much for Python's JSON")
def test_the_first_document_without_a_key_is_told(document: str, reason: str) -> None:
    keys, problem = build("{id}", '{"id":1}', '{"id":"two"}', document, '{"id":4}', "{}")
    assert keys == ["1", "two"]
    assert problem.reason.startswith("line 3: ")
    assert reason in problem.reason
    assert "template" in problem.hint


def test_several_fields_fail_at_the_first_document() -> None:
    keys, problem = build("{a}-{b}-{#}", '{"a":1,"b":2}', '{"a":3}', '{"b":4}')
    assert keys == ["1-2-1"]
    assert problem.reason == "line 2: the document has no field 'b'"
    keys, problem = build("{a}-{b}", '{"a":"\\u0041","b":"\\u0042"}', '{"a":"c","b":"\\u0044"}')
    assert (keys, problem) == (["A-B", "c-D"], None)


# --- generated documents: JSON of the size asked for, the same for the same seed, whatever the batches ----------------


def generate(count: int, template: str = "{#}", **options: Any) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for batch in GeneratedDocuments(count, KeyTemplate.parse(template), **options).batches():
        start = 0
        for item in range(len(batch)):
            key = batch.keys[start : batch.key_ends[item]].tobytes().decode()
            found[key] = batch.values[batch.value_starts[item] : batch.value_ends[item]].tobytes()
            start = batch.key_ends[item]
    return found


@pytest.mark.parametrize("value_bytes", [VALUE_BYTES_MIN, 60, 100, 200, 1000, 100_000])
def test_they_are_json_of_the_size_asked_for(value_bytes: int) -> None:
    found = generate(50, value_bytes=value_bytes)
    assert list(found) == [str(number) for number in range(1, 51)]
    for number, text in enumerate(found.values(), start=1):
        assert len(text) == value_bytes
        assert json.loads(text)["id"] == number


def test_they_look_like_somebodys_data() -> None:
    documents = [json.loads(text) for text in generate(1000, value_bytes=300).values()]
    assert {tuple(document) for document in documents} == {
        ("id", "type", "name", "age", "city", "active", "balance", "email", "since", "tags", "note")
    }
    assert len({document["name"] for document in documents}) > 100
    assert len({document["note"] for document in documents}) > 900


def test_the_seed_decides() -> None:
    assert generate(100, seed=7) == generate(100, seed=7)
    assert generate(100, seed=7) != generate(100, seed=8)
    assert generate(3, seed=-(2**70)) == generate(3, seed=-(2**70))


def test_the_batch_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    all_at_once = generate(100)
    monkeypatch.setattr(key_template, "BATCH_DOCUMENTS_MAX", 7)
    assert generate(100) == all_at_once


def test_keys_are_made_of_the_number() -> None:
    assert list(generate(2, "user::{id}-{#}")) == ["user::1-1", "user::2-2"]
    with pytest.raises(InvalidKeyTemplate, match="have no field 'email'"):
        generate(1, "{email}")
    with pytest.raises(InvalidDocument, match="longer than 250 bytes"):
        generate(1, "x" * 250 + "{#}")

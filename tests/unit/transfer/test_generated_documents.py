"""Generated documents: JSON of the size asked for, the same for the same seed, whatever the batches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.errors import InvalidDocument, InvalidKeyTemplate
from headwater.transfer import generated_documents
from headwater.transfer.generated_documents import VALUE_BYTES_MIN, GeneratedDocuments
from headwater.transfer.key_template import KeyTemplate


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
    monkeypatch.setattr(generated_documents, "BATCH_DOCUMENTS_MAX", 7)
    assert generate(100) == all_at_once


def test_keys_are_made_of_the_number() -> None:
    assert list(generate(2, "user::{id}-{#}")) == ["user::1-1", "user::2-2"]
    with pytest.raises(InvalidKeyTemplate, match="can't be named by their field 'email'"):
        generate(1, "{email}")
    with pytest.raises(InvalidDocument, match="longer than 250 bytes"):
        generate(1, "x" * 250 + "{#}")

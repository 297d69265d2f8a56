"""`tail --key`."""

from __future__ import annotations

import pytest
from change_batches import batch_of, document, event, rollback

from headwater.cli.tailing.places import KeyPattern

KEYS = [b"user::1", "user::é".encode(), b"userX", b"a.b", b"", b"line\nbreak", b"\xff\xfe", b"user::(x)", b"a b"]


def matched(*patterns: str) -> list[bytes]:
    batch = batch_of(*(document(key=key) for key in KEYS))
    return [KEYS[row] for row in KeyPattern(patterns).rows(batch).tolist()]


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("user::1", [b"user::1"]),
        ("user::", []),
        ("user::*", [KEYS[0], KEYS[1], KEYS[7]]),
        ("user::?", [KEYS[0], KEYS[1]]),
        ("*é", [KEYS[1]]),
        ("é", []),
        ("a.b", [b"a.b"]),
        ("a?b", [b"a.b", b"a b"]),
        ("a b", [b"a b"]),
        ("user::(x)", [KEYS[7]]),
        ("line?break", [KEYS[5]]),
        ("line*", [KEYS[5]]),
        ("??", [KEYS[6]]),
        ("\udcff\udcfe", [KEYS[6]]),
        ("", [b""]),
        ("*", KEYS),
        ("[a-z]*", []),
        (r"\d*", []),
    ],
)
def test_patterns(pattern: str, keys: list[bytes]) -> None:
    assert matched(pattern) == keys


def test_several_patterns() -> None:
    assert matched("userX", "a*", "b|c") == [b"userX", b"a.b", b"a b"]


def test_rollbacks_are_never_hidden_and_events_are() -> None:
    batch = batch_of(event("collection_created"), rollback(), document(key=b"x"), document(key=b"y"))
    assert KeyPattern(("y",)).rows(batch).tolist() == [1, 3]

"""What is not to be printed is escaped, once, and nothing else is."""

from __future__ import annotations

import pytest

from headwater.phrases import escaped, escaped_bytes


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"fox", "fox"),
        ("füchse 🦊".encode(), "füchse 🦊"),
        (b"\xff\xfe\x00bin", r"\xff\xfe\x00bin"),
        (b"a\nb\x1b[2J\x7f", r"a\nb\x1b[2J\x7f"),
        (b"\xc3\xa4\xc3", r"ä\xc3"),
        ("\u2028\u202e".encode(), r"\u2028\u202e"),
        (rb"C:\new", r"C:\new"),
        (b"", ""),
    ],
)
def test_bytes(data: bytes, shown: str) -> None:
    assert escaped_bytes(data) == shown
    assert shown.isprintable()


def test_text_that_no_bytes_make() -> None:
    assert escaped("a\ud800b") == r"a\ud800b"

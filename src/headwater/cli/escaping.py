"""Text from a server in one line, with escapes for what is not to be printed: `\\xff`, `\\n`."""

from __future__ import annotations

_NOT_UTF_8 = "surrogateescape"
_SURROGATES = range(0xDC80, 0xDD00)


def escaped(text: str) -> str:
    """A byte that is not UTF-8 is a lone surrogate, as in the keys of changes, and is shown as the byte."""
    return text if text.isprintable() else "".join(map(_shown, text))


def escaped_bytes(data: bytes) -> str:
    return escaped(data.decode(errors=_NOT_UTF_8))


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if ord(char) in _SURROGATES:
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def printable(text: str) -> str:
    """Text from the input without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)

"""A password for those who gave none: easy to read out and to copy, hopeless to guess."""

from __future__ import annotations

from headwater.errors import LocalProtocolError

PASSWORD_RANDOM_BYTES = 15
"""120 bits: 24 characters of five bits each."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no i, l and o, which look like digits, and no u, so that no words come out."""

_GROUP_CHARS = 6


def readable_password(random: bytes) -> str:
    """A password such as `8h2k4q-0c9xwd-…`, four groups of six, out of random bytes."""
    if len(random) != PASSWORD_RANDOM_BYTES:
        raise LocalProtocolError(f"a generated password needs {PASSWORD_RANDOM_BYTES} random bytes")
    number = int.from_bytes(random)
    characters = [_ALPHABET[number >> shift & 31] for shift in reversed(range(0, PASSWORD_RANDOM_BYTES * 8, 5))]
    groups = ("".join(characters[at : at + _GROUP_CHARS]) for at in range(0, len(characters), _GROUP_CHARS))
    return "-".join(groups)

"""Generated passwords: readable, of full strength, and fit to be a password."""

from __future__ import annotations

import re

import pytest

from headwater.errors import LocalProtocolError
from headwater.node.auth.user_file import PASSWORD_RANDOM_BYTES, readable_password
from headwater.node.auth.users import SALTS_BYTES, hash_password


def test_four_groups_that_can_be_read_out() -> None:
    password = readable_password(bytes(range(100, 100 + PASSWORD_RANDOM_BYTES)))
    assert re.fullmatch(r"(?:[0-9a-hjkmnp-tv-z]{6}-){3}[0-9a-hjkmnp-tv-z]{6}", password)
    assert hash_password(password, salts=bytes(SALTS_BYTES), iterations=4096)


def test_every_bit_counts() -> None:
    bits = PASSWORD_RANDOM_BYTES * 8
    passwords = {readable_password((1 << bit).to_bytes(PASSWORD_RANDOM_BYTES)) for bit in range(bits)}
    assert len(passwords) == bits
    assert readable_password(bytes(PASSWORD_RANDOM_BYTES)) == "000000-000000-000000-000000"
    assert readable_password(b"\xff" * PASSWORD_RANDOM_BYTES) == "zzzzzz-zzzzzz-zzzzzz-zzzzzz"


@pytest.mark.parametrize("length", [0, PASSWORD_RANDOM_BYTES - 1, PASSWORD_RANDOM_BYTES + 1])
def test_the_randomness_must_be_enough(length: int) -> None:
    with pytest.raises(LocalProtocolError, match="random bytes"):
        readable_password(bytes(length))

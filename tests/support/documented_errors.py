"""Junk may be taken or refused; this says how it may be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import RemoteProtocolError


@contextmanager
def only(documented: type[RemoteProtocolError], *, within_bytes: int) -> Iterator[None]:
    """Takes the documented error, which must point into the bytes and say what to do. Any other goes through."""
    try:
        yield
    except documented as error:
        _check(error, within_bytes)


def _check(error: RemoteProtocolError, within_bytes: int) -> None:
    assert error.hint
    assert 0 <= error.offset <= within_bytes

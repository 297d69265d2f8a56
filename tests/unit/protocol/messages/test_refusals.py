"""Refusals in words: the request, the key, the status and what the server says itself."""

from __future__ import annotations

import pytest

from headwater.errors import InvalidArguments, KeyNotFound, NotMyVBucket, StatusError
from headwater.protocol.features import Opcode
from headwater.protocol.messages import ErrorResponse, refused, refused_request
from headwater.protocol.messages.documents import Get
from headwater.protocol.messages.session import Noop
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.protocol.status import Status


def answer(status: Status, value: bytes = b"") -> ErrorResponse:
    return ErrorResponse(opcode=Opcode.GET, status=status, value=value)


def test_the_status_and_the_key_are_named() -> None:
    error = refused_request(Get(key=b"hotel::1"), answer(Status.KEY_ENOENT))
    assert type(error) is KeyNotFound
    assert error.status == Status.KEY_ENOENT
    assert error.reason == "the server refused Get of 'hotel::1': KEY_ENOENT"
    assert error.hint == KeyNotFound.default_hint


def test_the_words_of_the_server_are_kept() -> None:
    error = refused_request(Get(key=b"k"), answer(Status.EINVAL, b'{"error": {"context": "no such thing"}}'))
    assert error.reason == "the server refused Get of 'k': EINVAL (no such thing)"


def test_a_cluster_map_is_no_words() -> None:
    error = refused_request(Get(key=b"k"), answer(Status.NOT_MY_VBUCKET, b'{"rev": 1}'))
    assert type(error) is NotMyVBucket
    assert error.reason == "the server refused Get of 'k': NOT_MY_VBUCKET"


def test_a_request_without_a_key() -> None:
    assert refused_request(Noop(), answer(Status.EBUSY)).reason == "the server refused Noop: EBUSY"


@pytest.mark.parametrize("status", [0x7777, 0x25])
def test_a_status_that_nobody_knows_keeps_its_number(status: int) -> None:
    error = refused("something", status=status)
    assert type(error) is StatusError
    assert error.status == status


def test_a_key_that_is_too_long() -> None:
    longest, too_long = b"k" * KEY_BYTES_MAX, b"k" * (KEY_BYTES_MAX + 1)
    error = refused_request(Get(key=too_long), answer(Status.EINVAL))
    assert type(error) is InvalidArguments
    assert error.hint == "A key has at most 250 bytes, and this one has 251"
    assert refused_request(Get(key=longest), answer(Status.EINVAL)).hint == InvalidArguments.default_hint
    assert refused_request(Get(key=too_long), answer(Status.EBUSY)).hint == "Wait and try again"


def test_a_very_long_key_is_shown_by_its_beginning() -> None:
    assert refused_request(Get(key=b"k" * 60_000), answer(Status.EINVAL)).reason == (
        f"the server refused Get of '{'k' * 250}'…: EINVAL"
    )


def test_a_key_that_is_no_text() -> None:
    assert "of 'a\\\\xff': " in refused_request(Get(key=b"a\xff"), answer(Status.KEY_ENOENT)).reason

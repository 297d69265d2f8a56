"""The JSON value of a stream request: every rule of the specification's "Validation" (seed 001), and its examples."""

from __future__ import annotations

import json

import pytest

from headwater.errors import LocalProtocolError, MalformedJson
from headwater.protocol.numbers import STREAM_REQUEST_VALUE_BYTES_MAX
from headwater.protocol.stream_requests import CacheTransferOptions, StreamRequestValue
from support.cases import case, case_apart, each

EXAMPLES = {
    '{"uid" : "b4"}': StreamRequestValue(uid=0xB4),
    '{"sid" : 71}': StreamRequestValue(sid=71),
    '{"collections" : ["0", "8a"]}': StreamRequestValue(collections=(0, 0x8A)),
    '{"scope" : "9"}': StreamRequestValue(scope=9),
    '{"uid" : "c2", "collections" : ["a", "1e"]}': StreamRequestValue(uid=0xC2, collections=(0xA, 0x1E)),
}


@pytest.mark.parametrize(("text", "value"), EXAMPLES.items())
def test_the_examples_of_the_specification(text: str, value: StreamRequestValue) -> None:
    assert StreamRequestValue.decode(text.encode()) == value
    assert json.loads(value.encode()) == json.loads(text)


TAKEN = {
    "": StreamRequestValue(),
    "{}": StreamRequestValue(),
    ' \n{ "sid" : 1 } ': StreamRequestValue(sid=1),
    # "does not error for unknown keys"
    '{"colour":"blue","nested":{"sid":[]}}': StreamRequestValue(),
    '{"uid":"ffffffffffffffff"}': StreamRequestValue(uid=2**64 - 1),
    '{"uid":"0"}': StreamRequestValue(uid=0),
    '{"uid":"AbC"}': StreamRequestValue(uid=0xABC),
    '{"uid":"00b4"}': StreamRequestValue(uid=0xB4),
    '{"sid":65535}': StreamRequestValue(sid=65535),
    # Admission judges what is out of range.
    '{"sid":0}': StreamRequestValue(sid=0),
    '{"sid":-1}': StreamRequestValue(sid=-1),
    '{"sid":65536}': StreamRequestValue(sid=65536),
    # And no collections: versions differ.
    '{"collections":[]}': StreamRequestValue(collections=()),
    '{"collections":["ffffffff"]}': StreamRequestValue(collections=(2**32 - 1,)),
    '{"collections":["8","8"]}': StreamRequestValue(collections=(8, 8)),
    '{"scope":"ffffffff"}': StreamRequestValue(scope=2**32 - 1),
    '{"purge_seqno":"18446744073709551615"}': StreamRequestValue(purge_seqno=2**64 - 1),
    '{"purge_seqno":"0"}': StreamRequestValue(purge_seqno=0),
    '{"cts":{}}': StreamRequestValue(cache_transfer=CacheTransferOptions()),
    '{"cts":{"free_memory":18446744073709551615}}': StreamRequestValue(
        cache_transfer=CacheTransferOptions(free_memory_bytes=2**64 - 1)
    ),
    '{"cts":{"free_memory":7,"all_keys":true,"new":1}}': StreamRequestValue(
        cache_transfer=CacheTransferOptions(free_memory_bytes=7, all_keys=True)
    ),
}


@each(("text", "value"), TAKEN.items())
def test_what_is_taken(text: str, value: StreamRequestValue) -> None:
    assert StreamRequestValue.decode(text.encode()) == value


REFUSED = {
    # The value as a whole.
    "not JSON": "not JSON",
    "{": "not JSON",
    '{"sid":1}x': "not JSON",
    "[]": "not a JSON object",
    "1": "not a JSON object",
    "null": "not a JSON object",
    '"sid"': "not a JSON object",
    # "will fail with `Invalid` if `collections` and `scope` are defined"
    '{"collections":["8"],"scope":"8"}': "exclude each other",
    # "will fail if `uid` is not a JSON string"; base 16 with no leading 0x
    '{"uid":180}': "uid must be",
    '{"uid":null}': "uid must be",
    '{"uid":["b4"]}': "uid must be",
    '{"uid":""}': "uid must be",
    '{"uid":"0xb4"}': "uid must be",
    '{"uid":"-1"}': "uid must be",
    '{"uid":"+1"}': "uid must be",
    '{"uid":" b4"}': "uid must be",
    '{"uid":"b_4"}': "uid must be",
    '{"uid":"g"}': "uid must be",
    '{"uid":"\\u0664"}': "uid must be",
    '{"uid":"10000000000000000"}': "uid must be",
    # "will fail if `sid` is not a JSON integer"
    '{"sid":"71"}': "sid must be",
    '{"sid":71.0}': "sid must be",
    '{"sid":7.1e1}': "sid must be",
    '{"sid":true}': "sid must be",
    '{"sid":null}': "sid must be",
    # "will fail if `collections` is not a JSON array"
    '{"collections":"8"}': "array",
    '{"collections":{"8":"8"}}': "array",
    '{"collections":null}': "array",
    '{"collections":[8]}': "a collection id must be",
    '{"collections":["8",null]}': "a collection id must be",
    '{"collections":["0x8"]}': "a collection id must be",
    '{"collections":["100000000"]}': "too large",
    # "will fail if `scope` is not a JSON string"
    '{"scope":8}': "scope must be",
    '{"scope":["8"]}': "scope must be",
    '{"scope":null}': "scope must be",
    '{"scope":"100000000"}': "too large",
    # Base 10, as a string.
    '{"purge_seqno":1}': "purge_seqno must be",
    '{"purge_seqno":"0x1"}': "purge_seqno must be",
    '{"purge_seqno":"1a"}': "purge_seqno must be",
    '{"purge_seqno":""}': "purge_seqno must be",
    '{"purge_seqno":"\\u0661"}': "purge_seqno must be",
    '{"purge_seqno":"18446744073709551616"}': "exceeds 64 bits",
    '{"purge_seqno":"000000000000000000001"}': "purge_seqno must be",
    '{"cts":[]}': "cts must be",
    '{"cts":{"free_memory":-1}}': "free_memory",
    '{"cts":{"free_memory":"1"}}': "free_memory",
    '{"cts":{"free_memory":true}}': "free_memory",
    '{"cts":{"free_memory":18446744073709551616}}': "free_memory",
    '{"cts":{"all_keys":1}}': "all_keys",
}


@each(("text", "reason"), REFUSED.items())
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(MalformedJson, match=reason):
        StreamRequestValue.decode(text.encode())


@case_apart(b"\xff", id="not UTF-8")
@case_apart(b"[" * 60_000, id="too deep")
@case_apart(b'{"sid":' + b"1" * 5000 + b"}", id="a number too long for Python")
def test_junk_is_refused_as_malformed_json(value: bytes) -> None:
    with pytest.raises(MalformedJson, match="not JSON"):
        StreamRequestValue.decode(value)


def test_a_value_has_a_limit() -> None:
    largest = b'{"x":"' + b"x" * (STREAM_REQUEST_VALUE_BYTES_MAX - 8) + b'"}'
    assert StreamRequestValue.decode(largest) == StreamRequestValue()
    with pytest.raises(MalformedJson, match="exceeds"):
        StreamRequestValue.decode(largest + b" ")


# --- encoding -----------------------------------------------------------------------------------------------------


def test_a_value_that_says_nothing_is_empty() -> None:
    assert StreamRequestValue().encode() == b""


def test_all_members_have_their_form() -> None:
    value = StreamRequestValue(
        uid=0xB4,
        sid=71,
        collections=(0, 0x8A),
        purge_seqno=12,
        cache_transfer=CacheTransferOptions(free_memory_bytes=5, all_keys=True),
    )
    assert value.encode() == (
        b'{"uid":"b4","sid":71,"collections":["0","8a"],"purge_seqno":"12","cts":{"free_memory":5,"all_keys":true}}'
    )


def test_two_filters_are_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="not by both"):
        StreamRequestValue(collections=(8,), scope=8).encode()


@case(StreamRequestValue(uid=1, sid=1, purge_seqno=1), False)
@case(StreamRequestValue(collections=(0,)), True)
@case(StreamRequestValue(scope=0), True)
def test_a_filter_is_by_collections_or_by_scope(value: StreamRequestValue, is_filtered: bool) -> None:
    assert value.is_filtered == is_filtered

"""Offsets: what they hold, the one text that they are written as, and what is refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from headwater.client.offsets import BUCKET_UUID_CHARS_MAX, TEXT_CHARS_MAX, VBUCKETS_MAX, Offsets
from headwater.errors import CheckpointOfOtherBucket, InvalidInput, InvalidOffsets, OffsetsTooNew
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.cases import case

UUID = "5ab1d6bd2ee8f9b4d9d6cf4a3f3f6f5e"
U64_MAX = 2**64 - 1


def offset(vbuuid: int, seqno: int, start: int, end: int) -> StreamOffset:
    return StreamOffset(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(start), snapshot_end=Seqno(end))


def offsets(**by_vbucket: StreamOffset) -> Offsets:
    return Offsets(UUID, {VBucketId(int(name[2:])): value for name, value in by_vbucket.items()})


COMPLETE = offset(187031423418927, 120, 100, 120)
INSIDE = offset(U64_MAX, 7, 0, 9)
BOTH = offsets(vb1=INSIDE, vb0=COMPLETE)
TEXT = (
    f'{{"version":1,"bucket_uuid":"{UUID}","offsets":[[0,"187031423418927",120,100],[1,"18446744073709551615",7,0,9]]}}'
)


# --- what they hold -----------------------------------------------------------------------------------------------


def test_a_vbucket_has_its_offset() -> None:
    assert BOTH[VBucketId(1)] == INSIDE
    assert BOTH.get(VBucketId(0)) == COMPLETE
    assert BOTH.get(VBucketId(2)) is None
    assert VBucketId(1) in BOTH
    assert VBucketId(2) not in BOTH
    assert BOTH.vbuckets == tuple(BOTH) == (0, 1)
    with pytest.raises(KeyError):
        BOTH[VBucketId(2)]


def test_moving_on_makes_new_ones() -> None:
    moved = BOTH.updated({VBucketId(1): COMPLETE})
    assert (moved[VBucketId(1)], BOTH[VBucketId(1)]) == (COMPLETE, INSIDE)
    more = BOTH.updated({VBucketId(0): INSIDE, VBucketId(7): COMPLETE})
    assert dict(more.offsets) == {0: INSIDE, 1: INSIDE, 7: COMPLETE}
    assert (more.bucket_uuid, BOTH.vbuckets) == (UUID, (0, 1))


def test_nobody_can_change_them() -> None:
    mine = {VBucketId(0): COMPLETE}
    made = Offsets(UUID, mine)
    mine[VBucketId(0)] = INSIDE
    assert made[VBucketId(0)] == COMPLETE
    with pytest.raises(TypeError):
        made.offsets[VBucketId(0)] = INSIDE
    with pytest.raises(AttributeError):
        made.bucket_uuid = "other"


@pytest.mark.parametrize("empty", [Offsets(UUID), Offsets("", {})])
def test_none_at_all_are_not_nothing(empty: Offsets) -> None:
    """`load() or "beginning"` must not take an empty checkpoint for none."""
    assert empty
    assert empty.vbuckets == ()
    assert Offsets.from_json(empty.to_json()) == empty


def test_they_travel_between_processes() -> None:
    again = pickle.loads(pickle.dumps(BOTH))
    assert again == BOTH
    assert hash(again) == hash(BOTH)
    assert Offsets("other", BOTH.offsets) != BOTH != offsets(vb0=COMPLETE)


@case(-1, COMPLETE)
@case(VBUCKETS_MAX, COMPLETE)
@case(0, offset(-1, 1, 1, 1))
@case(0, offset(U64_MAX + 1, 1, 1, 1))
@case(0, offset(1, 1, -1, 1))
@case(0, offset(1, 1, 1, U64_MAX + 1))
def test_numbers_that_no_bucket_has_are_refused(vbucket: int, value: StreamOffset) -> None:
    with pytest.raises(InvalidOffsets):
        Offsets(UUID, {VBucketId(vbucket): value})
    with pytest.raises(InvalidOffsets):
        BOTH.updated({VBucketId(vbucket): value})


def test_a_bucket_uuid_has_a_limit() -> None:
    assert Offsets("u" * BUCKET_UUID_CHARS_MAX)
    with pytest.raises(InvalidOffsets):
        Offsets("u" * (BUCKET_UUID_CHARS_MAX + 1))


def test_offsets_of_another_bucket() -> None:
    BOTH.check_bucket(UUID)
    with pytest.raises(CheckpointOfOtherBucket) as raised:
        BOTH.check_bucket("another")
    assert UUID in raised.value.reason
    assert "another" in raised.value.reason
    assert raised.value.hint


# --- the text -----------------------------------------------------------------------------------------------------


def test_the_text_is_this_one_and_no_other() -> None:
    assert BOTH.to_json() == TEXT
    assert Offsets.from_json(TEXT) == BOTH


def test_white_space_and_order_do_not_matter_to_the_reader() -> None:
    root = json.loads(TEXT)
    root["offsets"].reverse()
    assert Offsets.from_json(json.dumps(dict(reversed(root.items())), indent=2) + "\n") == BOTH


def test_the_text_of_a_whole_bucket_is_small() -> None:
    whole = {VBucketId(vb): offset(2**62 + vb, 100_000 + vb, 99_000 + vb, 100_000 + vb) for vb in range(1024)}
    text = Offsets(UUID, whole).to_json()
    assert len(text) < 46_000
    assert text.isascii()
    assert Offsets.from_json(text).offsets == whole


def test_all_vbuckets_that_can_be_fit_the_limits() -> None:
    largest = offset(U64_MAX, U64_MAX - 1, U64_MAX - 1, U64_MAX)
    text = Offsets(
        "\u00e9" * BUCKET_UUID_CHARS_MAX, dict.fromkeys(map(VBucketId, range(VBUCKETS_MAX)), largest)
    ).to_json()
    assert len(text) < TEXT_CHARS_MAX
    assert len(Offsets.from_json(text).offsets) == VBUCKETS_MAX


# --- what is refused ----------------------------------------------------------------------------------------------


def text_with(**members: Any) -> str:
    return json.dumps(json.loads(TEXT) | members)


def rows(*rows: Any) -> str:
    return text_with(offsets=list(rows))


@case("", "not JSON")
@case("{", "not JSON")
@case(TEXT[:-1], "not JSON")
@case(TEXT + TEXT, "not JSON")
@case("[" * 100_000, "not JSON")
@case("9" * 5000, "not JSON")
@case("[]", "no version")
@case("null", "no version")
@case("{}", "no version")
@case(text_with(version="1"), "no version")
@case(text_with(version=True), "no version")
@case(text_with(version=0), "no version")
@case('{"version":1}', "members")
@case(text_with(more=1), "members")
@case(text_with(bucket_uuid=5), "not a string")
@case(text_with(bucket_uuid="u" * 129), "128")
@case(text_with(bucket_uuid="\ud800"), "printable")
@case(text_with(offsets={}), "not a list")
@case(rows(5), "row")
@case(rows([]), "row")
@case(rows([0, "1", 1]), "row")
@case(rows([0, "1", 1, 1, 1, 1, 1]), "row")
@case(rows(["0", "1", 1, 1]), "row")
@case(rows([False, "1", 1, 1]), "row")
@case(rows([0, None, 1, 1]), "number")
@case(rows([0, "1", True, 1]), "number")
@case(rows([0, "1", 1.0, 1]), "number")
@case(rows([0, "", 1, 1]), "number")
@case(rows([0, "-1", 1, 1]), "number")
@case(rows([0, "01", 1, 1]), "number")
@case(rows([0, "0x1", 1, 1]), "number")
@case(rows([0, "١", 1, 1]), "number")
@case(rows([0, "1\n", 1, 1]), "number")
@case(rows([0, "184467440737095516160", 1, 1]), "number")
@case(rows([0, "18446744073709551616", 1, 1]), "64 bits")
@case(rows([0, -1, 1, 1]), "64 bits")
@case(rows([0, "1", 2**64, 1]), "64 bits")
@case(rows([0, "1", 1, -1]), "64 bits")
@case(rows([0, "1", 1, 2]), "outside its snapshot")
@case(rows([0, "1", 3, 1, 2]), "outside its snapshot")
@case(rows([0, "1", 1, 1, 1, 2**64]), "64 bits")
@case(rows([-1, "1", 1, 1]), "no vbucket -1")
@case(rows([65536, "1", 1, 1]), "no vbucket 65536")
@case(rows([7, "1", 1, 1], [7, "1", 2, 2]), "twice")
@case(rows(*[[0, "1", 1, 1]] * 65537), "65537 vbuckets")
@case(" " * TEXT_CHARS_MAX + TEXT, "more than")
@case(text_with(offsets=float("nan")), "not a list")
def test_anything_else_is_refused_with_what_to_do(text: str, reason: str) -> None:
    with pytest.raises(InvalidOffsets) as raised:
        Offsets.from_json(text)
    assert isinstance(raised.value, InvalidInput)
    assert reason in raised.value.reason
    assert raised.value.hint
    assert len(str(raised.value)) < 1000


def test_a_newer_version_is_told_apart() -> None:
    with pytest.raises(OffsetsTooNew) as raised:
        Offsets.from_json('{"version":2,"something":"else"}')
    assert "version 2" in raised.value.reason
    assert "newer" in raised.value.hint

"""The text of offsets: any offsets come back from it, by one text each, and any other text is refused as documented."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.client.offsets import Offsets
from headwater.errors import InvalidOffsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

U64 = st.integers(0, 2**64 - 1) | st.integers(2**53 - 2, 2**53 + 2)


@st.composite
def stream_offsets(draw: st.DrawFn) -> StreamOffset:
    start, seqno, end = sorted(draw(st.tuples(U64, U64, U64)))
    seqno = draw(st.sampled_from([start, seqno, end]))
    return StreamOffset(
        vbuuid=Vbuuid(draw(U64)),
        seqno=Seqno(seqno),
        snapshot_start=Seqno(start),
        snapshot_end=Seqno(end),
        purge_seqno=Seqno(draw(st.just(0) | U64)),
    )


VBUCKETS = st.builds(VBucketId, st.integers(0, 0xFFFF))
OFFSETS = st.builds(
    Offsets,
    st.text(st.characters().filter(str.isprintable), max_size=128),
    st.dictionaries(VBUCKETS, stream_offsets(), max_size=20),
)


@given(OFFSETS)
def test_any_offsets_come_back_from_their_text(offsets: Offsets) -> None:
    text = offsets.to_json()
    assert text.isascii()
    assert Offsets.from_json(text) == offsets


@given(OFFSETS, st.randoms())
def test_how_they_came_about_does_not_show(offsets: Offsets, random: Any) -> None:
    rows = list(offsets.offsets.items())
    random.shuffle(rows)
    made = Offsets(offsets.bucket_uuid, dict(rows[::2]))
    for vbucket, offset in rows[1::2]:
        made = made.updated({vbucket: offset})
    assert made == offsets
    assert made.to_json() == offsets.to_json()


@given(OFFSETS)
def test_a_reader_of_doubles_gets_the_same_numbers(offsets: Offsets) -> None:
    as_doubles = json.loads(offsets.to_json(), parse_int=lambda digits: int(float(digits)))
    assert as_doubles == json.loads(offsets.to_json())


# --- what is not such a text --------------------------------------------------------------------------------------


def read(text: str) -> Offsets | None:
    """What is read is good for another round; what is refused is refused as documented."""
    try:
        offsets = Offsets.from_json(text)
    except InvalidOffsets:
        return None
    assert Offsets.from_json(offsets.to_json()) == offsets
    return offsets


@given(st.text(st.characters()))
def test_any_text(text: str) -> None:
    read(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | U64.map(str),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_any_json(value: Any) -> None:
    read(json.dumps(value))


@given(JSON, st.sampled_from(["version", "bucket_uuid", "offsets", "row", "cell"]), OFFSETS)
def test_any_json_in_any_place(value: Any, place: str, offsets: Offsets) -> None:
    root = json.loads(offsets.updated({VBucketId(5): StreamOffset()}).to_json())
    if place == "row":
        root["offsets"][0] = value
    elif place == "cell":
        root["offsets"][0][len(offsets.offsets) % 4] = value
    else:
        root[place] = value
    read(json.dumps(root))


@given(OFFSETS, st.data())
def test_a_text_that_was_cut_is_refused(offsets: Offsets, data: st.DataObject) -> None:
    text = offsets.to_json()
    assert read(text[: data.draw(st.integers(0, len(text) - 1))]) is None


@given(OFFSETS, st.data())
def test_a_text_with_a_character_changed(offsets: Offsets, data: st.DataObject) -> None:
    text = offsets.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    read(text[:at] + data.draw(st.characters()) + text[at + 1 :])

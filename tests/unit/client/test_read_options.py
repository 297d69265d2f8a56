"""What can be asked of a read."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.client.offsets import Offsets
from headwater.client.read_options import NAME_BYTES_MAX, End, ReadOptions, Snapshots, Start
from headwater.errors import InvalidInput
from support.cases import each


def test_choices_are_written_as_strings() -> None:
    options = ReadOptions.make(start="now", end="now", snapshots="as-they-come", collections="a.b", vbuckets=[1, 2])
    assert options.start is Start.NOW
    assert options.end is End.NOW
    assert options.snapshots is Snapshots.AS_THEY_COME
    assert options.collections == ("a.b",)
    assert options.vbuckets == {1, 2}


def test_offsets_and_ends_are_taken_as_they_are() -> None:
    offsets = Offsets("uuid", {})
    options = ReadOptions.make(start=offsets, end={3: 7}, scopes=("a", "b"), collections=[8])
    assert (options.start, options.end, options.scopes, options.collections) == (offsets, {3: 7}, ("a", "b"), (8,))


@each(
    "wrong",
    [
        {"start": "yesterday"},
        {"end": "never"},
        {"snapshots": "some"},
        {"buffer_bytes": 0},
        {"noop_interval_s": 0},
        {"connections_per_node": 65},
        {"give_up_after_s": -1},
        {"reconnect_delay_s_min": 20.0, "reconnect_delay_s_max": 10.0},
        {"name": ""},
        {"name": "é" * NAME_BYTES_MAX},
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        ReadOptions.make(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("buffer_byts", "buffer_bytes"), ("bufferBytes", "buffer_bytes"), ("chekpoint", "checkpoint")],
)
def test_a_misspelt_keyword_is_an_error_that_names_the_right_one(misspelt: str, meant: str) -> None:
    keywords: Any = {misspelt: 1}
    with pytest.raises(TypeError, match=rf"^changes\(\) got an .* '{misspelt}'\. Did you mean {meant}\?$"):
        ReadOptions.make("changes", **keywords)


def test_a_keyword_like_no_other_lists_them_all() -> None:
    keywords: Any = {"zzz": 1}
    with pytest.raises(TypeError, match=r"It takes batch_bytes, .* xattrs"):
        ReadOptions.make(**keywords)

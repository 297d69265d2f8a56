"""Rows by their key. A property test holds them against a dictionary."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.lake.change_rows import KeyIndex, key_spaces


def test_a_slice_of_an_array_is_read_where_it_lies() -> None:
    keys = pa.array([b"x", b"a", b"b", b"a"]).slice(1)
    assert KeyIndex(keys, np.array([1, 2, 3])).newest.tolist() == [False, True, True]


def test_many_keys() -> None:
    keys = pa.array([b"key-%d" % (number % 5000) for number in range(20_000)])
    index = KeyIndex(keys, np.arange(20_000))
    assert np.flatnonzero(index.newest).tolist() == list(range(15_000, 20_000))


def test_a_place_tells_vbuckets_and_collections_apart() -> None:
    places = key_spaces(np.array([0, 1, 0, 1023]), np.array([8, 8, 9, 2**32 - 1]))
    assert len(set(places.tolist())) == 4

"""The vbuckets of many keys at once."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.client.cluster_map import vbucket_of
from headwater.transfer.set_frames import vbuckets_of


def test_the_kernel_hashes_as_the_function_does() -> None:
    keys = [b"", b"a", b"123456789", "schlüssel".encode(), b"\x00\xff" * 125, *(b"doc::%d" % i for i in range(1000))]
    ends = np.cumsum([len(key) for key in keys])
    text = np.frombuffer(b"".join(keys), dtype=np.uint8)
    for vbuckets in (1, 3, 64, 1024, 0x10000):
        assert vbuckets_of(text, ends, vbuckets).tolist() == [vbucket_of(key, vbuckets) for key in keys]


@pytest.mark.parametrize("vbuckets", [0, 0x10001])
def test_an_impossible_number_of_vbuckets(vbuckets: int) -> None:
    with pytest.raises(ValueError, match="vbuckets"):
        vbuckets_of(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64), vbuckets)

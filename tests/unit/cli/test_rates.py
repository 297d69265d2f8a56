"""A rate is told where a run is long enough to have one."""

from __future__ import annotations

import pytest

from headwater.cli.output import documents_in


@pytest.mark.parametrize(
    ("documents", "seconds", "told"),
    [
        (3, 6.82, "3 documents in 6.82 s"),
        (1, 0.0, "1 document in 0.00 s"),
        (999, 2.0, "999 documents in 2.00 s"),
        (50_000, 0.99, "50,000 documents in 0.99 s"),
        (1000, 2.0, "1,000 documents in 2.00 s: 500 documents/s, 1.5 MB/s"),
    ],
)
def test_what_is_told(documents: int, seconds: float, told: str) -> None:
    assert documents_in(documents, seconds, and_rate=", 1.5 MB/s") == told

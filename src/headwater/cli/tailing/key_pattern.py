"""Which keys are wanted, as `--key` tells it: `*` stands for any characters and `?` for one."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_ONE_CHARACTER = r"(?:[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*|[\x80-\xbf])"
"""Of UTF-8, for an expression that is matched byte by byte; of other bytes, one."""


class KeyPattern:
    """Keys that fit one of the patterns. Rollbacks always do: what they void may have been shown before."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        alternatives = "|".join(_expression(pattern) for pattern in patterns)
        # Binary columns are matched byte by byte. An argument that is not UTF-8 stands for the bytes that it has.
        self._expression = rf"(?s)\A(?:{alternatives})\z".encode(errors="surrogateescape")

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The numbers of the rows that fit, rising."""
        fits = pc.match_substring_regex(batch.column("key"), pattern=self._expression)
        is_rollback = pc.equal(batch.column("op").cast(pa.string()), "rollback")
        wanted = pc.or_(pc.fill_null(fits, False), is_rollback)
        found: NDArray[np.int64] = np.flatnonzero(wanted.to_numpy(zero_copy_only=False))
        return found


def _expression(pattern: str) -> str:
    signs = {"*": r".*", "?": _ONE_CHARACTER}
    return "".join(signs.get(sign) or re.escape(sign) for sign in pattern)

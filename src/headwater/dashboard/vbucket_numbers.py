"""The numbers of all vbuckets of a node, as the nodes of a cluster tell them to each other.

They travel as statistics, each a list with one number a vbucket: a few long answers instead of thousands of short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from headwater.dashboard.source import Counts
from headwater.errors import MalformedMessage

_LISTS = ("states", "documents", "seqnos", "stream_lags")
_HELD = "replicas_held"


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketNumbers:
    """One number a vbucket in each array."""

    states: Counts
    documents: Counts
    seqnos: Counts
    """Durable ones."""
    stream_lags: Counts
    """Of the stream that is furthest behind."""
    is_held: bool
    """Whether the node lets its copies fall behind, for a drill."""

    def encode(self) -> Iterator[tuple[str, str]]:
        for name in _LISTS:
            yield name, ",".join(map(str, getattr(self, name).tolist()))
        yield _HELD, "true" if self.is_held else "false"

    @classmethod
    def decode(cls, statistics: Mapping[str, str], *, vbuckets: int) -> Self:
        try:
            lists = {name: np.array(statistics[name].split(","), dtype=np.int64) for name in _LISTS}
        except (KeyError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"the numbers of its vbuckets can't be read: {error!r}") from error
        if any(len(one) != vbuckets for one in lists.values()):
            raise MalformedMessage(f"it does not tell of {vbuckets} vbuckets")
        return cls(**lists, is_held=statistics.get(_HELD) == "true")

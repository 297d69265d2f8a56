"""How far a query is behind its bucket: what Spark knows of the offsets, as a number.

A Python source has no way to report metrics of its own, but Spark tells listeners where a batch ended and where the
source was at that time. The difference, in seqnos, is the lag.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from headwater.client.offsets import Offsets
from headwater.errors import InvalidOffsets

OnLag = Callable[[str, int], None]
"""Gets the name or id of a query, and its lag in seqnos."""


def lag_seqnos(latest: str | None, end: str | None) -> int | None:
    """The lag between two offsets as Spark tells them; None where one of them is missing or no offset of ours."""
    try:
        newest, reached = (Offsets.from_json(text) for text in (latest or "", end or ""))
    except InvalidOffsets:
        return None
    return sum(
        max(0, offset.seqno - (reached[vbucket].seqno if vbucket in reached else 0))
        for vbucket, offset in newest.offsets.items()
    )


def progress_lag(progress: Any) -> int | None:
    """The lag of a query's progress, with one `dcp` source. Takes Spark's object, or the same as a dictionary."""
    told = progress if isinstance(progress, dict) else json.loads(progress.json)
    source = (told.get("sources") or [{}])[0]
    return lag_seqnos(_text(source.get("latestOffset")), _text(source.get("endOffset")))


def _text(offset: Any) -> str | None:
    return offset if offset is None or isinstance(offset, str) else json.dumps(offset)


class LagListener(StreamingQueryListener):
    """Tells the lag of queries that read `dcp`, after each batch: `spark.streams.addListener(LagListener(print))`."""

    def __init__(self, on_lag: OnLag) -> None:
        self._on_lag = on_lag

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  (Spark's names)
        """Nothing is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        lag = progress_lag(event.progress)
        if lag is not None:
            self._on_lag(event.progress.name or str(event.progress.id), lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing new has come: the last lag still holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """What was told last stays."""

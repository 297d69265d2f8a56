"""How far a query is behind, from what Spark tells of its progress."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.freshness import LagListener, lag_seqnos, progress_lag


def offsets(*seqnos: int) -> str:
    at = [
        StreamOffset(vbuuid=Vbuuid(5), seqno=Seqno(seqno), snapshot_start=Seqno(seqno), snapshot_end=Seqno(seqno))
        for seqno in seqnos
    ]
    return Offsets("uuid", {VBucketId(vbucket): offset for vbucket, offset in enumerate(at)}).to_json()


@pytest.mark.parametrize(
    ("latest", "end", "lag"),
    [
        (offsets(10, 20), offsets(10, 20), 0),
        (offsets(10, 20), offsets(4, 20), 6),
        (offsets(10, 20), offsets(4, 10), 16),
        (offsets(10, 20), offsets(12, 18), 2),
        (offsets(10, 20), offsets(10), 20),
        (offsets(), offsets(5), 0),
        (None, offsets(1), None),
        (offsets(1), None, None),
        ('{"logOffset":3}', offsets(1), None),
        ("no JSON", offsets(1), None),
    ],
)
def test_the_lag_between_two_offsets(latest: str | None, end: str | None, lag: int | None) -> None:
    assert lag_seqnos(latest, end) == lag


def progress(latest: Any, end: Any) -> dict[str, Any]:
    return {"name": None, "id": "the-id", "sources": [{"latestOffset": latest, "endOffset": end}]}


@pytest.mark.parametrize("form", [lambda text: text, json.loads], ids=["text", "object"])
def test_the_lag_of_a_progress(form: Any) -> None:
    told = progress(form(offsets(10)), form(offsets(4)))
    assert progress_lag(told) == 6
    assert progress_lag(SimpleNamespace(json=json.dumps(told))) == 6


@pytest.mark.parametrize("told", [{}, {"sources": []}, {"sources": [{}]}, progress(None, None)])
def test_a_progress_that_tells_nothing(told: dict[str, Any]) -> None:
    assert progress_lag(told) is None


@pytest.mark.parametrize(("name", "shown"), [("mine", "mine"), (None, "the-id")])
def test_the_listener(name: str | None, shown: str) -> None:
    heard: list[tuple[str, int]] = []
    listener = LagListener(lambda query, lag: heard.append((query, lag)))
    for told in (progress(offsets(10), offsets(4)), progress(None, None)):
        event: Any = SimpleNamespace(progress=SimpleNamespace(json=json.dumps(told), name=name, id="the-id"))
        listener.onQueryProgress(event)
    assert heard == [(shown, 6)]

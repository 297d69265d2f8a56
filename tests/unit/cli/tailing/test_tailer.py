"""The offsets behind a part of a batch."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from headwater.cli.tailing import tailer
from headwater.cli.tailing.tailer import LagLine, Progress, describe, offsets_behind
from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.change_batches import batch_of, document, rollback


def place(seqno: int, start: int, end: int, vbuuid: int = 5) -> StreamOffset:
    return StreamOffset(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(start), snapshot_end=Seqno(end))


def offsets(places: dict[int, StreamOffset]) -> Offsets:
    return Offsets("a bucket", {VBucketId(vbucket): place for vbucket, place in places.items()})


def change(vbucket: int, seqno: int, start: int, end: int) -> dict[str, object]:
    return document(vbucket=vbucket, vbuuid=5, seqno=seqno, snapshot_start=start, snapshot_end=end)


BEFORE = offsets({1: place(4, 4, 4), 2: place(0, 0, 0, 0), 3: place(7, 7, 7)})
AFTER = offsets({1: place(9, 6, 9), 2: place(3, 0, 3), 3: place(20, 20, 20), 4: place(2, 0, 2)})
BATCH = batch_of(
    change(1, 5, 4, 5),
    change(1, 8, 6, 9),
    change(2, 1, 0, 3),
    change(1, 9, 6, 9),
    change(2, 3, 0, 3),
    change(4, 1, 0, 2),
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, {1: place(4, 4, 4), 2: place(0, 0, 0, 0)}),
        (1, {1: place(5, 4, 5), 2: place(0, 0, 0, 0)}),
        (2, {1: place(8, 6, 9), 2: place(0, 0, 0, 0)}),
        (3, {1: place(8, 6, 9), 2: place(1, 0, 3)}),
        (4, {1: place(9, 6, 9), 2: place(1, 0, 3)}),
        (5, {1: place(9, 6, 9), 2: place(3, 0, 3)}),
    ],
)
def test_where_a_part_ends(rows: int, expected: dict[int, StreamOffset]) -> None:
    """Vbucket 3 has no rows and is further on all the same; of vbucket 4 nothing was known before."""
    found = offsets_behind(rows, BATCH, before=BEFORE, after=AFTER)
    assert found == offsets({**expected, 3: place(20, 20, 20)})


def test_all_of_a_batch() -> None:
    assert offsets_behind(6, BATCH, before=BEFORE, after=AFTER) == AFTER


def test_behind_a_rollback() -> None:
    batch = batch_of(rollback(vbucket=1, seqno=3), change(1, 5, 4, 5))
    found = offsets_behind(1, batch, before=BEFORE, after=AFTER)
    assert found[VBucketId(1)] == place(3, 3, 3, vbuuid=6)


# The line that `tail` shows at the bottom of a terminal.


NOTHING = Progress(changes=0, lag=None, rollbacks=0, reconnects=0)


def test_what_it_says() -> None:
    assert describe(NOTHING, 0).plain == "0 changes, 0/s  lag ?  rollbacks 0  reconnects 0"
    busy = Progress(changes=1234567, lag=8900, rollbacks=1, reconnects=2)
    assert describe(busy, 4567.8).plain == "1,234,567 changes, 4,568/s  lag 8,900  rollbacks 1  reconnects 2"


def test_a_rollback_stands_out_in_it() -> None:
    styles = [span.style for span in describe(replace(NOTHING, rollbacks=1), 0).spans]
    assert "bold red" in styles
    assert "bold red" not in [span.style for span in describe(NOTHING, 0).spans]


def console(width: int = 200) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=width, color_system=None), shown


def test_it_makes_way_and_goes() -> None:
    terminal, shown = console()
    with LagLine(terminal, lambda: replace(NOTHING, changes=5)) as line, line.above():
        shown.write("a change\n")
    text = shown.getvalue()
    assert text.startswith("\r\x1b[2Ka change\n5 changes")
    assert text.endswith("\r\x1b[2K"), "nothing of it is left behind"


def test_it_never_takes_a_second_row() -> None:
    terminal, shown = console(width=20)
    with LagLine(terminal, lambda: NOTHING) as line, line.above():
        pass
    drawn = shown.getvalue().split("\r\x1b[2K")[1]
    assert drawn == "0 changes, 0/s  la…"


def test_it_is_drawn_again_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, "REDRAW_EVERY_S", 0.001)
    looks = threading.Semaphore(0)

    def look() -> Progress:
        looks.release()
        return NOTHING

    terminal, shown = console()
    with LagLine(terminal, look):
        for _ in range(10):
            assert looks.acquire(timeout=30)
    assert shown.getvalue().count("0 changes") >= 4


def test_the_rate_is_that_of_the_last_seconds() -> None:
    line = LagLine(console()[0], lambda: NOTHING)
    assert line.rate(0, 100.0) == 0
    assert line.rate(500, 101.0) == 500
    assert line.rate(500, 103.5) == 0

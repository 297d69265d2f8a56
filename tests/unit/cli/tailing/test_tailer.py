"""The line that `tail` shows at the bottom of a terminal."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from headwater.cli.tailing import tailer
from headwater.cli.tailing.tailer import LagLine, Progress, describe

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

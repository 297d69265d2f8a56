"""When a signal ends `tail`, and when it has to wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.cli import output as module
from headwater.cli.output import Ended, Interruptions, exit_code_after

WAIT_S = 30.0
"""For what comes at once."""


@pytest.fixture
def interruptions() -> Iterator[Interruptions]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruptions() as entered:
        yield entered
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_where_it_is_allowed(interruptions: Interruptions, number: signal.Signals, exit_code: int) -> None:
    with pytest.raises(Ended) as raised, interruptions.allowed():
        signal.raise_signal(number)
    assert exit_code_after(raised.value) == exit_code


def test_a_signal_that_comes_too_early_waits(interruptions: Interruptions) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Ended), interruptions.allowed():
        pytest.fail("it has come")


def test_a_second_signal_does_not_wait(interruptions: Interruptions) -> None:
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Ended) as raised:
        signal.raise_signal(signal.SIGINT)
    assert exit_code_after(raised.value) == 143, "the first one counts"


def test_the_wait_has_an_end(interruptions: Interruptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Ended):
        threading.Event().wait(WAIT_S)


def test_what_was_ignored_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruptions() as interruptions, interruptions.allowed():
            signal.raise_signal(signal.SIGHUP)
        assert interruptions.number is None
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_handlers_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with Interruptions():
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_reader_that_leaves(interruptions: Interruptions) -> None:
    theirs, ours = os.pipe()
    interruptions.watch_reader(ours)
    threading.Timer(0.01, os.close, [theirs]).start()
    with pytest.raises(BrokenPipeError), interruptions.allowed():
        threading.Event().wait(WAIT_S)
    os.close(ours)


def test_a_reader_that_leaves_while_nothing_is_allowed(interruptions: Interruptions) -> None:
    theirs, ours = os.pipe()
    interruptions.watch_reader(ours)
    os.close(theirs)
    while not interruptions._reader_is_gone:
        threading.Event().wait(0.001)
    with pytest.raises(BrokenPipeError), interruptions.allowed():
        pytest.fail("there is nobody to read")
    os.close(ours)


def test_a_file_has_no_reader_to_leave(interruptions: Interruptions, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        interruptions.watch_reader(file.fileno())
        with interruptions.allowed():
            threading.Event().wait(0.05)


def test_a_heeded_signal_hurries_nothing(interruptions: Interruptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    with pytest.raises(Ended), interruptions.allowed():
        signal.raise_signal(signal.SIGTERM)
    threading.Event().wait(0.05)
    interruptions.hurry()
    with pytest.raises(Ended):
        threading.Event().wait(WAIT_S)

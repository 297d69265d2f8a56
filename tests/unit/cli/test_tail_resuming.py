"""Where `tail` starts, and what it leaves to go on with."""

from __future__ import annotations

import io
import os
import shlex
import stat
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from headwater.cli import tail as tail_module
from headwater.cli.tail import (
    LagLine,
    Progress,
    check_writable,
    describe,
    offsets_behind,
    read_start,
    resume_command,
    tail,
    write_offsets,
)
from headwater.client.offsets import Offsets
from headwater.client.read_options import Start
from headwater.errors import HeadwaterError, InvalidInput
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.cases import case, case_apart
from support.commands import batch_of, document, rollback

URL = "couchbase://127.0.0.1/default"


def offsets_of(vbuckets: int) -> Offsets:
    place = StreamOffset(vbuuid=Vbuuid(2**60), seqno=Seqno(9), snapshot_start=Seqno(1), snapshot_end=Seqno(9))
    return Offsets("a bucket", {VBucketId(vbucket): place for vbucket in range(vbuckets)})


OFFSETS = offsets_of(3)

# --- where to start -----------------------------------------------------------------------------------------------


def test_places_by_name() -> None:
    assert read_start("beginning") is Start.BEGINNING
    assert read_start("now") is Start.NOW
    assert read_start("2026-01-02") == datetime(2026, 1, 2, tzinfo=UTC)


def test_offsets_as_text_and_in_a_file(tmp_path: Path) -> None:
    assert read_start(OFFSETS.to_json()) == OFFSETS
    assert read_start(f" {OFFSETS.to_json()}\n") == OFFSETS
    file = tmp_path / "place.json"
    file.write_text(OFFSETS.to_json() + "\n")
    assert read_start(str(file)) == OFFSETS


@case_apart(b"", "not JSON")
@case_apart(b"{}", "no version")
@case_apart(b"\xff\xfe", "it is not text")
@case_apart(OFFSETS.to_json().replace('"version":1', '"version":2').encode(), "has version 2|have version 2")
@case_apart(OFFSETS.to_json()[:-10].encode(), "not JSON")
def test_files_that_hold_no_offsets(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "place.json"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=reason) as raised:
        read_start(str(file))
    assert str(file) in raised.value.reason
    assert raised.value.hint


@pytest.mark.parametrize(
    ("place", "reason"), [("later", "'later' is no file"), ("/", "Is a directory"), ("{", "not JSON")]
)
def test_places_that_are_none(place: str, reason: str) -> None:
    with pytest.raises(HeadwaterError, match=reason):
        read_start(place)


# --- where to go on -----------------------------------------------------------------------------------------------


def test_offsets_are_written_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "place.json"
    write_offsets(file, OFFSETS)
    write_offsets(file, offsets_of(2))
    assert read_start(str(file)) == offsets_of(2)
    assert os.listdir(tmp_path) == ["place.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_offsets(tmp_path / "link", OFFSETS)
    assert (tmp_path / "link").is_symlink()
    assert read_start(str(tmp_path / "file")) == OFFSETS


def test_offsets_can_go_to_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
    thread.start()
    write_offsets(pipe, OFFSETS)
    thread.join()
    assert Offsets.from_json(read[0]) == OFFSETS
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_can_not_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        write_offsets(tmp_path / "missing" / "place.json", OFFSETS)
    for path in (tmp_path / "missing" / "place.json", tmp_path):
        with pytest.raises(InvalidInput, match="can't be written"):
            check_writable(path)
    check_writable(tmp_path / "place.json")


def resume_words(*arguments: str, offsets: Offsets = OFFSETS, is_terminal: bool = False) -> list[str]:
    context = tail.make_context("tail", [URL, *arguments])
    return shlex.split(resume_command(context, offsets, is_terminal=is_terminal))


def test_the_command_that_goes_on() -> None:
    assert resume_words() == ["headwater", "tail", URL, "--from", OFFSETS.to_json()]


def test_the_command_has_the_same_options() -> None:
    words = resume_words(
        *("--from", "now", "--json", "--key", "user::*", "--key", "it's", "--collection", "a.b", "--vbucket", "0-3"),
        *("--limit", "5", "--user", "ann", "--password", "pencil", "--quiet", "--buffer-bytes", "64K", "--to", "now"),
    )
    assert words[:4] == ["headwater", "tail", URL, "--to"]
    assert words[-2:] == ["--from", OFFSETS.to_json()]
    assert "pencil" not in words
    again = tail.make_context("tail", words[2:])
    assert again.params["keys"] == ("user::*", "it's")
    assert again.params["collections"] == ("a.b",)
    assert again.params["vbuckets"] == ("0-3",)
    assert again.params["buffer_bytes"] == 64 * 1024
    assert again.params["end"] == "now"
    assert again.params["user"] == "ann"
    assert again.params["as_json"] is True
    assert again.params["quiet"] is True
    assert again.params["limit"] is None


def test_files_in_the_command() -> None:
    words = resume_words("--offsets-file", "place.json")
    assert words[-4:] == ["--offsets-file", "place.json", "--from", "place.json"]
    words = resume_words("--checkpoint", "place.json", "--from", "now")
    assert words == ["headwater", "tail", URL, "--checkpoint", "place.json"]


def test_a_terminal_is_not_flooded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    offsets = offsets_of(1024)
    assert resume_words(offsets=offsets)[-1] == offsets.to_json()
    assert os.listdir(tmp_path) == []
    assert resume_words(offsets=OFFSETS, is_terminal=True)[-1] == OFFSETS.to_json()
    path = resume_words(offsets=offsets, is_terminal=True)[-1]
    assert os.listdir(tmp_path) == [Path(path).name]
    assert read_start(path) == offsets
    assert read_start(resume_words(offsets=offsets_of(8192))[-1]) == offsets_of(8192)


# --- how far it is ------------------------------------------------------------------------------------------------


def offset(seqno: int, start: int, end: int, vbuuid: int = 5) -> StreamOffset:
    return StreamOffset(vbuuid=Vbuuid(vbuuid), seqno=Seqno(seqno), snapshot_start=Seqno(start), snapshot_end=Seqno(end))


def offsets(by_vbucket: dict[int, StreamOffset]) -> Offsets:
    return Offsets("a bucket", {VBucketId(vbucket): one for vbucket, one in by_vbucket.items()})


def change(vbucket: int, seqno: int, start: int, end: int) -> dict[str, object]:
    return document(vbucket=vbucket, vbuuid=5, seqno=seqno, snapshot_start=start, snapshot_end=end)


BEFORE = offsets({1: offset(4, 4, 4), 2: offset(0, 0, 0, 0), 3: offset(7, 7, 7)})
AFTER = offsets({1: offset(9, 6, 9), 2: offset(3, 0, 3), 3: offset(20, 20, 20), 4: offset(2, 0, 2)})
BATCH = batch_of(
    change(1, 5, 4, 5),
    change(1, 8, 6, 9),
    change(2, 1, 0, 3),
    change(1, 9, 6, 9),
    change(2, 3, 0, 3),
    change(4, 1, 0, 2),
)


@case(0, {1: offset(4, 4, 4), 2: offset(0, 0, 0, 0)})
@case(1, {1: offset(5, 4, 5), 2: offset(0, 0, 0, 0)})
@case(2, {1: offset(8, 6, 9), 2: offset(0, 0, 0, 0)})
@case(3, {1: offset(8, 6, 9), 2: offset(1, 0, 3)})
@case(4, {1: offset(9, 6, 9), 2: offset(1, 0, 3)})
@case(5, {1: offset(9, 6, 9), 2: offset(3, 0, 3)})
def test_where_a_part_ends(rows: int, expected: dict[int, StreamOffset]) -> None:
    """Vbucket 3 has no rows and is further on all the same; of vbucket 4 nothing was known before."""
    found = offsets_behind(rows, BATCH, before=BEFORE, after=AFTER)
    assert found == offsets({**expected, 3: offset(20, 20, 20)})


def test_all_of_a_batch() -> None:
    assert offsets_behind(6, BATCH, before=BEFORE, after=AFTER) == AFTER


def test_behind_a_rollback() -> None:
    batch = batch_of(rollback(vbucket=1, seqno=3), change(1, 5, 4, 5))
    found = offsets_behind(1, batch, before=BEFORE, after=AFTER)
    assert found[VBucketId(1)] == offset(3, 3, 3, vbuuid=6)


# --- the line that `tail` shows at the bottom of a terminal -----------------------------------------------------------

NOTHING = Progress(rows={}, lag=None, rollbacks=0, reconnects=0)


def test_what_it_says() -> None:
    assert describe(NOTHING, 0).plain == "0 changes, 0/s  lag ?  rollbacks 0  reconnects 0"
    rows = {"mutation": 1234560, "deletion": 7, "rollback": 2, "scope_created": 1024}
    busy = Progress(rows=rows, lag=8900, rollbacks=1, reconnects=2)
    said = "1,234,567 changes and 1,024 system events, 4,568/s  lag 8,900  rollbacks 1  reconnects 2"
    assert describe(busy, 4567.8).plain == said


def test_a_rollback_stands_out_in_it() -> None:
    styles = [span.style for span in describe(replace(NOTHING, rollbacks=1), 0).spans]
    assert "bold red" in styles
    assert "bold red" not in [span.style for span in describe(NOTHING, 0).spans]


def console(width: int = 200) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=width, color_system=None), shown


def test_it_makes_way_and_goes() -> None:
    terminal, shown = console()
    with LagLine(terminal, lambda: replace(NOTHING, rows={"mutation": 5})) as line, line.above():
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
    monkeypatch.setattr(tail_module, "REDRAW_EVERY_S", 0.001)
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

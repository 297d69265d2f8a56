"""Where `tail` starts, and what it leaves to go on with."""

from __future__ import annotations

import os
import shlex
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.cli.tail import tail
from headwater.cli.tailing import places
from headwater.cli.tailing.places import (
    EventsOnce,
    KeyPattern,
    check_writable,
    read_start,
    resume_command,
    write_offsets,
)
from headwater.client.offsets import Offsets
from headwater.client.read_options import Start
from headwater.errors import HeadwaterError, InvalidInput
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.change_batches import batch_of, document, event, rollback

URL = "couchbase://127.0.0.1/default"


def offsets_of(vbuckets: int) -> Offsets:
    place = StreamOffset(vbuuid=Vbuuid(2**60), seqno=Seqno(9), snapshot_start=Seqno(1), snapshot_end=Seqno(9))
    return Offsets("a bucket", {VBucketId(vbucket): place for vbucket in range(vbuckets)})


OFFSETS = offsets_of(3)

# --- where to start -----------------------------------------------------------------------------------------------


def test_places_by_name() -> None:
    assert read_start("beginning") is Start.BEGINNING
    assert read_start("now") is Start.NOW


def test_offsets_as_text_and_in_a_file(tmp_path: Path) -> None:
    assert read_start(OFFSETS.to_json()) == OFFSETS
    assert read_start(f" {OFFSETS.to_json()}\n") == OFFSETS
    file = tmp_path / "place.json"
    file.write_text(OFFSETS.to_json() + "\n")
    assert read_start(str(file)) == OFFSETS


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{}", "no version"),
        (b"\xff\xfe", "it is not text"),
        (OFFSETS.to_json().replace('"version":1', '"version":2').encode(), "has version 2|have version 2"),
        (OFFSETS.to_json()[:-10].encode(), "not JSON"),
    ],
)
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


# People are told once of a collection that every vbucket tells of.


def created(vbucket: int, collection: str = "orders", op: str = "collection_created") -> dict[str, Any]:
    return event(op, vbucket=vbucket, scope="shop", collection=collection, collection_id=8)


def shown(once: EventsOnce, *rows: dict[str, Any]) -> list[int]:
    found: list[int] = once.rows(batch_of(*rows)).tolist()
    return found


def test_an_event_that_all_vbuckets_tell() -> None:
    once = EventsOnce()
    assert shown(once, document(), created(0), document(), created(1), created(2)) == [0, 1, 2]
    assert shown(once, created(3), document(), rollback()) == [1, 2]


def test_other_events_are_others() -> None:
    rows = [created(0), created(0, "users"), created(0, op="collection_dropped")]
    rows += [event("scope_created", vbucket=1, scope=scope, collection=None, collection_id=None) for scope in "ab"]
    assert shown(EventsOnce(), *rows) == [0, 1, 2, 3, 4]


def test_what_a_vbucket_tells_again_is_new_and_told_once() -> None:
    once = EventsOnce()
    assert shown(once, *(created(vbucket) for vbucket in (0, 1, 2, 1, 0, 2, 2, 0))) == [0, 3, 6]


def test_events_of_long_ago_are_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr(places, "EVENTS_MAX", 2)
    once = EventsOnce()
    assert shown(once, created(0, "a"), created(0, "b"), created(1, "a"), created(0, "c"), created(2, "a")) == [0, 1, 3]
    assert shown(once, created(1, "b")) == [0]


# `tail --key`.


KEYS = [b"user::1", "user::é".encode(), b"userX", b"a.b", b"", b"line\nbreak", b"\xff\xfe", b"user::(x)", b"a b"]


def matched(*patterns: str) -> list[bytes]:
    batch = batch_of(*(document(key=key) for key in KEYS))
    return [KEYS[row] for row in KeyPattern(patterns).rows(batch).tolist()]


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("user::1", [b"user::1"]),
        ("user::", []),
        ("user::*", [KEYS[0], KEYS[1], KEYS[7]]),
        ("user::?", [KEYS[0], KEYS[1]]),
        ("*é", [KEYS[1]]),
        ("é", []),
        ("a.b", [b"a.b"]),
        ("a?b", [b"a.b", b"a b"]),
        ("a b", [b"a b"]),
        ("user::(x)", [KEYS[7]]),
        ("line?break", [KEYS[5]]),
        ("line*", [KEYS[5]]),
        ("??", [KEYS[6]]),
        ("\udcff\udcfe", [KEYS[6]]),
        ("", [b""]),
        ("*", KEYS),
        ("[a-z]*", []),
        (r"\d*", []),
    ],
)
def test_patterns(pattern: str, keys: list[bytes]) -> None:
    assert matched(pattern) == keys


def test_several_patterns() -> None:
    assert matched("userX", "a*", "b|c") == [b"userX", b"a.b", b"a b"]


def test_rollbacks_are_never_hidden_and_events_are() -> None:
    batch = batch_of(event("collection_created"), rollback(), document(key=b"x"), document(key=b"y"))
    assert KeyPattern(("y",)).rows(batch).tolist() == [1, 3]

"""The user file: round trip, who may read it, what a crash leaves, and every fault in one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import DataDamaged, DataTooNew, LocalProtocolError, StoreError, StoreFull
from headwater.node.auth import user_file
from headwater.node.auth.user_file import PASSWORD_RANDOM_BYTES, VERSION, load_users, readable_password, store_users
from headwater.node.auth.users import SALTS_BYTES, Grant, Group, Role, Users, hash_password

PASSWORD = "correct horse battery staple"
EMPTY = Users(decoy_secret=bytes(range(32)), iterations=4096)
ANN = EMPTY.new_user("ann", PASSWORD, {Grant(Role.ADMIN)}, salts=bytes(SALTS_BYTES))
ZOE = EMPTY.new_user("Zoë, =漢", PASSWORD, {Grant(Role.READER), Grant(Role.WRITER, "beer")}, salts=bytes(SALTS_BYTES))
USERS = EMPTY.add(ANN).add(ZOE)
SHARED = replace(
    USERS.put(replace(ANN, groups=frozenset({"lake"}), changed_ms=7)).put_group(
        Group(name="lake", grants=frozenset({Grant(Role.DATA_DCP_READER)}), description="Ä lake", changed_ms=8)
    ),
    removed={"user bob": 9},
    sharing="ab" * 16,
    clusters=frozenset({"0" * 32}),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "users.json"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def stored(path: Path) -> Any:
    store_users(path, USERS)
    return json.loads(path.read_text())


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
    path.chmod(0o600)


@pytest.mark.parametrize("users", [EMPTY, USERS, SHARED], ids=["none", "two", "with groups"])
def test_round_trip(path: Path, users: Users) -> None:
    store_users(path, users)
    assert load_users(path) == users


def test_a_file_of_version_1_is_read(path: Path) -> None:
    content = stored(path)
    members = {name: content[name] for name in ("iterations", "decoy_secret")}
    users = [
        {name: user[name] for name in ("name", "display_name", "grants", "credentials")} for user in content["users"]
    ]
    write(path, {"version": 1, **members, "users": users})
    assert load_users(path) == USERS


def test_a_file_without_display_names_is_read(path: Path) -> None:
    ann = replace(USERS.by_name["ann"], display_name="Ann Ä")
    store_users(path, USERS.put(ann))
    loaded = load_users(path)
    assert loaded is not None
    assert loaded.by_name["ann"] == ann
    content = stored(path)
    for user in content["users"]:
        del user["display_name"]
    write(path, content)
    assert load_users(path) == USERS


def test_who_could_log_in_before_can_after(path: Path) -> None:
    store_users(path, USERS)
    loaded = load_users(path)
    assert loaded is not None
    assert loaded.check_password("ann", PASSWORD)
    assert not loaded.check_password("ann", "wrong")


def test_no_password_is_in_the_file(path: Path) -> None:
    store_users(path, USERS)
    text = path.read_bytes()
    assert b"ann" in text
    for word in PASSWORD.split():
        assert word.encode() not in text


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_can_read_the_file_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store_users(path, USERS)
    finally:
        os.umask(before)
    assert mode(path) == 0o600


def test_a_file_that_was_open_to_others_is_closed_by_the_next_store(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0o644)
    store_users(path, USERS)
    assert mode(path) == 0o600


def test_nothing_else_is_left_in_the_folder(path: Path) -> None:
    store_users(path, EMPTY)
    store_users(path, USERS)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, StoreError)]
)
def test_a_failed_write_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[StoreError]
) -> None:
    store_users(path, USERS)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=f"cannot be written: {os.strerror(number)}") as error:
            store_users(path, EMPTY)
    assert type(error.value) is kind
    assert load_users(path) == USERS
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_on_disk_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(number: int) -> None:
        calls.append("fsync")
        fsync(number)

    def recorded_replace(old: str, new: Path) -> None:
        calls.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    store_users(path, USERS)
    assert calls == ["fsync", "replace", "fsync"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        store_users(tmp_path / "missing" / "users.json", USERS)


def test_no_file_is_no_users(path: Path) -> None:
    assert load_users(path) is None


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o610, 0o602, 0o644, 0o777])
def test_a_file_open_to_others_is_refused(path: Path, bits: int) -> None:
    store_users(path, USERS)
    path.chmod(bits)
    with pytest.raises(StoreError, match=f"is open to others, with mode {bits:04o}.*chmod 600"):
        load_users(path)


@pytest.mark.parametrize("bits", [0o400, 0o600, 0o700])
def test_a_file_of_the_owner_alone_is_taken(path: Path, bits: int) -> None:
    store_users(path, USERS)
    path.chmod(bits)
    assert load_users(path) == USERS


def test_a_file_that_cannot_be_read(path: Path) -> None:
    path.mkdir(mode=0o700)
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        load_users(path)


def test_a_file_that_is_too_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_users(path, USERS)
    monkeypatch.setattr(user_file, "USER_FILE_BYTES_MAX", 100)
    with pytest.raises(StoreError, match="more than 100 bytes"):
        load_users(path)


def test_what_older_programs_know_is_written_for_them(path: Path) -> None:
    """A grant on less than a bucket, or of a newer role, would be more to them, or damage."""
    versions = []
    for grant in (Grant(Role.DATA_READER, "beer"), Grant(Role.DATA_READER, "beer", "s"), Grant(Role.QUERY_SELECT)):
        users = USERS.put(replace(next(iter(USERS.by_name.values())), grants=frozenset({grant, Grant(Role.ADMIN)})))
        store_users(path, users)
        assert load_users(path) == users
        versions.append(json.loads(path.read_text())["version"])
    assert versions == [2, 3, 3]


def test_a_newer_version_is_refused(path: Path) -> None:
    # Only the version is looked at: what a newer version means by the rest is its own affair.
    write(path, {"version": VERSION + 1, "users": {}})
    with pytest.raises(DataTooNew, match="has version 4, and this program knows versions up to 3"):
        load_users(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": "1"}'])
def test_a_file_that_is_no_user_file(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(DataDamaged, match=r"users.json is damaged: .* backup"):
        load_users(path)


def set_at(content: Any, where: tuple[str | int, ...], value: object) -> None:
    for step in where[:-1]:
        content = content[step]
    content[where[-1]] = value


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        (("version",), 0, "there is no version 0"),
        (("version",), True, "version is missing or of the wrong type"),
        (("iterations",), None, "iterations is missing"),
        (("iterations",), 1, "iterations"),
        (("decoy_secret",), "AAAA", "decoy secret"),
        (("decoy_secret",), "é", "decoy_secret is not base64"),
        (("users",), {}, "users is missing or of the wrong type"),
        (("users", 0), "ann", "name is missing"),
        (("users", 0, "name"), "", "cannot be a user name"),
        (("users", 0, "name"), "ann", "a user or a group is there twice"),
        (("users", 0, "grants"), None, "grants is missing"),
        (("users", 0, "grants", 0), 5, "role is missing"),
        (("users", 0, "grants", 0, "role"), "root", "there is no role 'root'"),
        (("users", 0, "grants", 0, "bucket"), "", "needs the name of a bucket"),
        (("users", 0, "credentials"), {}, "SCRAM-SHA512 is missing"),
        (("users", 0, "credentials", "SCRAM-SHA1", "salt"), "AAAA", "SCRAM-SHA1 have the wrong length"),
        (("users", 0, "credentials", "SCRAM-SHA256", "stored_key"), "AAAA", "SCRAM-SHA256 have the wrong length"),
        (("users", 0, "credentials", "SCRAM-SHA512", "server_key"), "?", "server_key is not base64"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(
    path: Path, where: tuple[str | int, ...], value: object, reason: str
) -> None:
    content = stored(path)
    set_at(content, where, value)
    write(path, content)
    with pytest.raises(DataDamaged, match=reason) as error:
        load_users(path)
    assert error.value.hint


def test_four_groups_that_can_be_read_out() -> None:
    password = readable_password(bytes(range(100, 100 + PASSWORD_RANDOM_BYTES)))
    assert re.fullmatch(r"(?:[0-9a-hjkmnp-tv-z]{6}-){3}[0-9a-hjkmnp-tv-z]{6}", password)
    assert hash_password(password, salts=bytes(SALTS_BYTES), iterations=4096)


def test_every_bit_counts() -> None:
    bits = PASSWORD_RANDOM_BYTES * 8
    passwords = {readable_password((1 << bit).to_bytes(PASSWORD_RANDOM_BYTES)) for bit in range(bits)}
    assert len(passwords) == bits
    assert readable_password(bytes(PASSWORD_RANDOM_BYTES)) == "000000-000000-000000-000000"
    assert readable_password(b"\xff" * PASSWORD_RANDOM_BYTES) == "zzzzzz-zzzzzz-zzzzzz-zzzzzz"


@pytest.mark.parametrize("length", [0, PASSWORD_RANDOM_BYTES - 1, PASSWORD_RANDOM_BYTES + 1])
def test_the_randomness_must_be_enough(length: int) -> None:
    with pytest.raises(LocalProtocolError, match="random bytes"):
        readable_password(bytes(length))

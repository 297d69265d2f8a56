"""The user file: round trip, who may read it, what a crash leaves, and every fault in one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.errors import DataDamaged, DataTooNew, LocalProtocolError, StoreError, StoreFull
from headwater.node.auth import accounts as user_file
from headwater.node.auth.accounts import PASSWORD_RANDOM_BYTES, VERSION, load_users, readable_password, store_users
from headwater.node.auth.users import SALTS_BYTES, Grant, Group, Role, Users, hash_password
from support.cases import case_apart

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


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
    path.chmod(0o600)


@pytest.mark.parametrize("users", [EMPTY, USERS, SHARED], ids=["none", "two", "with groups"])
def test_round_trip(path: Path, users: Users) -> None:
    store_users(path, users)
    assert load_users(path) == users


def test_who_could_log_in_before_can_after_and_no_password_is_in_the_file(path: Path) -> None:
    store_users(path, USERS)
    loaded = load_users(path)
    assert loaded.check_password("ann", PASSWORD)
    assert not loaded.check_password("ann", "wrong")
    text = path.read_text()
    assert not any(word in text for word in PASSWORD.split())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_can_read_the_file_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store_users(path, USERS)
    finally:
        os.umask(before)
    assert mode(path) == 0o600


def test_a_store_closes_the_file_to_others_and_leaves_nothing_else(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0o644)
    store_users(path, USERS)
    assert mode(path) == 0o600
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
        assert mode(Path(old)) == 0o600, "a crash here would leave a file that others can read"
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    store_users(path, USERS)
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o610, 0o602, 0o644, 0o777, 0o400, 0o600, 0o700])
def test_a_file_open_to_others_is_refused(path: Path, bits: int) -> None:
    store_users(path, USERS)
    path.chmod(bits)
    if bits & 0o077:
        with pytest.raises(StoreError, match=f"is open to others, with mode {bits:04o}.*chmod 600"):
            load_users(path)
    else:
        assert load_users(path) == USERS


def test_files_that_can_not_be_read_or_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_users(path) is None
    with pytest.raises(StoreError, match="No such file or directory"):
        store_users(path / "missing", USERS)
    path.mkdir(mode=0o700)
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        load_users(path)
    path.rmdir()
    store_users(path, USERS)
    monkeypatch.setattr(user_file, "USER_FILE_BYTES_MAX", 100)
    with pytest.raises(StoreError, match="more than 100 bytes"):
        load_users(path)


def test_a_newer_version_is_refused(path: Path) -> None:
    # Only the version is looked at: what a newer version means by the rest is its own affair.
    write(path, {"version": VERSION + 1, "users": {}})
    with pytest.raises(DataTooNew, match="has version 4, and this program supports versions up to 3"):
        load_users(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": "1"}'])
def test_a_file_that_is_no_user_file(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(DataDamaged, match=r"users.json is damaged: .* backup"):
        load_users(path)


@case_apart(("version",), VERSION - 1, "there is no version")
@case_apart(("version",), True, "version is missing or of the wrong type")
@case_apart(("iterations",), None, "iterations is missing")
@case_apart(("iterations",), 1, "iterations")
@case_apart(("decoy_secret",), "AAAA", "decoy secret")
@case_apart(("decoy_secret",), "é", "decoy_secret is not base64")
@case_apart(("users",), {}, "users is missing or of the wrong type")
@case_apart(("users", 0), "ann", "name is missing")
@case_apart(("users", 0, "name"), "", "cannot be a user name")
@case_apart(("users", 0, "name"), "ann", "a user or a group is there twice")
@case_apart(("users", 0, "grants"), None, "grants is missing")
@case_apart(("users", 0, "grants", 0), 5, "role is missing")
@case_apart(("users", 0, "grants", 0, "role"), "root", "there is no role 'root'")
@case_apart(("users", 0, "grants", 0, "bucket"), "", "needs the name of a bucket")
@case_apart(("users", 0, "grants", 0, "collection"), "c", "on a collection of no scope")
@case_apart(("users", 0, "credentials"), {}, "SCRAM-SHA512 is missing")
@case_apart(("users", 0, "credentials", "SCRAM-SHA1", "salt"), "AAAA", "SCRAM-SHA1 have the wrong length")
@case_apart(("users", 0, "credentials", "SCRAM-SHA256", "stored_key"), "AAAA", "SCRAM-SHA256 have the wrong length")
@case_apart(("users", 0, "credentials", "SCRAM-SHA512", "server_key"), "?", "server_key is not base64")
def test_a_damaged_file_is_described(path: Path, where: tuple[str | int, ...], value: object, reason: str) -> None:
    store_users(path, USERS)
    content = part = json.loads(path.read_text())
    for step in where[:-1]:
        part = part[step]
    part[where[-1]] = value
    write(path, content)
    with pytest.raises(DataDamaged, match=reason) as error:
        load_users(path)
    assert error.value.hint


def test_four_groups_that_can_be_read_out() -> None:
    password = readable_password(bytes(range(100, 100 + PASSWORD_RANDOM_BYTES)))
    assert re.fullmatch(r"(?:[0-9a-hjkmnp-tv-z]{6}-){3}[0-9a-hjkmnp-tv-z]{6}", password)
    assert hash_password(password, salts=bytes(SALTS_BYTES), iterations=4096)
    bits = PASSWORD_RANDOM_BYTES * 8
    assert len({readable_password((1 << bit).to_bytes(PASSWORD_RANDOM_BYTES)) for bit in range(bits)}) == bits
    assert readable_password(b"\xff" * PASSWORD_RANDOM_BYTES) == "zzzzzz-zzzzzz-zzzzzz-zzzzzz"
    with pytest.raises(LocalProtocolError, match="random bytes"):
        readable_password(bytes(PASSWORD_RANDOM_BYTES - 1))

"""A crash while the user file is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.node.auth.user_file import load_users, store_users
from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from support.forked_program import run_program

PASSWORD = "correct horse battery staple"
EMPTY = Users(decoy_secret=bytes(range(32)), iterations=4096)
ANN = EMPTY.new_user("ann", PASSWORD, {Grant(Role.ADMIN)}, salts=bytes(SALTS_BYTES))
ZOE = EMPTY.new_user("Zoë, =漢", PASSWORD, {Grant(Role.READER), Grant(Role.WRITER, "beer")}, salts=bytes(SALTS_BYTES))
USERS = EMPTY.add(ANN).add(ZOE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "users.json"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


CRASH = """
import os, pathlib, sys
from headwater.node.auth import user_file
from headwater.node.auth.users import Users
os.replace = lambda *paths: os._exit(9)
user_file.store_users(pathlib.Path(sys.argv[1]), Users(decoy_secret=bytes(32)))
"""


def test_a_crash_before_the_rename_leaves_the_old_file(path: Path) -> None:
    store_users(path, USERS)
    assert run_program("-c", CRASH, str(path)).returncode == 9
    assert load_users(path) == USERS
    assert [mode(file) for file in path.parent.iterdir()] == [0o600, 0o600]
    store_users(path, EMPTY)
    assert load_users(path) == EMPTY

"""The options that several commands have: old spellings, who logs in, and how TLS is spoken."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from headwater.cli.land import land
from headwater.cli.options import CONNECTION_OPTIONS, KEY_PASSWORD_VARIABLE, LoginOptions
from headwater.cli.tail import tail
from headwater.cli.tailing.resuming import resume_command
from headwater.client.connection_string import ConnectionString
from headwater.client.offsets import Offsets
from headwater.client.settings import TlsSettings
from headwater.errors import InvalidInput

URL = "couchbase://127.0.0.1/travel"
TLS_URL = "couchbases://127.0.0.1/travel"
SECRET = "not to be seen"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWATER_USER", "HEADWATER_PASSWORD", KEY_PASSWORD_VARIABLE):
        monkeypatch.delenv(name, raising=False)


# --- old spellings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (tail, "--buffer-size 64K", "--buffer-bytes 64K"),
        (tail, "--buffer-size=64K", "--buffer-bytes=64K"),
        (tail, "--connections 2", "--connections-per-node 2"),
        (tail, "--persisted", "--mitigate-rollbacks"),
        (tail, "--as-they-come", "--snapshots as-they-come"),
        (tail, "--give-up-after 7", "--give-up-after-s 7"),
        (land, "--into x --partitions 2", "--into x --min-partitions 2"),
        (land, "--into x --max-rows 9", "--into x --max-rows-per-trigger 9"),
    ],
)
def test_an_old_spelling_means_the_same_and_warns(
    command: click.Command, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    today = command.make_context(command.name, [URL, *shlex.split(new)])
    assert capsys.readouterr().err == ""
    renamed = command.make_context(command.name, [URL, *shlex.split(old)])
    assert renamed.params == today.params
    written = shlex.split(old.partition("=")[0])[-2 if " " in old else -1]
    err = capsys.readouterr().err
    assert err.startswith("Warning: --")
    assert err.count("\n") == 1
    assert f"{written} is an old spelling: write {shlex.split(new.partition('=')[0])[-2 if ' ' in new else -1]}" in err


def test_what_stands_behind_two_dashes_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.UsageError):
        tail.make_context("tail", [URL, "--", "--persisted"])
    assert capsys.readouterr().err == ""


def test_help_has_the_spellings_of_today() -> None:
    spelled = [name for parameter in tail.params for name in parameter.opts]
    assert "--buffer-bytes" in spelled
    assert "--buffer-size" not in spelled


# --- logging in ---------------------------------------------------------------------------------------------------


def test_options_are_the_fields_of_a_login() -> None:
    assert tuple(LoginOptions.__dataclass_fields__) == CONNECTION_OPTIONS


def test_no_secret_is_shown() -> None:
    login = LoginOptions(user="me", password=SECRET, tls_cert=Path("a"), tls_key_password=SECRET)
    assert SECRET not in f"{login} {login.tls_settings}"


def test_a_certificate_logs_in_without_a_user() -> None:
    login = LoginOptions(tls_cert=Path("me.pem"), tls_key=Path("key.pem"), tls_key_password=SECRET)
    assert login.credentials(ConnectionString.parse(TLS_URL)) is None
    assert login.tls_settings == TlsSettings(
        certificate_file=Path("me.pem"), key_file=Path("key.pem"), key_password=SECRET
    )


def test_a_password_of_a_key_without_a_certificate_is_left_alone() -> None:
    """Its variable may be set for other commands."""
    assert LoginOptions(tls_key_password=SECRET).tls_settings is None


def test_a_key_without_a_certificate() -> None:
    with pytest.raises(InvalidInput, match="Give --tls-cert"):
        _ = LoginOptions(tls_key=Path("key.pem")).tls_settings


def test_the_command_to_go_on_has_no_secret(tmp_path: Path) -> None:
    certificate = tmp_path / "me.pem"
    certificate.touch()
    given = ["--tls-cert", str(certificate), "--tls-key-password", SECRET, "--password", SECRET, "--user", "me"]
    command = resume_command(tail.make_context("tail", [TLS_URL, *given]), Offsets("uuid"), is_terminal=False)
    assert f"--tls-cert {certificate}" in command
    assert SECRET not in command

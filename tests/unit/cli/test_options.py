"""The options that several commands have: who logs in, and how TLS is spoken."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.options import LoginOptions
from headwater.cli.tail import resume_command, tail
from headwater.client.connection_string import ConnectionString
from headwater.client.offsets import Offsets
from headwater.client.settings import KEY_PASSWORD_VARIABLE, TlsSettings
from headwater.errors import InvalidInput

URL = "couchbase://127.0.0.1/travel"
TLS_URL = "couchbases://127.0.0.1/travel"
SECRET = "not to be seen"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWATER_USER", "HEADWATER_PASSWORD", KEY_PASSWORD_VARIABLE):
        monkeypatch.delenv(name, raising=False)


# --- logging in ---------------------------------------------------------------------------------------------------


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

"""Settings of TLS: what fits together, and files that can't be used."""

from __future__ import annotations

import os
import pickle
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from certificates import self_signed
from headwater.client.settings import TlsSettings
from headwater.errors import InvalidInput


def test_anybody_is_trusted_only_if_told() -> None:
    assert TlsSettings().context().verify_mode is ssl.CERT_REQUIRED
    assert TlsSettings().context().check_hostname
    careless = TlsSettings(skip_verify=True).context()
    assert careless.verify_mode is ssl.CERT_NONE
    assert not careless.check_hostname


def test_the_ca_file_replaces_those_of_the_system(tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    for file in (certificate, str(certificate)):
        (trusted,) = TlsSettings(ca_file=file).context().get_ca_certs()
        assert trusted["subject"] == ((("commonName", "127.0.0.1"),),)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    junk, missing = tmp_path / "junk.pem", tmp_path / "missing.pem"
    junk.write_text("junk")
    other = tmp_path / "other"
    other.mkdir()
    _, other_key = self_signed(other)
    for settings, what in [
        (TlsSettings(ca_file=junk), "the CA file"),
        (TlsSettings(ca_file=missing), "the CA file"),
        (TlsSettings(certificate_file=missing), "the client certificate"),
        (TlsSettings(certificate_file=junk, key_file=key), "the client certificate"),
        (TlsSettings(certificate_file=certificate), "the client certificate"),
        (TlsSettings(certificate_file=certificate, key_file=other_key), "the client certificate"),
    ]:
        with pytest.raises(InvalidInput, match=rf"^{what} .* can't be used") as raised:
            settings.context()
        assert "PEM" in raised.value.hint


def encrypted_key(folder: Path) -> tuple[Path, Path]:
    """A certificate, and its key under the password `sesame`."""
    certificate, key = self_signed(folder)
    encrypted = folder / "encrypted.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:sesame", "-out", str(encrypted)],
        check=True,
        capture_output=True,
    )
    return certificate, encrypted


def test_nobody_is_asked_for_a_password_on_the_terminal(tmp_path: Path) -> None:
    """A process that has one would wait there for ever."""
    certificate, encrypted = encrypted_key(tmp_path)
    code = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from headwater.client.settings import TlsSettings\n"
        f"TlsSettings(certificate_file={str(certificate)!r}, key_file={str(encrypted)!r}).context()"
    )
    ours, theirs = os.openpty()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdin=theirs, capture_output=True, timeout=60, start_new_session=True
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"InvalidInput: the client certificate" in ended.stderr


def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    certificate, encrypted = encrypted_key(tmp_path)
    TlsSettings(certificate_file=certificate, key_file=encrypted, key_password="sesame").context()
    for password in (None, "abracadabra"):
        with pytest.raises(InvalidInput, match="can't be used"):
            TlsSettings(certificate_file=certificate, key_file=encrypted, key_password=password).context()


def test_the_key_may_be_in_the_same_file(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    settings = TlsSettings(certificate_file=both)
    settings.context()
    assert settings.has_certificate
    assert not TlsSettings().has_certificate


def test_a_key_needs_a_certificate() -> None:
    for parts in ({"key_file": "key.pem"}, {"key_password": "sesame"}):
        with pytest.raises(InvalidInput, match="no client certificate"):
            TlsSettings(**parts)


def test_settings_travel_and_do_not_tell(tmp_path: Path) -> None:
    settings = TlsSettings(ca_file=tmp_path / "ca.pem", certificate_file="c.pem", key_file="k.pem", key_password="s3s")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "s3s" not in repr(settings)

"""TLS settings with the keys that openssl writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headwater.client.settings import TlsSettings
from headwater.errors import InvalidInput
from support.forked_program import run_program
from support.machine import self_signed


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


def test_no_password_is_asked_for_on_the_terminal(tmp_path: Path) -> None:
    """A process that has one would wait there for ever."""
    certificate, encrypted = encrypted_key(tmp_path)
    code = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from headwater.client.settings import TlsSettings\n"
        f"TlsSettings(certificate_file={str(certificate)!r}, key_file={str(encrypted)!r}).context()"
    )
    ours, theirs = os.openpty()
    try:
        ended = run_program("-c", code, stdin=theirs, timeout=60, start_new_session=True)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "InvalidInput: the client certificate" in ended.stderr


def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    certificate, encrypted = encrypted_key(tmp_path)
    TlsSettings(certificate_file=certificate, key_file=encrypted, key_password="sesame").context()
    for password in (None, "abracadabra"):
        with pytest.raises(InvalidInput, match="can't be used"):
            TlsSettings(certificate_file=certificate, key_file=encrypted, key_password=password).context()

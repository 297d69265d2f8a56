"""Certificates for tests with TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for loopback that vouches for itself, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


class Authority:
    """An authority of one's own, which vouches for the certificates of several nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate, self._key = folder / "authority.pem", folder / "authority.key"
        _openssl("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=an authority",
                 "-keyout", self._key, "-out", self.certificate)  # fmt: skip

    def certify(self, name: str) -> tuple[Path, Path]:
        """A certificate for loopback with that of the authority behind it, and its key."""
        chain, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", "-new", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial",
                 "-days", "2", "-extfile", extensions, "-out", chain)  # fmt: skip
        chain.write_text(chain.read_text() + self.certificate.read_text())
        return chain, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

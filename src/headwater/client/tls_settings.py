"""TLS as a user asks for it: whom to trust, and which certificate to show.

Settings name files and hold no context of TLS, so that they can be sent to other processes.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from headwater.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Whom to trust, and who we are."""

    ca_file: Path | str | None = None
    """Certificates to trust instead of the system's."""
    skip_verify: bool = False
    """Trust anybody: the bytes are encrypted, but who reads them is unknown."""
    certificate_file: Path | str | None = None
    """A client certificate, in PEM, and those that vouch for it. The server takes the user from it: see `handshake`."""
    key_file: Path | str | None = None
    """The key of the client certificate, where it is not in the same file."""
    key_password: str | None = field(default=None, repr=False)
    """What the key is encrypted with."""

    def __post_init__(self) -> None:
        if self.certificate_file is None and (self.key_file is not None or self.key_password is not None):
            raise InvalidInput(
                "there is a key, but no client certificate that it belongs to", hint="Give certificate_file, too"
            )

    @property
    def has_certificate(self) -> bool:
        return self.certificate_file is not None

    def context(self) -> ssl.SSLContext:
        """A context for connections by these settings, or `InvalidInput` where their files can't be used."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(
                f"the CA file {self.ca_file} can't be used: {error}", hint="Give certificates in PEM form"
            ) from error
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_file is not None:
            self._load_certificate(context, str(self.certificate_file))
        return context

    def _load_certificate(self, context: ssl.SSLContext, certificate_file: str) -> None:
        key_file = None if self.key_file is None else str(self.key_file)
        try:
            # Without a password OpenSSL would ask for one on the terminal, and wait.
            context.load_cert_chain(certificate_file, key_file, self.key_password or "")
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(
                f"the client certificate {certificate_file} can't be used: {error}",
                hint="Give a certificate and its key in PEM form, and key_password if the key is encrypted",
            ) from error

"""How one operation, or a whole request, ends in a status other than success."""

from __future__ import annotations

from headwater.protocol.status import Status

XATTR_UNKNOWN_VATTR_MACRO = Status(0xD5)
CAN_ONLY_REVIVE_DELETED_DOCUMENTS = Status(0xD6)
DELETED_DOCUMENT_CANT_HAVE_VALUE = Status(0xD7)


class SubdocFailure(Exception):
    """The status an operation ends in. It never leaves this package: callers get outcomes."""

    def __init__(self, status: Status, reason: str = "") -> None:
        self.status = status
        self.reason = reason
        super().__init__(reason or status.name)

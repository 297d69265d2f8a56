"""The kinds of integers DCP is made of, so that the type checker keeps them apart."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NewType, Self

VBucketId = NewType("VBucketId", int)
Seqno = NewType("Seqno", int)
Vbuuid = NewType("Vbuuid", int)
Cas = NewType("Cas", int)
CollectionId = NewType("CollectionId", int)
ScopeId = NewType("ScopeId", int)
ManifestUid = NewType("ManifestUid", int)

SEQNO_MAX = Seqno(2**64 - 1)
"""As the end of a stream request: never end."""

DEFAULT_COLLECTION = CollectionId(0)
DEFAULT_SCOPE = ScopeId(0)


class OpenIntEnum(IntEnum):
    """An enumeration that keeps numbers it does not know.

    Servers grow new opcodes, statuses and reasons; a client that fails on them is broken by the next release.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or value < 0:
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_0x{value:02x}"
        member._value_ = value
        return member

    @property
    def is_known(self) -> bool:
        return self._name_ in type(self).__members__


class OpenIntFlag(IntFlag):
    """Flags that keep bits they do not know, without remembering every combination a peer has sent.

    The standard library holds each value it has seen for ever, and a peer has 2**32 of them to send.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self:
        flags: Self = super()._missing_(value)
        known_bits = sum(int(flag) for flag in cls)
        if flags.value & ~known_bits:
            cls._value2member_map_.pop(flags.value, None)
        return flags

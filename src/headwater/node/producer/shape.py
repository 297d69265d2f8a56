"""The shape in which a consumer gets changes: what it has asked for, and what it has asked to be without."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

STRIP_PREFIX = 0x01
INCLUDE_XATTRS = 0x02
INCLUDE_DELETED_USER_XATTRS = 0x04
INCLUDE_DELETE_TIMES = 0x08
EXPIRY_OPCODE = 0x10
COMPRESS = 0x20
SYNC_WRITES = 0x40
VALUES_SHIFT = 8
"""The bits from here on are one of `Values`."""


class Values(IntEnum):
    """What becomes of the values."""

    KEEP = 0
    DROP = 1
    DROP_BUT_KEEP_DATATYPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a consumer wants of each change: the same for all streams of a connection that ask for the same."""

    strip_prefix: bool = False
    values: Values = Values.KEEP
    include_xattrs: bool = True
    include_deleted_user_xattrs: bool = True
    """Attributes of removed documents that are not the system's."""
    include_delete_times: bool = True
    expiry_opcode: bool = True
    compress: bool = False
    """Values that get smaller by it are sent as snappy."""
    sync_writes: bool = False
    """The consumer takes part in durable writes: it gets prepares, commits and aborts as such."""
    bits: int = field(init=False, repr=False, compare=False)
    """The same as one number, for the kernels."""

    def __post_init__(self) -> None:
        bits = int(self.values) << VALUES_SHIFT
        for is_set, bit in (
            (self.strip_prefix, STRIP_PREFIX),
            (self.include_xattrs, INCLUDE_XATTRS),
            (self.include_deleted_user_xattrs, INCLUDE_DELETED_USER_XATTRS),
            (self.include_delete_times, INCLUDE_DELETE_TIMES),
            (self.expiry_opcode, EXPIRY_OPCODE),
            (self.compress, COMPRESS),
            (self.sync_writes, SYNC_WRITES),
        ):
            bits |= bit if is_set else 0
        object.__setattr__(self, "bits", bits)

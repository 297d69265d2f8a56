"""The datatype byte: how a value is to be read."""

from __future__ import annotations

from enum import IntFlag


class Datatype(IntFlag):
    RAW = 0x00
    JSON = 0x01
    SNAPPY = 0x02
    XATTR = 0x04

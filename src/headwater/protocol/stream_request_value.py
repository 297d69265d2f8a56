"""The JSON value of a stream request: filters, stream id, and what the consumer has seen.

Keys nobody knows are ignored. Collection and scope ids and the manifest uid are base-16 strings with no 0x, the purge
seqno is a base-10 string, the sid is a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headwater.errors import LocalProtocolError, MalformedJson
from headwater.protocol.limits import STREAM_ID_MAX, STREAM_REQUEST_VALUE_BYTES_MAX
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId, Seqno

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
T = TypeVar("T")
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransferOptions:
    free_memory_bytes: int = 0
    all_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequestValue:
    """What a stream request's value may say. The sid may be out of its range: that has a status of its own."""

    uid: ManifestUid | None = None
    sid: int | None = None
    collections: tuple[CollectionId, ...] | None = None
    scope: ScopeId | None = None
    purge_seqno: Seqno | None = None
    cache_transfer: CacheTransferOptions | None = None

    @property
    def is_filtered(self) -> bool:
        return self.collections is not None or self.scope is not None

    def encode(self) -> bytes:
        if self.collections is not None and self.scope is not None:
            raise LocalProtocolError("a stream filters by collections or by scope, not by both")
        members: dict[str, Any] = {}
        if self.uid is not None:
            members["uid"] = f"{self.uid:x}"
        if self.sid is not None:
            members["sid"] = self.sid
        if self.collections is not None:
            members["collections"] = [f"{collection:x}" for collection in self.collections]
        if self.scope is not None:
            members["scope"] = f"{self.scope:x}"
        if self.purge_seqno is not None:
            members["purge_seqno"] = str(self.purge_seqno)
        if self.cache_transfer is not None:
            members["cts"] = {
                "free_memory": self.cache_transfer.free_memory_bytes,
                "all_keys": self.cache_transfer.all_keys,
            }
        return json.dumps(members, separators=(",", ":")).encode() if members else b""

    @classmethod
    def decode(cls, value: bytes) -> StreamRequestValue:
        """Every fault is a `MalformedJson`, whose status is EINVAL."""
        if not value:
            return cls()
        if len(value) > STREAM_REQUEST_VALUE_BYTES_MAX:
            raise MalformedJson(f"a stream request value exceeds {STREAM_REQUEST_VALUE_BYTES_MAX} bytes")
        members = _object(value)
        if "collections" in members and "scope" in members:
            raise MalformedJson("collections and scope exclude each other")
        return cls(
            uid=_take(members, "uid", _uid),
            sid=_take(members, "sid", _sid),
            collections=_take(members, "collections", _collections),
            scope=_take(members, "scope", _scope),
            purge_seqno=_take(members, "purge_seqno", _purge_seqno),
            cache_transfer=_take(members, "cts", _cache_transfer),
        )


def _object(value: bytes) -> dict[str, Any]:
    try:
        members = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedJson(f"the stream request value is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise MalformedJson("the stream request value is not a JSON object")
    return members


def _take(members: dict[str, Any], name: str, convert: Callable[[object], T]) -> T | None:
    return convert(members[name]) if name in members else None


def _uid(value: object) -> ManifestUid:
    return ManifestUid(_hex(value, "uid", _U64_MAX))


def _sid(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= STREAM_ID_MAX:
        raise MalformedJson(f"sid must be an integer up to {STREAM_ID_MAX}")
    return value


def _collections(value: object) -> tuple[CollectionId, ...]:
    if not isinstance(value, list) or not value:
        raise MalformedJson("collections must be an array of at least one id")
    return tuple(CollectionId(_hex(member, "a collection id", _U32_MAX)) for member in value)


def _scope(value: object) -> ScopeId:
    return ScopeId(_hex(value, "scope", _U32_MAX))


def _purge_seqno(value: object) -> Seqno:
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 20:
        raise MalformedJson("purge_seqno must be a base-10 string")
    if int(value) > _U64_MAX:
        raise MalformedJson("purge_seqno exceeds 64 bits")
    return Seqno(int(value))


def _cache_transfer(value: object) -> CacheTransferOptions:
    if not isinstance(value, dict):
        raise MalformedJson("cts must be an object")
    free_memory, all_keys = value.get("free_memory", 0), value.get("all_keys", False)
    if not isinstance(free_memory, int) or isinstance(free_memory, bool):
        raise MalformedJson("cts.free_memory must be an integer")
    if not 0 <= free_memory <= _U64_MAX:
        raise MalformedJson("cts.free_memory must fit 64 bits, unsigned")
    if not isinstance(all_keys, bool):
        raise MalformedJson("cts.all_keys must be a boolean")
    return CacheTransferOptions(free_memory_bytes=free_memory, all_keys=all_keys)


def _hex(value: object, name: str, maximum: int) -> int:
    if not isinstance(value, str) or not value or not _HEX.issuperset(value) or len(value) > 16:
        raise MalformedJson(f"{name} must be a base-16 string with no 0x")
    number = int(value, 16)
    if number > maximum:
        raise MalformedJson(f"{name} {value} is too large")
    return number

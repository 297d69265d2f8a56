"""When documents expire: the number a client sends, as a time."""

from __future__ import annotations

from headwater.protocol.frame_info import RequestInfo, find
from headwater.protocol.limits import RELATIVE_EXPIRY_S_MAX
from headwater.protocol.messages.base import Request

_TIME_S_MAX = 2**32 - 1

NEVER = 0


def expiry_time(asked: int, *, now_s: int, max_ttl_s: int | None) -> int:
    """The time at which a document expires, in seconds since 1970; 0 for never.

    A small number counts from now, a large one is a time. A collection may bound the lives of its documents.
    """
    expiry = now_s + asked if NEVER < asked <= RELATIVE_EXPIRY_S_MAX else asked
    if max_ttl_s:
        bound = now_s + max_ttl_s
        expiry = bound if expiry == NEVER else min(expiry, bound)
    return min(expiry, _TIME_S_MAX)


def preserves_ttl(request: Request) -> bool:
    """The request asks to leave the expiry of a document that exists as it is."""
    return find(request.frame_infos, RequestInfo.PRESERVE_TTL) is not None

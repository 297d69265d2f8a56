"""The numbers of the UPR draft: opcodes (byte 1) and what byte 5 says under each of them."""

from __future__ import annotations

from enum import IntEnum

from headwater.protocol.numbers import OpenIntEnum
from headwater.protocol.opcodes import Magic


class UprOpcode(IntEnum):
    """All there are. memcached gives the same numbers to SET, ADD, REPLACE, DELETE and INCREMENT."""

    REQUEST = 1
    RESPONSE = 2
    STREAM_BEGIN = 3
    STREAM_MESSAGE = 4
    STREAM_CLOSE = 5

    @property
    def magic(self) -> Magic:
        """Only a request has the request magic: what a producer sends answers one, stream messages too."""
        return Magic.REQUEST if self is UprOpcode.REQUEST else Magic.RESPONSE


class RequestType(IntEnum):
    STREAM_REQUEST = 1
    FAILOVER_LOG_REQUEST = 2


class ResponseType(IntEnum):
    OK = 1
    NOT_MY_VBUCKET = 2
    """The failover log response is drawn with this number, too; see the package's own page for who is who."""
    ROLLBACK = 3


class StreamMessageType(IntEnum):
    SNAPSHOT_START = 1
    SNAPSHOT_END = 2
    MUTATION = 3
    DELETION = 4
    EXPIRATION = 5
    FLUSH = 6


class StreamEndReason(OpenIntEnum):
    """Why a stream ended. A number the draft does not know is kept: the stream has ended all the same."""

    OK = 1
    STATE_CHANGED = 2

"""Bytes <-> messages, and the decisions of the protocol.

Sans-IO: no socket, no clock, no random. The same logic runs under asyncio, in a blocking Spark worker and in the
simulation. What `__all__` names is public, and loaded when it is first used; the modules below may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.errors import RemoteProtocolError
    from headwater.protocol.failover_log import ConsumerPoint, FailoverEntry, FailoverLog, decide_rollback
    from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Feature, Magic, Negotiated, Opcode
    from headwater.protocol.frames import Frame, FrameBuffer, decode_frames
    from headwater.protocol.messages import ErrorResponse, Message, PlainResponse, Request, Response, decode_message
    from headwater.protocol.messages.dcp_changes import (
        Abort,
        CacheItem,
        CacheTransfer,
        CacheTransferEnd,
        Commit,
        DcpFlush,
        Deletion,
        Expiration,
        Mutation,
        OsoFlags,
        OsoSnapshot,
        Prepare,
        SeqnoAcknowledged,
        SeqnoAdvanced,
        SnapshotFlags,
        SnapshotMarker,
        SystemEvent,
        SystemEventId,
    )
    from headwater.protocol.messages.dcp_streams import (
        AddStream,
        AddStreamResponse,
        BufferAck,
        CloseStream,
        Control,
        DcpNoop,
        GetFailoverLog,
        GetFailoverLogResponse,
        Open,
        OpenFlags,
        SetVBucketState,
        StreamEnd,
        StreamEndReason,
        StreamFlags,
        StreamRequest,
        StreamRequestResponse,
        VBucketState,
    )
    from headwater.protocol.messages.session import (
        ClustermapChangeNotification,
        Flush,
        FlushQuiet,
        GetClusterConfig,
        GetErrorMap,
        Hello,
        HelloResponse,
        Noop,
        Quit,
        QuitQuiet,
        SaslAuth,
        SaslListMechanisms,
        SaslStep,
        SelectBucket,
        SetClusterConfig,
        Stat,
        Verbosity,
        Version,
    )
    from headwater.protocol.numbers import CollectionId, ScopeId, Seqno, VBucketId, Vbuuid
    from headwater.protocol.snapshots import SnapshotTracker, StreamOffset
    from headwater.protocol.status import Status

_HOMES = (
    "headwater.errors", "headwater.protocol.numbers", "headwater.protocol.features", "headwater.protocol.status",
    "headwater.protocol.frames", "headwater.protocol.failover_log", "headwater.protocol.messages",
    "headwater.protocol.messages.dcp_changes", "headwater.protocol.messages.dcp_streams",
    "headwater.protocol.messages.session", "headwater.protocol.snapshots",
)  # fmt: skip
"""The modules that define the public names, each after those that it imports."""

__all__ = [
    "NOTHING_NEGOTIATED", "WITH_COLLECTIONS", "Abort", "AddStream", "AddStreamResponse", "BufferAck", "CacheItem",
    "CacheTransfer", "CacheTransferEnd", "CloseStream", "ClustermapChangeNotification", "CollectionId", "Commit",
    "ConsumerPoint", "Control", "DcpFlush", "DcpNoop", "Deletion", "ErrorResponse", "Expiration", "FailoverEntry",
    "FailoverLog", "Feature", "Flush", "FlushQuiet", "Frame", "FrameBuffer", "GetClusterConfig", "GetErrorMap",
    "GetFailoverLog", "GetFailoverLogResponse", "Hello", "HelloResponse", "Magic", "Message", "Mutation",
    "Negotiated", "Noop", "Opcode", "Open", "OpenFlags", "OsoFlags", "OsoSnapshot", "PlainResponse", "Prepare",
    "Quit", "QuitQuiet", "RemoteProtocolError", "Request", "Response", "SaslAuth", "SaslListMechanisms", "SaslStep",
    "ScopeId", "SelectBucket", "Seqno", "SeqnoAcknowledged", "SeqnoAdvanced", "SetClusterConfig", "SetVBucketState",
    "SnapshotFlags", "SnapshotMarker", "SnapshotTracker", "Stat", "Status", "StreamEnd", "StreamEndReason",
    "StreamFlags", "StreamOffset", "StreamRequest", "StreamRequestResponse", "SystemEvent", "SystemEventId",
    "VBucketId", "VBucketState", "Vbuuid", "Verbosity", "Version", "decide_rollback", "decode_frames",
    "decode_message",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Most names asked for here are modules of this package, which the import system asks for first.
    for home in _HOMES if name in __all__ else ():
        module = import_module(home)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""The handler that tells of the connections that get changes of a bucket, and of their streams."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from headwater.node.http.answers import Json
from headwater.node.http.call import Call
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics
from headwater.protocol.numbers import SEQNO_MAX


async def show_connections(call: Call) -> Response:
    """All connections, or the one that the query names."""
    bucket = call.bucket.name
    name = call.request.query_params.get("connection")
    told = connection_statistics(call.node.producer_connections(bucket), now_s=call.node.now_s(), name=name)
    return Json({"bucket": bucket, "connections": [_as_json(connection) for connection in told]})


def _as_json(connection: ConnectionStatistics) -> dict[str, Any]:
    members = asdict(connection)
    for stream in members["streams"] or ():
        if stream["end_seqno"] == SEQNO_MAX:
            # No end. The number itself is more than a page's script can hold.
            stream["end_seqno"] = None
    return members

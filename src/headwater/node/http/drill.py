"""The handlers of the drills: a vbucket is rolled back (`node.failover_drill`), or the copies fall behind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from headwater.errors import InvalidInput
from headwater.log_fields import LogEvent
from headwater.node.http.call import Call, Json, Refusal
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics
from headwater.phrases import counted
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId

_VBUCKET_MAX = 0xFFFF


async def roll_back(call: Call) -> Response:
    """Take a vbucket back to a seqno, as a failover to a copy that is behind would."""
    bucket = call.bucket.name
    vbucket = _number(call.path("vbucket"), _VBUCKET_MAX, field="vbucket")
    form = await call.form("to")
    if "to" not in form:
        raise Refusal.errors(400, "The seqno is missing", field="to")
    to_seqno = _number(form["to"], SEQNO_MAX, field="to")
    try:
        rolled = await call.node.roll_back(bucket, VBucketId(vbucket), Seqno(to_seqno))
    except InvalidInput as error:
        raise Refusal.errors(400, str(error)) from error
    call.node.log(
        f"{call.user!r} rolled vbucket {rolled.vbucket} of bucket {bucket!r} back"
        f" from {rolled.high_seqno_before} to {rolled.to_seqno}",
        event=LogEvent.ROLLED_BACK,
        user=call.user,
        bucket=bucket,
        vbucket=rolled.vbucket,
        from_seqno=rolled.high_seqno_before,
        seqno=rolled.to_seqno,
        vbuuid=rolled.vbuuid,
    )
    return Json(
        {
            "vbucket": rolled.vbucket,
            "rolled_back_to": rolled.to_seqno,
            "vbuuid": rolled.vbuuid,
            "high_seqno_before": rolled.high_seqno_before,
        }
    )


async def hold_replicas(call: Call) -> Response:
    """Take in no more changes for the copies on this node: if their active node dies, those are lost."""
    replicas = call.node.hold_replicas(call.bucket.name)
    _log_replicas(call, "holds", replicas, LogEvent.REPLICAS_HELD)
    return Json({"held": True, "replicas": replicas})


async def release_replicas(call: Call) -> Response:
    replicas = call.node.release_replicas(call.bucket.name)
    _log_replicas(call, "released", replicas, LogEvent.REPLICAS_RELEASED)
    return Json({"held": False, "replicas": replicas})


def _log_replicas(call: Call, verb: str, replicas: int, event: LogEvent) -> None:
    bucket = call.bucket.name
    message = f"{call.user!r} {verb} {counted(replicas, 'replica')} of bucket {bucket!r}"
    call.node.log(message, event=event, user=call.user, bucket=bucket, replicas=replicas)


def _number(text: str, largest: int, *, field: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(largest)) else -1
    if not 0 <= number <= largest:
        raise Refusal.errors(400, f"A number from 0 to {largest}", field=field)
    return number


# The handler that tells of the connections that get changes of a bucket, and of their streams.


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

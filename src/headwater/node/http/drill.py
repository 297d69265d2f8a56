"""The handler of the failover drill (`node.failover_drill`)."""

from __future__ import annotations

from starlette.responses import Response

from headwater.errors import InvalidInput
from headwater.node.http.answers import Json, Refusal
from headwater.node.http.call import Call
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
        f" from {rolled.high_seqno_before} to {rolled.to_seqno}"
    )
    return Json(
        {
            "vbucket": rolled.vbucket,
            "rolled_back_to": rolled.to_seqno,
            "vbuuid": rolled.vbuuid,
            "high_seqno_before": rolled.high_seqno_before,
        }
    )


def _number(text: str, largest: int, *, field: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(largest)) else -1
    if not 0 <= number <= largest:
        raise Refusal.errors(400, f"A number from 0 to {largest}", field=field)
    return number

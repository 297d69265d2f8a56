"""The UPR draft: DCP's forerunner, the same ideas in another wire format (seed `004_76bf363098cb3e8e.txt`).

The header is memcached's 24 bytes, so `frames` cuts it; its meaning is the draft's own:

    byte  1      opcode: 1 request, 2 response, 3 stream begin, 4 stream message, 5 stream close
    byte  5      request type: which request, response or stream message it is, or why a stream ends
    bytes 6-7    vbucket, in responses too
    bytes 12-15  request id

In a `Frame` these are `opcode`, `datatype`, `specific` and `opaque`.

A consumer sends requests. A producer answers each one, and a stream request that it grants also with a
stream: begin, then snapshots, each between a start and an end, then stream end. All of that has the response
magic and the request's id. The opcodes are memcached's own under other names: a listener speaks UPR or
memcached, as no byte of a packet tells which.

The draft contradicts itself in places. What is settled here, and why (the errata of its drawings are listed
in `tests/vectors/seeds/ERRATA.md`):

* Lengths. We send the drawn layout with lengths that are true. A received packet whose lengths are not those
  of its layout is refused, and so are the lengths the draft prints: 8 too long, or 0 where data follows.
* Rollback seqno and failover log lie in the value. Their packets print an extras length of 0.
* Response type 2 is "not my vbucket" in the list of types and in one drawing, and the failover log response
  in another. The body decides: without one it is `NotMyVBucket`, with one it is `FailoverLogResponse`.
* A failover log thus has 1 to 1024 pairs, as one of the draft's sentences has it. The other allows none,
  which cannot be told from "not my vbucket" and need not be: a vbucket that is here has a history, and that a
  name.
* `NotMyVBucket` answers a failover log request as well; the draft draws it for stream requests only.
* `StreamOk` has no body. The failover log that DCP puts there has to be asked for here.
* Opcode 3 is called stream begin in the list of opcodes and stream start above its drawing, opcode 5 stream
  close and stream end. The packets are `StreamBegin` (start is what a snapshot does) and `StreamEnd` (as in
  the text).
* A group id may be empty, since a stream may have no name. It is sent as the key and has a key's limit of 250
  bytes. A document's key has at least one byte.
* Deletion and expiration have no value: none is drawn.
* An unknown opcode or type is refused, as nothing says what its body would be. An unknown reason of a stream
  end is kept. The CAS of a packet about no document ought to be 0; another number is kept and encoded again.
"""

from headwater.protocol.upr.packets import (
    FAILOVER_LOG_PAIRS_MAX,
    HEADER_LAYOUT,
    PACKETS,
    Change,
    Deletion,
    Expiration,
    FailoverLogRequest,
    FailoverLogResponse,
    Flush,
    Mutation,
    NotMyVBucket,
    Packet,
    RequestType,
    ResponseType,
    Rollback,
    SnapshotEnd,
    SnapshotStart,
    StreamBegin,
    StreamEnd,
    StreamEndReason,
    StreamMessageType,
    StreamOk,
    StreamRequest,
    UprOpcode,
    WireField,
    decode_packet,
    wire_fields,
)

__all__ = [
    "FAILOVER_LOG_PAIRS_MAX",
    "HEADER_LAYOUT",
    "PACKETS",
    "Change",
    "Deletion",
    "Expiration",
    "FailoverLogRequest",
    "FailoverLogResponse",
    "Flush",
    "Mutation",
    "NotMyVBucket",
    "Packet",
    "RequestType",
    "ResponseType",
    "Rollback",
    "SnapshotEnd",
    "SnapshotStart",
    "StreamBegin",
    "StreamEnd",
    "StreamEndReason",
    "StreamMessageType",
    "StreamOk",
    "StreamRequest",
    "UprOpcode",
    "WireField",
    "decode_packet",
    "wire_fields",
]

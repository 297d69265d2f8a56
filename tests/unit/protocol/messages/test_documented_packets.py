"""Packets that kv_engine's documents draw, byte by byte: each decodes to what stands beside it, and encodes back.

From engines/ep/docs/protocol (set_with_meta.md, del_with_meta.md), docs/range_scans and
docs/dcp/documentation/commands/random_key.md. Where a drawing's own lengths do not fit its bytes, they are corrected
here: the extras of both writes with metadata have 30 bytes (drawn: 26), so their bodies have 42 and 35, and the answer
of a random key has the flags of a get, as servers send them, which the drawing leaves out.
"""

from __future__ import annotations

from headwater.protocol.features import Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import Message, decode_message, documents
from headwater.protocol.messages.vbuckets import KeyState, Observe, ObservedDocument, ObservedKey, ObserveResponse
from headwater.protocol.numbers import Cas, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from support.cases import case

SCAN_ID = bytes.fromhex("00112233445566778899aabbccddeeff")
META = {
    "vbucket": VBucketId(3), "flags": 7, "expiry": 10, "rev_seqno": 20, "meta_cas": Cas(30),
    "options": documents.MetaOptions.FORCE_ACCEPT, "extended_meta": b"", "key": b"mykey",
}  # fmt: skip
META_EXTRAS = "00000007 0000000a 0000000000000014 000000000000001e 00000002 0000"
USER_RANGE = b'{"collection":"f2","range":{"end":"dXNlcv8=","start":"dXNlcg=="}}'
SCANNED = documents.ScannedDocument(
    flags=10, expiry=20, seqno=Seqno(30), cas=Cas(40), datatype=Datatype.JSON, key=b"key0", value=b"value0"
)


@case(
    f"80a20005 1e000003 0000002a 00000000 0000000000000000 {META_EXTRAS} 6d796b6579 6d7976616c7565",
    documents.SetWithMeta(**META, value=b"myvalue"),
)
@case(
    "81a20000 00000000 00000000 00000000 0000000000000001",
    documents.StoreResponse(opcode=Opcode.SET_WITH_META, cas=Cas(1)),
)
@case(
    f"80a80005 1e000003 00000023 00000000 0000000000000000 {META_EXTRAS} 6d796b6579", documents.DeleteWithMeta(**META)
)
@case("80b60000 00000000 00000000 00000000 0000000000000000", documents.GetRandomKey())
@case(
    "81b60008 04000000 00000011 00000000 0000000000000000 00000000 72616e645f6b6579 76616c7565",
    documents.GetResponse(opcode=Opcode.GET_RANDOM_KEY, key=b"rand_key", value=b"value"),
)
@case(
    f"80da0000 00010000 {len(USER_RANGE):08x} 00001210 0000000000000000 {USER_RANGE.hex()}",
    documents.RangeScanCreate(opaque=0x1210, datatype=Datatype.JSON, value=USER_RANGE),
)
@case(
    "81da0000 00000000 00000010 00001210 0000000000000000 00112233445566778899aabbccddeeff",
    documents.RangeScanCreateResponse(opaque=0x1210, scan_id=SCAN_ID),
)
@case(
    f"80db0000 1c000000 0000001c 00000000 0000000000000000 {SCAN_ID.hex()} 000001f4 00000000 00000000",
    documents.RangeScanContinue(scan_id=SCAN_ID, items_max=500),
)
# The last key has 128 bytes, for a length of two.
@case(
    f"81db0000 040000a6 00000091 00000000 0000000000000000 00000000 04 6b657930 05 6b65793131 8001 {'32' * 128}",
    documents.RangeScanContinueResponse(
        status=Status.RANGE_SCAN_MORE, has_documents=0, keys=(b"key0", b"key11", b"2" * 128)
    ),
)
@case(
    (
        "81db0000 040000a7 00000029 00000000 0000000000000000 00000001"
        " 0000000a 00000014 000000000000001e 0000000000000028 01 04 6b657930 06 76616c756530"
    ),
    documents.RangeScanContinueResponse(status=Status.RANGE_SCAN_COMPLETE, has_documents=1, documents=(SCANNED,)),
)
@case(
    f"80dc0000 10000000 00000010 00000000 0000000000000000 {SCAN_ID.hex()}", documents.RangeScanCancel(scan_id=SCAN_ID)
)
@case(
    "80920000 00000000 0000000b 00000000 0000000000000000 0001 0001 61 0002 0002 6262",
    Observe(keys=(ObservedKey(vbucket=VBucketId(1), key=b"a"), ObservedKey(vbucket=VBucketId(2), key=b"bb"))),
)
@case(
    "81920000 00000000 0000000e 00000000 0000000000000000 0001 0001 61 01 0000000000000007",
    ObserveResponse(
        documents=(ObservedDocument(vbucket=VBucketId(1), key=b"a", state=KeyState.PERSISTED, cas=Cas(7)),)
    ),
)
def test_a_packet_as_it_is_drawn(packet: str, expected: Message) -> None:
    data = bytes.fromhex(packet)
    (frame,) = decode_frames(data)
    assert decode_message(frame) == expected
    assert expected.encode() == data

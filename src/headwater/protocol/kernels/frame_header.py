"""The header of a frame, for kernels, which read it by offset. Its numbers are big-endian.

     0  magic
     1  opcode
     2  length of the key; in flexible framing one byte for the framing extras and one for the key
     4  length of the extras
     5  datatype
     6  vbucket; the status of a response
     8  length of the body, which is all that follows the header
    12  opaque
    16  CAS
    24  framing extras, extras, key, value

The extras of every change begin with its seqno and, but for aborts, its revision. What kernels compare bytes with has
to be a plain number, so the members of the enumerations that they need stand here as such.
"""

from __future__ import annotations

from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import RequestInfo
from headwater.protocol.kernels.memory import Bytes, i64, kernel_part, load_u16, load_u32, u64
from headwater.protocol.values import Datatype

REQUEST = int(Magic.REQUEST)
RESPONSE = int(Magic.RESPONSE)
FLEXIBLE_REQUEST = int(Magic.FLEXIBLE_REQUEST)
FLEXIBLE_RESPONSE = int(Magic.FLEXIBLE_RESPONSE)
SERVER_REQUEST = int(Magic.SERVER_REQUEST)
SERVER_RESPONSE = int(Magic.SERVER_RESPONSE)

GET = int(Opcode.GET)
GETQ = int(Opcode.GETQ)
GETK = int(Opcode.GETK)
GETKQ = int(Opcode.GETKQ)
SET = int(Opcode.SET)
SETQ = int(Opcode.SETQ)
SUBDOC_GET = int(Opcode.SUBDOC_GET)
SUBDOC_EXISTS = int(Opcode.SUBDOC_EXISTS)
SUBDOC_MULTI_LOOKUP = int(Opcode.SUBDOC_MULTI_LOOKUP)
MUTATION = int(Opcode.DCP_MUTATION)
DELETION = int(Opcode.DCP_DELETION)
EXPIRATION = int(Opcode.DCP_EXPIRATION)
SYSTEM_EVENT = int(Opcode.DCP_SYSTEM_EVENT)
PREPARE = int(Opcode.DCP_PREPARE)
COMMIT = int(Opcode.DCP_COMMIT)
ABORT = int(Opcode.DCP_ABORT)

RAW = int(Datatype.RAW)
JSON = int(Datatype.JSON)
SNAPPY = int(Datatype.SNAPPY)
XATTR = int(Datatype.XATTR)

MUTATION_EXTRAS_BYTES = 31
DELETION_EXTRAS_BYTES = 18
"""Of one without a time."""
TIMED_DELETION_EXTRAS_BYTES = 21
EXPIRATION_EXTRAS_BYTES = 20
PREPARE_EXTRAS_BYTES = 31
ABORT_EXTRAS_BYTES = 16
SYSTEM_EVENT_EXTRAS_BYTES = 13

STREAM_ID_BYTES = 3
"""The frame info that names the stream of a change: a byte for the kind and the length, then the id."""
STREAM_ID_KIND = RequestInfo.STREAM_ID << 4 | 2


@kernel_part
def is_magic(byte: int) -> bool:
    return bool(
        byte == REQUEST or byte == RESPONSE or byte == FLEXIBLE_REQUEST or byte == FLEXIBLE_RESPONSE
        or byte == SERVER_REQUEST or byte == SERVER_RESPONSE
    )  # fmt: skip


@kernel_part
def is_document_change(opcode: int) -> bool:
    """Mutations, deletions and expirations, whose opcodes follow one another."""
    return bool(MUTATION <= opcode <= EXPIRATION)


@kernel_part
def stated_lengths(data: Bytes, at: int) -> tuple[int, int, int, int]:
    """The lengths of framing extras, extras, key and body that the header at `at` states."""
    extras_bytes = i64(data[at + 4])
    body_bytes = i64(load_u32(data, at + 8))
    if data[at] == FLEXIBLE_REQUEST or data[at] == FLEXIBLE_RESPONSE:
        return i64(data[at + 2]), extras_bytes, i64(data[at + 3]), body_bytes
    return i64(0), extras_bytes, i64(load_u16(data, at + 2)), body_bytes


# The collection id at the front of a key, for kernels: unsigned LEB128, as `leb128` has it for one key at a time.


@kernel_part
def prefix_bytes(data: Bytes, at: int, end: int) -> int:
    """The length of the collection id at `at`; 0 where it is cut off, overlong or beyond 32 bits."""
    for index in range(5):
        if at + index >= end:
            return 0
        byte = data[at + index]
        if byte < 0x80:
            overlong = byte == 0 and index > 0
            too_large = index == 4 and byte > 0x0F
            return 0 if overlong or too_large else index + 1
    return 0


@kernel_part
def collection_id(data: Bytes, at: int) -> int:
    """The collection id at `at`, which `prefix_bytes` has found sound."""
    value = u64(0)
    shift = u64(0)
    while data[at] >= 0x80:
        value |= u64(data[at] & 0x7F) << shift
        shift += u64(7)
        at += 1
    return value | (u64(data[at]) << shift)

"""DCP messages that are changes: mutation, deletion, expiration, flush, and the life of a durable write."""

from __future__ import annotations

from headwater.protocol.frame_info import DurabilityLevel
from headwater.protocol.messages.base import Request, message
from headwater.protocol.messages.layout import Layout, u8, u16, u32, u64
from headwater.protocol.numbers import CollectionId, Seqno
from headwater.protocol.opcodes import Opcode

_V1_REMOVAL = Layout(u64("seqno"), u64("rev_seqno"), u16("nmeta"))


@message
class Mutation(Request):
    opcode = Opcode.DCP_MUTATION
    layouts = (
        Layout(
            u64("seqno"),
            u64("rev_seqno"),
            u32("flags"),
            u32("expiry"),
            u32("lock_time"),
            u16("nmeta"),
            u8("nru"),
        ),
    )

    seqno: Seqno
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    nmeta: int = 0
    """Bytes of extended metadata at the end of the value. Servers since 5.0 send none."""
    nru: int = 0
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message
class Deletion(Request):
    """Version 2, with the time of the deletion, where delete times were asked for; else version 1."""

    opcode = Opcode.DCP_DELETION
    layouts = (_V1_REMOVAL, Layout(u64("seqno"), u64("rev_seqno"), u32("delete_time"), u8("unused")))

    seqno: Seqno
    rev_seqno: int
    nmeta: int = 0
    delete_time: int | None = None
    unused: int = 0
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""
    """The extended attributes that outlive the document, where there are any."""

    def layout(self) -> Layout:
        return self.layouts[0 if self.delete_time is None else 1]


@message
class Expiration(Request):
    """Sent to consumers that enabled the expiry opcode; others get a deletion. Before 6.5 it had no delete time."""

    opcode = Opcode.DCP_EXPIRATION
    layouts = (_V1_REMOVAL, Layout(u64("seqno"), u64("rev_seqno"), u32("delete_time")))

    seqno: Seqno
    rev_seqno: int
    nmeta: int = 0
    delete_time: int | None = None
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""

    def layout(self) -> Layout:
        return self.layouts[0 if self.delete_time is None else 1]


@message
class DcpFlush(Request):
    """Drop everything of the vbucket. Newer servers no longer send it."""

    opcode = Opcode.DCP_FLUSH


@message
class Prepare(Request):
    """A durable write has begun. Its flow-control size counts two bytes more than are sent."""

    opcode = Opcode.DCP_PREPARE
    layouts = (
        Layout(
            u64("seqno"),
            u64("rev_seqno"),
            u32("flags"),
            u32("expiry"),
            u32("lock_time"),
            u8("nru"),
            u8("deleted"),
            u8("durability", DurabilityLevel),
        ),
    )

    seqno: Seqno
    rev_seqno: int
    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    nru: int = 0
    deleted: int = 0
    durability: DurabilityLevel
    collection_id: CollectionId | None = None
    key: bytes
    value: bytes = b""


@message
class SeqnoAcknowledged(Request):
    """The consumer has prepared everything up to this seqno."""

    opcode = Opcode.DCP_SEQNO_ACKNOWLEDGED
    layouts = (Layout(u64("prepared_seqno")),)

    prepared_seqno: Seqno


@message
class Commit(Request):
    opcode = Opcode.DCP_COMMIT
    layouts = (Layout(u64("prepared_seqno"), u64("commit_seqno")),)

    prepared_seqno: Seqno
    commit_seqno: Seqno
    collection_id: CollectionId | None = None
    key: bytes


@message
class Abort(Request):
    opcode = Opcode.DCP_ABORT
    layouts = (Layout(u64("prepared_seqno"), u64("abort_seqno")),)

    prepared_seqno: Seqno
    abort_seqno: Seqno
    collection_id: CollectionId | None = None
    key: bytes

"""Values between clients and the store: inflated, measured, with the datatype that they really have.

What is stored is never compressed. Extended attributes stand in front of the body; plain commands neither bring nor see
them, and a new body leaves those there are in place.
"""

from __future__ import annotations

from headwater.errors import MalformedSnappy
from headwater.node.kv.context import Context, Refused
from headwater.protocol.compression import decompress, decompressed_bytes
from headwater.protocol.datatype import Datatype
from headwater.protocol.features import Feature
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.limits import VALUE_BYTES_MAX
from headwater.protocol.status import Status
from headwater.protocol.xattrs import body_offset
from headwater.store.documents import Document
from headwater.store.runs import as_run


def received_body(context: Context, value: bytes) -> bytes:
    """The body that a client sends, inflated."""
    datatype = context.request.datatype
    if int(datatype) & ~int(_allowed(context)):
        raise Refused(Status.EINVAL, f"datatype 0x{datatype:02x} was not negotiated, or is not for this command")
    if datatype & Datatype.SNAPPY:
        value = _inflated(value)
    check_size(value)
    return value


def check_size(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise Refused(Status.E2BIG, f"a value has at most {VALUE_BYTES_MAX} bytes")


def split_value(document: Document) -> tuple[bytes, bytes]:
    """The section of extended attributes, which may be empty, and the body."""
    at = body_offset(document.value) if document.datatype & Datatype.XATTR else 0
    return document.value[:at], document.value[at:]


def body_of(document: Document) -> bytes:
    return split_value(document)[1]


def join_value(xattrs: bytes, body: bytes) -> tuple[bytes, Datatype]:
    """The value to store and its datatype: the body is JSON if it is, whatever its writer says."""
    value = xattrs + body
    check_size(value)
    datatype = Datatype.JSON if is_json(as_run(body), 0, len(body)) else Datatype.RAW
    return value, datatype | (Datatype.XATTR if xattrs else Datatype.RAW)


def _allowed(context: Context) -> Datatype:
    allowed = Datatype.JSON if context.session.understands_json else Datatype.RAW
    return allowed | (Datatype.SNAPPY if context.session.has(Feature.SNAPPY) else Datatype.RAW)


def _inflated(value: bytes) -> bytes:
    try:
        if decompressed_bytes(value) > VALUE_BYTES_MAX:
            raise Refused(Status.E2BIG, f"a value has at most {VALUE_BYTES_MAX} bytes when it is inflated")
        return decompress(value)
    except MalformedSnappy as error:
        raise Refused(Status.EINVAL, error.reason) from error

"""What a handler gets: the session it serves, the bucket it works on, and short ways to answer.

A handler takes a context and a request and returns its response, several, or None where it sends nothing. A refusal
is raised as `Refused`, which becomes an error response.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.node.durability import SyncWrite
from headwater.node.kv.service import BucketService, Service
from headwater.protocol.features import Opcode
from headwater.protocol.messages.base import ErrorResponse, PlainResponse, Request, Response
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype

if TYPE_CHECKING:
    from headwater.node.kv.session import KvSession

R = TypeVar("R", bound=Response)


class CloseConnection(Exception):
    """The connection is to be closed without an answer."""


class Refused(Exception):
    """The request is answered with an error status."""

    def __init__(self, status: Status, context: str = "", *, body: bytes | None = None, **members: Any) -> None:
        super().__init__(status.name)
        self.status = status
        self.context = context
        self.body = body
        """The JSON body, where there is one ready; the others are made of what follows."""
        self.members = members
        """More members of the JSON body, beside `error`."""


@dataclass(slots=True)
class Context:
    """One request in the making of its answer."""

    service: Service
    session: KvSession
    request: Request
    commit: int = field(default=0)
    """The commit that has to be durable before the answer may be sent; 0 for none."""
    after: bytes = b""
    """What follows the answer."""
    sync_write: SyncWrite | None = None
    """The durable write whose outcome decides what is answered."""

    @property
    def bucket_service(self) -> BucketService:
        """The selected bucket; a request that needs one and has none is refused."""
        selected = self.session.bucket
        if selected is None:
            raise Refused(Status.NO_BUCKET)
        return selected

    @property
    def collection_id(self) -> CollectionId:
        """The collection of the request's key, which must exist."""
        collection_id: CollectionId | None = getattr(self.request, "collection_id", None)
        if collection_id is None:
            return DEFAULT_COLLECTION
        manifest = self.bucket_service.bucket.manifest
        if manifest.collection_by_id(collection_id) is None:
            raise Refused(Status.UNKNOWN_COLLECTION, manifest_uid=f"{manifest.uid:x}")
        return collection_id

    def wait_for(self, commit: int) -> None:
        """Hold the answer until this commit is durable."""
        self.commit = max(self.commit, commit)

    def then_send(self, data: bytes) -> None:
        """Send this right behind the answer."""
        self.after += data

    def reply(self, kind: type[R], **fields: Any) -> R:
        return kind(opcode=Opcode(self.request.opcode), opaque=self.request.opaque, **fields)

    def ok(self, value: bytes = b"", **fields: Any) -> PlainResponse:
        return self.reply(PlainResponse, value=value, **fields)

    def error(self, refused: Refused, *, opcode: int | None = None) -> ErrorResponse:
        """The error response; `opcode` where the request could not even be decoded."""
        header: dict[str, Any] = {
            "opcode": Opcode(self.request.opcode if opcode is None else opcode),
            "opaque": self.request.opaque,
            "status": refused.status,
        }
        members = dict(refused.members)
        if refused.context:
            members["error"] = {"context": refused.context}
        if not members and refused.body is None:
            return ErrorResponse(**header)
        datatype = Datatype.JSON if self.session.understands_json else Datatype.RAW
        value = json.dumps(members, separators=(",", ":")).encode() if refused.body is None else refused.body
        return ErrorResponse(**header, datatype=datatype, value=value)

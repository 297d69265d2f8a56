"""A document's two texts, its body and its extended attributes, each checked once and only when it is needed."""

from __future__ import annotations

from functools import cached_property

from headwater.node.kv.subdocument.document import Document
from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.node.kv.subdocument.json_text import document_text, quote
from headwater.protocol.datatype import Datatype
from headwater.protocol.status import Status
from headwater.protocol.xattrs import ValueParts


class DocumentTexts:
    """The texts that the paths of a request point into."""

    def __init__(self, document: Document) -> None:
        self.document = document

    @cached_property
    def parts(self) -> ValueParts:
        return self.document.parts()

    @cached_property
    def body(self) -> str:
        if not self.document.datatype & Datatype.JSON:
            raise SubdocFailure(Status.SUBDOC_DOC_NOT_JSON)
        return document_text(self.parts.body)

    @cached_property
    def xattrs(self) -> str:
        """All extended attributes as one object, in which the first name of a path is the name of an attribute."""
        pairs = [quote(name).encode() + b":" + json for name, json in self.parts.xattrs.items()]
        return document_text(b"{" + b",".join(pairs) + b"}")

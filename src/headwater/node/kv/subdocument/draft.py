"""A document in the making: the mutations of a request apply to it one after the other."""

from __future__ import annotations

from headwater.node.kv.subdocument.document import SYSTEM_XATTR_PREFIX
from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.node.kv.subdocument.json_text import document_text, is_json, members, root
from headwater.node.kv.subdocument.lookup import get
from headwater.node.kv.subdocument.mutation import MUTATIONS
from headwater.node.kv.subdocument.request_checks import spec_path
from headwater.node.kv.subdocument.texts import DocumentTexts
from headwater.protocol.datatype import Datatype
from headwater.protocol.messages.subdocument import MutationSpec, PathFlags
from headwater.protocol.opcodes import Opcode
from headwater.protocol.status import Status
from headwater.protocol.xattrs import ValueParts


class Draft:
    """Holds its texts from one mutation to the next. The document it was made from is never touched."""

    def __init__(self, before: DocumentTexts) -> None:
        self._before = before
        self._body = before.parts.body
        self._body_text: str | None = None
        self._xattrs_text: str | None = None
        self.is_json = bool(before.document.datatype & Datatype.JSON)
        self.is_deleted = False

    def apply(self, spec: MutationSpec, value: bytes, *, create_parents: bool) -> str | None:
        """Applies one mutation. What it gives back goes to the client."""
        if spec.opcode == Opcode.SET:
            self._set_body(value, as_json=is_json(value))
            return None
        if spec.opcode == Opcode.DELETE:
            self._set_body(b"", as_json=False)
            self.is_deleted = True
            return None
        path = spec_path(spec)
        if spec.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
            self._set_body(get(self._read_xattrs(), path).encode(), as_json=True)
            return None
        mutate = MUTATIONS[spec.opcode]
        if spec.flags & PathFlags.XATTR:
            self._xattrs_text, result = mutate(self._read_xattrs(), path, value, create_parents=create_parents)
        else:
            self._body_text, result = mutate(self._read_body(), path, value, create_parents=create_parents)
        return result

    def parts(self) -> ValueParts:
        """What has become of the document."""
        xattrs = self._xattrs()
        if self.is_deleted:
            xattrs = {name: json for name, json in xattrs.items() if name.startswith(SYSTEM_XATTR_PREFIX)}
        return ValueParts(xattrs, self._body if self._body_text is None else self._body_text.encode())

    def _set_body(self, body: bytes, *, as_json: bool) -> None:
        self._body, self._body_text, self.is_json = body, None, as_json

    def _read_body(self) -> str:
        if self._body_text is not None:
            return self._body_text
        if not self.is_json:
            raise SubdocFailure(Status.SUBDOC_DOC_NOT_JSON)
        return document_text(self._body)

    def _read_xattrs(self) -> str:
        return self._before.xattrs if self._xattrs_text is None else self._xattrs_text

    def _xattrs(self) -> dict[str, bytes]:
        text = self._xattrs_text
        if text is None:
            return dict(self._before.parts.xattrs)
        start = root(text).start
        return {member.name: text[slice(*member.value)].encode() for member in members(text, start)}

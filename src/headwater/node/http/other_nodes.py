"""The other nodes of this node's cluster, asked over HTTP with the log-in of the request that is being answered.

What is done on every node needs a right on every node, so the user who asks for it is the one who does it: nodes have
no rights of their own over each other's buckets. Requests go to paths of our own, which concern one node alone.
"""

from __future__ import annotations

import asyncio
import base64
import http
import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from headwater.client.connection_string import Address
from headwater.errors import MalformedJson
from headwater.node.http.call import Call, Refusal
from headwater.node.http.limits import OTHER_NODE_BYTES_MAX, OTHER_NODE_S_MAX
from headwater.node.options import peer_context
from headwater.protocol.cluster_config import ClusterConfig, NodeAddress
from headwater.protocol.sasl import Credentials


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node answered, or why it did not."""

    status: int | None
    content: Any

    @property
    def is_done(self) -> bool:
        return self.status is not None and self.status < http.HTTPStatus.MULTIPLE_CHOICES

    @property
    def reason(self) -> str:
        """In words, of a node that has refused or could not be asked."""
        members = self.content if isinstance(self.content, dict) else {}
        errors = members.get("errors", members.get("message", self.content))
        words = errors.values() if isinstance(errors, dict) else [errors]
        return "; ".join(str(word) for word in words) or f"status {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNodes:
    """Those of the cluster that this node is in; none where it is alone."""

    nodes: tuple[NodeAddress, ...]
    credentials: Credentials = field(repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, call: Call) -> OtherNodes:
        """The nodes of the config that this node gives, or of the last one that it had, as the user who asks."""
        try:
            nodes = ClusterConfig.decode(call.node.cluster_config(None)).nodes
            is_member = any(node.is_this_node for node in nodes)
            others = tuple(node.address() for node in nodes if is_member and not node.is_this_node)
            others = others or call.node.identity.nodes
        except MalformedJson as error:
            raise Refusal.errors(503, f"The node's cluster can't be asked: {error.reason}") from error
        return cls(
            nodes=others, credentials=_credentials(call), tls=peer_context(call.node.options) if others else None
        )

    def seeds(self, this_node: NodeAddress) -> list[Address]:
        """The key-value addresses of all nodes, this one first, for a coordinator."""
        tls = self.tls is not None
        return [Address(node.host, node.kv_port_for(tls=tls)) for node in (this_node, *self.nodes)]

    async def ask(
        self, method: str, *path: str, form: Mapping[str, str] | None = None, only: Mapping[str, Reply] | None = None
    ) -> dict[str, Reply]:
        """Ask all of them at the same time, or those named in `only`. The answers are by their names."""
        asked = [node for node in self.nodes if only is None or node.kv_address in only]
        target = "/" + "/".join(quote(part, safe="") for part in path)
        replies = await asyncio.gather(*(asyncio.to_thread(self._ask, node, method, target, form) for node in asked))
        return {node.kv_address: reply for node, reply in zip(asked, replies, strict=True)}

    def _ask(self, node: NodeAddress, method: str, target: str, form: Mapping[str, str] | None) -> Reply:
        port = node.http_port if self.tls is None else node.http_tls_port
        if port is None:
            return Reply(None, "the config has no management port of it")
        login = base64.b64encode(f"{self.credentials.user}:{self.credentials.password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/x-www-form-urlencoded"}
        connection = (
            http.client.HTTPConnection(node.host, port, timeout=OTHER_NODE_S_MAX)
            if self.tls is None
            else http.client.HTTPSConnection(node.host, port, timeout=OTHER_NODE_S_MAX, context=self.tls)
        )
        try:
            connection.request(method, target, None if form is None else urlencode(form), headers)
            response = connection.getresponse()
            body = response.read(OTHER_NODE_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            return Reply(None, f"it can't be reached: {error}")
        finally:
            connection.close()
        try:
            return Reply(response.status, json.loads(body or b"null"))
        except (ValueError, RecursionError):
            return Reply(response.status, body.decode(errors="replace"))


def _credentials(call: Call) -> Credentials:
    """By which the request was let in: they have been checked, so the header can be read."""
    encoded = call.request.headers.get("authorization", "").partition(" ")[2]
    user, _, password = base64.b64decode(encoded).decode().partition(":")
    return Credentials(user, password)


def describe(failed: Mapping[str, Reply]) -> str:
    """Where something was not done, and why."""
    return "; ".join(f"not on {node}: {reply.reason}" for node, reply in failed.items())

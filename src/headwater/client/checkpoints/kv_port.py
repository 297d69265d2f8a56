"""What a checkpoint that lives in a bucket needs of a client: key-value requests, and no more of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.client.cluster_map import ClusterMap
from headwater.errors import StatusError
from headwater.protocol.messages import Request, Response
from headwater.protocol.numbers import CollectionId


class KvPort(Protocol):
    """Key-value requests to one bucket, each of which goes to the node that has its vbucket."""

    async def cluster_map(self) -> ClusterMap:
        """The newest map that is known."""

    async def collection_id(self, name: str | None) -> CollectionId | None:
        """The id of a collection, given as `scope.collection`; of the default one where none is named.

        None where the server knows no collections.
        """

    async def request(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        """The answers, in the order of the requests; a refusal is an answer, too.

        What may succeed later is tried again here, with a newer map where that is needed, and for a limited time. So a
        request may have been carried out although its answer is a refusal: the answer to the attempt before was lost.
        Raises `ConnectionFailed` where a node can't be reached in that time.
        """

    async def close(self) -> None:
        """Let go of the connections."""

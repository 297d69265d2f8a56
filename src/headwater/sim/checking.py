"""What is checked while a run goes on: a consumer between two snapshots holds what the server held at that seqno.

At the end of a run much that went wrong has been written over. The server's history window has all versions, so what
a consumer should hold at any time can be made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater.client.offsets import Offsets
from headwater.sim.checkers import differences, stored_changes
from headwater.sim.consumer_state import Document, Key, documents_of

if TYPE_CHECKING:
    from headwater.sim.node_host import NodeHost
    from headwater.sim.world import World


def check_against_history(
    world: World, name: str, documents: Callable[[int], dict[Key, Document]], offsets: Offsets
) -> None:
    """Complain where a consumer holds anything else than the server did, as far as that is known."""
    for vbucket, offset in offsets.offsets.items():
        host = world.active_host(vbucket)
        if host is None or not offset.is_complete or not _is_in_history(host, vbucket, offset.vbuuid, offset.seqno):
            continue
        then = documents_of(change for change in stored_changes(host.bucket, vbucket) if change[0] <= offset.seqno)
        held = documents(vbucket)
        for wrong in differences(name, _of_live_collections(host, held), _of_live_collections(host, then)):
            world.complain(f"vbucket {vbucket} at seqno {offset.seqno}: {wrong}")


def _is_in_history(host: NodeHost, vbucket: int, vbuuid: int, seqno: int) -> bool:
    facts = host.bucket.vbuckets.facts[vbucket]
    if facts is None or facts.failover_log.newest.vbuuid != vbuuid:
        return False
    return facts.history_start_seqno <= seqno <= int(host.bucket.vbuckets.durable_seqnos[vbucket])


def _of_live_collections(host: NodeHost, documents: dict[Key, Document]) -> dict[Key, Document]:
    """What a dropped collection held may go at any time."""
    live = {int(collection.id) for _, collection in host.bucket.manifest.collections()}
    return {key: document for key, document in documents.items() if key[0] in live}

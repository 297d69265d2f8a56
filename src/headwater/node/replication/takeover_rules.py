"""Which takeovers a node of a cluster takes part in: those that its config names, and no longer than it does.

Whoever coordinates may die, or be overtaken by somebody else, while its takeovers are on their way. The next one
publishes a config that freezes their vbuckets, and once both nodes have it, neither changes a state because of the old
takeover: not the one that takes over, which would become active, and not the one that hands over, which would be dead.
"""

from __future__ import annotations

from headwater.node.kv.service import BucketService
from headwater.node.kv.session import KvSession
from headwater.node.published_config import PublishedConfig
from headwater.protocol.messages.dcp_stream import StreamFlags


def end_takeovers(service: BucketService, config: PublishedConfig, this_node: int | None) -> None:
    """End the connections of takeovers that a newer config does not name."""
    for session in list(service.dcp_sessions.values()):
        if _takes_over(session, config, this_node) or _hands_over(session, config):
            session.end_dcp()


def _takes_over(session: KvSession, config: PublishedConfig, this_node: int | None) -> bool:
    streams = {} if session.consumer is None else session.consumer.streams
    return any(
        StreamFlags.TAKEOVER in stream.asked.flags and not config.is_handed_over_to(vbucket, this_node)
        for vbucket, stream in streams.items()
    )


def _hands_over(session: KvSession, config: PublishedConfig) -> bool:
    streams = {} if session.dcp is None else session.dcp.streams
    return any(
        stream.is_takeover and (vbucket not in config.handing_over or config.is_frozen(vbucket))
        for (vbucket, _), stream in streams.items()
    )

"""The replication of one bucket: brings what is streamed, and from where, in line with each new config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from headwater.client.kv_connection import Login
from headwater.node.kv.service import BucketService
from headwater.node.published_config import PublishedConfig, kv_address
from headwater.node.replication.replicator import Replicator, Source
from headwater.protocol.numbers import VBucketId


class ReplicationManager:
    """Has one replicator for every node that copies are streamed from."""

    def __init__(
        self,
        service: BucketService,
        *,
        login: Callable[[PublishedConfig], Login],
        random_bytes: Callable[[int], bytes],
        now_s: Callable[[], float],
    ) -> None:
        self._service = service
        self._login = login
        self._random_bytes = random_bytes
        self._now_s = now_s
        self._replicators: dict[str, Replicator] = {}
        self._ending: list[Replicator] = []
        self.is_held = False
        """Nothing is taken in: for a drill, in which copies have to be behind."""
        service.replication = self.statistics

    def follow(self, config: PublishedConfig, wanted: Mapping[int, list[int]], *, name: str) -> None:
        """Stream the vbuckets of each of these nodes, and nothing else. `name` is this node's."""
        login = self._login(config)
        names = config.names()
        by_name = {names[node]: (node, dict.fromkeys(vbuckets)) for node, vbuckets in wanted.items()}
        # What is no longer wanted goes first: a vbucket that has moved has one stream at a time.
        for source in list(self._replicators):
            there = by_name.get(source)
            if there is None or self._replicators[source].source.login.credentials != login.credentials:
                self._end(source)
            else:
                kept = [vbucket for vbucket in self._replicators[source].streaming() if vbucket in there[1]]
                self._replicators[source].follow(kept)
        for source, (node, vbuckets) in by_name.items():
            if source not in self._replicators:
                address = kv_address(config.nodes[node], tls=login.tls is not None)
                self._replicators[source] = Replicator(
                    self._service,
                    Source(address=address, login=login, this_name=name),
                    random_bytes=self._random_bytes,
                    now_s=self._now_s,
                    is_held=self.is_held,
                )
            self._replicators[source].follow([VBucketId(vbucket) for vbucket in vbuckets])

    def hold(self) -> int:
        """Let the copies fall behind, until `release` or the next start. Returns how many there are."""
        self.is_held = True
        for replicator in self._replicators.values():
            replicator.hold()
        return self._copies()

    def release(self) -> int:
        self.is_held = False
        for replicator in self._replicators.values():
            replicator.release()
        return self._copies()

    def _copies(self) -> int:
        return sum(len(replicator.wanted()) for replicator in self._replicators.values())

    def on_durable(self) -> None:
        for replicator in self._replicators.values():
            replicator.on_durable()

    def on_void(self) -> None:
        for replicator in self._replicators.values():
            replicator.on_void()

    def statistics(self) -> Iterator[tuple[str, object]]:
        """Of each copy: where it comes from, whether it does, and what of its snapshot is still to come."""
        numbers = self._service.bucket.vbuckets
        yield "held", "true" if self.is_held else "false"
        for source, replicator in self._replicators.items():
            streaming = replicator.streaming()
            yield f"{source}:connected", "true" if replicator.is_connected else "false"
            yield f"{source}:held_bytes", replicator.held_bytes
            for vbucket in replicator.wanted():
                facts = numbers.facts[vbucket]
                end = 0 if facts is None else facts.snapshot_end_seqno
                yield f"vb_{vbucket}:source", source
                yield f"vb_{vbucket}:stream", "open" if vbucket in streaming else "waiting"
                yield f"vb_{vbucket}:behind", max(0, end - int(numbers.durable_seqnos[vbucket]))

    async def stop(self) -> None:
        for source in list(self._replicators):
            self._end(source)
        for replicator in self._ending:
            await replicator.stop()

    def _end(self, source: str) -> None:
        replicator = self._replicators.pop(source)
        replicator.follow([])
        replicator.cancel()
        self._ending = [one for one in self._ending if not one.is_over] + [replicator]

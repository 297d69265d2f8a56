"""The reader, sans-IO: follows the vbuckets of a bucket over all its nodes, through failures, moves and rollbacks.

The edge (`asyncio_edge`) opens sockets as `commands` requests, passes in received bytes and the time, and sends what
the links have to send. The caller takes pieces. All decisions are made here, so the same reader runs under asyncio and
in a simulation; it never reads a clock, a socket or a random number by itself.

A vbucket has a stream on a link, waits for one, or is closed. It waits because a connection or stream was lost,
because it has moved, or because the server asked to retry later. Each wait has its start; if a vbucket waits for
longer than `give_up_after_s`, the read fails with the last error that prevented the stream.

Before the reader requests a stream that has an end, it requests the server's high seqnos: after a failover the new
history may be shorter than the requested end, and the stream would wait forever. For the same reason each poll checks
the ends of open streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headwater.client import links
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.delivery import Delivery, PersistenceGate, PersistenceHold
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import OpenSpool, Piece
from headwater.client.read_options import ReadOptions, Snapshots
from headwater.client.retries import Backoff, Tolerance, is_final
from headwater.client.vbucket_stream import AFTER_END, AfterEnd, StreamItem, StreamTerms, VBucketStream, refusal
from headwater.errors import (
    AccessDenied,
    BucketReplaced,
    ConnectionFailed,
    HeadwaterError,
    RemoteProtocolError,
    StatusError,
)
from headwater.protocol.consumer import RequestAnswered, StreamMessage, StreamRun
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, dcp_streams
from headwater.protocol.messages.dcp_changes import SnapshotMarker
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, ObserveSeqno
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRequestValue

REFUSALS_MAX = 3
"""How many times in a row a node may refuse a connection before the read fails."""


class GivingUp:
    """Decides when a read fails: immediately for errors that waiting can't fix, otherwise after a while."""

    def __init__(
        self, after_s: float | None, *, pool: links.LinkPool, streams: Mapping[VBucketId, VBucketStream]
    ) -> None:
        """With `after_s` None, the read waits forever."""
        self._after_s = after_s
        self._pool = pool
        self._streams = streams
        self._tolerance = Tolerance(within_s=after_s)

    def is_hopeless(self, slot: links.PooledLink, error: HeadwaterError, cluster_map: ClusterMap, now_s: float) -> bool:
        """A link was lost. Returns whether retrying is pointless."""
        if slot.is_ready:
            breaks_protocol = isinstance(error, RemoteProtocolError)
            return is_final(error) or (breaks_protocol and self._tolerance.ends_with(slot.address, now_s))
        # A node that has just left the cluster may refuse us; the other nodes soon send a map without it.
        is_insisting = self._pool.failures(slot.address).count >= REFUSALS_MAX
        return is_final(error) and is_insisting and slot.address in cluster_map.nodes

    def overdue(self, cluster_map: ClusterMap, gate: PersistenceGate | None, now_s: float) -> HeadwaterError | None:
        """Return the error with which the read fails if something has waited for too long."""
        if self._after_s is None:
            return None
        if gate is not None and (stalled := gate.stalled(now_s, after_s=self._after_s)) is not None:
            return ConnectionFailed(
                f"vbucket {stalled} has not been persisted by all replicas for {self._after_s:g} seconds: "
                f"{gate.why_held(stalled)}",
                hint="Check these nodes; if replicas are missing, set missing_replicas_hold to False",
            )
        waits = ((vbucket, stream.wait) for vbucket, stream in self._streams.items() if stream.wait is not None)
        overdue = next(((vbucket, wait) for vbucket, wait in waits if now_s - wait.since_s > self._after_s), None)
        if overdue is None:
            return None
        vbucket, last = overdue[0], overdue[1].last
        address = links.active_address(cluster_map, vbucket)
        # If the node can't be reached, that is the newest error: a successful connection resets its failures.
        last = (None if address is None else self._pool.failures(address).last) or last
        silence = "no node has it" if address is None else f"{address} has not answered"
        why = silence if last is None else last.reason
        plain = ConnectionFailed(
            f"vbucket {vbucket} has been unreachable for {self._after_s:g} seconds: {why}",
            hint="Check that its node is up, or raise give_up_after_s",
        )
        # The class and hint of the cause help more than our own.
        return plain if last is None else last.reworded(plain.reason)


DecodeMap = Callable[[bytes, Address], ClusterMap]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderEnvironment:
    """What a reader gets from the machine and from its client."""

    new_link: links.NewLink
    decode_map: DecodeMap
    open_spool: OpenSpool
    random: Callable[[], float]


class Reader:
    """The state of one read: all its vbuckets."""

    def __init__(
        self,
        options: ReadOptions,
        *,
        cluster_map: ClusterMap,
        seeds: Iterable[Address],
        offsets: Mapping[VBucketId, StreamOffset],
        from_now: bool = False,
        stream_flags: dcp_streams.StreamFlags,
        stream_value: StreamRequestValue | None,
        environment: ReaderEnvironment,
        now_s: float,
    ) -> None:
        """`offsets` has the vbuckets to read; with `from_now` their offsets are ignored. `stream_value` is the value
        of each stream request; None on servers without collections."""
        self.failure: HeadwaterError | None = None
        self.metrics = ReaderMetrics(options.name, cluster_map.bucket)
        self._map = links.MapWatch(cluster_map, seeds=seeds, now_s=now_s)
        self._options = options
        self._environment = environment
        self._backoff = Backoff.of(options, environment.random)
        self._pool = links.LinkPool(new_link=environment.new_link, backoff=self._backoff)
        self._delivery = Delivery(
            release=self._release, held_bytes_max=options.held_bytes_max, open_spool=environment.open_spool
        )
        self._terms = StreamTerms(
            metrics=self.metrics,
            end=options.end,
            whole_snapshots=options.snapshots is Snapshots.COMPLETE,
            needs_history_behind_end=options.needs_history_behind_end,
            flags=stream_flags,
            value=stream_value,
        )
        self._hold: PersistenceHold | None = None
        if options.mitigate_rollbacks:
            gate = PersistenceGate(cluster_map, missing_replicas_hold=options.missing_replicas_hold)
            self._hold = PersistenceHold(gate, self._delivery, whole_snapshots=self._terms.whole_snapshots)
        self._streams: dict[VBucketId, VBucketStream] = {}
        self._giving_up = GivingUp(options.give_up_after_s, pool=self._pool, streams=self._streams)
        self._poll_due_s = now_s + options.poll_interval_s
        self.follow(offsets, from_now=from_now, now_s=now_s)

    # --- which vbuckets -------------------------------------------------------------------------------------------

    def follow(self, offsets: Mapping[VBucketId, StreamOffset], *, from_now: bool = False, now_s: float) -> None:
        """Also read these vbuckets."""
        for vbucket, offset in offsets.items():
            boundaries = self._options.boundaries.get(vbucket, ())
            self._streams[vbucket] = VBucketStream(
                vbucket, offset, self._terms, boundaries=boundaries, from_now=from_now, now_s=now_s
            )
            if not from_now:
                self._set_offset(vbucket, offset)

    def _set_offset(self, vbucket: VBucketId, offset: StreamOffset) -> None:
        """Record that the caller starts here."""
        self._delivery.offsets[vbucket] = offset
        self.metrics.on_followed(vbucket, offset.seqno)

    def close_vbuckets(self, vbuckets: Iterable[VBucketId], *, keep_offsets: bool = False) -> None:
        """Stop reading these and deliver nothing more of them. With `keep_offsets`, `offsets` keeps their entries."""
        for vbucket in vbuckets:
            if vbucket in self._streams:
                self._close_stream(self._streams[vbucket])
                self._finish(vbucket)
            self._delivery.close_vbucket(vbucket)
            if self._hold is not None:
                self._hold.close_vbucket(vbucket)
            if not keep_offsets:
                self._delivery.offsets.pop(vbucket, None)

    # --- the caller's side ----------------------------------------------------------------------------------------

    @property
    def cluster_map(self) -> ClusterMap:
        """The newest known map."""
        return self._map.map

    @property
    def has_pieces(self) -> bool:
        return not self._delivery.is_empty

    def end_seqno(self, vbucket: VBucketId) -> Seqno | None:
        """The seqno up to which a vbucket is read, as far as known; None if its read has ended."""
        stream = self._streams.get(vbucket)
        return None if stream is None else stream.end_seqno

    @property
    def is_finished(self) -> bool:
        return not self._streams and self._delivery.is_empty and (self._hold is None or self._hold.is_empty)

    @property
    def has_offsets(self) -> bool:
        """Whether `offsets` has every vbucket: a server has accepted those that start at "now"."""
        return all(stream.now_seqno is None for stream in self._streams.values())

    @property
    def offsets(self) -> dict[VBucketId, StreamOffset]:
        """The offset of each vbucket after the last piece that the caller has taken."""
        return dict(self._delivery.offsets)

    def take(self) -> list[Piece]:
        taken = self._delivery.take(self._options.batch_bytes)
        for vbucket in taken.vbuckets:
            self.metrics.on_handed_out(vbucket, self._delivery.offsets[vbucket].seqno)
        self._release_held()
        self._count_buffered()
        return taken.pieces

    def close(self) -> None:
        """Release resources. The read is over, complete or not."""
        self._delivery.close()

    # --- the edge's side ------------------------------------------------------------------------------------------

    def commands(self) -> list[links.Command]:
        commands, self._pool.commands = self._pool.commands, []
        return commands

    def data_to_send(self) -> list[tuple[int, bytes]]:
        return [
            (slot.id, data) for slot in self._pool.slots.values() if slot.link and (data := slot.link.data_to_send())
        ]

    def on_connected(self, link: int, *, is_loopback: bool, now_s: float) -> None:
        slot = self._pool.on_connected(link, is_loopback=is_loopback, now_s=now_s)
        if slot is not None and slot.link is not None:
            slot.link.counters = self.metrics

    def receive_buffer(self, link: int) -> memoryview | None:
        """Return the buffer for the next bytes of a link; None if the link is closed."""
        slot = self._pool.slots.get(link)
        return None if slot is None or slot.link is None else slot.link.receive_buffer()

    def received(self, link: int, byte_count: int, *, now_s: float) -> None:
        slot = self._pool.slots.get(link)
        if slot is None or slot.link is None:
            return
        self.metrics.on_received(byte_count)
        try:
            slot.link.received(byte_count, now_s=now_s)
            for event in slot.link.events():
                self._take_event(slot, event, now_s)
                if slot.id not in self._pool.slots:
                    return
        except HeadwaterError as error:
            self._drop_link(slot, error, now_s)
        self._release_held()

    def on_lost(self, link: int, error: HeadwaterError | None, *, now_s: float) -> None:
        """The connection failed or broke. Without an error, the server has closed it."""
        slot = self._pool.slots.get(link)
        if slot is None:
            return
        if error is None:
            try:
                assert slot.link is not None
                slot.link.receive_end()
            except HeadwaterError as closed:
                error = closed
        assert error is not None
        self._drop_link(slot, error, now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due. Call it several times a second, and after any event that may have made a vbucket wait."""
        for slot in list(self._pool.slots.values()):
            if slot.link is not None:
                try:
                    slot.link.tick(now_s)
                except HeadwaterError as error:
                    self._drop_link(slot, error, now_s)
        if now_s >= self._poll_due_s:
            self._poll(now_s)
        self._ask_due(now_s)
        if self._hold is not None:
            self._ask_copies(self._hold.gate, now_s)
        self._map.look(self._pool, now_s)
        if self.failure is None:
            gate = None if self._hold is None else self._hold.gate
            self.failure = self._giving_up.overdue(self.cluster_map, gate, now_s)

    # --- asking for streams ---------------------------------------------------------------------------------------

    def _ask_due(self, now_s: float) -> None:
        for vbucket, stream in self._streams.items():
            if not stream.is_due(now_s):
                continue
            address = links.active_address(self.cluster_map, vbucket)
            if address is None:
                self._map.want()
                continue
            slot = self._pool.get(address, vbucket % self._options.connections_per_node, now_s=now_s)
            if slot is not None:
                stream.open(slot)
            elif now_s < self._pool.failures(address).retry_at_s:
                self._map.want()

    def _streams_on(self, slot: links.PooledLink) -> list[VBucketStream]:
        """Return the streams that are lost with this connection."""
        return [stream for stream in self._streams.values() if stream.slot is slot]

    def _on_high_seqnos(self, slot: links.PooledLink, request: Request, answer: Response, now_s: float) -> None:
        if slot.survey_opaque == request.opaque:
            slot.survey_opaque = None
        highs: dict[VBucketId, Seqno] | None = None
        if isinstance(answer, GetAllVbSeqnosResponse):
            highs = {entry.vbucket: entry.seqno for entry in answer.seqnos}
            self.metrics.set_high_seqnos({vbucket: high for vbucket, high in highs.items() if vbucket in self._streams})
        asked = [stream for stream in self._streams_on(slot) if stream.survey == request.opaque]
        for stream in asked:
            try:
                if highs is None:
                    raise refusal(answer, "the high seqnos can't be read")
                stream.on_high_seqno(highs.get(stream.vbucket))
            except StatusError as error:
                self._on_refused(stream, error, now_s)
        if highs is not None and not asked and self._options.end is not None:
            self._check_ends(slot, highs)

    def _check_ends(self, slot: links.PooledLink, highs: dict[VBucketId, Seqno]) -> None:
        """End open streams whose end lies beyond the new history after a failover."""
        for stream in self._streams_on(slot):
            high = highs.get(stream.vbucket)
            # A stream that is not accepted yet may have to roll back first, and the caller must get that.
            if high is not None and stream.is_accepted:
                stream.end_seqno = min(stream.end_seqno, high)
                if stream.has_reached_end:
                    self._close_stream(stream)
                    self._finish(stream.vbucket)

    # --- events of a link -----------------------------------------------------------------------------------------

    def _take_event(self, slot: links.PooledLink, event: links.LinkEvent, now_s: float) -> None:
        match event:
            case StreamRun():
                self._on_run(slot, event)
            case StreamMessage():
                self._on_stream_message(slot, event, now_s)
            case RequestAnswered():
                self._on_answer(slot, event, now_s)
            case links.LinkReady():
                self._on_ready(slot, event, now_s)
            case links.ConfigPushed():
                if event.config:
                    self._on_map(self._environment.decode_map(event.config, slot.address), now_s)
                else:
                    self._map.want()

    def _on_ready(self, slot: links.PooledLink, event: links.LinkReady, now_s: float) -> None:
        if self._pool.on_ready(slot):
            self.metrics.on_reconnect(slot.address)
        config = event.outcome.cluster_config
        if config is not None:
            self._on_map(self._environment.decode_map(config, slot.address), now_s)
        if slot.lane == links.SCOUT:
            self._pool.close(slot)
        else:
            self._ask_due(now_s)

    def _on_run(self, slot: links.PooledLink, run: StreamRun[VBucketStream]) -> None:
        stream = run.stream
        if stream is None:
            self._release(slot.id, run.window_bytes)  # data of a closed stream
            return
        self.metrics.on_run(stream.vbucket, run.rows, run.window_bytes, run.last_seqno)
        self._deliver(stream, stream.on_run(run, slot.id))

    def _on_stream_message(self, slot: links.PooledLink, event: StreamMessage[VBucketStream], now_s: float) -> None:
        message, stream = event.message, event.stream
        self._release(slot.id, event.window_bytes)
        if stream is None:
            return
        self._deliver(stream, stream.on_message(message))
        if isinstance(message, SnapshotMarker):
            self.metrics.on_snapshot(stream.vbucket, message.end_seqno)
        if isinstance(message, dcp_streams.StreamEnd):
            self._on_stream_end(stream, message, now_s)

    def _deliver(self, stream: VBucketStream, items: list[StreamItem]) -> None:
        (self._hold or self._delivery).put(items)
        self._delivery.note_held(stream)
        self._count_buffered()

    def _count_buffered(self) -> None:
        self.metrics.set_buffered(ready_bytes=self._delivery.waiting_bytes, held_bytes=self._delivery.held_bytes)

    def _on_stream_end(self, stream: VBucketStream, message: dcp_streams.StreamEnd, now_s: float) -> None:
        self.metrics.on_stream_end(message.reason)
        self._drop_stream(stream)
        after = AFTER_END.get(message.reason, AfterEnd.ASK_LATER)
        if after is AfterEnd.FINISHED and stream.is_done_with(message.reason):
            self._finish(stream.vbucket)
        elif after is AfterEnd.FAIL:
            self.failure = AccessDenied(
                Status.EACCESS, f"the server ended the stream of vbucket {stream.vbucket}: the privileges were lost"
            )
        else:
            if after is AfterEnd.FIND_AND_ASK:
                self._map.want()
            stream.retry(None, now_s=now_s, backoff=None if after is AfterEnd.ASK_AT_ONCE else self._backoff)

    # --- answers --------------------------------------------------------------------------------------------------

    def _on_answer(self, slot: links.PooledLink, event: RequestAnswered[VBucketStream], now_s: float) -> None:
        request, answer = event.request, event.answer
        match request:
            case dcp_streams.StreamRequest() | dcp_streams.GetFailoverLog():
                # Without a stream, the vbucket was closed during its request. The server has closed the stream, too,
                # because it processes requests in order.
                if event.stream is not None:
                    self._on_opening_answer(event.stream, request, answer, now_s)
            case GetAllVbSeqnos():
                self._on_high_seqnos(slot, request, answer, now_s)
            case ObserveSeqno():
                assert self._hold is not None
                error = None
                if isinstance(answer, ErrorResponse):
                    error = refusal(answer, f"how far vbucket {request.vbucket} is persisted can't be read")
                self._hold.on_answer(slot.address, request, answer, error)
            case GetClusterConfig():
                if isinstance(answer, PlainResponse) and answer.value:
                    self._on_map(self._environment.decode_map(answer.value, slot.address), now_s)
            case dcp_streams.CloseStream():
                pass  # A refusal is fine, too: the stream had already ended by itself.

    def _on_opening_answer(self, stream: VBucketStream, request: Request, answer: Response, now_s: float) -> None:
        try:
            items = stream.on_answer(request, answer)
        except StatusError as error:
            self._on_refused(stream, error, now_s)
            return
        if stream.now_seqno is not None:
            self._set_offset(stream.vbucket, stream.offset)
        self._deliver(stream, items)

    # --- rollback mitigation --------------------------------------------------------------------------------------

    def _ask_copies(self, gate: PersistenceGate, now_s: float) -> None:
        """Ask the copies how far they have persisted their vbuckets, over the first lane of each node."""
        slots = {address: self._pool.get(address, 0, now_s=now_s) for address in gate.nodes_waited_for}
        ready = {address: slot for address, slot in slots.items() if slot is not None}
        for address, request in gate.requests_due(now_s, ready):
            link = ready[address].link
            assert link is not None
            link.send_request(request)

    # --- the cluster map ------------------------------------------------------------------------------------------

    def _on_map(self, new: ClusterMap, now_s: float) -> None:
        if not self._map.is_of_this_bucket(new):
            self.failure = BucketReplaced(self.cluster_map.bucket)
            return
        old = self._map.replace(new)
        if old is None:
            return
        if self._hold is not None:
            self._hold.gate.on_cluster_map(new)
        self.metrics.on_config_update()
        for vbucket, stream in self._streams.items():
            address = links.active_address(new, vbucket)
            if stream.slot is not None and address != stream.slot.address:
                self._close_stream(stream)
                stream.retry(None, now_s=now_s, backoff=None)
            elif address != links.active_address(old, vbucket):
                stream.hurry(now_s)
        for slot in list(self._pool.slots.values()):
            if slot.lane != links.SCOUT and slot.address not in new.nodes:
                self._pool.close(slot)

    def _poll(self, now_s: float) -> None:
        self._poll_due_s = now_s + self._options.poll_interval_s
        for slot in self._pool.ready:
            assert slot.link is not None
            slot.link.send_request(GetClusterConfig())
            slot.link.send_request(GetAllVbSeqnos(state=dcp_streams.VBucketState.ACTIVE))

    # --- closing, dropping and retrying ---------------------------------------------------------------------------

    def _drop_link(self, slot: links.PooledLink, error: HeadwaterError, now_s: float) -> None:
        """A link is lost. Its streams wait for another one; if the error is permanent, the read fails."""
        self._pool.drop(slot, error, now_s=now_s)
        if self._hold is not None and slot.lane == 0:
            self._hold.gate.on_disconnected(slot.address)
        self.metrics.on_disconnect(error)
        for stream in self._streams_on(slot):
            self._drop_stream(stream)
            stream.retry(error, now_s=now_s, backoff=None)
        self._map.want()
        if self._giving_up.is_hopeless(slot, error, self.cluster_map, now_s):
            self.failure = error

    def _close_stream(self, stream: VBucketStream) -> None:
        self._delivery.drop(stream.close())
        self._delivery.note_held(stream)

    def _drop_stream(self, stream: VBucketStream) -> None:
        """Drop a stream. What it holds will be requested again."""
        self._delivery.drop(stream.drop())
        self._delivery.note_held(stream)

    def _finish(self, vbucket: VBucketId) -> None:
        """Stop following a vbucket."""
        del self._streams[vbucket]
        self.metrics.on_closed(vbucket)

    def _on_refused(self, stream: VBucketStream, error: StatusError, now_s: float) -> None:
        """A request for this vbucket was refused. Retry if that may help; otherwise the read fails."""
        self._drop_stream(stream)
        if not error.retriable:
            self.failure = error
            return
        if error.stale_topology:
            self._map.want()
        stream.retry(error, now_s=now_s, backoff=self._backoff)

    # --- flow control ---------------------------------------------------------------------------------------------

    def _release(self, link: int, window_bytes: int) -> None:
        slot = self._pool.slots.get(link)
        if slot is not None and slot.link is not None:
            slot.link.release(window_bytes)

    def _release_held(self) -> None:
        """If the caller has nothing to take, give room to servers that wait for it: see `delivery`."""
        if self._delivery.is_empty:
            for slot in self._pool.ready:
                if slot.link is not None and slot.link.is_pressed:
                    self._delivery.release_held(slot.link.streams.values())

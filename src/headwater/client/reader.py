"""The reader, sans-IO: follows the vbuckets of a bucket over all its nodes, through everything that may happen.

The edge connects sockets where `commands` says so, passes in what it receives and how time goes on, and sends what the
links have to send. The caller takes pieces. Everything that is decided is decided here, so the same reader runs under
asyncio and in a simulation.

A vbucket is either with a stream on a link, or waiting for one, or done. It waits because a connection or stream was
lost, because it has moved, or because the server has asked for patience; each wait has its time, and a vbucket that
waits for longer than `give_up_after_s` fails the read with the last thing that stood in its way.

Before a stream that has an end is asked for, the server is asked for its high seqnos: after a failover the new history
may be shorter than the end that was wanted, and the stream would wait for ever. For the same reason the ends of open
streams are looked at with each poll.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from headwater.client.backoff import Backoff, Tolerance, is_final
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.dcp_link import Answered, ConfigPushed, LinkEvent, LinkReady, StreamMessage, StreamRun
from headwater.client.hand_out import HandOut
from headwater.client.link_pool import SCOUT, Command, LinkPool, NewLink, Slot
from headwater.client.metrics import ReaderMetrics
from headwater.client.persistence_gate import PersistenceGate
from headwater.client.persistence_hold import PersistenceHold
from headwater.client.pieces import Piece, RollbackPiece
from headwater.client.read_options import End, ReadOptions, Snapshots
from headwater.client.spool import OpenSpool
from headwater.client.stream_ends import AfterEnd, after_end
from headwater.client.vbucket_stream import Passed, VBucketStream
from headwater.client.vbucket_waits import VBucketWaits
from headwater.errors import (
    AccessDenied,
    BucketReplaced,
    CheckpointAhead,
    ConnectionFailed,
    HeadwaterError,
    RemoteProtocolError,
    StatusError,
    status_error,
)
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response
from headwater.protocol.messages.dcp_snapshot import SnapshotMarker
from headwater.protocol.messages.dcp_stream import (
    CloseStream,
    GetFailoverLog,
    GetFailoverLogResponse,
    StreamEnd,
    StreamFlags,
    StreamRequest,
    StreamRequestResponse,
    VBucketState,
)
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, ObserveSeqno
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status

MAP_INTERVAL_S = 0.25
"""How often the cluster map is asked for, at most, while it does not tell what we need to know."""
REFUSALS_MAX = 3
"""How often in a row a node may refuse to have us before we believe it."""

DecodeMap = Callable[[bytes, Address], ClusterMap]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a reader needs of the world."""

    new_link: NewLink
    decode_map: DecodeMap
    open_spool: OpenSpool
    random: Callable[[], float]


class Reader:
    """All vbuckets of one read."""

    def __init__(
        self,
        options: ReadOptions,
        *,
        cluster_map: ClusterMap,
        seeds: tuple[Address, ...],
        offsets: Mapping[VBucketId, StreamOffset],
        from_now: bool = False,
        stream_flags: StreamFlags,
        stream_value: bytes,
        outside: Outside,
        now_s: float,
    ) -> None:
        """`offsets` names the vbuckets to read; with `from_now` their values don't matter."""
        self.failure: HeadwaterError | None = None
        self.metrics = ReaderMetrics(options.name, cluster_map.bucket)
        self.cluster_map = cluster_map
        self._options = options
        self._seeds = seeds
        self._outside = outside
        self._stream_flags = stream_flags
        self._stream_value = stream_value
        self._backoff = Backoff(
            delay_s_min=options.reconnect_delay_s_min,
            delay_s_max=options.reconnect_delay_s_max,
            random=outside.random,
        )
        self._pool = LinkPool(new_link=outside.new_link, backoff=self._backoff)
        self._hand_out = HandOut(
            release=self._release, held_bytes_max=options.held_bytes_max, open_spool=outside.open_spool
        )
        self._hold = self._new_hold() if options.mitigate_rollbacks else None
        self._streams: dict[VBucketId, VBucketStream] = {}
        self._waits = VBucketWaits(self._backoff)
        self._from_now: dict[VBucketId, Seqno] = {}
        """Vbuckets that start at their high seqno, and have no offset before their failover log has been read."""
        self._demanded: dict[VBucketId, Seqno] = {}
        """Rollbacks that wait for the server's failover log."""
        self._tolerance = Tolerance(within_s=options.give_up_after_s)
        self._map_is_wanted = False
        self._map_due_s = now_s
        self._poll_due_s = now_s + options.poll_interval_s
        self.follow(offsets, from_now=from_now, now_s=now_s)

    def _new_hold(self) -> PersistenceHold:
        gate = PersistenceGate(self.cluster_map, missing_replicas_hold=self._options.missing_replicas_hold)
        return PersistenceHold(gate, self._hand_out, whole_snapshots=self._options.snapshots is Snapshots.COMPLETE)

    # --- which vbuckets -------------------------------------------------------------------------------------------

    def follow(self, offsets: Mapping[VBucketId, StreamOffset], *, from_now: bool = False, now_s: float) -> None:
        """Read these vbuckets, too."""
        whole = self._options.snapshots is Snapshots.COMPLETE
        for vbucket, offset in offsets.items():
            self._streams[vbucket] = VBucketStream(vbucket, offset, whole_snapshots=whole)
            self._waits.begin(vbucket, now_s=now_s)
            if from_now:
                self._from_now[vbucket] = Seqno(0)
            else:
                self._set_place(vbucket, offset)

    def _set_place(self, vbucket: VBucketId, offset: StreamOffset) -> None:
        """The caller starts here."""
        self._hand_out.offsets[vbucket] = offset
        self.metrics.on_followed(vbucket, offset.seqno)

    def leave(self, vbuckets: Iterable[VBucketId], *, forget: Container[VBucketId] = ()) -> None:
        """Read these no more, and hand nothing out of them. `offsets` still tells of those that are not forgotten."""
        for vbucket in vbuckets:
            if vbucket in self._streams:
                self._detach(self._streams[vbucket])
                self._forget_stream(vbucket)
            self._hand_out.leave(vbucket)
            if self._hold is not None:
                self._hold.leave(vbucket)
            if vbucket in forget:
                self._hand_out.offsets.pop(vbucket, None)

    # --- the caller's side ----------------------------------------------------------------------------------------

    @property
    def has_pieces(self) -> bool:
        return not self._hand_out.is_empty

    @property
    def is_finished(self) -> bool:
        return not self._streams and self._hand_out.is_empty and (self._hold is None or self._hold.is_empty)

    @property
    def is_placed(self) -> bool:
        """Whether `offsets` has every vbucket."""
        return not self._from_now

    @property
    def offsets(self) -> dict[VBucketId, StreamOffset]:
        """Where the caller is: behind the last piece it has taken, in every vbucket."""
        return dict(self._hand_out.offsets)

    def take(self) -> list[Piece]:
        taken = self._hand_out.take(self._options.batch_bytes)
        for vbucket in taken.vbuckets:
            self.metrics.on_handed_out(vbucket, self._hand_out.offsets[vbucket].seqno)
        self._relieve()
        self._count_buffered()
        return taken.pieces

    def close(self) -> None:
        """The read is over, whether it has come to its end or not."""
        self._hand_out.close()

    # --- the edge's side ------------------------------------------------------------------------------------------

    def commands(self) -> list[Command]:
        commands, self._pool.commands = self._pool.commands, []
        return commands

    def data_to_send(self) -> list[tuple[int, bytes]]:
        return [
            (slot.id, data) for slot in self._pool.slots.values() if slot.link and (data := slot.link.data_to_send())
        ]

    def on_connected(self, link: int, *, is_loopback: bool, now_s: float) -> None:
        slot = self._pool.on_connected(link, is_loopback=is_loopback, now_s=now_s)
        if slot is not None and slot.link is not None:
            slot.link.metrics = self.metrics

    def receive_buffer(self, link: int) -> memoryview | None:
        """Where the next bytes of a link go; None for a link that is no more."""
        slot = self._pool.slots.get(link)
        return None if slot is None or slot.link is None else slot.link.receive_buffer()

    def received(self, link: int, byte_count: int, *, now_s: float) -> None:
        slot = self._pool.slots.get(link)
        if slot is None or slot.link is None:
            return
        self.metrics.on_received(byte_count)
        try:
            for event in slot.link.received(byte_count, now_s=now_s):
                self._take_event(slot, event, now_s)
                if slot.id not in self._pool.slots:
                    return
        except HeadwaterError as error:
            self._lose(slot, error, now_s)
        self._relieve()

    def on_lost(self, link: int, error: HeadwaterError | None, *, now_s: float) -> None:
        """The connection could not be made, or broke; with no error the server has closed it."""
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
        self._lose(slot, error, now_s)

    def tick(self, now_s: float) -> None:
        """Time goes on. To be called a few times a second, and after everything that may have made a vbucket wait."""
        for slot in list(self._pool.slots.values()):
            if slot.link is not None:
                try:
                    slot.link.tick(now_s)
                except HeadwaterError as error:
                    self._lose(slot, error, now_s)
        if now_s >= self._poll_due_s:
            self._poll(now_s)
        self._ask_due(now_s)
        if self._hold is not None:
            self._ask_copies(self._hold.gate, now_s)
        if self._map_is_wanted:
            self._look_for_map(now_s)
        self._give_up_if_due(now_s)

    # --- asking for streams ---------------------------------------------------------------------------------------

    def _ask_due(self, now_s: float) -> None:
        asked: dict[int, list[VBucketStream]] = {}
        for vbucket in self._waits.due(now_s):
            stream = self._streams[vbucket]
            if not stream.is_idle:
                continue
            node = self.cluster_map.active_node(vbucket)
            if node < 0:
                self._map_is_wanted = True
                continue
            address = self.cluster_map.nodes[node]
            slot = self._pool.get(address, vbucket % self._options.connections_per_node, now_s=now_s)
            if slot is not None:
                asked.setdefault(slot.id, []).append(stream)
            elif now_s < self._pool.retry_at_s(address):
                self._map_is_wanted = True
        for slot_id, streams in asked.items():
            self._ask(self._pool.slots[slot_id], streams)

    def _ask(self, slot: Slot, streams: list[VBucketStream]) -> None:
        """Ask for streams, after the high seqnos where they are needed."""
        assert slot.link is not None
        for stream in streams:
            self._waits.asked(stream.vbucket)
        if self._options.end is None and not self._from_now:
            for stream in streams:
                self._request(slot, stream)
        else:
            slot.surveyed[slot.link.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))] = streams

    def _request(self, slot: Slot, stream: VBucketStream) -> None:
        assert slot.link is not None
        request = stream.request(flags=self._stream_flags, value=self._stream_value)
        slot.streams[slot.link.request(request)] = stream
        self.metrics.on_stream_request()

    def _on_high_seqnos(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        streams = list(slot.surveyed.get(request.opaque, []))
        self._take_high_seqnos(slot, streams, answer, now_s)
        # Not before: what fails on the way is the end of the link, and then they all wait.
        slot.surveyed.pop(request.opaque, None)

    def _take_high_seqnos(self, slot: Slot, streams: list[VBucketStream], answer: Response, now_s: float) -> None:
        if not isinstance(answer, GetAllVbSeqnosResponse):
            self._wait_all(streams, _refusal(answer, "the high seqnos can't be read"), now_s)
            return
        highs = {entry.vbucket: entry.seqno for entry in answer.seqnos}
        self.metrics.set_high_seqnos({vbucket: high for vbucket, high in highs.items() if vbucket in self._streams})
        for stream in streams:
            high = highs.get(stream.vbucket)
            if high is None:
                self._move_on(stream, _refusal_of(Status.NOT_MY_VBUCKET, stream.vbucket), now_s)
            else:
                self._set_end(stream, high)
                self._ask_with_end(slot, stream, high)
        if not streams and self._options.end is not None:
            self._check_ends(slot, highs, now_s)

    def _set_end(self, stream: VBucketStream, high: Seqno) -> None:
        if isinstance(self._options.end, End):
            stream.end_seqno = min(stream.end_seqno, high)
        elif self._options.end is not None:
            stream.end_seqno = min(stream.end_seqno, self._options.end[stream.vbucket], high)

    def _ask_with_end(self, slot: Slot, stream: VBucketStream, high: Seqno) -> None:
        assert slot.link is not None
        if stream.vbucket not in self._from_now:
            self._request(slot, stream)
            return
        self._from_now[stream.vbucket] = high
        slot.streams[slot.link.request(GetFailoverLog(vbucket=stream.vbucket))] = stream

    def _check_ends(self, slot: Slot, highs: dict[VBucketId, Seqno], now_s: float) -> None:
        """A failover may have left open streams with an end that their new history does not have."""
        for stream in list(slot.streams.values()):
            high = highs.get(stream.vbucket)
            # One that is being asked for may have to roll back first, and the caller must know of that.
            if high is not None and stream.is_accepted:
                stream.end_seqno = min(stream.end_seqno, high)
                if stream.has_reached_end:
                    self._detach(stream)
                    self._forget_stream(stream.vbucket)

    # --- events of a link -----------------------------------------------------------------------------------------

    def _take_event(self, slot: Slot, event: LinkEvent, now_s: float) -> None:
        match event:
            case StreamRun():
                self._on_run(slot, event)
            case StreamMessage():
                self._on_stream_message(slot, event, now_s)
            case Answered():
                _ANSWERS[type(event.request)](self, slot, event.request, event.answer, now_s)
            case LinkReady():
                self._on_ready(slot, event, now_s)
            case ConfigPushed():
                if event.config:
                    self._on_map(self._outside.decode_map(event.config, slot.address), now_s)
                else:
                    self._map_is_wanted = True

    def _on_ready(self, slot: Slot, event: LinkReady, now_s: float) -> None:
        if self._pool.on_ready(slot):
            self.metrics.on_reconnect(slot.address)
        config = event.outcome.cluster_config
        if config is not None:
            self._on_map(self._outside.decode_map(config, slot.address), now_s)
        if slot.lane == SCOUT:
            self._pool.forget(slot, None, now_s=now_s)
        else:
            self._ask_due(now_s)

    def _on_run(self, slot: Slot, run: StreamRun) -> None:
        stream = slot.streams.get(run.opaque)
        if stream is None:
            self._release(slot.id, len(run.data))  # of a stream that was closed
            return
        self.metrics.on_run(stream.vbucket, run.rows, len(run.data), run.last_seqno)
        self._pass_on(stream, stream.on_run(run, slot.id))
        if stream.offset.seqno >= stream.end_seqno and not stream.offset.is_complete:
            # The server would send its whole snapshot, and the caller did not want to wait for that.
            self._detach(stream)
            self._forget_stream(stream.vbucket)

    def _on_stream_message(self, slot: Slot, event: StreamMessage, now_s: float) -> None:
        message = event.message
        self._release(slot.id, event.window_bytes)
        stream = slot.streams.get(message.opaque)
        if stream is None:
            return
        self._pass_on(stream, stream.on_message(message))
        if isinstance(message, SnapshotMarker):
            self.metrics.on_snapshot(stream.vbucket, message.end_seqno)
        if isinstance(message, StreamEnd):
            del slot.streams[message.opaque]
            self._on_stream_end(stream, message, now_s)

    def _pass_on(self, stream: VBucketStream, passed: list[Passed]) -> None:
        (self._hold or self._hand_out).put(passed)
        self._hand_out.note_held(stream)
        self._count_buffered()

    def _count_buffered(self) -> None:
        self.metrics.set_buffered(ready_bytes=self._hand_out.waiting_bytes, held_bytes=self._hand_out.held_bytes)

    def _on_stream_end(self, stream: VBucketStream, message: StreamEnd, now_s: float) -> None:
        self.metrics.on_stream_end(message.reason)
        self._let_go(stream)
        after = after_end(message.reason)
        if after is AfterEnd.FINISHED and stream.is_done_with(message.reason):
            self._forget_stream(stream.vbucket)
        elif after is AfterEnd.FAIL:
            self.failure = AccessDenied(
                Status.EACCESS, f"the server ended the stream of vbucket {stream.vbucket}: the privileges were lost"
            )
        else:
            self._map_is_wanted |= after is AfterEnd.FIND_AND_ASK
            self._wait(stream, None, now_s, at_once=after is AfterEnd.ASK_AT_ONCE)

    # --- answers --------------------------------------------------------------------------------------------------

    def _on_stream_answer(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        stream = slot.streams.get(request.opaque)
        if stream is None:
            # It was left while it was being asked for. It is closed: the server takes requests in order.
            return
        if not isinstance(answer, StreamRequestResponse):
            del slot.streams[request.opaque]
            stream.on_refused()
            self._move_on(stream, _refusal(answer, f"the stream of vbucket {stream.vbucket} was refused"), now_s)
        elif answer.rollback_seqno is not None:
            stream.on_rollback_demanded()
            del slot.streams[request.opaque]
            self._demanded[stream.vbucket] = answer.rollback_seqno
            assert slot.link is not None
            slot.streams[slot.link.request(GetFailoverLog(vbucket=stream.vbucket))] = stream
        else:
            self._waits.end(stream.vbucket)
            passed = stream.on_accepted(FailoverLog.of(answer.failover_log))
            for item in passed:
                if isinstance(item.piece, RollbackPiece):
                    self.metrics.on_rollback(item.piece)
            self._pass_on(stream, passed)

    def _on_failover_log(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        stream = slot.streams.get(request.opaque)
        if stream is None:
            return
        log = FailoverLog.of(answer.failover_log) if isinstance(answer, GetFailoverLogResponse) else None
        del slot.streams[request.opaque]
        demanded = self._demanded.pop(stream.vbucket, None)
        if log is None:
            self._let_go(stream)
            self._move_on(stream, _refusal(answer, "the failover log can't be read"), now_s)
            return
        if demanded is None:
            self._start_from_now(stream, log)
        else:
            self._check_not_ahead(stream, log, demanded)
            stream.on_server_log(log, demanded=demanded)
        self._ask(slot, [stream])

    def _start_from_now(self, stream: VBucketStream, log: FailoverLog) -> None:
        high = self._from_now.pop(stream.vbucket)
        offset = StreamOffset(vbuuid=log.newest.vbuuid, seqno=high, snapshot_start=high, snapshot_end=high)
        stream.start_from(offset)
        self._set_place(stream.vbucket, offset)

    def _check_not_ahead(self, stream: VBucketStream, log: FailoverLog, demanded: Seqno) -> None:
        """On its newest branch a server has all there is: a consumer that has more got it elsewhere."""
        is_given = stream.failover_log is None
        if is_given and demanded and stream.asked.vbuuid == log.newest.vbuuid:
            raise CheckpointAhead(vbucket=stream.vbucket, seqno=stream.asked.seqno, high_seqno=demanded)

    def _on_config_answer(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        if isinstance(answer, PlainResponse) and answer.value:
            self._on_map(self._outside.decode_map(answer.value, slot.address), now_s)

    def _on_close_answer(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        """A stream that had ended by itself is no longer there to be closed: that is fine, too."""

    # --- rollback mitigation --------------------------------------------------------------------------------------

    def _ask_copies(self, gate: PersistenceGate, now_s: float) -> None:
        """Ask the copies of vbuckets how far they have persisted, over the first lane of each node."""
        slots = {address: self._pool.get(address, 0, now_s=now_s) for address in gate.nodes_waited_for}
        ready = {address: slot for address, slot in slots.items() if slot is not None}
        for address, request in gate.requests_due(now_s, ready):
            link = ready[address].link
            assert link is not None
            link.request(request)

    def _on_observed(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        assert self._hold is not None
        assert isinstance(request, ObserveSeqno)
        refused = isinstance(answer, ErrorResponse)
        refusal = _refusal(answer, f"how far vbucket {request.vbucket} is persisted can't be read") if refused else None
        self._hold.on_answer(slot.address, request, answer, refusal)

    # --- the cluster map ------------------------------------------------------------------------------------------

    def _on_map(self, new: ClusterMap, now_s: float) -> None:
        self._map_is_wanted = False
        if new.uuid != self.cluster_map.uuid or new.vbuckets != self.cluster_map.vbuckets:
            self.failure = BucketReplaced(self.cluster_map.bucket)
            return
        if new.version <= self.cluster_map.version:
            return
        old, self.cluster_map = self.cluster_map, new
        if self._hold is not None:
            self._hold.gate.on_cluster_map(new)
        self.metrics.on_config_update()
        for vbucket in self._streams:
            if _address(new, vbucket) != _address(old, vbucket):
                self._waits.hurry(vbucket, now_s=now_s)
        for slot in list(self._pool.slots.values()):
            for stream in slot.all_streams:
                if _address(new, stream.vbucket) != slot.address:
                    self._detach(stream)
                    self._wait(stream, None, now_s, at_once=True)
            if slot.lane != SCOUT and slot.address not in new.nodes:
                self._pool.forget(slot, None, now_s=now_s)

    def _look_for_map(self, now_s: float) -> None:
        ready = self._pool.ready
        if ready and now_s >= self._map_due_s:
            self._map_is_wanted = False
            self._map_due_s = now_s + MAP_INTERVAL_S
            for slot in ready:
                assert slot.link is not None
                slot.link.request(GetClusterConfig())
        elif not ready:
            self._pool.scout((*self._seeds, *self.cluster_map.nodes), now_s=now_s)

    def _poll(self, now_s: float) -> None:
        self._poll_due_s = now_s + self._options.poll_interval_s
        for slot in self._pool.ready:
            assert slot.link is not None
            slot.link.request(GetClusterConfig())
            slot.link.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))

    # --- losing and waiting ---------------------------------------------------------------------------------------

    def _lose(self, slot: Slot, error: HeadwaterError, now_s: float) -> None:
        """A link is gone. Its streams wait for another one; what can't get better by waiting fails the read."""
        self._pool.forget(slot, error, now_s=now_s)
        if self._hold is not None and slot.lane == 0:
            self._hold.gate.on_disconnected(slot.address)
        self.metrics.on_disconnect(error)
        for stream in slot.all_streams:
            self._demanded.pop(stream.vbucket, None)
            self._let_go(stream)
            self._wait(stream, error, now_s, at_once=True)
        self._map_is_wanted = True
        if self._is_hopeless(slot, error, now_s):
            self.failure = error

    def _is_hopeless(self, slot: Slot, error: HeadwaterError, now_s: float) -> bool:
        """Whether it makes no sense to try again."""
        if slot.is_ready:
            breaks_protocol = isinstance(error, RemoteProtocolError)
            return is_final(error) or (breaks_protocol and self._tolerance.ends_with(slot.address, now_s))
        # A node that has just left the cluster may refuse us, and the others know better: their map comes soon.
        is_insisting = self._pool.failures_in_a_row(slot.address) >= REFUSALS_MAX
        return is_final(error) and is_insisting and slot.address in self.cluster_map.nodes

    def _detach(self, stream: VBucketStream) -> None:
        """Close a stream where it is open, without waiting for it."""
        for slot in self._pool.slots.values():
            for opaque, other in list(slot.streams.items()):
                if other is stream and slot.link is not None:
                    del slot.streams[opaque]
                    slot.link.request(CloseStream(vbucket=stream.vbucket))
            for asked in slot.surveyed.values():
                if stream in asked:
                    asked.remove(stream)
        self._demanded.pop(stream.vbucket, None)
        self._let_go(stream)

    def _let_go(self, stream: VBucketStream) -> None:
        self._hand_out.drop(stream.on_lost())
        self._hand_out.note_held(stream)

    def _forget_stream(self, vbucket: VBucketId) -> None:
        del self._streams[vbucket]
        self._waits.end(vbucket)
        self._from_now.pop(vbucket, None)
        self.metrics.on_left(vbucket)

    def _move_on(self, stream: VBucketStream, error: StatusError, now_s: float) -> None:
        """A request for this vbucket was refused: try again where that may help."""
        if error.retriable:
            self._map_is_wanted |= error.stale_topology
            self._wait(stream, error, now_s)
        else:
            self.failure = error

    def _wait_all(self, streams: list[VBucketStream], error: StatusError, now_s: float) -> None:
        for stream in streams:
            self._move_on(stream, error, now_s)

    def _wait(
        self, stream: VBucketStream, error: HeadwaterError | None, now_s: float, *, at_once: bool = False
    ) -> None:
        self._waits.again(stream.vbucket, error, now_s=now_s, at_once=at_once)

    def _give_up_if_due(self, now_s: float) -> None:
        limit_s = self._options.give_up_after_s
        if limit_s is None or self.failure is not None:
            return
        if self._hold is not None and (stalled := self._hold.gate.stalled(now_s, after_s=limit_s)) is not None:
            self.failure = ConnectionFailed(
                f"vbucket {stalled} has not been persisted by all copies for {limit_s:.0f} seconds: "
                f"{self._hold.gate.why_held(stalled)}",
                hint="Look at the nodes that are named; where replicas are missing, set missing_replicas_hold to False",
            )
            return
        overdue = self._waits.overdue(now_s, after_s=limit_s)
        if overdue is not None:
            vbucket, last = overdue
            address = _address(self.cluster_map, vbucket)
            last = last or (self._pool.last_failure(address) if address is not None else None)
            self.failure = last or ConnectionFailed(
                f"vbucket {vbucket} has been out of reach for {limit_s:.0f} seconds",
                hint="Look whether its node is up, or raise give_up_after_s",
            )

    # --- flow control ---------------------------------------------------------------------------------------------

    def _release(self, link: int, window_bytes: int) -> None:
        slot = self._pool.slots.get(link)
        if slot is not None and slot.link is not None:
            slot.link.release(window_bytes)

    def _relieve(self) -> None:
        if self._hand_out.is_empty:
            for slot in self._pool.ready:
                if slot.link is not None and slot.link.is_pressed:
                    self._hand_out.release_held(slot.streams.values())


_ANSWERS: dict[type[Request], Callable[[Reader, Slot, Request, Response, float], None]] = {
    StreamRequest: Reader._on_stream_answer,
    GetFailoverLog: Reader._on_failover_log,
    GetAllVbSeqnos: Reader._on_high_seqnos,
    GetClusterConfig: Reader._on_config_answer,
    CloseStream: Reader._on_close_answer,
    ObserveSeqno: Reader._on_observed,
}


def _address(cluster_map: ClusterMap, vbucket: VBucketId) -> Address | None:
    node = cluster_map.active_node(vbucket)
    return None if node < 0 else cluster_map.nodes[node]


def _refusal(answer: Response, what: str) -> StatusError:
    context = answer.context if isinstance(answer, ErrorResponse) and answer.status != Status.NOT_MY_VBUCKET else ""
    return status_error(answer.status, f"{what}: {context or answer.status.name}")


def _refusal_of(status: Status, vbucket: VBucketId) -> StatusError:
    return status_error(status, f"the node that should have vbucket {vbucket} does not have it")

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

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.dcp_link import Answered, ConfigPushed, LinkEvent, LinkReady, StreamMessage, StreamRun
from headwater.client.delivery import HandOut, PersistenceHold
from headwater.client.kv_connection import Backoff, Tolerance, is_final
from headwater.client.link_pool import SCOUT, Command, LinkPool, MapWatch, NewLink, Slot, VBucketWaits, active_address
from headwater.client.metrics import ReaderMetrics
from headwater.client.persistence_gate import PersistenceGate
from headwater.client.pieces import OpenSpool, Piece
from headwater.client.read_options import ReadOptions, Snapshots
from headwater.client.stream_opening import AfterEnd, Outcomes, StreamOpening, after_end, refusal
from headwater.client.vbucket_stream import Passed, VBucketStream
from headwater.errors import (
    AccessDenied,
    BucketReplaced,
    ConnectionFailed,
    HeadwaterError,
    RemoteProtocolError,
    StatusError,
)
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response
from headwater.protocol.messages.dcp_changes import SnapshotMarker
from headwater.protocol.messages.dcp_streams import (
    CloseStream,
    GetFailoverLog,
    StreamEnd,
    StreamFlags,
    StreamRequest,
    VBucketState,
)
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, ObserveSeqno
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status

# When a read fails: at once for what can't get better by waiting, and for the rest when it has waited too long.


REFUSALS_MAX = 3
"""How often in a row a node may refuse to have us before we believe it."""


class GivingUp:
    """The patience of one read."""

    def __init__(self, after_s: float | None, *, pool: LinkPool, waits: VBucketWaits) -> None:
        """None is for ever patient."""
        self._after_s = after_s
        self._pool = pool
        self._waits = waits
        self._tolerance = Tolerance(within_s=after_s)

    def is_hopeless(self, slot: Slot, error: HeadwaterError, cluster_map: ClusterMap, now_s: float) -> bool:
        """A link was lost: whether it makes no sense to try again."""
        if slot.is_ready:
            breaks_protocol = isinstance(error, RemoteProtocolError)
            return is_final(error) or (breaks_protocol and self._tolerance.ends_with(slot.address, now_s))
        # A node that has just left the cluster may refuse us, and the others know better: their map comes soon.
        is_insisting = self._pool.failures_in_a_row(slot.address) >= REFUSALS_MAX
        return is_final(error) and is_insisting and slot.address in cluster_map.nodes

    def overdue(self, cluster_map: ClusterMap, gate: PersistenceGate | None, now_s: float) -> HeadwaterError | None:
        """What the read fails with, where something has been waited for too long."""
        if self._after_s is None:
            return None
        if gate is not None and (stalled := gate.stalled(now_s, after_s=self._after_s)) is not None:
            return ConnectionFailed(
                f"vbucket {stalled} has not been persisted by all copies for {self._after_s:g} seconds: "
                f"{gate.why_held(stalled)}",
                hint="Look at the nodes that are named; where replicas are missing, set missing_replicas_hold to False",
            )
        overdue = self._waits.overdue(now_s, after_s=self._after_s)
        if overdue is None:
            return None
        vbucket, last = overdue
        address = active_address(cluster_map, vbucket)
        # A node that can't be connected to is the newest of what stands in the way: a connection ends its failures.
        last = (None if address is None else self._pool.last_failure(address)) or last
        silence = "no node has it" if address is None else f"{address} has not answered"
        why = silence if last is None else last.reason
        plain = ConnectionFailed(
            f"vbucket {vbucket} has been out of reach for {self._after_s:g} seconds: {why}",
            hint="Look whether its node is up, or raise give_up_after_s",
        )
        # The kind of what stands in the way, and what to do about that, are worth more than ours.
        return plain if last is None else last.retold(plain.reason)


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
        seeds: Iterable[Address],
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
        self._map = MapWatch(cluster_map, seeds=seeds, now_s=now_s)
        self._options = options
        self._outside = outside
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
        self._opening = StreamOpening(
            options,
            flags=stream_flags,
            value=stream_value,
            waits=self._waits,
            metrics=self.metrics,
            outcomes=Outcomes(placed=self._set_place, passed=self._pass_on, refused=self._move_on, let_go=self._let_go),
        )
        self._giving_up = GivingUp(options.give_up_after_s, pool=self._pool, waits=self._waits)
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
            boundaries = self._options.boundaries.get(vbucket, ())
            self._streams[vbucket] = VBucketStream(vbucket, offset, whole_snapshots=whole, boundaries=boundaries)
            self._waits.begin(vbucket, now_s=now_s)
            if from_now:
                self._opening.start_from_now(vbucket)
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
    def cluster_map(self) -> ClusterMap:
        """The newest that is known."""
        return self._map.map

    @property
    def has_pieces(self) -> bool:
        return not self._hand_out.is_empty

    @property
    def is_finished(self) -> bool:
        return not self._streams and self._hand_out.is_empty and (self._hold is None or self._hold.is_empty)

    @property
    def is_placed(self) -> bool:
        """Whether `offsets` has every vbucket, and a server has accepted those that start from now on."""
        return self._opening.is_placed

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
        self._map.look(self._pool, now_s)
        if self.failure is None:
            gate = None if self._hold is None else self._hold.gate
            self.failure = self._giving_up.overdue(self.cluster_map, gate, now_s)

    # --- asking for streams ---------------------------------------------------------------------------------------

    def _ask_due(self, now_s: float) -> None:
        asked: dict[int, list[VBucketStream]] = {}
        for vbucket in self._waits.due(now_s):
            stream = self._streams[vbucket]
            if not stream.is_idle:
                continue
            address = active_address(self.cluster_map, vbucket)
            if address is None:
                self._map.want()
                continue
            slot = self._pool.get(address, vbucket % self._options.connections_per_node, now_s=now_s)
            if slot is not None:
                asked.setdefault(slot.id, []).append(stream)
            elif now_s < self._pool.retry_at_s(address):
                self._map.want()
        for slot_id, streams in asked.items():
            self._opening.ask(self._pool.slots[slot_id], streams)

    def _on_high_seqnos(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        streams = list(slot.surveyed.get(request.opaque, []))
        self._take_high_seqnos(slot, streams, answer, now_s)
        # Not before: what fails on the way is the end of the link, and then they all wait.
        slot.surveyed.pop(request.opaque, None)

    def _take_high_seqnos(self, slot: Slot, streams: list[VBucketStream], answer: Response, now_s: float) -> None:
        if not isinstance(answer, GetAllVbSeqnosResponse):
            self._wait_all(streams, refusal(answer, "the high seqnos can't be read"), now_s)
            return
        highs = {entry.vbucket: entry.seqno for entry in answer.seqnos}
        self.metrics.set_high_seqnos({vbucket: high for vbucket, high in highs.items() if vbucket in self._streams})
        self._opening.on_high_seqnos(slot, streams, highs, now_s)
        if not streams and self._options.end is not None:
            self._check_ends(slot, highs, now_s)

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
                    self._map.want()

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
            if after is AfterEnd.FIND_AND_ASK:
                self._map.want()
            self._wait(stream, None, now_s, at_once=after is AfterEnd.ASK_AT_ONCE)

    # --- answers --------------------------------------------------------------------------------------------------

    def _on_stream_answer(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        self._opening.on_stream_answer(slot, request, answer, now_s)

    def _on_failover_log(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        self._opening.on_failover_log(slot, request, answer, now_s)

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
        told = refusal(answer, f"how far vbucket {request.vbucket} is persisted can't be read") if refused else None
        self._hold.on_answer(slot.address, request, answer, told)

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
        for vbucket in self._streams:
            if active_address(new, vbucket) != active_address(old, vbucket):
                self._waits.hurry(vbucket, now_s=now_s)
        for slot in list(self._pool.slots.values()):
            for stream in slot.all_streams:
                if active_address(new, stream.vbucket) != slot.address:
                    self._detach(stream)
                    self._wait(stream, None, now_s, at_once=True)
            if slot.lane != SCOUT and slot.address not in new.nodes:
                self._pool.forget(slot, None, now_s=now_s)

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
            self._opening.break_off(stream.vbucket)
            self._let_go(stream)
            self._wait(stream, error, now_s, at_once=True)
        self._map.want()
        if self._giving_up.is_hopeless(slot, error, self.cluster_map, now_s):
            self.failure = error

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
        self._opening.break_off(stream.vbucket)
        self._let_go(stream)

    def _let_go(self, stream: VBucketStream) -> None:
        self._hand_out.drop(stream.on_lost())
        self._hand_out.note_held(stream)

    def _forget_stream(self, vbucket: VBucketId) -> None:
        del self._streams[vbucket]
        self._waits.end(vbucket)
        self._opening.forget(vbucket)
        self.metrics.on_left(vbucket)

    def _move_on(self, stream: VBucketStream, error: StatusError, now_s: float) -> None:
        """A request for this vbucket was refused: try again where that may help."""
        if error.retriable:
            if error.stale_topology:
                self._map.want()
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

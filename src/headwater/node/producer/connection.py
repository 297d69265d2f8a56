"""A DCP connection of which this node is the producer: its streams, its flow control and its noops.

Data is pulled, not pushed: the listener calls `produce_into` when the socket can take more, so that a slow consumer
holds nothing in memory. Streams take turns, one chunk each.

A connection may open a thousand streams at once, so what all of them have in common is created only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from struct import Struct

import numpy as np

from headwater.errors import UnexpectedMessage
from headwater.node.producer.controls import BadControl, Controls, Shape, StreamFilter, Values, with_control
from headwater.node.producer.outbound import Output
from headwater.node.producer.stream import CHUNK_BYTES, NO_KIND, LiveFrames, Stream, StreamTerms
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.flow_control import PREPARE_SURCHARGE_BYTES, SendWindow
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import (
    DcpNoop,
    OpenFlags,
    StreamFlags,
    StreamRequest,
    VBucketState,
    encode_failover_log,
)
from headwater.protocol.numbers import CollectionId, ScopeId, VBucketId
from headwater.protocol.states import PrivilegesLost
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import (
    NEWEST,
    Accepted,
    Admission,
    ConnectionFacts,
    Dialect,
    RequestedVBucket,
    admit_stream,
)
from headwater.store.bucket import Bucket

StreamKey = tuple[VBucketId, int | None]
"""A vbucket, and the stream's id, or None without stream ids."""


class IdleStreams:
    """The streams of one connection that wait for changes. They cost nothing while nothing happens.

    A connection may have a thousand streams and a bucket a thousand commits a second. To find the streams that a
    commit wakes, `take_woken` compares arrays with one entry per vbucket instead of checking every stream.
    """

    def __init__(self, vbuckets: int) -> None:
        self._waiting = np.zeros(vbuckets, dtype=np.bool_)
        self._seqnos = np.zeros(vbuckets, dtype=np.uint64)
        """The seqno that the streams of a vbucket have reached. All idle streams are at its end, so they share one."""
        self._states = np.zeros(vbuckets, dtype=np.uint8)
        self._vbuuids = np.zeros(vbuckets, dtype=np.uint64)
        self._keys: dict[VBucketId, set[StreamKey]] = {}

    def add(self, key: StreamKey, stream: Stream) -> None:
        vbucket = key[0]
        self._keys.setdefault(vbucket, set()).add(key)
        self._waiting[vbucket] = True
        self._seqnos[vbucket] = stream.passed_seqno
        self._states[vbucket] = stream.state_at_start
        self._vbuuids[vbucket] = stream.vbuuid_at_start

    def take(self, vbucket: VBucketId) -> set[StreamKey]:
        """Remove and return the idle streams of a vbucket."""
        keys = self._keys.pop(vbucket, None)
        if keys is None:
            return set()
        self._waiting[vbucket] = False
        return keys

    def take_woken(self, bucket: Bucket) -> list[StreamKey]:
        """Remove and return the streams whose vbucket has new changes, another branch or state, or was rolled back."""
        numbers = bucket.vbuckets
        moved = numbers.durable_seqnos != self._seqnos
        moved |= numbers.states != self._states
        moved |= numbers.vbuuids != self._vbuuids
        moved &= self._waiting
        woken: list[StreamKey] = []
        for number in moved.nonzero()[0].tolist():
            self._waiting[number] = False
            woken += self._keys.pop(VBucketId(number))
        return woken


NOOP_OPAQUE = 0x10000000
"""Far from the opaques that consumers choose for their streams."""
IDLE_S_MAX = 360.0
"""A consumer that has enabled noops and sends nothing for this long is considered dead."""


@dataclass(slots=True)
class NoopState:
    """Dead-connection detection: one noop at a time, and the time of the last sign of life."""

    sent_s: float
    heard_s: float
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class KnownCollections:
    """The collections and scopes that stream requests are checked against."""

    manifest: Manifest
    collections: Mapping[CollectionId, ScopeId]
    scopes: frozenset[ScopeId]

    @classmethod
    def of(cls, manifest: Manifest) -> KnownCollections:
        return cls(
            manifest,
            {CollectionId(c.id): ScopeId(scope.id) for scope, c in manifest.collections()},
            frozenset(ScopeId(scope.id) for scope in manifest.scopes),
        )


# --- streams that are requested together ---------------------------------------------------------------------------
#
# A consumer opens a thousand streams at once, by requests that differ only in vbucket, opaque, vbuuid and seqnos.
# Once one of them has been accepted, the others only need a check of where they start.


_ALIKE = (
    StreamFlags.LATEST | StreamFlags.NO_VALUE | StreamFlags.ACTIVE_ONLY | StreamFlags.IGNORE_PURGED_TOMBSTONES
)  # fmt: skip
"""Flags that do not change how a request for an active vbucket is checked."""
_ANSWER = Struct(">BB6xII8x")
"""The header of a success: its magic, its opcode, the length of the body and the opaque."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPattern:
    """A stream request that was accepted, as a pattern for requests that ask for the same."""

    flags: StreamFlags
    value: bytes
    terms: StreamTerms
    manifest: Manifest
    """The manifest under which the filter was accepted."""
    ends_now: bool
    layout: Struct
    """The layout of a whole request: the parts that all requests share as bytes, the rest as numbers."""
    same: tuple[bytes, ...]

    @classmethod
    def of(cls, request: StreamRequest, accepted: Accepted, terms: StreamTerms) -> StreamPattern | None:
        """The pattern of a request; None if requests like it have to be checked one by one."""
        is_filtered = accepted.collections is not None
        is_odd = accepted.stream_id is not None or accepted.scope is not None or terms.shape.sync_writes
        if is_odd or int(request.flags) & ~int(_ALIKE) or bool(request.value) != is_filtered:
            return None
        layout = Struct(f">6sH4sI8x4s4xQQQQQ{len(request.value)}s")
        head, _, body_bytes, _, flags, *_, value = layout.unpack(replace(request, frame_infos=()).encode())
        return cls(
            flags=request.flags,
            value=request.value,
            terms=terms,
            manifest=terms.bucket.manifest,
            ends_now=StreamFlags.LATEST in request.flags,
            layout=layout,
            same=(head, body_bytes, flags, value),
        )

    def is_of(self, request: StreamRequest) -> bool:
        is_current = self.manifest is self.terms.bucket.manifest
        return is_current and (self.flags, self.value) == (request.flags, request.value)

    def alike(self, data: memoryview, count_max: int) -> Iterator[tuple[int, ...]]:
        """Yield vbucket, opaque, start, end, vbuuid and snapshot of the requests at the start of `data` that match."""
        count = min(count_max, len(data) // self.layout.size)
        with data[: count * self.layout.size] as requests:
            for head, vbucket, body, opaque, flags, *numbers, value in self.layout.iter_unpack(requests):
                if (head, body, flags, value) != self.same:
                    return
                yield vbucket, opaque, *numbers


@dataclass(slots=True)
class OpenedStreams:
    """What `accept_repeated` has done."""

    count: int = 0
    request_bytes: int = 0
    answers: bytes = b""


@dataclass(slots=True, kw_only=True)
class ProducerConnection:
    """See the module."""

    bucket: Bucket
    name: str
    flags: OpenFlags
    knows_collections: bool
    may_compress: bool
    opened_s: float
    live: LiveFrames
    """Shared by all connections of the bucket."""
    dialect: Dialect = NEWEST
    has_right: Callable[[], bool] = lambda: True
    """Whether the user may still stream from the bucket."""
    kind: str = "producer"
    """Its type in statistics."""
    controls: Controls = field(default_factory=Controls)
    window: SendWindow = field(default_factory=SendWindow)
    streams: dict[StreamKey, Stream] = field(default_factory=dict)
    acked_bytes: int = 0
    sent_bytes: int = 0
    ended_messages: int = 0
    """Messages sent by streams that have ended."""
    noop: NoopState = field(init=False)
    _ready: deque[StreamKey] = field(default_factory=deque)
    """Streams that have something to send, in the order of their turns."""
    _idle: IdleStreams = field(init=False)
    _open_ids: dict[VBucketId, set[int | None]] = field(default_factory=dict)
    """The ids of the streams that are open on each vbucket."""
    _shapes: dict[Values, Shape] = field(default_factory=dict)
    _kinds: dict[tuple[Values, tuple[CollectionId, ...] | None, bool], int] = field(default_factory=dict)
    _passes_all: StreamFilter = field(init=False)
    """The filter that all streams without a filter share."""
    _known_collections: KnownCollections = field(init=False)
    _pattern: StreamPattern | None = None

    def __post_init__(self) -> None:
        self.noop = NoopState(self.opened_s, self.opened_s)
        self._idle = IdleStreams(len(self.bucket.vbuckets))
        self._passes_all = StreamFilter(self.bucket.manifest, knows_collections=self.knows_collections)
        self._known_collections = KnownCollections.of(self.bucket.manifest)

    # --- requests -------------------------------------------------------------------------------------------------

    def set_control(self, key: bytes, value: bytes) -> None:
        """Apply a control message. Raises `BadControl` if its key or its value is not valid."""
        try:
            controls = with_control(self.controls, key.decode(), value.decode(), self.dialect)
        except UnicodeDecodeError as error:
            raise BadControl("the key or the value is not text") from error
        if controls.deleted_user_xattrs and OpenFlags.INCLUDE_DELETED_USER_XATTRS not in self.flags:
            # As recorded from a 7.0.5 server: the control only asks whether the flag is known.
            raise BadControl("include_deleted_user_xattrs needs the flag of the open")
        # As recorded from 8.0.2.
        if controls.force_value_compression and not self.may_compress:
            raise BadControl("force_value_compression needs snappy in HELLO")
        if controls.marker_version != "1.0" and not self.knows_collections:
            raise BadControl("max_marker_version needs collections in HELLO", Status.NOT_SUPPORTED)
        self.controls = controls
        self.window = self.window.resized(self.controls.buffer_bytes)
        self._shapes.clear()
        self._kinds.clear()
        self._pattern = None

    def on_buffer_ack(self, acked_bytes: int) -> None:
        self.acked_bytes += acked_bytes
        self.window = self.window.acked(acked_bytes)

    def admit(self, request: StreamRequest) -> Admission:
        """How to answer a stream request. The caller still has to open a stream that is accepted."""
        facts = ConnectionFacts(
            collections=self.knows_collections,
            include_xattrs=OpenFlags.INCLUDE_XATTRS in self.flags,
            noop_enabled=self.controls.noop_enabled,
            stream_id_enabled=self.controls.stream_id,
            sync_writes=self.controls.sync_writes,
            open_stream_ids=frozenset(self._open_ids.get(request.vbucket, ())),
        )
        known = self._vbucket_facts(request.vbucket)
        return admit_stream(request, connection=facts, vbucket=known, dialect=self.dialect)

    def open_stream(self, request: StreamRequest, accepted: Accepted) -> Stream:
        shape = self._shape(drops_values=StreamFlags.NO_VALUE in request.flags)
        # MB-26074. A seqno-advanced marks the end of such a snapshot, so the consumer has to know that message.
        skips_removals = OpenFlags.SKIP_DELETES_IN_INITIAL_BACKFILL in self.flags and self.knows_collections
        terms = StreamTerms(
            bucket=self.bucket,
            flags=request.flags,
            stream_id=accepted.stream_id,
            shape=shape,
            first_shape=replace(shape, skip_removals=True) if skips_removals else shape,
            stream_filter=self._filter(accepted),
            controls=self.controls,
            hides_completed_prepares=self.dialect.hides_completed_prepares,
            live=self.live,
            kind=self._kind(shape, accepted),
        )
        is_inside_snapshot = accepted.snapshot_start_seqno < accepted.start_seqno < request.snapshot_end_seqno
        stream = Stream(
            terms,
            vbucket=request.vbucket,
            opaque=request.opaque,
            start_seqno=accepted.start_seqno,
            snapshot_start_seqno=accepted.snapshot_start_seqno,
            end_seqno=accepted.end_seqno,
            from_disk_until=request.snapshot_end_seqno if is_inside_snapshot and shape.sync_writes else 0,
        )
        self._enter(stream)
        if self._pattern is None or not self._pattern.is_of(request):
            self._pattern = StreamPattern.of(request, accepted, terms)
        return stream

    def accept_repeated(self, data: memoryview, count_max: int) -> OpenedStreams:
        """Open the streams whose requests, at the start of `data`, ask for the same as one that was accepted before.

        Stops before the first request that differs or needs a closer check. The caller passes that one to `admit` and
        `open_stream`, which must always give the same result.
        """
        opened, pattern, live = OpenedStreams(), self._pattern, self.live
        states, facts_of = live.states, self.bucket.vbuckets.facts
        if pattern is None or pattern.manifest is not self.bucket.manifest:
            return opened
        for number, opaque, start, end, vbuuid, snapshot_start, snapshot_end in pattern.alike(data, count_max):
            vbucket = VBucketId(number)
            if vbucket >= len(states) or states[vbucket] != VBucketState.ACTIVE or self._open_ids.get(vbucket):
                break
            facts, high = facts_of[vbucket], live.durable_seqnos[vbucket]
            assert facts is not None, "an active vbucket is here"
            # The consumer must not lack purged deletions, and all that it has must be on the newest branch.
            goes_on = vbuuid == live.vbuuids[vbucket] and snapshot_end <= high and start >= facts.purge_seqno
            if not snapshot_start <= start <= min(snapshot_end, end) or (start and not goes_on):
                break
            stream = Stream(
                pattern.terms,
                vbucket=vbucket,
                opaque=opaque,
                start_seqno=start,
                snapshot_start_seqno=snapshot_start,
                end_seqno=max(start, high) if pattern.ends_now else end,
            )
            self._enter(stream)
            opened.count += 1
            log = encode_failover_log(facts.failover_log.entries)
            opened.answers += _ANSWER.pack(Magic.RESPONSE, Opcode.DCP_STREAM_REQUEST, len(log), opaque) + log
        opened.request_bytes = opened.count * pattern.layout.size
        return opened

    def _enter(self, stream: Stream) -> None:
        key = (stream.vbucket, stream.stream_id)
        self.streams[key] = stream
        self._open_ids.setdefault(stream.vbucket, set()).add(stream.stream_id)
        self._ready.append(key)

    def close_stream(self, vbucket: VBucketId, stream_id: int | None) -> bytes | None:
        """End a stream that the consumer closes. Returns the bytes to send, or None if there is no such stream."""
        stream = self._forget((vbucket, stream_id))
        if stream is None:
            return None
        data = stream.close(sends_end=self.controls.end_on_close)
        self._count_bytes(len(data))
        return data

    def _forget(self, key: StreamKey) -> Stream | None:
        stream = self.streams.pop(key, None)
        if stream is not None:
            self.ended_messages += stream.frames_sent
            self._open_ids[key[0]].discard(key[1])
        return stream

    def has_streamed(self, vbucket: VBucketId) -> bool:
        """Whether the vbucket has, or had, a stream on this connection."""
        return vbucket in self._open_ids

    def is_streaming(self, vbucket: VBucketId) -> bool:
        return bool(self._open_ids.get(vbucket))

    def on_rolled_back(self, vbucket: VBucketId) -> None:
        """The vbucket was rolled back: wake its streams so that they end, whatever they have sent."""
        for key, stream in self.streams.items():
            if key[0] == vbucket:
                stream.was_rolled_back = True
        self._ready.extend(self._idle.take(vbucket))

    def on_hand_over_answer(self, opaque: int) -> bytes:
        """The consumer has answered a set-vbucket-state. Returns what to send next."""
        for key, stream in list(self.streams.items()):
            if stream.opaque == opaque and stream.is_handing_over:
                data = stream.on_hand_over_answer()
                self._count_bytes(len(data))
                self._put_back(key, stream)
                return data
        return b""

    def _vbucket_facts(self, vbucket: VBucketId) -> RequestedVBucket | None:
        numbers = self.bucket.vbuckets
        facts = numbers.facts_of(vbucket)
        if facts is None:
            return None
        if self._known_collections.manifest is not self.bucket.manifest:
            self._known_collections = KnownCollections.of(self.bucket.manifest)
        known = self._known_collections
        return RequestedVBucket(
            state=facts.state,
            high_seqno=numbers.durable_seqno(vbucket),
            purge_seqno=facts.purge_seqno,
            failover_log=facts.failover_log,
            manifest_uid=known.manifest.uid,
            collections=known.collections,
            scopes=known.scopes,
        )

    def _filter(self, accepted: Accepted) -> StreamFilter:
        if accepted.collections is None and accepted.scope is None:
            return self._passes_all
        return StreamFilter(
            self.bucket.manifest,
            collections=accepted.collections,
            scope=accepted.scope,
            knows_collections=self.knows_collections,
        )

    def _shape(self, *, drops_values: bool) -> Shape:
        flags = self.flags
        if OpenFlags.NO_VALUE_WITH_UNDERLYING_DATATYPE in flags:
            values = Values.DROP_BUT_KEEP_DATATYPE
        elif OpenFlags.NO_VALUE in flags or drops_values:
            values = Values.DROP
        else:
            values = Values.KEEP
        if values not in self._shapes:
            # As recorded from a 7.0.5 server: the control for expirations counts with this flag only.
            include_delete_times = OpenFlags.INCLUDE_DELETE_TIMES in flags
            self._shapes[values] = Shape(
                strip_prefix=not self.knows_collections,
                values=values,
                include_xattrs=OpenFlags.INCLUDE_XATTRS in flags,
                include_deleted_user_xattrs=OpenFlags.INCLUDE_DELETED_USER_XATTRS in flags,
                include_delete_times=include_delete_times,
                expiry_opcode=include_delete_times and self.controls.expiry_opcode,
                takes_compressed=self.may_compress,
                compress=self.may_compress and self.controls.force_value_compression,
                sync_writes=self.controls.sync_writes,
            )
        return self._shapes[values]

    def _kind(self, shape: Shape, accepted: Accepted) -> int:
        """The number of a stream's kind. Streams of one kind share live changes: they have asked for the same form.

        A filter by scope changes with the events of its stream, so such a stream shares with no other.
        """
        if accepted.scope is not None:
            return NO_KIND
        asked = (shape.values, accepted.collections, accepted.stream_id is not None)
        if asked not in self._kinds:
            shown = replace(
                self.controls, noop_enabled=False, noop_interval_s=0, buffer_bytes=0, priority="", consumer_name="",
                cursor_dropping=False, end_on_close=False,
            )  # fmt: skip
            self._kinds[asked] = self.live.kind_of((shape, shown, self.knows_collections, asked))
        return self._kinds[asked]

    # --- data -----------------------------------------------------------------------------------------------------

    def produce(self, bytes_max: int) -> bytes:
        """Like `produce_into`, but returns the data."""
        output = Output()
        self.produce_into(output, bytes_max)
        return bytes(output.data)

    def wake(self, vbuckets: Iterable[int]) -> bool:
        """Changes of these vbuckets are durable: wake the streams that wait for them. Returns whether any is ready."""
        for vbucket in vbuckets:
            self._ready.extend(self._idle.take(VBucketId(vbucket)))
        return bool(self._ready)

    def produce_into(self, output: Output, bytes_max: int, *, is_awake: bool = False) -> None:
        """Write the next data of all streams in turns, within the window; nothing if there is nothing to send.

        Unless `is_awake` says that every stream with something to send is awake, first wake the idle streams whose
        vbuckets have changed in any way.
        """
        if not self.has_right():
            for key, ended in list(self.streams.items()):
                output.append(ended.end(PrivilegesLost))
                self._forget(key)
            return
        if not is_awake:
            self._ready.extend(self._idle.take_woken(self.bucket))
        until = output.used + bytes_max
        # A producer sends while any room is left, so it may overdraw the window by one frame (kv_engine, DCP docs,
        # "Flow Control"; the recorded servers do so).
        while self._ready and (start := output.used) < until:
            room_bytes = self.window.room_bytes
            if room_bytes is not None and room_bytes <= 0:
                break
            key = self._ready.popleft()
            stream = self.streams.get(key)
            if stream is None:
                continue
            prepares = stream.prepares_sent
            left_bytes = min(until - start, CHUNK_BYTES)
            stream.produce(output, left_bytes if room_bytes is None else min(left_bytes, room_bytes))
            surcharge = (stream.prepares_sent - prepares) * PREPARE_SURCHARGE_BYTES
            self._count_bytes(output.used - start, surcharge=surcharge)
            self._put_back(key, stream)

    @property
    def has_more(self) -> bool:
        """Whether streams wait for their turn and the consumer has room. Idle streams are not checked."""
        return bool(self._ready) and self.window.is_open

    def _put_back(self, key: StreamKey, stream: Stream) -> None:
        """Queue a stream again after its turn. Remove it if it has ended; let it idle if it has nothing to send."""
        if stream.is_ended:
            self._forget(key)
        elif not stream.has_work:
            self._idle.add(key, stream)
        elif self.controls.backfill_order == "sequential":
            self._ready.appendleft(key)
        else:
            self._ready.append(key)

    def _count_bytes(self, size: int, *, surcharge: int = 0) -> None:
        self.sent_bytes += size
        if self.controls.buffer_bytes:
            self.window = self.window.sent(size + surcharge)

    @property
    def sent_messages(self) -> int:
        """The number of messages of all its streams, including those that have ended."""
        return self.ended_messages + sum(stream.frames_sent for stream in self.streams.values())

    # --- time -----------------------------------------------------------------------------------------------------

    def heard(self, now_s: float) -> None:
        self.noop.heard_s = now_s

    def on_noop_answer(self) -> None:
        self.noop.is_waiting = False

    def tick(self, now_s: float) -> bytes:
        """Return a noop if one is due. Raises `UnexpectedMessage` if the consumer is considered dead."""
        if not self.controls.noop_enabled:
            return b""
        if self.noop.is_waiting:
            waited_s = now_s - self.noop.sent_s
            if waited_s > max(2 * self.controls.noop_interval_s, 1.0) or now_s - self.noop.heard_s > IDLE_S_MAX:
                raise UnexpectedMessage(f"the consumer {self.name!r} has not answered a noop for {waited_s:.0f} s")
            return b""
        if now_s - self.noop.sent_s < self.controls.noop_interval_s:
            return b""
        self.noop.sent_s = now_s
        self.noop.is_waiting = True
        return DcpNoop(opaque=NOOP_OPAQUE).encode()

    def disconnect(self) -> None:
        for stream in self.streams.values():
            stream.disconnect()
        self.streams.clear()

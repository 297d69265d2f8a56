"""The client under asyncio: `async with headwater.connect("couchbase://host/bucket", …) as client`, or without a block
`client = await headwater.connect(…)` and in the end `await client.close()`.

It reads the bucket's cluster map and manifest, and builds what a read needs from the options and offsets: a sans-IO
`Reader`, the connections that the reader asks for, and the edge that runs both. `blocking_client` runs the same client
in a thread. This code must not block the caller's event loop.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from datetime import datetime
from typing import Any, Generic, Self, TypeVar, Unpack

from headwater.client.asyncio_edge import AsyncioEdge
from headwater.client.bootstrap import BucketView, ClientEnvironment, hosts_of
from headwater.client.checkpoints import CheckpointStore, FileCheckpoint
from headwater.client.cluster_map import ClusterMap, Network
from headwater.client.collection_names import CollectionFilter, CollectionNames
from headwater.client.connection_string import Address
from headwater.client.groups import Assignment, GroupBucket, Membership
from headwater.client.groups.group_document import group_bucket
from headwater.client.links import SCOUT, DcpLink, DcpOpening, PooledLink
from headwater.client.offsets import Offsets
from headwater.client.pieces import Piece
from headwater.client.read_options import READ_OPTIONS, ReadKeywords, ReadOptions, Start
from headwater.client.reader import Reader, ReaderEnvironment
from headwater.client.reading import Batches, Changes, ClientView, ReadStart, show_batches_in_notebooks
from headwater.client.retries import Attempts
from headwater.client.settings import CONNECT_KEYWORDS, ClientSettings, ConnectKeywords
from headwater.client.start_search import StartSearch, search_options
from headwater.errors import HeadwaterError, InvalidInput, LocalProtocolError
from headwater.options import list_keywords
from headwater.protocol.consumer import DcpControl
from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamFlags
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.stream_requests import StreamRequestValue

_NAME_RANDOM_BYTES = 6

DCP_FEATURES = (
    Feature.TCP_NODELAY, Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.COLLECTIONS,
    Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
)  # fmt: skip


Checkpoint = CheckpointStore | str | os.PathLike[str]
"""A path means a `FileCheckpoint`."""


B = TypeVar("B")
C = TypeVar("C")


class BucketReader(ABC, Generic[B, C]):
    """The reads that both clients offer, as batches or as typed changes."""

    @list_keywords(READ_OPTIONS.values())
    def batches(
        self, *, checkpoint: Checkpoint | None = None, group: Membership | None = None, **options: Unpack[ReadKeywords]
    ) -> B:
        """Read changes as Arrow record batches.

        The read contacts no server before the first batch is requested, so `start="now"` is that moment. To begin
        earlier, call `start()` of the returned read.

        Args:
            checkpoint: Where offsets are saved; a path is a `FileCheckpoint`. The read resumes from the saved offsets,
                so `start` applies only the first time.
            group: The consumer group that shares the vbuckets. All its members must use one shared checkpoint.
            options: The options of the read, as in `headwater.ReadKeywords`.

        Returns:
            The batches, to iterate over.

        Raises:
            InvalidInput: An option has a wrong value, or the options contradict each other.
            TypeError: There is no such option.
            LocalProtocolError: The client is closed.
        """
        return self.read(ReadOptions.make("batches", **options), checkpoint=checkpoint, group=group, text_keys=True)

    @list_keywords(READ_OPTIONS.values())
    def changes(
        self, *, checkpoint: Checkpoint | None = None, group: Membership | None = None, **options: Unpack[ReadKeywords]
    ) -> C:
        """Read changes as objects, one by one. Arguments and errors are those of `batches`."""
        return self._walk(self.read(ReadOptions.make("changes", **options), checkpoint=checkpoint, group=group))

    @abstractmethod
    def read(
        self,
        options: ReadOptions,
        *,
        checkpoint: Checkpoint | None = None,
        group: Membership | None = None,
        text_keys: bool = False,
    ) -> B:
        """As `batches`, with options that are already checked, and with keys as bytes unless `text_keys` is set."""

    @abstractmethod
    def _walk(self, batches: B) -> C:
        """The changes of these batches."""


@list_keywords(CONNECT_KEYWORDS)
def connect(url: str, **settings: Unpack[ConnectKeywords]) -> Client:
    """Make a client of the bucket that the connection string names. Use it in `async with`, or `await` and `close` it.

    The client connects when it is entered or awaited, or with its first read.

    Args:
        url: The connection string: `couchbase://host/bucket`, or `couchbases://` for TLS.
        settings: The user, the password and how to connect, as in `headwater.ConnectKeywords`.

    Returns:
        The client, which is not connected yet.

    Raises:
        InvalidInput: The connection string or a setting is not valid, or the settings contradict each other.
    """
    return Client(ClientSettings.make(url, **settings))


class Client(BucketReader[Batches, Changes]):
    """Reads one bucket."""

    def __init__(self, settings: ClientSettings, environment: ClientEnvironment | None = None) -> None:
        show_batches_in_notebooks()
        self.settings = settings
        self._environment = environment or ClientEnvironment()
        self._bucket: BucketView | None = None
        self._readings: list[Batches] = []
        self._is_closed = False

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        self._bucket = await self._look()
        self._is_closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all reads. Offsets that the callers have finished with are saved."""
        self._is_closed = True
        readings, self._readings = self._readings, []
        outcomes = await asyncio.gather(*(reading.aclose() for reading in readings), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    @property
    def cluster_map(self) -> ClusterMap:
        """The cluster map as of when the client connected."""
        return self._connected().cluster_map

    @property
    def bucket_uuid(self) -> str:
        return self._connected().cluster_map.uuid

    def _connected(self) -> BucketView:
        if self._bucket is None:
            raise LocalProtocolError(
                "the client is not connected", hint="Await it, as in `client = await headwater.connect(…)`, or read"
            )
        return self._bucket

    def view(self) -> ClientView:
        """The data that a representation shows. It never includes the password."""
        return ClientView(
            settings=self.settings,
            bucket=self._bucket,
            is_closed=self._is_closed,
            reads=tuple(reading.summary() for reading in self._readings if not reading.is_closed),
        )

    def __repr__(self) -> str:
        return self.view().text()

    def _repr_html_(self) -> str:
        return self.view().html()

    async def _look(self) -> BucketView:
        return await self._environment.look_at(replace(self.settings, bucket_was_seen=self._bucket is not None))

    async def _look_with_retries(self, options: ReadOptions) -> BucketView:
        """Look at the bucket, and retry as patiently as a read does with its later connections."""
        loop = asyncio.get_running_loop()
        attempts = Attempts(options, random=self._environment.random, now_s=loop.time())
        while True:
            try:
                return await self._look()
            except HeadwaterError as error:
                await asyncio.sleep(attempts.delay_s_after(error, loop.time()))

    # --- reading --------------------------------------------------------------------------------------------------

    def _walk(self, batches: Batches) -> Changes:
        return Changes(batches)

    def read(
        self,
        options: ReadOptions,
        *,
        checkpoint: Checkpoint | None = None,
        group: Membership | None = None,
        text_keys: bool = False,
    ) -> Batches:
        if self._is_closed:
            raise LocalProtocolError("the client is closed", hint="Create a new client, and read before you close it")
        store = _store(checkpoint)
        if group is None:
            reading = Batches(
                lambda options: self._begin_from_checkpoint(options, store), options, store, text_keys=text_keys
            )
        else:
            reading = GroupBatches(
                lambda offsets: self._begin(replace(options, vbuckets=frozenset(offsets)), offsets),
                options,
                _checked_for_group(options, store),
                membership=group,
                find_bucket=self._group_bucket,
                text_keys=text_keys,
            )
        self._readings = [*(other for other in self._readings if not other.is_closed), reading]
        return reading

    async def _group_bucket(self, options: ReadOptions) -> GroupBucket:
        bucket = self._bucket or await self._look_with_retries(options)
        return group_bucket(self.settings, vbuckets=bucket.cluster_map.vbuckets)

    async def _begin_from_checkpoint(self, options: ReadOptions, checkpoint: CheckpointStore | None) -> ReadStart:
        start = (None if checkpoint is None else await checkpoint.load()) or options.start
        if isinstance(start, datetime):
            return replace(await self._begin(options, await self.find_start(options)), is_start_found=True)
        return await self._begin(options, start)

    async def find_start(self, options: ReadOptions) -> Offsets:
        """Find the offsets just before the first changes at or after `options.start`, which must be a time."""
        assert isinstance(options.start, datetime)
        started = await self._begin(search_options(options), Start.BEGINNING)
        edge = started.edge
        try:
            search = StartSearch(options.start, edge.reader.offsets, collections=started.collections)
            while not search.is_finished:
                pieces: list[Piece] = []
                while taken := edge.take_now():
                    pieces += taken
                if moves := search.step(pieces, edge.reader):
                    edge.follow(moves)
                elif not search.is_finished:
                    await edge.wait()
            return Offsets(started.bucket_uuid, search.found)
        finally:
            await edge.close()

    async def _begin(self, options: ReadOptions, start: Start | Offsets | dict[VBucketId, StreamOffset]) -> ReadStart:
        bucket = await self._look_with_retries(options)
        self._bucket = self._bucket or bucket
        names = CollectionNames(bucket.manifest)
        selected = names.select(scopes=options.scopes, collections=options.collections)
        value, only = _filter(selected)
        offsets = _starting_offsets(options, start, bucket.cluster_map)

        # Hosts to ask for the map when no node in it can be reached. A name that DNS resolves to a list of hosts is
        # probably not a host itself, and the list may change: it is resolved again while the read is cut off.
        where = self.settings.where
        is_listed = where.srv_name is not None
        seeds = list((not is_listed and self.settings.kv_addresses) or bucket.cluster_map.nodes)

        async def renew_seeds() -> None:
            seeds[:] = await hosts_of(where)

        def make_reader(now_s: float) -> Reader:
            return Reader(
                options,
                cluster_map=bucket.cluster_map,
                seeds=seeds,
                offsets=offsets,
                from_now=start is Start.NOW,
                # kv_engine, docs/dcp/documentation/recommended-apis.md: with this flag the server refuses a vbucket
                # that is not active on it instead of streaming a replica. Servers before 5.0 do not know the flag, and
                # have no collections.
                stream_flags=StreamFlags.ACTIVE_ONLY if bucket.has_collections else StreamFlags(0),
                stream_value=value if bucket.has_collections else None,
                environment=self._reader_environment(options, bucket.cluster_map.network),
                now_s=now_s,
            )

        return ReadStart(
            edge=AsyncioEdge(
                make_reader,
                tls=self.settings.tls_context(),
                timeouts=self.settings.timeouts,
                renew_seeds=renew_seeds if is_listed else None,
            ),
            names=names,
            collections=bucket.has_collections,
            xattrs=options.xattrs,
            only=only,
            bucket_uuid=bucket.cluster_map.uuid,
            others={
                vbucket: offset
                for vbucket, offset in (start.offsets.items() if isinstance(start, Offsets) else ())
                if vbucket not in offsets
            },
            is_start_found=start is Start.NOW,
        )

    def _reader_environment(self, options: ReadOptions, network: Network) -> ReaderEnvironment:
        environment = self._environment
        reader_id = environment.random_bytes(_NAME_RANDOM_BYTES).hex()
        features = (*DCP_FEATURES, Feature.SNAPPY) if options.compression else DCP_FEATURES
        # The bucket has been seen: a reader is made only after the client has read its map.
        login = replace(self.settings, features=features, bucket_was_seen=True).login()
        login = replace(login, random_bytes=environment.random_bytes)

        def new_link(slot: PooledLink, is_loopback: bool, now_s: float) -> DcpLink:
            name = f"{options.name}:{reader_id}:{slot.id}"
            opening = None if slot.lane == SCOUT else _opening(options, name)
            handshake = login.handshake(is_loopback=is_loopback)
            return DcpLink(handshake, opening, now_s=now_s, answer_s_max=self.settings.timeouts.answer_s)

        def decode_map(config: bytes, asked: Address) -> ClusterMap:
            return self.settings.decode_map(config, asked=asked, network=network)

        return ReaderEnvironment(
            new_link=new_link,
            decode_map=decode_map,
            open_spool=environment.open_spool,
            random=environment.random,
        )


_NO_HISTORY = (
    "The bucket keeps no history: in Couchbase only Magma buckets do, since 7.2. Read without history, or change the "
    "bucket's storage"
)


def _opening(options: ReadOptions, name: str) -> DcpOpening:
    flags = OpenFlags.PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES
    flags |= OpenFlags.INCLUDE_XATTRS if options.xattrs else OpenFlags(0)
    flags |= OpenFlags.NO_VALUE if options.no_value else OpenFlags(0)
    controls = [
        DcpControl(key="enable_noop", value="true", is_required=True),
        DcpControl(key="set_noop_interval", value=str(options.noop_interval_s), is_required=True),
        DcpControl(key="connection_buffer_size", value=str(options.buffer_bytes), is_required=True),
        DcpControl(key="enable_expiry_opcode", value="true"),
        DcpControl(key="supports_cursor_dropping", value="true"),
        DcpControl(key="v7_dcp_status_codes", value="true"),
        DcpControl(key="flatbuffers_system_events", value="true"),
        # With this, the server reports up to which seqno it has purged deletions: `StreamOffset.purge_seqno`.
        DcpControl(key="max_marker_version", value="2.2"),
    ]
    if options.priority is not None:
        controls.append(DcpControl(key="set_priority", value=options.priority))
    if options.history:
        controls.append(DcpControl(key="change_streams", value="true", is_required=True, refused_hint=_NO_HISTORY))
    if options.compression:
        controls.append(DcpControl(key="force_value_compression", value="true", is_required=True))
    return DcpOpening(
        name=name,
        flags=flags,
        controls=tuple(controls),
        buffer_bytes=options.buffer_bytes,
        noop_interval_s=options.noop_interval_s,
    )


def _store(checkpoint: Checkpoint | None) -> CheckpointStore | None:
    if isinstance(checkpoint, str | os.PathLike):
        return FileCheckpoint(checkpoint)
    if checkpoint is not None and not all(hasattr(checkpoint, name) for name in ("load", "save", "close")):
        raise InvalidInput(
            f"{checkpoint!r} is not a checkpoint", hint="Give a path, or a FileCheckpoint, a SqliteCheckpoint, …"
        )
    return checkpoint


def _checked_for_group(options: ReadOptions, checkpoint: CheckpointStore | None) -> CheckpointStore:
    if checkpoint is None:
        raise InvalidInput(
            "a member of a group needs a checkpoint",
            hint="Give one that all members share, such as XattrCheckpoint, so that another member can resume",
        )
    if options.vbuckets is not None or options.end is not None or options.start is not Start.BEGINNING:
        raise InvalidInput(
            "a member of a group can't choose its vbuckets, its start or its end",
            hint="Omit vbuckets, start and end: the group determines what is read, and the checkpoint from where",
        )
    return checkpoint


def _filter(selected: CollectionFilter) -> tuple[StreamRequestValue, CollectionFilter | None]:
    """Return the filter for the server, and the filter to apply here (None if the server does it all).

    A server filters either by collections or by one scope. Anything else is filtered here.
    """
    if selected.collections and not selected.scopes:
        return StreamRequestValue(collections=tuple(sorted(selected.collections))), None
    if len(selected.scopes) == 1 and not selected.collections:
        return StreamRequestValue(scope=next(iter(selected.scopes))), None
    return StreamRequestValue(), selected if selected.scopes else None


def _starting_offsets(
    options: ReadOptions, start: Start | Offsets | dict[VBucketId, StreamOffset], cluster_map: ClusterMap
) -> dict[VBucketId, StreamOffset]:
    if isinstance(start, dict):
        return start
    vbuckets = frozenset(map(VBucketId, range(cluster_map.vbuckets)))
    given: dict[VBucketId, StreamOffset] = {}
    if isinstance(start, Offsets):
        start.check_bucket(cluster_map.uuid)
        given = dict(start.offsets)
    wanted = vbuckets if options.vbuckets is None else options.vbuckets
    if options.end is not None and not isinstance(options.end, str):
        wanted &= frozenset(options.end)
    unknown = sorted((wanted | given.keys()) - vbuckets)
    if unknown:
        raise InvalidInput(
            f"there is no vbucket {unknown[0]}: the bucket has {cluster_map.vbuckets}",
            hint="Check the vbuckets, and that the offsets belong to this bucket",
        )
    return {vbucket: given.get(vbucket, StreamOffset()) for vbucket in sorted(wanted)}


# --- the read of one member of a group ----------------------------------------------------------------------------


BeginAt = Callable[[dict[VBucketId, StreamOffset]], Awaitable[ReadStart]]
"""Start a read of these vbuckets from these offsets."""


class GroupBatches(Batches):
    """Batches of the vbuckets that a membership assigns to this member, while they are assigned to it.

    The reader applies a new assignment between two batches, when the caller has finished with everything it received.
    So a vbucket that is handed over to another member is saved up to the last change that the caller has seen.
    """

    def __init__(
        self,
        begin_at: BeginAt,
        options: ReadOptions,
        checkpoint: CheckpointStore,
        *,
        membership: Membership,
        find_bucket: Callable[[ReadOptions], Awaitable[GroupBucket]],
        text_keys: bool = False,
    ) -> None:
        super().__init__(self._begin_with_assignment, options, checkpoint, text_keys=text_keys)
        self._begin_at = begin_at
        self._store = checkpoint
        self._membership = membership
        self._find_bucket = find_bucket
        self._assignment = Assignment(number=0)
        self._has_asked = False
        """Whether `start` of the membership was called; it may have failed."""
        self._has_joined = False

    def end_now(self) -> None:
        raise LocalProtocolError("a member of a group reads indefinitely", hint="Iterate over its batches")

    async def _begin_with_assignment(self, options: ReadOptions) -> ReadStart:
        if not self._has_joined:
            bucket = await self._find_bucket(options)
            self._has_asked = True
            await self._membership.start(bucket)
            self._has_joined = True
        self._assignment = self._membership.current()
        return await self._begin_at(await self._saved_offsets(self._assignment.vbuckets))

    async def _saved_offsets(self, vbuckets: frozenset[VBucketId]) -> dict[VBucketId, StreamOffset]:
        saved: Offsets | None = await self._store.load()
        return {vbucket: (saved and saved.get(vbucket)) or StreamOffset() for vbucket in sorted(vbuckets)}

    async def _take_next(self) -> None:
        while (started := await self._start_once()) is not None and not self._is_closed:
            await self._keep_to_assignment(started)
            await self._save_if_due()
            if self._assignment.is_last:
                await self.aclose()
                return
            # No await from here until the pieces are returned, so the assignment can't change in between.
            if self._membership.current().number == self._assignment.number and (pieces := started.edge.take_now()):
                self._taken = pieces
                return
            await self._wait_for_news(started)

    async def _keep_to_assignment(self, started: ReadStart) -> None:
        """Apply the newest assignment. The caller has finished with everything it received."""
        reader = started.edge.reader
        newest = self._membership.current()
        change = newest.since(self._assignment)
        # Do this first: offsets of vbuckets that another member may own by now must not be saved.
        reader.close_vbuckets(change.drop)
        self._finished = reader.offsets
        if newest.number == self._assignment.number:
            return
        reader.close_vbuckets(change.hand_over, keep_offsets=True)
        await self.save()
        await self._membership.release(change.hand_over)
        reader.close_vbuckets(change.hand_over)
        offsets = await self._saved_offsets(change.begin)
        started.edge.follow(offsets)
        # Only now: if the caller is cancelled during one of these awaits, the next call repeats all of this.
        self._assignment = newest

    async def _wait_for_news(self, started: ReadStart) -> None:
        """Wait for pieces or a new assignment. It takes no pieces, so cancelling it loses none."""
        waits: set[asyncio.Task[object]] = {asyncio.create_task(self._membership.assignment_changed(self._assignment))}
        if not started.edge.reader.is_finished:
            waits.add(asyncio.create_task(started.edge.wait()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        if self._started is not None:
            own = self._membership.current()
            lost = own.since(self._assignment).drop
            self._finished = {vbucket: offset for vbucket, offset in self._finished.items() if vbucket not in lost}
        try:
            await super().aclose()
        finally:
            if self._has_asked:
                await self._membership.stop()

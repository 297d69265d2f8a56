"""A planner's connections to its bucket, for repeated requests of high seqnos, failover logs and the manifest.

The planner of a `dcp` stream and the driver of a landing have one each. It blocks, and retries as patiently as a read:
restarting a node does not end a query. Collections come and go; `SelectionWatch` tracks the names that a user asked
for, and what became of them.

A server refuses a filter on a dropped collection, even if the drop itself has not been read yet. So the planner
remembers the ids of the requested names. When one of them is no longer in the manifest, tasks read batches without a
filter and filter the rows themselves, until all vbuckets are past the drop; from then on the server filters again, by
the remaining collections. If none remain, nothing is read.

The planner requests the manifest of a batch after the batch's end seqnos, so it contains every existing collection
with changes in the batch. Tasks get it with their plan.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

from headwater.client.blocking_bucket import Surveyor
from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import ClusterMap
from headwater.client.collection_names import CollectionNames
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions
from headwater.client.retries import Attempts
from headwater.errors import HeadwaterError, NoConsistentCut, UnknownCollection, UnknownScope
from headwater.landing.planning import RowShare, Survey, VBucketRange, contradictions, share_out
from headwater.landing.source_options import Conditions, SourceOptions
from headwater.protocol.manifest import ID_MAX, Collection, Manifest, Scope
from headwater.protocol.numbers import CollectionId, ScopeId, Seqno, VBucketId


class Filtering(Enum):
    BY_SERVER = auto()
    BY_TASK = auto()
    """The server sends everything, and the tasks filter."""
    NOTHING_LEFT = auto()
    """All requested collections have been dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBucket:
    """The bucket as the tasks of a batch see it."""

    view: BucketView
    filtering: Filtering = Filtering.BY_SERVER
    scopes: tuple[str, ...] = ()
    collections: tuple[str | int, ...] = ()
    """The filter for the server, if it filters."""
    ids: frozenset[int] = frozenset()
    """The ids of the requested collections, by name or by scope, including dropped ones."""

    def filtered_by_task(self, options: ReadOptions) -> PlannedBucket:
        return replace(self, filtering=Filtering.BY_TASK, scopes=options.scopes)

    def read_options(self, options: ReadOptions) -> ReadOptions:
        if self.filtering is Filtering.BY_TASK:
            return replace(options, scopes=(), collections=())
        return replace(options, scopes=self.scopes, collections=self.collections)


@dataclass(frozen=True, slots=True)
class SeenCollection:
    """A collection that existed once, by a name such as `shop.orders`, or a scope; with its id if that is known."""

    name: str
    id: int | None = None

    @classmethod
    def parse(cls, text: str) -> SeenCollection:
        name, _, id_ = text.partition("=")
        return cls(name, int(id_) if id_ else None)

    def __str__(self) -> str:
        return self.name if self.id is None else f"{self.name}={self.id}"


class SelectionWatch:
    """For one query: the ids that the names have had, and up to where the drops of missing ones must be read."""

    def __init__(self, options: ReadOptions, seen: Iterable[SeenCollection] = ()) -> None:
        self._scopes, self._collections = options.scopes, options.collections
        self._known: set[str | int] = {one.name for one in seen}
        """The names that have existed at some time."""
        self._ids: dict[int, str] = {one.id: one.name for one in seen if one.id is not None and self.is_wanted(one)}
        """The ids and paths of all collections that were ever selected."""
        self._gone: frozenset[int] = frozenset()
        self._read_to: Mapping[VBucketId, Seqno] | None = None
        """The drops of those that are gone are before these seqnos."""

    @property
    def is_of_all(self) -> bool:
        return not self._scopes and not self._collections

    def is_wanted(self, one: SeenCollection) -> bool:
        """Whether it is requested, by its name or its scope's."""
        return self.is_of_all or one.name in self._collections or one.name.partition(".")[0] in self._scopes

    def on_survey(self, high_seqnos: Mapping[VBucketId, Seqno]) -> None:
        """High seqnos were requested, after the manifest of the last plan."""
        if self._gone and self._read_to is None:
            self._read_to = dict(high_seqnos)

    def wanted_ids(self, view: BucketView) -> set[int]:
        """Return the ids of the collections that the names mean now."""
        return self._select(CollectionNames(view.manifest))[2]

    def _select(self, names: CollectionNames) -> tuple[tuple[str, ...], tuple[str | int, ...], set[int]]:
        """Return the requested scopes and collections that exist, and the ids of all collections they mean."""
        scopes = tuple(scope for scope in self._scopes if self._is_there(names, scope=scope))
        collections = tuple(one for one in self._collections if self._is_there(names, collection=one))
        return scopes, collections, {*map(int, names.ids_in(names.select(scopes=scopes, collections=collections)))}

    def plan(self, view: BucketView, start: Offsets) -> PlannedBucket:
        """Return what a batch from these offsets reads. Raises for a name that never existed."""
        if self.is_of_all:
            return PlannedBucket(view=view)
        scopes, collections, live = self._select(CollectionNames(view.manifest))
        for scope, collection in view.manifest.collections():
            if collection.id in live:
                self._ids[int(collection.id)] = f"{scope.name}.{collection.name}"
        self._note_gone(self._ids.keys() - live)
        if self._gone and not self._is_past(start):
            named = replace(view, manifest=_with_names(view.manifest, {id_: self._ids[id_] for id_ in self._gone}))
            return PlannedBucket(view=named, filtering=Filtering.BY_TASK, scopes=self._scopes, ids=frozenset(self._ids))
        filtering = Filtering.BY_SERVER if scopes or collections else Filtering.NOTHING_LEFT
        return PlannedBucket(
            view=view, filtering=filtering, scopes=scopes, collections=collections, ids=frozenset(live)
        )

    def _is_there(self, names: CollectionNames, *, scope: str | None = None, collection: str | int = "") -> bool:
        """Return whether it exists. If it never did, return True, too, so that looking it up raises."""
        try:
            names.find_collection(collection) if scope is None else names.find_scope(scope)
        except (UnknownCollection, UnknownScope):
            return (collection if scope is None else scope) not in self._known
        self._known.add(collection if scope is None else scope)
        return True

    def _note_gone(self, gone: Iterable[int]) -> None:
        if self._gone != frozenset(gone):
            self._gone = frozenset(gone)
            self._read_to = None

    def _is_past(self, start: Offsets) -> bool:
        return self._read_to is not None and all(
            (at := start.get(vbucket)) is not None and at.seqno >= seqno for vbucket, seqno in self._read_to.items()
        )


def _with_names(manifest: Manifest, paths: Mapping[int, str]) -> Manifest:
    """Return a manifest that still names dropped collections. A scope that was dropped as well gets an unused id."""
    scopes = {scope.name: scope for scope in manifest.scopes}
    for id_, path in paths.items():
        name, _, collection_name = path.partition(".")
        scope = scopes.get(name) or Scope(id=ScopeId(ID_MAX - len(scopes)), name=name)
        held = (*scope.collections, Collection(id=CollectionId(id_), name=collection_name))
        scopes[name] = replace(scope, collections=held)
    return replace(manifest, scopes=tuple(scopes.values()))


# --- the watch --------------------------------------------------------------------------------------------------------

QUIET_WAIT_S_MAX = 60.0
"""How long to look for a moment without writes, where a consistent survey needs one."""
QUIET_RETRY_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The state of the bucket at one moment."""

    survey: Survey
    manifest_uid: int
    """The uid of the manifest from before the survey."""


class BucketWatch:
    """Connects on first use, and again after a failure. `sleep` waits between attempts."""

    def __init__(self, options: SourceOptions, *, sleep: Callable[[float], object] = time.sleep) -> None:
        self.options = options
        self._sleep = sleep
        self._surveyor: Surveyor | None = None
        self._selection = SelectionWatch(options.read, options.seen)
        self._row_share: RowShare | None = None

    @property
    def cluster_map(self) -> ClusterMap:
        return self._connected().cluster_map

    @property
    def bucket_uuid(self) -> str:
        return self.cluster_map.uuid

    @property
    def vbuckets(self) -> int:
        return self.cluster_map.vbuckets

    def _connected(self) -> Surveyor:
        if self._surveyor is None:
            self._surveyor = Surveyor(self.options.settings)
        return self._surveyor

    def survey(self, offsets: Offsets | None = None) -> Survey:
        """Return the state of the selected vbuckets. With `offsets`, survey again if the state contradicts them.

        A failover during a survey looks like a server that has lost its newest changes.
        """

        def ask() -> Survey:
            return self._connected().survey(self.options.where.vbuckets(self.vbuckets))

        survey = self._with_retries(ask)
        if offsets is not None and contradictions(offsets, survey):
            survey = self._with_retries(ask)
        self._selection.on_survey({vbucket: status.high_seqno for vbucket, status in survey.items()})
        return survey

    def find_start(self) -> Offsets:
        """Find where to start at a time, in all selected vbuckets: see `headwater.client.start_search`."""
        # Imported here, because other planners need no kernels, and the import takes long.
        from headwater.client.blocking_client import Client

        vbuckets = self.options.where.vbuckets(self.vbuckets)
        wanted = None if vbuckets is None else frozenset(vbuckets)

        def find() -> Offsets:
            with Client(self.options.settings) as client:
                return client.find_start(replace(self.options.read, start=self.options.start, vbuckets=wanted))

        return self._with_retries(find)

    def cut(self, offsets: Offsets) -> Cut:
        """Survey one moment: after every write acknowledged before this call, and before every later one.

        A Headwater node answers for all its vbuckets at once. Couchbase Server examines one vbucket after the other,
        and several nodes are asked one after the other: then a second survey must return the same.
        """
        began_s = time.monotonic()
        while True:
            view = self.check_history()
            survey = self.survey(offsets)
            if self._answers_at_once() or _newest(self.survey(offsets)) == _newest(survey):
                return Cut(survey=survey, manifest_uid=view.manifest.uid)
            if time.monotonic() - began_s > QUIET_WAIT_S_MAX:
                raise NoConsistentCut(
                    f"no moment was found in {QUIET_WAIT_S_MAX:.0f} seconds at which bucket "
                    f"{self.cluster_map.bucket!r} was not written to",
                    hint="Where several nodes have the bucket, or Couchbase Server does, a cut needs such a moment: "
                    "land without --consistent, or while less is written",
                )
            self._sleep(QUIET_RETRY_S)

    def holds(self, cut: Cut) -> bool:
        """Return whether the collections are unchanged since before the cut. A dropped one's changes are not sent."""
        return self._with_retries(self.look).manifest.uid == cut.manifest_uid

    def _answers_at_once(self) -> bool:
        nodes = {self.cluster_map.active_node(vbucket) for vbucket in range(self.vbuckets)}
        return len(nodes) == 1 and self._with_retries(lambda: self._connected().are_ours())

    def check_history(self) -> BucketView:
        """Raise unless the server keeps all versions of the selected data. Returns the bucket's collections.

        Headwater's nodes keep them for all collections, Couchbase Server for those whose `history` is on.
        """
        view = self._with_retries(self.look)
        missing: str | None = f"bucket {self.cluster_map.bucket}"
        if self._with_retries(lambda: self._connected().has_change_streams()):
            paths = [f"{scope.name}.{one.name}" for scope, one in view.manifest.collections() if not one.history]
            wanted = (f"collection {path}" for path in paths if self._selection.is_wanted(SeenCollection(path)))
            missing = None if self._with_retries(lambda: self._connected().are_ours()) else next(wanted, None)
        if missing is not None:
            raise NoConsistentCut(
                f"the server keeps no history of {missing}, so it can't be landed as it was at one moment",
                hint="Leave --consistent out, or have the server keep history: a Magma bucket of Couchbase Server 7.2 "
                "or later with a history retention, and `history` on in its collections",
            )
        return view

    def shares(
        self, ranges: list[VBucketRange], offsets: Offsets, group_of: Callable[[VBucketId], int] | None = None
    ) -> tuple[list[tuple[VBucketRange, ...]], PlannedBucket]:
        """Return the ranges by task, and the bucket as these tasks see it. `offsets` is where the batch starts; with
        `group_of`, all vbuckets of a group are in one task.

        The manifest is requested after the seqnos, so it contains every collection with changes in the batch.
        """
        cluster_map = self.cluster_map
        node_of = {VBucketId(vbucket): cluster_map.active_node(vbucket) for vbucket in range(cluster_map.vbuckets)}
        shares = share_out(
            ranges,
            node_of=node_of,
            tasks_min=self.options.partitions_min,
            row_share=self.row_share.value,
            group_of=group_of,
        )
        return shares, self._selection.plan(self._with_retries(self.look), offsets)

    @property
    def row_share(self) -> RowShare:
        """The share of changes that is read, at first from the server's counts of documents by collection."""
        if self._row_share is None:
            self._row_share = RowShare(1.0 if self._selection.is_of_all else self._with_retries(self._selected_share))
        return self._row_share

    def _selected_share(self) -> float:
        documents = self._connected().documents_by_collection()
        wanted = self._selection.wanted_ids(self.look())
        # A collection without documents may have had some.
        return max(1, sum(documents.get(id_, 0) for id_ in wanted)) / max(1, sum(documents.values()))

    def select_by(self, conditions: Conditions) -> bool:
        """Limit the selection to collections that meet the conditions. Returns False if there are none.

        Call this after the survey: collections created later have no changes before its seqnos.
        """
        view = self._with_retries(self.look)
        narrowed = conditions.selection(self.options.read, view, self._selection.wanted_ids(view))
        if narrowed is not None and narrowed != self.options.read:
            self._selection = SelectionWatch(narrowed, self.options.seen)
        return narrowed is not None

    def still_selects(self, bucket: PlannedBucket) -> bool:
        """Return whether the requested names still mean only collections of the plan.

        A collection recreated since has its first changes after the planned end, but they may be in a snapshot that
        was read with a filter that did not know its id.
        """
        if not self.options.read.scopes and not self.options.read.collections:
            return True
        return self._selection.wanted_ids(self._with_retries(self.look)) <= bucket.ids

    def look(self) -> BucketView:
        """Return the bucket's current collections, with the known map."""
        return self._connected().look()

    def close(self) -> None:
        surveyor, self._surveyor = self._surveyor, None
        if surveyor is not None:
            surveyor.close()

    def _with_retries(self, ask: Callable[[], T]) -> T:
        attempts = Attempts(self.options.read, random=random.random, now_s=time.monotonic())
        while True:
            try:
                return ask()
            except HeadwaterError as error:
                self._sleep(attempts.delay_s_after(error, time.monotonic()))


def _newest(survey: Survey) -> dict[VBucketId, tuple[int, int]]:
    """Return the branch and the high seqno of every vbucket."""
    return {it: (status.failover_log.newest.vbuuid, status.high_seqno) for it, status in survey.items()}

"""A planner's connections to its bucket: high seqnos, failover logs and the manifest, asked again and again.

The planner of a `dcp` stream and the driver of a landing keep one each. It blocks, and is as patient as a read: a node
that is restarted does not end a query. What a user asked for by name, and what has become of it, is in its
`SelectionWatch`: collections come and go.

A server takes no filter on a collection that was dropped: a read that names it is refused, also where the drop itself
is what is still to be read. So the planner keeps in mind which ids the names have had. When one of them is no longer in
the manifest, batches are read whole and filtered by their tasks, until all vbuckets are past the drop; from then on the
server filters again, by what is left. Where nothing is left, nothing is read.

The manifest of a batch is asked for after the seqnos that it ends at, so it knows every collection that the batch has
changes of and that is still there. Tasks get it with their plan, and need not ask for it themselves.
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
    """Everything is read, and the tasks keep what is wanted."""
    NOTHING_LEFT = auto()
    """All that was asked for has been dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBucket:
    """The bucket as the tasks of a batch see it."""

    view: BucketView
    filtering: Filtering = Filtering.BY_SERVER
    scopes: tuple[str, ...] = ()
    collections: tuple[str | int, ...] = ()
    """What the server is asked for, where it filters."""
    ids: frozenset[int] = frozenset()
    """The collections that are wanted, by name or by scope, dropped ones among them."""

    def filtered_by_task(self, options: ReadOptions) -> PlannedBucket:
        return replace(self, filtering=Filtering.BY_TASK, scopes=options.scopes)

    def read_options(self, options: ReadOptions) -> ReadOptions:
        if self.filtering is Filtering.BY_TASK:
            return replace(options, scopes=(), collections=())
        return replace(options, scopes=self.scopes, collections=self.collections)


@dataclass(frozen=True, slots=True)
class SeenCollection:
    """A collection that was there once, by a name such as `shop.orders`, or a scope; and its id, if that is known."""

    name: str
    id: int | None = None

    @classmethod
    def parse(cls, text: str) -> SeenCollection:
        name, _, id_ = text.partition("=")
        return cls(name, int(id_) if id_ else None)

    def __str__(self) -> str:
        return self.name if self.id is None else f"{self.name}={self.id}"


class SelectionWatch:
    """Of one query: which ids the names have had, and up to where the drops of those that are gone have to be read."""

    def __init__(self, options: ReadOptions, seen: Iterable[SeenCollection] = ()) -> None:
        self._scopes, self._collections = options.scopes, options.collections
        self._known: set[str | int] = {one.name for one in seen}
        """The names that have been there at some time."""
        self._ids: dict[int, str] = {one.id: one.name for one in seen if one.id is not None and self.is_wanted(one)}
        """Of all collections that were ever wanted, with the paths that they had."""
        self._gone: frozenset[int] = frozenset()
        self._read_to: Mapping[VBucketId, Seqno] | None = None
        """The drops of those that are gone lie before these."""

    @property
    def is_of_all(self) -> bool:
        return not self._scopes and not self._collections

    def is_wanted(self, one: SeenCollection) -> bool:
        """Whether it is asked for, by its name or by that of its scope."""
        return self.is_of_all or one.name in self._collections or one.name.partition(".")[0] in self._scopes

    def on_survey(self, high_seqnos: Mapping[VBucketId, Seqno]) -> None:
        """The vbuckets have been asked how far they are, later than the manifest of the last plan was."""
        if self._gone and self._read_to is None:
            self._read_to = dict(high_seqnos)

    def wanted_ids(self, view: BucketView) -> set[int]:
        """The collections that the names mean now."""
        return self._select(CollectionNames(view.manifest))[2]

    def _select(self, names: CollectionNames) -> tuple[tuple[str, ...], tuple[str | int, ...], set[int]]:
        """Those of the scopes and collections that are asked for which exist, and the ids of all that they mean."""
        scopes = tuple(scope for scope in self._scopes if self._is_there(names, scope=scope))
        collections = tuple(one for one in self._collections if self._is_there(names, collection=one))
        return scopes, collections, {*map(int, names.ids_in(names.select(scopes=scopes, collections=collections)))}

    def plan(self, view: BucketView, start: Offsets) -> PlannedBucket:
        """What a batch from these offsets reads. A name that was never there raises."""
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
        """Whether it exists, or never did: then looking it up raises."""
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
    """A manifest that still names collections that are gone. A scope that is gone as well gets an id that none has."""
    scopes = {scope.name: scope for scope in manifest.scopes}
    for id_, path in paths.items():
        name, _, collection_name = path.partition(".")
        scope = scopes.get(name) or Scope(id=ScopeId(ID_MAX - len(scopes)), name=name)
        held = (*scope.collections, Collection(id=CollectionId(id_), name=collection_name))
        scopes[name] = replace(scope, collections=held)
    return replace(manifest, scopes=tuple(scopes.values()))


# --- the watch --------------------------------------------------------------------------------------------------------

QUIET_WAIT_S_MAX = 60.0
"""How long a moment without writes is looked for, where only such a one can be surveyed as one."""
QUIET_RETRY_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The bucket at one moment."""

    survey: Survey
    manifest_uid: int
    """Of the collections, as they were before."""


class BucketWatch:
    """Connects when it is first asked, and again after a failure. `sleep` is what it waits with between attempts."""

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
        """The state of what is read; with `offsets`, one that does not contradict them if a second look can help.

        A failover in the middle of a survey looks like a server that has lost its newest changes.
        """

        def ask() -> Survey:
            return self._connected().survey(self.options.where.vbuckets(self.vbuckets))

        survey = self._with_retries(ask)
        if offsets is not None and contradictions(offsets, survey):
            survey = self._with_retries(ask)
        self._selection.on_survey({vbucket: status.high_seqno for vbucket, status in survey.items()})
        return survey

    def find_start(self) -> Offsets:
        """Where all that is read starts, by a time: see `headwater.client.start_search`."""
        # A planner that starts anywhere else needs no kernels, and what they need takes long to import.
        from headwater.client.blocking_client import Client

        vbuckets = self.options.where.vbuckets(self.vbuckets)
        wanted = None if vbuckets is None else frozenset(vbuckets)

        def find() -> Offsets:
            with Client(self.options.settings) as client:
                return client.find_start(replace(self.options.read, start=self.options.start, vbuckets=wanted))

        return self._with_retries(find)

    def cut(self, offsets: Offsets) -> Cut:
        """A survey of one moment: after all that was acknowledged before this call, and before all that comes after.

        A node of ours answers for all of its vbuckets at once. Couchbase Server looks at one vbucket after the other,
        and several nodes are asked one after the other: there it takes a second survey that finds the same.
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
        """Whether collections are what they were before the cut. Changes of one that is dropped are not sent."""
        return self._with_retries(self.look).manifest.uid == cut.manifest_uid

    def _answers_at_once(self) -> bool:
        nodes = {self.cluster_map.active_node(vbucket) for vbucket in range(self.vbuckets)}
        return len(nodes) == 1 and self._with_retries(lambda: self._connected().are_ours())

    def check_history(self) -> BucketView:
        """Raise unless all versions of what is read are kept, for a while. Returns the collections that were looked at.

        Headwater's nodes keep them of all collections alike, Couchbase Server of those whose `history` is on.
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
        """The ranges by task, and the bucket as these tasks see it. `offsets` is where the batch starts; with
        `group_of`, vbuckets of a group are in one task.

        The manifest is asked for after the seqnos, so it names every collection that the batch has changes of.
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
        """How many of the bucket's changes are read. The server may know how many documents collections have."""
        if self._row_share is None:
            self._row_share = RowShare(1.0 if self._selection.is_of_all else self._with_retries(self._selected_share))
        return self._row_share

    def _selected_share(self) -> float:
        documents = self._connected().documents_by_collection()
        wanted = self._selection.wanted_ids(self.look())
        # A collection with no documents has had some, perhaps.
        return max(1, sum(documents.get(id_, 0) for id_ in wanted)) / max(1, sum(documents.values()))

    def select_by(self, conditions: Conditions) -> bool:
        """Ask the server for no other collections than those that meet conditions; False where there are none.

        To be asked after the survey: what is made later has no changes before its seqnos.
        """
        view = self._with_retries(self.look)
        narrowed = conditions.selection(self.options.read, view, self._selection.wanted_ids(view))
        if narrowed is not None and narrowed != self.options.read:
            self._selection = SelectionWatch(narrowed, self.options.seen)
        return narrowed is not None

    def still_selects(self, bucket: PlannedBucket) -> bool:
        """Whether the names that are asked for still mean no other collections than those of a plan.

        One that was made again since then has its first changes behind the planned end, but perhaps in a snapshot that
        was read: the filter did not know its id.
        """
        if not self.options.read.scopes and not self.options.read.collections:
            return True
        return self._selection.wanted_ids(self._with_retries(self.look)) <= bucket.ids

    def look(self) -> BucketView:
        """The bucket as it is now, with the map that is known."""
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
    """Where every vbucket is."""
    return {it: (status.failover_log.newest.vbuuid, status.high_seqno) for it, status in survey.items()}

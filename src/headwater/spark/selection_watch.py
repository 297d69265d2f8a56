"""What a batch reads of the bucket, when collections that were asked for by name come and go.

A server takes no filter on a collection that was dropped: a read that names it is refused, also where the drop itself
is what is still to be read. So the planner keeps in mind which ids the names have had. When one of them is no longer in
the manifest, batches are read whole and filtered by their tasks, until all vbuckets are past the drop; from then on the
server filters again, by what is left. Where nothing is left, nothing is read.

The manifest of a batch is asked for after the seqnos that it ends at, so it knows every collection that the batch has
changes of and that is still there. Tasks get it with their plan, and need not ask for it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from headwater.client.bootstrap import BucketView
from headwater.client.collection_names import CollectionNames
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions
from headwater.errors import UnknownCollection, UnknownScope
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

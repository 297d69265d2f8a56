"""The names of scopes and collections, for changes that carry only ids.

Names come from the server's manifest and from the system events of the streams. A stream sends old changes before new
ones, so it may contain changes of a collection that is no longer in the newest manifest: known names are kept forever.
That is safe because ids are never reused.

A lookup by name finds only what exists now: a server accepts no filter on a dropped collection, and its name may have
been reused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headwater.errors import UnknownCollection, UnknownScope
from headwater.protocol import manifest as manifests
from headwater.protocol.manifest import Event, Manifest
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId
from headwater.protocol.status import Status

if TYPE_CHECKING:
    # Planners use names too, but no kernels: loading the kernels' compiler takes longer than a plan.
    from headwater.kernels.memory import Column

NAMES_SHOWN_MAX = 10
"""How many names an error lists at most."""

NO_CODE = -1
"""The code of an unknown name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionFilter:
    """What a read is limited to: whole scopes, including collections created in them later, and single collections."""

    scopes: frozenset[ScopeId] = frozenset()
    collections: frozenset[CollectionId] = frozenset()

    def passes(self, event: Event) -> bool:
        """Return whether the event is about one of them. Only reads of a whole scope get the scope's events."""
        return event.scope_id in self.scopes or getattr(event, "collection_id", None) in self.collections


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """The names as columns: each entry has a collection id, the code of its scope and the code of its name.

    A code is an index into the dictionary of names and never changes, so later dictionaries begin with earlier ones.
    """

    collection_ids: Column
    """Sorted, for binary search."""
    scope_codes: Column
    collection_codes: Column
    scopes: pa.Array
    collections: pa.Array


@dataclass(frozen=True, slots=True)
class _Known:
    scope_id: ScopeId
    name: str


class CollectionNames:
    """Names by id. It starts with a manifest, and learns from system events and newer manifests."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self._manifest_uid = ManifestUid(-1)
        self._scopes: dict[ScopeId, str] = {}
        self._collections: dict[CollectionId, _Known] = {}
        self._dropped_scopes: set[ScopeId] = set()
        self._dropped_collections: set[CollectionId] = set()
        self._scope_codes: dict[str, int] = {}
        self._collection_codes: dict[str, int] = {}
        self._table: NameTable | None = None
        self.update(manifest or Manifest())

    # --- learning -------------------------------------------------------------------------------------------------

    def update(self, manifest: Manifest) -> None:
        """Learn from a manifest: whatever it lacks has been dropped. A manifest that is not newer is ignored."""
        if manifest.uid <= self._manifest_uid:
            return
        self._manifest_uid = manifest.uid
        for scope in manifest.scopes:
            self._name_scope(scope.id, scope.name)
        for scope, collection in manifest.collections():
            self._name_collection(collection.id, _Known(scope.id, collection.name))
        # Dropped ids are never reused, so these sets only grow.
        self._dropped_scopes |= self._scopes.keys() - {scope.id for scope in manifest.scopes}
        self._dropped_collections |= self._collections.keys() - {held.id for _, held in manifest.collections()}

    def learn(self, event: Event) -> None:
        """Learn from an event. Every vbucket repeats it, and an old one may come at any time."""
        # An event of an older manifest may be about something that is dropped by now. The stream may not send the drop
        # any more, but our manifest has shown it. (All events of a manifest but the last carry the previous uid.)
        is_past = event.manifest_uid < self._manifest_uid
        match event:
            case manifests.CollectionCreated():
                if is_past and event.collection_id not in self._collections:
                    self._dropped_collections.add(event.collection_id)
                self._name_collection(event.collection_id, _Known(event.scope_id, event.name))
            case manifests.ScopeCreated():
                if is_past and event.scope_id not in self._scopes:
                    self._dropped_scopes.add(event.scope_id)
                self._name_scope(event.scope_id, event.name)
            case manifests.CollectionDropped():
                self._dropped_collections.add(event.collection_id)
            case manifests.ScopeDropped():
                self._dropped_scopes.add(event.scope_id)

    def _name_scope(self, scope_id: ScopeId, name: str) -> None:
        if self._scopes.get(scope_id) == name:
            return
        self._scopes[scope_id] = name
        self._scope_codes.setdefault(name, len(self._scope_codes))
        self._table = None

    def _name_collection(self, collection_id: CollectionId, known: _Known) -> None:
        if self._collections.get(collection_id) == known:
            return
        self._collections[collection_id] = known
        self._collection_codes.setdefault(known.name, len(self._collection_codes))
        self._table = None

    # --- names by id ----------------------------------------------------------------------------------------------

    def scope_code(self, scope_id: ScopeId) -> int:
        """Return the index of the scope's name in the table, or `NO_CODE`."""
        name = self._scopes.get(scope_id)
        return NO_CODE if name is None else self._scope_codes[name]

    def collection_code(self, collection_id: CollectionId) -> int:
        """Return the index of the collection's name in the table, or `NO_CODE`."""
        known = self._collections.get(collection_id)
        return NO_CODE if known is None else self._collection_codes[known.name]

    @property
    def table(self) -> NameTable:
        """The names as columns, for the bulk path."""
        if self._table is None:
            ids = sorted(self._collections)
            self._table = NameTable(
                collection_ids=np.array(ids, dtype=np.uint32),
                scope_codes=np.array([self.scope_code(self._collections[id_].scope_id) for id_ in ids], dtype=np.int32),
                collection_codes=np.array([self.collection_code(id_) for id_ in ids], dtype=np.int32),
                scopes=pa.array(self._scope_codes, pa.string()),
                collections=pa.array(self._collection_codes, pa.string()),
            )
        return self._table

    def ids_in(self, only: CollectionFilter) -> Column:
        """Return the sorted ids of all collections that a filter lets through, including dropped ones.

        The scope of an unknown collection is unknown too, so no scope lets it through.
        """
        of_scopes = (id_ for id_, known in self._collections.items() if known.scope_id in only.scopes)
        return np.array(sorted(only.collections.union(of_scopes)), dtype=np.uint32)

    # --- ids by name ----------------------------------------------------------------------------------------------

    def select(self, *, scopes: Iterable[str | int] = (), collections: Iterable[str | int] = ()) -> CollectionFilter:
        """Make the filter for scopes and collections, each given by name or id."""
        return CollectionFilter(
            scopes=frozenset(self.find_scope(scope) for scope in scopes),
            collections=frozenset(self.find_collection(collection) for collection in collections),
        )

    def find_scope(self, scope: str | int) -> ScopeId:
        """Return the id of an existing scope, by its name or its id (`8` or "0x8")."""
        live = {name: id_ for id_, name in self._scopes.items() if id_ not in self._dropped_scopes}
        if isinstance(scope, str) and scope in live:
            return live[scope]
        number = _as_number(scope)
        if number is not None and number in live.values():
            return ScopeId(number)
        was_dropped = number in self._dropped_scopes or scope in self._scopes.values()
        raise UnknownScope(
            Status.UNKNOWN_SCOPE,
            f"scope {_quoted(scope)} {'has been dropped' if was_dropped else 'is unknown'}",
            hint=_suggestion(str(scope), live),
        )

    def find_collection(self, collection: str | int) -> CollectionId:
        """Return the id of an existing collection, by its name ("scope.collection") or its id (`8` or "0x8")."""
        live = {self._path(id_): id_ for id_ in self._collections if id_ not in self._dropped_collections}
        if isinstance(collection, str) and collection in live:
            return live[collection]
        number = _as_number(collection)
        if number is not None and number in live.values():
            return CollectionId(number)
        if isinstance(collection, str) and "." in collection:
            self.find_scope(collection.partition(".")[0])
        was_dropped = number in self._dropped_collections or collection in {*map(self._path, self._collections)}
        raise UnknownCollection(
            Status.UNKNOWN_COLLECTION,
            f"collection {_quoted(collection)} {'has been dropped' if was_dropped else 'is unknown'}",
            hint=_suggestion(str(collection), live),
        )

    def _path(self, collection_id: CollectionId) -> str:
        known = self._collections[collection_id]
        return f"{self._scopes.get(known.scope_id, hex(known.scope_id))}.{known.name}"


def _as_number(name: str | int) -> int | None:
    """Return the id, if `name` is one."""
    if isinstance(name, int):
        return name
    try:
        return int(name, 16) if name.startswith("0x") else None
    except ValueError:
        return None


def _quoted(name: str | int) -> str:
    return f'"{name}"' if isinstance(name, str) else f"0x{name:x}"


def _suggestion(name: str, live: Collection[str]) -> str:
    """Suggest what to write instead: the most similar name, or else a list of all."""
    # Without a scope, the name is the last part.
    by_last_part = [path for path in live if path.rpartition(".")[2] == name]
    similar = by_last_part[:NAMES_SHOWN_MAX] or get_close_matches(name, live, n=1)
    if similar:
        return f"Did you mean {' or '.join(map(_quoted, similar))}?"
    shown = sorted(live)[:NAMES_SHOWN_MAX]
    more = f" and {len(live) - len(shown)} more" if len(live) > len(shown) else ""
    return f"Use one of these: {', '.join(shown)}{more}" if shown else "Leave it out: there is none in the bucket"

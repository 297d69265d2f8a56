"""Which changes and system events a stream gets: all, those of some collections, or those of a scope.

A filter follows the system events that its stream passes: a collection of the scope may come, and any of them may go.
When all have gone, so has the stream's purpose. One that lets everything pass has nothing to follow, so that the
streams of a connection can share it.
"""

from __future__ import annotations

import numpy as np

from headwater.protocol.kernels.memory import Column
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, ScopeId
from headwater.protocol.system_events import CollectionCreated, CollectionDropped, Event, ScopeDropped


class StreamFilter:
    """See the module."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        collections: tuple[CollectionId, ...] | None = None,
        scope: ScopeId | None = None,
        knows_collections: bool = True,
    ) -> None:
        self.collections = None if collections is None else frozenset(collections)
        self.scope = scope
        self.knows_collections = knows_collections
        """A consumer that does not gets the default collection, and no system events."""
        self._live = set(self.collections or ())
        if scope is not None:
            self._live = {c.id for holder, c in manifest.collections() if holder.id == scope}
        self._is_scope_dropped = False
        self._wanted: Column | None = None
        self._wanted_as_of: Manifest | None = None
        """The manifest under which this is what is wanted; None where that has to be found anew."""

    @property
    def lets_all_pass(self) -> bool:
        return self.collections is None and self.scope is None

    @property
    def is_empty(self) -> bool:
        """Nothing will ever pass again."""
        return self._is_scope_dropped or (self.collections is not None and not self._live)

    def wanted(self, manifest: Manifest) -> Column | None:
        """The ids of the collections whose changes pass now, ascending, or None for all."""
        if self._wanted_as_of is not manifest:
            ids = self._wanted_ids(manifest)
            self._wanted = None if ids is None else np.array(sorted(ids), dtype=np.uint32)
            self._wanted_as_of = manifest
        return self._wanted

    def _wanted_ids(self, manifest: Manifest) -> set[CollectionId] | None:
        if not self.knows_collections:
            return {DEFAULT_COLLECTION}
        if not self.lets_all_pass:
            return self._live
        if not manifest.has_dropped:
            return None
        return {collection.id for _, collection in manifest.collections()}

    def concerns(self, event: Event) -> bool:
        """Whether an event that the stream has come to passes. The filter follows what it tells."""
        if not self.knows_collections:
            return False
        if self.scope is not None:
            return self._follow_scope(event)
        if self.collections is None:
            return True
        if not isinstance(event, CollectionCreated | CollectionDropped):
            return False
        concerns = event.collection_id in self.collections
        if concerns and isinstance(event, CollectionDropped):
            self._live.discard(event.collection_id)
            self._wanted_as_of = None
        return concerns

    def _follow_scope(self, event: Event) -> bool:
        if event.scope_id != self.scope:
            return False
        if isinstance(event, CollectionCreated):
            self._live.add(event.collection_id)
        elif isinstance(event, CollectionDropped):
            self._live.discard(event.collection_id)
        self._is_scope_dropped |= isinstance(event, ScopeDropped)
        self._wanted_as_of = None
        return True

"""A planner's connections to its bucket: high seqnos, failover logs and the manifest, asked again and again.

The planner of a `dcp` stream and the driver of a landing keep one each. It blocks, and is as patient as a read: a node
that is restarted does not end a query. What a user asked for by name, and what has become of it, is in its
`SelectionWatch`.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headwater.client.blocking_bucket import Surveyor
from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import ClusterMap
from headwater.client.offsets import Offsets
from headwater.client.retries import Backoff, is_final
from headwater.client.survey import VBucketStatus
from headwater.errors import HeadwaterError, NoConsistentCut
from headwater.protocol.numbers import VBucketId
from headwater.spark.conditions import Conditions
from headwater.spark.planning import RowShare, Survey, VBucketRange, share_out
from headwater.spark.selection_watch import PlannedBucket, SeenCollection, SelectionWatch
from headwater.spark.source_options import SourceOptions

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

        survey = self._patiently(ask)
        if offsets is not None and any(_is_ahead(offsets, vbucket, status) for vbucket, status in survey.items()):
            survey = self._patiently(ask)
        self._selection.on_survey({vbucket: status.high_seqno for vbucket, status in survey.items()})
        return survey

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
        return self._patiently(self.look).manifest.uid == cut.manifest_uid

    def _answers_at_once(self) -> bool:
        nodes = {self.cluster_map.active_node(vbucket) for vbucket in range(self.vbuckets)}
        return len(nodes) == 1 and self._patiently(lambda: self._connected().are_ours())

    def check_history(self) -> BucketView:
        """Raise unless all versions of what is read are kept, for a while. Returns the collections that were looked at.

        Headwater's nodes keep them of all collections alike, Couchbase Server of those whose `history` is on.
        """
        view = self._patiently(self.look)
        missing: str | None = f"bucket {self.cluster_map.bucket}"
        if self._patiently(lambda: self._connected().has_change_streams()):
            paths = [f"{scope.name}.{one.name}" for scope, one in view.manifest.collections() if not one.history]
            wanted = (f"collection {path}" for path in paths if self._selection.is_wanted(SeenCollection(path)))
            missing = None if self._patiently(lambda: self._connected().are_ours()) else next(wanted, None)
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
        return shares, self._selection.plan(self._patiently(self.look), offsets)

    @property
    def row_share(self) -> RowShare:
        """How many of the bucket's changes are read. The server may know how many documents collections have."""
        if self._row_share is None:
            self._row_share = RowShare(1.0 if self._selection.is_of_all else self._patiently(self._selected_share))
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
        view = self._patiently(self.look)
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
        return self._selection.wanted_ids(self._patiently(self.look)) <= bucket.ids

    def look(self) -> BucketView:
        """The bucket as it is now, with the map that is known."""
        return self._connected().look()

    def close(self) -> None:
        surveyor, self._surveyor = self._surveyor, None
        if surveyor is not None:
            surveyor.close()

    def _patiently(self, ask: Callable[[], T]) -> T:
        options = self.options.read
        backoff = Backoff(
            delay_s_min=options.reconnect_delay_s_min, delay_s_max=options.reconnect_delay_s_max, random=random.random
        )
        give_up_s = math.inf if options.give_up_after_s is None else time.monotonic() + options.give_up_after_s
        for failures in itertools.count(1):
            try:
                return ask()
            except HeadwaterError as error:
                if is_final(error) or time.monotonic() > give_up_s:
                    raise
                self._sleep(backoff.delay_s(failures))
        raise AssertionError("counting has no end")


def _newest(survey: Survey) -> dict[VBucketId, tuple[int, int]]:
    """Where every vbucket is."""
    return {it: (status.failover_log.newest.vbuuid, status.high_seqno) for it, status in survey.items()}


def _is_ahead(offsets: Offsets, vbucket: VBucketId, status: VBucketStatus) -> bool:
    offset = offsets.get(vbucket)
    return (
        offset is not None and offset.vbuuid == status.failover_log.newest.vbuuid and offset.seqno > status.last_seqno
    )

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
from typing import TypeVar

from headwater.client.blocking_bucket import Surveyor
from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import ClusterMap
from headwater.client.offsets import Offsets
from headwater.client.retries import Backoff, is_final
from headwater.client.survey import VBucketStatus
from headwater.errors import HeadwaterError
from headwater.protocol.numbers import VBucketId
from headwater.spark.conditions import Conditions
from headwater.spark.planning import RowShare, Survey, VBucketRange, share_out
from headwater.spark.selection_watch import PlannedBucket, SelectionWatch
from headwater.spark.source_options import SourceOptions

T = TypeVar("T")


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
        survey = self._patiently(lambda: self._connected().survey(self.options.where.vbuckets(self.vbuckets)))
        odd = [
            vbucket for vbucket, status in survey.items() if offsets is not None and _is_ahead(offsets, vbucket, status)
        ]
        if odd:
            survey = {**survey, **self._patiently(lambda: self._connected().survey(odd))}
        self._selection.on_survey({vbucket: status.high_seqno for vbucket, status in survey.items()})
        return survey

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


def _is_ahead(offsets: Offsets, vbucket: VBucketId, status: VBucketStatus) -> bool:
    offset = offsets.get(vbucket)
    return (
        offset is not None and offset.vbuuid == status.failover_log.newest.vbuuid and offset.seqno > status.last_seqno
    )

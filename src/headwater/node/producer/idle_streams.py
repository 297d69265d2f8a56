"""Streams that wait for changes, so that many of them cost nothing while nothing happens.

A connection may have a thousand streams and a bucket a thousand commits a second. Which streams a commit wakes is found
by comparing arrays with one entry a vbucket, not by asking stream after stream.
"""

from __future__ import annotations

import numpy as np

from headwater.node.producer.stream import Stream
from headwater.protocol.numbers import VBucketId
from headwater.store.bucket import Bucket

StreamKey = tuple[VBucketId, int | None]
"""A vbucket, and the stream's id where streams have one."""


class IdleStreams:
    """The idle streams of one connection."""

    def __init__(self, vbuckets: int) -> None:
        self._waiting = np.zeros(vbuckets, dtype=np.bool_)
        self._seqnos = np.zeros(vbuckets, dtype=np.uint64)
        """Up to where the streams of a vbucket have come. Idle streams have all come to its end, so to the same."""
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
        """The streams of a vbucket, which are idle no more."""
        self._waiting[vbucket] = False
        return self._keys.pop(vbucket, set())

    def take_woken(self, bucket: Bucket) -> list[StreamKey]:
        """The streams whose vbucket has gone on, gone back, branched or changed its state. They are idle no more."""
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

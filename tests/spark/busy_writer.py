"""Writes, deletes and fails over without end, until it is told to pause. A node that is killed does not stop it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Self

import httpx
from spark_node import SourceBucket

from headwater.errors import ConnectionFailed, HeadwaterError

KEYS = 12
"""Of each vbucket."""
PAUSE_S = 0.005
AWAY_S = 0.1


class BusyWriter(threading.Thread):
    """Works while the `with` block lasts. What goes wrong is raised at its end."""

    def __init__(self, bucket: SourceBucket, seed: int) -> None:
        super().__init__(name="busy writer")
        self.written = 0
        self.failovers = 0
        self._bucket = SourceBucket(bucket.node, bucket.name)
        self._dice = random.Random(seed)
        self._at_work = threading.Lock()
        self._is_over = False
        self._error: BaseException | None = None
        vbuckets = range(bucket.node.vbuckets)
        self._keys = [key for vbucket in vbuckets for key in bucket.keys("key", KEYS, vbucket=vbucket)]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.join()
        self._bucket.close()
        if self._error is not None:
            raise AssertionError("the writer has failed") from self._error

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._at_work:
            yield

    def run(self) -> None:
        try:
            while not self._is_over:
                with self._at_work:
                    self._write()
                time.sleep(PAUSE_S)
        except BaseException as error:
            self._error = error

    def _write(self) -> None:
        try:
            chance = self._dice.random()
            if chance < 0.01:
                self._fail_over()
            elif chance < 0.2:
                key = self._dice.choice(self._keys)
                if self._bucket.get(key) is not None:
                    self._bucket.delete([key])
            else:
                self.written += 1
                self._bucket.put([self._dice.choice(self._keys)], b'{"n":%d}' % self.written)
        except (ConnectionFailed, httpx.HTTPError):
            # The node is away, or was a moment ago: whether the last write was done, nobody knows.
            self._bucket.close()
            time.sleep(AWAY_S)

    def _fail_over(self) -> None:
        high_seqnos = self._bucket.high_seqnos()
        vbucket = self._dice.randrange(len(high_seqnos))
        with contextlib.suppress(HeadwaterError):
            self._bucket.fail_over(vbucket, max(0, high_seqnos[vbucket] - self._dice.randrange(30)))
            self.failovers += 1

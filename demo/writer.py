"""`python -m demo.writer URL DOCUMENTS SEED`: an application that updates, adds and deletes documents.

It goes on until its standard input ends. It is written with the Couchbase SDK and knows nothing of Headwater. Each line
that it prints is what it has done so far.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import Counter
from datetime import timedelta
from random import Random

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.options import ClusterOptions

from demo.shop import SCOPE, counts, document

WRITES_AT_ONCE = 50
PAUSE_S = 0.03
"""Between writes: the machine has other things to do."""
READY_TIMEOUT = timedelta(seconds=30)


class Writer:
    """Writes to one collection after another. What it does depends on the seed alone.

    Where a node is gone the SDK tries for a while, and then reports each write that failed; those are not counted.
    """

    def __init__(self, collections: dict[str, Collection], highest: dict[str, int], seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._collections = collections
        self._highest = highest
        """The highest number of a document, by collection."""
        self._random = Random(seed)

    def write(self) -> None:
        name = self._random.choice(list(self._collections))
        what = self._random.choices(["updated", "added", "deleted"], weights=[70, 15, 15])[0]
        getattr(self, f"_{what}")(name)

    def _updated(self, name: str) -> None:
        self._upsert(name, "updated", self._some(name))

    def _added(self, name: str) -> None:
        first = self._highest[name] + 1
        self._highest[name] += WRITES_AT_ONCE
        self._upsert(name, "added", list(range(first, first + WRITES_AT_ONCE)))

    def _deleted(self, name: str) -> None:
        # Some may be gone already, and the SDK reports those apart.
        gone = self._collections[name].remove_multi([f"{name}::{number}" for number in self._some(name)])
        self.done["deleted"] += len(gone.results)

    def _some(self, name: str) -> list[int]:
        highest = self._highest[name]
        return self._random.sample(range(1, highest + 1), min(WRITES_AT_ONCE, highest))

    def _upsert(self, name: str, what: str, numbers: list[int]) -> None:
        documents = {f"{name}::{number}": document(name, number, self._random) for number in numbers}
        self.done[what] += len(self._collections[name].upsert_multi(documents).results)


def main(url: str, documents: int, seed: int) -> None:
    server, _, bucket = url.rpartition("/")
    login = PasswordAuthenticator(os.environ["HEADWATER_USER"], os.environ["HEADWATER_PASSWORD"])
    cluster = Cluster(server, ClusterOptions(login))
    try:
        cluster.wait_until_ready(READY_TIMEOUT)
        scope = cluster.bucket(bucket).scope(SCOPE)
        highest = counts(documents)
        writer = Writer({name: scope.collection(name) for name in highest}, highest, seed)
        while not select.select([sys.stdin], [], [], 0)[0]:
            writer.write()
            print(json.dumps(writer.done), flush=True)
            time.sleep(PAUSE_S)
    finally:
        cluster.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

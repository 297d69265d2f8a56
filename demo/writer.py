"""`python -m demo.writer URL KEY ORDERS SEED`: an application that updates, adds and deletes orders.

It is written with the Couchbase SDK and knows nothing of Headwater. A line of its standard input is the status that it
is to give to the order KEY, or empty to have that order read; then it prints the order as JSON. It writes other orders
until its input ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
from datetime import timedelta
from random import Random
from typing import Any

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.exceptions import CouchbaseException
from couchbase.options import ClusterOptions

from demo.shop import COLLECTION, key_of, order

WRITES_AT_ONCE = 25
PAUSE_S = 0.1
"""Between writes: the machine has other things to do."""
READY_TIMEOUT = timedelta(seconds=30)


class Writer:
    """What it does depends on the seed alone, beside what it is asked to.

    Where a node is gone the SDK tries for a while, and then gives up each write that failed.
    """

    def __init__(self, orders: Collection, *, followed: str, highest: int, seed: int) -> None:
        self._orders = orders
        self._highest = highest
        self._followed = followed
        self._random = Random(seed)

    def write(self) -> None:
        what = self._random.choices(["updated", "added", "deleted"], weights=[70, 15, 15])[0]
        if what == "added":
            numbers = list(range(self._highest + 1, self._highest + 1 + WRITES_AT_ONCE))
            self._highest = numbers[-1]
        else:
            numbers = self._random.sample(range(1, self._highest + 1), WRITES_AT_ONCE)
        numbers = [number for number in numbers if key_of(number) != self._followed]
        if what == "deleted":
            # Some may be gone already, which the SDK reports and does not raise.
            self._orders.remove_multi([key_of(number) for number in numbers])
        else:
            self._orders.upsert_multi({key_of(number): order(number, self._random) for number in numbers})

    def answer(self, status: str) -> dict[str, Any] | None:
        """Give the followed order this status, or read it. None where the bucket does not answer just now."""
        try:
            read: dict[str, Any] = self._orders.get(self._followed).content_as[dict]
            if status:
                read["status"] = status
                self._orders.upsert(self._followed, read)
        except CouchbaseException:
            return None
        return read


def main(url: str, followed: str, orders: int, seed: int) -> None:
    server, _, bucket = url.rpartition("/")
    login = PasswordAuthenticator(os.environ["HEADWATER_USER"], os.environ["HEADWATER_PASSWORD"])
    cluster = Cluster(server, ClusterOptions(login))
    try:
        cluster.wait_until_ready(READY_TIMEOUT)
        scope, _, name = COLLECTION.partition(".")
        collection = cluster.bucket(bucket).scope(scope).collection(name)
        writer = Writer(collection, followed=followed, highest=orders, seed=seed)
        while True:
            if select.select([sys.stdin], [], [], PAUSE_S)[0]:
                asked = sys.stdin.readline()
                if not asked:
                    return
                print(json.dumps(writer.answer(asked.strip())), flush=True)
            else:
                writer.write()
    finally:
        cluster.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

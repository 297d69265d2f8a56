"""The table of a connector that does not handle rollbacks: it applies every change as it arrives.

Consumers are often written like this. The table is right until a failover takes back changes that it has received.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import headwater
from demo.commands import PASSWORD, USER
from demo.shop import COLLECTION
from headwater import Deletion, Expiration, Mutation
from headwater.blocking import Changes


class ConnectorTable:
    """The last version of every order that was received, by key."""

    def __init__(self, changes: Changes) -> None:
        self.rows: dict[str, Mutation] = {}
        self.changes = 0
        self._received = changes
        self._reading = threading.Thread(target=self._read, name="connector", daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for change in self._received:
            match change:
                case Mutation():
                    self.changes += 1
                    self.rows[change.key] = change
                case Deletion() | Expiration():
                    self.changes += 1
                    self.rows.pop(change.key, None)

    @property
    def is_caught_up(self) -> bool:
        return self._received.metrics.lag().total_seqnos == 0

    def status(self, key: str) -> str | None:
        row = self.rows.get(key)
        return None if row is None else str(row.json()["status"])

    def differing(self, cas_of: dict[str, int]) -> int:
        """How many rows are not what they should be: wrong, missing, or there though the document is gone."""
        own = {key: row.cas for key, row in self.rows.items()}
        return sum(own.get(key) != cas_of.get(key) for key in own.keys() | cas_of.keys())


@contextmanager
def running_connector(url: str) -> Iterator[ConnectorTable]:
    with headwater.blocking.connect(url, user=USER, password=PASSWORD) as client:
        changes = client.changes(start="beginning", collections=[COLLECTION])
        changes.start()
        table = ConnectorTable(changes)
        yield table
        changes.close()

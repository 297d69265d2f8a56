"""A run of a reader with one node, moved on by hand: what is said, what arrives, and when."""

from __future__ import annotations

from typing import Any

from headwater.client.read_options import Snapshots
from support.reader_run import Run
from support.reader_world import Connection

_ONE_NODE = 2
"""A seed whose cluster has one node."""


def run_of_one_node(**options: Any) -> Run:
    """Every change is a batch of its own. The clock stands, so nothing is polled."""
    run = Run(_ONE_NODE, **{"snapshots": Snapshots.COMPLETE, "connections_per_node": 1, "batch_bytes": 1, **options})
    assert len(run.cluster.nodes) == 1
    return run


def ask(run: Run) -> None:
    """The reader says what it has to say; the nodes' answers wait on the wire."""
    run.reader.tick(run.now_s)
    run.obey()


def arrive(run: Run) -> None:
    """All that is on the wires arrives, and what it leads to is asked."""
    for link, connection in list(run.wires.items()):
        run.deliver(link, connection, len(connection.outbox))
    run.obey()


def connect(run: Run) -> Connection:
    """Up to the first question about vbuckets or streams, whose answer is on the wire."""
    ask(run)
    arrive(run)  # the handshake
    arrive(run)  # open and controls
    return next(iter(run.wires.values()))

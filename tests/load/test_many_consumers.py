"""Many consumers on one node, half of them slow, while writes go on: in the end all hold what the store holds.

Every frame is checked on its way (`checked_streams`), and the node must not hold memory for those that lag behind.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headwater.protocol.messages.dcp_streams import StreamFlags
from support.document_writer import DocumentWriter
from support.node_process import NodeProcess, StartNode
from support.streams import CAS, PASSED, SEQNO, VERSION, CheckedStreams, Consumer, Manner, Selection, key_of, vbucket_of

SEED = 4
MIB = 1024 * 1024

FAST = Manner()
FAST_WITH_FLOW_CONTROL = Manner(flow_control_bytes=256 * 1024)
FAST_WITHOUT_COLLECTIONS = Manner(knows_collections=False)
SLOW = Manner(read_bytes=4096, rest_s=0.25, receive_buffer_bytes=128 * 1024)
SLOW_WITH_FLOW_CONTROL = Manner(
    read_bytes=4096, rest_s=0.25, receive_buffer_bytes=128 * 1024, flow_control_bytes=32 * 1024
)
SLOW_WITHOUT_COLLECTIONS = Manner(
    read_bytes=4096, rest_s=0.25, receive_buffer_bytes=128 * 1024, knows_collections=False
)
MANNERS = (
    FAST, SLOW, FAST_WITH_FLOW_CONTROL, SLOW_WITH_FLOW_CONTROL,
    FAST, SLOW, FAST_WITHOUT_COLLECTIONS, SLOW_WITHOUT_COLLECTIONS,
)  # fmt: skip

LOOK_EVERY_S = 0.2

OPTIONS = (
    # Compact often, so that snapshots are compacted away under slow consumers.
    "--compact-interval", "1", "--history-seconds", "1", "--history-bytes", "65536",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    consumers: int
    vbuckets: int
    documents: int
    writes_per_s: float
    write_s: float
    catch_up_s_max: float
    """How long the consumers may take for what is left when the writes have ended. Slow ones hurry then."""
    memory_bytes_max: int
    """Of the node's own memory, beyond what it has before the first consumer comes."""


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(
            Load(
                consumers=16, vbuckets=64, documents=4_000, writes_per_s=4_000, write_s=5.0, catch_up_s_max=30.0,
                memory_bytes_max=200 * MIB,
            ),
            id="16 consumers of 64 vbuckets",
        ),
        pytest.param(
            Load(
                consumers=64, vbuckets=1024, documents=100_000, writes_per_s=1_000, write_s=60.0, catch_up_s_max=180.0,
                memory_bytes_max=512 * MIB,
            ),
            marks=pytest.mark.soak,
            id="64 consumers of 1024 vbuckets",
        ),
    ],
)  # fmt: skip
def test_every_consumer_ends_with_what_the_store_holds(start_node: StartNode, load: Load) -> None:
    node = start_node("--vbuckets", str(load.vbuckets), *OPTIONS)
    vbuckets = np.array([vbucket_of(key_of(n), load.vbuckets) for n in range(load.documents)], dtype=np.int64)
    with ExitStack() as stack:
        writer = DocumentWriter(
            node, documents=load.documents, vbuckets=load.vbuckets, writes_per_s=load.writes_per_s, seed=SEED
        )
        stack.callback(writer.close)
        memory = Memory(node)
        consumers = []
        for number in range(load.consumers):
            manner = MANNERS[number % len(MANNERS)]
            consumers.append(Consumer(node, f"consumer-{number}", manner, CheckedStreams(vbuckets, load.vbuckets)))
            stack.callback(consumers[-1].close)
        selection = Selection(consumers)
        stack.callback(selection.close)

        writer.start()
        try:
            memory.watch(selection, load.write_s)
        finally:
            writer.stop()

        stored = _stored(node, vbuckets, load)
        assert (stored.documents[:, VERSION] == writer.versions).all()
        assert (writer.stored_versions() == writer.versions).all()
        for consumer in consumers:
            consumer.is_in_a_hurry = True
        began_s = time.monotonic()
        while any((consumer.passed != stored.streams[:, PASSED]).any() for consumer in consumers):
            memory.watch(selection, LOOK_EVERY_S)
            is_late = time.monotonic() - began_s > load.catch_up_s_max
            assert not is_late, "\n".join(consumer.describe(stored) for consumer in consumers)
        caught_up_s = time.monotonic() - began_s

        for consumer in consumers:
            for column in (SEQNO, CAS, VERSION):
                assert (consumer.state.documents[:, column] == stored.documents[:, column]).all(), consumer.name
    _report(load, writer, consumers, memory, caught_up_s)
    assert memory.grown_bytes_max < load.memory_bytes_max


def _stored(node: NodeProcess, vbuckets: np.ndarray, load: Load) -> CheckedStreams:
    """What a consumer that comes now gets, up to the last change."""
    state = CheckedStreams(vbuckets, load.vbuckets)
    consumer = Consumer(node, "late", FAST, state, StreamFlags.LATEST)
    selection = Selection([consumer])
    while not consumer.is_at_end:
        selection.run(LOOK_EVERY_S)
    consumer.close()
    return state


class Memory:
    """How far the node's own memory has grown at most."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._before_bytes = _own_memory_bytes(node)
        self.grown_bytes_max = 0

    def watch(self, selection: Selection, seconds: float) -> None:
        """Serve the consumers for a while, looking at the memory all the time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            selection.run(min(LOOK_EVERY_S, left_s))
            grown = _own_memory_bytes(self._node) - self._before_bytes
            self.grown_bytes_max = max(self.grown_bytes_max, grown)


def _own_memory_bytes(node: NodeProcess) -> int:
    """Without mapped pages of the data files, which are the system's to take back."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{node.pid}/status").read_text())
    return int(found.group(1)) * 1024


def _report(load: Load, writer: DocumentWriter, consumers: list[Consumer], memory: Memory, caught_up_s: float) -> None:
    """Print the figures; pytest shows them with -s, or where the test fails."""
    changes = [consumer.state.changes for consumer in consumers]
    slow = [consumer.state.changes for consumer in consumers if consumer.manner.is_slow]
    print(
        f"\n{writer.writes} writes in {load.write_s:.0f} s; {sum(changes)} changes, "
        f"{sum(consumer.state.deletions for consumer in consumers)} of them deletions, in "
        f"{sum(consumer.state.snapshots for consumer in consumers)} snapshots and "
        f"{sum(consumer.received_bytes for consumer in consumers) / 1e6:.0f} MB to {len(consumers)} consumers "
        f"(slow ones {min(slow)} to {max(slow)}, of all {max(changes)} at most); "
        f"{sum(consumer.reopened for consumer in consumers)} streams reopened; caught up in {caught_up_s:.1f} s; "
        f"memory grown by {memory.grown_bytes_max / MIB:.0f} MiB at most"
    )

"""`headwater serve` with counts of the calls of each handler: `python -m support.counting_node FILE OPTION…`.

The counts are in a file that both processes map, so that a test can read them while the node runs. Otherwise the
node is unchanged. A request counts once it passes the checks of its form and of the privileges, and reaches its
handler or the kernel that serves it instead.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

OPCODES = 256
_FILE_BYTES = 2 * OPCODES * 8


class HandlerCounts:
    """Counts by opcode: calls of handlers and kernels, and messages that the node receives as a consumer."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FILE_BYTES))
        with path.open("r+b") as file:
            counts = memoryview(mmap.mmap(file.fileno(), _FILE_BYTES)).cast("Q")
        self.entered, self.consumed = counts[:OPCODES], counts[OPCODES:]

    @property
    def total(self) -> int:
        return sum(self.entered) + sum(self.consumed)


def _count_run(counts: memoryview, data: Any, end: int) -> None:
    at = 0
    while at < end:
        counts[data[at + 1]] += 1
        at += 24 + int.from_bytes(bytes(data[at + 8 : at + 12]))


def count_entries(counts: HandlerCounts) -> None:
    """Count from now on."""
    from headwater.node.kv import session
    from headwater.protocol.consumer import DcpConsumer, StreamMessage, StreamRun
    from headwater.store.read_run import DocumentReads

    def counted(handle: Callable[[Any, Any], Any], opcode: int) -> Callable[[Any, Any], Any]:
        @wraps(handle)
        def count_and_handle(context: Any, request: Any) -> Any:
            counts.entered[opcode] += 1
            return handle(context, request)

        return count_and_handle

    for message, handle in session.handlers.HANDLERS.items():
        session.handlers.HANDLERS[message] = counted(handle, message.opcode)

    apply_sets, answer_reads, events = session.apply_set_run, DocumentReads.answer_run, DcpConsumer.events

    def count_sets(bucket: Any, data: Any, **how: Any) -> Any:
        run = apply_sets(bucket, data, **how)
        _count_run(counts.entered, data, run.consumed_bytes)
        return run

    def count_reads(self: Any, data: Any, **how: Any) -> Any:
        run = answer_reads(self, data, **how)
        _count_run(counts.entered, data, run.consumed_bytes)
        return run

    def count_events(self: Any) -> Iterator[Any]:
        for event in events(self):
            if isinstance(event, StreamRun):
                _count_run(counts.consumed, event.data, len(event.data))
            elif isinstance(event, StreamMessage):
                counts.consumed[event.message.opcode] += 1
            yield event

    session.apply_set_run = count_sets
    DocumentReads.answer_run = count_reads
    DcpConsumer.events = count_events


if __name__ == "__main__":
    from headwater.cli.serve import serve

    count_entries(HandlerCounts(Path(sys.argv[1])))
    serve.main(args=sys.argv[2:], prog_name="headwater serve")

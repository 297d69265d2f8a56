"""State machines as Mermaid diagrams, drawn from the tables that the code uses, and drawings of a vbucket's
history.

The histories come from applying the protocol's own code to a small example. In the first one, A, B and C are
written, then A again, and B is deleted. In the other, the replica had not received some changes when it took over.
"""

from __future__ import annotations

import re
from collections import defaultdict
from enum import Enum
from typing import Any

from handbook.markdown import code, sentence, table
from headwater.protocol.failover_log import ConsumerPoint, FailoverLog, decide_rollback
from headwater.protocol.messages.dcp_changes import SnapshotFlags
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.snapshots import SnapshotTracker, StreamOffset
from headwater.protocol.states import CONSUMER_STREAM, END_REASONS, PRODUCER_ENDPOINT, PRODUCER_STREAM, Table

_EVENTS_SHOWN = 3
_CHANGES = {"Mutation", "Deletion", "Expiration", "SystemEvent", "Prepare", "Commit", "Abort", "SeqnoAdvanced"}


def producer_diagram() -> str:
    return _diagram(PRODUCER_STREAM, shortened={kind.__name__ for kind in END_REASONS}, short="any end")


def consumer_diagram() -> str:
    return _diagram(CONSUMER_STREAM, shortened=_CHANGES, short="changes")


def connection_diagram() -> str:
    return _diagram(PRODUCER_ENDPOINT, shortened=set(), short="")


def _diagram(machine: Table[Any], *, shortened: set[str], short: str) -> str:
    """Draw a state machine. Events with the same effect share an arrow. Many of `shortened` together become `short`."""
    states = list(machine)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_name(states[0])}"]
    for state in states:
        by_target: dict[Enum, list[str]] = defaultdict(list)
        for event, target in machine[state].items():
            by_target[target].append(event.__name__)
        for target, events in by_target.items():
            lines.append(f"    {_name(state)} --> {_name(target)}: {_label(events, shortened, short)}")
        if not machine[state]:
            lines.append(f"    {_name(state)} --> [*]")
    return "\n".join([*lines, "```"])


def _label(events: list[str], shortened: set[str], short: str) -> str:
    together = [event for event in events if event in shortened]
    others = [_words(event) for event in events if event not in shortened]
    if len(together) > _EVENTS_SHOWN:
        others.append(short)
    else:
        others += [_words(event) for event in together]
    if len(others) > _EVENTS_SHOWN + 1:
        more = len(others) - _EVENTS_SHOWN
        others = [*others[:_EVENTS_SHOWN], f"{more} more"]
    return ", ".join(others)


def _name(state: Enum) -> str:
    return state.name.lower()


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower().replace("dcp ", "")


def end_reasons() -> str:
    rows = [
        (str(int(reason)), code(reason.name), sentence(cause.__doc__))
        for cause, reason in sorted(END_REASONS.items(), key=lambda item: int(item[1]))
    ]
    return table(("reason", "name", "when"), rows)


_WRITTEN: tuple[tuple[str, int | None], ...] = (("A", 1), ("B", 1), ("C", 1), ("A", 2), ("B", None))
"""Keys and values; None deletes. The first write has seqno 1."""

_OLD, _NEW = Vbuuid(0xAA), Vbuuid(0xBB)
_REPLICATED, _OLD_HIGH, _NEW_HIGH = Seqno(4), Seqno(7), Seqno(6)
"""The seqno of the replica, that of the lost copy, and that of the new branch when the consumer asks."""


def snapshot_drawing() -> str:
    """Return a row for each seqno: what was written, what a stream sends of it, and what a consumer then holds."""
    last = {key: seqno for seqno, (key, _) in enumerate(_WRITTEN, start=1)}
    end = Seqno(len(_WRITTEN))
    started = StreamOffset(vbuuid=_OLD, seqno=Seqno(0), snapshot_start=Seqno(0), snapshot_end=Seqno(0))
    tracker = SnapshotTracker(offset=started).on_marker(start=Seqno(0), end=end, flags=SnapshotFlags.DISK)
    real: dict[str, int] = {}
    held: dict[str, int] = {}
    rows = []
    for seqno, (key, value) in enumerate(_WRITTEN, start=1):
        _apply(real, key, value)
        is_sent = last[key] == seqno
        if is_sent:
            _apply(held, key, value)
            tracker = tracker.on_seqno(Seqno(seqno))
        rows.append(
            (
                str(seqno),
                _change(key, value),
                _state(real),
                _change(key, value) if is_sent else "not sent: a newer version is in the snapshot",
                _state(held) if is_sent else "",
                _verdict(held == real, tracker.is_complete) if is_sent else "",
            )
        )
    head = ("seqno", "written", "the vbucket is", f"sent, after a marker 0 to {end}", "a consumer holds", "")
    return table(head, rows)


def _apply(state: dict[str, int], key: str, value: int | None) -> None:
    if value is None:
        state.pop(key, None)
    else:
        state[key] = value


def _change(key: str, value: int | None) -> str:
    return f"delete {key}" if value is None else f"{key}={value}"


def _state(state: dict[str, int]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(state.items())) or "empty"


def _verdict(is_real: bool, is_complete: bool) -> str:
    if is_complete:
        return "complete: the vbucket is like that"
    return "the same, by luck" if is_real else "not what the vbucket was then"


# --- failover -----------------------------------------------------------------------------------------------------


def _failover_log() -> FailoverLog:
    return FailoverLog.start(_OLD).branch(_NEW, at_seqno=_REPLICATED)


def failover_drawing() -> str:
    """The two branches as a graph, and the failover log that lists them."""
    log = _failover_log()
    end_of_old = log.branch_end(_OLD, high_seqno=_NEW_HIGH)
    lines = ["```mermaid", "gitGraph", *(f'    commit id: "{seqno}"' for seqno in range(1, _REPLICATED + 1))]
    lines += ["    branch bb", "    checkout main"]
    lines += [f'    commit id: "{seqno}" type: REVERSE' for seqno in range(_REPLICATED + 1, _OLD_HIGH + 1)]
    lines += ["    checkout bb"]
    lines += [f'    commit id: "{seqno}\'" type: HIGHLIGHT' for seqno in range(_REPLICATED + 1, _NEW_HIGH + 1)]
    rows = [(code(f"{entry.vbuuid:x}"), str(entry.seqno)) for entry in log.entries]
    caption = f"`main` is branch aa; both branches share everything up to seqno {end_of_old}. The failover log says so:"
    return "\n\n".join(["\n".join([*lines, "```"]), caption, table(("vbuuid", "from seqno"), rows)])


# --- rollback -----------------------------------------------------------------------------------------------------


def rollback_drawing() -> str:
    """Draw the messages between a consumer of the old branch and the new active copy."""
    log = _failover_log()
    place, lines = _OLD_HIGH, []
    while True:
        point = ConsumerPoint(vbuuid=_OLD, start_seqno=place, snapshot_start_seqno=place, snapshot_end_seqno=place)
        rollback = decide_rollback(point, failover_log=log, high_seqno=_NEW_HIGH, purge_seqno=Seqno(0))
        lines.append(f"    C->>R: stream request: branch aa, seqno {place}")
        if rollback is None:
            break
        lines.append(f"    R->>C: ROLLBACK to {rollback.to_seqno}")
        lines.append(f"    Note over C: undoes {rollback.to_seqno + 1} to {place}")
        place = rollback.to_seqno
    entries = ", ".join(f"{entry.vbuuid:x} from {entry.seqno}" for entry in log.entries)
    return "\n".join(
        [
            "```mermaid",
            "sequenceDiagram",
            "    participant C as consumer",
            "    participant A as active copy",
            "    participant R as replica",
            f"    A->>R: changes 1 to {_REPLICATED}",
            f"    A->>C: changes 1 to {_OLD_HIGH}, branch aa",
            "    Note over A: lost",
            f"    Note over R: becomes active, begins branch bb at {_REPLICATED}",
            *lines,
            f"    R->>C: accepted, failover log {entries}",
            f"    R->>C: changes {place + 1} to {_NEW_HIGH}, branch bb",
            "```",
        ]
    )

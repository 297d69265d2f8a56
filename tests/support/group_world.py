"""A simulated world for consumer groups: processes with their own clocks, a lossy network, and one document.

Everything happens at moments of one real time that no process knows. A process has a `LeaseMember`, which accesses
the document over the network in turns, and a reader, which checks its assignment periodically and otherwise continues
with what it has. `GroupChecker` is notified of what readers do, and judges it; it knows nothing of leases.

A process can leave, be killed, be cut off from the network, or stand still in one of the ways of `Standing`. A
request or its answer can be lost, or arrive late: after the process has stopped waiting. And a failover can take back
the newest writes to the document.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from headwater.client.groups import Assignment
from headwater.client.groups.group_document import GroupDocument
from headwater.client.groups.lease_member import LeaseMember, LeaseTerms, MemberState
from headwater.protocol.numbers import VBucketId

TERMS = LeaseTerms(lease_s=4.0, interval_s=1.0, margin_s=1.0)
DELAY_S_MAX = 0.05
LATE_S_MAX = 6.0
"""The maximum delay of late messages. Longer than a lease, so that others have acted in the meantime."""
ANSWER_S_MAX = 1.5
RETRY_S = 0.2
LOOK_S_MAX = 0.4
"""The time between two checks of a reader's assignment. Together with a stall it must be less than the margin."""
STALL_S_MAX = 0.4
STOP_S_MAX = 1.0
"""How long a reader takes to stop and save, if it has the time."""
RATE_ERROR_MAX = 0.02
SETTLE_S = 40.0


class RuleBroken(AssertionError):
    """A group has done what must never happen."""


# --- the judge ----------------------------------------------------------------------------------------------------


class GroupChecker:
    """Records who reads what. Like a checkpoint store, it keeps the offsets and refuses those of former owners."""

    def __init__(self, *, fences: bool = True) -> None:
        self._fences = fences
        self.readers: dict[int, set[str]] = defaultdict(set)
        self.refused = 0
        """Offsets refused because they came from former owners."""
        self._offsets: dict[int, int] = {}
        self._generations: dict[int, int] = {}
        self._may_overlap = False
        self._has_true_history = True

    def began(self, process: str, vbucket: int, generation: int) -> int:
        """Note a new reader of a vbucket. Returns the offset to read from."""
        self.readers[vbucket].add(process)
        if not self._may_overlap:
            self._check_overlap(vbucket)
        if self._has_true_history and generation < self._generations.get(vbucket, 0):
            raise RuleBroken(f"the generation of vbucket {vbucket} went back to {generation}")
        self._generations[vbucket] = generation
        return self._offsets.get(vbucket, 0)

    def ended(self, process: str, vbucket: int) -> None:
        self.readers[vbucket].remove(process)

    def saved(self, vbucket: int, offset: int, generation: int) -> None:
        if self._fences and generation < self._generations.get(vbucket, 0):
            self.refused += 1
            return
        if self._has_true_history and offset < self._offsets.get(vbucket, 0):
            raise RuleBroken(f"the offset of vbucket {vbucket} went back to {offset}")
        self._offsets[vbucket] = offset

    def history_was_lost(self) -> None:
        """Note that a failover took back what members saw: they can't know for a while, nor ever trust generations."""
        self._may_overlap = True
        self._has_true_history = False

    def history_must_be_known(self) -> None:
        self._may_overlap = False
        for vbucket in list(self.readers):
            self._check_overlap(vbucket)

    def _check_overlap(self, vbucket: int) -> None:
        if len(self.readers[vbucket]) > 1:
            raise RuleBroken(f"vbucket {vbucket} is read by {', '.join(sorted(self.readers[vbucket]))}")

    def check_settled(self, processes: Sequence[str], *, vbuckets: int) -> None:
        """Check that every vbucket is read, by the running processes, in equal shares."""
        readers = [reader for vbucket in range(vbuckets) for reader in self.readers[vbucket]]
        if len(readers) != vbuckets:
            raise RuleBroken(f"only {len(readers)} of {vbuckets} vbuckets are read")
        counts = [readers.count(process) for process in processes]
        if sum(counts) != vbuckets or max(counts) - min(counts) > 1:
            raise RuleBroken(f"the shares are {dict(zip(processes, counts, strict=True))}")


# --- the world ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """An event in the group, some time after the previous one."""

    after_s: float
    kind: str
    which: int
    """The index of the process, modulo the number of running ones."""
    for_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    seed: int
    vbuckets: int
    members: int
    actions: tuple[Action, ...]
    loss: float = 0.0
    """The share of requests and answers that are lost or late, until the last action."""


class Standing(Enum):
    """How a process stands still."""

    STALLED = "stall"
    """For a short time, while reading: to others it seems slow."""
    PAUSED = "pause"
    """For any time, before it checks its assignment."""
    FROZEN = "freeze"
    """For any time, after it has checked: it delivers what it has, and saves, before it checks again."""


MakeMember = Callable[..., LeaseMember]


class World:
    """Runs a script. `make_member` is `LeaseMember`, or a mutant of it."""

    def __init__(
        self, script: Script, make_member: MakeMember = LeaseMember, checker: GroupChecker | None = None
    ) -> None:
        self.script = script
        self.rng = random.Random(script.seed)
        self.now_s = 0.0
        self.loss = script.loss
        self.checker = checker or GroupChecker()
        self.processes: list[Process] = []
        self.stored: bytes | None = None
        self.cas = 0
        self._failovers = 0
        self._history: list[tuple[float, bytes]] = []
        self._make_member = make_member
        self._names = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> None:
        """Run the script. Raises `RuleBroken` if the group breaks its rules."""
        for _ in range(self.script.members):
            self.start_process()
        at_s = 0.0
        for action in self.script.actions:
            at_s += action.after_s
            self._run_until(at_s)
            self._act(action)
        self.loss = 0.0
        # All others may be gone by now, or about to be.
        self.start_process()
        ends = [process.undisturbed_s for process in self.processes]
        self._run_until(max([at_s, *ends]) + SETTLE_S)
        self.checker.check_settled([process.name for process in self.running], vbuckets=self.script.vbuckets)

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.is_running]

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), call))

    def start_process(self, member_id: str | None = None) -> None:
        name = f"process-{next(self._names)}"
        process = Process(self, name, member_id or name, self._make_member)
        self.processes.append(process)
        process.start()

    def _run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.now_s = end_s

    def _act(self, action: Action) -> None:
        running = self.running
        if not running:
            self.start_process()
            return
        process = running[action.which % len(running)]
        match action.kind:
            case "join":
                self.start_process()
            case "replace":
                self.start_process(process.member_id)
            case "restart":
                process.kill()
                self.start_process(process.member_id)
            case "failover":
                self._take_back(action.for_s)
            case _:
                process.suffer(action)

    def _take_back(self, for_s: float) -> None:
        """Undo the newest writes to the document, as if they were missing on the copy that is active now."""
        self.checker.history_was_lost()
        self._failovers += 1
        self.after(TERMS.lease_s + TERMS.margin_s, partial(self._end_overlap, self._failovers))
        while self._history and self._history[-1][0] > self.now_s - for_s:
            self._history.pop()
        self.stored = self._history[-1][1] if self._history else None
        self.cas += 1

    def _end_overlap(self, failover: int) -> None:
        if failover == self._failovers:
            self.checker.history_must_be_known()

    # --- the network and the store --------------------------------------------------------------------------------

    def get(self, process: Process, on_answer: Callable[[bytes | None, int], None]) -> None:
        self._send(process, lambda: self._answer(process, on_answer, self.stored, self.cas))

    def swap(self, process: Process, value: bytes, cas: int, on_answer: Callable[[bool], None]) -> None:
        def swap_now() -> None:
            is_same = cas == self.cas
            if is_same:
                self.stored, self.cas = value, self.cas + 1
                self._history.append((self.now_s, value))
            self._answer(process, on_answer, is_same)

        self._send(process, swap_now)

    def _send(self, process: Process, request: Callable[[], None]) -> None:
        delay_s = self._delay_s(process)
        if delay_s is not None:
            self.after(delay_s, request)

    def _answer(self, process: Process, on_answer: Callable[..., None], *values: object) -> None:
        delay_s = self._delay_s(process)
        if delay_s is not None:
            self.after(delay_s, lambda: process.do(lambda: on_answer(*values)))

    def _delay_s(self, process: Process) -> float | None:
        """Return the delay of a message, or None if it does not arrive."""
        if self.now_s < process.cut_s:
            return None
        if self.rng.random() >= self.loss:
            return self.rng.uniform(0, DELAY_S_MAX)
        return self.rng.uniform(0, LATE_S_MAX) if self.rng.random() < 0.5 else None


# --- a process ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reading:
    generation: int
    offset: int


@dataclass(slots=True)
class Pause:
    kind: Standing
    end_s: float
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Process:
    """One member of the group with its reader."""

    def __init__(self, world: World, name: str, member_id: str, make_member: MakeMember) -> None:
        rng = world.rng
        self.world = world
        self.name = name
        self.member_id = member_id
        self.is_running = True
        self.cut_s = 0.0
        self._offset_s = rng.uniform(-1e6, 1e6)
        self._rate = 1 + rng.uniform(-RATE_ERROR_MAX, RATE_ERROR_MAX)
        self._is_leaving = False
        self._pause: Pause | None = None
        self._turn = 0
        self._reading: dict[int, Reading] = {}
        self._assignment = Assignment(number=0)
        self.member = make_member(
            member_id=member_id,
            vbuckets=world.script.vbuckets,
            terms=TERMS,
            new_seat_id=lambda: f"{rng.getrandbits(64):016x}",
            first_generation=lambda: 1,
        )

    @property
    def undisturbed_s(self) -> float:
        return max(self.cut_s, self._pause.end_s if self._pause else 0.0)

    def clock_s(self) -> float:
        return self._offset_s + self.world.now_s * self._rate

    def start(self) -> None:
        self._take_turn()
        self._look()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.world.after(delay_s, lambda: self.do(call))

    def do(self, call: Callable[[], None]) -> None:
        """Call now, or when the process resumes."""
        if not self.is_running:
            return
        if self._pause is not None:
            self._pause.waiting.append(call)
        else:
            call()

    # --- what happens to it ---------------------------------------------------------------------------------------

    def suffer(self, action: Action) -> None:
        match action.kind:
            case "kill":
                self.kill()
            case "leave":
                self.do(self._leave)
            case "cut":
                self.cut_s = max(self.cut_s, self.world.now_s + action.for_s)
            case "stall":
                self._stand_still(Standing.STALLED, min(action.for_s, STALL_S_MAX))
            case kind:
                self._stand_still(Standing(kind), action.for_s)

    def kill(self) -> None:
        self._drop(list(self._reading))
        self.is_running = False

    def _leave(self) -> None:
        self._is_leaving = True
        for vbucket in list(self._reading):
            self._save_and_stop(vbucket)
        self.member.leave(self.clock_s())
        self._take_turn()

    def _stand_still(self, kind: Standing, for_s: float) -> None:
        if self._pause is not None:
            return
        self._pause = Pause(kind, self.world.now_s + for_s)
        if kind is not Standing.STALLED:
            for vbucket in self._reading:
                self.world.checker.ended(self.name, vbucket)
        self.world.after(for_s, self._go_on)

    def _go_on(self) -> None:
        pause, self._pause = self._pause, None
        if not self.is_running or pause is None:
            return
        if pause.kind is Standing.FROZEN:
            for vbucket, reading in self._reading.items():
                reading.offset += 1
                self.world.checker.saved(vbucket, reading.offset, reading.generation)
        if pause.kind is not Standing.STALLED:
            may_read = self.member.assignment(self.clock_s()).generations.items()
            for vbucket, reading in list(self._reading.items()):
                if (vbucket, reading.generation) in may_read:
                    self.world.checker.began(self.name, vbucket, reading.generation)
                else:
                    del self._reading[vbucket]
            # If a vbucket that it has dropped is assigned again, it begins again: a renewal may have been in progress.
            known = {vbucket: reading.generation for vbucket, reading in self._reading.items()}
            self._assignment = replace(self._assignment, generations=known)
        self.world.rng.shuffle(pause.waiting)
        for call in pause.waiting:
            self.do(call)

    # --- its reader -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Follow the assignment, and continue to read."""
        newer = self.member.assignment(self.clock_s())
        change = newer.since(self._assignment)
        self._assignment = newer
        self._drop(change.drop)
        for vbucket in sorted(change.begin):
            generation = newer.generations[vbucket]
            offset = self.world.checker.began(self.name, vbucket, generation)
            self._reading[vbucket] = Reading(generation, offset)
        for vbucket, reading in self._reading.items():
            if vbucket in newer.vbuckets:
                reading.offset += 1
                if self.world.rng.random() < 0.2:
                    self.world.checker.saved(vbucket, reading.offset, reading.generation)
        if change.hand_over:
            stop_s = self.world.rng.uniform(0, STOP_S_MAX)
            self.after(stop_s, lambda: self._hand_over(change.hand_over))
        if not self._is_leaving:
            self.after(self.world.rng.uniform(0, LOOK_S_MAX), self._look)

    def _hand_over(self, vbuckets: frozenset[VBucketId]) -> None:
        now = self.member.assignment(self.clock_s())
        for vbucket in vbuckets & now.to_release:
            if vbucket in self._reading:
                self._save_and_stop(vbucket)
        self.member.release(vbuckets, self.clock_s())

    def _save_and_stop(self, vbucket: int) -> None:
        reading = self._reading[vbucket]
        self.world.checker.saved(vbucket, reading.offset, reading.generation)
        self._drop([VBucketId(vbucket)])

    def _drop(self, vbuckets: Sequence[int] | frozenset[VBucketId]) -> None:
        for vbucket in vbuckets:
            was_read = self._reading.pop(vbucket, None) is not None
            if was_read and (self._pause is None or self._pause.kind is Standing.STALLED):
                self.world.checker.ended(self.name, vbucket)

    # --- its turns at the document --------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        turn = self._next_turn()
        self.after(ANSWER_S_MAX, lambda: self._give_up(turn))
        self.world.get(self, lambda value, cas: self._on_document(turn, value, cas))

    def _next_turn(self) -> int:
        """Start a new turn. Answers to the previous one are too late from here on."""
        self._turn += 1
        return self._turn

    def _give_up(self, turn: int) -> None:
        if turn == self._turn:
            self._wait(RETRY_S)

    def _on_document(self, turn: int, value: bytes | None, cas: int) -> None:
        if turn != self._turn:
            return
        seen = None if value is None else GroupDocument.decode(value)
        document = self.member.next_document(seen, self.clock_s())
        if document is None:
            self._wait()
            return
        turn = self._next_turn()
        sent_s = self.clock_s()
        self.after(ANSWER_S_MAX, lambda: self._give_up(turn))
        self.world.swap(self, document.encode(), cas, lambda done: self._on_swap(turn, document, sent_s, done))

    def _on_swap(self, turn: int, document: GroupDocument, sent_s: float, done: bool) -> None:
        if turn != self._turn:
            return
        if done:
            self.member.on_written(document, sent_s=sent_s, now_s=self.clock_s())
        self._wait(0.0 if done else self.world.rng.uniform(0, RETRY_S))

    def _wait(self, least_s: float = 0.0) -> None:
        """Wait for the next turn, checking periodically whether something has made it earlier."""
        turn = self._next_turn()
        self.after(least_s, lambda: self._turn_if_due(turn))

    def _turn_if_due(self, turn: int) -> None:
        if turn != self._turn:
            return
        due_s = self.member.next_turn_s
        if due_s is None:
            assert self.member.state is MemberState.ENDED
            self.kill()
        elif due_s <= self.clock_s():
            self._take_turn()
        else:
            self.after(0.1, lambda: self._turn_if_due(turn))

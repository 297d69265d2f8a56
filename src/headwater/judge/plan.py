"""What happens in a run: writes and faults, decided by a seed and nothing else.

A plan names keys, nodes and distances, never times or seqnos of the cluster: those differ from run to run. Its last
step writes a document to every vbucket, so that a consumer which has that document has passed all that came before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.errors import InvalidInput
from headwater.phrases import counted
from headwater.protocol.numbers import vbucket_of

KEY_PREFIX = "judge::"
"""Other documents of the bucket, such as the checkpoints of a consumer, are not judged."""
NODES_MIN, NODES_MAX = 2, 5
DOCUMENTS_MAX = 2000
STEPS_MAX = 200
VBUCKETS_MAX = 1024
DELETE_CHANCE = 0.15
PAD_CHARS_MAX = 400
CLOSING = f"{KEY_PREFIX}closing::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a run. With the seed it decides everything."""

    nodes: int = 3
    vbuckets: int = 16
    documents: int = 200
    steps: int = 10

    def __post_init__(self) -> None:
        for name, least, most in (
            ("nodes", NODES_MIN, NODES_MAX),
            ("documents", 1, DOCUMENTS_MAX),
            ("steps", 0, STEPS_MAX),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidInput(f"{name} is {getattr(self, name)}", hint=f"Give {least} to {most}")
        if not 1 <= self.vbuckets <= VBUCKETS_MAX or self.vbuckets & (self.vbuckets - 1):
            raise InvalidInput(f"vbuckets is {self.vbuckets}", hint=f"Give a power of two, up to {VBUCKETS_MAX}")

    def options(self) -> str:
        """The options of the command that differ from the defaults, to replay a run."""
        names = ("nodes", "vbuckets", "documents", "steps")
        given = {name: getattr(self, name) for name in names}
        return "".join(f"--{name} {value} " for name, value in given.items() if value != getattr(Shape(), name))


@dataclass(frozen=True, slots=True)
class Write:
    """One write. Its number is in the document, so that every version of a document is unlike all others."""

    number: int
    key: str
    pad: int | None
    """The length of a text in the document; None deletes it."""

    @property
    def value(self) -> dict[str, Any] | None:
        return None if self.pad is None else {"write": self.number, "text": "x" * self.pad}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A fault, or nothing but writes; the writes come first."""

    action: str = "write"
    writes: tuple[Write, ...] = ()
    node: int = 0
    vbucket: int = 0
    back: int = 0
    """How many seqnos a rollback goes back."""
    waits: bool = False
    """Before the fault, wait until the consumer has seen the writes, for a short time."""
    after: tuple[Write, ...] = ()
    """Directly after the fault: the new branch of history grows past the end of the old one."""
    pause_s: float = 0.0
    """After the step."""

    def __str__(self) -> str:
        before = f"{counted(len(self.writes), 'write')}, " if self.writes else ""
        seen = "seen by the consumer, " if self.waits else ""
        after = f", {counted(len(self.after), 'write')}" if self.after else ""
        return f"{before}{seen}{self.fault}{after}"

    @property
    def fault(self) -> str:
        return {
            "write": f"a pause of {self.pause_s:.2f} s",
            "roll back": f"vbucket {self.vbucket} is rolled back by {counted(self.back, 'seqno')}",
            "fail over": f"node {self.node} dies with writes that no replica has, and is failed over",
            "bring back": f"node {self.node} joins again, and the vbuckets are rebalanced",
            "move": f"all vbuckets of node {self.node} move to the others",
            "kill": f"node {self.node} is killed and starts again",
            "silence": f"node {self.node} answers nothing for {self.pause_s:.2f} s",
        }[self.action]


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    shape: Shape
    first: tuple[Write, ...]
    """Before the consumer is started."""
    steps: tuple[Step, ...]

    def keys(self) -> Iterator[str]:
        """Every key that is written, once."""
        steps = (Step(writes=self.first), *self.steps)
        return iter(dict.fromkeys(write.key for step in steps for write in (*step.writes, *step.after)))

    def lines(self) -> Iterator[str]:
        yield f"start: {counted(len(self.first), 'write')}, then the consumer"
        yield from map(str, self.steps)


def make_plan(seed: int, shape: Shape) -> Plan:
    return _Planner(seed, shape).plan()


class _Planner:
    def __init__(self, seed: int, shape: Shape) -> None:
        self._seed = seed
        self._shape = shape
        self._random = random.Random(f"headwater judge {seed}")
        self._number = 0
        self._keys = [f"{KEY_PREFIX}{number:04}" for number in range(shape.documents)]
        self._away: int | None = None
        """A node that has left the cluster."""

    def plan(self) -> Plan:
        first = self._writes(self._random.randint(1, 2 * self._shape.documents))
        steps = [self._step() for _ in range(self._shape.steps)]
        if self._away is not None:
            steps.append(self._bring_back())
        return Plan(self._seed, self._shape, first, (*steps, self._closing()))

    def _writes(self, count: int, keys: Sequence[str] = ()) -> tuple[Write, ...]:
        return tuple(self._write(keys or self._keys) for _ in range(count))

    def _write(self, keys: Sequence[str]) -> Write:
        self._number += 1
        dice = self._random
        # The first ones are drawn often: versions that replace each other are what consumers confuse.
        key = keys[int(len(keys) * dice.random() ** 2)]
        return Write(self._number, key, None if dice.random() < DELETE_CHANCE else dice.randint(0, PAD_CHARS_MAX))

    def _step(self) -> Step:
        dice = self._random
        faults: dict[Callable[[], Step], int] = {
            self._rollback: 4,
            self._kill: 2,
            self._silence: 1,
            self._only_write: 2,
        }
        if self._away is None:
            faults |= {self._fail_over: 4, self._move: 2}
        else:
            faults[self._bring_back] = 6
        return dice.choices([*faults], [*faults.values()])[0]()

    def _common(self) -> dict[str, Any]:
        dice = self._random
        return {
            "writes": self._writes(dice.randint(1, 60)),
            "waits": dice.random() < 0.7,
            "pause_s": dice.choice([0.0, dice.uniform(0, 0.3)]),
        }

    def _only_write(self) -> Step:
        return Step(**self._common())

    def _rollback(self) -> Step:
        dice = self._random
        vbucket, back = dice.randrange(self._shape.vbuckets), dice.randint(1, 12)
        keys = [key for key in self._keys if vbucket_of(key.encode(), self._shape.vbuckets) == vbucket]
        after = self._writes(dice.choice([0, back + dice.randint(0, 5)]), keys)
        return Step(action="roll back", vbucket=vbucket, back=back, after=after, **self._common())

    def _member(self) -> int:
        return self._random.choice([node for node in range(self._shape.nodes) if node != self._away])

    def _kill(self) -> Step:
        return Step(action="kill", node=self._member(), **self._common())

    def _silence(self) -> Step:
        return Step(
            action="silence", node=self._member(), **{**self._common(), "pause_s": self._random.uniform(0.1, 1)}
        )

    def _fail_over(self) -> Step:
        self._away = self._member()
        after = self._writes(self._random.choice([0, self._random.randint(1, 60)]))
        return Step(action="fail over", node=self._away, after=after, **self._common())

    def _move(self) -> Step:
        self._away = self._member()
        return Step(action="move", node=self._away, **self._common())

    def _bring_back(self) -> Step:
        assert self._away is not None
        node, self._away = self._away, None
        return Step(action="bring back", node=node, **self._common())

    def _closing(self) -> Step:
        writes: dict[int, Write] = {}
        candidate = 0
        while len(writes) < self._shape.vbuckets:
            key = f"{CLOSING}{candidate}"
            candidate += 1
            vbucket = int(vbucket_of(key.encode(), self._shape.vbuckets))
            if vbucket not in writes:
                self._number += 1
                writes[vbucket] = Write(self._number, key, 0)
        return Step(writes=tuple(writes.values()))

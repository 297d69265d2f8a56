"""The events of a run: writes and faults, determined by the seed alone.

A plan names keys, nodes and distances, never times or seqnos of the cluster, which differ from run to run. Its last
step writes a document to every vbucket: a consumer that has this document has passed everything before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from headwater.errors import InvalidInput
from headwater.options import option
from headwater.phrases import counted
from headwater.protocol.numbers import vbucket_of

KEY_PREFIX = "judge::"
"""Other documents of the bucket, such as a consumer's checkpoints, are not judged."""
NODES_MIN, NODES_MAX = 2, 5
DOCUMENTS_MAX = 2000
STEPS_MAX = 200
VBUCKETS_MAX = 1024
DELETE_CHANCE = 0.15
PAD_CHARS_MAX = 400
CLOSING, PROBE = f"{KEY_PREFIX}closing::", f"{KEY_PREFIX}probe::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a run. Together with the seed, it determines everything."""

    nodes: int = option("Nodes of the cluster.", 3)
    vbuckets: int = option("Vbuckets of the bucket.", 16)
    documents: int = option("Documents to write to.", 200)
    steps: int = option("Steps: writes, most with a fault.", 10)
    restarts: bool = option("Also kill the consumer, and start it again with its {state}.", False)

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
        """Return the command line options that differ from the defaults, to replay a run."""
        given = {name: getattr(self, name) for name in ("nodes", "vbuckets", "documents", "steps")}
        numbers = (f"--{name} {value} " for name, value in given.items() if value != getattr(Shape(), name))
        return "".join([*numbers, "--restarts " if self.restarts else ""])


@dataclass(frozen=True, slots=True)
class Write:
    """One write. The document contains its number, so that every version differs from all others."""

    number: int
    key: str
    pad: int | None
    """The length of the text in the document; None deletes the document."""

    @property
    def value(self) -> dict[str, Any] | None:
        return None if self.pad is None else {"write": self.number, "text": "x" * self.pad}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Writes, followed by a fault or a pause."""

    action: str = "write"
    writes: tuple[Write, ...] = ()
    node: int = 0
    vbucket: int = 0
    back: int = 0
    """How many seqnos a rollback takes back."""
    waits: bool = False
    """Before the fault, wait briefly until the consumer has seen the writes."""
    after: tuple[Write, ...] = ()
    """Writes directly after the fault, which make the new branch of history longer than the old one."""
    pause_s: float = 0.0
    """The pause after the step."""

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
            "cut": f"all connections to node {self.node} break",
            "restart": "the consumer is killed and starts again",
            "kill": f"node {self.node} is killed and starts again",
            "silence": f"node {self.node} answers nothing for {self.pause_s:.2f} s",
        }[self.action]


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    shape: Shape
    first: tuple[Write, ...]
    """The writes before the consumer is started."""
    steps: tuple[Step, ...]
    probes: tuple[Write, ...]
    """Final writes for an incomplete consumer: one that receives these is not stuck, but has missed something."""

    def keys(self) -> Iterator[str]:
        """Yield every key that is written, once."""
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
        """The node that has left the cluster, if any."""

    def plan(self) -> Plan:
        first = self._writes(self._random.randint(1, 2 * self._shape.documents), self._keys)
        steps = [self._step(self._action()) for _ in range(self._shape.steps)]
        if self._away is not None:
            steps.append(self._step("bring back"))
        steps.append(Step(writes=self._one_each(CLOSING)))
        return Plan(self._seed, self._shape, first, tuple(steps), self._one_each(PROBE))

    def _writes(self, count: int, keys: Sequence[str]) -> tuple[Write, ...]:
        return tuple(self._write(keys) for _ in range(count))

    def _write(self, keys: Sequence[str]) -> Write:
        self._number += 1
        dice = self._random
        # Skewed to the first keys, so that versions often replace each other: these are what consumers confuse.
        key = keys[int(len(keys) * dice.random() ** 2)]
        return Write(self._number, key, None if dice.random() < DELETE_CHANCE else dice.randint(0, PAD_CHARS_MAX))

    def _action(self) -> str:
        weights = {"write": 2, "roll back": 4, "cut": 3, "kill": 2, "silence": 1}
        # At most one node is away at a time: with one replica, vbuckets would otherwise be lost.
        weights |= {"fail over": 4, "move": 2} if self._away is None else {"bring back": 6}
        weights |= {"restart": 4} if self._shape.restarts else {}
        return self._random.choices([*weights], [*weights.values()])[0]

    def _step(self, action: str) -> Step:
        dice, shape = self._random, self._shape
        node = dice.choice([node for node in range(shape.nodes) if node != self._away])
        if action in ("fail over", "move"):
            self._away = node
        elif action == "bring back":
            assert self._away is not None
            node, self._away = self._away, None
        vbucket, back = dice.randrange(shape.vbuckets), dice.randint(1, 12)
        writes, after = self._writes(dice.randint(1, 60), self._keys), 0
        keys = self._keys
        if action == "roll back":
            keys = [key for key in keys if vbucket_of(key.encode(), shape.vbuckets) == vbucket] or keys
            after = dice.choice([0, back + dice.randint(0, 5)])
        elif action == "fail over":
            after = dice.choice([0, dice.randint(1, 60)])
        return Step(
            action=action,
            writes=writes,
            node=node,
            vbucket=vbucket,
            back=back,
            # A connection is best cut while changes are in transit.
            waits=action != "cut" and dice.random() < 0.7,
            after=self._writes(after, keys),
            pause_s=dice.uniform(0.1, 1) if action == "silence" else dice.choice([0.0, dice.uniform(0, 0.3)]),
        )

    def _one_each(self, prefix: str) -> tuple[Write, ...]:
        """Return one write for every vbucket."""
        writes: dict[int, Write] = {}
        for key in map(f"{prefix}{{}}".format, count()):
            vbucket = int(vbucket_of(key.encode(), self._shape.vbuckets))
            if vbucket not in writes:
                self._number += 1
                writes[vbucket] = Write(self._number, key, 0)
            if len(writes) == self._shape.vbuckets:
                break
        return tuple(writes.values())

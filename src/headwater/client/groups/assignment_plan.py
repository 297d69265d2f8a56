"""Who is to have which vbucket: balanced within one, and with as few moves as that takes.

Pure and deterministic: every member that makes the plan from the same document makes the same one. And the plan of a
plan is the plan itself, so that it can be made again at any time.

How few moves is that? With `v` vbuckets and `m` members, everybody is to have `v // m` of them, and `v % m` members one
more. Those who have more than that have to give up the rest, and nobody else gives up anything. That is least where
those who have the most are the ones that may have one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


def plan_targets(current: Sequence[str | None], members: Iterable[str]) -> tuple[str | None, ...]:
    """For every vbucket who is to have it. `current` is the plan so far; who is in it and is no member has lost all."""
    held: dict[str, list[int]] = {member: [] for member in sorted(members)}
    if not held:
        return (None,) * len(current)
    for vbucket, member in enumerate(current):
        if member in held:
            held[member].append(vbucket)
    shares = _shares({member: len(vbuckets) for member, vbuckets in held.items()}, vbuckets=len(current))
    targets = [member if member in held else None for member in current]
    for member, vbuckets in held.items():
        for vbucket in _spread(vbuckets, len(vbuckets) - shares[member]):
            targets[vbucket] = None
    _deal(targets, {member: shares[member] - len(vbuckets) for member, vbuckets in held.items()})
    return tuple(targets)


def _shares(counts: dict[str, int], *, vbuckets: int) -> dict[str, int]:
    """How many each is to have."""
    least, rest = divmod(vbuckets, len(counts))
    by_count = sorted(counts, key=lambda member: (-counts[member], member))
    return {member: least + (rank < rest) for rank, member in enumerate(by_count)}


def _spread(vbuckets: list[int], count: int) -> list[int]:
    """So many of them at even distances: neighbours mostly live on one node, and all nodes are to give alike."""
    return [vbuckets[at * len(vbuckets) // count] for at in range(count)] if count > 0 else []


def _deal(targets: list[str | None], missing: dict[str, int]) -> None:
    """Give what nobody has to those who miss some, in turns."""
    waiting = deque(member for member, count in missing.items() if count > 0)
    for vbucket, target in enumerate(targets):
        if target is None:
            member = waiting.popleft()
            targets[vbucket] = member
            missing[member] -= 1
            if missing[member]:
                waiting.append(member)

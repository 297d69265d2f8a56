"""The rollback decision: a table of cases with their reasons, a model written apart from the code, and invariants.

The eight rules of the producer, in their order:

1. start 0, and vbuuid 0 or not strict: no rollback.
2. start not 0 and below the purge seqno, unless the client ignores that or the client's purge seqno is ours: to 0.
3. vbuuid not in the failover log: to 0.
4. `upper` is where the next newer entry began, or the high seqno for the newest entry.
5. start = snapshot start: the client holds nothing of that snapshot, so its end is start.
6. snapshot end ≤ upper: no rollback.
7. start = snapshot end: the client holds all of it, so its start is start.
8. To `upper` if that is below the snapshot start, else to the snapshot start.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.failover_log import ConsumerPoint, FailoverEntry, FailoverLog, RollbackDemand, decide_rollback
from headwater.protocol.numbers import FAILOVER_LOG_ENTRIES_MAX
from support.cases import case, each

OLD, MIDDLE, NEW, STRANGER = 0xA, 0xB, 0xC, 0xD
"""Three branches: OLD from 0 to 10, MIDDLE from 10 to 20, NEW from 20 on. The high seqno is 30."""
LOG = ((NEW, 20), (MIDDLE, 10), (OLD, 0))
HIGH = 30
LAST = 2**64 - 1

ON = None
"""The consumer can go on."""


@dataclass(frozen=True)
class Case:
    """One request, the state it meets, and the seqno it is rolled back to."""

    reason: str
    vbuuid: int
    start: int
    snapshot: tuple[int, int]
    expected: int | None
    _: KW_ONLY
    log: tuple[tuple[int, int], ...] = LOG
    high: int = HIGH
    purge: int = 0
    seen_purge: int | None = None
    strict: bool = False
    ignore_purged: bool = False


# The reason; then vbuuid, start, snapshot, and the seqno to roll back to.
CASES = [
    # Rule 1: a consumer with nothing.
    Case("from the beginning, no vbuuid", 0, 0, (0, 0), ON),
    Case("from the beginning on the newest branch, strict", NEW, 0, (0, 0), ON, strict=True),
    Case("from the beginning, unknown vbuuid", STRANGER, 0, (0, 0), ON),
    Case("from the beginning, unknown vbuuid, strict", STRANGER, 0, (0, 0), 0, strict=True),
    Case(
        "from the beginning of a snapshot beyond the high seqno, strict: nothing of it is held",
        NEW,
        0,
        (0, 99),
        ON,
        strict=True,
    ),
    Case("from the beginning, below the purge seqno", 0, 0, (0, 0), ON, purge=25),
    Case(
        "from the beginning, below the purge seqno, strict: rule 2 is for starts other than 0",
        NEW,
        0,
        (0, 0),
        ON,
        purge=25,
        strict=True,
    ),
    # Rule 2: purged deletions.
    Case("purge seqno above start", NEW, 25, (25, 25), 0, purge=26),
    Case("purge seqno equal to start", NEW, 25, (25, 25), ON, purge=25),
    Case("purge seqno above start, which is ignored", NEW, 25, (25, 25), ON, purge=26, ignore_purged=True),
    Case(
        "purge seqno above start, and the client has seen that very one", NEW, 25, (25, 25), ON, purge=26, seen_purge=26
    ),
    Case(
        "purge seqno above start, and the client has seen an older one", NEW, 25, (25, 25), 0, purge=26, seen_purge=22
    ),
    Case("the client has seen no purge, which is not ours", NEW, 25, (25, 25), 0, purge=26, seen_purge=0),
    Case(
        "the purge is ignored, but the histories part all the same", OLD, 15, (15, 15), 10, purge=26, ignore_purged=True
    ),
    Case(
        "purge decides before the failover log: to 0 and not to the end of the branch", OLD, 15, (15, 15), 0, purge=16
    ),
    Case("start below the purge seqno, though the snapshot ends above it", NEW, 23, (22, 28), 0, purge=25),
    # Rule 3: a branch we do not know.
    Case("vbuuid 0 with a start: that is no branch", 0, 2, (2, 2), 0),
    Case("unknown vbuuid with a start", STRANGER, 2, (2, 2), 0),
    # Rules 4 to 6, the newest branch: shared up to the high seqno.
    Case("newest branch, at the high seqno", NEW, 30, (30, 30), ON),
    Case("newest branch, inside a snapshot that ends at the high seqno", NEW, 25, (21, 30), ON),
    Case("newest branch, inside a snapshot that ends above the high seqno", NEW, 25, (21, 31), 21),
    # Start beyond the high seqno: recorded as a rollback to it, not as ERANGE.
    Case("start beyond the high seqno, whole snapshot", NEW, 31, (31, 31), 30),
    Case("start beyond the high seqno, inside a snapshot from below it", NEW, 40, (25, 50), 25),
    # As recorded with Couchbase 7.0.5, vbucket 1 with three changes.
    Case("recorded: start 10 of 3", OLD, 10, (10, 10), 3, log=((OLD, 0),), high=3),
    Case("recorded: start 2, snapshot 0 to 1000", OLD, 2, (0, 1000), 0, log=((OLD, 0),), high=3),
    # The middle branch: shared up to 20.
    Case("middle branch, exactly where the next began", MIDDLE, 20, (20, 20), ON),
    Case("middle branch, one beyond where the next began", MIDDLE, 21, (21, 21), 20),
    Case("middle branch, snapshot ends at the shared end", MIDDLE, 15, (12, 20), ON),
    Case("middle branch, snapshot ends above the shared end", MIDDLE, 15, (12, 21), 12),
    Case("middle branch, snapshot starts above the shared end", MIDDLE, 23, (22, 25), 20),
    # The oldest branch: shared up to 10. (`small_cases` tries every seqno around the ends of branches and snapshots.)
    Case("oldest branch, one beyond where the next began", OLD, 11, (11, 11), 10),
    # Rule 5: start = snapshot start.
    Case("nothing of a snapshot held, though it ends beyond", MIDDLE, 15, (15, 99), ON),
    Case("nothing of a snapshot held, beyond the shared end", MIDDLE, 21, (21, 99), 20),
    Case("one change of a snapshot held is enough to roll back", MIDDLE, 16, (15, 99), 15),
    # Rule 7: start = snapshot end.
    Case("all of a snapshot held, across the shared end", MIDDLE, 25, (12, 25), 20),
    Case("all but one change of a snapshot held, across the shared end", MIDDLE, 24, (12, 25), 12),
    # The order of the log decides.
    Case(
        "two branches that began at one seqno: the older ends where it began",
        OLD,
        11,
        (11, 11),
        10,
        log=((NEW, 10), (MIDDLE, 10), (OLD, 0)),
    ),
    Case(
        "two branches that began at one seqno: the one in between is empty",
        MIDDLE,
        11,
        (11, 11),
        10,
        log=((NEW, 10), (MIDDLE, 10), (OLD, 0)),
    ),
    Case("a log whose oldest branches fell out: the name is gone", OLD, 5, (5, 5), 0, log=((NEW, 20), (MIDDLE, 10))),
    Case(
        "the specification's own log, which does not fall: the next newer entry decides",
        0xFEEDFACE,
        0x1343215,
        (0x1343215, 0x1343215),
        0x1343214,
        high=0x2000000,
        log=((0xFEEDDECA, 0x5432), (0xDECAFE, 0x1343214), (0xFEEDFACE, 4), (0xDEADBEEF, 0x6524)),
    ),
    Case(
        "the specification's own request (seed 000), the snapshot beyond what there is",
        0xFEEDDECA,
        0xFFEEDD,
        (0, 0xFFEEFF),
        0,
        high=0xFFEEFE,
        log=((0xFEEDDECA, 0x5432),),
    ),
    # The largest numbers.
    Case("at the largest seqno", OLD, LAST, (LAST, LAST), ON, log=((OLD, 0),), high=LAST),
    Case(
        "inside a snapshot up to the largest seqno",
        OLD,
        LAST - 2,
        (LAST - 3, LAST),
        LAST - 3,
        log=((OLD, 0),),
        high=LAST - 1,
    ),
    Case(
        "purged up to the largest seqno", OLD, LAST - 1, (LAST - 1, LAST - 1), 0, log=((OLD, 0),), high=LAST, purge=LAST
    ),
    Case("the largest vbuuid is one like any other", LAST, 5, (5, 5), ON, log=((LAST, 0),)),
]


def failover_log(entries: tuple[tuple[int, int], ...]) -> FailoverLog:
    return FailoverLog(tuple(FailoverEntry(vbuuid=vbuuid, seqno=seqno) for vbuuid, seqno in entries))


def decide(case: Case) -> RollbackDemand | None:
    return decide_rollback(
        ConsumerPoint(
            vbuuid=case.vbuuid,
            start_seqno=case.start,
            snapshot_start_seqno=case.snapshot[0],
            snapshot_end_seqno=case.snapshot[1],
            purge_seqno=case.seen_purge,
        ),
        failover_log=failover_log(case.log),
        high_seqno=case.high,
        purge_seqno=case.purge,
        strict_vbuuid=case.strict,
        ignore_purged_tombstones=case.ignore_purged,
    )


@each("case", CASES)
def test_rollback(case: Case) -> None:
    rollback = decide(case)
    assert (rollback.to_seqno if rollback else ON) == case.expected
    if rollback:
        assert rollback.reason


# The model tries every seqno, so it is asked only where those are few.
COUNTABLE = [case for case in CASES if case.high <= 1000]


@each("case", COUNTABLE)
def test_the_model_agrees_with_the_table(case: Case) -> None:
    """So that the model is held to the rules as well as the code is."""
    assert model(case) == case.expected


@case(Case("", NEW, 25, (25, 25), 0, purge=26), "purged")
@case(Case("", STRANGER, 25, (25, 25), 0), "not in the failover log")
@case(Case("", NEW, 31, (31, 31), 30), "before the consumer's snapshot")
@case(Case("", NEW, 25, (21, 31), 21), "inside the consumer's snapshot")
def test_a_rollback_says_why(case: Case, reason: str) -> None:
    rollback = decide(case)
    assert reason in rollback.reason


def test_a_consumer_is_neither_strict_nor_careless_unless_it_says_so() -> None:
    log = failover_log(LOG)
    nowhere = ConsumerPoint(vbuuid=STRANGER, start_seqno=0, snapshot_start_seqno=0, snapshot_end_seqno=0)
    assert decide_rollback(nowhere, failover_log=log, high_seqno=30, purge_seqno=0) is None
    behind = ConsumerPoint(vbuuid=NEW, start_seqno=25, snapshot_start_seqno=25, snapshot_end_seqno=25)
    assert decide_rollback(behind, failover_log=log, high_seqno=30, purge_seqno=26) is not None


# --- rollbacks in a row -------------------------------------------------------------------------------------------


def after(case: Case, to_seqno: int, **changes: Any) -> Case:
    """The request of a client that has gone back to `to_seqno`."""
    return replace(case, start=to_seqno, snapshot=(to_seqno, to_seqno), **changes)


def test_a_failover_between_two_requests_rolls_a_client_back_again() -> None:
    """Seed 003, steps 2 to 4. Each time the client takes the newest branch and goes back to where it was sent."""
    first = Case("", MIDDLE, 29, (29, 29), 20)
    assert decide(first) == RollbackDemand(to_seqno=20, reason="the histories part before the consumer's snapshot")
    # Meanwhile a copy that had got to 12 only became active.
    second = after(first, 20, log=((STRANGER, 12), (MIDDLE, 10), (OLD, 0)), high=14)
    rollback = decide(second)
    assert rollback.to_seqno == 12
    # And one that had got to 3.
    third = after(second, 12, log=((NEW, 3), (OLD, 0)), high=5)
    rollback = decide(third)
    assert rollback.to_seqno == 0  # its branch is gone
    assert decide(after(third, 0)) is None


# --- the model ----------------------------------------------------------------------------------------------------


def shared_seqnos(case: Case) -> range | None:
    """All seqnos, 0 among them, up to which a holder of the branch has our history; None for an unknown branch."""
    names = [vbuuid for vbuuid, _ in case.log]
    if case.vbuuid not in names:
        return None
    newer = case.log[: names.index(case.vbuuid)]
    return range(newer[-1][1] + 1) if newer else range(case.high + 1)


def model(case: Case) -> int | None:
    """The decision by trying every seqno: which true states does the client have, and which of them do we share?

    A client in the middle of a snapshot has a true state only at the snapshot's start or before it; one that holds all
    of it, or nothing, has one at its own seqno and everywhere before. It can go on if what it has begun ends in shared
    history; else it goes back to its last true state that is shared.
    """
    if case.start == 0 and not (case.strict and case.vbuuid):
        return ON
    misses_deletions = 0 < case.start < case.purge
    if misses_deletions and not case.ignore_purged and case.seen_purge != case.purge:
        return 0
    shared = shared_seqnos(case)
    if shared is None:
        return 0
    snapshot_start, snapshot_end = case.snapshot
    is_whole = case.start in case.snapshot
    has_begun_up_to = case.start if is_whole else snapshot_end
    if has_begun_up_to in shared:
        return ON
    last_true_state = case.start if is_whole else snapshot_start
    return max(seqno for seqno in range(last_true_state + 1) if seqno in shared)


SMALL = 14


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Requests that pass the range checks, on logs as servers keep them, small enough for edges to meet."""
    high = draw(st.integers(0, SMALL))
    began = sorted(draw(st.lists(st.integers(0, high), max_size=3)), reverse=True)
    names = draw(st.permutations([1, 2, 3, 4]))
    log = tuple(zip(names, [*began, 0], strict=False))
    snapshot_start = draw(st.integers(0, SMALL + 3))
    start = snapshot_start + draw(st.integers(0, 4))
    snapshot_end = start + draw(st.integers(0, 4))
    return Case(
        reason="",
        vbuuid=draw(st.sampled_from([0, 1, 2, 3, 4, STRANGER])),
        start=start,
        snapshot=(snapshot_start, snapshot_end),
        expected=ON,
        log=log,
        high=high,
        purge=draw(st.integers(0, high)),
        seen_purge=draw(st.none() | st.integers(0, high)),
        strict=draw(st.booleans()),
        ignore_purged=draw(st.booleans()),
    )


@given(small_cases())
def test_the_code_equals_the_model(case: Case) -> None:
    rollback = decide(case)
    assert (rollback.to_seqno if rollback else ON) == model(case)


@given(small_cases())
def test_a_client_that_obeys_gets_on_after_two_rollbacks_at_most(case: Case) -> None:
    """Unless it is strict about a name that is not in the log: that it must change."""
    if case.strict and shared_seqnos(case) is None:
        return
    for _ in range(2):
        rollback = decide(case)
        if rollback is None:
            return
        case = after(case, rollback.to_seqno)
    assert decide(case) is None


# --- the failover log: branches, newest first; which of them a point belongs to, and where they end -------------------


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog(tuple(FailoverEntry(vbuuid=vbuuid, seqno=seqno) for vbuuid, seqno in entries))


THREE = log((0xC, 20), (0xB, 10), (0xA, 0))


def test_a_new_vbucket_has_one_branch_from_0() -> None:
    assert FailoverLog.start(0xA) == log((0xA, 0))
    assert FailoverLog.start(0xA).newest == FailoverEntry(vbuuid=0xA, seqno=0)


def test_the_newest_comes_first() -> None:
    assert THREE.newest.vbuuid == 0xC


def test_an_empty_log_is_whose_fault_it_is() -> None:
    with pytest.raises(LocalProtocolError):
        FailoverLog(())
    with pytest.raises(MalformedMessage):
        FailoverLog.of([])


@pytest.mark.parametrize(("vbuuid", "known"), [(0xA, True), (0xB, True), (0xC, True), (0xD, False), (0, False)])
def test_which_branches_are_known(vbuuid: int, known: bool) -> None:
    assert THREE.knows(vbuuid) == known


# --- new branches -------------------------------------------------------------------------------------------------


@case(0xD, 30, log((0xD, 30), (0xC, 20), (0xB, 10), (0xA, 0)))
# A vbucket that became active twice with no change in between: both names are of one history.
@case(0xD, 20, log((0xD, 20), (0xC, 20), (0xB, 10), (0xA, 0)))
# Branches of a history that did not happen go.
@case(0xD, 15, log((0xD, 15), (0xB, 10), (0xA, 0)))
@case(0xD, 5, log((0xD, 5), (0xA, 0)))
# A name stands in the log once.
@case(0xA, 30, log((0xA, 30), (0xC, 20), (0xB, 10)))
def test_a_new_branch_goes_before_the_others(vbuuid: int, at_seqno: int, expected: FailoverLog) -> None:
    assert THREE.branch(vbuuid, at_seqno=at_seqno) == expected


def test_the_oldest_branches_fall_out() -> None:
    grown = FailoverLog.start(1)
    for vbuuid in range(2, 2 * FAILOVER_LOG_ENTRIES_MAX):
        grown = grown.branch(vbuuid, at_seqno=vbuuid * 10)
    assert len(grown.entries) == FAILOVER_LOG_ENTRIES_MAX == 25
    assert [entry.vbuuid for entry in grown.entries] == list(range(49, 24, -1))


def test_a_received_log_is_cut_to_the_limit() -> None:
    received = [FailoverEntry(vbuuid=number, seqno=100 - number) for number in range(40)]
    assert FailoverLog.of(iter(received)).entries == tuple(received[:25])


# --- rollback -----------------------------------------------------------------------------------------------------


@case(25, THREE)
@case(20, THREE)
@case(19, log((0xB, 10), (0xA, 0)))
@case(10, log((0xB, 10), (0xA, 0)))
@case(9, log((0xA, 0)))
@case(0, log((0xA, 0)))
def test_a_rollback_forgets_the_branches_after_it(to_seqno: int, expected: FailoverLog) -> None:
    assert THREE.truncate(to_seqno) == expected


def test_a_rollback_to_before_all_that_is_remembered_keeps_the_oldest_name() -> None:
    assert log((0xC, 20), (0xB, 10)).truncate(5) == log((0xB, 5))


# --- where branches end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vbuuid", "end"), [(0xC, 33), (0xB, 20), (0xA, 10), (0xD, None), (0, None)])
def test_a_branch_ends_where_the_next_newer_began(vbuuid: int, end: int | None) -> None:
    assert THREE.branch_end(vbuuid, high_seqno=33) == end


def test_the_order_of_the_log_decides_and_not_its_seqnos() -> None:
    """The log in the specification's own example (seed 000) does not fall from entry to entry."""
    example = log((0xFEEDDECA, 0x5432), (0xDECAFE, 0x1343214), (0xFEEDFACE, 4), (0xDEADBEEF, 0x6524))
    assert example.branch_end(0xFEEDFACE, high_seqno=0x2000000) == 0x1343214
    assert example.branch_end(0xDEADBEEF, high_seqno=0x2000000) == 4


@pytest.mark.parametrize(
    ("seqno", "vbuuid"), [(0, 0xA), (1, 0xA), (10, 0xA), (11, 0xB), (20, 0xB), (21, 0xC), (2**64 - 1, 0xC)]
)
def test_a_branch_names_what_comes_after_its_seqno(seqno: int, vbuuid: int) -> None:
    assert THREE.vbuuid_at(seqno) == vbuuid


def test_a_change_belongs_to_the_branch_that_still_shares_it() -> None:
    for seqno in range(1, 33):
        end = THREE.branch_end(THREE.vbuuid_at(seqno), high_seqno=33)
        assert end is not None
        assert end >= seqno

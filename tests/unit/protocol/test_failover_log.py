"""The failover log: branches, newest first; which of them a point belongs to, and where they end."""

from __future__ import annotations

import pytest

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.numbers import FAILOVER_LOG_ENTRIES_MAX


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


def test_a_new_branch_goes_before_the_others() -> None:
    assert THREE.branch(0xD, at_seqno=30) == log((0xD, 30), (0xC, 20), (0xB, 10), (0xA, 0))


def test_a_branch_at_the_same_seqno_keeps_the_one_before() -> None:
    """A vbucket that became active twice with no change in between: both names are of one history."""
    assert THREE.branch(0xD, at_seqno=20) == log((0xD, 20), (0xC, 20), (0xB, 10), (0xA, 0))


def test_branches_of_a_history_that_did_not_happen_go() -> None:
    assert THREE.branch(0xD, at_seqno=15) == log((0xD, 15), (0xB, 10), (0xA, 0))
    assert THREE.branch(0xD, at_seqno=5) == log((0xD, 5), (0xA, 0))


def test_a_name_stands_in_the_log_once() -> None:
    assert THREE.branch(0xA, at_seqno=30) == log((0xA, 30), (0xC, 20), (0xB, 10))


def test_a_log_does_not_change() -> None:
    THREE.branch(0xD, at_seqno=30)
    THREE.truncate(5)
    assert log((0xC, 20), (0xB, 10), (0xA, 0)) == THREE


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


@pytest.mark.parametrize(
    ("to_seqno", "expected"),
    [
        (25, THREE),
        (20, THREE),
        (19, log((0xB, 10), (0xA, 0))),
        (10, log((0xB, 10), (0xA, 0))),
        (9, log((0xA, 0))),
        (0, log((0xA, 0))),
    ],
)
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
    ("seqno", "vbuuid"),
    [(0, 0xA), (1, 0xA), (10, 0xA), (11, 0xB), (20, 0xB), (21, 0xC), (2**64 - 1, 0xC)],
)
def test_a_branch_names_what_comes_after_its_seqno(seqno: int, vbuuid: int) -> None:
    assert THREE.vbuuid_at(seqno) == vbuuid


def test_a_change_belongs_to_the_branch_that_still_shares_it() -> None:
    for seqno in range(1, 33):
        end = THREE.branch_end(THREE.vbuuid_at(seqno), high_seqno=33)
        assert end is not None
        assert end >= seqno

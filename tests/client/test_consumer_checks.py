"""The judges themselves: the state of a consumer goes back as a rollback says, and each rule finds who breaks it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cases import case
from support.oracle import ConsumerState, Document, Offset, Row, StreamRules, differences

BRANCH, NEXT_BRANCH = 0xAA, 0xBB


def row(op: str, seqno: int, key: str | None = None, **members: Any) -> Row:
    """A row of vbucket 0, in the snapshot 0 to 10 unless another is given."""
    usual = {
        "vbucket": 0, "vbuuid": BRANCH, "collection_id": 0, "cas": seqno, "value": None,
        "snapshot_start": 0, "snapshot_end": 10,
    }  # fmt: skip
    return {**usual, "op": op, "seqno": seqno, "key": None if key is None else key.encode(), **members}


def put(seqno: int, key: str, **members: Any) -> Row:
    return row("mutation", seqno, key, value=b"%d" % seqno, **members)


def rollback(seqno: int, *, from_seqno: int, **members: Any) -> Row:
    details = {"from_seqno": from_seqno, "old_vbuuid": BRANCH, "new_vbuuid": NEXT_BRANCH, **members}
    return row("rollback", seqno, value=json.dumps(details).encode(), vbuuid=NEXT_BRANCH)


# --- the state ----------------------------------------------------------------------------------------------------


def held(*rows: Row) -> dict[str, int]:
    """The seqnos of the documents that rows lead to."""
    state = ConsumerState()
    state.apply(rows)
    return {key.decode(): document.seqno for (_, key), document in state.documents().items()}


def test_documents_come_and_go() -> None:
    assert held(put(1, "a"), put(2, "b"), put(3, "a")) == {"a": 3, "b": 2}
    assert held(put(1, "a"), row("deletion", 2, "a"), put(3, "b"), row("expiration", 4, "b")) == {}
    assert held(put(1, "a"), row("collection_created", 2), row("scope_dropped", 3)) == {"a": 1}


def test_a_dropped_collection_takes_its_documents_along() -> None:
    assert held(put(1, "a"), put(2, "b", collection_id=8), row("collection_dropped", 3, collection_id=8)) == {"a": 1}


def test_a_rollback_brings_back_what_was_there() -> None:
    before = [put(1, "a"), put(2, "b"), put(3, "c", collection_id=8)]
    lost = [put(4, "a"), row("deletion", 5, "b"), row("collection_dropped", 6, collection_id=8), put(7, "d")]
    assert held(*before, *lost) == {"a": 4, "d": 7}
    assert held(*before, *lost, rollback(3, from_seqno=7)) == {"a": 1, "b": 2, "c": 3}
    assert held(*before, *lost, rollback(0, from_seqno=7)) == {}
    assert held(*before, *lost, rollback(5, from_seqno=7), put(6, "b")) == {"a": 4, "b": 6, "c": 3}


def test_a_rollback_is_of_one_vbucket() -> None:
    assert held(put(1, "a"), put(9, "b", vbucket=1), rollback(0, from_seqno=1)) == {"b": 9}


def test_what_nobody_knows_is_not_passed_over() -> None:
    with pytest.raises(AssertionError, match="nobody knows"):
        held(row("flush", 1))


def test_differences_are_told() -> None:
    first, second = Document(1, 1, b""), Document(2, 2, b"")
    assert differences({(0, b"a"): first}, {(0, b"a"): first}) == []
    for held_documents, stored in (
        ({(0, b"a"): first}, {}),
        ({}, {(0, b"a"): first}),
        ({(0, b"a"): first}, {(0, b"a"): second}),
    ):
        assert len(differences(held_documents, stored)) == 1


# --- the rules ----------------------------------------------------------------------------------------------------

NO_OFFSETS: dict[int, Offset] = {}


def check(*rows: Row, offset: Offset | None = None, complete: bool = True, whole: bool = False) -> None:
    rules = StreamRules(complete_snapshots=complete, whole_in_step=whole)
    rules.check(rows, NO_OFFSETS if offset is None else {0: offset})


def test_what_is_as_it_should_be() -> None:
    next_snapshot = {"snapshot_start": 10, "snapshot_end": 20}
    check(
        put(1, "a"), put(4, "b"), row("scope_created", 10),
        put(11, "a", **next_snapshot), row("deletion", 20, "b", **next_snapshot),
        rollback(10, from_seqno=20), put(12, "a", vbuuid=NEXT_BRANCH, **next_snapshot),
        offset=(NEXT_BRANCH, 12, 10, 20),
    )  # fmt: skip


@case([put(2, "a"), put(2, "b")], "seqno 2 after 2")
@case([put(3, "a"), put(2, "b")], "seqno 2 after 3")
@case([put(11, "a")], "outside its snapshot")
@case([put(4, "a", snapshot_start=5)], "outside its snapshot")
@case([put(1, "a"), put(2, "a")], "twice in a snapshot")
@case([put(1, "a"), row("deletion", 2, "a")], "twice in a snapshot")
@case([put(1, "a"), put(11, "b", snapshot_start=5, snapshot_end=20)], "was not complete")
@case([put(1, "a"), put(2, "b", vbuuid=NEXT_BRANCH), put(3, "c")], "a branch that has ended")
@case([put(5, "a"), rollback(2, from_seqno=4)], "a rollback from 4")
@case([put(5, "a"), rollback(5, from_seqno=5)], "takes nothing back")
@case([put(5, "a"), rollback(2, from_seqno=5, old_vbuuid=7)], "of another branch")
@case([put(5, "a"), rollback(2, from_seqno=5), put(2, "b", vbuuid=NEXT_BRANCH)], "seqno 2 after 2")
@case([put(5, "a"), rollback(2, from_seqno=5), put(3, "b")], "a branch that has ended")
@case([put(5, "a"), put(6, "b", vbuuid=NEXT_BRANCH), rollback(2, from_seqno=6)], "of another branch")
def test_what_breaks_a_rule(rows: list[Row], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(*rows)


def test_all_versions_of_a_key_in_a_snapshot() -> None:
    StreamRules(complete_snapshots=True, all_versions=True).check([put(1, "a"), put(2, "a")], NO_OFFSETS)


@case((BRANCH, 4, 0, 10))  # before the last change
@case((BRANCH, 6, 7, 10))  # outside of the snapshot
@case((NEXT_BRANCH + 1, 0, 0, 0))  # nowhere
def test_offsets_that_break_a_rule(offset: Offset) -> None:
    with pytest.raises(AssertionError, match="the offset"):
        check(put(5, "a"), offset=offset)


def test_offsets_of_a_branch_that_has_ended() -> None:
    with pytest.raises(AssertionError, match="a branch that has ended"):
        check(put(5, "a"), put(6, "b", vbuuid=NEXT_BRANCH), offset=(BRANCH, 6, 0, 10))


def test_a_step_that_ends_inside_a_snapshot() -> None:
    inside: Offset = (BRANCH, 5, 0, 10)
    check(put(5, "a"), offset=inside)
    check(put(5, "a"), offset=inside, whole=True, complete=False)
    with pytest.raises(AssertionError, match="the offset"):
        check(put(5, "a"), offset=inside, whole=True)


def test_seqnos_that_nothing_was_seen_of_are_behind_the_consumer() -> None:
    rules = StreamRules(complete_snapshots=True)
    rules.check([put(5, "a")], {0: (BRANCH, 10, 0, 10)})
    with pytest.raises(AssertionError, match="seqno 7 after 10"):
        rules.check([put(7, "b")], NO_OFFSETS)


def test_who_comes_back_may_find_another_snapshot_and_no_change_again() -> None:
    for seqno, broken in ((6, False), (5, True)):
        rules = StreamRules(complete_snapshots=True)
        rules.check([put(5, "a")], {0: (BRANCH, 5, 0, 10)})
        rules.left()
        found = put(seqno, "b", snapshot_start=0, snapshot_end=20)
        if broken:
            with pytest.raises(AssertionError, match="seqno 5 after 5"):
                rules.check([found], NO_OFFSETS)
        else:
            rules.check([found], NO_OFFSETS)

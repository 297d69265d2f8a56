"""Plans of who is to have what, by example. That they are balanced and move little is shown in `tests/property`."""

from __future__ import annotations

from headwater.client.groups.lease_member import plan_targets

NOBODY = None


def test_the_first_member_has_all() -> None:
    assert plan_targets([NOBODY] * 4, ["a"]) == ("a",) * 4


def test_vbuckets_are_dealt_in_turns() -> None:
    assert plan_targets([NOBODY] * 6, ["c", "a", "b"]) == ("a", "b", "c", "a", "b", "c")


def test_without_members_nobody_has_anything() -> None:
    assert plan_targets(["a", "b"], []) == (None, None)


def test_who_comes_gets_some_of_every_node() -> None:
    """A node has a run of neighbours, so the half that moves must not be a half of the bucket."""
    plan = plan_targets(["a"] * 8, ["a", "b"])
    assert plan[:4].count("b") == plan[4:].count("b") == 2


def test_who_stays_keeps_all_when_another_goes() -> None:
    assert plan_targets(["a", "b", "a", "b", "c", "c"], ["a", "c"]) == ("a", "a", "a", "c", "c", "c")


def test_who_has_one_more_than_others_keeps_it() -> None:
    assert plan_targets(["b", "b", "a"], ["a", "b"]) == ("b", "b", "a")


def test_the_order_of_the_members_does_not_matter() -> None:
    assert plan_targets([NOBODY] * 7, ["b", "a"]) == plan_targets([NOBODY] * 7, ["a", "b"])

"""People are told once of a collection that every vbucket tells of."""

from __future__ import annotations

from typing import Any

from change_batches import batch_of, document, event, rollback

from headwater.cli.tailing import places
from headwater.cli.tailing.places import EventsOnce


def created(vbucket: int, collection: str = "orders", op: str = "collection_created") -> dict[str, Any]:
    return event(op, vbucket=vbucket, scope="shop", collection=collection, collection_id=8)


def shown(once: EventsOnce, *rows: dict[str, Any]) -> list[int]:
    found: list[int] = once.rows(batch_of(*rows)).tolist()
    return found


def test_an_event_that_all_vbuckets_tell() -> None:
    once = EventsOnce()
    assert shown(once, document(), created(0), document(), created(1), created(2)) == [0, 1, 2]
    assert shown(once, created(3), document(), rollback()) == [1, 2]


def test_other_events_are_others() -> None:
    rows = [created(0), created(0, "users"), created(0, op="collection_dropped")]
    rows += [event("scope_created", vbucket=1, scope=scope, collection=None, collection_id=None) for scope in "ab"]
    assert shown(EventsOnce(), *rows) == [0, 1, 2, 3, 4]


def test_what_a_vbucket_tells_again_is_new_and_told_once() -> None:
    once = EventsOnce()
    assert shown(once, *(created(vbucket) for vbucket in (0, 1, 2, 1, 0, 2, 2, 0))) == [0, 3, 6]


def test_events_of_long_ago_are_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr(places, "EVENTS_MAX", 2)
    once = EventsOnce()
    assert shown(once, created(0, "a"), created(0, "b"), created(1, "a"), created(0, "c"), created(2, "a")) == [0, 1, 3]
    assert shown(once, created(1, "b")) == [0]

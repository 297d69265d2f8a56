"""What a consumer says, and how it differs from the bucket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.errors import InvalidInput
from headwater.judge import consumer as consumer_log
from headwater.judge.consumer import ConsumerLog, Held, differences
from headwater.protocol.numbers import vbucket_of
from support.cases import case

KEY = "judge::0001"
VBUCKETS = 4
VBUCKET = int(vbucket_of(KEY.encode(), VBUCKETS))


def log_of(*lines: dict[str, Any] | str) -> ConsumerLog:
    log = ConsumerLog(VBUCKETS)
    for line in lines:
        log.read((line if isinstance(line, str) else json.dumps(line)).encode())
    return log


def put(seqno: int, value: Any = None, **others: Any) -> dict[str, Any]:
    return {"op": "set", "key": KEY, "seqno": seqno, **({} if value is None else {"value": value}), **others}


@case([put(1, {"n": 1}), put(2, {"n": 2})], Held(2, {"n": 2}))
@case([put(1), {"op": "delete", "key": KEY, "seqno": 2}], None)
@case([put(1), {"op": "expiration", "key": KEY, "seqno": "2"}], None)
@case([put(1, "one"), put(5, "five"), {"op": "rollback", "vbucket": VBUCKET, "seqno": 4}], Held(1, "one"))
@case([put(1), put(5), {"op": "rollback", "vbucket": VBUCKET, "seqno": 5}], Held(5))
@case([put(1), {"op": "rollback", "vbucket": (VBUCKET + 1) % VBUCKETS, "seqno": 0}], Held(1))
@case([put(9), {"op": "rollback", "vbucket": VBUCKET, "seqno": 3}, put(4)], Held(4))
@case([put(1, '{"n":1}', vbucket=VBUCKET, cas="12345678901234567890")], Held(1, {"n": 1}, 12345678901234567890))
@case(["INFO connected", '{"level":"info"}', '{"op": "collection_created"}', "", put(1)], Held(1))
def test_what_the_consumer_holds(lines: list[Any], held: Held | None) -> None:
    assert log_of(*lines).documents().get(KEY) == held


def test_lines_of_another_kind_are_counted() -> None:
    log = log_of("INFO connected", put(3), '{"op"', {"op": "set", "key": "its::checkpoint", "seqno": 1})
    assert (log.lines, log.passed_over, log.first_passed_over) == (4, 2, "INFO connected")
    assert log.reached()[VBUCKET] == 3
    assert list(log.documents()) == [KEY]


@case({"op": "upsert", "key": KEY}, "line 1 of the consumer: \"op\" is 'upsert'. Write set, delete or rollback")
@case({"op": ["set"]}, '"op" is')
@case({"op": "set", "key": KEY, "seqno": -1}, '"seqno" is -1')
@case({"op": "set", "key": KEY, "seqno": True}, '"seqno" is True')
@case({"op": "set", "key": 7, "seqno": 1}, "no text as its key")
@case({"op": "set", "key": KEY, "seqno": 1, "vbucket": 77}, f"belongs to vbucket {VBUCKET}")
@case({"op": "rollback", "vbucket": VBUCKETS, "seqno": 1}, f"from 0 to {VBUCKETS - 1}")
def test_a_bad_line_is_named(line: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        log_of(line)
    assert message in str(raised.value)


def test_lines_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_log, "LINE_BYTES_MAX", 100)
    monkeypatch.setattr(consumer_log, "LINES_MAX", 2)
    with pytest.raises(InvalidInput, match="more than 100 bytes"):
        log_of("x" * 101)
    with pytest.raises(InvalidInput, match="more than 2 lines"):
        log_of("", "", "")


@case(Held(1, {"n": 1}, 7), Held(1, {"n": 1}), True)
@case(Held(1, {"n": 1}, 7), Held(1, {"n": 2}), False)
@case(Held(1, {"n": 1}, 7), Held(1, cas=7), True)
@case(Held(1, {"n": 1}, 7), Held(1, {"n": 1}, 8), False)
@case(Held(1, {"n": 1}, 7), Held(1), True)
@case(Held(1, {"n": 1}, 7), Held(2), False)
@case(Held(1), None, False)
@case(None, Held(1), False)
def test_a_version_is_compared_by_what_is_known_of_it(truth: Held | None, found: Held | None, is_equal: bool) -> None:
    def documents(held: Held | None) -> dict[str, Held]:
        return {} if held is None else {KEY: held}

    differing = list(differences(documents(truth), documents(found), VBUCKETS))
    assert [(one.key, one.vbucket, one.expected, one.found) for one in differing] == (
        [] if is_equal else [(KEY, VBUCKET, truth, found)]
    )

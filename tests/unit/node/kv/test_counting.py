"""Counters: where they begin, where they end, and what they leave alone."""

from __future__ import annotations

import pytest
from kv_harness import Client, Node

from headwater.protocol.features import Opcode
from headwater.protocol.messages.documents import (
    COUNTER_MUST_EXIST,
    Decrement,
    DecrementQuiet,
    Get,
    GetMeta,
    Increment,
    IncrementQuiet,
    Set,
)
from headwater.protocol.messages.subdocument import (
    LookupSpec,
    MultiLookup,
    MultiMutation,
    MutationSpec,
    PathFlags,
)
from headwater.protocol.numbers import Cas
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype


@pytest.mark.parametrize("kind", [Increment, Decrement])
def test_a_counter_begins_with_its_initial_value(node: Node, client: Client, kind: type[Increment]) -> None:
    begun = client.succeed(kind(key=b"n", delta=5, initial=40, expiry=60))
    got = client.succeed(Get(key=b"n"))
    assert (begun.count, begun.cas) == (40, got.cas)
    assert (got.value, got.flags, got.datatype) == (b"40", 0, Datatype.JSON)
    assert client.succeed(GetMeta(key=b"n")).expiry == node.clock.now_s() + 60


def test_counting(client: Client) -> None:
    client.succeed(Increment(key=b"n", initial=10))
    assert client.succeed(Increment(key=b"n", delta=5)).count == 15
    assert client.succeed(Decrement(key=b"n", delta=3)).count == 12
    assert client.succeed(Get(key=b"n")).value == b"12"


def test_down_stops_at_0_and_up_starts_again(client: Client) -> None:
    client.succeed(Set(key=b"n", value=b"3"))
    assert client.succeed(Decrement(key=b"n", delta=4)).count == 0
    client.succeed(Set(key=b"n", value=b"%d" % (2**64 - 1)))
    assert client.succeed(Increment(key=b"n", delta=2)).count == 1


def test_a_counter_keeps_flags_expiry_and_attributes(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"n", value=b"3", flags=9))
    spec = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=PathFlags.XATTR, path=b"note", value=b"1")
    client.succeed(MultiMutation(key=b"n", specs=(spec,), expiry=60))
    client.succeed(Increment(key=b"n", delta=1, expiry=5))
    got = client.succeed(Get(key=b"n"))
    assert (got.value, got.flags) == (b"4", 9)
    assert client.succeed(GetMeta(key=b"n")).expiry == node.clock.now_s() + 60
    look = LookupSpec(opcode=Opcode.SUBDOC_GET, flags=PathFlags.XATTR, path=b"note")
    assert client.succeed(MultiLookup(key=b"n", specs=(look,))).results[0].value == b"1"


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b" 1", b"18446744073709551616", b"9" * 1000, b"\xb2"])
def test_what_is_not_a_number(client: Client, value: bytes) -> None:
    client.succeed(Set(key=b"n", value=value))
    assert client.refused(Increment(key=b"n")) == Status.DELTA_BADVAL
    assert client.succeed(Get(key=b"n")).value == value


def test_a_counter_that_must_exist(client: Client) -> None:
    assert client.refused(Increment(key=b"n", expiry=COUNTER_MUST_EXIST)) == Status.KEY_ENOENT
    client.succeed(Set(key=b"n", value=b"1"))
    assert client.succeed(Increment(key=b"n", expiry=COUNTER_MUST_EXIST)).count == 2
    assert client.succeed(GetMeta(key=b"n")).expiry == 0


def test_a_cas_must_be_that_of_the_counter(client: Client) -> None:
    assert client.refused(Increment(key=b"n", cas=Cas(1))) == Status.KEY_ENOENT
    cas = client.succeed(Set(key=b"n", value=b"1")).cas
    assert client.refused(Increment(key=b"n", cas=Cas(cas + 1))) == Status.KEY_EEXISTS
    assert client.succeed(Increment(key=b"n", cas=cas)).count == 2


def test_the_answer_tells_where_the_write_stands(client: Client) -> None:
    assert client.succeed(Increment(key=b"n")).seqno == 1
    assert client.succeed(Increment(key=b"n")).seqno == 2


def test_quiet_counters(client: Client) -> None:
    assert client.call_all(IncrementQuiet(key=b"n", initial=3), DecrementQuiet(key=b"n", delta=1)) == []
    assert client.succeed(Get(key=b"n")).value == b"2"
    assert client.refused(IncrementQuiet(key=b"m", expiry=COUNTER_MUST_EXIST)) == Status.KEY_ENOENT

"""How far every vbucket is, asked of a real node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headwater import blocking
from headwater.client.blocking_bucket import Surveyor
from headwater.client.settings import ClientSettings
from headwater.errors import HeadwaterError
from headwater.lake.verify import _is_rolled_back
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId
from support.node_process import PASSWORD, USER, NodeProcess


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("survey") / "data", "--vbuckets", "4") as node:
        yield node.start()


def surveyor_of(node: NodeProcess) -> Surveyor:
    return Surveyor(ClientSettings.make(f"{node.url}/default", user=USER, password=PASSWORD, tls=None))


def test_every_vbucket_tells_how_far_it_is_and_on_which_branch(node: NodeProcess) -> None:
    with node.connect() as connection, surveyor_of(node) as surveyor:
        before = surveyor.survey()
        assert sorted(before) == [0, 1, 2, 3]
        connection.request(Set(vbucket=VBucketId(2), key=b"k", collection_id=CollectionId(0), value=b"{}"))
        after = surveyor.survey([VBucketId(2)])
        assert list(after) == [2]
        assert after[VBucketId(2)].high_seqno == before[VBucketId(2)].high_seqno + 1
        assert after[VBucketId(2)].failover_log == before[VBucketId(2)].failover_log


def test_a_vbucket_that_ends_in_an_aborted_durable_write(node: NodeProcess) -> None:
    """Clients see its last document, and a read that begins now gets to its last seqno: neither is the other."""
    vbucket = VBucketId(3)
    topology = b'{"topology":[["here","no copy"]]}'
    document: dict[str, Any] = {"vbucket": vbucket, "collection_id": CollectionId(0), "value": b"{}"}
    with node.connect() as connection, surveyor_of(node) as surveyor:
        before = surveyor.survey()[vbucket]
        connection.request(SetVBucket(vbucket=vbucket, state=VBucketState.ACTIVE, value=topology))
        connection.request(Set(key=b"seen", **document))
        with pytest.raises(HeadwaterError, match="AMBIGUOUS"):
            connection.request(
                Set(key=b"hidden", frame_infos=(durability(DurabilityLevel.MAJORITY, timeout_ms=100),), **document)
            )
        status = surveyor.survey()[vbucket]
        assert (status.high_seqno, status.last_seqno) == (before.high_seqno + 1, before.high_seqno + 3)
        with blocking.connect(f"{node.url}/default", user=USER, password=PASSWORD) as client:
            batches = client.batches(end="now")
            for _ in batches:
                pass
            offset = batches.offsets[vbucket]
        assert offset.seqno == status.last_seqno
        assert not _is_rolled_back(offset, status)
        assert _is_rolled_back(offset, replace(status, last_seqno=Seqno(0)))


def test_no_old_answer_is_taken_after_a_failure(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: bytes) -> None:
        raise HeadwaterError("an answer that can't be read")

    with surveyor_of(node) as surveyor:
        expected = surveyor.survey()
        with monkeypatch.context() as patch:
            patch.setattr("headwater.protocol.messages.dcp_streams.decode_failover_log", refuse)
            with pytest.raises(HeadwaterError, match="can't be read"):
                surveyor.survey()
        assert surveyor.survey() == expected


def test_a_node_that_comes_back_is_found_again(node: NodeProcess) -> None:
    with surveyor_of(node) as surveyor:
        expected = surveyor.survey()
        for connection in surveyor._surveyor._connections.values():
            number = os.dup(connection._transport.get_extra_info("socket").fileno())
            with socket.socket(fileno=number) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        assert surveyor.survey() == expected

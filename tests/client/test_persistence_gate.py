"""The persistence gate against a real node."""

from __future__ import annotations

from contextlib import closing

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.client.cluster_map import ClusterMap
from headwater.client.delivery import PersistenceGate
from headwater.client.kv_connection import KvConnection
from headwater.errors import KeyNotFound
from headwater.protocol.messages.dcp_streams import GetFailoverLog, Open, OpenFlags
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId, Vbuuid
from support.node_process import PASSWORD, USER, StartNode

OLD, NEW = Vbuuid(0xAA), Vbuuid(0xBB)


def newest_vbuuid(dcp: KvConnection, vbucket: VBucketId) -> Vbuuid:
    told = dcp.request(GetFailoverLog(vbucket=vbucket))
    return told.failover_log[0].vbuuid


def ask_node(dcp: KvConnection, gate: PersistenceGate, now_s: float) -> None:
    for address, request in gate.requests_due(now_s, {dcp.address}):
        told = dcp.request(request)
        assert isinstance(told, ObserveSeqnoResponse)
        gate.on_observed(address, request, told)


def write(kv: KvConnection, vbucket: VBucketId, key: bytes) -> None:
    kv.request(Set(vbucket=vbucket, key=key, value=b"1", collection_id=CollectionId(0)))


def test_the_gate_and_a_node_understand_each_other(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4")
    vbucket = VBucketId(1)
    with closing(node.connect()) as kv, closing(node.connect()) as dcp:
        dcp.request(Open(key=b"gated", flags=OpenFlags.PRODUCER))
        for number in range(3):
            write(kv, vbucket, b"k%d" % number)
        config = kv.outcome.cluster_config
        assert config is not None
        gate = PersistenceGate(ClusterMap.decode(config, asked=node.address))
        with pytest.raises(KeyNotFound):
            dcp.request(ObserveSeqno(vbucket=vbucket, vbuuid=OLD))
        old = newest_vbuuid(dcp, vbucket)
        gate.wants(vbucket, old, Seqno(3))
        ask_node(dcp, gate, now_s=0)
        assert gate.released_seqno(vbucket) == 3

        arguments = ["--vbucket", "1", "--to", "2", "--user", USER, "--password", PASSWORD]
        drilled = CliRunner().invoke(main, ["drill", "rollback", f"{node.url}/default", *arguments])
        assert drilled.exit_code == 0, drilled.output
        write(kv, vbucket, b"another")
        # There is a seqno 3 again, but it is not the one that was read.
        gate.on_rollback(vbucket)
        gate.wants(vbucket, old, Seqno(3))
        ask_node(dcp, gate, now_s=100)
        assert gate.released_seqno(vbucket) == 2
        gate.on_rollback(vbucket)
        gate.wants(vbucket, newest_vbuuid(dcp, vbucket), Seqno(3))
        ask_node(dcp, gate, now_s=200)
        assert gate.released_seqno(vbucket) == 3

"""The recorded sessions about replicas and durable writes, played against a real node, in both roles.

How they are played, and what is compared, is in `support.replayed_sessions`. Where the node differs on purpose, the
tables below say so by the line of the recording, and `docs/supported-dcp.md` says why.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.client.connection_string import Address
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.messages.dcp_changes import SeqnoAcknowledged
from headwater.protocol.messages.dcp_streams import Control, Open, OpenFlags, StreamRequest, VBucketState
from headwater.protocol.messages.session import Hello
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId
from headwater.protocol.status import Status
from support.node_process import NodeProcess
from support.recorded_sessions import RecordedFrame, read_session
from support.replayed_sessions import PASSWORD, USER, RawConnection, Replay

EXPIRY_S = 2.2


@pytest.fixture
def bare_node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data", "--bare", user=USER, password=PASSWORD) as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()


REVISION = frozenset({"revision"})
DURABLE_WRITES_MORE = dict.fromkeys((337, 352), (Opcode.DCP_STREAM_END,))
"""A stream of a client without collections, to the seqno of a prepare. From disk, 7.0.5 never ends it."""
CREATIONS = (363, 505, 530, 694, 737)
PRODUCER_MORE = dict.fromkeys(CREATIONS, (Opcode.DCP_SYSTEM_EVENT,))
"""The creation of a collection that is dropped later in the snapshot. 7.0.5 sends the drop alone."""
PRODUCER_OTHER = {
    # Of two collections of one manifest, either may come first; the last has the manifest's uid.
    **dict.fromkeys(CREATIONS, frozenset({"extras", "value"})),
    # Revisions of new documents, after the deletion of one that has left attributes: 7.0.5 does not count that one.
    **dict.fromkeys((281, 287, 357, 366, 373, 498, 508, 515), REVISION),
}

COPY = "n_2"
OPENING = ("HELLO", "DCP_OPEN", "DCP_CONTROL")


class WillingCopy:
    """A replica that acknowledges every prepare of the vbuckets whose topology has it.

    Where a topology has one node, the recorded server prepares and commits. For this node a durable write is one like
    any other then. So the topologies of one are sent as topologies of two, the other of which is this.
    """

    def __init__(self, address: Address) -> None:
        self._connection = RawConnection(address)
        self._connection.send(Hello(key=b"copy", features=(Feature.COLLECTIONS, Feature.XERROR)).encode())
        self._connection.frame()
        self._connection.log_in()
        for request in (
            Open(key=b"copy", flags=OpenFlags.PRODUCER | OpenFlags.INCLUDE_DELETE_TIMES),
            Control(key=b"enable_noop", value=b"true"),
            Control(key=b"enable_sync_writes", value=b"true"),
            Control(key=b"consumer_name", value=COPY.encode()),
        ):
            self._connection.call(request)
        self._thread = threading.Thread(target=self._acknowledge, daemon=True)
        self._thread.start()

    def add(self, vbucket: int) -> None:
        self._connection.send(StreamRequest(vbucket=VBucketId(vbucket), end_seqno=SEQNO_MAX).encode())

    def close(self) -> None:
        self._connection.close()
        self._thread.join()

    def _acknowledge(self) -> None:
        with suppress(OSError, AssertionError):
            while True:
                frame = self._connection.frame()
                if frame.magic.is_request and frame.opcode == Opcode.DCP_PREPARE:
                    seqno = Seqno(int.from_bytes(frame.extras[:8]))
                    answer = SeqnoAcknowledged(vbucket=VBucketId(frame.specific), prepared_seqno=seqno)
                    self._connection.send(answer.encode())


@dataclass(slots=True)
class ReplicaReplay(Replay):
    copy: WillingCopy | None = None
    opening: list[bytes] = field(default_factory=list)
    """What the replica has sent before its first stream request."""

    def as_sent(self, frame: RecordedFrame) -> bytes:
        if "topology of one" not in frame.text:
            return super(ReplicaReplay, self).as_sent(frame)
        if self.copy is None:
            self.copy = WillingCopy(self.address)
            self.stack.callback(self.copy.close)
        return SetVBucket(
            vbucket=VBucketId(int.from_bytes(frame.data[6:8])),
            opaque=int.from_bytes(frame.data[12:16]),
            state=VBucketState.ACTIVE,
            value=json.dumps({"topology": [["n_0", COPY]]}).encode(),
        ).encode()

    def answered(self, request: RecordedFrame) -> None:
        if "topology of one" in request.text:
            assert self.copy is not None
            self.copy.add(int.from_bytes(request.data[6:8]))

    def begin(self, connection: RawConnection, frame: RecordedFrame) -> None:
        """Logins are shown on the first connection only, and the opening of the replica that comes back not at all."""
        if frame.connection == "fe#1":
            return
        connection.log_in()
        if frame.connection == "repl#2":
            for data in self.opening:
                connection.send(data)
                assert connection.frame().specific == Status.SUCCESS

    def before_sending(self, frame: RecordedFrame) -> None:
        if frame.opcode == "GET":
            time.sleep(EXPIRY_S)
        if frame.connection == "repl#1" and frame.opcode in OPENING:
            self.opening.append(bytes(frame.data))


def test_the_durable_writes_of_7_0_5(bare_node: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = ReplicaReplay(bare_node.address, stack, more=DURABLE_WRITES_MORE)
        replay.play(read_session("7.0.5-durability"))


def test_the_producer_of_7_0_5(bare_node: NodeProcess) -> None:
    session = read_session("7.0.5-replica-producer")
    is_after = [frame.section.startswith("5.") for frame in session].index(True)
    with ExitStack() as stack:
        replay = ReplicaReplay(bare_node.address, stack, more=PRODUCER_MORE, other=PRODUCER_OTHER)
        replay.play(session[:is_after])
        bare_node.stop()
        bare_node.start()
        replay.address = bare_node.address
        replay.play(session[is_after:])

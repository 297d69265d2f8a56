"""The recorded sessions with real servers, played against a real node: the same requests get the same answers.

How they are played, and what is compared, is in `support.replayed_sessions`. What the transcripts leave out is put back
(`_left_out`): their opaques have gaps, and the streams that follow show what was written there. The session of 4.6.5
also leaves out logins, which that server did not need.

Not compared is where the snapshot of two updates of one key starts that were deduplicated: 7.0.5 left out the seqno of
the first, the node starts at the seqno after the last one, as `protocol.md` has it.

The sessions of 8.0.2 are played against a node that speaks as 8.0, the others against one that speaks as 7.0. Where the
node still differs from 8.0.2, the tables at the end name each line with the reason.

4.6.5 differs from 7.0.5, and `protocol.md` says to follow the latter: where the same request has another status in the
session of 7.0.5, that is the one expected, also where 4.6.5 closed the connection instead of answering. One more
difference shows in the recordings: after an expiration, 7.0.5 starts the revisions of new documents one higher.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headwater.client.connection_string import Address
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.base import ErrorResponse, PlainResponse, Request
from headwater.protocol.messages.dcp_changes import SeqnoAcknowledged
from headwater.protocol.messages.dcp_streams import Open, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.session import Hello
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from support.cases import case_apart
from support.node_process import NodeProcess
from support.recorded_sessions import RecordedFrame, read_session
from support.replayed_sessions import PASSWORD, USER, RawConnection, Replay, decode, normalised

EXPIRY_S = 2.2
"""A document with an expiry of 1 s has expired after that, whatever the fraction of the second it was written at."""
DEDUPLICATED = (17, 18)
"""The snapshot in which 7.0.5 leaves out a change that is deduplicated."""
FIRST_SEQNO_AFTER_EXPIRATION = 14
"""On vbucket 0 of the sessions."""


# --- what the transcripts leave out -------------------------------------------------------------------------------


def _left_out(version: str, frame: RecordedFrame) -> list[Request]:
    """What the front-end connection sent between the shown frames: before this one. Each group goes in one write."""
    is_marker = frame.opcode == "DCP_SNAPSHOT_MARKER"
    if frame.text == "SET key-0":
        # GET_ALL_VB_SEQNOS shows 16 vbuckets, of which two are seen to be set.
        return [SetVBucket(vbucket=VBucketId(vbucket), state=VBucketState.ACTIVE) for vbucket in range(2, 16)]
    if frame.text == "overwrite key-1":
        return [_set(f"key-{n}", b'{"n":%d}' % n, flags=0xCAFE0000 + n) for n in range(1, 5)]
    if frame.text == "GET_ALL_VB_SEQNOS":
        return [_set(f"v1-{n}", b"x" * 10, vbucket=1) for n in range(3)]
    if version == "7.0.5" and is_marker and frame.fields["end"] == "18":
        # "two updates of the same key back to back": here they were deduplicated.
        return [_set("dd", b"1"), _set("dd", b"2")]
    if version == "4.6.5" and is_marker and frame.fields["end"] in ("17", "18"):
        # And here they were not.
        return [_set("dd", b"1" if frame.fields["end"] == "17" else b"2")]
    return []


def _set(key: str, value: bytes, *, flags: int = 0, vbucket: int = 0) -> Set:
    return Set(vbucket=VBucketId(vbucket), key=key.encode(), value=value, flags=flags)


@dataclass(slots=True)
class SessionReplay(Replay):
    version: str = "7.0.5"
    statuses: dict[str, int] = field(default_factory=dict)
    """Request → the status that 7.0.5 answered."""

    def begin(self, connection: RawConnection, frame: RecordedFrame) -> None:
        """What the session of 4.6.5 does not show: logins, and the open after a reconnect."""
        if self.version != "4.6.5":
            return
        connection.log_in()
        if "#" in frame.connection and frame.opcode == "DCP_STREAM_REQ" and frame.text != "STREAM_REQ before DCP_OPEN":
            connection.call(Open(key=b"reconnected"))

    def put_back(self, frame: RecordedFrame) -> None:
        requests = _left_out(self.version, frame)
        if requests:
            front = [connection for name, connection in self.connections.items() if name.startswith("fe#")][-1]
            front.send(b"".join(request.encode() for request in requests))
            for _ in requests:
                assert front.frame().specific == Status.SUCCESS

    def before_sending(self, frame: RecordedFrame) -> None:
        if frame.opcode == "GET" and frame.text != "GET exp-2 after its expiry":
            time.sleep(EXPIRY_S)

    def finish_request(self, name: str) -> None:
        """4.6.5 has closed the connection instead of answering: 7.0.5 has answered."""
        request = self.request.pop(name, None)
        if request is not None and self.version == "4.6.5" and request.text in self.statuses:
            assert self.connections[name].frame().specific == self.statuses[request.text], str(request)

    def as_expected(self, expected: Frame, recorded: RecordedFrame, request: RecordedFrame | None) -> Frame:
        if self.version != "4.6.5":
            if recorded.opcode != "DCP_SNAPSHOT_MARKER" or int(recorded.fields["end"]) != DEDUPLICATED[1]:
                return expected
            return replace(expected, extras=DEDUPLICATED[0].to_bytes(8) + expected.extras[8:])
        if request is not None and request.text in self.statuses:
            status = self.statuses[request.text]
            return expected if expected.specific == status else replace(expected, specific=status, value=b"")
        return self._with_7_0_5_revisions(expected)

    def _with_7_0_5_revisions(self, frame: Frame) -> Frame:
        is_change = frame.magic.is_request and frame.opcode in (Opcode.DCP_MUTATION, Opcode.DCP_DELETION)
        if not is_change or frame.specific != 0 or int.from_bytes(frame.extras[:8]) < FIRST_SEQNO_AFTER_EXPIRATION:
            return frame
        revision = int.from_bytes(frame.extras[8:16]) + 1
        return replace(frame, extras=frame.extras[:8] + revision.to_bytes(8) + frame.extras[16:])


# --- the sessions -------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data", "--bare", "--speaks-as", "7.0", user=USER, password=PASSWORD) as node:
        yield node.start()
    assert "Traceback" not in node.log(), node.log()


def test_the_session_of_7_0_5_gets_the_same_answers(bare_node: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = SessionReplay(bare_node.address, stack)
        replay.play(read_session("7.0.5"))
        # The third connection has taken the name of the second.
        assert replay.connections["dcp#2"].is_closed_by_the_node()


def test_the_session_of_4_6_5_gets_the_answers_of_7_0_5(bare_node: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = SessionReplay(
            bare_node.address, stack, version="4.6.5", closes_as_recorded=False, statuses=_statuses_of_7_0_5()
        )
        replay.play(read_session("4.6.5"))


def _statuses_of_7_0_5() -> dict[str, int]:
    """Request → status, of requests that stand under their own name in both sessions."""
    statuses: dict[str, int] = {}
    requests: dict[str, RecordedFrame] = {}
    for frame in read_session("7.0.5"):
        if not frame.is_from_server:
            requests[frame.connection] = frame
        elif frame.is_response and frame.connection in requests:
            statuses[requests.pop(frame.connection).text] = int(frame.fields["status"], 16)
    return statuses


# --- 8.0.2 --------------------------------------------------------------------------------------------------------

STATUS = frozenset({"status or vbucket", "value", "datatype"})
SESSION_OTHER = {
    188: frozenset({"value", "magic"}),  # HELLO 0x0f: served, where the server had tracing off; others as below
    **dict.fromkeys((195, 203), frozenset({"magic"})),  # so these say how long the node took
    **dict.fromkeys((208, 213, 218, 223), frozenset({"value"})),  # HELLO 0x0c, 0x0d, 0x19, 0x1f, 0x20: not served
    250: frozenset({"value"}),  # VERSION: the node has a build of its own
    719: STATUS,  # change_streams: NOT_SUPPORTED by couchstore, and the node keeps every version
    841: STATUS,  # `enable` is taken for enable_noop, which looks like a fault
    852: STATUS,  # and `b` for backfill_order
}
SESSION_SKIPPED = {
    **dict.fromkeys((297, 300), "open flag 0x200 is newer than 8.0.2, and has its effect here"),
    **dict.fromkeys((1561, 1565), "stream flag 0x08 is in the seed, so the node takes it"),
    1900: "a collection that is named twice closes the connection of 8.0.2, and counts once here",
}
FLUSHED_LATER = (b"\x09o1", b"\x09o2", b"\x09o3")
KV_OTHER = {62: frozenset({"value"})}
"""HELLO 0x20: not served."""


@dataclass(slots=True)
class ReplayOf8(Replay):
    shows_login: frozenset[str] = frozenset()
    """The connections whose logins are recorded."""

    def begin(self, connection: RawConnection, frame: RecordedFrame) -> None:
        if frame.connection not in self.shows_login:
            connection.log_in()

    def before_sending(self, frame: RecordedFrame) -> None:
        if frame.text.startswith("GET exp-1"):
            time.sleep(EXPIRY_S)

    def is_beside(self, got: Frame, expected: Frame) -> bool:
        """A system event that a later one supersedes: 8.0.2 has one event of each collection and scope on disk.

        And what says that a filtered stream has passed a seqno, at once: 8.0.2 says so from disk only. And documents
        that a flush voids later in the snapshot: the event that follows takes them back.
        """
        if not (got.magic.is_request and expected.magic.is_request):
            return False
        if got.opcode == Opcode.DCP_SYSTEM_EVENT and expected.opcode == Opcode.DCP_STREAM_END:
            return True
        ours, theirs = normalised(got), normalised(expected)
        if got.opcode == expected.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            return bool(ours["end"] < theirs["start"])
        next_seqno = theirs.get("start", int.from_bytes(expected.extras[:8]))
        is_rare = got.opcode in (Opcode.DCP_SYSTEM_EVENT, Opcode.DCP_SEQNO_ADVANCED)
        is_rare |= got.opcode == Opcode.DCP_MUTATION and got.key in FLUSHED_LATER
        return bool(is_rare and int.from_bytes(got.extras[:8]) < next_seqno)


@case_apart(
    "8.0.2",
    "",
    376,
    {"other": SESSION_OTHER, "skipped": SESSION_SKIPPED, "shows_login": frozenset({"fe#1", "hello#1"})},
)
@case_apart("8.0.2-kv", "", 47, {"other": KV_OTHER, "shows_login": frozenset({"h#1", "fe#1"})})
@case_apart("8.0.2-flush", "", 50, {})
# [ids] has requests that cross with what is sent, and deletions that the server has malformed. Section 5 leaves
# out what was written, and its OSO snapshots are in the order of the keys; 7 is about a purge by COMPACT_DB.
@case_apart("8.0.2-collections", "01234", 219, {})
@case_apart("8.0.2-consumer", "01", 15, {})
def test_the_sessions_of_8_0_2_get_the_same_answers(
    node_of_8: NodeProcess, name: str, sections: str, compared: int, options: dict[str, Any]
) -> None:
    session = [frame for frame in read_session(name) if not sections or frame.section[0] in sections]
    with ExitStack() as stack:
        replay = ReplayOf8(node_of_8.address, stack, **options)
        replay.play([frame for frame in session if (name, frame.connection) != ("8.0.2-collections", "ids#1")])
        assert replay.compared == compared


# --- the recorded sessions about replicas and durable writes, played against a real node, in both roles -------------
# How they are played, and what is compared, is in `support.replayed_sessions`. Where the node differs on purpose, the
# tables below say so by the line of the recording, and `docs/supported-dcp.md` says why.


REVISION = frozenset({"revision"})
DURABLE_WRITES_MORE = dict.fromkeys((337, 352), (Opcode.DCP_STREAM_END,))
"""A stream of a client without collections, to the seqno of a prepare. From disk, 7.0.5 never ends it."""
PRODUCER_MORE = dict.fromkeys((360, 502, 527, 691, 734), (Opcode.DCP_SYSTEM_EVENT,))
"""The creation of a collection that is dropped later in the snapshot. 7.0.5 sends the drop alone."""
PRODUCER_OTHER = {
    # Revisions of new documents, after the deletion of one that has left attributes: 7.0.5 does not count that one.
    **dict.fromkeys((281, 287, 357, 366, 373, 498, 508, 515), REVISION)
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
            dcp_streams.Open(
                key=b"copy", flags=dcp_streams.OpenFlags.PRODUCER | dcp_streams.OpenFlags.INCLUDE_DELETE_TIMES
            ),
            dcp_streams.Control(key=b"enable_noop", value=b"true"),
            dcp_streams.Control(key=b"enable_sync_writes", value=b"true"),
            dcp_streams.Control(key=b"consumer_name", value=COPY.encode()),
        ):
            self._connection.call(request)
        self._thread = threading.Thread(target=self._acknowledge, daemon=True)
        self._thread.start()

    def add(self, vbucket: int) -> None:
        self._connection.send(dcp_streams.StreamRequest(vbucket=VBucketId(vbucket), end_seqno=SEQNO_MAX).encode())

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


def _is_topology_of_one(frame: RecordedFrame) -> bool:
    return frame.opcode == "SET_VBUCKET" and bytes(frame.data).endswith((b'[["n_0"]]}', b'[["active"]]}'))


@dataclass(slots=True)
class ReplicaReplay(Replay):
    copy: WillingCopy | None = None
    opening: list[bytes] = field(default_factory=list)
    """What the replica has sent before its first stream request."""
    shows_login: frozenset[str] = frozenset({"fe#1"})
    """The connections whose logins are recorded."""

    def as_sent(self, frame: RecordedFrame) -> bytes:
        if not _is_topology_of_one(frame):
            return super(ReplicaReplay, self).as_sent(frame)
        if self.copy is None:
            self.copy = WillingCopy(self.address)
            self.stack.callback(self.copy.close)
        return SetVBucket(
            vbucket=VBucketId(int.from_bytes(frame.data[6:8])),
            opaque=int.from_bytes(frame.data[12:16]),
            state=dcp_streams.VBucketState.ACTIVE,
            value=json.dumps({"topology": [["n_0", COPY]]}).encode(),
        ).encode()

    def answered(self, request: RecordedFrame) -> None:
        if _is_topology_of_one(request):
            self.copy.add(int.from_bytes(request.data[6:8]))

    def begin(self, connection: RawConnection, frame: RecordedFrame) -> None:
        """The opening of the replica that comes back is not shown."""
        if frame.connection in self.shows_login:
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

    def finish_request(self, name: str) -> None:
        """The answer to an infinite time-out is not shown."""
        request = self.request.pop(name, None)
        if request is not None and "timeout 65535 ms" in request.text:
            assert self.connections[name].frame().specific == Status.DURABILITY_INVALID_LEVEL


def test_the_durable_writes_of_7_0_5(bare_node: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = ReplicaReplay(bare_node.address, stack, more=DURABLE_WRITES_MORE)
        replay.play(read_session("7.0.5-durability"))
        assert replay.compared == 122


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
        assert replay.compared == 148


# --- the node as the consumer -------------------------------------------------------------------------------------
#
# The recorded client is the producer and the proxy here: it opens the node as a consumer, adds streams, answers what
# the node asks for, and sends changes. Both sides choose their opaques, so those of the recording are translated.

NEWER_CONTROLS = dict.fromkeys((b"flatbuffers_system_events", b"change_streams", b"max_marker_version"), Status.EINVAL)
"""What the node asks for beside: 7.0.5 does not know them."""
NOT_ASKED_BY_THE_NODE = frozenset({"GET_ERROR_MAP", "DCP_BUFFER_ACK"})
"""The version of the producer, which makes no difference here; and acknowledgements, which go by what is durable."""
CONSUMER_SKIPPED = {
    **dict.fromkeys((264, 267, 608, 611), "a larger buffer, once other connections are gone"),
    **dict.fromkeys((342, 344), "STRICT_VBUUID is a flag of add-stream in its document, so the node takes it"),
    **dict.fromkeys((373, 443, 446), "what is not taken ends the stream here, so that there is no gap"),
    420: "the node acknowledges what is durable, so that there is one acknowledgement for both levels",
    **dict.fromkeys((563, 567), "the node goes back to where it has every version, which is 0 here"),
    **dict.fromkeys((615, 618), "a disk marker of version 1 is taken"),
}
CONSUMER_OF_8_SKIPPED = {
    **dict.fromkeys((217, 220, 670, 673), "the node asks for its buffer first, as 7.0.5 did"),
    **dict.fromkeys((231, 234, 684, 687), "a larger buffer, once other connections are gone"),
    **dict.fromkeys(
        (389, 391, 395, 397, 411, 413, 417, 419), "a copy can't be made from the latest change on: flag 0x40 is EINVAL"
    ),
    **dict.fromkeys((468, 471, 490, 493, 544, 547), "what is not taken ends the stream here, so that there is no gap"),
    517: "the node acknowledges what is durable, so that there is one acknowledgement for both levels",
    **dict.fromkeys((551, 553), "the node takes a seqno-advanced: nodes of its own kind send it"),
}
SHORT_DELETION = ("7.0.5-consumer", 370)
"""It is sent as it has to be, so that its snapshot is complete."""


@dataclass(slots=True)
class ConsumerReplay(Replay):
    asked_beside: Mapping[bytes, Status] = field(default_factory=lambda: NEWER_CONTROLS)
    """The controls that the recorded server has not asked for, or not there, and how they are answered."""
    opaques: dict[int, int] = field(default_factory=dict)
    """Recorded → the node's, of what the node asks for and of its streams."""
    added: set[tuple[str, int]] = field(default_factory=set)
    """The streams that were put back, by connection and opaque."""

    def play_consumer(self, frames: list[RecordedFrame]) -> None:
        for frame in frames:
            if frame.line in self.skipped or frame.opcode in NOT_ASKED_BY_THE_NODE:
                continue
            connection = self._connection(frame)
            if not frame.is_from_server:
                if frame.connection in ("cons#2", "cons#3") and frame.opcode == "DCP_SNAPSHOT_MARKER":
                    self._add_stream(connection, frame)
                connection.send(self.as_sent(frame))
                continue
            got, expected = self._asked(connection), decode(bytes(frame.data))
            if expected.magic.is_request:
                self.opaques[expected.opaque] = got.opaque
            expected = replace(expected, opaque=self.opaques.get(expected.opaque, expected.opaque))
            ours, theirs = self._compared(got), self._compared(expected)
            if not (got.value and expected.value):
                ours["datatype of an error"] = theirs["datatype of an error"] = None
            assert ours == theirs, str(frame)
            self.compared += 1

    def begin(self, connection: RawConnection, frame: RecordedFrame) -> None:
        connection.log_in()

    def as_sent(self, frame: RecordedFrame) -> bytes:
        data = bytes(frame.data)
        if (frame.version, frame.line) == SHORT_DELETION:
            body_bytes = int.from_bytes(data[8:12]) + 3
            data = data[:4] + b"\x15" + data[5:8] + body_bytes.to_bytes(4) + data[12:40] + bytes(5) + data[42:]
        opaque = int.from_bytes(data[12:16])
        return data[:12] + self.opaques.get(opaque, opaque).to_bytes(4) + data[16:]

    def _asked(self, connection: RawConnection) -> Frame:
        """The next frame of the node that the server has sent as well."""
        while True:
            got = connection.frame()
            if got.opcode == Opcode.DCP_CONTROL and got.key in self.asked_beside:
                status = self.asked_beside[got.key]
                connection.send(ErrorResponse(opcode=Opcode.DCP_CONTROL, opaque=got.opaque, status=status).encode())
            elif got.opcode != Opcode.DCP_BUFFER_ACK:
                return got

    def _compared(self, frame: Frame) -> dict[str, Any]:
        fields = normalised(frame)
        if frame.key == b"set_noop_interval":
            del fields["value"]
        if frame.opcode == Opcode.DCP_ADD_STREAM:
            # The opaque of the stream.
            fields["extras"] = len(frame.extras)
        return fields

    def _add_stream(self, connection: RawConnection, frame: RecordedFrame) -> None:
        """What section 5 leaves out: the stream, and the controls that all are granted but the newer ones."""
        recorded = int.from_bytes(frame.data[12:16])
        if (frame.connection, recorded) in self.added:
            return
        self.added.add((frame.connection, recorded))
        connection.send(dcp_streams.AddStream(vbucket=VBucketId(1), opaque=3).encode())
        while (asked := self._asked(connection)).opcode == Opcode.DCP_CONTROL:
            connection.send(PlainResponse(opcode=Opcode.DCP_CONTROL, opaque=asked.opaque).encode())
        assert asked.opcode == Opcode.DCP_STREAM_REQUEST
        self.opaques[recorded] = asked.opaque
        log = (FailoverEntry(vbuuid=Vbuuid(0xABCDEF012345), seqno=Seqno(0)),)
        connection.send(dcp_streams.StreamRequestResponse(opaque=asked.opaque, failover_log=log).encode())
        assert self._asked(connection).opcode == Opcode.DCP_ADD_STREAM


def test_the_opens_of_7_0_5(bare_node: NodeProcess) -> None:
    session = [frame for frame in read_session("7.0.5-consumer") if frame.section[0] in "01"]
    with ExitStack() as stack:
        replay = ReplicaReplay(bare_node.address, stack)
        replay.play(session)
        assert replay.compared == 21


def test_the_consumer_of_7_0_5(bare_node: NodeProcess) -> None:
    session = read_session("7.0.5-consumer")
    with ExitStack() as stack:
        ReplicaReplay(bare_node.address, stack).play([frame for frame in session if frame.section[0] == "0"])
        replay = ConsumerReplay(bare_node.address, stack, skipped=CONSUMER_SKIPPED)
        replay.play_consumer([frame for frame in session if frame.section[0] in "2345"])
        assert replay.compared == 49


# --- 8.0.2 --------------------------------------------------------------------------------------------------------


DURABLE_WRITES_OF_8_SKIPPED = {
    **dict.fromkeys((61, 64), "the one durable copy is enough here, unless the bucket was made for more over REST"),
    539: "sent on a connection that the server has closed",
}
DURABLE_WRITES_OF_8_MISSING = frozenset({407, 410})
"""A seqno-advanced for an abort that has begun a checkpoint. Live streams without sync writes get nothing here for what
is not theirs, as from 7.0.5, and from 8.0.2 for a prepare."""
DURABLE_WRITES_OF_8_OTHER = {
    # Where a prepare has begun a checkpoint, the marker starts there, though the consumer does not get the prepare.
    380: frozenset({"start"})
}


def test_the_durable_writes_of_8_0_2(node_of_8: NodeProcess) -> None:
    with ExitStack() as stack:
        replay = ReplicaReplay(
            node_of_8.address,
            stack,
            other=DURABLE_WRITES_OF_8_OTHER,
            missing=DURABLE_WRITES_OF_8_MISSING,
            skipped=DURABLE_WRITES_OF_8_SKIPPED,
            interleaved=frozenset({"repl#1", "old#1"}),
            shows_login=frozenset(),
        )
        replay.play(read_session("8.0.2-durability"))
        assert replay.compared == 211


def test_the_consumer_of_8_0_2(node_of_8: NodeProcess) -> None:
    session = read_session("8.0.2-consumer")
    with ExitStack() as stack:
        set_up = ReplicaReplay(node_of_8.address, stack, shows_login=frozenset())
        set_up.play([frame for frame in session if frame.section[0] == "0"])
        replay = ConsumerReplay(
            node_of_8.address,
            stack,
            skipped=CONSUMER_OF_8_SKIPPED,
            asked_beside={b"connection_buffer_size": Status.SUCCESS},
        )
        replay.play_consumer([frame for frame in session if frame.section[0] in "234"])
        assert replay.compared == 62

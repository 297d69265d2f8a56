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

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headwater.protocol.features import Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import Open, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import VBucketId
from headwater.protocol.status import Status
from support.cases import case_apart
from support.node_process import NodeProcess
from support.recorded_sessions import RecordedFrame, read_session
from support.replayed_sessions import PASSWORD, USER, RawConnection, Replay, normalised

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

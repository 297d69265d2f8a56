"""Stream admission: the status for every fault, what accepted streams look like, the order of the checks, and the
answers of a real server (Couchbase 7.0.5) to the same requests.

All is judged as by 7.0, but for the section on dialects, which has what 8.0 judges differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headwater.errors import LocalProtocolError, MalformedJson, MalformedMessage
from headwater.protocol import stream_requests
from headwater.protocol.failover_log import FailoverEntry, FailoverLog, RollbackDemand
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import Frame, decode_frames
from headwater.protocol.messages import ErrorResponse, decode_message
from headwater.protocol.messages.dcp_streams import StreamFlags, StreamRequest, StreamRequestResponse, VBucketState
from headwater.protocol.numbers import SEQNO_MAX, STREAM_REQUEST_VALUE_BYTES_MAX, STREAMS_PER_VBUCKET_MAX
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import DIALECTS, CacheTransferOptions, Dialect, StreamRequestValue
from support.cases import case, case_apart, each

OLD, NEW, STRANGER = 0xA, 0xB, 0xC
LOG = FailoverLog((FailoverEntry(vbuuid=NEW, seqno=20), FailoverEntry(vbuuid=OLD, seqno=0)))


@dataclass
class Scenario:
    """A sound request on a collection-aware connection, of which each test spoils a part."""

    request: dict[str, Any] = field(
        default_factory=lambda: {
            "vbuuid": NEW,
            "start_seqno": 25,
            "end_seqno": 28,
            "snapshot_start_seqno": 25,
            "snapshot_end_seqno": 25,
        }
    )
    members: dict[str, Any] = field(default_factory=dict)
    raw_value: bytes | None = None
    connection: dict[str, Any] = field(default_factory=lambda: {"collections": True, "noop_enabled": True})
    vbucket: dict[str, Any] = field(
        default_factory=lambda: {
            "state": VBucketState.ACTIVE,
            "high_seqno": 30,
            "failover_log": LOG,
            "manifest_uid": 0xB4,
            "collections": {0: 0, 8: 0, 9: 8},
            "scopes": frozenset({0, 8}),
        }
    )
    vbucket_exists: bool = True
    dialect: Dialect = DIALECTS["7.0"]

    def admit(self) -> stream_requests.Admission:
        value = json.dumps(self.members).encode() if self.members else b""
        return stream_requests.admit_stream(
            StreamRequest(**self.request, value=value if self.raw_value is None else self.raw_value),
            connection=stream_requests.ConnectionFacts(**self.connection),
            vbucket=stream_requests.RequestedVBucket(**self.vbucket) if self.vbucket_exists else None,
            dialect=self.dialect,
        )


def status_of(admission: stream_requests.Admission) -> Status:
    match admission:
        case stream_requests.Accepted():
            return Status.SUCCESS
        case RollbackDemand():
            return Status.ROLLBACK
        case stream_requests.StreamRefusal(status=status, reason=reason):
            assert reason
            return status


def test_the_sound_request_is_accepted() -> None:
    assert Scenario().admit() == stream_requests.Accepted(
        start_seqno=25, end_seqno=28, snapshot_start_seqno=25, stream_id=None, collections=None, scope=None
    )


# --- dialects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differing:
    """What is changed in the sound request, and the status that it gets from 7.0 and from 8.0."""

    reason: str
    statuses: tuple[Status, Status]
    request: dict[str, Any] = field(default_factory=dict)
    value: bytes = b""
    connection: dict[str, Any] = field(default_factory=dict)
    vbucket: dict[str, Any] = field(default_factory=dict)


SUCCESS, EINVAL = Status.SUCCESS, Status.EINVAL


@case(Differing("an unknown flag", (SUCCESS, EINVAL), request={"flags": StreamFlags(0x1000)}))
@case(Differing("cache transfer, newer than 8.0", (SUCCESS, EINVAL), request={"flags": StreamFlags.CACHE_TRANSFER}))
@case(Differing("no values, a flag of the seed", (SUCCESS, SUCCESS), request={"flags": StreamFlags.NO_VALUE}))
@case(Differing("an empty value", (SUCCESS, EINVAL), value=b"{}"))
@case(Differing("an unknown key alone", (SUCCESS, EINVAL), value=b'{"x":1}'))
@case(Differing("an unknown key beside a known one", (SUCCESS, SUCCESS), value=b'{"uid":"0","x":1}'))
@case(Differing("a manifest ahead", (Status.MANIFEST_IS_AHEAD, SUCCESS), value=b'{"uid":"ffff"}'))
@case(Differing("a uid that is no number", (EINVAL, SUCCESS), value=b'{"uid":"zz"}'))
@case(Differing("no collections", (EINVAL, SUCCESS), value=b'{"collections":[]}'))
@case(
    Differing(
        "a filter with sync writes",
        (SUCCESS, Status.NOT_SUPPORTED),
        value=b'{"collections":["8"]}',
        connection={"sync_writes": True},
    )
)
@case(Differing("a pending vbucket", (SUCCESS, Status.NOT_MY_VBUCKET), vbucket={"state": VBucketState.PENDING}))
@case(
    Differing(
        "from latest, unknown vbuuid",
        (SUCCESS, Status.ROLLBACK),
        request={"flags": StreamFlags.FROM_LATEST, "vbuuid": STRANGER},
    )
)
@case(Differing("from latest, no vbuuid", (SUCCESS, SUCCESS), request={"flags": StreamFlags.FROM_LATEST, "vbuuid": 0}))
def test_dialects_judge_differently(row: Differing) -> None:
    for name, status in zip(("7.0", "8.0"), row.statuses, strict=True):
        scenario = Scenario(raw_value=row.value, dialect=DIALECTS[name])
        scenario.request |= row.request
        scenario.connection |= row.connection
        scenario.vbucket |= row.vbucket
        assert status_of(scenario.admit()) == status, f"{row.reason}, as {name}"


def test_a_stream_of_no_collections_ends_where_it_starts() -> None:
    admission = Scenario(raw_value=b'{"collections":[]}', dialect=DIALECTS["8.0"]).admit()
    assert admission.start_seqno == admission.end_seqno == 25


# --- one fault ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What is changed in the sound request, and the status it gets then."""

    reason: str
    status: Status
    request: dict[str, Any] = field(default_factory=dict)
    members: dict[str, Any] = field(default_factory=dict)
    connection: dict[str, Any] = field(default_factory=dict)
    vbucket: dict[str, Any] = field(default_factory=dict)


WITH_SIDS = {"stream_id_enabled": True}
FULL = {"open_stream_ids": frozenset(range(1, STREAMS_PER_VBUCKET_MAX + 1))}
NEARLY_FULL = {"open_stream_ids": frozenset(range(1, STREAMS_PER_VBUCKET_MAX))}
WITHOUT_NOOP = {"noop_enabled": False}
LEGACY = {"collections": False, "noop_enabled": False}

ROWS = [
    # ERANGE
    Row("start beyond the end", Status.ERANGE, {"end_seqno": 24}),
    Row("start at the end", Status.SUCCESS, {"end_seqno": 25}),
    Row("snapshot start beyond start", Status.ERANGE, {"snapshot_start_seqno": 26, "snapshot_end_seqno": 28}),
    Row("snapshot end below start", Status.ERANGE, {"snapshot_start_seqno": 20, "snapshot_end_seqno": 24}),
    Row("start at the snapshot's start", Status.SUCCESS, {"snapshot_end_seqno": 28}),
    Row("start at the snapshot's end", Status.SUCCESS, {"snapshot_start_seqno": 0}),
    Row("start inside its snapshot", Status.SUCCESS, {"snapshot_start_seqno": 22, "snapshot_end_seqno": 30}),
    Row("an end beyond the high seqno is a wish", Status.SUCCESS, {"end_seqno": SEQNO_MAX}),
    # EINVAL
    Row("collections and scope", Status.EINVAL, members={"collections": ["8"], "scope": "8"}),
    Row("uid not a string", Status.EINVAL, members={"uid": 180}),
    Row("sid not an integer", Status.EINVAL, members={"sid": "1"}),
    Row("sid beyond 16 bits", Status.EINVAL, members={"sid": 65536}, connection=WITH_SIDS),
    Row("collections not an array", Status.EINVAL, members={"collections": "8"}),
    Row("scope not a string", Status.EINVAL, members={"scope": 8}),
    Row("an unknown key", Status.SUCCESS, members={"colour": "blue"}),
    Row(
        "a filter without collections negotiated",
        Status.EINVAL,
        members={"collections": ["0"]},
        connection={"collections": False},
    ),
    # NOT_SUPPORTED
    Row("collections without noop", Status.NOT_SUPPORTED, connection=WITHOUT_NOOP),
    Row("xattrs without noop", Status.NOT_SUPPORTED, connection=LEGACY | {"include_xattrs": True}),
    Row("a value without noop", Status.NOT_SUPPORTED, members={"uid": "0"}, connection=LEGACY),
    Row("neither of them, without noop", Status.SUCCESS, connection=LEGACY),
    Row("xattrs with noop", Status.SUCCESS, connection={"collections": False, "include_xattrs": True}),
    # NOT_MY_VBUCKET
    Row(
        "active only, and a replica",
        Status.NOT_MY_VBUCKET,
        {"flags": StreamFlags.ACTIVE_ONLY},
        vbucket={"state": VBucketState.REPLICA},
    ),
    Row(
        "active only, and pending",
        Status.NOT_MY_VBUCKET,
        {"flags": StreamFlags.ACTIVE_ONLY},
        vbucket={"state": VBucketState.PENDING},
    ),
    Row(
        "active only, and dead",
        Status.NOT_MY_VBUCKET,
        {"flags": StreamFlags.ACTIVE_ONLY},
        vbucket={"state": VBucketState.DEAD},
    ),
    Row("dead, whatever the flags", Status.NOT_MY_VBUCKET, vbucket={"state": VBucketState.DEAD}),
    Row("active only, and active", Status.SUCCESS, {"flags": StreamFlags.ACTIVE_ONLY}),
    Row("a replica streams, too", Status.SUCCESS, vbucket={"state": VBucketState.REPLICA}),
    # DCP_STREAMID_INVALID
    Row("a sid, and the feature is off", Status.DCP_STREAMID_INVALID, members={"sid": 1}),
    Row("no sid, and the feature is on", Status.DCP_STREAMID_INVALID, connection=WITH_SIDS),
    Row("no sid among other members", Status.DCP_STREAMID_INVALID, members={"uid": "b4"}, connection=WITH_SIDS),
    Row("sid 0", Status.DCP_STREAMID_INVALID, members={"sid": 0}, connection=WITH_SIDS),
    Row("sid 0, and the feature is off", Status.DCP_STREAMID_INVALID, members={"sid": 0}),
    Row("sid 1", Status.SUCCESS, members={"sid": 1}, connection=WITH_SIDS),
    Row("the largest sid", Status.SUCCESS, members={"sid": 65535}, connection=WITH_SIDS),
    # KEY_EEXISTS and ENOMEM
    Row("a stream is open", Status.KEY_EEXISTS, connection={"open_stream_ids": frozenset({None})}),
    Row(
        "the sid is in use",
        Status.KEY_EEXISTS,
        members={"sid": 7},
        connection=WITH_SIDS | {"open_stream_ids": frozenset({6, 7})},
    ),
    Row(
        "another sid is in use",
        Status.SUCCESS,
        members={"sid": 8},
        connection=WITH_SIDS | {"open_stream_ids": frozenset({6, 7})},
    ),
    Row("as many streams as there may be", Status.ENOMEM, members={"sid": 99}, connection=WITH_SIDS | FULL),
    Row("room for one more stream", Status.SUCCESS, members={"sid": 99}, connection=WITH_SIDS | NEARLY_FULL),
    # MANIFEST_IS_AHEAD
    Row("a manifest we have not seen", Status.MANIFEST_IS_AHEAD, members={"uid": "b5"}),
    Row("our manifest", Status.SUCCESS, members={"uid": "b4"}),
    Row("an older manifest", Status.SUCCESS, members={"uid": "1"}),
    # UNKNOWN_COLLECTION and UNKNOWN_SCOPE
    Row("an unknown collection", Status.UNKNOWN_COLLECTION, members={"collections": ["a"]}),
    Row("an unknown collection among known ones", Status.UNKNOWN_COLLECTION, members={"collections": ["0", "8", "a"]}),
    Row("known collections", Status.SUCCESS, members={"collections": ["0", "8", "9"]}),
    Row(
        "the default collection, dropped",
        Status.UNKNOWN_COLLECTION,
        members={"collections": ["0"]},
        vbucket={"collections": {8: 0}},
    ),
    Row("an unknown scope", Status.UNKNOWN_SCOPE, members={"scope": "9"}),
    Row("a known scope", Status.SUCCESS, members={"scope": "8"}),
    # ROLLBACK
    Row("an unknown vbuuid", Status.ROLLBACK, {"vbuuid": STRANGER}),
    Row("an older branch beyond its end", Status.ROLLBACK, {"vbuuid": OLD}),
    Row("deletions are purged", Status.ROLLBACK, vbucket={"purge_seqno": 26}),
    Row(
        "deletions are purged, and may be",
        Status.SUCCESS,
        {"flags": StreamFlags.IGNORE_PURGED_TOMBSTONES},
        vbucket={"purge_seqno": 26},
    ),
    Row(
        "deletions are purged, which the client has seen",
        Status.SUCCESS,
        members={"purge_seqno": "26"},
        vbucket={"purge_seqno": 26},
    ),
    Row(
        "deletions are purged, and the client has seen another purge",
        Status.ROLLBACK,
        members={"purge_seqno": "22"},
        vbucket={"purge_seqno": 26},
    ),
    Row(
        "start beyond the high seqno is no ERANGE",
        Status.ROLLBACK,
        {"start_seqno": 99, "end_seqno": 100, "snapshot_start_seqno": 99, "snapshot_end_seqno": 99},
    ),
    Row(
        "from 0 with an unknown vbuuid",
        Status.SUCCESS,
        {"vbuuid": STRANGER, "start_seqno": 0, "snapshot_start_seqno": 0, "snapshot_end_seqno": 0},
    ),
    Row(
        "from 0 with an unknown vbuuid, strict",
        Status.ROLLBACK,
        {
            "vbuuid": STRANGER,
            "start_seqno": 0,
            "snapshot_start_seqno": 0,
            "snapshot_end_seqno": 0,
            "flags": StreamFlags.STRICT_VBUUID,
        },
    ),
]


@each("row", ROWS)
def test_status(row: Row) -> None:
    scenario = Scenario()
    scenario.request |= row.request
    scenario.members |= row.members
    scenario.connection |= row.connection
    scenario.vbucket |= row.vbucket
    assert status_of(scenario.admit()) == row.status


@pytest.mark.parametrize("value", [b"{", b"[]", b"\xff", b"true"])
def test_a_value_that_is_no_json_object_is_einval(value: bytes) -> None:
    assert status_of(Scenario(raw_value=value).admit()) == Status.EINVAL


def test_a_vbucket_that_is_not_here_is_not_my_vbucket() -> None:
    assert status_of(Scenario(vbucket_exists=False).admit()) == Status.NOT_MY_VBUCKET


def test_every_status_of_the_specification_is_in_the_table() -> None:
    assert {row.status for row in ROWS} == {
        Status.SUCCESS, Status.KEY_EEXISTS, Status.EINVAL, Status.NOT_MY_VBUCKET, Status.ERANGE, Status.ROLLBACK,
        Status.ENOMEM, Status.NOT_SUPPORTED, Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE,
        Status.MANIFEST_IS_AHEAD, Status.DCP_STREAMID_INVALID,
    }  # fmt: skip


def test_a_rollback_tells_the_seqno() -> None:
    scenario = Scenario()
    scenario.request["vbuuid"] = OLD
    admission = scenario.admit()
    assert admission.to_seqno == 20


# --- several faults -----------------------------------------------------------------------------------------------


def not_json(scenario: Scenario) -> None:
    scenario.raw_value = b"{"


def missing_vbucket(scenario: Scenario) -> None:
    scenario.vbucket_exists = False


def no_noop(scenario: Scenario) -> None:
    scenario.connection["noop_enabled"] = False


def not_active(scenario: Scenario) -> None:
    scenario.request["flags"] = StreamFlags.ACTIVE_ONLY
    scenario.vbucket["state"] = VBucketState.REPLICA


def out_of_range(scenario: Scenario) -> None:
    scenario.request["end_seqno"] = 24


def sid_without_the_feature(scenario: Scenario) -> None:
    scenario.members["sid"] = 7


def manifest_ahead(scenario: Scenario) -> None:
    scenario.members["uid"] = "b5"


def unknown_collection(scenario: Scenario) -> None:
    scenario.members["collections"] = ["a"]


def stream_is_open(scenario: Scenario) -> None:
    scenario.connection["open_stream_ids"] = scenario.connection.get("open_stream_ids", frozenset()) | {None, 7}


def too_many_streams(scenario: Scenario) -> None:
    others = frozenset(range(100, 100 + STREAMS_PER_VBUCKET_MAX))
    scenario.connection["open_stream_ids"] = scenario.connection.get("open_stream_ids", frozenset()) | others


def other_history(scenario: Scenario) -> None:
    scenario.request["vbuuid"] = STRANGER


# In the order of the checks: of two faults, the one that stands higher decides.
FAULTS: dict[Callable[[Scenario], None], Status] = {
    not_json: Status.EINVAL,
    missing_vbucket: Status.NOT_MY_VBUCKET,
    no_noop: Status.NOT_SUPPORTED,
    not_active: Status.NOT_MY_VBUCKET,
    out_of_range: Status.ERANGE,
    sid_without_the_feature: Status.DCP_STREAMID_INVALID,
    # A collection may be unknown only because its manifest has not come yet, which is worth another try.
    manifest_ahead: Status.MANIFEST_IS_AHEAD,
    unknown_collection: Status.UNKNOWN_COLLECTION,
    stream_is_open: Status.KEY_EEXISTS,
    too_many_streams: Status.ENOMEM,
    other_history: Status.ROLLBACK,
}


@each(("first", "second"), list(combinations(FAULTS, 2)))
def test_the_first_fault_decides(first: Callable[[Scenario], None], second: Callable[[Scenario], None]) -> None:
    for faults in ((first, second), (second, first)):
        scenario = Scenario()
        for fault in faults:
            fault(scenario)
        assert status_of(scenario.admit()) == FAULTS[first]


# --- accepted -----------------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """A request's flags, start and end, and the start and end of the stream that it gets. The high seqno is 30."""

    reason: str
    flags: StreamFlags
    start: int
    end: int
    expected_start: int
    expected_end: int


NO_FLAGS = StreamFlags(0)


@case(Bounds("as asked for", NO_FLAGS, 5, 28, 5, 28))
@case(Bounds("without an end", NO_FLAGS, 5, SEQNO_MAX, 5, SEQNO_MAX))
@case(Bounds("an end in the future", NO_FLAGS, 5, 99, 5, 99))
@case(Bounds("nothing", NO_FLAGS, 5, 5, 5, 5))
# "The server will overwrite the value of the end sequence number field" (seed 002).
@case(Bounds("latest, without an end", StreamFlags.LATEST, 5, SEQNO_MAX, 5, 30))
@case(Bounds("latest, with an earlier end, which is overwritten", StreamFlags.LATEST, 5, 7, 5, 30))
@case(Bounds("latest, from the high seqno", StreamFlags.LATEST, 30, SEQNO_MAX, 30, 30))
# "up to the sequence number specified by the end sequence number or the last on disk item" (seed 002).
@case(Bounds("disk only, without an end", StreamFlags.DISK_ONLY, 5, SEQNO_MAX, 5, 30))
@case(Bounds("disk only, with an earlier end", StreamFlags.DISK_ONLY, 5, 7, 5, 7))
@case(Bounds("disk only, from the high seqno", StreamFlags.DISK_ONLY, 30, SEQNO_MAX, 30, 30))
@case(Bounds("disk only and latest", StreamFlags.DISK_ONLY | StreamFlags.LATEST, 5, 7, 5, 30))
@case(Bounds("from latest", StreamFlags.FROM_LATEST, 0, SEQNO_MAX, 30, SEQNO_MAX))
@case(Bounds("from latest, whatever the start", StreamFlags.FROM_LATEST, 5, SEQNO_MAX, 30, SEQNO_MAX))
@case(Bounds("from latest, with an end in the past: nothing", StreamFlags.FROM_LATEST, 0, 7, 30, 30))
@case(Bounds("from latest to latest: nothing", StreamFlags.FROM_LATEST | StreamFlags.LATEST, 0, SEQNO_MAX, 30, 30))
@case(Bounds("flags that do not touch the bounds", StreamFlags.TAKEOVER | StreamFlags.NO_VALUE, 5, 28, 5, 28))
@case(Bounds("unknown flags", StreamFlags(0x8000), 5, 28, 5, 28))
def test_bounds_of_an_accepted_stream(row: Bounds) -> None:
    scenario = Scenario()
    scenario.request |= {
        "flags": row.flags,
        "start_seqno": row.start,
        "end_seqno": row.end,
        "snapshot_start_seqno": row.start,
        "snapshot_end_seqno": row.start,
    }
    admission = scenario.admit()
    assert (admission.start_seqno, admission.end_seqno) == (row.expected_start, row.expected_end)
    assert admission.snapshot_start_seqno == row.expected_start


def test_from_latest_asks_for_no_history_and_is_not_rolled_back() -> None:
    scenario = Scenario()
    scenario.request |= {"flags": StreamFlags.FROM_LATEST, "vbuuid": STRANGER}
    scenario.vbucket["purge_seqno"] = 29
    admission = scenario.admit()
    assert admission.start_seqno == 30


def test_the_snapshot_a_client_is_in_goes_on_from_its_start() -> None:
    scenario = Scenario()
    scenario.request |= {"snapshot_start_seqno": 22, "snapshot_end_seqno": 30}
    admission = scenario.admit()
    assert (admission.start_seqno, admission.snapshot_start_seqno) == (25, 22)


@case({}, None, None, None)
@case({"sid": 71}, 71, None, None)
@case({"collections": ["9", "0"]}, None, (9, 0), None)
@case({"scope": "8"}, None, None, 8)
@case({"sid": 1, "collections": ["8"], "uid": "b4"}, 1, (8,), None)
def test_sid_and_filter_of_an_accepted_stream(
    members: dict[str, Any], stream_id: int | None, collections: tuple[int, ...] | None, scope: int | None
) -> None:
    scenario = Scenario(members=members)
    scenario.connection["stream_id_enabled"] = "sid" in members
    admission = scenario.admit()
    assert (admission.stream_id, admission.collections, admission.scope) == (stream_id, collections, scope)


# --- as recorded --------------------------------------------------------------------------------------------------

SESSION = Path(__file__).parents[2] / "vectors" / "sessions" / "couchbase-7.0.5.txt"


def recorded_exchanges() -> list[tuple[Frame, Frame]]:
    """The stream requests of the section "4. errors on stream request", each with the server's answer."""
    section = re.search(r"^### 4\. errors on stream request$(.*?)^### ", SESSION.read_text(), re.DOTALL | re.MULTILINE)
    assert section
    blocks = re.findall(r"^\[dcp\] \S+ DCP_STREAM_REQ .*\n((?: {4}[0-9a-f ]+\n)+)", section[1], re.MULTILINE)
    frames = [decode_frames(bytes.fromhex(block))[0] for block in blocks]
    answers = {frame.opaque: frame for frame in frames if frame.magic is Magic.RESPONSE}
    return [(frame, answers[frame.opaque]) for frame in frames if frame.magic is Magic.REQUEST]


RECORDED = recorded_exchanges()
RECORDED_STATUSES = (
    "KEY_EEXISTS ERANGE ERANGE ERANGE NOT_MY_VBUCKET NOT_MY_VBUCKET ROLLBACK SUCCESS ROLLBACK ROLLBACK ROLLBACK "
    "SUCCESS SUCCESS SUCCESS SUCCESS EINVAL"
)


def recorded_vbucket(vbuuid: int, high_seqno: int) -> stream_requests.RequestedVBucket:
    return stream_requests.RequestedVBucket(
        state=VBucketState.ACTIVE, high_seqno=high_seqno, failover_log=FailoverLog.start(vbuuid)
    )


# What the session's earlier sections say of the server: the vbuuids and high seqnos, and a stream open on vbucket 0.
RECORDED_VBUCKETS = {
    0: recorded_vbucket(0x000005B54D28A950, 18),
    1: recorded_vbucket(0x0000B4E870A22F5B, 3),
    3: recorded_vbucket(0x0000CBA0A3EBE88C, 0),
}
RECORDED_STREAMS: dict[int, frozenset[int | None]] = {0: frozenset({None})}


def test_the_recorded_section_is_whole() -> None:
    assert " ".join(Status(answer.specific).name for _, answer in RECORDED) == RECORDED_STATUSES


@each(("asked", "answer"), RECORDED[:-1])
def test_a_recorded_request_gets_the_recorded_answer(asked: Frame, answer: Frame) -> None:
    request, expected = decode_message(asked), decode_message(answer)
    assert isinstance(request, StreamRequest)
    admission = stream_requests.admit_stream(
        request,
        connection=stream_requests.ConnectionFacts(
            noop_enabled=True, open_stream_ids=RECORDED_STREAMS.get(request.vbucket, frozenset())
        ),
        vbucket=RECORDED_VBUCKETS.get(request.vbucket),
    )
    match expected:
        case StreamRequestResponse(status=Status.ROLLBACK):
            assert admission.to_seqno == expected.rollback_seqno
        case StreamRequestResponse(status=Status.SUCCESS):
            assert (admission.start_seqno, admission.end_seqno) == (request.start_seqno, request.end_seqno)
            assert expected.failover_log == RECORDED_VBUCKETS[request.vbucket].failover_log.entries
        case ErrorResponse():
            assert status_of(admission) == expected.status


def test_the_last_recorded_request_is_malformed_which_is_einval() -> None:
    asked, answer = RECORDED[-1]
    assert asked.opcode == Opcode.DCP_STREAM_REQUEST
    with pytest.raises(MalformedMessage, match="Answer EINVAL"):
        decode_message(asked)
    assert answer.specific == Status.EINVAL


# --- the JSON value of a stream request: every rule of the specification's "Validation" (seed 001), and its examples


EXAMPLES = {
    '{"uid" : "b4"}': StreamRequestValue(uid=0xB4),
    '{"sid" : 71}': StreamRequestValue(sid=71),
    '{"collections" : ["0", "8a"]}': StreamRequestValue(collections=(0, 0x8A)),
    '{"scope" : "9"}': StreamRequestValue(scope=9),
    '{"uid" : "c2", "collections" : ["a", "1e"]}': StreamRequestValue(uid=0xC2, collections=(0xA, 0x1E)),
}


@pytest.mark.parametrize(("text", "value"), EXAMPLES.items())
def test_the_examples_of_the_specification(text: str, value: StreamRequestValue) -> None:
    assert StreamRequestValue.decode(text.encode()) == value
    assert json.loads(value.encode()) == json.loads(text)


TAKEN = {
    "": StreamRequestValue(),
    "{}": StreamRequestValue(),
    ' \n{ "sid" : 1 } ': StreamRequestValue(sid=1),
    # "does not error for unknown keys"
    '{"colour":"blue","nested":{"sid":[]}}': StreamRequestValue(),
    '{"uid":"ffffffffffffffff"}': StreamRequestValue(uid=2**64 - 1),
    '{"uid":"0"}': StreamRequestValue(uid=0),
    '{"uid":"AbC"}': StreamRequestValue(uid=0xABC),
    '{"uid":"00b4"}': StreamRequestValue(uid=0xB4),
    '{"sid":65535}': StreamRequestValue(sid=65535),
    # Admission judges what is out of range.
    '{"sid":0}': StreamRequestValue(sid=0),
    '{"sid":-1}': StreamRequestValue(sid=-1),
    '{"sid":65536}': StreamRequestValue(sid=65536),
    # And no collections: versions differ.
    '{"collections":[]}': StreamRequestValue(collections=()),
    '{"collections":["ffffffff"]}': StreamRequestValue(collections=(2**32 - 1,)),
    '{"collections":["8","8"]}': StreamRequestValue(collections=(8, 8)),
    '{"scope":"ffffffff"}': StreamRequestValue(scope=2**32 - 1),
    '{"purge_seqno":"18446744073709551615"}': StreamRequestValue(purge_seqno=2**64 - 1),
    '{"purge_seqno":"0"}': StreamRequestValue(purge_seqno=0),
    '{"cts":{}}': StreamRequestValue(cache_transfer=CacheTransferOptions()),
    '{"cts":{"free_memory":18446744073709551615}}': StreamRequestValue(
        cache_transfer=CacheTransferOptions(free_memory_bytes=2**64 - 1)
    ),
    '{"cts":{"free_memory":7,"all_keys":true,"new":1}}': StreamRequestValue(
        cache_transfer=CacheTransferOptions(free_memory_bytes=7, all_keys=True)
    ),
}


@each(("text", "value"), TAKEN.items())
def test_what_is_taken(text: str, value: StreamRequestValue) -> None:
    assert StreamRequestValue.decode(text.encode()) == value


REFUSED = {
    # The value as a whole.
    "not JSON": "not JSON",
    "{": "not JSON",
    '{"sid":1}x': "not JSON",
    "[]": "not a JSON object",
    "1": "not a JSON object",
    "null": "not a JSON object",
    '"sid"': "not a JSON object",
    # "will fail with `Invalid` if `collections` and `scope` are defined"
    '{"collections":["8"],"scope":"8"}': "exclude each other",
    # "will fail if `uid` is not a JSON string"; base 16 with no leading 0x
    '{"uid":180}': "uid must be",
    '{"uid":null}': "uid must be",
    '{"uid":["b4"]}': "uid must be",
    '{"uid":""}': "uid must be",
    '{"uid":"0xb4"}': "uid must be",
    '{"uid":"-1"}': "uid must be",
    '{"uid":"+1"}': "uid must be",
    '{"uid":" b4"}': "uid must be",
    '{"uid":"b_4"}': "uid must be",
    '{"uid":"g"}': "uid must be",
    '{"uid":"\\u0664"}': "uid must be",
    '{"uid":"10000000000000000"}': "uid must be",
    # "will fail if `sid` is not a JSON integer"
    '{"sid":"71"}': "sid must be",
    '{"sid":71.0}': "sid must be",
    '{"sid":7.1e1}': "sid must be",
    '{"sid":true}': "sid must be",
    '{"sid":null}': "sid must be",
    # "will fail if `collections` is not a JSON array"
    '{"collections":"8"}': "array",
    '{"collections":{"8":"8"}}': "array",
    '{"collections":null}': "array",
    '{"collections":[8]}': "a collection id must be",
    '{"collections":["8",null]}': "a collection id must be",
    '{"collections":["0x8"]}': "a collection id must be",
    '{"collections":["100000000"]}': "too large",
    # "will fail if `scope` is not a JSON string"
    '{"scope":8}': "scope must be",
    '{"scope":["8"]}': "scope must be",
    '{"scope":null}': "scope must be",
    '{"scope":"100000000"}': "too large",
    # Base 10, as a string.
    '{"purge_seqno":1}': "purge_seqno must be",
    '{"purge_seqno":"0x1"}': "purge_seqno must be",
    '{"purge_seqno":"1a"}': "purge_seqno must be",
    '{"purge_seqno":""}': "purge_seqno must be",
    '{"purge_seqno":"\\u0661"}': "purge_seqno must be",
    '{"purge_seqno":"18446744073709551616"}': "exceeds 64 bits",
    '{"purge_seqno":"000000000000000000001"}': "purge_seqno must be",
    '{"cts":[]}': "cts must be",
    '{"cts":{"free_memory":-1}}': "free_memory",
    '{"cts":{"free_memory":"1"}}': "free_memory",
    '{"cts":{"free_memory":true}}': "free_memory",
    '{"cts":{"free_memory":18446744073709551616}}': "free_memory",
    '{"cts":{"all_keys":1}}': "all_keys",
}


@each(("text", "reason"), REFUSED.items())
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(MalformedJson, match=reason):
        StreamRequestValue.decode(text.encode())


@case_apart(b"\xff", id="not UTF-8")
@case_apart(b"[" * 60_000, id="too deep")
@case_apart(b'{"sid":' + b"1" * 5000 + b"}", id="a number too long for Python")
def test_junk_is_refused_as_malformed_json(value: bytes) -> None:
    with pytest.raises(MalformedJson, match="not JSON"):
        StreamRequestValue.decode(value)


def test_a_value_has_a_limit() -> None:
    largest = b'{"x":"' + b"x" * (STREAM_REQUEST_VALUE_BYTES_MAX - 8) + b'"}'
    assert StreamRequestValue.decode(largest) == StreamRequestValue()
    with pytest.raises(MalformedJson, match="exceeds"):
        StreamRequestValue.decode(largest + b" ")


# --- encoding -----------------------------------------------------------------------------------------------------


def test_a_value_that_says_nothing_is_empty() -> None:
    assert StreamRequestValue().encode() == b""


def test_all_members_have_their_form() -> None:
    value = StreamRequestValue(
        uid=0xB4,
        sid=71,
        collections=(0, 0x8A),
        purge_seqno=12,
        cache_transfer=CacheTransferOptions(free_memory_bytes=5, all_keys=True),
    )
    assert value.encode() == (
        b'{"uid":"b4","sid":71,"collections":["0","8a"],"purge_seqno":"12","cts":{"free_memory":5,"all_keys":true}}'
    )


def test_two_filters_are_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="not by both"):
        StreamRequestValue(collections=(8,), scope=8).encode()


@case(StreamRequestValue(uid=1, sid=1, purge_seqno=1), False)
@case(StreamRequestValue(collections=(0,)), True)
@case(StreamRequestValue(scope=0), True)
def test_a_filter_is_by_collections_or_by_scope(value: StreamRequestValue, is_filtered: bool) -> None:
    assert value.is_filtered == is_filtered

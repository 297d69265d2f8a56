"""The session: log-in, faults that a connection survives, and the order of answers."""

from __future__ import annotations

import json
from dataclasses import replace
from struct import pack

import pytest

from headwater.errors import BadMagic, FrameTooLarge
from headwater.node.auth.login_checks import LoginOutcome, LoginVerdict
from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.node.kv.context import REQUEST_WORK, TURN_WORK, CloseSession
from headwater.node.kv.handlers import HANDLERS
from headwater.node.kv.session import Waits
from headwater.node.options import ServerLimits
from headwater.node.service import COMMIT_BYTES_MAX
from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.frames import Frame, FrameInfo, RequestInfo, ResponseInfo, decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import Open, OpenFlags
from headwater.protocol.messages.documents import Append, Get, GetLocked, GetQuiet, Increment, Set, SetQuiet
from headwater.protocol.messages.session import (
    FEATURES_MAX,
    GetClusterConfig,
    GetErrorMap,
    Hello,
    Noop,
    Quit,
    QuitQuiet,
    SaslAuth,
    SaslListMechanisms,
    SaslStep,
    SelectBucket,
    Stat,
    Verbosity,
    Version,
)
from headwater.protocol.messages.subdocument import LookupSpec, MultiLookup, SubdocCounter, SubdocExists, SubdocGetCount
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionsManifest, GetScopeId
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.protocol.sasl import SCRAM_MECHANISMS, Mechanism, PlainLogin, ScramClient
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, compress
from support.cases import case_apart
from support.kv_harness import FEATURES, PASSWORD, Client, Node

PLAIN = SaslAuth(key=b"PLAIN", value=PlainLogin(user="admin", password=PASSWORD).encode())
WRONG = SaslAuth(key=b"PLAIN", value=PlainLogin(user="admin", password="wrong").encode())


@pytest.fixture
def stranger(node: Node) -> Client:
    """A client that has said HELLO and nothing else."""
    client = Client(node)
    client.succeed(Hello(key=b"test", features=FEATURES))
    return client


# --- HELLO --------------------------------------------------------------------------------------------------------


def test_hello_agrees_to_what_is_served(node: Node) -> None:
    client = Client(node)
    response = client.succeed(
        Hello(key=b"agent", features=(Feature.XERROR, Feature.TLS, Feature(0x7777), Feature.JSON))
    )
    assert response.features == (Feature.XERROR, Feature.JSON)
    assert client.session.agent == "agent"


@pytest.mark.parametrize("feature", [Feature.VATTR, Feature.SUBDOC_DOCUMENT_MACROS], ids=lambda feature: feature.name)
def test_hello_refuses_a_feature_without_the_one_it_needs(node: Node, feature: Feature) -> None:
    """As kv_engine has it (`feature.h`); what 8.0.2 refused so is in its recordings."""
    client = Client(node)
    assert client.refused(Hello(key=b"agent", features=(feature,))) is Status.EINVAL
    assert client.succeed(Hello(key=b"agent", features=(feature, Feature.XATTR))).features == (Feature.XATTR, feature)


def test_hello_has_a_bounded_number_of_features(node: Node) -> None:
    client = Client(node)
    assert client.refused(Hello(key=b"agent", features=(Feature.JSON,) * (FEATURES_MAX + 1))) is Status.EINVAL
    assert client.succeed(Hello(key=b"agent", features=(Feature.JSON,) * FEATURES_MAX)).features == (Feature.JSON,)


def test_with_tracing_responses_say_how_long_the_node_took(node: Node) -> None:
    client = node.client(features=(*FEATURES, Feature.TRACING))
    client.send(
        *(Set(vbucket=VBucketId(0), collection_id=CollectionId(0), key=b"%d" % at, value=b"1") for at in (1, 2))
    )
    client.send(Get(vbucket=VBucketId(0), collection_id=CollectionId(0), key=b"3"))
    node.clock.advance(0.25)
    node.commit()
    stored, also_stored, missing = client.received()
    for response in (stored, also_stored, missing):
        (info,) = response.frame_infos
        assert info.id == ResponseInfo.SERVER_DURATION
        # BinaryProtocol.md: decoded = (encoded ^ 1.74) / 2.
        assert int.from_bytes(info.data) ** 1.74 / 2 == pytest.approx(250_000, rel=1e-3)
    assert (stored.status, missing.status) == (Status.SUCCESS, Status.KEY_ENOENT)
    assert (stored.seqno, also_stored.seqno) == (1, 2)


# --- log-in -------------------------------------------------------------------------------------------------------


def test_a_log_in_that_fails_ends_the_one_before(stranger: Client) -> None:
    for failing in (
        WRONG,
        SaslStep(key=b"PLAIN", value=b"x"),
        SaslAuth(key=b"NONSENSE"),
        SaslAuth(key=b"PLAIN", value=b"no NULs"),
    ):
        stranger.succeed(PLAIN)
        assert stranger.session.user == "admin"
        assert stranger.refused(failing) == Status.AUTH_ERROR
        if not isinstance(failing, SaslStep):
            assert stranger.refused(Stat()) == Status.EACCESS


def test_plain_is_not_for_open_ways(node: Node) -> None:
    client = Client(node, allows_plain=False)
    assert b"PLAIN" not in client.succeed(SaslListMechanisms()).value
    assert client.refused(PLAIN) == Status.AUTH_ERROR
    assert client.session.user is None
    assert b"PLAIN" in Client(node).succeed(SaslListMechanisms()).value


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_log_in_with_scram(stranger: Client, mechanism: Mechanism) -> None:
    scram = ScramClient(mechanism, user="writer", password=PASSWORD, client_nonce=b"a nonce")
    challenge = stranger.call(SaslAuth(key=mechanism.encode(), value=scram.first()))
    assert challenge.status == Status.AUTH_CONTINUE
    assert stranger.session.user is None
    done = stranger.succeed(SaslStep(key=mechanism.encode(), value=scram.final(challenge.value)))
    scram.verify(done.value)
    assert stranger.session.user == "writer"


def test_a_wrong_password(node: Node, stranger: Client) -> None:
    assert stranger.refused(WRONG) == Status.AUTH_ERROR
    assert stranger.session.user is None
    assert "failed" in node.logged[-1]
    scram = ScramClient(Mechanism.SCRAM_SHA1, user="admin", password="wrong", client_nonce=b"nonce")
    challenge = stranger.call(SaslAuth(key=b"SCRAM-SHA1", value=scram.first()))
    assert stranger.refused(SaslStep(key=b"SCRAM-SHA1", value=scram.final(challenge.value))) == Status.AUTH_ERROR


def test_guessing_is_slowed_down(node: Node, stranger: Client) -> None:
    for _ in range(6):
        assert stranger.refused(WRONG) == Status.AUTH_ERROR
    assert stranger.refused(PLAIN) == Status.AUTH_ERROR
    assert "too many" in node.logged[-1]
    node.clock.advance(120)
    stranger.succeed(PLAIN)


def test_a_second_log_in_forgets_the_bucket_of_the_first(node: Node, client: Client) -> None:
    client.send(Set(key=b"k", value=b"1"))
    client.send(SaslAuth(key=b"PLAIN", value=PlainLogin("reader", PASSWORD).encode()))
    assert client.session.bucket is None
    assert client.received() == [], "the write before it is not durable yet"
    node.commit()
    assert [answer.status for answer in client.received()] == [Status.SUCCESS, Status.SUCCESS]
    assert client.refused(Get(key=b"k")) == Status.NO_BUCKET


# --- turns and room -----------------------------------------------------------------------------------------------


def test_a_turn_has_an_end(client: Client) -> None:
    requests = TURN_WORK // REQUEST_WORK
    client.session.receive_data(b"".join(Noop(opaque=number).encode() for number in range(requests + 1)))
    assert client.session.waits_for is Waits.FOR_TURN
    assert len(client.received()) == requests
    client.session.receive_data(b"")
    assert client.session.waits_for is Waits.FOR_NOTHING
    assert len(client.received()) == 1


def test_large_requests_and_answers_shorten_a_turn(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=bytes(TURN_WORK)))
    client.session.receive_data(Get(key=b"k").encode() * 3)
    assert client.session.waits_for is Waits.FOR_TURN
    assert len(client.received()) == 1


@pytest.mark.parametrize("path", [b"a", b"`a`"], ids=["by the kernel", "by the handler"])
def test_what_a_request_walks_through_shortens_a_turn(client: Client, path: bytes) -> None:
    """The request and its answer are short. The document is walked twice: is it JSON, and where is the path?"""
    client.succeed(Set(key=b"k", value=b'{"a":1,"b":"%s"}' % bytes(TURN_WORK // 8).hex().encode()))
    client.session.receive_data(SubdocExists(key=b"k", path=path).encode() * 64)
    assert client.session.waits_for is Waits.FOR_TURN
    assert len(client.received()) == 2


def test_a_turn_that_was_used_up_is_followed_by_a_wait(client: Client) -> None:
    """Others have their turn also where the requests come one by one, and each takes a whole turn."""
    client.succeed(Set(key=b"k", value=bytes(TURN_WORK)))
    client.session.receive_data(Get(key=b"k").encode())
    assert client.session.waits_for is Waits.FOR_TURN
    client.session.receive_data(b"")
    assert client.session.waits_for is Waits.FOR_NOTHING


# --- work that takes longer than a turn ---------------------------------------------------------------------------

LARGE = b'{"n":0,"pad":"%s"}' % bytes(TURN_WORK // 2).hex().encode()


def finish_task(client: Client) -> None:
    assert client.session.waits_for is Waits.FOR_WORK
    client.session.postponed.task.run()
    client.session.finish_work()


@case_apart(SubdocExists(key=b"k", path=b"n"))
@case_apart(SubdocGetCount(key=b"k", path=b""))
@case_apart(MultiLookup(key=b"k", specs=(LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"n"),)))
@case_apart(SubdocCounter(key=b"k", path=b"n", new_value=b"1"))
@case_apart(Set(key=b"l", value=b"[" * (TURN_WORK + 1)))
@case_apart(Set(key=b"l", value=compress(bytes(TURN_WORK + 1)), datatype=Datatype.SNAPPY))
@case_apart(Append(key=b"k", value=b"1"))
def test_what_takes_longer_than_a_turn_is_done_by_a_worker(node: Node, client: Client, request_: Request) -> None:
    client.succeed(Set(key=b"k", value=LARGE))
    client.session.receive_data(request_.encode() + Noop(opaque=7).encode())
    assert client.session.waits_for is Waits.FOR_WORK
    assert not client.session.wants_data
    assert node.client().succeed(Noop()).status is Status.SUCCESS, "others are served meanwhile"
    assert client.received() == []
    while client.session.waits_for is Waits.FOR_WORK:
        finish_task(client)
    client.session.receive_data(b"")
    node.commit()
    assert [(answer.status, answer.opaque) for answer in client.received()] == [
        (Status.SUCCESS, 0),
        (Status.SUCCESS, 7),
    ]


def test_a_document_that_changes_meanwhile_is_worked_on_again(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=LARGE))
    client.session.receive_data(SubdocCounter(key=b"k", path=b"n", new_value=b"1").encode())
    other = node.client()
    other.succeed(SubdocCounter(key=b"k", path=b"n", new_value=b"10"))
    finish_task(client)
    finish_task(client)
    node.commit()
    assert [answer.value for answer in client.received()] == [b"11"]


def test_a_document_that_changes_all_the_time_is_given_up(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=LARGE))
    client.session.receive_data(SubdocCounter(key=b"k", path=b"n", new_value=b"1").encode())
    while client.session.waits_for is Waits.FOR_WORK:
        node.client().succeed(Set(key=b"k", value=LARGE))
        finish_task(client)
    assert [answer.status for answer in client.received()] == [Status.ETMPFAIL]


def test_rights_that_were_lost_meanwhile_count(client: Client) -> None:
    client.succeed(Set(key=b"k", value=LARGE))
    client.session.receive_data(SubdocExists(key=b"k", path=b"n").encode())
    client.session.log_out()
    finish_task(client)
    assert [answer.status for answer in client.received()] == [Status.EACCESS]


@case_apart(GetCollectionId(value=b"a." * 10_000_000))
@case_apart(GetCollectionId(value=b"a." * 1000))
@case_apart(GetScopeId(value=b"a" * 504))
@case_apart(SaslAuth(key=b"PLAIN", value=bytes(5000)))
@case_apart(
    Open(key=b"c", flags=OpenFlags.PRODUCER, datatype=Datatype.JSON, value=b'{"consumer_name":"%s"}' % bytes(5000))
)
def test_requests_that_say_too_much_are_refused_unread(client: Client, request_: Request) -> None:
    assert client.refused(request_) in (Status.EINVAL, Status.AUTH_ERROR)


def test_a_request_that_is_too_long_is_refused_by_its_header_and_dropped_as_it_comes(client: Client) -> None:
    refused, noop = GetCollectionId(value=b"a." * 10_000_000).encode(), Noop(opaque=7).encode()
    client.session.receive_data(refused[:100])
    assert [answer.status for answer in client.received()] == [Status.EINVAL]
    client.send(refused[100:-5])
    assert client.session.held_bytes <= 1, "an empty buffer has room for a byte"
    client.send(refused[-5:] + noop)
    assert [answer.opaque for answer in client.received()] == [7]


def test_nothing_is_handled_while_a_password_is_checked(stranger: Client) -> None:
    stranger.session.receive_data(WRONG.encode() + Noop().encode())
    assert stranger.session.waits_for is Waits.FOR_LOGIN
    assert stranger.received() == []
    stranger.session.finish_login(LoginVerdict(LoginOutcome.BUSY, 1.0))
    stranger.session.receive_data(b"")
    assert [answer.status for answer in stranger.received()] == [Status.ETMPFAIL, Status.SUCCESS]


@pytest.mark.parametrize("limits", [ServerLimits(pending_bytes_max=1000), ServerLimits(node_pending_bytes_max=1000)])
def test_only_writes_wait_for_the_disk(node: Node, client: Client, limits: ServerLimits) -> None:
    client.session._limits = limits
    client.succeed(Set(key=b"k", value=b"1"))
    read, write = Get(key=b"k"), Set(key=b"l", value=bytes(1000))
    client.send(write, read, write, read)
    assert client.session.waits_for is Waits.FOR_ROOM
    node.commit()
    assert len(client.received()) == 2
    client.send()
    assert client.session.waits_for is Waits.FOR_NOTHING
    node.commit()
    assert len(client.received()) == 2


def test_who_writes_little_does_not_wait_for_who_writes_much(node: Node, client: Client) -> None:
    large = Set(key=b"k", value=bytes(COMMIT_BYTES_MAX))
    client.send(large)
    client.send(large)
    assert client.session.waits_for is Waits.FOR_ROOM
    small = node.client()
    small.send(Set(key=b"l", value=b"1"))
    assert small.session.waits_for is Waits.FOR_NOTHING


# --- small change -------------------------------------------------------------------------------------------------


def test_the_config_is_that_of_the_bucket_or_of_the_node(stranger: Client) -> None:
    stranger.succeed(PLAIN)
    assert json.loads(stranger.succeed(GetClusterConfig()).value)["name"] == ""
    stranger.succeed(SelectBucket(key=b"default"))
    response = stranger.succeed(GetClusterConfig())
    assert (json.loads(response.value)["name"], response.datatype) == ("default", Datatype.JSON)


def test_the_error_map(client: Client) -> None:
    assert json.loads(client.succeed(GetErrorMap(version=1)).value)["version"] == 1
    assert json.loads(client.succeed(GetErrorMap(version=99)).value)["version"] == 2
    assert client.refused(GetErrorMap(version=0)) == Status.EINVAL


def test_version_verbosity_noop_and_quit(node: Node, client: Client) -> None:
    assert client.succeed(Version()).value == b"1.2.3"
    client.succeed(Verbosity(level=2))
    client.succeed(Noop())
    client.succeed(Quit())
    assert client.session.is_quitting
    quiet = node.client()
    assert quiet.call_all(QuitQuiet()) == []
    assert quiet.session.is_quitting


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [0x99, 0xFF, Opcode.COMPACT_DB])
def test_opcodes_that_are_not_known(client: Client, opcode: int) -> None:
    client.send(Frame(magic=Magic.REQUEST, opcode=opcode, opaque=7).encode())
    (frame,) = decode_frames(client.session.data_to_send())
    assert (frame.opcode, frame.specific, frame.opaque) == (opcode, Status.UNKNOWN_COMMAND, 7)
    client.succeed(Noop())


def test_a_message_that_is_known_and_not_served(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(HANDLERS, Verbosity)
    assert client.refused(Verbosity(level=1)) == Status.UNKNOWN_COMMAND


@case_apart(Frame(magic=Magic.REQUEST, opcode=Opcode.GET, extras=b"x", key=b"k"))
@case_apart(Frame(magic=Magic.REQUEST, opcode=Opcode.GET))
@case_apart(Frame(magic=Magic.REQUEST, opcode=Opcode.GET, key=b"k", value=b"v"))
@case_apart(Frame(magic=Magic.REQUEST, opcode=Opcode.GET, key=b"k" * 251))
@case_apart(Frame(magic=Magic.REQUEST, opcode=Opcode.SET, key=b"k", value=b"v"))
@case_apart(Frame(magic=Magic.REQUEST, opcode=Opcode.SUBDOC_MULTI_LOOKUP, key=b"k", value=b"\xc5\0\0\x05a"))
@case_apart(Frame(magic=Magic.FLEXIBLE_REQUEST, opcode=Opcode.GET, key=b"k", framing_extras=b"\x1f"))
def test_malformed_requests_are_answered_and_the_connection_lives(client: Client, frame: Frame) -> None:
    response = client.call(replace(frame, opaque=7).encode())
    assert (response.status, response.opaque, response.opcode) == (Status.EINVAL, 7, frame.opcode)
    assert response.context
    client.succeed(Noop())


def test_a_frame_info_that_is_not_served(client: Client) -> None:
    request = Get(key=b"k", frame_infos=(FrameInfo(RequestInfo.IMPERSONATE, b"bob"),))
    assert client.refused(request) == Status.UNKNOWN_FRAME_INFO


def test_what_is_not_the_protocol_ends_the_connection_and_keeps_the_answers_before_it(client: Client) -> None:
    with pytest.raises(BadMagic):
        client.send(Noop(opaque=5), b"GET / HTTP/1.1\r\n\r\n")
    assert [answer.opaque for answer in client.received()] == [5]


def test_a_body_that_is_too_large_ends_the_connection_before_it_comes(client: Client) -> None:
    with pytest.raises(FrameTooLarge):
        client.send(pack(">BBHBBHIIQ", 0x80, 0x01, 1, 8, 0, 0, 2**31, 0, 0))


def test_answers_to_nothing_are_not_answered(client: Client) -> None:
    assert client.call_all(Frame(magic=Magic.RESPONSE, opcode=Opcode.NOOP).encode()) == []


# --- statuses for older clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("logs_in", [False, True])
def test_an_older_client_is_cut_off_where_it_would_not_understand(node: Node, logs_in: bool) -> None:
    """It has not logged in, or has selected no bucket."""
    client = Client(node)
    if logs_in:
        client.succeed(PLAIN)
    client.send(Noop(opaque=5))
    with pytest.raises(CloseSession):
        client.send(Get(key=b"k"))
    assert [answer.opaque for answer in client.received()] == [5]


def test_an_older_client_gets_the_statuses_of_its_time(node: Node) -> None:
    client = node.client(features=(Feature.SELECT_BUCKET,))
    client.succeed(Set(key=b"k", value=b"v"))
    client.succeed(GetLocked(key=b"k"))
    assert client.refused(Set(key=b"k", value=b"w")) == Status.KEY_EEXISTS
    response = client.call(Get(key=b"k", vbucket=99))
    assert (response.status, response.datatype) == (Status.NOT_MY_VBUCKET, Datatype.RAW)


# --- order --------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_requests(client: Client) -> None:
    requests = [
        Noop(opaque=0), Set(key=b"k", value=b"1", opaque=1), Get(key=b"k", opaque=2), Get(key=b"none", opaque=3),
        Set(key=b"k", value=b"2", opaque=4), GetQuiet(key=b"none", opaque=5), Get(key=b"k", opaque=6),
    ]  # fmt: skip
    assert [answer.opaque for answer in client.call_all(*requests)] == [0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize(("write", "opaques"), [(Set, [1, 2]), (SetQuiet, [2])])
def test_a_waiting_answer_holds_back_later_ones(
    node: Node, client: Client, write: type[Set], opaques: list[int]
) -> None:
    """Also that of a quiet write, which is not sent."""
    client.send(write(key=b"k", value=b"1", opaque=1))
    client.send(Noop(opaque=2))
    assert client.received() == []
    node.commit()
    assert [answer.opaque for answer in client.received()] == opaques


def test_a_quiet_write_is_waited_for_in_its_own_bucket(node: Node, client: Client) -> None:
    client.send(SetQuiet(key=b"k", value=b"1"))
    client.send(SelectBucket(opaque=2))
    waiting, selected = client.session.outgoing
    assert (waiting.data, waiting.bucket, waiting.may_be_sent) == (b"", node.bucket_service, False)
    assert (selected.commit, selected.bucket) == (0, None)


def test_bytes_may_come_in_any_pieces(node: Node, client: Client) -> None:
    data = b"".join(
        request.encode() for request in (Set(key=b"k", value=b"1", opaque=1), Get(key=b"k", opaque=2), Noop(opaque=3))
    )
    for at in range(len(data)):
        client.send(data[at : at + 1])
    node.commit()
    assert [answer.opaque for answer in client.received()] == [1, 2, 3]


def test_a_bootstrap_in_one_write(node: Node) -> None:
    client = Client(node)
    client.send(
        Hello(key=b"gocbcore", features=FEATURES, opaque=1),
        GetErrorMap(version=2, opaque=2),
        SaslListMechanisms(opaque=3),
        replace(PLAIN, opaque=4),
        SelectBucket(key=b"default", opaque=5),
        GetClusterConfig(opaque=6),
        Set(key=b"k", value=b"v", opaque=7),
        Get(key=b"k", opaque=8),
    )
    node.commit()
    data = b"".join(outgoing.data for outgoing in client.session.outgoing)
    answers = [decode_message(frame) for frame in decode_frames(data)]
    assert [(answer.opaque, answer.status) for answer in answers] == [
        (number, Status.SUCCESS) for number in range(1, 9)
    ]


def test_a_bootstrap_in_one_write_that_fails_on_the_way(node: Node) -> None:
    client = Client(node)
    answers = client.call_all(
        Hello(key=b"gocbcore", features=FEATURES), WRONG, SelectBucket(key=b"default"), GetClusterConfig()
    )
    assert [answer.status for answer in answers] == [Status.SUCCESS, Status.AUTH_ERROR, Status.EACCESS, Status.EACCESS]


def test_every_request_is_counted(client: Client) -> None:
    before = client.session.requests
    client.call_all(Noop(), Set(key=b"a", value=b"1"), Set(key=b"b", value=b"1"), Noop())
    assert client.session.requests == before + 4


# --- rights on a key-value connection, beyond those of roles on commands (`test_rights`): names, log-outs, collections


@pytest.mark.parametrize("name", [b"replication:a:11210->b:11210:default", b"takeover:a:11210->b:11210"])
def test_names_of_connections_between_nodes_are_for_nodes(node: Node, name: bytes) -> None:
    """A connection of the same name ends: a reader could cut replication, and majority writes would hang."""
    replication = node.client(user="admin")
    replication.succeed(Open(key=name, flags=OpenFlags.PRODUCER))
    for user in ("reader", "bucket_full_access"):
        assert node.client(user=user).refused(Open(key=name, flags=OpenFlags.PRODUCER)) == Status.EACCESS
    assert node.bucket_service.dcp_sessions[name.decode()] is replication.session
    node.client(user="admin").succeed(Open(key=name, flags=OpenFlags.PRODUCER))
    assert node.bucket_service.dcp_sessions[name.decode()] is not replication.session


def test_a_name_is_taken_over_by_its_own_user_and_no_other(node: Node) -> None:
    request = Open(key=b"landing", flags=OpenFlags.PRODUCER)
    node.client(user="reader").succeed(request)
    assert node.client(user="writer").refused(request) == Status.EACCESS
    node.client(user="reader").succeed(request)
    node.bucket_service.dcp_sessions["landing"].log_out()
    node.client(user="writer").succeed(request)


def test_one_who_is_logged_out_has_no_rights(node: Node, client: Client) -> None:
    client.succeed(Set(key=b"k", value=b"v"))
    client.session.log_out()
    assert client.refused(Get(key=b"k")) == Status.EACCESS
    assert client.refused(GetClusterConfig()) == Status.EACCESS


def test_runs_of_sets_need_the_right_to_write(node: Node) -> None:
    client = node.client(user="reader")
    answers = client.call_all(*[SetQuiet(key=b"k", value=b"v")] * 3)
    assert [answer.status for answer in answers] == [Status.EACCESS] * 3
    assert client.refused(Get(key=b"k")) == Status.KEY_ENOENT


def test_a_bucket_must_be_selected(stranger: Client) -> None:
    stranger.succeed(PLAIN)
    assert stranger.refused(Get(key=b"k")) == Status.NO_BUCKET
    assert stranger.refused(SelectBucket(key=b"none")) == Status.EACCESS
    stranger.succeed(SelectBucket(key=b"default"))
    assert stranger.refused(Get(key=b"k")) == Status.KEY_ENOENT
    stranger.succeed(SelectBucket())
    assert stranger.refused(Get(key=b"k")) == Status.NO_BUCKET


def test_a_right_on_a_collection_is_one_on_its_documents(node: Node) -> None:
    carts = Manifest().with_scope("shop").with_collection("shop", "carts").with_collection("shop", "bills")
    node.set_manifest(carts)
    ids = {name: found.id for name in ("carts", "bills") if (found := carts.find("shop", name)) is not None}
    grants = [Grant(Role.DATA_READER, "default", "shop"), Grant(Role.DATA_WRITER, "default", "shop", "carts")]
    users = node.service.users
    node.service.users = users.add(users.new_user("sue", PASSWORD, grants, salts=bytes(SALTS_BYTES)))
    client = node.client(user="sue", features=(*FEATURES, Feature.COLLECTIONS))
    client.succeed(Set(collection_id=ids["carts"], key=b"k", value=b"1"))
    assert client.succeed(Get(collection_id=ids["carts"], key=b"k")).value == b"1"
    client.succeed(Increment(collection_id=ids["carts"], key=b"n", delta=1, initial=1, expiry=0))
    assert client.refused(Get(collection_id=ids["bills"], key=b"k")) == Status.KEY_ENOENT
    for request in (
        Set(collection_id=ids["bills"], key=b"k", value=b"1"),
        Get(collection_id=DEFAULT_COLLECTION, key=b"k"),
        Get(collection_id=CollectionId(99), key=b"k"),
        Stat(),
        Open(key=b"consumer", flags=OpenFlags.PRODUCER),
    ):
        assert client.refused(request) == Status.EACCESS, request
    assert client.refused(GetCollectionId(value=b"_default._default")) == Status.UNKNOWN_COLLECTION
    shown = Manifest.decode(client.succeed(GetCollectionsManifest()).value)
    assert [one.name for _, one in shown.collections()] == ["carts", "bills"]
    # Requests that know of no collections are about the default one.
    plain = node.client(user="sue", features=(Feature.XERROR,))
    assert plain.refused(Get(key=b"k")) == Status.EACCESS

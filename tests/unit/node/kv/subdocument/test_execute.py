"""Whole sub-document requests: which are refused, what they answer, and what they leave to be written."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence

import pytest

from headwater.node.kv.subdocument import json_text
from headwater.node.kv.subdocument.execute import (
    MUTATIONS,
    LookedUp,
    PathFailed,
    lookup_in,
    lookup_one,
    mutate_in,
    mutate_one,
)
from headwater.node.kv.subdocument.requests import COMMANDS, NewValue, SubdocDocument, WriteMacro
from headwater.protocol.features import Opcode
from headwater.protocol.messages.subdocument import (
    SPECS_MAX,
    DocFlags,
    LookupResult,
    LookupSpec,
    MutationResult,
    MutationSpec,
    PathFlags,
)
from headwater.protocol.numbers import VALUE_BYTES_MAX, XATTR_SECTION_BYTES_MAX
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs, encode_xattrs
from support.cases import case, case_apart

XATTR, MKDIR_P, MACROS = PathFlags.XATTR, PathFlags.MKDIR_P, PathFlags.EXPAND_MACROS
BINARY = PathFlags.BINARY_VALUE
NONE, NO_FLAGS = PathFlags(0), DocFlags(0)
GET, EXISTS, COUNT = Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT
ADD, UPSERT, REMOVE, REPLACE = (
    Opcode.SUBDOC_DICT_ADD,
    Opcode.SUBDOC_DICT_UPSERT,
    Opcode.SUBDOC_DELETE,
    Opcode.SUBDOC_REPLACE,
)
PUSH, INSERT, UNIQUE, COUNTER = (
    Opcode.SUBDOC_ARRAY_PUSH_LAST,
    Opcode.SUBDOC_ARRAY_INSERT,
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE,
    Opcode.SUBDOC_COUNTER,
)
XATTR_TO_BODY = Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR

CAS = 0x17_8A_01_02_03_04_05_06


def document(body: str = "{}", xattrs: dict[str, str] | None = None, **fields: object) -> SubdocDocument:
    datatype = Datatype.JSON if body else Datatype.RAW
    value = body.encode()
    if xattrs:
        value = encode_xattrs(ValueParts({name: text.encode() for name, text in xattrs.items()}, value))
        datatype |= Datatype.XATTR
    return SubdocDocument(**{"value": value, "datatype": datatype, "cas": CAS, "seqno": 7, **fields})


def look(opcode: Opcode, path: str = "", flags: PathFlags = NONE) -> LookupSpec:
    return LookupSpec(opcode=opcode, flags=flags, path=path.encode())


def change(opcode: Opcode, path: str = "", value: str = "", flags: PathFlags = NONE) -> MutationSpec:
    return MutationSpec(opcode=opcode, flags=flags, path=path.encode(), value=value.encode())


def parts(value: NewValue) -> tuple[str, dict[str, str]]:
    filled = value.fill(cas=CAS, seqno=8)
    if not value.datatype & Datatype.XATTR:
        return filled.decode(), {}
    decoded = decode_xattrs(filled)
    return decoded.body.decode(), {name: text.decode() for name, text in decoded.xattrs.items()}


def mutated(
    before: SubdocDocument | None, specs: Sequence[MutationSpec], flags: DocFlags = NO_FLAGS
) -> tuple[str, dict[str, str]]:
    return parts(mutate_in(before, specs, flags).value)


def refusal(operation: Callable[..., object], *arguments: object) -> RequestRefused:
    with pytest.raises(RequestRefused) as raised:
        operation(*arguments)
    return raised.value


# --- lookups --------------------------------------------------------------------------------------------------------

PERSON = document('{"name":"Ada","tags":["x","y"],"age":36}', {"meta": '{"by":"me","n":[1,2]}', "_sys": "1"})


def test_lookup_in_gives_one_result_a_path() -> None:
    specs = [
        look(GET, "meta.by", XATTR), look(COUNT, "meta.n", XATTR), look(GET, "name"), look(EXISTS, "age"),
        look(COUNT, "tags"), look(GET, "tags[-1]"), look(Opcode.GET),
    ]  # fmt: skip
    outcome = lookup_in(PERSON, specs)
    assert outcome.status == Status.SUCCESS
    values = [b'"me"', b"2", b'"Ada"', b"", b"2", b'"y"', b'{"name":"Ada","tags":["x","y"],"age":36}']
    assert outcome.results == tuple(LookupResult(status=Status.SUCCESS, value=value) for value in values)


def test_lookup_in_goes_on_after_a_path_that_fails() -> None:
    specs = [look(GET, "nope", XATTR), look(GET, "name"), look(EXISTS, "nope"), look(GET, "a..b"), look(GET, "age.x")]
    outcome = lookup_in(PERSON, specs)
    assert outcome.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert [result.status for result in outcome.results] == [
        Status.SUBDOC_PATH_ENOENT,
        Status.SUCCESS,
        Status.SUBDOC_PATH_ENOENT,
        Status.SUBDOC_PATH_EINVAL,
        Status.SUBDOC_PATH_MISMATCH,
    ]


def test_lookup_in_on_a_document_that_is_not_json() -> None:
    binary = SubdocDocument(value=b"\xff\x00", datatype=Datatype.RAW)
    outcome = lookup_in(binary, [look(GET, "$document.value_bytes", XATTR), look(GET, "a"), look(Opcode.GET)])
    assert [result.status for result in outcome.results] == [Status.SUCCESS, Status.SUBDOC_DOC_NOT_JSON, Status.SUCCESS]
    assert outcome.results[2].value == b"\xff\x00"


def test_lookup_one() -> None:
    for spec, value in (
        (look(GET, "name"), b'"Ada"'),
        (look(GET, "meta.by", XATTR), b'"me"'),
        (look(EXISTS, "name"), b""),
        (look(COUNT, ""), b"3"),
    ):
        assert lookup_one(PERSON, spec) == LookupResult(status=Status.SUCCESS, value=value)
    called_json = SubdocDocument(value=b"{]", datatype=Datatype.JSON)
    for before, path, status in (
        (PERSON, "nope", Status.SUBDOC_PATH_ENOENT),
        (called_json, "a", Status.SUBDOC_DOC_NOT_JSON),
        (None, "a", Status.KEY_ENOENT),
    ):
        assert refusal(lookup_one, before, look(EXISTS, path)).status == status
    assert refusal(lookup_in, None, [look(GET, "a")]).status == Status.KEY_ENOENT


TOMBSTONE = document("", {"_sync": '{"rev":1}'}, deleted=True)


def test_a_tombstone_is_seen_only_with_access_deleted() -> None:
    spec = look(GET, "_sync.rev", XATTR)
    assert refusal(lookup_in, TOMBSTONE, [spec]).status == Status.KEY_ENOENT
    result = LookupResult(status=Status.SUCCESS, value=b"1")
    assert lookup_in(TOMBSTONE, [spec], DocFlags.ACCESS_DELETED) == LookedUp(
        status=Status.SUBDOC_SUCCESS_DELETED, results=(result,)
    )
    assert lookup_one(TOMBSTONE, spec, DocFlags.ACCESS_DELETED) == LookupResult(
        status=Status.SUBDOC_SUCCESS_DELETED, value=b"1"
    )
    outcome = lookup_in(TOMBSTONE, [look(GET, "_sync.rev", XATTR), look(Opcode.GET)], DocFlags.ACCESS_DELETED)
    assert outcome.status == Status.SUBDOC_MULTI_PATH_FAILURE_DELETED
    assert [result.status for result in outcome.results] == [Status.SUCCESS, Status.SUBDOC_PATH_ENOENT]


# --- virtual attributes ---------------------------------------------------------------------------------------------

FACTS = SubdocDocument(
    value=document('{"a":1}', {"meta": "1", "_sys": "2"}).value,
    datatype=Datatype.JSON | Datatype.XATTR | Datatype.SNAPPY,
    cas=1_700_000_000_123_456_789,
    seqno=0x2A,
    vbuuid=0xDEADBEEF,
    rev=3,
    flags=0x02000006,
    expiry=1_800_000_000,
    hlc_now_s=1_700_000_001,
)


@case("$document.CAS", f'"0x{1_700_000_000_123_456_789:016x}"')
@case("$document.vbucket_uuid", '"0x00000000deadbeef"')
@case("$document.seqno", '"0x000000000000002a"')
@case("$document.revid", '"3"')
@case("$document.exptime", "1800000000")
@case("$document.flags", "33554438")
@case("$document.value_bytes", "7")
@case("$document.value_crc32c", '"0xcff7d56a"')
@case("$document.datatype", '["snappy","json","xattr"]')
@case("$document.datatype[-1]", '"xattr"')
@case("$document.deleted", "false")
@case("$document.last_modified", '"1700000000"')
@case("$XTOC", '["meta","_sys"]')
@case("$XTOC[1]", '"_sys"')
@case("$vbucket", '{"HLC":{"mode":"real","now":"1700000001"}}')
@case("$vbucket.HLC.now", '"1700000001"')
@case("$document.nope", Status.SUBDOC_PATH_ENOENT)
@case("$document[0]", Status.SUBDOC_PATH_MISMATCH)
@case("$document.CAS.x", Status.SUBDOC_PATH_MISMATCH)
@case("$nope", Status.SUBDOC_XATTR_UNKNOWN_VATTR)
@case("$nope.x", Status.SUBDOC_XATTR_UNKNOWN_VATTR)
def test_virtual_attribute(path: str, expected: str | Status) -> None:
    spec = look(GET, path, XATTR)
    if isinstance(expected, Status):
        assert refusal(lookup_one, FACTS, spec).status == expected
    else:
        assert lookup_one(FACTS, spec) == LookupResult(status=Status.SUCCESS, value=expected.encode())


def test_the_whole_document_attribute() -> None:
    outcome = lookup_one(FACTS, look(GET, "$document", XATTR))
    names = "CAS datatype deleted exptime flags last_modified revid seqno value_bytes value_crc32c vbucket_uuid"
    assert list(json.loads(outcome.value)) == names.split()
    assert lookup_one(FACTS, look(COUNT, "$document", XATTR)) == LookupResult(status=Status.SUCCESS, value=b"11")


def test_virtual_attributes_of_plain_documents() -> None:
    raw = SubdocDocument(value=b"", datatype=Datatype.RAW, deleted=True)
    specs = [look(GET, "$document.datatype", XATTR), look(GET, "$document.deleted", XATTR), look(GET, "$XTOC", XATTR)]
    outcome = lookup_in(raw, specs, DocFlags.ACCESS_DELETED)
    assert [result.value for result in outcome.results] == [b'["raw"]', b"true", b"[]"]
    assert refusal(lookup_one, document(), look(GET, "$vbucket", XATTR)).status == Status.SUBDOC_XATTR_UNKNOWN_VATTR


def test_one_real_attribute_and_virtual_ones_go_together() -> None:
    """What `get` with an expiry and a projection asks for, and an attribute."""
    specs = [look(GET, "$document.exptime", XATTR), look(GET, "meta", XATTR), look(GET, "$document.flags", XATTR)]
    outcome = lookup_in(FACTS, [*specs, look(Opcode.GET)])
    assert [result.value for result in outcome.results] == [b"1800000000", b"1", b"33554438", b'{"a":1}']


# --- mutations ------------------------------------------------------------------------------------------------------


def test_mutate_in_applies_all_paths_in_their_order() -> None:
    specs = [
        change(UPSERT, "meta.by", '"you"', XATTR), change(COUNTER, "meta.edits", "2", XATTR | MKDIR_P),
        change(UPSERT, "age", "37"), change(PUSH, "tags", '"z"'), change(COUNTER, "age", "1"), change(REMOVE, "name"),
    ]  # fmt: skip
    outcome = mutate_in(PERSON, specs)
    assert outcome.status == Status.SUCCESS
    assert not outcome.deleted
    assert not outcome.created
    assert outcome.results == (
        MutationResult(index=1, status=Status.SUCCESS, value=b"2"),
        MutationResult(index=4, status=Status.SUCCESS, value=b"38"),
    )
    assert outcome.value.datatype == Datatype.JSON | Datatype.XATTR
    assert parts(outcome.value) == (
        '{"tags":["x","y","z"],"age":38}',
        {"meta": '{"by":"you","n":[1,2],"edits":2}', "_sys": "1"},
    )


def test_a_path_that_fails_undoes_all() -> None:
    specs = [change(UPSERT, "a", "1"), change(REPLACE, "nope", "1"), change(UPSERT, "b", "broken")]
    outcome = mutate_in(PERSON, specs)
    assert outcome == PathFailed(index=1, path_status=Status.SUBDOC_PATH_ENOENT)
    assert outcome.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert outcome.results == (MutationResult(index=1, status=Status.SUBDOC_PATH_ENOENT),)


def test_mutate_one() -> None:
    outcome = mutate_one(document('{"n":1}'), change(COUNTER, "n", "1"))
    assert outcome.results == (MutationResult(index=0, status=Status.SUCCESS, value=b"2"),)
    assert refusal(mutate_one, document(), change(REMOVE, "n")).status == Status.SUBDOC_PATH_ENOENT


# A document that does not exist, made by its first path.
@case(None, [change(UPSERT, "a.b", "1")], DocFlags.MKDOC, ('{"a":{"b":1}}', {}))
@case(None, [change(UPSERT, "a.b", "1")], DocFlags.ADD, ('{"a":{"b":1}}', {}))
@case(None, [change(PUSH, "", "1,2")], DocFlags.MKDOC, ("[1,2]", {}))
@case(None, [change(UNIQUE, "", "1")], DocFlags.MKDOC, ("[1]", {}))
@case(None, [change(INSERT, "[0]", "1")], DocFlags.ADD, ("[1]", {}))
@case(None, [change(COUNTER, "a.n", "5")], DocFlags.MKDOC, ('{"a":{"n":5}}', {}))
@case(None, [change(UPSERT, "x.y", "1", XATTR)], DocFlags.MKDOC, ("{}", {"x": '{"y":1}'}))
@case(None, [change(UPSERT, "x", "1", XATTR), change(UPSERT, "a", "2")], DocFlags.ADD, ('{"a":2}', {"x": "1"}))
@case(None, [change(Opcode.SET, "", "[3]")], DocFlags.ADD, ("[3]", {}))
@case(None, [change(UPSERT, "x", "1", XATTR), change(Opcode.SET, "", "4")], DocFlags.MKDOC, ("4", {"x": "1"}))
# One that exists.
@case(document('{"a":1}'), [change(UPSERT, "b.c", "1")], DocFlags.MKDOC, ('{"a":1,"b":{"c":1}}', {}))
@case(document('{"a":1}'), [change(UPSERT, "x", "1", XATTR)], NO_FLAGS, ('{"a":1}', {"x": "1"}))
@case(document("{}", {"x": "1"}), [change(REMOVE, "x", "", XATTR)], NO_FLAGS, ("{}", {}))
@case(document("{}", {"x": "[1]"}), [change(PUSH, "x", "2,3", XATTR)], NO_FLAGS, ("{}", {"x": "[1,2,3]"}))
@case(document('{"a":1}'), [change(Opcode.SET, "", '{"b":2}')], NO_FLAGS, ('{"b":2}', {}))
@case(document("{}"), [change(Opcode.SET, "", '{"b":2}'), change(UPSERT, "c", "3")], NO_FLAGS, ('{"b":2,"c":3}', {}))
@case(
    document("{}", {"x": '{"y":[1, 2]}'}),
    [change(XATTR_TO_BODY, "x.y", "", XATTR)],
    NO_FLAGS,
    ("[1,2]", {"x": '{"y":[1, 2]}'}),
)
# A tombstone that is not asked for is as good as nothing.
@case(TOMBSTONE, [change(UPSERT, "a", "1")], DocFlags.ADD, ('{"a":1}', {}))
def test_mutate_in(
    before: SubdocDocument | None, specs: list[MutationSpec], flags: DocFlags, expected: tuple[str, dict[str, str]]
) -> None:
    assert mutated(before, specs, flags) == expected


def test_binary_values_of_attributes() -> None:
    """They are stored as JSON (kv_engine, `tests/testapp/testapp_xattr.cc`), and given back as they came."""
    value = bytes(range(256))
    staged = MutationSpec(opcode=UPSERT, path=b"txn.op", value=value, flags=XATTR | BINARY | MKDIR_P)
    body, xattrs = mutated(document(), [staged])
    assert json.loads(xattrs["txn"]) == {"op": f"cb-content-base64-encoded:{b64encode(value).decode()}"}
    stored = document(body, xattrs)
    found = lookup_in(stored, [look(GET, "txn.op", XATTR | BINARY), look(GET, "txn", XATTR | BINARY)])
    assert found.results == (
        LookupResult(status=Status.SUCCESS, value=value),
        LookupResult(status=json_text.FIELD_NOT_BINARY_VALUE),
    )
    replaced = mutate_one(stored, change(Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR, "txn.op", flags=XATTR | BINARY))
    assert replaced.value.datatype == Datatype.XATTR
    assert decode_xattrs(replaced.value.template).body == value


def test_a_new_document_is_reported_as_created() -> None:
    outcome = mutate_in(None, [change(UPSERT, "a", "1")], DocFlags.MKDOC)
    assert outcome.created
    assert outcome.status == Status.SUCCESS
    assert outcome.value.datatype == Datatype.JSON


@case(None, change(UPSERT, "a", "1"), NO_FLAGS, Status.KEY_ENOENT)
@case(TOMBSTONE, change(UPSERT, "a", "1"), NO_FLAGS, Status.KEY_ENOENT)
@case(document(), change(UPSERT, "a", "1"), DocFlags.ADD, Status.KEY_EEXISTS)
@case(TOMBSTONE, change(UPSERT, "x", "1", XATTR), DocFlags.ADD | DocFlags.ACCESS_DELETED, Status.KEY_EEXISTS)
@case(
    document(),
    change(UPSERT, "x", "1", XATTR),
    DocFlags.ACCESS_DELETED | DocFlags.REVIVE_DOCUMENT,
    json_text.CAN_ONLY_REVIVE_DELETED_DOCUMENTS,
)
@case(SubdocDocument(value=b"\0", datatype=Datatype.XATTR), change(UPSERT, "a", "1"), NO_FLAGS, Status.EINTERNAL)
def test_existence(before: SubdocDocument | None, spec: MutationSpec, flags: DocFlags, status: Status) -> None:
    assert refusal(mutate_in, before, [spec], flags).status == status
    assert refusal(mutate_one, before, spec, flags).status == status


def test_the_datatype_follows_a_new_body() -> None:
    for body, datatype in (("[1]", Datatype.JSON), ("not json", Datatype.RAW), ("5", Datatype.JSON)):
        outcome = mutate_in(document(), [change(Opcode.SET, "", body)])
        assert outcome.value.datatype == datatype


def test_a_body_that_is_not_json_is_left_alone() -> None:
    binary = SubdocDocument(value=b"\xff", datatype=Datatype.RAW | Datatype.SNAPPY)
    assert mutate_in(binary, [change(UPSERT, "a", "1")]) == PathFailed(index=0, path_status=Status.SUBDOC_DOC_NOT_JSON)
    outcome = mutate_in(binary, [change(UPSERT, "x", "1", XATTR)])
    assert outcome.value.datatype == Datatype.XATTR
    assert decode_xattrs(outcome.value.template).body == b"\xff"


# --- tombstones -----------------------------------------------------------------------------------------------------


def test_delete_keeps_what_belongs_to_the_system() -> None:
    before = document('{"a":1}', {"user": "1", "_sys": "2"})
    outcome = mutate_in(before, [change(UPSERT, "_sys", "3", XATTR), change(Opcode.DELETE)])
    assert outcome.deleted
    assert outcome.status == Status.SUCCESS
    assert outcome.value.datatype == Datatype.XATTR
    assert parts(outcome.value) == ("", {"_sys": "3"})


def test_delete_leaves_nothing_where_the_system_has_nothing() -> None:
    outcome = mutate_in(document('{"a":1}', {"user": "1"}), [change(Opcode.DELETE)])
    assert outcome.deleted
    assert outcome.value == NewValue(template=b"", datatype=Datatype.RAW)


def test_a_tombstone_can_be_changed_and_stays_one() -> None:
    outcome = mutate_in(TOMBSTONE, [change(UPSERT, "_sync.rev", "2", XATTR)], DocFlags.ACCESS_DELETED)
    assert outcome.deleted
    assert outcome.status == Status.SUBDOC_SUCCESS_DELETED
    assert parts(outcome.value) == ("", {"_sync": '{"rev":2}'})


def test_a_document_can_be_created_as_deleted() -> None:
    flags = DocFlags.MKDOC | DocFlags.CREATE_AS_DELETED
    spec = change(UPSERT, "_txn.id", '"t"', XATTR)
    for outcome in (mutate_in(None, [spec], flags), mutate_one(None, spec, flags)):
        assert outcome.deleted
        assert outcome.created
        assert outcome.status == Status.SUBDOC_SUCCESS_DELETED
        assert parts(outcome.value) == ("", {"_txn": '{"id":"t"}'})


def test_many_paths_may_stage_over_a_tombstone_without_creating() -> None:
    """What a transaction sends that inserts a key which was deleted, and when it replaces what it has inserted."""
    flags = DocFlags.ACCESS_DELETED | DocFlags.CREATE_AS_DELETED
    specs = [change(UPSERT, "_sync.rev", "2", XATTR)]
    outcome = mutate_in(TOMBSTONE, specs, flags)
    assert outcome.deleted
    assert parts(outcome.value) == ("", {"_sync": '{"rev":2}'})
    assert refusal(mutate_in, None, specs, flags).status == Status.KEY_ENOENT


def test_a_tombstone_has_no_body() -> None:
    flags = DocFlags.MKDOC | DocFlags.CREATE_AS_DELETED
    outcome = mutate_in(None, [change(UPSERT, "a", "1")], flags)
    assert outcome == PathFailed(index=0, path_status=Status.SUBDOC_DOC_NOT_JSON)
    specs = [change(XATTR_TO_BODY, "_sync", "", XATTR)]
    assert (
        refusal(mutate_in, TOMBSTONE, specs, DocFlags.ACCESS_DELETED).status
        == json_text.DELETED_DOCUMENT_CANT_HAVE_VALUE
    )


def test_a_tombstone_can_be_revived() -> None:
    flags = DocFlags.ACCESS_DELETED | DocFlags.REVIVE_DOCUMENT
    outcome = mutate_in(TOMBSTONE, [change(XATTR_TO_BODY, "_sync", "", XATTR)], flags)
    assert not outcome.deleted
    assert outcome.status == Status.SUCCESS
    assert outcome.value.datatype == Datatype.JSON | Datatype.XATTR
    assert parts(outcome.value) == ('{"rev":1}', {"_sync": '{"rev":1}'})


# --- requests that are refused ---------------------------------------------------------------------------------------

EINVAL, COMBO = Status.EINVAL, Status.SUBDOC_INVALID_COMBO
LONG = "x" * 1025


def refused_before_the_document_is_read(
    operation: Callable[..., object], specs: Sequence[LookupSpec | MutationSpec], flags: DocFlags, status: Status
) -> None:
    refused = refusal(operation, PERSON, specs, flags)
    assert refused.status == status
    assert refused.context
    missing = refusal(operation, None, specs, flags)
    assert (missing.status, missing.context) == (refused.status, refused.context)


@case([], NO_FLAGS, COMBO)
@case([look(GET, "a")] * (SPECS_MAX + 1), NO_FLAGS, COMBO)
@case([look(UPSERT, "a")], NO_FLAGS, COMBO)
@case([look(Opcode.SET)], NO_FLAGS, COMBO)
@case([look(Opcode.NOOP, "a")], NO_FLAGS, COMBO)
@case([look(Opcode(0xF0), "a")], NO_FLAGS, COMBO)
@case([look(GET, "a", MKDIR_P)], NO_FLAGS, EINVAL)
@case([look(GET, "a", PathFlags(0x80))], NO_FLAGS, EINVAL)
@case([look(GET, "a", BINARY)], NO_FLAGS, Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
@case([look(GET, "a")], DocFlags.MKDOC, EINVAL)
@case([look(GET, "a")], DocFlags(0x80), EINVAL)
@case([look(GET, "a")], DocFlags.ACCESS_DELETED | DocFlags.REPLICA_READ, EINVAL)
@case([look(GET, LONG)], NO_FLAGS, EINVAL)
@case([look(GET, "")], NO_FLAGS, EINVAL)
@case([look(EXISTS, "")], NO_FLAGS, EINVAL)
@case([look(Opcode.GET, "a")], NO_FLAGS, EINVAL)
@case([look(Opcode.GET, "", XATTR)], NO_FLAGS, EINVAL)
@case([look(GET, "", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "a" * 17, XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "é" * 9, XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "[0]", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, ".a", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "#a", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "`a`", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "\x01a", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "a\0b", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "_", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "$.a", XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([look(GET, "a"), look(GET, "x", XATTR)], NO_FLAGS, Status.SUBDOC_INVALID_XATTR_ORDER)
@case([look(GET, "x", XATTR), look(GET, "y", XATTR)], NO_FLAGS, Status.SUBDOC_XATTR_INVALID_KEY_COMBO)
def test_refused_lookups(specs: list[LookupSpec], flags: DocFlags, status: Status) -> None:
    refused_before_the_document_is_read(lookup_in, specs, flags, status)


@case([], NO_FLAGS, COMBO)
@case([change(GET, "a")], NO_FLAGS, COMBO)
@case([change(Opcode.ADD, "", "1")], NO_FLAGS, COMBO)
@case([change(UPSERT, "a", "1"), change(Opcode.DELETE)], NO_FLAGS, COMBO)
@case([change(Opcode.DELETE), change(UPSERT, "a", "1")], NO_FLAGS, COMBO)
@case([change(Opcode.DELETE), change(UPSERT, "x", "1", XATTR)], NO_FLAGS, COMBO)
@case([change(UPSERT, "a", "1")], DocFlags.MKDOC | DocFlags.ADD, EINVAL)
@case([change(UPSERT, "x", "1", XATTR)], DocFlags.REVIVE_DOCUMENT, EINVAL)
@case([change(UPSERT, "a", "1")], DocFlags.REPLICA_READ, EINVAL)
@case([change(REPLACE, "a", "1")], DocFlags.MKDOC, EINVAL)
@case([change(REMOVE, "a")], DocFlags.MKDOC, EINVAL)
@case([change(Opcode.SET, "", "1")], DocFlags.ACCESS_DELETED, EINVAL)
@case([change(REPLACE, "a", "1", MKDIR_P)], NO_FLAGS, EINVAL)
@case([change(INSERT, "a[0]", "1", MKDIR_P)], NO_FLAGS, EINVAL)
@case([change(COUNTER, "a", "1", XATTR | MACROS)], NO_FLAGS, EINVAL)
@case([change(UPSERT, "", "1")], NO_FLAGS, EINVAL)
@case([change(UPSERT, LONG, "1")], NO_FLAGS, EINVAL)
@case([change(UPSERT, "a", "")], NO_FLAGS, EINVAL)
@case([change(COUNTER, "a", "")], NO_FLAGS, EINVAL)
@case([change(REMOVE, "a", "1")], NO_FLAGS, EINVAL)
@case([change(Opcode.DELETE, "", "1")], NO_FLAGS, EINVAL)
@case([change(Opcode.SET, "", "")], NO_FLAGS, EINVAL)
@case([change(Opcode.SET, "a", "1")], NO_FLAGS, EINVAL)
@case([change(XATTR_TO_BODY, "x")], NO_FLAGS, EINVAL)
@case([change(UPSERT, "a", '"${Mutation.CAS}"', MACROS)], NO_FLAGS, Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
@case([change(UPSERT, "x", '"${nope}"', XATTR | MACROS)], NO_FLAGS, Status.SUBDOC_XATTR_UNKNOWN_MACRO)
@case([change(UPSERT, "a", "1", BINARY)], NO_FLAGS, Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
@case([change(UPSERT, "x", "1", XATTR | MACROS | BINARY)], NO_FLAGS, Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
@case([change(COUNTER, "x", "1", XATTR | BINARY)], NO_FLAGS, EINVAL)
@case([change(UPSERT, "x", '{"a":"cb-content-base64-encoded:?"}', XATTR)], NO_FLAGS, Status.XATTR_EINVAL)
@case([change(PUSH, "x", '1,"${Mutation.CAS}"', XATTR | MACROS)], NO_FLAGS, Status.SUBDOC_XATTR_UNKNOWN_MACRO)
@case([change(UPSERT, "$document.CAS", "1", XATTR)], NO_FLAGS, Status.SUBDOC_XATTR_CANT_MODIFY_VATTR)
@case([change(UPSERT, "$nope", "1", XATTR)], NO_FLAGS, Status.SUBDOC_XATTR_CANT_MODIFY_VATTR)
@case([change(UPSERT, "a", "1"), change(UPSERT, "x", "1", XATTR)], NO_FLAGS, Status.SUBDOC_INVALID_XATTR_ORDER)
@case(
    [change(UPSERT, "x", "1", XATTR), change(UPSERT, "y", "1", XATTR)], NO_FLAGS, Status.SUBDOC_XATTR_INVALID_KEY_COMBO
)
def test_refused_mutations(specs: list[MutationSpec], flags: DocFlags, status: Status) -> None:
    refused_before_the_document_is_read(mutate_in, specs, flags, status)


@case(change(UPSERT, "a", "1"), DocFlags.MKDOC | DocFlags.CREATE_AS_DELETED)
@case(change(UPSERT, "x", "1", XATTR), DocFlags.ACCESS_DELETED | DocFlags.CREATE_AS_DELETED)
def test_a_single_path_that_creates_a_tombstone_is_one_of_an_attribute(spec: MutationSpec, flags: DocFlags) -> None:
    assert refusal(mutate_one, None, spec, flags).status == EINVAL


def test_names_of_attributes() -> None:
    for name in ("x", "_sys", "a" * 16, "日本", "a b", "a#"):
        assert mutated(document(), [change(UPSERT, f"{name}.y", "1", XATTR | MKDIR_P)]) == ("{}", {name: '{"y":1}'})


@pytest.mark.parametrize("path", ["a`.`b", "a``b", r"a\/b"])
def test_the_name_of_an_attribute_cannot_be_escaped(path: str) -> None:
    outcome = mutate_in(document(), [change(UPSERT, path, "1", XATTR)])
    assert outcome == PathFailed(index=0, path_status=Status.SUBDOC_PATH_EINVAL)


def test_every_command_has_its_operation() -> None:
    by_path = {opcode for opcode in COMMANDS if opcode >= Opcode.SUBDOC_GET} - {XATTR_TO_BODY}
    assert by_path == json_text.LOOKUPS.keys() | MUTATIONS.keys()
    assert {opcode for opcode in by_path if COMMANDS[opcode].mutates} == MUTATIONS.keys()


# --- limits ---------------------------------------------------------------------------------------------------------


@case_apart(change(UPSERT, "x", '"' + "x" * XATTR_SECTION_BYTES_MAX + '"', XATTR), id="attributes")
@case_apart(change(UPSERT, "a", '"' + "x" * VALUE_BYTES_MAX + '"'), id="value")
def test_a_value_that_becomes_too_large(spec: MutationSpec) -> None:
    assert refusal(mutate_in, document(), [spec]).status == Status.E2BIG


# --- macros ---------------------------------------------------------------------------------------------------------


def test_write_macros_are_filled_in_when_the_write_is_applied() -> None:
    """The values are those of the Python SDK's `MutationMacro`, and the CAS is what its helper turns back."""
    specs = [
        change(UPSERT, "x.cas", '"${Mutation.CAS}"', XATTR | MACROS | MKDIR_P),
        change(UPSERT, "x.seqno", '"${Mutation.seqno}"', XATTR | MACROS),
        change(UPSERT, "x.crc", '"${Mutation.value_crc32c}"', XATTR | MACROS),
        change(PUSH, "x.list", '"${Mutation.CAS}"', XATTR | MACROS | MKDIR_P),
        change(UPSERT, "a", "1"),
    ]
    outcome = mutate_in(document(), specs)
    assert [macro for macro, _ in outcome.value.macros] == [WriteMacro.CAS, WriteMacro.CAS, WriteMacro.SEQNO]
    filled = decode_xattrs(outcome.value.fill(cas=0x0102030405060708, seqno=0x2A))
    assert filled.body == b'{"a":1}'
    cas = "0x0807060504030201"
    assert json.loads(filled.xattrs["x"]) == {
        "cas": cas,
        "seqno": "0x000000000000002a",
        "crc": "0xcff7d56a",
        "list": [cas],
    }
    # Another write of the same value, and the template has not changed.
    again = decode_xattrs(outcome.value.fill(cas=1, seqno=1))
    assert json.loads(again.xattrs["x"])["seqno"] == "0x0000000000000001"


def test_nothing_is_taken_for_a_placeholder() -> None:
    looks_like_one = [f'"0x{number:016x}"' for number in range(4)]
    before = document(f"[{looks_like_one[0]}]", {"x": f"[{looks_like_one[1]}]"})
    specs = [
        change(PUSH, "x", looks_like_one[2], XATTR),
        change(PUSH, "x", '"${Mutation.CAS}"', XATTR | MACROS),
        change(PUSH, "x", '"${$document.seqno}"', XATTR | MACROS),
        change(PUSH, "", looks_like_one[3]),
    ]
    outcome = mutate_in(SubdocDocument(value=before.value, datatype=before.datatype, seqno=4), specs)
    assert len(outcome.value.macros) == 1
    filled = decode_xattrs(outcome.value.fill(cas=0, seqno=9))
    assert filled.body.decode() == f"[{looks_like_one[0]},{looks_like_one[3]}]"
    assert json.loads(filled.xattrs["x"]) == [f"0x{number:016x}" for number in (1, 2, 0, 4)]


def test_a_macro_that_is_overwritten_is_forgotten() -> None:
    specs = [change(UPSERT, "x", '"${Mutation.CAS}"', XATTR | MACROS), change(UPSERT, "x", "1", XATTR)]
    outcome = mutate_in(document(), specs)
    assert outcome.value.macros == ()


def test_without_the_flag_a_macro_is_a_string() -> None:
    assert mutated(document(), [change(UPSERT, "x", '"${Mutation.CAS}"', XATTR)]) == ("{}", {"x": '"${Mutation.CAS}"'})


@case("CAS", f'"0x{FACTS.cas:016x}"')
@case("vbucket_uuid", '"0x00000000deadbeef"')
@case("seqno", '"0x000000000000002a"')
@case("revid", '"3"')
@case("exptime", "1800000000")
@case("flags", "33554438")
@case("value_bytes", "7")
@case("deleted", "false")
@case("datatype", '["snappy","json","xattr"]')
def test_document_macros_speak_of_the_document_before(macro: str, expected: str) -> None:
    spec = change(UPSERT, "meta", f'"${{$document.{macro}}}"', XATTR | MACROS)
    assert mutated(FACTS, [spec])[1]["meta"] == expected


def test_the_whole_document_as_a_macro() -> None:
    _, xattrs = mutated(FACTS, [change(UPSERT, "meta", '"${$document}"', XATTR | MACROS)])
    assert json.loads(xattrs["meta"])["revid"] == "3"


@pytest.mark.parametrize("macro", ['"${$document.nope}"', '"${$documents}"', '"${$document.}"', '"${$document.CAS.x}"'])
def test_an_unknown_document_macro(macro: str) -> None:
    outcome = mutate_in(FACTS, [change(UPSERT, "meta", macro, XATTR | MACROS)])
    assert outcome == PathFailed(index=0, path_status=json_text.XATTR_UNKNOWN_VATTR_MACRO)

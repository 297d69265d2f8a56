"""The sub-document engine against a model of plain dicts and lists, and against junk."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from headwater.node.kv.subdocument.execute import Mutated, PathFailed, lookup_in, mutate_in
from headwater.node.kv.subdocument.json_text import Span, compact, is_json
from headwater.node.kv.subdocument.requests import COMMANDS, SubdocDocument
from headwater.protocol.features import Opcode
from headwater.protocol.messages.subdocument import DocFlags, LookupSpec, MutationSpec, PathFlags
from headwater.protocol.status import RequestRefused, Status
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs, encode_xattrs

names = st.sampled_from(["a", "b", "c", "a.b", "x[0]", "`", 'q"', "é", "\\", " ", "\n"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
documents = st.dictionaries(names, values, max_size=4) | st.lists(values, max_size=4)
components = st.lists(names | st.integers(-1, 4), max_size=4)
layouts = st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 2}, {"ensure_ascii": False}])


def write_path(path: list[str | int]) -> bytes:
    """The path as a client writes it: every name in backticks, escaped as in JSON."""
    text = ""
    for component in path:
        if isinstance(component, int):
            text += f"[{component}]"
        else:
            escaped = json.dumps(component, ensure_ascii=False)[1:-1].replace("`", "``")
            text += ("." if text else "") + f"`{escaped}`"
    return text.encode()


# --- the model ------------------------------------------------------------------------------------------------------


class Fails(Exception):
    """The model's own failure, with the status."""

    def __init__(self, status: Status) -> None:
        self.status = status


def status_or_result(model: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return model(*arguments)
    except Fails as failure:
        return failure.status


def walk(value: Any, path: list[str | int]) -> Any:
    for component in path:
        wanted = dict if isinstance(component, str) else list
        if not isinstance(value, wanted):
            raise Fails(Status.SUBDOC_PATH_MISMATCH)
        try:
            value = value[component]
        except LookupError:
            raise Fails(Status.SUBDOC_PATH_ENOENT) from None
    return value


def model_upsert(value: Any, path: list[str | int], new: Any) -> None:
    existing = status_or_result(walk, value, path)
    last = path[-1]
    if isinstance(existing, Status) and existing == Status.SUBDOC_PATH_MISMATCH:
        raise Fails(existing)
    # A way that leads nowhere is no fault yet where the path ends in an index: that is the greater one.
    if isinstance(last, int):
        raise Fails(Status.SUBDOC_PATH_EINVAL)
    walk(value, path[:-1])[last] = new


def model_push(value: Any, path: list[str | int], new: list[Any], *, first: bool) -> None:
    array = walk(value, path)
    if not isinstance(array, list):
        raise Fails(Status.SUBDOC_PATH_MISMATCH)
    array[:] = [*new, *array] if first else [*array, *new]


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is not true, and -0.0 is not 0.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def as_document(value: Any, layout: dict[str, Any]) -> SubdocDocument:
    return SubdocDocument(value=json.dumps(value, **layout).encode(), datatype=Datatype.JSON)


# --- against the model ----------------------------------------------------------------------------------------------


@given(value=documents, path=components, layout=layouts)
def test_lookups_agree_with_the_model(value: Any, path: list[str | int], layout: dict[str, Any]) -> None:
    path = path or ["a"]
    specs = [
        LookupSpec(opcode=opcode, path=write_path(path))
        for opcode in (Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT)
    ]
    outcome = lookup_in(as_document(value, layout), specs)
    got, exists, counted = outcome.results
    assert got.status == exists.status
    expected = status_or_result(walk, value, path)
    if isinstance(expected, Status):
        assert got.status == counted.status == expected
        assert outcome.status == Status.SUBDOC_MULTI_PATH_FAILURE
        return
    assert same(json.loads(got.value), expected)
    assert got.value == compact(got.value, Span(0, len(got.value)))
    assert exists.value == b""
    if isinstance(expected, dict | list):
        assert int(counted.value) == len(expected)
    else:
        assert counted.status == Status.SUBDOC_PATH_MISMATCH


def apply_model(opcode: Opcode, value: Any, path: list[str | int], new: list[Any]) -> None:
    match opcode:
        case Opcode.SUBDOC_DICT_UPSERT:
            model_upsert(value, path, new[0])
        case Opcode.SUBDOC_DELETE:
            walk(value, path)
            del walk(value, path[:-1])[path[-1]]
        case Opcode.SUBDOC_REPLACE:
            walk(value, path)
            walk(value, path[:-1])[path[-1]] = new[0]
        case Opcode.SUBDOC_ARRAY_PUSH_LAST:
            model_push(value, path, new, first=False)
        case Opcode.SUBDOC_ARRAY_PUSH_FIRST:
            model_push(value, path, new, first=True)


MODELLED = {
    Opcode.SUBDOC_DICT_UPSERT: "one",
    Opcode.SUBDOC_DELETE: "none",
    Opcode.SUBDOC_REPLACE: "one",
    Opcode.SUBDOC_ARRAY_PUSH_LAST: "many",
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: "many",
}


def write_value(kind: str, new: list[Any], layout: dict[str, Any]) -> bytes:
    written = [json.dumps(item, **layout) for item in new]
    return {"none": "", "one": written[0], "many": " , ".join(written)}[kind].encode()


@given(
    opcode=st.sampled_from(list(MODELLED)),
    value=documents,
    path=components,
    new=st.lists(values, min_size=1, max_size=3),
    layout=layouts,
)
def test_mutations_agree_with_the_model(
    opcode: Opcode, value: Any, path: list[str | int], new: list[Any], layout: dict[str, Any]
) -> None:
    path = path or ["a"]
    expected = copy.deepcopy(value)
    spec = MutationSpec(opcode=opcode, path=write_path(path), value=write_value(MODELLED[opcode], new, layout))
    outcome = mutate_in(as_document(value, layout), [spec])
    failure = status_or_result(apply_model, opcode, expected, path, new)
    if failure is not None:
        assert outcome == PathFailed(index=0, path_status=failure)
        return
    assert isinstance(outcome, Mutated)
    assert outcome.value.datatype == Datatype.JSON
    assert same(json.loads(outcome.value.template), expected)


@given(value=documents, paths=st.lists(components, min_size=1, max_size=6), layout=layouts)
def test_a_request_equals_its_paths_in_turn(value: Any, paths: list[list[str | int]], layout: dict[str, Any]) -> None:
    specs = [
        MutationSpec(
            opcode=Opcode.SUBDOC_DICT_UPSERT,
            flags=PathFlags.MKDIR_P,
            path=write_path(path or ["a"]),
            value=str(number).encode(),
        )
        for number, path in enumerate(paths)
    ]
    together = mutate_in(as_document(value, layout), specs)
    current = as_document(value, layout)
    for index, spec in enumerate(specs):
        alone = mutate_in(current, [spec])
        if isinstance(alone, PathFailed):
            assert together == PathFailed(index=index, path_status=alone.path_status)
            return
        assert isinstance(alone, Mutated)
        current = SubdocDocument(value=alone.value.template, datatype=alone.value.datatype)
    assert isinstance(together, Mutated)
    assert together.value.template == current.value


@given(start=st.integers(-(2**65), 2**65), delta=st.integers(-(2**65), 2**65))
@example(start=2**63 - 1, delta=-(2**63))
@example(start=-(2**63), delta=-1)
@example(start=0, delta=0)
def test_counters_are_64_bits(start: int, delta: int) -> None:
    def fits(number: int) -> bool:
        return -(2**63) <= number < 2**63

    spec = MutationSpec(opcode=Opcode.SUBDOC_COUNTER, path=b"c", value=str(delta).encode())
    outcome = mutate_in(as_document({"c": start}, {}), [spec])
    if delta == 0 or not fits(delta):
        assert outcome == PathFailed(index=0, path_status=Status.SUBDOC_DELTA_EINVAL)
    elif not fits(start):
        assert outcome == PathFailed(index=0, path_status=Status.SUBDOC_NUM_ERANGE)
    elif not fits(start + delta):
        assert outcome == PathFailed(index=0, path_status=Status.SUBDOC_VALUE_CANTINSERT)
    else:
        assert outcome.results[0].value == str(start + delta).encode()
        assert json.loads(outcome.value.template) == {"c": start + delta}


# --- attributes -----------------------------------------------------------------------------------------------------


@given(
    others=st.dictionaries(st.sampled_from(["_s", "user", "other"]), values, max_size=3),
    path=components,
    new=values,
    cas=st.integers(0, 2**64 - 1),
    seqno=st.integers(0, 2**64 - 1),
)
def test_attributes_like_bodies(others: dict[str, Any], path: list[str | int], new: Any, cas: int, seqno: int) -> None:
    body = b'{"kept":1}'
    encoded = encode_xattrs(ValueParts({name: json.dumps(value).encode() for name, value in others.items()}, body))
    before = SubdocDocument(value=encoded, datatype=Datatype.JSON | Datatype.XATTR)
    spec = MutationSpec(
        opcode=Opcode.SUBDOC_DICT_UPSERT,
        flags=PathFlags.XATTR,
        path=b"user" + write_path(["", *path])[len(b"``") :],
        value=json.dumps(new).encode(),
    )
    outcome = mutate_in(before, [spec])
    expected = copy.deepcopy(others)
    failure = status_or_result(model_upsert, expected, ["user", *path], new)
    if failure is not None:
        assert outcome == PathFailed(index=0, path_status=failure)
        return
    assert isinstance(outcome, Mutated)
    after = decode_xattrs(outcome.value.fill(cas=cas, seqno=seqno))
    assert after.body == body
    assert same({name: json.loads(text) for name, text in after.xattrs.items()}, expected)


@given(body=st.text(), present=st.text(), cas=st.integers(0, 2**64 - 1), seqno=st.integers(0, 2**64 - 1))
def test_macros_say_the_cas_and_the_seqno_of_the_write(body: str, present: str, cas: int, seqno: int) -> None:
    xattrs = {"x": json.dumps({"present": present}).encode()}
    before = SubdocDocument(
        value=encode_xattrs(ValueParts(xattrs, json.dumps([body]).encode())), datatype=Datatype.JSON | Datatype.XATTR
    )
    flags = PathFlags.XATTR | PathFlags.EXPAND_MACROS
    specs = [
        MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, flags=flags, path=b"x." + name, value=b'"${Mutation.%b}"' % name)
        for name in (b"CAS", b"seqno", b"value_crc32c")
    ]
    outcome = mutate_in(before, specs)
    assert isinstance(outcome, Mutated)
    after = decode_xattrs(outcome.value.fill(cas=cas, seqno=seqno))
    assert json.loads(after.body) == [body]
    assert json.loads(after.xattrs["x"]) == {
        "present": present,
        "CAS": "0x" + cas.to_bytes(8, "little").hex(),
        "seqno": f"0x{seqno:016x}",
        "value_crc32c": f"0x{bitwise_crc32c(after.body):08x}",
    }


# --- junk -----------------------------------------------------------------------------------------------------------

json_like = st.text(alphabet='{}[]",:.`\\ \n0123456789-eEtrufalsn$_', max_size=40).map(str.encode)
junk = st.binary(max_size=40) | json_like | documents.map(lambda value: json.dumps(value).encode())
junk_paths = st.binary(max_size=20) | json_like | components.map(write_path)
opcodes = st.sampled_from([*COMMANDS, Opcode.NOOP, Opcode(0xF3)])
path_flags = st.sampled_from([0, 0, 1, 4, 5, 0x14, 0x80]).map(PathFlags)
doc_flags = st.sampled_from([0, 0, 0, 1, 2, 4, 9, 0x14, 0x80]).map(DocFlags)
junk_documents = st.none() | st.builds(
    SubdocDocument,
    value=junk | junk.map(lambda data: encode_xattrs(ValueParts({"x": data.replace(b"\0", b"")}, data))),
    datatype=st.integers(0, 7).map(Datatype),
    deleted=st.booleans(),
)


def outcome_of(operation: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return operation(*arguments)
    except RequestRefused as refused:
        return refused


macros = st.sampled_from([b'"${Mutation.CAS}"', b'"${$document.CAS}"', b'"${$document.nope}"'])


@given(
    document=junk_documents,
    specs=st.lists(st.builds(LookupSpec, opcode=opcodes, flags=path_flags, path=junk_paths), max_size=4),
    flags=doc_flags,
)
def test_junk_lookups_give_a_status(document: SubdocDocument | None, specs: list[LookupSpec], flags: DocFlags) -> None:
    outcome = outcome_of(lookup_in, document, specs, flags)
    if isinstance(outcome, RequestRefused):
        assert outcome.status != Status.SUCCESS
        return
    assert len(outcome.results) == len(specs)
    for result in outcome.results:
        assert len(result.encode()) >= 6


@given(
    document=junk_documents,
    specs=st.lists(
        st.builds(MutationSpec, opcode=opcodes, flags=path_flags, path=junk_paths, value=junk | macros), max_size=4
    ),
    flags=doc_flags,
)
def test_junk_mutations_leave_sound_documents(
    document: SubdocDocument | None, specs: list[MutationSpec], flags: DocFlags
) -> None:
    outcome = outcome_of(mutate_in, document, specs, flags)
    if isinstance(outcome, RequestRefused | PathFailed):
        assert outcome.status != Status.SUCCESS
        return
    filled = outcome.value.fill(cas=2**64 - 1, seqno=2**64 - 1)
    assert len(filled) == len(outcome.value.template)
    body = filled
    if outcome.value.datatype & Datatype.XATTR:
        body = decode_xattrs(filled).body
    changed_body = any(spec.flags & PathFlags.XATTR == 0 for spec in specs)
    if changed_body and outcome.value.datatype & Datatype.JSON:
        assert is_json(body)


@given(levels=st.integers(1, 3000), opening=st.sampled_from(["[", '{"a":']), closed=st.booleans())
def test_deep_documents_and_values_never_overflow(levels: int, opening: str, closed: bool) -> None:
    closing = ("]" if opening == "[" else "}") * levels if closed else ""
    deep = (opening * levels + ("1" if opening != "[" else "") + closing).encode()
    too_deep = {Status.SUBDOC_DOC_E2DEEP, Status.SUBDOC_DOC_NOT_JSON, Status.SUBDOC_PATH_MISMATCH}
    lookup = lookup_in(
        SubdocDocument(value=deep, datatype=Datatype.JSON), [LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"a.b")]
    )
    assert lookup.results[0].status in too_deep | {Status.SUBDOC_PATH_ENOENT}
    if levels > 32 and closed:
        assert lookup.results[0].status == Status.SUBDOC_DOC_E2DEEP
    spec = MutationSpec(opcode=Opcode.SUBDOC_DICT_UPSERT, path=b"a", value=deep)
    outcome = mutate_in(SubdocDocument(value=b"{}", datatype=Datatype.JSON), [spec])
    if isinstance(outcome, PathFailed):
        assert outcome.path_status in {Status.SUBDOC_VALUE_ETOODEEP, Status.SUBDOC_VALUE_CANTINSERT}
    else:
        assert levels < 32
        assert closed


# --- the pieces -----------------------------------------------------------------------------------------------------


def levels_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((levels_of(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((levels_of(item) for item in value), default=0)
    return 1


@given(value=values, layout=layouts)
def test_compact_changes_nothing_but_space(value: Any, layout: dict[str, Any]) -> None:
    text = json.dumps(value, **layout).encode()
    shortest = json.dumps(value, separators=(",", ":"), ensure_ascii=bool(layout.get("ensure_ascii", True)))
    assert compact(text, Span(0, len(text))) == shortest.encode()


@given(value=documents, wrappers=st.integers(24, 32))
def test_the_depth_of_a_document_is_counted(value: Any, wrappers: int) -> None:
    for _ in range(wrappers):
        value = [value]
    outcome = lookup_in(as_document(value, {}), [LookupSpec(opcode=Opcode.SUBDOC_GET, path=b"[0]")])
    assert (outcome.results[0].status == Status.SUBDOC_DOC_E2DEEP) == (levels_of(value) > 32)


@given(data=st.binary(max_size=64))
def test_json_is_what_python_takes_for_it(data: bytes) -> None:
    def refuse(_: str) -> None:
        raise ValueError

    try:
        json.loads(data.decode(), parse_constant=refuse)
        expected = True
    except ValueError:
        expected = False
    assert is_json(data) is expected


def bitwise_crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF

"""Variants are what Spark's own parser makes, whatever the text is. Those of a lake say all that their JSON says."""

from __future__ import annotations

import json
import re

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.types import VariantVal

from headwater.lake.variants import VARIANT, json_texts, to_variants
from headwater.spark.rows import parse_variants
from support.lake_model import document_text, is_same, said

spaces = st.sampled_from(["", "", "", " ", "\n\t\r "])
names = st.text(max_size=9) | st.sampled_from(["a", "b", "long name", "long name 2", "long nam\0", "é", "\U00010000"])


@st.composite
def strings(draw: st.DrawFn, contents: st.SearchStrategy[str]) -> str:
    return json.dumps(draw(contents), ensure_ascii=draw(st.booleans()))


numbers = (
    st.integers(-(2**70), 2**70).map(str)
    | st.floats().map(json.dumps)
    | st.from_regex(r"-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
)
scalars = st.sampled_from(["null", "true", "false", "[]", "{}", r'"\ud800"', r'"\uDBFF\udfff"']) | numbers
members = st.tuples(strings(names), spaces, spaces)


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    padded = st.builds("{}{}{}".format, spaces, inner, spaces)
    fields = st.builds(lambda member, value: f"{member[1]}{member[0]}{member[2]}:{value}", members, padded)
    return st.lists(padded, max_size=4).map(lambda it: f"[{','.join(it)}]") | st.lists(fields, max_size=6).map(
        lambda it: f"{{{','.join(it)}}}"
    )


texts = st.recursive(scalars | strings(st.text(max_size=80)), containers, max_leaves=20).map(str.encode)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    text = bytearray(draw(texts))
    at = draw(st.integers(0, len(text) - 1))
    text[at : at + draw(st.integers(0, 1))] = draw(
        st.sampled_from([*b'"\\{}[],:-+.0eu\x00\x7f\x80\xc3\xff'])
    ).to_bytes()
    return bytes(text)


def by_spark(text: bytes | None) -> dict[str, bytes] | None:
    try:
        parsed = VariantVal.parseJson(text.decode())
    except Exception:
        return None
    return {"value": parsed.value, "metadata": parsed.metadata}


@given(st.lists(texts | damaged() | st.none(), max_size=8), st.integers(0, 2))
@example([b"9007199254740993e0", b"1e23", b"5e-324", b"1e-400", b"-1e400", b"-0e0", b"4.9406564584124654e-324"], 0)
@example([b"2.2250738585072011e-308", b"17976931348623157e292", b"1e-343", b"0.1e-341", b"123456789012345678e-30"], 0)
def test_a_column_of_texts(column: list[bytes | None], start: int) -> None:
    array = pa.array(column, pa.binary()).slice(min(start, len(column)))
    variants, others = parse_variants(array, pa.array([True] * len(array), pa.bool_()))
    variants.validate(full=True)
    expected = [by_spark(text) for text in column[start:]]
    assert variants.to_pylist() == expected
    assert others.to_pylist() == [
        text if variant is None else None for text, variant in zip(column[start:], expected, strict=True)
    ]


# --- the variants of a lake -------------------------------------------------------------------------------------------

MINUS_ZERO = re.compile(r"-0\.0\b")


@given(st.lists(texts | damaged() | st.none(), max_size=8))
@example([b"1e5", b"1.5e0", None, b"{}", b"[1e5,2e300,[],3.25,-0.010,1e-7]", b"0e0", b"-0e0"])
@example([b"1234567890123456789e0", b"9007199254740993e0", b"1e400", b"1" * 39, b'{"a":1,"a":2}', b"12345678901234567"])
@example([b"-99999999999999999999999999999999999999", b"0.00000000000000000000000000000000000001", b'"\\u0001\\n\\""'])
def test_documents_come_back(column: list[bytes | None]) -> None:
    variants, others = to_variants(pa.array(column, pa.binary()))
    assert variants.type == VARIANT
    back = json_texts(variants).to_pylist()
    for text, variant, other, found in zip(column, variants.to_pylist(), others.to_pylist(), back, strict=True):
        assert (variant is None) == (found is None)
        if variant is None:
            assert other == text
            continue
        assert other is None
        expected = said(text or b"")
        assert is_same(expected, said(found)), found
        # The same by a decoder that is not ours.
        theirs = document_text({"document": variant})
        assert is_same(expected, said(theirs or "")), theirs
        (again,) = json_texts(to_variants(pa.array([found.encode()]))[0]).to_pylist()
        # The text does not say that a number is a double. Read as a decimal it is the same, but -0.0 loses its sign.
        assert MINUS_ZERO.sub("0.0", again or "") == MINUS_ZERO.sub("0.0", found)


@given(texts, st.integers(0, 1 << 16), st.integers(0, 255), st.booleans())
def test_a_damaged_variant_is_null_or_text(text: bytes, at: int, byte: int, is_value: bool) -> None:
    variant = to_variants(pa.array([text]))[0].to_pylist()[0]
    if variant is None:
        return
    name = "value" if is_value else "metadata"
    changed = bytearray(variant[name])
    changed[at % len(changed)] = byte
    del changed[len(changed) - at % 3 :]
    found = json_texts(pa.array([variant, variant | {name: bytes(changed)}, variant], VARIANT)).to_pylist()
    assert found[0] == found[2]
    assert found[0] is not None
    assert found[1] is None or isinstance(json.loads(found[1]), object)

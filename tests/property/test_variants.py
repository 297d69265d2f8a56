"""Variants are what Spark's own parser makes, whatever the text is."""

from __future__ import annotations

import json

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.types import VariantVal

from headwater.spark.variants import parse_variants

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

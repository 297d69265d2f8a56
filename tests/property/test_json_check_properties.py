"""The JSON kernel agrees with the standard library, made strict."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.protocol.kernels.json_check import DEPTH_MAX, is_json
from support.cases import each

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda children: st.one_of(st.lists(children, max_size=5), st.dictionaries(st.text(), children, max_size=5)),
    max_leaves=20,
)


def check(data: bytes) -> bool:
    return bool(is_json(np.frombuffer(data, dtype=np.uint8), 0, len(data)))


def oracle(data: bytes) -> bool:
    def refuse(constant):
        raise ValueError(constant)

    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            return False
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


@given(values, st.booleans(), st.sampled_from([None, 0, 2]))
def test_what_a_writer_makes_is_json(value, ascii_only, indent):
    assert check(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")) or (
        not oracle(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass"))
    )


@given(values, st.data())
def test_damaged_json_is_judged_as_the_library_judges_it(value, data):
    encoded = bytearray(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(1, 3))):
        if encoded:
            at = data.draw(st.integers(0, len(encoded) - 1))
            if data.draw(st.booleans()):
                encoded[at] = data.draw(st.integers(0, 255))
            else:
                del encoded[at]
    assert check(bytes(encoded)) == oracle(bytes(encoded))


@given(st.binary(max_size=40))
def test_junk_is_judged_as_the_library_judges_it(junk):
    assert check(junk) == oracle(junk)


@each(
    "text",
    [b"", b" ", b"{", b"[1,]", b'{"a":1,}', b"01", b"-", b"1.", b".5", b"1e", b"+1", b"nul", b"truex", b"[1 2]",
     b'"\x01"', b'"\\x"', b'"\\u12"', b"NaN", b"Infinity", b"\xef\xbb\xbf{}", b"{'a':1}", b'{"a" 1}', b'{1:2}', b"[}",
     b'"a', b"1 2"],
)  # fmt: skip
def test_is_not_json(text):
    assert not check(text)


@each(
    "text", [b"1", b"-0", b"1.5e+10", b'"x"', b"null", b" [ ] ", b"{}", b'{"a":[1,{"b":null}],"c":"\\u00e9\xc3\xa9"}']
)
def test_is_json(text):
    assert check(text)


def test_nesting_has_a_limit():
    assert check(b"[" * DEPTH_MAX + b"]" * DEPTH_MAX)
    assert not check(b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1))

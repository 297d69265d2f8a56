"""What the kernel of variants encodes, what it leaves to Spark's parser, and where widths and limits change."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import VariantVal
from pyspark.sql.variant_utils import VariantBuilder

from headwater.lake.variants import NAMES_MAX, WORD_DIGITS, encode_texts
from headwater.protocol.kernels.json_check import DEPTH_MAX
from headwater.spark import rows
from headwater.spark.rows import parse_variants


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The texts that went to Spark's parser."""
    found: list[bytes] = []
    parse = rows._parse_by_spark

    def noted(text: bytes) -> Any:
        found.append(text)
        return parse(text)

    monkeypatch.setattr(rows, "_parse_by_spark", noted)
    return found


def check(*texts: bytes) -> None:
    """They are what Spark's own parser makes."""
    found, others = parse_variants(pa.array(texts, pa.binary()), pa.array([True] * len(texts)))
    assert others.null_count == len(texts)
    for text, variant in zip(texts, found.to_pylist(), strict=True):
        parsed = VariantVal.parseJson(text.decode())
        assert (variant["value"], variant["metadata"]) == (parsed.value, parsed.metadata), text[:80]


def test_documents_are_encoded_by_the_kernel(left: list[bytes]) -> None:
    check(
        json.dumps({"b": [1, {"c": None, "a": True}], "a": {"b": "x" * 64, "é": "\n"}, "": -129}).encode(),
        b'{"b": [2, {"c": 3.25, "a": false}], "a": {"b": "\\u00e9", "\\u00e9": "\xc3\xa9"}, "": 40000}',
        b"[0.1, 123456789.12, -12345678901234567890, 0.00000000000000000001, 99999999999999999999999999999999999999]",
        b"[1e5, -1.2345678901234567e-7, 2.2250738585072014e-308, 1.7976931348623157E+308, 0e9, -0E0, -0, -0.0]",
        b" 17 ",
    )
    assert not left


@pytest.mark.parametrize(
    "text",
    [b'{"a":1,"b":2,"a":{"c":3}}', b"NaN", b"[-Infinity]", b"1e23", b"1e400", b"5e-324", b"1" * 39, b"1" * 20 + b"e1"],
)
def test_what_is_not_certain_is_left_to_spark(text: bytes, left: list[bytes]) -> None:
    check(b"1", text, b"[]")
    assert left == [text]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1,]", b"01", b"1.", b"+1", b"nul", b'"\\x"', b'"\x01"', b'"\\ud800"', b'{"\\udfff":1}', b"\xff",
     b"\xef\xbb\xbf1", b"1 2", b"'a'", b"[" * 100_000 + b"]" * 100_000, b"1" * 5_000],
)  # fmt: skip
def test_what_spark_refuses_is_kept_as_bytes(text: bytes) -> None:
    found, others = parse_variants(pa.array([b"1", text, b"2", None, b"3"]), pa.array([True, True, True, True, False]))
    assert found.is_valid().to_pylist() == [True, False, True, False, False]
    assert others.to_pylist() == [None, text, None, None, b"3"]


def test_widths_of_counts_numbers_and_offsets(left: list[bytes]) -> None:
    check(
        *(json.dumps([7] * count).encode() for count in (85, 86, 255, 256, 22_000)),
        *(json.dumps({f"n{number}": number for number in range(count)}).encode() for count in (255, 256, 257, 300)),
        *(json.dumps({"a": "x" * length}).encode() for length in (63, 64, 250, 251, 65_530, 65_531)),
        *(json.dumps({"x" * length: 1}).encode() for length in (255, 256, 65_535, 65_536)),
        json.dumps({str(number): number for number in range(3_000, 0, -1)}).encode(),
        b"[" * DEPTH_MAX + b"]" * DEPTH_MAX,
    )
    assert not left


def test_names_are_forgotten_when_there_are_too_many(left: list[bytes]) -> None:
    many = [json.dumps({f"{row} {number}": row for number in range(1_000)}).encode() for row in range(40)]
    check(*many, b'{"a":1}', *many[:2])
    alone = json.dumps(dict.fromkeys(map(str, range(NAMES_MAX - 1)))).encode()
    check(*many[:16], alone, *many[:2])
    assert not left
    too_many = json.dumps(dict.fromkeys(map(str, range(NAMES_MAX + 1)))).encode()
    check(b'{"a":1}', too_many, b'{"a":2}')
    assert left == [too_many]


def test_members_are_in_the_order_of_their_names(left: list[bytes]) -> None:
    names = ["long name 2", "long name", "long nam", "long nam\0", "", "é", "z", "\U00010000", "\uffff", "long name 10"]
    check(*(json.dumps(dict.fromkeys(names[start:] + names[:start])).encode() for start in range(len(names))))
    assert not left


@pytest.mark.parametrize("is_name", [False, True])
def test_the_largest_variant(is_name: bool, left: list[bytes]) -> None:
    size_max = VariantBuilder.DEFAULT_SIZE_LIMIT
    head = 10 if is_name else 5
    for over in (-200, 0, 1):
        string = b'"' + b"x" * (size_max - head + over) + b'"'
        text = b"{" + string + b":1}" if is_name else string
        found, _ = parse_variants(pa.array([text]), pa.array([True]))
        assert found.is_valid().to_pylist() == [over <= 0]
        assert left == ([] if over < 0 else [text])
        left.clear()


def test_doubles_are_rounded_to_the_nearest() -> None:
    bits = np.random.default_rng(7).integers(0x0010 << 48, 0x7FEF << 48, 20_000, dtype=np.int64)
    # With few digits they lie anywhere between two doubles.
    written = [f"{number:.{digits}e}" for number in bits.view(np.float64).tolist() for digits in (2, 7, 16)]
    array = pa.array([text.encode() for text in written])
    values, _, is_done = encode_texts(array, np.ones(len(array), dtype=np.bool_), WORD_DIGITS)
    assert is_done.mean() > 0.999
    for text, value, done in zip(written, values.to_pylist(), is_done, strict=True):
        assert not done or value == struct.pack("<Bd", 7 << 2, float(text)), text

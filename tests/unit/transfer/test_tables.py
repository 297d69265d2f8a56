"""CSV files: what their cells become, and what is said of rows that are wrong."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from headwater.errors import HeadwaterError, InvalidDocument, InvalidInput
from headwater.transfer import tables
from headwater.transfer.tables import CsvRows
from support.cases import case, each


def objects_of(text: str | bytes, **options: Any) -> list[Any]:
    data = text if isinstance(text, bytes) else text.encode()
    batches = CsvRows(io.BytesIO(data), **options).objects()
    return [json.loads(row) for batch in batches for row in batch.to_pylist()]


def test_numbers_booleans_and_texts() -> None:
    text = 'id,name,zip,ok,ratio\n1,Ada,01234,true,1.50\n-2,"Bo ""x"",\ny",90210,false,1e3\n'
    assert objects_of(text) == [
        {"id": 1, "name": "Ada", "zip": "01234", "ok": True, "ratio": 1.5},
        {"id": -2, "name": 'Bo "x",\ny', "zip": "90210", "ok": False, "ratio": 1000.0},
    ]


def test_a_number_is_kept_as_it_is_written() -> None:
    [batch] = CsvRows(io.BytesIO(b"a\n123456789012345678901234567890.10\n")).objects()
    assert batch.to_pylist() == ['{"a":123456789012345678901234567890.10}']


@each("cell", ["007", "+1", "1.", ".5", "1_000", "NaN", "TRUE", "0x10", " 1"])
def test_what_only_resembles_a_number_is_text(cell: str) -> None:
    assert objects_of(f"a\n{cell}\n") == [{"a": cell}]


def test_empty_cells() -> None:
    assert objects_of('n,t\n1,a\n,""\n2,\n') == [{"n": 1, "t": "a"}, {"n": None, "t": ""}, {"n": 2, "t": None}]


def test_a_column_that_is_to_be_text() -> None:
    assert objects_of("n,m\n1,1\n", texts=["m"]) == [{"n": 1, "m": "1"}]
    with pytest.raises(InvalidInput, match="no column 'x'"):
        objects_of("n\n1\n", texts=["x"])


def test_other_delimiters_line_ends_and_a_byte_order_mark() -> None:
    assert objects_of("\ufeffa;b\r\n1;x,y\r\n", delimiter=";") == [{"a": 1, "b": "x,y"}]
    assert objects_of('"a\nb",c\n1,2\n') == [{"a\nb": 1, "c": 2}]


@pytest.mark.parametrize("text", ["a,b\n", "a,b"])
def test_a_header_alone(text: str) -> None:
    assert objects_of(text) == []


@case("", "the file has no header")
@case("a,,c\n1,2,3\n", "a column has no name")
@case("a,b,a\n1,2,3\n", "two columns 'a'")
@case(b"\xff\xfe,b\n1,2\n", "the header is not UTF-8")
def test_headers_that_will_not_do(text: str | bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        objects_of(text)


@case("a,b\n1,2\n3\n", "row 2: expected 2 columns, got 1")
@case(b"a\nx\n\xff\xfe\n", "row 2: a cell is not UTF-8")
def test_rows_that_can_t_be_read(text: str | bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        objects_of(text)


def test_a_cell_that_does_not_fit_is_named_after_the_rows_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 100)
    lines = "".join(f"{number},{number}\n" for number in range(1, 51))
    rows = CsvRows(io.BytesIO(f"a,b\n{lines}51,x\n".encode()))
    given: list[int] = []
    with pytest.raises(HeadwaterError, match=r"row 51: 'x' in column 'b' is not a number.*--text b"):
        given.extend(len(batch) for batch in rows.objects())
    assert sum(given) == 50
    assert len(objects_of(f"a,b\n{lines}51,x\n", texts=["b"])) == 51


def test_a_row_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 1000)
    with pytest.raises(InvalidDocument, match=r"more than 1000 bytes.*quotes"):
        objects_of("a\n1\n" + '"' + "x" * 5000)

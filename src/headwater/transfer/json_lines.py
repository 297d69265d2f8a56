"""Documents from JSON lines: one document a line, checked, and given as columns with no object per line.

Blank lines are passed over but counted, so that a number is always that of the line in the file. A line that can't be
used ends the reading, after the documents before it have been given. `ExportedDocuments` takes documents out of lines,
or rows of a table, that `headwater export` has written. `inputs.open_source` chooses between them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidDocument
from headwater.kernels.memory import Bytes, Column, Int64s, ReadOnlyBytes, ReadOnlyInt64s, i64, kernel, kernel_part
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.numbers import KEY_BYTES_MAX, VALUE_BYTES_MAX
from headwater.transfer.key_template import KeyTemplate
from headwater.transfer.set_frames import JSON_FLAGS, Documents, KeptDocuments

CHUNK_BYTES = 512 * 1024
BATCH_DOCUMENTS_MAX = 4096

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ByteReader(Protocol):
    """A binary file, standard input among them."""

    def read1(self, size: int, /) -> bytes: ...


class JsonLines:
    """The documents of a file, batch by batch."""

    def __init__(self, file: ByteReader, template: KeyTemplate) -> None:
        self.bytes_read = 0
        self._file = file
        self._template = template
        self._lines = 0
        """The lines that have been split off."""

    def batches(self) -> Iterator[Documents]:
        """Raises `InvalidDocument` at the first line that can't be used; those before it have been given by then."""
        rest = b""
        at_end = False
        while not at_end:
            chunk = self._file.read1(CHUNK_BYTES)
            at_end = not chunk
            if not self.bytes_read:
                chunk = chunk.removeprefix(_BYTE_ORDER_MARK)
            self.bytes_read += len(chunk)
            text = np.frombuffer(rest + chunk, dtype=np.uint8)
            at = 0
            while at < len(text):
                documents, consumed, problem = self._split(text[at:], at_end=at_end)
                if len(documents):
                    yield documents
                if problem is not None:
                    raise problem
                if not consumed:
                    break
                at += consumed
            rest = text[at:].tobytes()
            if len(rest) > VALUE_BYTES_MAX:
                raise self._too_long(self._lines + 1)

    def _split(self, text: Bytes, *, at_end: bool) -> tuple[Documents, int, InvalidDocument | None]:
        starts, ends, numbers = (np.empty(BATCH_DOCUMENTS_MAX, dtype=np.int64) for _ in range(3))
        count, consumed, lines, is_sound = _split_lines(
            text, at_end, self._lines, VALUE_BYTES_MAX, starts, ends, numbers
        )
        self._lines += lines
        starts, ends, numbers = starts[:count], ends[:count], numbers[:count]
        keys, key_ends, problem = self._template.build(text, starts, ends, numbers)
        if problem is None and not is_sound:
            problem = self._unusable(text[consumed:])
        good = len(key_ends)
        documents = Documents(
            keys=keys, key_ends=key_ends, values=text, value_starts=starts[:good], value_ends=ends[:good]
        )
        return documents, consumed, problem

    def _unusable(self, text: Bytes) -> InvalidDocument:
        newlines = np.flatnonzero(text == ord("\n"))
        if len(newlines) and newlines[0] > VALUE_BYTES_MAX:
            return self._too_long(self._lines + 1)
        return InvalidDocument(
            f"line {self._lines + 1} is not JSON", hint="Write one document per line, in UTF-8, and nothing else"
        )

    @staticmethod
    def _too_long(line: int) -> InvalidDocument:
        return InvalidDocument(
            f"line {line} is longer than {VALUE_BYTES_MAX} bytes",
            hint="Split the document; if the file is one large array, write one element per line (`jq -c '.[]'`)",
        )


@kernel
def _split_lines(
    text: ReadOnlyBytes,
    at_end: bool,
    lines_before: int,
    line_bytes_max: int,
    starts: Int64s,
    ends: Int64s,
    numbers: Int64s,
) -> tuple[int, int, int, bool]:
    """Cut off whole lines: how many documents, bytes and lines, and whether the line that follows is not at fault."""
    at = i64(0)
    count = 0
    lines = 0
    while at < len(text) and count < len(starts):
        newline = at
        while newline < len(text) and text[newline] != 0x0A:
            newline += 1
        if newline == len(text) and not at_end:
            break
        start, end = _trim(text, at, newline)
        if start < end:
            if end - start > line_bytes_max or not is_json(text, start, end):
                return count, at, lines, False
            starts[count] = start
            ends[count] = end
            numbers[count] = lines_before + lines + 1
            count += 1
        lines += 1
        at = min(newline + 1, len(text))
    return count, at, lines, True


@kernel_part
def _trim(text: Bytes, start: int, end: int) -> tuple[int, int]:
    while start < end and (text[start] == 0x20 or text[start] == 0x09 or text[start] == 0x0D):
        start += 1
    while end > start and (text[end - 1] == 0x20 or text[end - 1] == 0x09 or text[end - 1] == 0x0D):
        end -= 1
    return start, end


# --- exported documents -----------------------------------------------------------------------------------------------
#
# Their form is read back: keys, flags and expiry in front, and the document behind. `headwater export` writes a
# document as a JSON object that begins with what is not in the document itself:
#
# | member | what it has |
# |---|---|
# | `_key`, or `_key_base64` | the key; in base64 where it is not UTF-8 |
# | `_flags` | its flags, where they are not those that SDKs give JSON |
# | `_expiry` | when it expires, in seconds since 1970, where it does |
# | `_value`, or `_value_base64` | the document, in base64 where it is not JSON |
#
# The members of an object stand behind the first three in place of `_value`, unless one of them has a name from this
# table. Only the first members count, in this order. So a document is taken out of its line as it was put in, byte for
# byte, with nothing parsed.


KEY_MEMBER = "_key"
FLAGS_MEMBER = "_flags"
EXPIRY_MEMBER = "_expiry"
VALUE_MEMBER = "_value"
IN_BASE64 = "_base64"
MEMBERS = (
    *(KEY_MEMBER, KEY_MEMBER + IN_BASE64, FLAGS_MEMBER, EXPIRY_MEMBER, VALUE_MEMBER),
    VALUE_MEMBER + IN_BASE64,
)

NUMBERED = KeyTemplate.parse("{#}")
"""The template of a source whose documents are to be read as exported ones: errors name the number."""

_U32_MAX = 0xFFFFFFFF
_BLANK = "[ \t]*"
_HEAD = (
    rf'^(?P<head>\{{{_BLANK}"{KEY_MEMBER}(?P<key_form>{IN_BASE64})?"{_BLANK}:{_BLANK}"(?P<key>(?:[^"\\]|\\.)*)"{_BLANK}'
    rf'(?:,{_BLANK}"{FLAGS_MEMBER}"{_BLANK}:{_BLANK}(?P<flags>[0-9]{{1,10}}){_BLANK})?'
    rf'(?:,{_BLANK}"{EXPIRY_MEMBER}"{_BLANK}:{_BLANK}(?P<expiry>[0-9]{{1,10}}){_BLANK})?)'
    rf'(?:(?P<value>,{_BLANK}"{VALUE_MEMBER}(?P<value_form>{IN_BASE64})?"{_BLANK}:{_BLANK})|[,}}])'
)
_FIRST_KEY = rf'^\s*\{{\s*"{KEY_MEMBER}(?:{IN_BASE64})?"\s*:\s*"'.encode()
_HINT = f'Every line begins with {{"{KEY_MEMBER}":"…", as `headwater export` writes it; with --key lines are documents'


def begins_an_export(text: bytes) -> bool:
    """Whether the first bytes of a file are those of an exported document."""
    return bool(pc.match_substring_regex(pa.array([text], pa.binary()), pattern=_FIRST_KEY)[0].as_py())


# --- documents that bring more than a value ---------------------------------------------------------------------------


class DocumentSource(Protocol):
    """Lines of a file, or rows of a table."""

    @property
    def bytes_read(self) -> int: ...

    def batches(self) -> Iterator[Documents]: ...


class ExportedDocuments:
    """The documents that are in those of `source`, which has the key template `NUMBERED`."""

    def __init__(self, source: DocumentSource, *, unit: str, expiry: int | None = None) -> None:
        """`unit` is what a document is in the file: a line, or a row. `expiry` counts in place of their own."""
        self._source = source
        self._unit = unit
        self._expiry = expiry

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def batches(self) -> Iterator[KeptDocuments]:
        """Raises `InvalidDocument` at the first one that can't be used; those before it have been given by then."""
        for lines in self._source.batches():
            documents, problem = self._taken_out(lines)
            if len(documents):
                yield documents
            if problem is not None:
                raise problem

    def _taken_out(self, lines: Documents) -> tuple[KeptDocuments, InvalidDocument | None]:
        heads = _heads(lines)
        keys, key_ends, flaw = _keys(heads)
        good = len(key_ends)
        values, starts, ends, value_flaw = _values(lines, heads.slice(0, good))
        if len(starts) < good:
            good, flaw = len(starts), value_flaw
        expiries = _numbers(heads, "expiry", good, default=0)
        documents = KeptDocuments(
            keys=keys[: key_ends[good - 1] if good else 0],
            key_ends=key_ends[:good],
            values=values,
            value_starts=starts,
            value_ends=ends,
            flags=_numbers(heads, "flags", good, default=JSON_FLAGS),
            expiries=expiries if self._expiry is None else np.full(good, self._expiry),
        )
        if good == len(lines):
            return documents, None
        number = lines.keys[lines.key_ends[good - 1] if good else 0 : lines.key_ends[good]].tobytes().decode()
        return documents, InvalidDocument(f"{self._unit} {number}: {flaw}", hint=_HINT)


# --- heads ------------------------------------------------------------------------------------------------------------


def _heads(lines: Documents) -> pa.StructArray:
    """What stands before the documents: a group of `_HEAD` in each field, empty where it is not there."""
    # A text goes on to where the next one begins: what is between them is white space, and far behind the head.
    edges = np.append(lines.value_starts, lines.value_ends[-1:]).astype(np.int64)
    data = pa.py_buffer(np.ascontiguousarray(lines.values))
    texts = pa.LargeStringArray.from_buffers(len(lines), pa.py_buffer(edges), data)
    return pc.extract_regex(texts, pattern=_HEAD)


def _keys(heads: pa.StructArray) -> tuple[Bytes, Column, str]:
    """The keys one behind the other, their ends, and what is wrong with the first that can't be used."""
    keys = heads.field("key")
    plain = pc.and_(pc.equal(heads.field("key_form"), ""), pc.invert(pc.match_substring(keys, "\\")))
    small = pc.and_(pc.greater(pc.binary_length(keys), 0), pc.less_equal(pc.binary_length(keys), KEY_BYTES_MAX))
    if not heads.null_count and pc.all(pc.and_(plain, small)).as_py() and not _are_too_large(heads):
        content, edges = text_bytes(keys)
        return content[edges[0] : edges[-1]].copy(), edges[1:] - edges[0], ""
    found = bytearray()
    key_ends: list[int] = []
    flaw = ""
    for head in heads.to_pylist():
        try:
            found += _key(head)
        except ValueError as error:
            flaw = str(error)
            break
        key_ends.append(len(found))
    return np.frombuffer(found, dtype=np.uint8), np.array(key_ends, dtype=np.int64), flaw


def _key(head: dict[str, str] | None) -> bytes:
    """Raises a ValueError that says what is wrong."""
    if head is None:
        raise ValueError("there is no key in front")
    for name, number in ((FLAGS_MEMBER, head["flags"]), (EXPIRY_MEMBER, head["expiry"])):
        if number and int(number) > _U32_MAX:
            raise ValueError(f"{name} is larger than {_U32_MAX}")
    text = json.loads(f'"{head["key"]}"')
    try:
        key: bytes = base64.b64decode(text, validate=True) if head["key_form"] else text.encode()
    except ValueError as error:
        raise ValueError(f"its key is not {'base64' if head['key_form'] else 'valid Unicode'}") from error
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"its key is empty or longer than {KEY_BYTES_MAX} bytes")
    return key


def _are_too_large(heads: pa.StructArray) -> bool:
    names = ("flags", "expiry")
    return any((_numbers(heads, name, len(heads), default=0) > _U32_MAX).any() for name in names)


def _numbers(heads: pa.StructArray, name: str, count: int, *, default: int) -> Column:
    texts = heads.field(name)[:count]
    there = pc.if_else(pc.equal(texts, ""), pa.scalar(str(default), texts.type), texts)
    numbers: Column = there.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return numbers


# --- documents --------------------------------------------------------------------------------------------------------


def _values(lines: Documents, heads: pa.StructArray) -> tuple[Bytes, Column, Column, str]:
    """The bytes that hold the documents, where they begin and end, and what is wrong with the first that is unsound.

    There are as many as there are heads, or as stand before the one that is unsound.
    """
    count = len(heads)
    values = lines.values.copy()
    head_ends = lines.value_starts[:count] + _lengths(heads, "head")
    is_member = _lengths(heads, "value") > 0
    starts = head_ends + _lengths(heads, "value")
    ends = lines.value_ends[:count] - is_member  # without the brace that closes the line
    # The comma behind the head becomes the brace that opens the object. Where there is none it is empty.
    starts -= ~is_member & (values[head_ends] == ord("}"))
    values[starts[~is_member]] = ord("{")
    values.flags.writeable = False  # as those of other sources are, for which the kernels are compiled
    decoded = bytearray()
    forms = heads.field("value_form")
    flaw = ""
    for row in np.flatnonzero(is_member).tolist():
        try:
            value = _member(values, starts[row], ends[row], is_base64=bool(forms[row].as_py()))
        except ValueError as error:
            count, flaw = row, str(error)
            break
        if value is not None:
            starts[row] = len(values) + len(decoded)
            decoded += value
            ends[row] = len(values) + len(decoded)
    if decoded:
        values = np.frombuffer(values.tobytes() + bytes(decoded), dtype=np.uint8)
    return values, starts[:count], ends[:count], flaw


def _member(values: Bytes, start: int, end: int, *, is_base64: bool) -> bytes | None:
    """A value that has to be decoded, or None for one that stands there as it is. Raises a ValueError if unsound."""
    if not is_json(values, start, end):
        raise ValueError(f"something stands behind its {VALUE_MEMBER}")
    if not is_base64:
        return None
    text = json.loads(values[start:end].tobytes())
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its {VALUE_MEMBER}{IN_BASE64} is not base64") from error


def _lengths(heads: pa.StructArray, name: str) -> Column:
    lengths: Column = pc.binary_length(heads.field(name)).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def text_bytes(texts: pa.Array) -> tuple[ReadOnlyBytes, ReadOnlyInt64s]:
    """The bytes of large texts as they lie in memory, and where each of them begins; the last number is their end."""
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(b"" if data is None else data, dtype=np.uint8), edges

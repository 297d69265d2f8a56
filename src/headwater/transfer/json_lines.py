"""Documents from JSON lines: one document per line, checked, and returned as columns without an object per line.

Blank lines are skipped but counted, so that a number is always that of the line in the file. An unusable line ends
the reading, after the documents before it were returned. `ExportedDocuments` takes documents out of lines or table
rows that `headwater export` has written. `inputs.open_source` chooses between them.
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
    """A binary file, such as standard input."""

    def read1(self, size: int, /) -> bytes: ...


class JsonLines:
    """The documents of a file, batch by batch."""

    def __init__(self, file: ByteReader, template: KeyTemplate) -> None:
        self.bytes_read = 0
        self._file = file
        self._template = template
        self._lines = 0
        """The number of lines split off so far."""

    def batches(self) -> Iterator[Documents]:
        """Yield documents. Raises `InvalidDocument` at the first unusable line, after all documents before it."""
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
    """Split off lines. Returns how many documents, bytes and lines, and whether the next line is not invalid."""
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
# An exported document is a JSON object. It begins with the key, flags and expiry, which are not in the document itself;
# the document follows:
#
# | member | content |
# |---|---|
# | `_key`, or `_key_base64` | the key; in base64 if it is not UTF-8 |
# | `_flags` | the flags, unless they are those that SDKs use for JSON |
# | `_expiry` | when it expires, in seconds since 1970, if it does |
# | `_value`, or `_value_base64` | the document; in base64 if it is not JSON |
#
# The members of an object follow the first three directly, without `_value`, unless one of them has a name from this
# table. Only the first members count, in this order. So a document is taken out of its line as it was put in, byte for
# byte, without parsing it.


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
"""The template for a source that is read as an export: errors report the number."""

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
    """Return whether the first bytes of a file are those of an exported document."""
    return bool(pc.match_substring_regex(pa.array([text], pa.binary()), pattern=_FIRST_KEY)[0].as_py())


# --- documents that bring more than a value ---------------------------------------------------------------------------


class DocumentSource(Protocol):
    """Lines of a file, or rows of a table."""

    @property
    def bytes_read(self) -> int: ...

    def batches(self) -> Iterator[Documents]: ...


class ExportedDocuments:
    """The documents inside the exported ones of `source`, which has the key template `NUMBERED`."""

    def __init__(self, source: DocumentSource, *, unit: str, expiry: int | None = None) -> None:
        """`unit` is what holds a document in the file: a line, or a row. `expiry` replaces the documents' own."""
        self._source = source
        self._unit = unit
        self._expiry = expiry

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def batches(self) -> Iterator[KeptDocuments]:
        """Yield documents. Raises `InvalidDocument` at the first unusable one, after all documents before it."""
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
    """Return the members before each document: a field for each group of `_HEAD`, empty if it is missing."""
    # A text extends to the start of the next one: the bytes between them are white space, and far behind the head.
    edges = np.append(lines.value_starts, lines.value_ends[-1:]).astype(np.int64)
    data = pa.py_buffer(np.ascontiguousarray(lines.values))
    texts = pa.LargeStringArray.from_buffers(len(lines), pa.py_buffer(edges), data)
    return pc.extract_regex(texts, pattern=_HEAD)


def _keys(heads: pa.StructArray) -> tuple[Bytes, Column, str]:
    """Return the concatenated keys, their ends, and what is wrong with the first unusable one."""
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
    """Return the key. Raises a `ValueError` that says what is wrong."""
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
    """Return the bytes that hold the documents, their starts and ends, and what is wrong with the first invalid one.

    There are as many as heads, or as precede the first invalid one.
    """
    count = len(heads)
    values = lines.values.copy()
    head_ends = lines.value_starts[:count] + _lengths(heads, "head")
    is_member = _lengths(heads, "value") > 0
    starts = head_ends + _lengths(heads, "value")
    ends = lines.value_ends[:count] - is_member  # Without the brace that closes the line.
    # The comma after the head becomes the brace that opens the object. An empty object has no comma.
    starts -= ~is_member & (values[head_ends] == ord("}"))
    values[starts[~is_member]] = ord("{")
    values.flags.writeable = False  # Like those of other sources, for which the kernels are compiled.
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
    """Return a value that must be decoded, or None if it can stay as it is. Raises a `ValueError` if unsound."""
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
    """Return the bytes of large texts as they are in memory, the start of each, and the end of the last."""
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(b"" if data is None else data, dtype=np.uint8), edges

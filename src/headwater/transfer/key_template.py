"""Key templates: `user::{id}` uses a field of the document, `{#}` its number; `{{` and `}}` are literal braces.

A field must be the document's own, not that of a nested object, and be a string or a whole number. Kernels find the
fields in the JSON text. Rare cases, such as a name with escapes, are left to the standard library, line by line.

All sources of documents use templates for their keys. At the end of this file are generated documents for
`headwater load --generate`: small JSON objects that look like real data, and are the same for the same seed. A
document consists of its number, one of a thousand profiles that the seed determines, and a note that pads it to the
requested size. It depends only on the seed and its number, not on its batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from headwater.errors import InvalidDocument, InvalidKeyTemplate
from headwater.kernels.memory import (
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    UInt64,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    read_only,
    u64,
)
from headwater.lake.json_fields import JsonKind, JsonValues, find_members
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.transfer.set_frames import Documents

TEMPLATE_CHARS_MAX = 1024
FIELDS_MAX = 8

_TOKEN = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|(?P<stray>[{}])|(?P<text>[^{}]+)")
_HINT = "Write {#} for the number of the line, {id} for a field of the document, and {{ for a brace"
_NUMBER_DIGITS_MAX = 20


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are the same in every key."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Number:
    """The number of the document: that of its line in a file, counted from 1."""


@dataclass(frozen=True, slots=True)
class KeyField:
    """A field of the document."""

    name: str


Piece = Literal | Number | KeyField


@dataclass(frozen=True, slots=True)
class KeyTemplate:
    """A parsed template."""

    pieces: tuple[Piece, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the template uses, each once."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces if isinstance(piece, KeyField)))

    @classmethod
    def parse(cls, text: str) -> KeyTemplate:
        if len(text) > TEMPLATE_CHARS_MAX:
            raise InvalidKeyTemplate(f"the key template has more than {TEMPLATE_CHARS_MAX} characters", hint=_HINT)
        pieces: list[Piece] = []
        for match in _TOKEN.finditer(text):
            if match["stray"]:
                raise InvalidKeyTemplate(f"the key template {text!r} has a lone {match['stray']}", hint=_HINT)
            pieces.append(_piece(match, text))
        template = cls(tuple(pieces))
        if all(isinstance(piece, Literal) for piece in pieces):
            raise InvalidKeyTemplate(f"the key template {text!r} makes every key the same", hint=_HINT)
        if len(template.fields) > FIELDS_MAX:
            raise InvalidKeyTemplate(f"the key template has more than {FIELDS_MAX} fields", hint=_HINT)
        return template

    def build(
        self, text: Bytes, starts: Column, ends: Column, numbers: Column
    ) -> tuple[Bytes, Column, InvalidDocument | None]:
        """Build the keys of JSON documents, which lie in `text` from their starts to their ends.

        Returns the concatenated keys, their ends, and what is wrong with the first document that has no key; the
        keys are those of the documents before it.
        """
        found = _find_fields(self.fields, text, starts, ends, numbers)
        count = found.count
        keys = np.empty(self._bytes_max(count, found), dtype=np.uint8)
        key_ends = np.empty(count, dtype=np.int64)
        kinds, arguments, literals = self._tables()
        built = _build(
            kinds, arguments, literals, numbers, read_only(found.text), found.starts, found.ends, KEY_BYTES_MAX,
            keys, key_ends,
        )  # fmt: skip
        if built < count:
            problem = _document_error(
                numbers[built],
                f"its key would be empty or longer than {KEY_BYTES_MAX} bytes",
                hint="Use another key template",
            )
            return keys, key_ends[:built], problem
        return keys[: key_ends[-1] if count else 0], key_ends, found.problem

    def _tables(self) -> tuple[Column, Column, Bytes]:
        """Return the pieces for the kernel: the kind of each, and its literal's position or its field's index."""
        kinds = np.zeros(len(self.pieces), dtype=np.int64)
        arguments = np.zeros((len(self.pieces), 2), dtype=np.int64)
        literals = bytearray()
        for index, piece in enumerate(self.pieces):
            kinds[index] = _KINDS[type(piece)]
            if isinstance(piece, Literal):
                arguments[index] = len(literals), len(literals) + len(piece.text)
                literals += piece.text
            elif isinstance(piece, KeyField):
                arguments[index, 0] = self.fields.index(piece.name)
        return kinds, arguments, np.frombuffer(bytes(literals), dtype=np.uint8)

    def _bytes_max(self, count: int, found: _Found) -> int:
        fixed = sum(len(piece.text) if isinstance(piece, Literal) else _NUMBER_DIGITS_MAX for piece in self.pieces)
        uses = [sum(piece == KeyField(name) for piece in self.pieces) for name in self.fields]
        lengths = (found.ends - found.starts)[:, :count].clip(0, KEY_BYTES_MAX + 1).sum(axis=1)
        return count * fixed + int(np.dot(uses, lengths)) if uses else count * fixed


_KINDS: dict[type[Piece], int] = {Literal: 0, Number: 1, KeyField: 2}


def _piece(match: re.Match[str], text: str) -> Piece:
    if match["name"] is None:
        return Literal(match[0].replace("{{", "{").replace("}}", "}").encode())
    if not match["name"]:
        raise InvalidKeyTemplate(f"the key template {text!r} has an empty {{}}", hint=_HINT)
    return Number() if match["name"] == "#" else KeyField(match["name"])


def _document_error(number: int, reason: str, *, hint: str) -> InvalidDocument:
    return InvalidDocument(f"line {number}: {reason}", hint=hint)


@kernel
def _build(
    kinds: Int64s, arguments: Int64Rows, literals: ReadOnlyBytes, numbers: Int64s,
    text: ReadOnlyBytes, starts: Int64Rows, ends: Int64Rows, key_bytes_max: int, keys: Bytes, key_ends: Int64s,
) -> int:  # fmt: skip
    """Write the keys. Returns how many were written: the next one would be empty or too long."""
    at = i64(0)
    for item in range(len(key_ends)):
        start = at
        for piece in range(len(kinds)):
            if kinds[piece] == 0:
                length = arguments[piece, 1] - arguments[piece, 0]
                copy_bytes(keys, at, literals, arguments[piece, 0], length)
                at += length
            elif kinds[piece] == 1:
                at = write_number(keys, at, numbers[item])
            else:
                field = arguments[piece, 0]
                length = ends[field, item] - starts[field, item]
                if length > key_bytes_max:
                    return item
                copy_bytes(keys, at, text, starts[field, item], length)
                at += length
        if at == start or at - start > key_bytes_max:
            return item
        key_ends[item] = at
    return len(key_ends)


@kernel_part
def write_number(target: Bytes, at: int, number: int) -> int:
    """Write a number in decimal. Returns the position after it."""
    digits = 1
    rest = number // 10
    while rest > 0:
        digits += 1
        rest //= 10
    for i in range(digits - 1, -1, -1):
        target[at + i] = 0x30 + number % 10
        number //= 10
    return at + digits


# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The positions of the fields: a row for each field, a column for each document."""

    text: Bytes
    starts: Column
    ends: Column
    count: int
    """How many documents have all fields, up to the first that does not."""
    problem: InvalidDocument | None = None


def _find_fields(fields: tuple[str, ...], text: Bytes, starts: Column, ends: Column, numbers: Column) -> _Found:
    count = len(starts)
    if not fields:
        nowhere = np.zeros((0, count), dtype=np.int64)
        return _Found(text=text, starts=nowhere, ends=nowhere, count=count)
    documents = JsonValues(read_only(text), np.full(count, JsonKind.OBJECT, dtype=np.uint8), starts, ends)
    found = find_members(documents, fields)
    spelled = bytearray()
    problem: InvalidDocument | None = None
    for row, field in enumerate(fields):
        is_plain = found.values(row).is_one_of(JsonKind.STRING, JsonKind.INTEGER)
        for item in np.flatnonzero(~is_plain[:count]):
            try:
                value = _field_by_json(text[starts[item] : ends[item]].tobytes(), field, numbers[item])
            except InvalidDocument as error:
                count, problem = int(item), error
                break
            found.starts[row, item] = len(text) + len(spelled)
            spelled += value
            found.ends[row, item] = len(text) + len(spelled)
    if spelled:
        text = np.concatenate((text, np.frombuffer(bytes(spelled), dtype=np.uint8)))
    return _Found(text=text, starts=found.starts, ends=found.ends, count=count, problem=problem)


def _field_by_json(document: bytes, field: str, number: int) -> bytes:
    """Return a field that is written with escapes. Raises `InvalidDocument` if it is missing or has another type."""
    hint = f"Every document needs a field {field!r} that is a string or a whole number; or use another key template"
    try:
        value: Any = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise _document_error(number, f"the document is too much for Python's JSON: {error}", hint=hint) from error
    if not isinstance(value, dict) or field not in value:
        raise _document_error(number, f"the document has no field {field!r}", hint=hint)
    value = value[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _document_error(number, f"the field {field!r} is neither a string nor a whole number", hint=hint)
    try:
        return str(value).encode()
    except UnicodeEncodeError as error:
        raise _document_error(number, f"the field {field!r} is not valid Unicode", hint=hint) from error


# --- generated documents --------------------------------------------------------------------------------------------


VALUE_BYTES = 200
"""The default size of a document."""

VALUE_BYTES_MIN = 48
"""Room for the longest number, and a note of a few letters."""

BATCH_BYTES = 512 * 1024
BATCH_DOCUMENTS_MAX = 4096
PROFILES = 1024

_FIRST_NAMES = (
    "Ada", "Alan", "Amara", "Anna", "Barbara", "Chen", "Edsger", "Elif", "Emmy", "Fatima", "Frances", "Grace", "Hedy",
    "Jean", "Kateryna", "Radia",
)  # fmt: skip
_LAST_NAMES = (
    "Allen", "Bartik", "Berg", "Costa", "Diaz", "Dubois", "Garcia", "Haddad", "Hopper", "Ivanova", "Kim", "Lovelace",
    "Nguyen", "Okafor", "Sato",
)  # fmt: skip
_CITIES = (
    "Accra", "Athens", "Bergen", "Bilbao", "Cork", "Dakar", "Delft", "Graz", "Hanoi", "Kyoto", "Lyon", "Oslo", "Porto",
    "Quito", "Riga", "Zurich",
)  # fmt: skip
_WORDS = (
    "a", "about", "address", "again", "and", "asked", "at", "boxes", "by", "called", "delivery", "done", "door", "for",
    "gift", "invoice", "late", "left", "Monday", "new", "noon", "not", "on", "order", "paid", "please", "refund",
    "sent", "side", "the", "two", "use", "was", "with", "wrapped", "yet",
)  # fmt: skip
_LONGEST_START = '{"id":18446744073709551615'
_NOTE = ',"note":"'
_END = '"}'


class GeneratedDocuments:
    """`count` documents, batch by batch, numbered from 1."""

    def __init__(self, count: int, template: KeyTemplate, *, value_bytes: int = VALUE_BYTES, seed: int = 0) -> None:
        others = [name for name in template.fields if name != "id"]
        if others:
            raise InvalidKeyTemplate(f"generated documents have no field {others[0]!r}", hint="Use {#} or {id}")
        # The id of a generated document is its number, so it need not be searched for.
        self._template = KeyTemplate(
            tuple(Number() if isinstance(piece, KeyField) else piece for piece in template.pieces)
        )
        self._count = count
        self._value_bytes = max(value_bytes, VALUE_BYTES_MIN)
        random = Random(seed)
        self._salt = random.getrandbits(64)
        profiles = [_profile(random, self._value_bytes) for _ in range(PROFILES)]
        self._profiles = np.frombuffer(b"".join(profiles), dtype=np.uint8)
        self._profile_ends = np.cumsum([len(profile) for profile in profiles], dtype=np.int64)
        self._notes = _notes(random, self._value_bytes)

    def batches(self) -> Iterator[Documents]:
        size = max(1, min(BATCH_DOCUMENTS_MAX, BATCH_BYTES // self._value_bytes))
        for first in range(1, self._count + 1, size):
            yield self._batch(np.arange(first, min(first + size, self._count + 1)))

    def _batch(self, numbers: Column) -> Documents:
        values = np.empty(len(numbers) * self._value_bytes, dtype=np.uint8)
        _generate(numbers, u64(self._salt), self._value_bytes, self._profiles, self._profile_ends, self._notes, values)
        ends = np.arange(1, len(numbers) + 1) * self._value_bytes
        starts = ends - self._value_bytes
        keys, key_ends, problem = self._template.build(values, starts, ends, numbers)
        if problem is not None:
            raise problem
        return Documents(keys=keys, key_ends=key_ends, values=values, value_starts=starts, value_ends=ends)


def _profile(random: Random, value_bytes: int) -> bytes:
    """Return the text between the number and the note: as many fields as fit."""
    first, last = random.choice(_FIRST_NAMES), random.choice(_LAST_NAMES)
    fields: dict[str, Any] = {
        "type": "user",
        "name": f"{first} {last}",
        "age": random.randint(18, 90),
        "city": random.choice(_CITIES),
        "active": random.random() < 0.8,
        "balance": random.randint(0, 999_999) / 100,
        "email": f"{first}.{last}{random.randint(1, 999)}@example.com".lower(),
        "since": f"{random.randint(2010, 2025)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}",
        "tags": sorted(random.sample(_WORDS, 2)),
    }
    room = value_bytes - len(_LONGEST_START) - len(_NOTE) - len(_END)
    profile = ""
    for name, value in fields.items():
        field = "," + json.dumps({name: value}, separators=(",", ":"))[1:-1]
        if len(profile) + len(field) > room:
            break
        profile += field
    return (profile + _NOTE).encode()


def _notes(random: Random, value_bytes: int) -> Bytes:
    """Return a long text, from which every note is cut."""
    spare_bytes = 4096
    words = (random.choice(_WORDS) for _ in range((value_bytes + spare_bytes) // 2))
    return np.frombuffer(" ".join(words).encode()[: value_bytes + spare_bytes], dtype=np.uint8)


@kernel
def _generate(
    numbers: Int64s,
    salt: UInt64,
    value_bytes: int,
    profiles: ReadOnlyBytes,
    profile_ends: Int64s,
    notes: ReadOnlyBytes,
    values: Bytes,
) -> None:
    for item in range(len(numbers)):
        # SplitMix64: consecutive numbers get unrelated profiles and notes.
        dice = u64(salt) + u64(numbers[item]) * u64(0x9E3779B97F4A7C15)
        dice = (dice ^ (dice >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        dice = (dice ^ (dice >> u64(27))) * u64(0x94D049BB133111EB)
        dice ^= dice >> u64(31)
        at = i64(item * value_bytes)
        end = at + value_bytes
        for letter in b'{"id":':
            values[at] = letter
            at += 1
        at = write_number(values, at, numbers[item])
        profile = i64(dice >> u64(32)) % len(profile_ends)
        profile_at = profile_ends[profile - 1] if profile else 0
        profile_bytes = profile_ends[profile] - profile_at
        copy_bytes(values, at, profiles, profile_at, profile_bytes)
        at += profile_bytes
        note_bytes = end - 2 - at
        note_at = i64(dice & u64(0xFFFFFFFF)) % (len(notes) - note_bytes)
        copy_bytes(values, at, notes, note_at, note_bytes)
        values[end - 2] = 0x22
        values[end - 1] = 0x7D

"""Documents to try things with: small JSON objects that look like real data, the same for the same seed.

A document is its number, a profile out of a thousand that the seed decides, and a note that fills it up to the
size asked for. It depends on the seed and its number alone, not on the batch it is in.

`headwater load --generate` is the only one that uses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from headwater.errors import InvalidKeyTemplate
from headwater.kernels.memory import Bytes, Column, Int64s, ReadOnlyBytes, UInt64, copy_bytes, i64, kernel, u64
from headwater.transfer.key_template import KeyField, KeyTemplate, Number, write_number
from headwater.transfer.set_frames import Documents

VALUE_BYTES = 200
"""The size of a document, by default."""

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
        # The id of a generated document is its number, so there is no need to look for it.
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
    """What stands between the number and the text of the note: as many fields as there is room for."""
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
    """A long text; every note is a piece of it."""
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
        # SplitMix64: numbers in a row take profiles and notes that have nothing to do with each other.
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

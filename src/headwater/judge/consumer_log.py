"""What a consumer says it holds, line by line, and how that differs from the bucket.

A line is a JSON object. All that a consumer must write is what it did:

    {"op": "set", "key": "k", "seqno": 7, "value": {"n": 1}}     or "mutation"; "cas" may stand for "value"
    {"op": "delete", "key": "k", "seqno": 8}                     or "deletion", "expiration"
    {"op": "rollback", "vbucket": 3, "seqno": 5}                 everything of the vbucket above the seqno is undone

The judge undoes a rollback in its own log, so a consumer need not keep versions to be judged. Lines that are no JSON
object with an "op" are the consumer's own log, and passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.errors import InvalidInput
from headwater.judge.plan import KEY_PREFIX
from headwater.phrases import printable
from headwater.protocol.numbers import vbucket_of

LINE_BYTES_MAX = 1024 * 1024
LINES_MAX = 1_000_000
SHOWN_CHARS = 100
_U64_MAX = 2**64 - 1
_OPS = {
    "set": "set",
    "mutation": "set",
    "delete": "delete",
    "deletion": "delete",
    "expiration": "delete",
    "rollback": "rollback",
    # What our own `tail` prints besides.
    "collection_created": "pass",
    "collection_dropped": "pass",
    "collection_modified": "pass",
    "scope_created": "pass",
    "scope_dropped": "pass",
}


@dataclass(frozen=True, slots=True)
class Held:
    """One version of a document. None is for what is not known of it."""

    seqno: int
    value: Any = None
    cas: int | None = None

    def __str__(self) -> str:
        text = json.dumps(self.value, ensure_ascii=False)
        return f"seqno {self.seqno}, {printable(text if len(text) <= SHOWN_CHARS else f'{text[:SHOWN_CHARS]}…')}"

    def equals(self, held: Held) -> bool:
        """Whether a consumer's version is this one, by all that it says of it; by the seqno if it says nothing else."""
        if held.value is None and held.cas is None:
            return held.seqno == self.seqno
        return held.value in (None, self.value) and held.cas in (None, self.cas)


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    seqno: int
    held: Held | None


class ConsumerLog:
    """All that a consumer has written, less what it has undone."""

    def __init__(self, vbuckets: int) -> None:
        self._entries: list[list[_Entry]] = [[] for _ in range(vbuckets)]
        self.lines = 0
        self.passed_over = 0
        """Lines of another kind."""
        self.first_passed_over = ""
        self.rollbacks = 0

    def read(self, line: bytes) -> None:
        """Take in a line. Raises `InvalidInput` if it has an "op" and is malformed, or is beyond a limit."""
        self.lines += 1
        if self.lines > LINES_MAX:
            raise InvalidInput(f"the consumer has written more than {LINES_MAX:,} lines", hint="Check what it repeats")
        if len(line) > LINE_BYTES_MAX:
            raise InvalidInput(f"line {self.lines} has more than {LINE_BYTES_MAX:,} bytes", hint="End each line")
        members = _members(line)
        if members is None:
            if line.strip():
                self.passed_over += 1
                self.first_passed_over = self.first_passed_over or printable(
                    line.decode(errors="replace")[:SHOWN_CHARS]
                )
            return
        op = _OPS.get(members["op"]) if isinstance(members["op"], str) else None
        if op is None:
            raise self._bad(f'"op" is {members["op"]!r}', "Write set, delete or rollback")
        if op == "pass":
            return
        seqno = self._number(members, "seqno", _U64_MAX)
        if op == "rollback":
            vbucket = self._number(members, "vbucket", len(self._entries) - 1)
            self.rollbacks += 1
            self._entries[vbucket] = [entry for entry in self._entries[vbucket] if entry.seqno <= seqno]
            return
        key = members.get("key")
        if not isinstance(key, str):
            raise self._bad("there is no text as its key", 'Write "key": "…"')
        if not key.startswith(KEY_PREFIX):
            return
        vbucket = int(vbucket_of(key.encode(errors="surrogatepass"), len(self._entries)))
        if "vbucket" in members and members["vbucket"] != vbucket:
            raise self._bad(f"the key {key!r} belongs to vbucket {vbucket}", "Leave the vbucket out, or correct it")
        held = None
        if op == "set":
            cas = self._number(members, "cas", _U64_MAX) if members.get("cas") is not None else None
            held = Held(seqno, _value(members.get("value")), cas)
        self._entries[vbucket].append(_Entry(key, seqno, held))

    def _number(self, members: Mapping[str, Any], name: str, most: int) -> int:
        """A number, which may be text: JavaScript's have 53 bits."""
        given = members.get(name)
        number = int(given) if isinstance(given, str) and given.isdecimal() and len(given) <= 20 else given
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
            raise self._bad(f'"{name}" is {given!r}', f"Write a number from 0 to {most}")
        return number

    def _bad(self, reason: str, hint: str) -> InvalidInput:
        return InvalidInput(f"line {self.lines} of the consumer: {reason[:SHOWN_CHARS]}", hint=hint)

    def documents(self) -> dict[str, Held]:
        """What the consumer holds: of each key what it wrote last."""
        last = {entry.key: entry.held for entries in self._entries for entry in entries}
        return {key: held for key, held in last.items() if held is not None}

    def reached(self) -> list[int]:
        """The highest seqno of each vbucket."""
        return [max((entry.seqno for entry in entries), default=0) for entries in self._entries]


def _members(line: bytes) -> dict[str, Any] | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        members = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) and "op" in members else None


def _value(given: Any) -> Any:
    """A consumer that does not look into documents may write one as text."""
    if isinstance(given, str):
        try:
            return json.loads(given)
        except (ValueError, RecursionError):
            pass
    return given


# --- against the bucket -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that the bucket and the consumer do not hold alike. None: it is not there."""

    key: str
    vbucket: int
    expected: Held | None
    found: Held | None

    def __str__(self) -> str:
        return (
            f"{self.key} in vbucket {self.vbucket}: the bucket has {self.expected or 'no such document'}; "
            f"the consumer has {self.found or 'no such document'}"
        )


def differences(truth: Mapping[str, Held], found: Mapping[str, Held], vbuckets: int) -> Iterator[Difference]:
    """Every document that differs, by vbucket and key."""
    keys = ((int(vbucket_of(key.encode(), vbuckets)), key) for key in truth.keys() | found.keys())
    for vbucket, key in sorted(keys):
        expected, held = truth.get(key), found.get(key)
        if expected is None or held is None:
            if expected is not held:
                yield Difference(key, vbucket, expected, held)
        elif not expected.equals(held):
            yield Difference(key, vbucket, expected, held)

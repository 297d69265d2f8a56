"""What a table holds, and how a file stores it: as a whole, or as the difference from an earlier state.

The whole state of 1,024 vbuckets takes 20 KB, most of which are vbuuids that hardly ever change: at a batch every five
seconds that is 350 MB a day. The difference between two states takes less than a tenth of it.

`delta_log` decides which of the two a commit has, and finds the other one. No other module reads or writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Self
from zlib import compress, decompressobj

from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset

_OTHERS_SHARE = 8
"""If more than one in this many vbuckets has changed its branch, the state is written as a whole."""
_GZIP, _GZIP_OR_ZLIB = 31, 47
"""Parameters of zlib. Files use gzip, which has a checksum and which people can unpack; earlier versions had zlib's own
format in commits."""
_STATE_BYTES_MAX = 256 * 1024 * 1024
"""The limit for reading a state, which takes some hundred bytes for each vbucket and collection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedTotals:
    """What has been landed since the tables were created."""

    rows: int = 0
    rollbacks: int = 0
    """Of vbuckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a bucket is landed: everything, or these scopes and collections; and which rows (`chosen_rows`)."""

    scopes: tuple[str, ...] = ()
    collections: tuple[str, ...] = ()
    system: bool = True
    """Whether system records are included. Earlier versions always included them."""
    where: str = ""
    """The condition that documents must meet; empty for none."""

    @classmethod
    def of(cls, scopes: Iterable[str], collections: Iterable[object], *, system: bool = True, where: str = "") -> Self:
        return cls(
            scopes=tuple(sorted(scopes)), collections=tuple(sorted(map(str, collections))), system=system, where=where
        )

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> Self:
        """Convert from the form in a commit."""
        return cls.of(note["scopes"], note["collections"], system=note.get("system", True), where=note.get("where", ""))

    @property
    def is_of_all(self) -> bool:
        """Whether no scope and no collection is named."""
        return not self.scopes and not self.collections

    def __str__(self) -> str:
        parts = [
            f"the {what} {', '.join(names)}"
            for what, names in (("scopes", self.scopes), ("collections", self.collections))
            if names
        ]
        named = " and ".join(parts) or "all collections"
        named += "" if self.system else ", without records of the system"
        return f"{named}, where {self.where}" if self.where else named


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """What a table holds, according to its newest commit."""

    offsets: Offsets
    """The offset of every vbucket up to which the table has rows: the end of a snapshot, on its branch."""
    batch: int = -1
    """The last batch that the table holds."""
    as_of_s: float | None = None
    """Everything that was written to the bucket before this time is in the table; None if unknown."""
    collections: Mapping[int, str] = field(default_factory=dict)
    """Of `changes`: collection id → the name of its tables. An id keeps its tables for ever."""
    rollbacks: Mapping[int, int] | None = None
    """Of `changes`: by vbucket, the last seqno that the rollbacks of the newest batch have kept. None in commits of
    versions that did not record it."""
    undone: int | None = None
    """Of `changes`: how many rows the rollbacks of the newest batch have made void. None if not recorded."""
    totals: LandedTotals | None = None
    """Of `changes`, since it was created; None if an earlier version created it and did not count."""
    selection: Selection | None = None
    """Of `changes`: what of the bucket is landed; None if an earlier version created it."""
    tidied_s: float = 0.0
    """Of `changes`: when old files were last deleted."""
    writer: str = ""
    """Of `changes`: the landing that committed the last batch; empty in commits of earlier versions."""

    def encode(self) -> bytes:
        return _pack({"offsets": self.offsets.to_json(), **self._members()}, level=1)

    @classmethod
    def decode(cls, members: Mapping[str, Any]) -> Self:
        return cls._of(Offsets.from_json(members["offsets"]), members)

    def encode_since(self, earlier: TableState, file: str) -> bytes | None:
        """Encode the difference from an earlier state, which `file` has as a whole. Returns None if it is not
        worthwhile because most has changed."""
        difference = _last_difference(earlier.offsets, self.offsets)
        if difference is None:
            return None
        before = earlier._members()
        changed = {name: value for name, value in self._members().items() if value != before[name]}
        return _pack({"since": file, "offsets": difference, **changed}, level=9)

    @classmethod
    def decode_since(cls, members: Mapping[str, Any], earlier: TableState) -> Self:
        return cls._of(_changed(earlier.offsets, members["offsets"]), {**earlier._members(), **members})

    def _members(self) -> dict[str, Any]:
        """Return all members but the offsets, for JSON, which turns number keys into texts."""
        return {
            "batch": self.batch,
            "as_of_s": self.as_of_s,
            "collections": dict(self.collections),
            "rollbacks": None if self.rollbacks is None else dict(self.rollbacks),
            "undone": self.undone,
            "totals": None if self.totals is None else asdict(self.totals),
            "selection": None if self.selection is None else asdict(self.selection),
            "tidied_s": self.tidied_s,
            "writer": self.writer,
        }

    @classmethod
    def _of(cls, offsets: Offsets, members: Mapping[str, Any]) -> Self:
        rollbacks, totals, selection = (members.get(name) for name in ("rollbacks", "totals", "selection"))
        return cls(
            offsets=offsets,
            batch=members.get("batch", -1),
            as_of_s=members.get("as_of_s"),
            collections=_int_keys(members["collections"]),
            rollbacks=None if rollbacks is None else _int_keys(rollbacks),
            undone=members.get("undone"),
            totals=None if totals is None else LandedTotals(**totals),
            selection=None if selection is None else Selection.of_note(selection),
            tidied_s=members.get("tidied_s", 0.0),
            writer=members.get("writer", ""),
        )


def _pack(members: Mapping[str, Any], *, level: int) -> bytes:
    return compress(json.dumps(members, separators=(",", ":")).encode(), level, _GZIP)


def unpack_state(data: bytes) -> dict[str, Any]:
    stream = decompressobj(_GZIP_OR_ZLIB)
    text = stream.decompress(data, _STATE_BYTES_MAX)
    if not stream.eof:
        raise ValueError("it ends early, or is too large")
    members = json.loads(text)
    if not isinstance(members, dict):
        raise ValueError("a state has members")
    return members


def _difference(earlier: Offsets, now: Offsets) -> dict[str, Any] | None:
    """Return the difference. A vbucket that continues in its branch, as nearly always, is two small numbers, which
    compress well: the step from the vbucket before, and the growth of its seqno. None if too many others have changed.
    """
    steps, grown, others, last = [], [], {}, 0
    for vbucket in now.vbuckets:
        at, before = now[vbucket], earlier.get(vbucket)
        if at == before:
            continue
        if before is not None and at.is_whole and not at.purge_seqno and at.vbuuid == before.vbuuid:
            steps.append(vbucket - last)
            grown.append(at.seqno - before.seqno)
            last = vbucket
        else:
            others[vbucket] = at
    if len(others) * _OTHERS_SHARE > len(now.vbuckets):
        return None
    gone = [vbucket for vbucket in earlier if vbucket not in now]
    return {"steps": steps, "grown": grown, "others": Offsets(now.bucket_uuid, others).to_json(), "gone": gone}


_last: tuple[Offsets, Offsets, dict[str, Any] | None] | None = None
"""The last difference: all tables of a merge commit the same one, and there may be hundreds of them."""


def _last_difference(earlier: Offsets, now: Offsets) -> dict[str, Any] | None:
    global _last
    if (last := _last) is None or last[0] != earlier or last[1] != now:
        _last = last = earlier, now, _difference(earlier, now)
    return last[2]


def _changed(earlier: Offsets, difference: Mapping[str, Any]) -> Offsets:
    """Apply a difference to the earlier offsets."""
    offsets = dict(earlier.offsets)
    for gone in difference["gone"]:
        del offsets[gone]
    for vbucket, grown in zip(accumulate(difference["steps"]), difference["grown"], strict=True):
        before = offsets[VBucketId(vbucket)]
        offsets[VBucketId(vbucket)] = StreamOffset.whole(before.vbuuid, Seqno(before.seqno + grown))
    others = Offsets.from_json(difference["others"])
    return Offsets(others.bucket_uuid, {**offsets, **others.offsets})


def _int_keys(mapping: Mapping[str | int, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in mapping.items()}

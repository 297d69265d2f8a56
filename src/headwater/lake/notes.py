"""Notes beside the tables, in the lake's own folder: how `verify` last judged them, and how the landing stands.

The tables are the only memory of a landing, and nothing here changes that: a note may be missing, old or damaged, and
then what it would say is unknown. Notes are for people who look at a lake that another process, or none, writes to.
`headwater verify` and `headwater.spark.verify` keep the verdict, `LandingQuery` its own state, and the lake's page and
notebooks show both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headwater.errors import LakeError
from headwater.lake.location import OWN_FOLDER, Location
from headwater.lake.verify import Verification

NOTE_BYTES_MAX = 64 * 1024
FINDINGS_NOTED_MAX = 20
_SENTENCE_CHARS_MAX = 500
LANDING_EVERY_S = 5.0
"""How often a landing that runs says so. Beside a batch's commit that is nothing, in an object store as well."""
LANDING_SILENT_S = 30.0
"""A landing that has said nothing for so long does not run any more, or can't write."""
_VERDICT = f"{OWN_FOLDER}/verified.json"
_LANDING = f"{OWN_FOLDER}/landing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found."""

    time_s: float
    """When it had ended."""
    is_equal: bool
    sentence: str
    landed: int
    pending: int
    differing: int
    compared: str
    """What was looked at, such as "all collections"."""
    findings: tuple[str, ...] = ()
    """The first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingNote:
    """How a landing stood when it last said so."""

    time_s: float
    started_s: float
    source: str
    """The address of the bucket, with no user in it."""
    bucket: str
    host: str
    every_s: float | None
    """None where it ends when all is landed."""
    is_running: bool
    failure: str | None = None
    """What has ended it, if that was no order."""
    page: str | None = None
    """Where its own page is."""
    node_page: str | None = None
    """The dashboard of the node that it reads from, where that is one of ours."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """The members of `LandingStatus`."""


def keep_verdict(location: Location, found: Verification, *, compared: str) -> str | None:
    """Note what `verify` found. Returns why it could not be noted: a user who may read a lake need not be allowed to
    write to it, and the verdict is no less true."""
    sentences = tuple(one.sentence[:_SENTENCE_CHARS_MAX] for one in found.findings[:FINDINGS_NOTED_MAX])
    verdict = Verdict(
        time_s=time.time(),
        is_equal=found.is_equal,
        sentence=found.sentence,
        landed=found.landed,
        pending=found.pending,
        differing=found.differing,
        compared=compared,
        findings=sentences,
    )
    try:
        location.write(_VERDICT, json.dumps(asdict(verdict)).encode())
    except (OSError, LakeError) as error:
        return f"the verdict could not be noted in {location.uri}: {error}"
    return None


def read_verdict(location: Location) -> Verdict | None:
    """What `verify` found last; None where that is not known."""
    members = _read(location, _VERDICT)
    try:
        return None if members is None else Verdict(**{**members, "findings": tuple(members["findings"])})
    except (TypeError, KeyError):
        return None


def keep_landing(location: Location, note: LandingNote) -> None:
    """Note how a landing stands. Raises `LakeError` or `OSError` where the lake can't be written."""
    location.write(_LANDING, json.dumps(asdict(note)).encode())


def read_landing(location: Location) -> LandingNote | None:
    """What the last landing said of itself; None where that is not known."""
    members = _read(location, _LANDING)
    try:
        return None if members is None else LandingNote(**members)
    except TypeError:
        return None


def _read(location: Location, path: str) -> dict[str, Any] | None:
    try:
        with location.open_input(path) as file:
            if file.size() > NOTE_BYTES_MAX:
                return None
            members = json.loads(file.read())
    except (OSError, ValueError, LakeError):
        return None
    return members if isinstance(members, dict) else None
